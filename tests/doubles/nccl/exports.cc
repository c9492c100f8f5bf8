// What the library exports: NCCL's names, and the marker by which a double is known.
//
// Every call is counted in the journal and asked of the fault plan. Functions that the chosen version does not have are
// not found by dlsym(): their symbols resolve to nothing.
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "doubles/nccl/calls.h"
#include "doubles/nccl/communicator.h"
#include "doubles/nccl/device.h"
#include "doubles/nccl/fake_nccl_internal.h"
#include "doubles/nccl/group.h"
#include "doubles/nccl/nccl_functions.h"
#include "doubles/nccl/nccl_types.h"
#include "doubles/nccl/rendezvous.h"
#include "doubles/nccl/report.h"
#include "doubles/nccl/settings.h"

namespace fastsync::fake_nccl {

#define FASTSYNC_EXPORT extern "C" __attribute__((visibility("default")))
#define FASTSYNC_DECLARE(result, name, parameters) FASTSYNC_EXPORT result name parameters;
FASTSYNC_NCCL_FUNCTIONS_BEFORE_2_18(FASTSYNC_DECLARE)

FASTSYNC_EXPORT const int fastsync_fake_nccl;
const int fastsync_fake_nccl = 1;

ncclResult_t ncclGetVersion(int* out) {
  return guarded("ncclGetVersion", nullptr, [&] {
    if (out == nullptr) return failed(ncclInvalidArgument, "ncclGetVersion: the pointer is null");
    *out = version();
    return ncclSuccess;
  });
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return guarded("ncclGetUniqueId", nullptr, [&] {
    if (id == nullptr) return failed(ncclInvalidArgument, "ncclGetUniqueId: the pointer is null");
    std::string why;
    const ncclResult_t result = open_rendezvous(id, &why);
    return result == ncclSuccess ? result : failed(result, why);
  });
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
  fake::Fault fault;
  return guarded("ncclCommInitRank", &fault, [&] { return init_rank(comm, nranks, id, rank, nullptr, fault); });
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  fake::Fault fault;
  return guarded("ncclCommInitRankConfig", &fault, [&] { return init_rank(comm, nranks, id, rank, config, fault); });
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  return guarded("ncclCommFinalize", nullptr, [&] {
    if (comm == nullptr) return ncclSuccess;
    const auto communicator = find(comm);
    if (communicator == nullptr) return unknown("ncclCommFinalize");
    if (const ncclResult_t ready = communicator->ready(); ready != ncclSuccess) return ready;
    if (const ncclResult_t begun = communicator->begin_finalize(); begun != ncclSuccess) return begun;
    return communicator->blocking() ? communicator->wait_finalized() : communicator->state();
  });
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return guarded("ncclCommDestroy", nullptr, [&] {
    if (comm == nullptr) return ncclSuccess;
    const auto communicator = find(comm);
    if (communicator == nullptr) return unknown("ncclCommDestroy");
    // A communicator with an error is not destroyed: it wants to be aborted.
    if (const ncclResult_t ready = communicator->ready(); ready != ncclSuccess) return ready;
    const ncclResult_t result = communicator->wait_finalized();
    communicator->close(false);
    withdraw(comm);
    return result;
  });
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return guarded("ncclCommAbort", nullptr, [&] {
    if (comm == nullptr) return ncclSuccess;
    const auto communicator = find(comm);
    if (communicator == nullptr) return unknown("ncclCommAbort");
    communicator->close(true);
    withdraw(comm);
    return ncclSuccess;
  });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  return guarded("ncclCommGetAsyncError", nullptr, [&] {
    const auto communicator = find(comm);
    if (communicator == nullptr) return unknown("ncclCommGetAsyncError");
    if (error == nullptr) return failed(ncclInvalidArgument, "ncclCommGetAsyncError: the pointer is null");
    *error = communicator->state();
    return ncclSuccess;
  });
}

namespace {

template <typename Get>
ncclResult_t get_fact(const char* symbol, ncclComm_t comm, int* out, const Get& get) {
  return guarded(symbol, nullptr, [&] {
    const auto communicator = find(comm);
    if (communicator == nullptr) return unknown(symbol);
    if (out == nullptr) return failed(ncclInvalidArgument, std::string(symbol) + ": the pointer is null");
    if (const ncclResult_t ready = communicator->ready(); ready != ncclSuccess) return ready;
    const std::shared_ptr<const Mesh> mesh = communicator->mesh();
    if (mesh == nullptr) return unknown(symbol);  // another thread has just closed it
    *out = get(*communicator, *mesh);
    return ncclSuccess;
  });
}

}  // namespace

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  return get_fact("ncclCommCount", comm, count, [](const Communicator&, const Mesh& mesh) { return mesh.nranks; });
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  return get_fact("ncclCommCuDevice", comm, device,
                  [](const Communicator& c, const Mesh&) { return c.device().ordinal; });
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return get_fact("ncclCommUserRank", comm, rank, [](const Communicator&, const Mesh& mesh) { return mesh.rank; });
}

const char* ncclGetErrorString(ncclResult_t result) {
  journal().call("ncclGetErrorString");
  switch (static_cast<unsigned>(result)) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclSystemError: return "unhandled system error";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "a remote process ended or the network failed";
    case ncclInProgress: return "in progress";
    case kNcclTimeout:
      if (version() >= 23000) return "timeout";
      [[fallthrough]];
    default: return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t) {
  journal().call("ncclGetLastError");
  return last_error();
}

ncclResult_t ncclGroupStart() {
  return guarded("ncclGroupStart", nullptr, [] {
    Group::of_thread().start();
    return ncclSuccess;
  });
}

ncclResult_t ncclGroupEnd() {
  return guarded("ncclGroupEnd", nullptr, [] { return Group::of_thread().end(); });
}

ncclResult_t ncclBroadcast(const void* source, void* target, size_t count, ncclDataType_t dtype, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  Call call{"ncclBroadcast", Kind::kBroadcast, source, target, count, dtype, root, stream, {}};
  return guarded(call.symbol, &call.fault, [&] { return enqueue(call, comm); });
}

ncclResult_t ncclAllGather(const void* source, void* target, size_t count, ncclDataType_t dtype, ncclComm_t comm,
                           cudaStream_t stream) {
  Call call{"ncclAllGather", Kind::kAllGather, source, target, count, dtype, 0, stream, {}};
  return guarded(call.symbol, &call.fault, [&] { return enqueue(call, comm); });
}

ncclResult_t ncclSend(const void* source, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  Call call{"ncclSend", Kind::kSend, source, nullptr, count, dtype, peer, stream, {}};
  return guarded(call.symbol, &call.fault, [&] { return enqueue(call, comm); });
}

ncclResult_t ncclRecv(void* target, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  Call call{"ncclRecv", Kind::kReceive, nullptr, target, count, dtype, peer, stream, {}};
  return guarded(call.symbol, &call.fault, [&] { return enqueue(call, comm); });
}

// --- Those that only some versions have -------------------------------------------------------------------------------

namespace since {

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* out, ncclConfig_t* config) {
  fake::Fault fault;
  return guarded("ncclCommSplit", &fault, [&] {
    const auto parent = find(comm);
    if (parent == nullptr) return unknown("ncclCommSplit");
    if (out == nullptr) return failed(ncclInvalidArgument, "ncclCommSplit: the pointer for the communicator is null");
    if (const ncclResult_t ready = parent->ready(); ready != ncclSuccess) return ready;
    const std::shared_ptr<const Mesh> mesh = parent->mesh();
    if (mesh == nullptr) return unknown("ncclCommSplit");
    std::vector<int> everybody;
    for (int rank = 0; rank < mesh->nranks; ++rank) everybody.push_back(rank);
    return make_child(parent, std::move(everybody), color, key, out, config, fault);
  });
}

ncclResult_t ncclCommShrink(ncclComm_t comm, int* excluded, int count, ncclComm_t* out, ncclConfig_t* config,
                            int flags) {
  fake::Fault fault;
  return guarded("ncclCommShrink", &fault, [&] {
    const auto parent = find(comm);
    if (parent == nullptr) return unknown("ncclCommShrink");
    if (out == nullptr || excluded == nullptr || count <= 0) {
      return failed(ncclInvalidArgument, "ncclCommShrink: no ranks to exclude, or no place for the communicator");
    }
    if ((flags & kNcclShrinkAbort) != 0) {
      parent->flush();
      parent->clear_error();
    }
    if (const ncclResult_t ready = parent->ready(); ready != ncclSuccess) return ready;
    const std::shared_ptr<const Mesh> mesh = parent->mesh();
    if (mesh == nullptr) return unknown("ncclCommShrink");
    std::vector<int> rest;
    for (int rank = 0; rank < mesh->nranks; ++rank) {
      bool stays = true;
      for (int i = 0; i < count; ++i) stays &= excluded[i] != rank;
      if (stays) rest.push_back(rank);
      if (!stays && rank == mesh->rank) {
        return failed(ncclInvalidArgument, "ncclCommShrink: called by a rank that is excluded");
      }
    }
    return make_child(parent, std::move(rest), 0, mesh->rank, out, config, fault);
  });
}

ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  return guarded("ncclCommRevoke", nullptr, [&] {
    if (comm == nullptr) return ncclSuccess;
    const auto communicator = find(comm);
    if (communicator == nullptr) return unknown("ncclCommRevoke");
    if (flags != 0 || communicator->revoked()) {
      return failed(ncclInvalidArgument, "ncclCommRevoke: unknown flags, or revoked before");
    }
    communicator->revoke();
    return ncclSuccess;
  });
}

ncclResult_t ncclMemAlloc(void** pointer, size_t nbytes) {
  return guarded("ncclMemAlloc", nullptr, [&] {
    if (pointer == nullptr || nbytes == 0) {
      return failed(ncclInvalidArgument, "ncclMemAlloc: no bytes, or no place for the pointer");
    }
    std::string why;
    if (!allocate_memory(nbytes, pointer, &why)) return failed(ncclUnhandledCudaError, "ncclMemAlloc: " + why);
    journal().live("memory", 1);
    return ncclSuccess;
  });
}

ncclResult_t ncclMemFree(void* pointer) {
  return guarded("ncclMemFree", nullptr, [&] {
    if (pointer == nullptr) return ncclSuccess;
    std::string why;
    if (!free_memory(pointer, &why)) return failed(ncclUnhandledCudaError, "ncclMemFree: " + why);
    journal().live("memory", -1);
    return ncclSuccess;
  });
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buffer, size_t nbytes, void** handle) {
  return guarded("ncclCommRegister", nullptr, [&] {
    const auto communicator = find(comm);
    if (communicator == nullptr) return unknown("ncclCommRegister");
    if (buffer == nullptr || nbytes == 0 || handle == nullptr) {
      return failed(ncclInvalidArgument, "ncclCommRegister: no buffer, or no place for the handle");
    }
    if (const ncclResult_t ready = communicator->ready(); ready != ncclSuccess) return ready;
    *handle = communicator->add_registration();
    return ncclSuccess;
  });
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  return guarded("ncclCommDeregister", nullptr, [&] {
    const auto communicator = find(comm);
    if (communicator == nullptr) return unknown("ncclCommDeregister");
    if (communicator->remove_registration(handle)) return ncclSuccess;
    return failed(ncclInvalidArgument, "ncclCommDeregister: this handle is not registered here");
  });
}

}  // namespace since

// An indirect function is asked for its address when dlsym() finds it: null is "not there".
#define FASTSYNC_EXPORT_SINCE(least, result, name, parameters)                                                  \
  using name##_pointer = result(*) parameters;                                                                  \
  extern "C" {                                                                                                  \
  __attribute__((used, no_sanitize("address", "thread", "undefined"))) static name##_pointer resolve_##name() { \
    return version() >= (least) ? &since::name : nullptr;                                                       \
  }                                                                                                             \
  __attribute__((visibility("default"), ifunc("resolve_" #name))) result name parameters;                       \
  }

#define FASTSYNC_SINCE_2_18_1(result, name, parameters) FASTSYNC_EXPORT_SINCE(21801, result, name, parameters)
#define FASTSYNC_SINCE_2_19_3(result, name, parameters) FASTSYNC_EXPORT_SINCE(21903, result, name, parameters)
#define FASTSYNC_SINCE_2_27_3(result, name, parameters) FASTSYNC_EXPORT_SINCE(22703, result, name, parameters)
#define FASTSYNC_SINCE_2_28_9(result, name, parameters) FASTSYNC_EXPORT_SINCE(22809, result, name, parameters)
FASTSYNC_NCCL_FUNCTIONS_2_18_1(FASTSYNC_SINCE_2_18_1)
FASTSYNC_NCCL_FUNCTIONS_2_19_3(FASTSYNC_SINCE_2_19_3)
FASTSYNC_NCCL_FUNCTIONS_2_27_3(FASTSYNC_SINCE_2_27_3)
FASTSYNC_NCCL_FUNCTIONS_2_28_9(FASTSYNC_SINCE_2_28_9)

}  // namespace fastsync::fake_nccl

// --- For tests --------------------------------------------------------------------------------------------------------

namespace {

size_t give_text(const std::string& text, char* buffer, size_t n) {
  if (buffer != nullptr && n > 0) {
    const size_t length = text.size() < n - 1 ? text.size() : n - 1;
    std::memcpy(buffer, text.data(), length);
    buffer[length] = '\0';
  }
  return text.size();
}

}  // namespace

uint64_t fastsync_fake_nccl_count(const char* symbol) { return fastsync::fake_nccl::journal().calls_of(symbol); }
int64_t fastsync_fake_nccl_live(const char* kind) { return fastsync::fake_nccl::journal().live_of(kind); }
size_t fastsync_fake_nccl_violations(char* buffer, size_t n) {
  const std::vector<std::string> all = fastsync::fake_nccl::journal().violations();
  std::string text;
  for (const std::string& one : all) text += one + "\n";
  (void)give_text(text, buffer, n);
  return all.size();
}
void fastsync_fake_nccl_clear_violations(void) { fastsync::fake_nccl::journal().clear_violations(); }
size_t fastsync_fake_nccl_journal(char* buffer, size_t n) {
  return give_text(fastsync::fake_nccl::journal().to_json(), buffer, n);
}
