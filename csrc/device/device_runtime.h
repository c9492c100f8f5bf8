// The one caller of a device: memory, copies, streams, events.
//
// A DeviceRuntime is a small virtual interface; Stream and Event are the owners that everybody else uses. The contract
// is CUDA's, so that code written against HostRuntime on a laptop is right on a GPU:
//   - work queued on one stream runs in order; two streams are ordered only by events;
//   - an event marks the work that was queued on a stream when it was recorded; recording again moves the mark;
//   - an event that was never recorded counts as complete, and waiting for it is no wait;
//   - stream_wait() holds back the stream, never the host. Only the synchronize() calls hold the host.
//
// Ownership: Stream and Event keep their runtime alive. A StreamView borrows. Destroying a stream completes the work
// that is queued on it; destroying an event forgets the mark, not the work.
// Threads: all calls are thread-safe, except that one Event is recorded and destroyed by one thread at a time.
// Errors: DeviceError from the device. An error of queued work is sticky: the stream skips its later work, and every
// synchronize() of that stream, of an event recorded on it later, or of a stream that waited for such an event, throws
// it again. Host waits throw TimeoutError, or what Wait::check() throws.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "common/owned_fd.h"
#include "common/wait.h"
#include "device/copy_args.h"

namespace fastsync {

// kShared is host memory behind a memfd, to be mapped by other processes.
enum class MemoryKind : std::uint8_t { kHost, kPinnedHost, kShared, kDevice };
[[nodiscard]] std::string_view memory_kind_name(MemoryKind kind) noexcept;

struct Allocation {
  std::byte* data = nullptr;
  std::uint64_t nbytes = 0;
  int fd = -1;  // kShared only; belongs to the allocation
};

// How another process of this host may map a device allocation: a handle to be copied, or a descriptor to be passed.
struct MemoryHandle {
  std::array<std::byte, 64> bytes{};
  OwnedFd fd;  // set: the memory travels as this descriptor and `bytes` is unused
  std::uint64_t nbytes = 0;
};
using EventHandle = std::array<std::byte, 64>;

class DeviceRuntime;

class StreamView {
 public:
  StreamView() = default;
  StreamView(DeviceRuntime* runtime, void* handle) noexcept : runtime_(runtime), handle_(handle) {}
  [[nodiscard]] DeviceRuntime* runtime() const noexcept { return runtime_; }
  // The native stream (cudaStream_t, aclrtStream), or the host runtime's own.
  [[nodiscard]] void* handle() const noexcept { return handle_; }
  [[nodiscard]] explicit operator bool() const noexcept { return runtime_ != nullptr; }

 private:
  DeviceRuntime* runtime_ = nullptr;
  void* handle_ = nullptr;
};

class DeviceRuntime : public std::enable_shared_from_this<DeviceRuntime> {
 public:
  virtual ~DeviceRuntime() = default;
  DeviceRuntime(const DeviceRuntime&) = delete;
  DeviceRuntime& operator=(const DeviceRuntime&) = delete;

  [[nodiscard]] virtual std::string_view name() const noexcept = 0;

  // Use Buffer. allocate() throws DeviceError with the size, what is free and what to do.
  [[nodiscard]] virtual Allocation allocate(MemoryKind kind, std::uint64_t nbytes) = 0;
  virtual void deallocate(MemoryKind kind, const Allocation& allocation) noexcept = 0;

  // Queues a copy; the memory must stay valid until the stream has passed it. Host memory that is not pinned is allowed,
  // and may make the call wait for the stream.
  virtual void copy(std::byte* dst, const std::byte* src, std::uint64_t nbytes, StreamView stream) = 0;
  // Queues setting [dst, dst + nbytes) to `value`.
  virtual void fill(std::byte* dst, std::byte value, std::uint64_t nbytes, StreamView stream) = 0;
  // Queues one multi-tensor copy. What args points to is read when the stream gets there.
  virtual void launch_copy(CopyDirection direction, const CopyArgs& args, StreamView stream) = 0;
  // Queues host code. It must not call the runtime.
  virtual void enqueue(StreamView stream, std::function<void()> task) = 0;

  // Use Stream and Event. `name` is what a debugger and a profiler show.
  [[nodiscard]] virtual void* create_stream(std::string_view name) = 0;
  virtual void destroy_stream(void* stream) noexcept = 0;
  // True for a stream whose work runs on the calling thread, inside the call that queues it.
  [[nodiscard]] virtual bool runs_inline(StreamView stream) const noexcept = 0;
  virtual void synchronize_stream(StreamView stream, Wait& wait) = 0;

  [[nodiscard]] virtual void* create_event() = 0;
  virtual void destroy_event(void* event) noexcept = 0;
  virtual void record_event(void* event, StreamView stream) = 0;
  [[nodiscard]] virtual bool query_event(void* event) = 0;
  virtual void synchronize_event(void* event, Wait& wait) = 0;
  // An inline stream cannot be held back: StateError if the event is not complete. Synchronise the event instead.
  virtual void stream_wait_event(StreamView stream, void* event) = 0;

  // After an error that only a new process gets rid of: nothing can be given back any more, and every call throws.
  [[nodiscard]] virtual bool broken() const noexcept { return false; }

  // Whose device it is: equal in all processes that see the same device, whatever they call it. Empty for host memory.
  [[nodiscard]] virtual std::string device_id() const { return {}; }
  // Somebody else's stream, by its native handle (the caller's current one). Borrowed: valid as long as that is.
  [[nodiscard]] virtual StreamView wrap_stream(void* native) { return {this, native}; }

  // Makes host memory that is not ours reachable for the device, until unregistered. `data` is whole pages.
  virtual void register_host(std::byte* /*data*/, std::uint64_t /*nbytes*/) {}
  virtual void unregister_host(std::byte* /*data*/) noexcept {}
  // For calls into other libraries that work on the calling thread's current device: it is this one while the result
  // lives.
  [[nodiscard]] virtual std::shared_ptr<void> make_current() { return {}; }

  // Sharing with other processes of this host. Exported things stay the exporter's, and must outlive the importers' use.
  // Importing twice is an error; the exporting process itself cannot import. The defaults throw DeviceError.
  [[nodiscard]] virtual MemoryHandle export_memory(const Allocation& allocation);
  [[nodiscard]] virtual Allocation import_memory(const MemoryHandle& handle);
  virtual void close_memory(const Allocation& imported) noexcept;
  // Whether events can be shared here: a container or a driver may refuse. Then only the host can order two processes.
  [[nodiscard]] virtual bool can_share_events() { return false; }
  [[nodiscard]] virtual void* create_shared_event();
  [[nodiscard]] virtual EventHandle export_event(void* event);
  [[nodiscard]] virtual void* import_event(const EventHandle& handle);

 protected:
  DeviceRuntime() = default;
};

// Host memory that a device may reach for as long as this lives.
class HostRegistration {
 public:
  HostRegistration() = default;
  HostRegistration(std::shared_ptr<DeviceRuntime> runtime, std::byte* data, std::uint64_t nbytes)
      : runtime_(std::move(runtime)), data_(data) {
    runtime_->register_host(data, nbytes);
  }
  ~HostRegistration() { close(); }
  HostRegistration(HostRegistration&& other) noexcept
      : runtime_(std::move(other.runtime_)), data_(std::exchange(other.data_, nullptr)) {}
  HostRegistration& operator=(HostRegistration&& other) noexcept {
    if (this != &other) {
      close();
      runtime_ = std::move(other.runtime_);
      data_ = std::exchange(other.data_, nullptr);
    }
    return *this;
  }
  HostRegistration(const HostRegistration&) = delete;
  HostRegistration& operator=(const HostRegistration&) = delete;
  // Whether it is that memory, on that device.
  [[nodiscard]] bool covers(const DeviceRuntime* runtime, const std::byte* data) const noexcept {
    return data_ != nullptr && runtime_.get() == runtime && data_ == data;
  }

 private:
  void close() noexcept {
    if (data_ != nullptr) runtime_->unregister_host(std::exchange(data_, nullptr));
  }
  std::shared_ptr<DeviceRuntime> runtime_;
  std::byte* data_ = nullptr;
};

class Stream {
 public:
  Stream() = default;
  Stream(std::shared_ptr<DeviceRuntime> runtime, std::string_view name)
      : runtime_(std::move(runtime)), handle_(runtime_->create_stream(name)) {}
  // Takes over a stream that the runtime has made.
  Stream(std::shared_ptr<DeviceRuntime> runtime, void* handle) noexcept
      : runtime_(std::move(runtime)), handle_(handle) {}
  ~Stream() { close(); }
  Stream(Stream&& other) noexcept
      : runtime_(std::move(other.runtime_)), handle_(std::exchange(other.handle_, nullptr)) {}
  Stream& operator=(Stream&& other) noexcept {
    if (this != &other) {
      close();
      runtime_ = std::move(other.runtime_);
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  [[nodiscard]] StreamView view() const noexcept { return {runtime_.get(), handle_}; }
  // Blocks the host until all queued work is done. Throws the stream's sticky error.
  void synchronize(Wait& wait) { runtime_->synchronize_stream(view(), wait); }

 private:
  void close() noexcept {
    if (handle_ != nullptr) runtime_->destroy_stream(std::exchange(handle_, nullptr));
  }
  std::shared_ptr<DeviceRuntime> runtime_;
  void* handle_ = nullptr;
};

class Event {
 public:
  Event() = default;
  explicit Event(std::shared_ptr<DeviceRuntime> runtime)
      : runtime_(std::move(runtime)), handle_(runtime_->create_event()) {}
  // Takes over an event that the runtime has made or imported.
  Event(std::shared_ptr<DeviceRuntime> runtime, void* handle) noexcept
      : runtime_(std::move(runtime)), handle_(handle) {}
  ~Event() { close(); }
  Event(Event&& other) noexcept : runtime_(std::move(other.runtime_)), handle_(std::exchange(other.handle_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    if (this != &other) {
      close();
      runtime_ = std::move(other.runtime_);
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  [[nodiscard]] void* handle() const noexcept { return handle_; }
  void record(StreamView stream) { runtime_->record_event(handle_, stream); }
  // True once the marked work is done. Throws its error.
  [[nodiscard]] bool query() { return runtime_->query_event(handle_); }
  // Blocks the host.
  void synchronize(Wait& wait) { runtime_->synchronize_event(handle_, wait); }
  // Later work on `stream` runs behind the marked work. Does not block the host.
  void stream_wait(StreamView stream) { runtime_->stream_wait_event(stream, handle_); }

 private:
  void close() noexcept {
    if (handle_ != nullptr) runtime_->destroy_event(std::exchange(handle_, nullptr));
  }
  std::shared_ptr<DeviceRuntime> runtime_;
  void* handle_ = nullptr;
};

}  // namespace fastsync
