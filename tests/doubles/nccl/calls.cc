#include "doubles/nccl/calls.h"

#include <chrono>
#include <limits>
#include <thread>
#include <utility>

#include "doubles/nccl/child.h"
#include "doubles/nccl/config.h"
#include "doubles/nccl/device.h"
#include "doubles/nccl/group.h"

namespace fastsync::fake_nccl {

bool ends_here(const char* symbol, ncclResult_t* result, fake::Fault* queued) {
  journal().call(symbol);
  const fake::Fault fault = fake::FaultPlan::of_process().on_call(symbol);
  if (queued != nullptr) *queued = fault;
  const bool later = queued != nullptr;
  if (fault.action == fake::FaultAction::kFail || (fault.action == fake::FaultAction::kFailLater && !later)) {
    *result = failed(static_cast<ncclResult_t>(fault.code), std::string("injected failure of ") + symbol);
    return true;
  }
  if (!later && fault.action == fake::FaultAction::kDelay) std::this_thread::sleep_for(fault.delay);
  while (!later && fault.action == fake::FaultAction::kHang) std::this_thread::sleep_for(std::chrono::seconds(1));
  return false;
}

ncclResult_t unknown(const char* symbol) {
  return failed(ncclInvalidArgument,
                std::string(symbol) + ": this is no live communicator (null, destroyed or aborted)");
}

namespace {

std::uint64_t size_of(unsigned dtype) {
  switch (dtype) {
    case ncclInt8:
    case ncclUint8: return 1;
    case ncclFloat8e4m3:
    case ncclFloat8e5m2: return version() >= 22400 ? 1 : 0;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    default: return 0;
  }
}

Communicator::Options make_options(const Device& device, const ncclConfig_t& config, bool fallback,
                                   const fake::Fault& fault) {
  Communicator::Options options;
  options.device = device;
  options.settings = Settings::from_environment();
  options.blocking = config.blocking == kNcclUndefInt ? fallback : config.blocking == 1;
  if (options.settings.blocking >= 0) options.blocking = options.settings.blocking == 1;
  options.fault = fault;
  return options;
}

Communicator::Join join_as(const std::shared_ptr<Communicator>& communicator, Member member, ncclUniqueId unique_id) {
  // The thread ends before its communicator does.
  Communicator* self = communicator.get();
  return [self, member, unique_id](Mesh* mesh, ncclUniqueId*, std::string* why) {
    return join_rendezvous(unique_id, member, self->wake_fd(), mesh, why);
  };
}

Member describe_self(const Communicator& communicator, int rank, int nranks) {
  Member member;
  member.rank = rank;
  member.nranks = nranks;
  member.version = version();
  member.uuid = communicator.device().uuid;
  member.may_share_device = communicator.settings().ranks_may_share_device;
  return member;
}

// Success: `*operation` is complete but for its place in a group.
ncclResult_t check(const Call& call, const Communicator& communicator, Operation* operation) {
  const std::shared_ptr<const Mesh> mesh = communicator.mesh();
  if (communicator.revoked()) {
    return failed(ncclInvalidUsage, std::string(call.symbol) + ": the communicator was revoked");
  }
  const ncclResult_t ready = communicator.ready();
  if (ready != ncclSuccess) return ready;
  if (mesh == nullptr) return unknown(call.symbol);  // another thread has just closed it
  const auto invalid = [&](const std::string& what) {
    return failed(ncclInvalidArgument, std::string(call.symbol) + ": " + what);
  };
  const std::uint64_t size = size_of(call.dtype);
  if (size == 0) return invalid("unknown type " + std::to_string(call.dtype));
  const auto nranks = static_cast<std::uint64_t>(mesh->nranks);
  if (call.count > std::numeric_limits<std::int64_t>::max() / size / nranks) {
    return invalid("the count " + std::to_string(call.count) + " is absurd");
  }
  if (call.peer < 0 || static_cast<std::uint64_t>(call.peer) >= nranks) {
    return invalid("rank " + std::to_string(call.peer) + " of " + std::to_string(nranks));
  }
  const bool reads = call.kind != Kind::kReceive && (call.kind != Kind::kBroadcast || call.peer == mesh->rank);
  if (call.count > 0 && ((reads && call.source == nullptr) || (call.kind != Kind::kSend && call.target == nullptr))) {
    return invalid("a buffer is null");
  }
  std::string why;
  const CudaDouble* driver = cuda(&why);
  const int mine = communicator.device().ordinal;
  if (const int device = driver->current_device(); device != mine) {
    return failed(ncclInvalidUsage,
                  std::string(call.symbol) + ": the communicator is of device " + std::to_string(mine) +
                      (device < 0 ? ", but the calling thread has no current context"
                                  : ", but the calling thread's context is of device " + std::to_string(device)));
  }
  if (const int device = driver->stream_device(call.stream); device != mine) {
    return failed(ncclInvalidUsage, std::string(call.symbol) + ": the stream is " +
                                        (device < 0 ? "unknown" : "of device " + std::to_string(device)) +
                                        ", the communicator of device " + std::to_string(mine));
  }
  operation->kind = call.kind;
  operation->source = reinterpret_cast<CUdeviceptr>(call.source);
  operation->target = reinterpret_cast<CUdeviceptr>(call.target);
  operation->count = call.count;
  operation->nbytes = call.count * size;
  operation->dtype = call.dtype;
  operation->peer = call.peer;
  operation->stream = call.stream;
  operation->fault = call.fault;
  return ncclSuccess;
}

}  // namespace

ncclResult_t init_rank(ncclComm_t* out, int nranks, const ncclUniqueId& id, int rank, const ncclConfig_t* config,
                       const fake::Fault& fault) {
  GroupOfOne group;
  const auto refuse = [&](ncclResult_t result, std::string text) { return group.end(failed(result, std::move(text))); };
  std::string why;
  ncclConfig_t read;
  if (out == nullptr) return refuse(ncclInvalidArgument, "ncclCommInitRank: the pointer for the communicator is null");
  __atomic_store_n(out, nullptr, __ATOMIC_RELEASE);
  if (nranks < 1 || rank < 0 || rank >= nranks) {
    return refuse(ncclInvalidArgument, "invalid rank " + std::to_string(rank) + " of " + std::to_string(nranks));
  }
  if (!is_unique_id(id)) return refuse(ncclInvalidArgument, "this is no id from ncclGetUniqueId");
  if (const ncclResult_t result = read_config(config, version(), &read, &why); result != ncclSuccess) {
    return refuse(result, why);
  }
  if (cuda(&why) == nullptr) return refuse(ncclUnhandledCudaError, why);
  Device device;
  if (!current_device(&device, &why)) return refuse(ncclInvalidUsage, why);

  Communicator::Options options = make_options(device, read, true, fault);
  options.id = id;
  auto communicator = std::make_shared<Communicator>(options);
  __atomic_store_n(out, publish(communicator), __ATOMIC_RELEASE);  // before it has joined: another thread may abort it
  communicator->start(join_as(communicator, describe_self(*communicator, rank, nranks), id));
  Group::of_thread().add_joining(communicator, out);
  const ncclResult_t ended = group.end(ncclSuccess);
  // The state may be anything by now: it is asked for, as NCCL does.
  return ended == ncclInProgress && !communicator->blocking() ? communicator->state() : ended;
}

ncclResult_t make_child(const std::shared_ptr<Communicator>& parent, std::vector<int> taking_part, int color, int key,
                        ncclComm_t* out, const ncclConfig_t* config, const fake::Fault& fault) {
  std::string why;
  ncclConfig_t read;
  const ncclResult_t valid = read_config(config, version(), &read, &why);
  if (valid != ncclSuccess) return failed(valid, why);
  auto child = std::make_shared<Communicator>(make_options(parent->device(), read, parent->blocking(), fault));
  const std::uint64_t number = parent->next_child();
  const std::shared_ptr<const Mesh> mesh = parent->mesh();
  __atomic_store_n(out, nullptr, __ATOMIC_RELEASE);

  Communicator* self = child.get();
  Communicator::Join join = [self, parent, mesh, number, color, key, members = std::move(taking_part)](
                                Mesh* joined, ncclUniqueId* id, std::string* reason) {
    ChildPlace place;
    const auto must_stop = [&] { return self->aborted() || parent->aborted(); };
    const ncclResult_t agreed = agree_on_child(*mesh, number, color, key, members, must_stop, &place, reason);
    if (agreed != ncclSuccess || place.rank < 0) return agreed;
    *id = place.id;
    return join_rendezvous(place.id, describe_self(*self, place.rank, place.nranks), self->wake_fd(), joined, reason);
  };

  // So that aborting the parent ends it.
  if (mesh == nullptr || !parent->keep_child(child)) return unknown("a communicator's parent");
  if (parent->blocking()) {
    child->start(std::move(join));
    const ncclResult_t result = child->wait_joined();
    const bool made = result == ncclSuccess && child->mesh() != nullptr;
    if (made) *out = publish(child);
    parent->release_child(child.get());
    if (!made) child->close(true);
    return result;
  }
  parent->set_state(ncclInProgress);
  child->start(std::move(join), [parent, self, out](ncclResult_t result) {
    if (result == ncclSuccess && self->mesh() != nullptr) {
      __atomic_store_n(out, publish(self->shared_from_this()), __ATOMIC_RELEASE);
      parent->release_child(self);
    }
    parent->set_state(result);
  });
  return ncclInProgress;
}

ncclResult_t enqueue(const Call& call, ncclComm_t handle) {
  GroupOfOne group;
  const std::shared_ptr<Communicator> communicator = find(handle);
  if (communicator == nullptr) return group.end(unknown(call.symbol));
  Operation operation;
  const ncclResult_t checked = check(call, *communicator, &operation);
  const bool empty = call.count == 0 && (call.kind == Kind::kBroadcast || call.kind == Kind::kAllGather);
  // A refused call spoils a communicator without blocking for good, as with NCCL.
  if (checked != ncclSuccess && !communicator->blocking()) communicator->set_state(checked);
  if (checked == ncclSuccess && !empty) Group::of_thread().add(communicator, operation);
  const ncclResult_t result = group.end(checked);
  return communicator->blocking() || result != ncclSuccess ? result : communicator->state();
}

}  // namespace fastsync::fake_nccl
