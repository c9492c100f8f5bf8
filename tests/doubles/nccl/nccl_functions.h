// Every function that this double exports, once, by the release that first had it: X(result, name, (parameters)).
//
// exports.cc declares what it defines from these lists, so that a definition cannot differ from its line here; abi_check.cc
// compares each line with the vendor's declaration. Both use NCCL's type names, each with its own types behind them.
#pragma once

#define FASTSYNC_NCCL_FUNCTIONS_BEFORE_2_18(X)                                                                    \
  X(ncclResult_t, ncclGetVersion, (int* version))                                                                 \
  X(ncclResult_t, ncclGetUniqueId, (ncclUniqueId * id))                                                           \
  X(ncclResult_t, ncclCommInitRank, (ncclComm_t * comm, int nranks, ncclUniqueId id, int rank))                   \
  X(ncclResult_t, ncclCommInitRankConfig,                                                                         \
    (ncclComm_t * comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t* config))                             \
  X(ncclResult_t, ncclCommFinalize, (ncclComm_t comm))                                                            \
  X(ncclResult_t, ncclCommDestroy, (ncclComm_t comm))                                                             \
  X(ncclResult_t, ncclCommAbort, (ncclComm_t comm))                                                               \
  X(ncclResult_t, ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t * error))                                 \
  X(ncclResult_t, ncclCommCount, (const ncclComm_t comm, int* count))                                             \
  X(ncclResult_t, ncclCommCuDevice, (const ncclComm_t comm, int* device))                                         \
  X(ncclResult_t, ncclCommUserRank, (const ncclComm_t comm, int* rank))                                           \
  X(const char*, ncclGetErrorString, (ncclResult_t result))                                                       \
  X(const char*, ncclGetLastError, (ncclComm_t comm))                                                             \
  X(ncclResult_t, ncclGroupStart, ())                                                                             \
  X(ncclResult_t, ncclGroupEnd, ())                                                                               \
  X(ncclResult_t, ncclBroadcast,                                                                                  \
    (const void* source, void* target, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm,             \
     cudaStream_t stream))                                                                                        \
  X(ncclResult_t, ncclAllGather,                                                                                  \
    (const void* source, void* target, size_t count, ncclDataType_t dtype, ncclComm_t comm, cudaStream_t stream)) \
  X(ncclResult_t, ncclSend,                                                                                       \
    (const void* source, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm, cudaStream_t stream))     \
  X(ncclResult_t, ncclRecv,                                                                                       \
    (void* target, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm, cudaStream_t stream))

#define FASTSYNC_NCCL_FUNCTIONS_2_18_1(X) \
  X(ncclResult_t, ncclCommSplit, (ncclComm_t comm, int color, int key, ncclComm_t* split, ncclConfig_t* config))

#define FASTSYNC_NCCL_FUNCTIONS_2_19_3(X)                                                                \
  X(ncclResult_t, ncclMemAlloc, (void** pointer, size_t nbytes))                                         \
  X(ncclResult_t, ncclMemFree, (void* pointer))                                                          \
  X(ncclResult_t, ncclCommRegister, (const ncclComm_t comm, void* buffer, size_t nbytes, void** handle)) \
  X(ncclResult_t, ncclCommDeregister, (const ncclComm_t comm, void* handle))

#define FASTSYNC_NCCL_FUNCTIONS_2_27_3(X) \
  X(ncclResult_t, ncclCommShrink,         \
    (ncclComm_t comm, int* excluded, int count, ncclComm_t* shrunk, ncclConfig_t* config, int flags))

#define FASTSYNC_NCCL_FUNCTIONS_2_28_9(X) X(ncclResult_t, ncclCommRevoke, (ncclComm_t comm, int flags))
