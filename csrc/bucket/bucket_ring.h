// Lends a fixed number of equal buckets, so packing the next one can overlap sending the last.
//
// Owns the memory; a BucketLease gives its bucket back when destroyed, and keeps the ring's memory alive.
// Thread-safe. A lease belongs to one thread at a time.
// Work queued on `stream` after acquire() runs behind the bucket's previous users (those that used_on() named): no host
// sync. Buckets are lent in the order in which they came back.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "device/buffer.h"
#include "device/device_runtime.h"

namespace fastsync {

namespace ring {
struct State;
}

class BucketLease {
 public:
  BucketLease() = default;
  // Gives the bucket back: it may be lent at once, behind the work that used_on() named.
  ~BucketLease() { release(); }
  BucketLease(BucketLease&& other) noexcept
      : state_(std::move(other.state_)), slot_(std::exchange(other.slot_, 0)), view_(std::exchange(other.view_, {})) {}
  BucketLease& operator=(BucketLease&& other) noexcept {
    if (this != &other) {
      release();
      state_ = std::move(other.state_);
      slot_ = std::exchange(other.slot_, 0);
      view_ = std::exchange(other.view_, {});
    }
    return *this;
  }
  BucketLease(const BucketLease&) = delete;
  BucketLease& operator=(const BucketLease&) = delete;

  [[nodiscard]] explicit operator bool() const noexcept { return state_ != nullptr; }
  [[nodiscard]] BufferView view() const noexcept { return view_; }
  [[nodiscard]] std::byte* data() const noexcept { return view_.data; }
  [[nodiscard]] std::uint64_t nbytes() const noexcept { return view_.nbytes; }
  [[nodiscard]] std::uint32_t slot() const noexcept { return slot_; }

  // Call after queueing work that reads or writes the bucket on `stream`: the bucket's next holder runs behind it. Once
  // for each stream; a later call for the same stream moves the mark. Work that the host has waited for needs none.
  void used_on(StreamView stream);
  void release() noexcept;

 private:
  friend class BucketRing;
  BucketLease(std::shared_ptr<ring::State> state, std::uint32_t slot, BufferView view) noexcept
      : state_(std::move(state)), slot_(slot), view_(view) {}
  std::shared_ptr<ring::State> state_;
  std::uint32_t slot_ = 0;
  BufferView view_;
};

class BucketRing {
 public:
  // Throws InvalidArgument for zero buckets or bytes or a product that overflows, DeviceError if the memory cannot be had.
  BucketRing(std::shared_ptr<DeviceRuntime> runtime, MemoryKind kind, std::uint32_t buckets,
             std::uint64_t bucket_bytes);
  ~BucketRing() { close(); }
  BucketRing(const BucketRing&) = delete;
  BucketRing& operator=(const BucketRing&) = delete;

  // Waits for a free bucket. Throws TimeoutError, what Wait::check() throws, StateError after close(), and the error of
  // the bucket's previous users if their stream has failed. An inline stream waits for them on the host.
  [[nodiscard]] BucketLease acquire(StreamView stream, Wait& wait);
  [[nodiscard]] BucketLease acquire(StreamView stream, std::chrono::milliseconds timeout);
  // Without waiting; nothing if no bucket is free.
  [[nodiscard]] std::optional<BucketLease> try_acquire(StreamView stream);

  void close() noexcept;  // wakes every waiter; may be called twice. Leases stay valid.

  [[nodiscard]] std::uint32_t buckets() const noexcept;
  [[nodiscard]] std::uint64_t bucket_bytes() const noexcept;
  [[nodiscard]] const Buffer& memory() const noexcept;

 private:
  [[nodiscard]] BucketLease lend(std::uint32_t slot, StreamView stream, Wait& wait);
  std::shared_ptr<ring::State> state_;
};

}  // namespace fastsync
