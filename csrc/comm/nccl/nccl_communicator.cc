#include "comm/nccl/nccl_communicator.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "common/error.h"

namespace fastsync {

namespace {
constexpr std::uint64_t kMinDepth = 8;
// Between two looks at an operation of NCCL's that is in progress: it has no file descriptor to wait on.
constexpr std::chrono::microseconds kFirstPause{20};
constexpr std::chrono::microseconds kLongestPause{2000};
}  // namespace

NcclCommunicator::NcclCommunicator(Role role, std::shared_ptr<DeviceRuntime> runtime, std::uint32_t buffers,
                                   std::uint64_t bucket_bytes, HeaderChannel& channel, int source_rank, BufferView ring)
    : library_(NcclLibrary::get()),
      runtime_(std::move(runtime)),
      role_(role),
      buffers_(buffers),
      bucket_bytes_(bucket_bytes),
      channel_(channel),
      source_rank_(source_rank),
      memory_(ring.data != nullptr ? Buffer()
                                   : Buffer::allocate(runtime_, MemoryKind::kDevice, buffers * bucket_bytes)),
      ring_(ring.data != nullptr ? ring.data : memory_.data()),
      stream_(runtime_, "fastsync-nccl") {
  for (std::uint32_t i = 0; i < buffers_; ++i) touched_.emplace_back(runtime_);
  const std::uint64_t queued = std::max<std::uint64_t>(kMinDepth, 2 * std::uint64_t{buffers_});
  for (std::uint64_t i = 0; i < queued; ++i) moved_.emplace_back(runtime_);
}

nccl::UniqueId NcclCommunicator::make_id() {
  const NcclLibrary& library = NcclLibrary::get();
  nccl::UniqueId id{};
  library.check(library.api().ncclGetUniqueId(&id), "ncclGetUniqueId");
  return id;
}

std::shared_ptr<NcclCommunicator> NcclCommunicator::create(Role role, std::shared_ptr<DeviceRuntime> runtime,
                                                           std::uint32_t buffers, std::uint64_t bucket_bytes,
                                                           Place place, const nccl::UniqueId& id,
                                                           HeaderChannel& channel, int source_rank, Wait& wait,
                                                           BufferView ring) {
  if (ring.data != nullptr && ring.nbytes < buffers * bucket_bytes) {
    throw InvalidArgument(concat("a ring of ", ring.nbytes, " bytes for ", buffers, " buckets of ", bucket_bytes));
  }
  if (place.ranks < 2 || place.rank < 0 || place.rank >= place.ranks) {
    throw InvalidArgument(concat("NCCL rank ", place.rank, " of ", place.ranks));
  }
  std::shared_ptr<NcclCommunicator> made(
      new NcclCommunicator(role, std::move(runtime), buffers, bucket_bytes, channel, source_rank, ring));
  made->init(place, id, wait);
  return made;
}

void NcclCommunicator::init(Place place, const nccl::UniqueId& id, Wait& wait) {
  nccl::Config config;
  nccl::set_config_version(config, library_.version());
  config.blocking = 0;
  const auto current = runtime_->make_current();
  const nccl::Result result = library_.api().ncclCommInitRankConfig(&comm_, place.ranks, id, place.rank, &config);
  try {
    settle_call(result, "ncclCommInitRankConfig", wait);
  } catch (...) {
    abort();
    throw;
  }
}

// Of a broken device NCCL says only that some CUDA call failed: the device knows which error it was.
void NcclCommunicator::check(nccl::Result result, const char* what) {
  if (result == nccl::kUnhandledCudaError) (void)touched_.front().query();  // throws a broken device's own error
  library_.check(result, what, comm_);
}

// A non-blocking call may be in progress still: waits until NCCL says what became of it.
void NcclCommunicator::settle_call(nccl::Result result, const char* what, Wait& wait) {
  auto pause = kFirstPause;
  while (result == nccl::kInProgress) {
    if (comm_ == nullptr) throw CommError(concat(what, " is in progress, but made no communicator"), source_rank_);
    const nccl::Result asked = library_.api().ncclCommGetAsyncError(comm_, &result);
    if (asked != nccl::kSuccess) result = asked;
    if (result != nccl::kInProgress) break;
    wait.check();
    if (wait.expired()) {
      throw TimeoutError(
          concat(what, " did not end within ", std::chrono::duration<double>(wait.timeout()).count(),
                 " s: a rank did not come, or they cannot reach each other (NCCL_DEBUG=INFO says more)"));
    }
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause, wait.slice()));
    pause = std::min(2 * pause, kLongestPause);
  }
  check(result, what);
  wait.progress();
}

NcclCommunicator::~NcclCommunicator() {
  // Work that is queued would touch the ring after it is gone: abort ends it. A communicator at rest loses nothing by it,
  // and destroying one properly would be collective, and wait for the others.
  abort();
}

void NcclCommunicator::abort() noexcept {
  if (aborted_.exchange(true)) return;
  if (comm_ == nullptr) return;
  try {
    const auto current = runtime_->make_current();
    (void)library_.api().ncclCommAbort(std::exchange(comm_, nullptr));
  } catch (...) {  // the context is gone, and the communicator with it
  }
}

void NcclCommunicator::check_usable(const char* call) const {
  if (failure_) std::rethrow_exception(failure_);
  if (aborted_.load()) throw StateError(concat("nccl ", call, "(): the communicator was aborted"));
}

template <typename F>
auto NcclCommunicator::keep_error(F&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const CommError&) {
    if (!failure_) failure_ = std::current_exception();
    throw;
  } catch (const DeviceError&) {
    if (!failure_) failure_ = std::current_exception();
    throw;
  }
}

void NcclCommunicator::poll() {
  if (aborted_.load() || failure_ || comm_ == nullptr) return;
  keep_error([&] {
    nccl::Result result = nccl::kSuccess;
    const auto current = runtime_->make_current();
    check(library_.api().ncclCommGetAsyncError(comm_, &result), "ncclCommGetAsyncError");
    if (result != nccl::kInProgress) check(result, "an NCCL broadcast");
  });
}

std::byte* NcclCommunicator::slot_data(std::uint64_t index) const noexcept {
  return ring_ + index % buffers_ * bucket_bytes_;
}

void NcclCommunicator::broadcast(const BucketSlot& slot, std::uint64_t nbytes, Wait& wait) {
  if (nbytes > 0) {
    const auto current = runtime_->make_current();
    const nccl::Result result = library_.api().ncclBroadcast(slot.data, slot.data, nbytes, nccl::kUint8, 0, comm_,
                                                             static_cast<nccl::Stream>(stream_.view().handle()));
    settle_call(result, "ncclBroadcast", wait);
  }
  moved_[slot.index % depth()].record(stream_.view());
}

BucketSlot NcclCommunicator::acquire(Wait& wait) {
  check_usable("acquire");
  if (role_ != Role::kSource) throw StateError("acquire() is a call of the source; this rank receives");
  if (lent_) throw StateError("nccl acquire(): the previous bucket was not sent");
  return keep_error([&] {
    const std::uint64_t index = next_;
    // On the device: behind the slot's last broadcast. On the host: not too far ahead.
    if (index >= depth()) moved_[index % depth()].synchronize(wait);
    if (index >= buffers_) moved_[(index - buffers_) % depth()].stream_wait(caller_);
    lent_ = true;
    return BucketSlot{slot_data(index), bucket_bytes_, index, epoch_};
  });
}

void NcclCommunicator::send(const BucketSlot& slot, const BucketHeader& header, Wait& wait) {
  check_usable("send");
  if (!lent_ || slot.epoch != epoch_ || slot.index != next_ || header.index != slot.index) {
    throw StateError(concat("nccl send(): bucket ", header.index, " was not acquired for this sync"));
  }
  if (header.used_bytes > bucket_bytes_) {
    throw InvalidArgument(
        concat("bucket ", header.index, " uses ", header.used_bytes, " bytes, it holds ", bucket_bytes_));
  }
  keep_error([&] {
    Event& packed = touched_[slot.index % buffers_];
    packed.record(caller_);
    packed.stream_wait(stream_.view());
    lent_ = false;
    ++next_;
    channel_.send(header);
    broadcast(slot, header.used_bytes, wait);
  });
}

void NcclCommunicator::flush(Wait& wait) {
  check_usable("flush");
  if (next_ == 0) return;
  keep_error([&] { moved_[(next_ - 1) % depth()].synchronize(wait); });
}

BucketSlot NcclCommunicator::receive(BucketHeader& header, Wait& wait) {
  check_usable("receive");
  if (role_ != Role::kReceiver) throw StateError("receive() is a call of a receiver; this rank is the source");
  if (next_ - released_ == buffers_) {
    throw StateError(concat("nccl receive(): all ", buffers_, " buckets are held; release one first"));
  }
  return keep_error([&] {
    const std::uint64_t index = next_;
    header = channel_.receive(wait);
    if (header.index != index || header.used_bytes > bucket_bytes_) {
      throw CommError(concat("bucket ", index, " of ", bucket_bytes_, " bytes was announced as bucket ", header.index,
                             " of ", header.used_bytes, " bytes"),
                      source_rank_);
    }
    const BucketSlot slot{slot_data(index), bucket_bytes_, index, epoch_};
    if (index >= depth()) moved_[index % depth()].synchronize(wait);
    if (index >= buffers_) touched_[index % buffers_].stream_wait(stream_.view());
    broadcast(slot, header.used_bytes, wait);
    moved_[index % depth()].stream_wait(caller_);
    ++next_;
    return slot;
  });
}

void NcclCommunicator::release(const BucketSlot& slot) {
  if (slot.epoch != epoch_ || aborted_.load() || failure_) return;
  if (slot.index != released_ || released_ == next_) {
    throw StateError(concat("nccl release(): bucket ", slot.index, " is not the oldest one held"));
  }
  keep_error([&] { touched_[slot.index % buffers_].record(caller_); });
  ++released_;
}

void NcclCommunicator::reset(std::uint64_t epoch) {
  check_usable("reset");
  if (epoch <= epoch_) throw InvalidArgument(concat("nccl reset(): epoch ", epoch, " does not follow ", epoch_));
  epoch_ = epoch;
  next_ = released_ = 0;
  lent_ = false;
}

}  // namespace fastsync
