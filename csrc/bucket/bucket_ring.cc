#include "bucket/bucket_ring.h"

#include <condition_variable>
#include <deque>
#include <limits>
#include <mutex>
#include <vector>

#include "common/error.h"

namespace fastsync {
namespace ring {

// One stream's mark behind a bucket. Marks are reused, so a ring in steady state makes no events.
struct Use {
  void* stream = nullptr;
  Event event;
};

struct Slot {
  std::vector<Use> uses;  // the first `used` belong to the present or last lease
  std::size_t used = 0;
};

struct State {
  std::shared_ptr<DeviceRuntime> runtime;  // first: outlives the memory and the events
  Buffer memory;
  std::uint64_t bucket_bytes = 0;
  std::vector<Slot> slots;  // a lent slot is its lease's alone, a free one belongs to the lock

  std::mutex mutex;
  std::condition_variable freed;
  std::deque<std::uint32_t> free;
  bool closed = false;

  void give_back(std::uint32_t slot) noexcept {
    {
      const std::lock_guard lock(mutex);
      free.push_back(slot);
    }
    freed.notify_one();
  }
  void check_open() const {
    if (closed) throw StateError("the bucket ring is closed");
  }
};

}  // namespace ring

void BucketLease::used_on(StreamView stream) {
  if (state_ == nullptr) throw StateError("used_on(): the lease was released");
  ring::Slot& slot = state_->slots[slot_];
  std::size_t i = 0;
  while (i < slot.used && slot.uses[i].stream != stream.handle()) ++i;
  if (i == slot.uses.size()) slot.uses.push_back({nullptr, Event(state_->runtime)});
  slot.uses[i].event.record(stream);
  slot.uses[i].stream = stream.handle();
  if (i == slot.used) ++slot.used;
}

void BucketLease::release() noexcept {
  if (state_ == nullptr) return;
  state_->give_back(slot_);
  state_.reset();
  view_ = {};
}

BucketRing::BucketRing(std::shared_ptr<DeviceRuntime> runtime, MemoryKind kind, std::uint32_t buckets,
                       std::uint64_t bucket_bytes)
    : state_(std::make_shared<ring::State>()) {
  if (buckets == 0 || bucket_bytes == 0 || bucket_bytes > std::numeric_limits<std::uint64_t>::max() / buckets) {
    throw InvalidArgument(concat("a bucket ring of ", buckets, " buckets of ", bucket_bytes,
                                 " bytes is not possible; both must be positive and fit into memory"));
  }
  state_->runtime = runtime;
  state_->bucket_bytes = bucket_bytes;
  state_->memory = Buffer::allocate(std::move(runtime), kind, buckets * bucket_bytes);
  state_->slots.resize(buckets);
  for (std::uint32_t i = 0; i < buckets; ++i) state_->free.push_back(i);
}

BucketLease BucketRing::acquire(StreamView stream, Wait& wait) {
  std::uint32_t slot = 0;
  for (;;) {
    {
      std::unique_lock lock(state_->mutex);
      state_->check_open();
      if (state_->free.empty()) {
        state_->freed.wait_for(lock, wait.slice(), [&] { return state_->closed || !state_->free.empty(); });
        state_->check_open();
      }
      if (!state_->free.empty()) {
        slot = state_->free.front();
        state_->free.pop_front();
        break;
      }
    }
    wait.check();  // not under the lock: the hook is somebody else's code
    if (wait.expired()) {
      throw TimeoutError(concat("no progress for ", std::chrono::duration<double>(wait.timeout()).count(),
                                " s waiting for a free bucket: all ", buckets(), " buckets of ", bucket_bytes(),
                                " bytes are lent"));
    }
  }
  wait.progress();
  return lend(slot, stream, wait);
}

BucketLease BucketRing::acquire(StreamView stream, std::chrono::milliseconds timeout) {
  Wait wait(timeout, nullptr);
  return acquire(stream, wait);
}

std::optional<BucketLease> BucketRing::try_acquire(StreamView stream) {
  std::uint32_t slot = 0;
  {
    const std::lock_guard lock(state_->mutex);
    state_->check_open();
    if (state_->free.empty()) return std::nullopt;
    slot = state_->free.front();
    if (state_->runtime->runs_inline(stream)) {
      ring::Slot& candidate = state_->slots[slot];
      for (std::size_t i = 0; i < candidate.used; ++i) {
        if (!candidate.uses[i].event.query()) return std::nullopt;
      }
    }
    state_->free.pop_front();
  }
  Wait no_wait(std::chrono::nanoseconds::zero(), nullptr);
  return lend(slot, stream, no_wait);
}

BucketLease BucketRing::lend(std::uint32_t slot, StreamView stream, Wait& wait) {
  // From here on the lease gives the bucket back, whatever throws.
  BucketLease lease(state_, slot, state_->memory.view(slot * state_->bucket_bytes, state_->bucket_bytes));
  ring::Slot& lent = state_->slots[slot];
  const bool host_waits = state_->runtime->runs_inline(stream);
  for (std::size_t i = 0; i < lent.used;) {
    Event& event = lent.uses[i].event;
    if (!host_waits) event.stream_wait(stream);
    bool passed = false;
    try {
      passed = event.query();
      if (!passed && host_waits) {
        event.synchronize(wait);
        passed = true;
      }
    } catch (const Error&) {
      // The work failed, or the wait did. In the first case it is over, and the next holder need not hear of it again;
      // in the second the mark stays.
      if (host_waits) throw;
      passed = true;  // `stream` has the error now
    }
    // A mark that has not passed stays although `stream` is behind it: this holder may do nothing on `stream`, and the
    // next one may come with another. There is at most one mark a stream.
    if (passed) {
      std::swap(lent.uses[i], lent.uses[--lent.used]);
    } else {
      ++i;
    }
  }
  return lease;
}

void BucketRing::close() noexcept {
  {
    const std::lock_guard lock(state_->mutex);
    state_->closed = true;
  }
  state_->freed.notify_all();
}

std::uint32_t BucketRing::buckets() const noexcept { return static_cast<std::uint32_t>(state_->slots.size()); }
std::uint64_t BucketRing::bucket_bytes() const noexcept { return state_->bucket_bytes; }
const Buffer& BucketRing::memory() const noexcept { return state_->memory; }

}  // namespace fastsync
