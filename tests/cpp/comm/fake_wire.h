// A wire between devices whose ranks are threads, with NCCL's manner: buckets are announced on the host, moved on streams,
// and a transfer begins when every end has queued its own.
#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "common/error.h"
#include "support/shared_device.h"

namespace fastsync::testing {

// What the ends share.
class FakeWire {
 public:
  explicit FakeWire(int receivers) : inbox_(static_cast<std::size_t>(receivers)) {}

  void announce(const BucketHeader& header) {
    const std::lock_guard lock(mutex_);
    for (auto& inbox : inbox_) inbox.push_back(header);
    changed_.notify_all();
  }
  [[nodiscard]] BucketHeader next(std::size_t receiver, Wait& wait) {
    std::unique_lock lock(mutex_);
    auto& inbox = inbox_[receiver];
    while (inbox.empty()) {
      changed_.wait_for(lock, wait.slice());
      if (cut_) throw StateError("the wire was cut");
      if (wait.expired()) throw TimeoutError("no bucket was announced");
    }
    const BucketHeader header = inbox.front();
    inbox.pop_front();
    return header;
  }
  // On the ends' streams. A wire that is cut lets all of them go.
  void offer(std::uint64_t index, const std::byte* data) {
    std::unique_lock lock(mutex_);
    moving_[index].from = data;
    changed_.notify_all();
    changed_.wait(lock, [&] { return cut_ || moving_[index].taken == inbox_.size(); });
    moving_.erase(index);
  }
  void take(std::uint64_t index, std::byte* into, std::uint64_t nbytes) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return cut_ || moving_[index].from != nullptr; });
    if (cut_) return;
    const std::byte* const from = moving_[index].from;
    lock.unlock();
    std::memcpy(into, from, nbytes);
    lock.lock();
    ++moving_[index].taken;
    changed_.notify_all();
  }
  void cut() {
    const std::lock_guard lock(mutex_);
    cut_ = true;
    changed_.notify_all();
  }

 private:
  struct Moving {
    const std::byte* from = nullptr;
    std::size_t taken = 0;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<BucketHeader>> inbox_;
  std::map<std::uint64_t, Moving> moving_;
  bool cut_ = false;
};

class FakeWireEnd final : public Communicator {
 public:
  // `number`: 0 is the source's end. `ring`: what it works on.
  FakeWireEnd(std::shared_ptr<FakeWire> wire, std::size_t number, const std::shared_ptr<SharedDevice>& runtime,
              std::byte* ring, std::uint32_t buffers, std::uint64_t bucket_bytes)
      : wire_(std::move(wire)),
        number_(number),
        runtime_(runtime),
        ring_(ring),
        buffers_(buffers),
        bucket_bytes_(bucket_bytes),
        stream_(runtime, "wire") {
    for (std::uint32_t i = 0; i < buffers; ++i) {
      touched_.emplace_back(runtime);
      moved_.emplace_back(runtime);
    }
  }
  ~FakeWireEnd() override { wire_->cut(); }

  [[nodiscard]] StreamView stream() const { return stream_.view(); }
  [[nodiscard]] std::string_view name() const noexcept override { return "fake"; }
  [[nodiscard]] std::uint64_t bucket_bytes() const noexcept override { return bucket_bytes_; }
  [[nodiscard]] std::uint32_t buffers() const noexcept override { return buffers_; }
  [[nodiscard]] std::uint64_t staging_bytes() const noexcept override { return 0; }
  [[nodiscard]] MemoryKind memory_kind() const noexcept override { return MemoryKind::kDevice; }
  void bind_stream(StreamView stream) override { caller_ = stream; }

  [[nodiscard]] BucketSlot acquire(Wait& /*wait*/) override {
    if (next_ >= buffers_) moved_[next_ % buffers_].stream_wait(caller_);
    return slot(next_);
  }
  void send(const BucketSlot& slot, const BucketHeader& header, Wait& /*wait*/) override {
    touched_[slot.index % buffers_].record(caller_);
    touched_[slot.index % buffers_].stream_wait(stream_.view());
    wire_->announce(header);
    runtime_->enqueue(stream_.view(), [wire = wire_, slot] { wire->offer(slot.index, slot.data); });
    moved_[slot.index % buffers_].record(stream_.view());
    ++next_;
  }
  void flush(Wait& wait) override { moved_[(next_ - 1) % buffers_].synchronize(wait); }
  [[nodiscard]] BucketSlot receive(BucketHeader& header, Wait& wait) override {
    header = wire_->next(number_ - 1, wait);
    const BucketSlot into = slot(next_++);
    const std::uint64_t at = into.index % buffers_;
    if (into.index >= buffers_) touched_[at].stream_wait(stream_.view());
    runtime_->enqueue(stream_.view(),
                      [wire = wire_, into, n = header.used_bytes] { wire->take(into.index, into.data, n); });
    moved_[at].record(stream_.view());
    moved_[at].stream_wait(caller_);
    return into;
  }
  void release(const BucketSlot& slot) override { touched_[slot.index % buffers_].record(caller_); }
  [[nodiscard]] Recovery recovery() const noexcept override { return Recovery::kReplace; }
  void reset(std::uint64_t epoch) override {
    epoch_ = epoch;
    next_ = 0;
  }
  [[nodiscard]] int waiting_for() const noexcept override { return -1; }
  void abort() noexcept override { wire_->cut(); }

 private:
  [[nodiscard]] BucketSlot slot(std::uint64_t index) const {
    return {ring_ + index % buffers_ * bucket_bytes_, bucket_bytes_, index, epoch_};
  }
  std::shared_ptr<FakeWire> wire_;
  std::size_t number_;
  std::shared_ptr<SharedDevice> runtime_;
  std::byte* ring_;
  std::uint32_t buffers_;
  std::uint64_t bucket_bytes_;
  StreamView caller_;
  std::vector<Event> touched_, moved_;
  std::uint64_t epoch_ = 0;
  std::uint64_t next_ = 0;
  Stream stream_;  // first to go: its work uses the rest
};

}  // namespace fastsync::testing
