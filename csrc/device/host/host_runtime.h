// The device contract on a CPU: a stream is a named worker thread with a queue, an event is a (stream, sequence) pair.
//
// Streams really run beside the host and beside each other, so code that forgets an event or a synchronize gets wrong
// bytes on a laptop, as it would on a GPU. With a delay seed every queued task starts after a random pause, so that it
// gets them soon.
//
// Every memory kind is host memory; kDevice and kPinnedHost are plain heap.
// Threads: as DeviceRuntime. A stream's worker is joined when the stream is destroyed, after it has done what is queued;
// a task must therefore end by itself. Waits between streams cannot form a cycle, since an event only marks work that
// was queued before it was recorded. Must not be used across fork(): the child has no workers.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "device/device_runtime.h"

namespace fastsync {

class HostRuntime final : public DeviceRuntime {
 public:
  struct Options {
    // Before each queued task, a pause in [0, max_delay] from a generator seeded by this and the stream's number.
    std::optional<std::uint64_t> delay_seed;
    std::chrono::microseconds max_delay{200};
  };
  [[nodiscard]] static std::shared_ptr<HostRuntime> create() { return create(Options()); }
  [[nodiscard]] static std::shared_ptr<HostRuntime> create(const Options& options);
  ~HostRuntime() override;

  // A stream without a thread: its work runs inside the call that queues it. For one thread at a time.
  [[nodiscard]] Stream inline_stream();

  [[nodiscard]] std::string_view name() const noexcept override { return "host"; }
  [[nodiscard]] Allocation allocate(MemoryKind kind, std::uint64_t nbytes) override;
  void deallocate(MemoryKind kind, const Allocation& allocation) noexcept override;

  void copy(std::byte* dst, const std::byte* src, std::uint64_t nbytes, StreamView stream) override;
  void fill(std::byte* dst, std::byte value, std::uint64_t nbytes, StreamView stream) override;
  // The kernel's own body, on the stream's thread.
  void launch_copy(CopyDirection direction, const CopyArgs& args, StreamView stream) override;
  void enqueue(StreamView stream, std::function<void()> task) override;

  [[nodiscard]] void* create_stream(std::string_view name) override;
  void destroy_stream(void* stream) noexcept override;
  [[nodiscard]] bool runs_inline(StreamView stream) const noexcept override;
  void synchronize_stream(StreamView stream, Wait& wait) override;

  [[nodiscard]] void* create_event() override;
  void destroy_event(void* event) noexcept override;
  void record_event(void* event, StreamView stream) override;
  [[nodiscard]] bool query_event(void* event) override;
  void synchronize_event(void* event, Wait& wait) override;
  void stream_wait_event(StreamView stream, void* event) override;

 private:
  explicit HostRuntime(const Options& options);
  Options options_;
  std::atomic<std::uint64_t> streams_made_{0};
};

}  // namespace fastsync
