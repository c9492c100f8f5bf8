#include "comm/external/external_communicator.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "common/error.h"

namespace fastsync {
namespace {

using namespace std::chrono_literals;

// While a bucket is free, a receiver that waits for one transfer looks for the announcement of the next this often at
// first, and less often the longer nothing comes.
constexpr std::chrono::milliseconds kFirstLook = 1ms;

std::chrono::milliseconds at_least_one_ms(std::chrono::nanoseconds time) {
  return std::max(1ms, std::chrono::duration_cast<std::chrono::milliseconds>(time));
}

}  // namespace

ExternalCommunicator::ExternalCommunicator(Role role, std::string_view name, std::uint32_t buffers,
                                           std::uint64_t bucket_bytes, ExternalOps ops, HeaderChannel& channel,
                                           int source_rank)
    : role_(role),
      name_(name),
      buffers_(buffers),
      bucket_bytes_(bucket_bytes),
      ops_(std::move(ops)),
      channel_(channel),
      source_rank_(source_rank) {
  if (buffers == 0 || bucket_bytes == 0 || bucket_bytes % 256 != 0 ||
      bucket_bytes > std::numeric_limits<std::uint64_t>::max() / buffers) {
    throw InvalidArgument(concat(name, " transport: ", buffers, " buckets of ", bucket_bytes,
                                 " bytes; at least one bucket of a positive multiple of 256 bytes is needed"));
  }
  if (!ops_.start || !ops_.wait || !ops_.drop) throw InvalidArgument(concat(name, " transport: a callback is missing"));
  memory_ = std::make_shared<Buffer>(Buffer::heap(buffers * bucket_bytes, "buckets"));
}

ExternalCommunicator::~ExternalCommunicator() {
  for (const Transfer& transfer : flying_) {
    if (!transfer.handle) continue;
    try {
      ops_.drop(*transfer.handle);
    } catch (...) {
      // A handle that cannot be dropped is the library's to clean up; there is nobody to tell.
    }
  }
}

void ExternalCommunicator::check_usable(const char* call) const {
  if (failure_) std::rethrow_exception(failure_);
  if (aborted_.load(std::memory_order_acquire)) {
    throw StateError(concat(name_, " ", call, "(): the communicator was aborted; the next sync starts with reset()"));
  }
}

void ExternalCommunicator::require_role(Role role, const char* call) const {
  if (role_ != role) {
    throw StateError(concat(call, "() is a call of ", role == Role::kSource ? "the source" : "a receiver"));
  }
}

template <typename Body>
decltype(auto) ExternalCommunicator::keeping_errors(Body body) {
  try {
    return body();
  } catch (const Error&) {
    // Ours, the callbacks' or the channel's. Others are the hook's way to end a wait (a Python exception): they are not
    // kept, because nobody may own one beyond the call.
    if (!failure_ && !aborted_.load(std::memory_order_acquire)) failure_ = std::current_exception();
    throw;
  }
}

Wait ExternalCommunicator::heeding_abort(const Wait& wait, const char* call) const {
  return {wait, [this, &wait, call] {
            check_usable(call);
            wait.check();
          }};
}

std::byte* ExternalCommunicator::slot_data(std::uint64_t index) const noexcept {
  return memory_->data() + (index % buffers_) * bucket_bytes_;
}

void ExternalCommunicator::start(const BucketHeader& header) {
  Transfer transfer{header, std::nullopt};
  if (header.used_bytes > 0) transfer.handle = ops_.start(slot_data(header.index), header.used_bytes);
  flying_.push_back(transfer);
  ++started_;
}

template <typename Meanwhile>
void ExternalCommunicator::finish_oldest(Wait& wait, bool heed_abort, Meanwhile meanwhile) {
  std::chrono::milliseconds look = kFirstLook;
  while (flying_.front().handle) {
    std::chrono::milliseconds time = at_least_one_ms(wait.slice());
    if (meanwhile()) time = std::min(time, look);
    look = std::min<std::chrono::milliseconds>(2 * look, kPollInterval);
    const std::uint64_t handle = *flying_.front().handle;
    if (ops_.wait(handle, time)) {
      flying_.front().handle.reset();
      ops_.drop(handle);
      break;
    }
    if (heed_abort) check_usable("wait");
    wait.check();
    if (wait.expired()) {
      const int rank = role_ == Role::kSource ? channel_.slowest_receiver() : source_rank_;
      throw TimeoutError(
          concat("no progress for ", std::chrono::duration<double>(wait.timeout()).count(), " s waiting for the ",
                 name_, " broadcast of bucket ", done_, " (", flying_.front().header.used_bytes, " bytes)",
                 rank < 0 ? std::string() : concat(" with rank ", rank),
                 "; find out what holds that rank up, or raise timeout_s"),
          rank);
    }
  }
  flying_.pop_front();
  ++done_;
  wait.progress();
}

BucketSlot ExternalCommunicator::acquire(Wait& wait) {
  require_role(Role::kSource, "acquire");
  check_usable("acquire");
  if (lent_) throw StateError(concat(name_, " acquire(): the previous bucket was not sent"));
  return keeping_errors([&] {
    // The bucket's memory: its last broadcast is over.
    while (started_ - done_ >= buffers_) {
      finish_oldest(wait, true, [] { return false; });
    }
    // The bound: bucket k is packed when the slowest receiver has come to bucket k - buffers.
    if (started_ > buffers_) {
      Wait abortable = heeding_abort(wait, "acquire");
      channel_.wait_released(started_ - buffers_, abortable);
      wait.progress();
    }
    check_usable("acquire");
    lent_ = true;
    return BucketSlot{slot_data(started_), bucket_bytes_, started_, epoch_};
  });
}

void ExternalCommunicator::send(const BucketSlot& slot, const BucketHeader& header, Wait& /*wait*/) {
  require_role(Role::kSource, "send");
  check_usable("send");
  if (!lent_ || slot.epoch != epoch_ || slot.index != started_ || header.index != slot.index) {
    throw StateError(concat(name_, " send(): bucket ", header.index, " was not acquired for this sync"));
  }
  if (header.used_bytes > bucket_bytes_) {
    throw InvalidArgument(
        concat("bucket ", header.index, " uses ", header.used_bytes, " bytes, it holds ", bucket_bytes_));
  }
  keeping_errors([&] {
    channel_.send(header);
    lent_ = false;
    start(header);
  });
}

void ExternalCommunicator::flush(Wait& wait) {
  require_role(Role::kSource, "flush");
  check_usable("flush");
  keeping_errors([&] {
    while (!flying_.empty()) finish_oldest(wait, true, [] { return false; });
  });
}

void ExternalCommunicator::check_header(const BucketHeader& header) const {
  if (header.index == started_ && header.used_bytes <= bucket_bytes_) return;
  throw CommError(concat("rank ", source_rank_, " announced bucket ", header.index, " of ", header.used_bytes,
                         " bytes, expected bucket ", started_, " of at most ", bucket_bytes_, " bytes"),
                  source_rank_);
}

bool ExternalCommunicator::start_announced() {
  BucketHeader header;
  while (started_ - released_ < buffers_) {
    if (!channel_.try_receive(header)) return true;
    check_header(header);
    start(header);
  }
  return false;
}

BucketSlot ExternalCommunicator::receive(BucketHeader& header, Wait& wait) {
  require_role(Role::kReceiver, "receive");
  check_usable("receive");
  if (done_ - released_ == buffers_) {
    throw StateError(concat(name_, " receive(): all ", buffers_, " buckets are held; release one first"));
  }
  return keeping_errors([&] {
    start_announced();
    if (flying_.empty()) {
      Wait abortable = heeding_abort(wait, "receive");
      const BucketHeader announced = channel_.receive(abortable);
      wait.progress();
      check_header(announced);
      start(announced);
    }
    const BucketHeader received = flying_.front().header;
    finish_oldest(wait, true, [&] { return start_announced(); });
    check_usable("receive");
    header = received;
    return BucketSlot{slot_data(received.index), bucket_bytes_, received.index, epoch_};
  });
}

void ExternalCommunicator::release(const BucketSlot& slot) {
  require_role(Role::kReceiver, "release");
  if (slot.epoch != epoch_) return;
  if (slot.index < released_) return;  // taken back by drain()
  if (slot.index != released_ || released_ == done_) {
    throw StateError(concat(name_, " release(): bucket ", slot.index, " is not the oldest one held"));
  }
  ++released_;
  if (failure_ || aborted_.load(std::memory_order_acquire)) return;
  keeping_errors([&] {
    channel_.report_released(released_);
    // The transfer of the next bucket runs while the caller unpacks another one.
    start_announced();
  });
}

void ExternalCommunicator::drain(Wait& wait) {
  lent_ = false;
  // Also with an error kept: the group is what has to come to rest.
  do {
    while (!flying_.empty()) {
      finish_oldest(wait, false, [] { return false; });
    }
    released_ = done_;
    if (role_ == Role::kReceiver) start_announced();
  } while (!flying_.empty());
}

void ExternalCommunicator::reset(std::uint64_t epoch) {
  if (epoch <= epoch_) {
    throw InvalidArgument(concat(name_, " reset(): epoch ", epoch, " does not follow epoch ", epoch_));
  }
  if (!flying_.empty()) {
    throw StateError(
        concat(name_, " reset(): ", flying_.size(), " broadcasts are in flight; drain() first, or make a new group"));
  }
  epoch_ = epoch;
  started_ = 0;
  done_ = 0;
  released_ = 0;
  lent_ = false;
  failure_ = nullptr;
  aborted_.store(false, std::memory_order_release);
}

int ExternalCommunicator::waiting_for() const noexcept {
  return role_ == Role::kSource ? channel_.slowest_receiver() : -1;
}

void ExternalCommunicator::abort() noexcept { aborted_.store(true, std::memory_order_release); }

}  // namespace fastsync
