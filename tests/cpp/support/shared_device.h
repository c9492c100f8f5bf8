// A device whose ranks are threads: HostRuntime's streams and events, shared between the ranks of one process as device
// memory and interprocess events are between processes. So everything above the device layer that is written for a
// device runs here, with random delays and under the sanitizers, and with rules of ordering broken on purpose.
#pragma once

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "common/error.h"
#include "device/host/host_runtime.h"

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace fastsync::testing {

// What one thread did before handed_over(tag) comes before what another does after taken_over(tag). For an order that a
// race detector cannot see: it knows atomics by their addresses, and shared memory that ranks of one process have mapped
// several times has several.
inline void handed_over([[maybe_unused]] void* tag) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(tag);
#endif
}
inline void taken_over([[maybe_unused]] void* tag) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(tag);
#endif
}

// The faults that code for a device is prone to. Each is planted by forgetting what keeps the order.
struct Forget {
  std::function<bool(void* event)> stream_wait;   // true: the stream is not held back
  std::function<bool(void* event)> event_record;  // true: the mark is not moved
};

class SharedDevice final : public DeviceRuntime {
 public:
  static std::shared_ptr<SharedDevice> create(std::uint64_t seed, bool shares_events = true,
                                              std::string id = "threads") {
    HostRuntime::Options options;
    options.delay_seed = seed;
    return std::shared_ptr<SharedDevice>(new SharedDevice(HostRuntime::create(options), shares_events, std::move(id)));
  }

  Forget forget;
  // What was made, so that a test can see that a steady state makes nothing.
  std::atomic<int> allocations{0}, streams{0}, events{0}, launches{0};
  // What is there now.
  std::atomic<int> live_allocations{0}, live_events{0}, live_imports{0};

  [[nodiscard]] std::string_view name() const noexcept override { return "shared"; }
  [[nodiscard]] std::string device_id() const override { return id_; }
  [[nodiscard]] Allocation allocate(MemoryKind kind, std::uint64_t nbytes) override {
    ++allocations;
    ++live_allocations;
    return host_->allocate(kind, nbytes);
  }
  void deallocate(MemoryKind kind, const Allocation& allocation) noexcept override {
    if (allocation.data != nullptr) --live_allocations;
    host_->deallocate(kind, allocation);
  }
  void copy(std::byte* dst, const std::byte* src, std::uint64_t nbytes, StreamView stream) override {
    if (!shares_events_) taken_over(&host_order_);
    host_->copy(dst, src, nbytes, stream);
  }
  void fill(std::byte* dst, std::byte value, std::uint64_t nbytes, StreamView stream) override {
    if (!shares_events_) taken_over(&host_order_);
    host_->fill(dst, value, nbytes, stream);
  }
  void launch_copy(CopyDirection direction, const CopyArgs& args, StreamView stream) override {
    ++launches;
    if (!shares_events_) taken_over(&host_order_);
    host_->launch_copy(direction, args, stream);
  }
  void enqueue(StreamView stream, std::function<void()> task) override {
    if (!shares_events_) taken_over(&host_order_);
    host_->enqueue(stream, std::move(task));
  }

  [[nodiscard]] void* create_stream(std::string_view name) override {
    ++streams;
    return host_->create_stream(name);
  }
  void destroy_stream(void* stream) noexcept override { host_->destroy_stream(stream); }
  [[nodiscard]] bool runs_inline(StreamView stream) const noexcept override { return host_->runs_inline(stream); }
  void synchronize_stream(StreamView stream, Wait& wait) override { host_->synchronize_stream(stream, wait); }

  [[nodiscard]] void* create_event() override {
    ++events;
    ++live_events;
    return new Handle{
        std::shared_ptr<void>(host_->create_event(), [host = host_](void* e) { host->destroy_event(e); })};
  }
  void destroy_event(void* event) noexcept override {
    --live_events;
    {
      const std::lock_guard lock(mutex_);
      imported_.erase(event);
      exported_.erase(event);
    }
    delete static_cast<Handle*>(event);
  }
  void record_event(void* event, StreamView stream) override {
    if (forget.event_record && forget.event_record(event)) return;
    host_->record_event(inner(event), stream);
  }
  [[nodiscard]] bool query_event(void* event) override { return host_->query_event(inner(event)); }
  void synchronize_event(void* event, Wait& wait) override {
    host_->synchronize_event(inner(event), wait);
    if (!shares_events_) handed_over(&host_order_);
  }
  void stream_wait_event(StreamView stream, void* event) override {
    if (forget.stream_wait && forget.stream_wait(event)) return;
    host_->stream_wait_event(stream, inner(event));
  }

  [[nodiscard]] MemoryHandle export_memory(const Allocation& allocation) override {
    MemoryHandle handle;
    std::memcpy(handle.bytes.data(), &allocation.data, sizeof(allocation.data));
    handle.nbytes = allocation.nbytes;
    return handle;
  }
  [[nodiscard]] Allocation import_memory(const MemoryHandle& handle) override {
    ++live_imports;
    Allocation allocation;
    std::memcpy(&allocation.data, handle.bytes.data(), sizeof(allocation.data));
    allocation.nbytes = handle.nbytes;
    return allocation;
  }
  void close_memory(const Allocation& /*imported*/) noexcept override { --live_imports; }
  [[nodiscard]] bool can_share_events() override { return shares_events_; }
  [[nodiscard]] void* create_shared_event() override { return create_event(); }
  // The address of the exporter's handle; the importer shares what is behind it.
  [[nodiscard]] EventHandle export_event(void* event) override {
    EventHandle handle{};
    std::memcpy(handle.data(), &event, sizeof(event));
    const std::lock_guard lock(mutex_);
    exported_.insert(event);
    return handle;
  }
  [[nodiscard]] void* import_event(const EventHandle& handle) override {
    void* event = nullptr;
    std::memcpy(&event, handle.data(), sizeof(event));
    ++live_events;
    auto* const made = new Handle{static_cast<Handle*>(event)->inner};
    const std::lock_guard lock(mutex_);
    imported_.insert(made);
    return made;
  }
  // For planted faults: whose event it is.
  [[nodiscard]] bool is_imported(void* event) {
    const std::lock_guard lock(mutex_);
    return imported_.contains(event);
  }
  [[nodiscard]] bool is_exported(void* event) {
    const std::lock_guard lock(mutex_);
    return exported_.contains(event);
  }

 private:
  struct Handle {
    std::shared_ptr<void> inner;
  };
  SharedDevice(std::shared_ptr<HostRuntime> host, bool shares_events, std::string id)
      : host_(std::move(host)), shares_events_(shares_events), id_(std::move(id)) {}
  [[nodiscard]] static void* inner(void* event) { return static_cast<Handle*>(event)->inner.get(); }

  // Where events are not shared, the ranks' hosts hand the slots over, through a ring that each of them has mapped. A rank
  // that does so without having waited for its stream is found out all the same.
  inline static char host_order_ = 0;

  std::shared_ptr<HostRuntime> host_;
  bool shares_events_;
  std::string id_;
  std::mutex mutex_;
  std::set<void*> imported_;
  std::set<void*> exported_;
};

// What one rank has of it: its runtime, and the stream on which it makes and reads its tensors.
struct RankDevice {
  std::shared_ptr<SharedDevice> runtime;
  Stream caller;
  explicit RankDevice(std::shared_ptr<SharedDevice> made) : runtime(std::move(made)), caller(runtime, "caller") {}
};

}  // namespace fastsync::testing
