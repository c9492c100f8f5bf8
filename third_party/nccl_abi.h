// The part of NCCL that fastsync calls: libnccl.so.2, version 2.18 and later.
//
// Facts from NVIDIA's published NCCL API reference (docs.nvidia.com/deeplearning/nccl) and from its released versions,
// written by us in our own words. tests/cpp/device/abi_test.cc holds every size, offset, value and signature against the
// vendor's nccl.h where it is given one. Enumerations are ints, as in cuda_abi.h.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#include "cuda_abi.h"

namespace fastsync::nccl {

using Result = int;
using Comm = struct CommObject*;
using Stream = cuda::Stream;  // a cudaStream_t is a CUstream

inline constexpr Result kSuccess = 0;
inline constexpr Result kUnhandledCudaError = 1;
inline constexpr Result kSystemError = 2;
inline constexpr Result kInternalError = 3;
inline constexpr Result kInvalidArgument = 4;
inline constexpr Result kInvalidUsage = 5;
inline constexpr Result kRemoteError = 6;
inline constexpr Result kInProgress = 7;
// Since 2.30. Until then 8 was "number of results": never count on that one.
inline constexpr Result kTimeout = 8;

// Buckets travel as bytes: broadcast, send and receive do no arithmetic.
inline constexpr int kUint8 = 1;

// Passed by value to every function that joins a communicator.
struct UniqueId {
  char internal[128];
};

inline constexpr std::uint32_t kConfigMagic = 0xcafebeef;
inline constexpr int kConfigUndefined = INT_MIN;

// How a communicator is to behave. The struct describes itself: NCCL copies as many bytes as `size` says and knows of
// them, and takes its own default for every field that is newer than `version`, and for every field left undefined. So
// this one ends where 2.27 ended, and set_config_version() cuts it further for an older library.
struct Config {
  std::size_t size = 72;
  std::uint32_t magic = kConfigMagic;
  std::uint32_t version = 22700;
  int blocking = kConfigUndefined;
  int cga_cluster_size = kConfigUndefined;
  int min_ctas = kConfigUndefined;
  int max_ctas = kConfigUndefined;
  const char* net_name = nullptr;
  int split_share = kConfigUndefined;
  int traffic_class = kConfigUndefined;  // 2.26, in what was padding
  const char* comm_name = nullptr;       // 2.27, as all that follow
  int collnet_enable = kConfigUndefined;
  int cta_policy = kConfigUndefined;
  int shrink_share = kConfigUndefined;
  int nvls_ctas = kConfigUndefined;
};

// `runtime_version` is what ncclGetVersion said.
inline void set_config_version(Config& config, int runtime_version) noexcept {
  const bool has_names = runtime_version >= 22700;
  config.size = has_names ? 72 : 48;
  config.version = has_names ? 22700 : 21800;
}

inline constexpr int kShrinkDefault = 0;
inline constexpr int kShrinkAbort = 1;  // also ends what the communicator has in flight

}  // namespace fastsync::nccl

// X(symbol, type): every version from 2.18 on exports these.
#define FASTSYNC_NCCL_REQUIRED(X)                                                                             \
  X(ncclGetVersion, Result(int* version))                                                                     \
  X(ncclGetUniqueId, Result(UniqueId* id))                                                                    \
  X(ncclCommInitRankConfig, Result(Comm* comm, int ranks, UniqueId id, int rank, Config* config))             \
  X(ncclCommFinalize, Result(Comm comm))                                                                      \
  X(ncclCommDestroy, Result(Comm comm))                                                                       \
  X(ncclCommAbort, Result(Comm comm))                                                                         \
  X(ncclCommGetAsyncError, Result(Comm comm, Result* error))                                                  \
  X(ncclCommSplit, Result(Comm comm, int color, int key, Comm* out, Config* config))                          \
  X(ncclGetErrorString, const char*(Result result))                                                           \
  X(ncclGetLastError, const char*(Comm comm))                                                                 \
  X(ncclGroupStart, Result())                                                                                 \
  X(ncclGroupEnd, Result())                                                                                   \
  X(ncclBroadcast,                                                                                            \
    Result(const void* send, void* receive, std::size_t count, int type, int root, Comm comm, Stream stream)) \
  X(ncclSend, Result(const void* send, std::size_t count, int type, int peer, Comm comm, Stream stream))      \
  X(ncclRecv, Result(void* receive, std::size_t count, int type, int peer, Comm comm, Stream stream))

// Newer than 2.18: null where the library is older. NcclLibrary::Features says which there are.
#define FASTSYNC_NCCL_OPTIONAL(X)                                                                             \
  X(ncclMemAlloc, Result(void** address, std::size_t nbytes))                              /* 2.19 */         \
  X(ncclMemFree, Result(void* address))                                                    /* 2.19 */         \
  X(ncclCommRegister, Result(Comm comm, void* address, std::size_t nbytes, void** handle)) /* 2.19 */         \
  X(ncclCommDeregister, Result(Comm comm, void* handle))                                   /* 2.19 */         \
  X(ncclCommShrink, Result(Comm comm, int* exclude, int exclude_count, Comm* out, Config* config, int flags)) \
  X(ncclCommRevoke, Result(Comm comm, int flags)) /* shrink: 2.27, revoke: 2.28.9 */
