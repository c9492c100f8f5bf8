// The device contract on one NVIDIA GPU, over the driver API.
//
// The runtime works in the device's primary context, the one that torch and every other user of the CUDA runtime works
// in: memory, streams and events go between them freely. No call leaves a trace on the calling thread: its current
// context is set for the call and put back.
//
// Differences from HostRuntime:
//   - an error of queued work breaks the context, that is every stream and every user of the device in this process. The
//     first such error is kept, and every later call throws it;
//   - enqueue() is refused (DeviceError). The driver runs host code on a thread that all streams share, does not run it
//     after an error, and cannot let its failure stop the stream: the contract could not be kept;
//   - a timed-out synchronize leaves the work running. Only abort of whatever it waits for, or exit, ends it.
//
// The copy kernel is loaded when the runtime is made, not at the first launch: loading may have to wait for what runs on
// the device, and a collective that is running waits for other ranks.
//
// Ownership: get() keeps one runtime for each device until the process ends. Device memory is this runtime's own; memory
// of others is only read, written and (host memory) registered.
// Threads: as DeviceRuntime. Two threads may use one stream.
// Streams: those of create_stream() do not wait for the legacy default stream, nor it for them.
// Errors: DeviceError with the function, what the driver called the error, the device and a remedy.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/error.h"
#include "device/cuda/cuda_driver.h"
#include "device/device_runtime.h"

namespace fastsync {

class CudaRuntime final : public DeviceRuntime {
 public:
  struct Options {
    // Device memory as physical memory mapped by us, which other processes map by a descriptor. Otherwise it is
    // cuMemAlloc's, which they map by a handle of 64 bytes. The first works where legacy handles are refused, and can be
    // registered for RDMA; the second needs no descriptor to be passed.
    bool virtual_memory = false;
  };

  // What was made since the runtime was, and bytes asked for: a steady state leaves all of it as it is.
  struct Counters {
    std::uint64_t allocations = 0;  // of device and pinned memory
    std::uint64_t allocated_bytes = 0;
    std::uint64_t imports = 0;
    std::uint64_t registrations = 0;
    std::uint64_t streams = 0;
    std::uint64_t events = 0;
    friend bool operator==(const Counters&, const Counters&) = default;
  };

  // Why CUDA cannot be used here; see CudaDriver. Initialises CUDA.
  [[nodiscard]] static std::optional<std::string> unavailable_reason() { return CudaDriver::unavailable_reason(); }

  // The process's runtime of that device, made at the first call, with virtual_memory as FASTSYNC_IPC ("legacy", the
  // default, or "vmm") says then. Throws InvalidArgument for an ordinal that does not exist.
  [[nodiscard]] static std::shared_ptr<CudaRuntime> get(int ordinal);
  // One of one's own.
  [[nodiscard]] static std::shared_ptr<CudaRuntime> create(int ordinal, const Options& options);
  ~CudaRuntime() override;

  // Ordinal of the device that the memory at `address` lies on; -1 for host memory, pinned or not, and for what CUDA
  // does not know. Initialises CUDA; -1 where there is none.
  [[nodiscard]] static int device_of(const void* address);
  // Ordinal of the calling thread's current device, broken or not: 0 for a thread without a context, as in the CUDA
  // runtime.
  [[nodiscard]] static int current_device();

  [[nodiscard]] int ordinal() const noexcept { return ordinal_; }
  [[nodiscard]] bool is_fake() const noexcept { return driver_.is_fake(); }
  [[nodiscard]] Counters counters() const noexcept;

  [[nodiscard]] std::string_view name() const noexcept override { return "cuda"; }
  [[nodiscard]] Allocation allocate(MemoryKind kind, std::uint64_t nbytes) override;
  void deallocate(MemoryKind kind, const Allocation& allocation) noexcept override;

  void copy(std::byte* dst, const std::byte* src, std::uint64_t nbytes, StreamView stream) override;
  void fill(std::byte* dst, std::byte value, std::uint64_t nbytes, StreamView stream) override;
  void launch_copy(CopyDirection direction, const CopyArgs& args, StreamView stream) override;
  void enqueue(StreamView stream, std::function<void()> task) override;

  [[nodiscard]] void* create_stream(std::string_view name) override;
  void destroy_stream(void* stream) noexcept override;
  [[nodiscard]] bool runs_inline(StreamView) const noexcept override { return false; }
  void synchronize_stream(StreamView stream, Wait& wait) override;

  [[nodiscard]] void* create_event() override;
  void destroy_event(void* event) noexcept override;
  void record_event(void* event, StreamView stream) override;
  [[nodiscard]] bool query_event(void* event) override;
  void synchronize_event(void* event, Wait& wait) override;
  void stream_wait_event(StreamView stream, void* event) override;

  // The device's UUID, 32 hexadecimal digits. Of the instance, where the device is divided (MIG).
  [[nodiscard]] bool broken() const noexcept override { return is_broken_.load(std::memory_order_acquire); }
  [[nodiscard]] std::string device_id() const override { return device_id_; }
  // 0 and 1 are the legacy default stream, 2 is the calling thread's default stream.
  [[nodiscard]] StreamView wrap_stream(void* native) override;

  // Pins, so that copies are asynchronous and the copy kernel reaches it. In pieces of at most 1 GiB: one large call fails
  // at 512 GiB, and holds up the driver for every process meanwhile. Memory that somebody has pinned already is left as
  // it is, and stays theirs. Throws DeviceError and leaves nothing pinned if a piece fails.
  void register_host(std::byte* data, std::uint64_t nbytes) override;
  // `data` as it was registered; nothing happens if it was not.
  void unregister_host(std::byte* data) noexcept override;
  // Let go of it on the thread that asked for it.
  [[nodiscard]] std::shared_ptr<void> make_current() override { return std::make_shared<Current>(*this); }

  // A legacy handle maps the whole block of 2 MiB that the memory lies in: export multiples of 2 MiB, or neighbours are
  // shared too.
  [[nodiscard]] MemoryHandle export_memory(const Allocation& allocation) override;
  [[nodiscard]] Allocation import_memory(const MemoryHandle& handle) override;
  void close_memory(const Allocation& imported) noexcept override;
  [[nodiscard]] bool can_share_events() override;
  [[nodiscard]] void* create_shared_event() override;
  [[nodiscard]] EventHandle export_event(void* event) override;
  [[nodiscard]] void* import_event(const EventHandle& handle) override;

 private:
  // Makes the runtime's context the calling thread's, for the length of a scope.
  class Current {
   public:
    // Throws what broke the context, or what the driver says.
    explicit Current(const CudaRuntime& runtime);
    // For what must not throw. False: no call can be made.
    Current(const CudaRuntime& runtime, std::nothrow_t) noexcept : api_(runtime.api_) { result_ = enter(runtime); }
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    [[nodiscard]] explicit operator bool() const noexcept { return result_ == cuda::kSuccess; }

   private:
    [[nodiscard]] cuda::Result enter(const CudaRuntime& runtime) noexcept;
    const cuda::Api& api_;
    cuda::Context previous_ = nullptr;
    cuda::Result result_ = cuda::kSuccess;
    bool changed_ = false;
  };

  struct DeviceMemory {
    enum class Kind : std::uint8_t { kLegacy, kVirtual, kImportedLegacy, kImportedVirtual };
    Kind kind = Kind::kLegacy;
    std::uint64_t mapped_bytes = 0;     // virtual: in whole granules
    cuda::AllocationHandle handle = 0;  // virtual
    cuda::IpcMemHandle imported{};      // imported legacy
  };

  CudaRuntime(const CudaDriver& driver, int ordinal, const Options& options);
  void load_kernels();

  // Throws for anything but success: "<function> <details()> failed on CUDA device 0: ...".
  template <typename Details>
  void check(cuda::Result result, const char* function, const Details& details) const {
    if (result != cuda::kSuccess) fail(result, function, details());
  }
  void check(cuda::Result result, const char* function) const {
    if (result != cuda::kSuccess) fail(result, function, {});
  }
  // `remedy` replaces the usual one of the result.
  [[noreturn]] void fail(cuda::Result result, const char* function, const std::string& details,
                         std::string_view remedy = {}) const;
  void throw_if_broken() const;
  struct Registry;
  [[nodiscard]] static Registry& registry();
  // For what must not throw: a line on stderr, unless the context is broken or the process is ending anyway.
  void note(cuda::Result result, const char* function) const noexcept;

  [[nodiscard]] void* make_event(unsigned flags);
  void wait_for_event(cuda::Event event, Wait& wait, std::string_view what);
  [[nodiscard]] std::string stream_text(StreamView stream) const;

  // cuda_memory.cc
  [[nodiscard]] std::byte* allocate_device(std::uint64_t nbytes);
  void release_device(std::byte* data) noexcept;
  [[nodiscard]] cuda::MemAllocationProp virtual_properties() const;
  [[nodiscard]] std::uint64_t whole_granules(std::uint64_t nbytes) const;
  [[nodiscard]] std::byte* map(cuda::AllocationHandle handle, std::uint64_t mapped_bytes, std::uint64_t nbytes);
  [[nodiscard]] std::string memory_text() const;
  void remember(std::byte* data, const DeviceMemory& memory);
  [[nodiscard]] std::uint64_t registered_run(const std::byte* data, std::uint64_t nbytes) const;

  const CudaDriver& driver_;
  const cuda::Api& api_;
  const Options options_;
  const int ordinal_;
  cuda::Device device_ = 0;
  cuda::Context context_ = nullptr;
  std::string device_id_;
  unsigned multiprocessors_ = 1;
  bool rdma_capable_ = false;
  cuda::Library library_ = nullptr;
  cuda::Function pack_ = nullptr;
  cuda::Function unpack_ = nullptr;

  mutable std::mutex mutex_;  // guards what follows
  mutable std::exception_ptr broken_;
  std::map<const void*, std::string> stream_names_;
  std::vector<cuda::Event> idle_events_;  // of synchronize_stream()
  std::map<const std::byte*, DeviceMemory> device_memory_;
  std::map<const std::byte*, std::vector<std::byte*>> registrations_;  // what was asked for -> pieces that are ours
  std::map<const std::byte*, std::uint64_t> registered_;               // those pieces
  std::optional<bool> shares_events_;
  Counters counters_;

  mutable std::atomic<bool> is_broken_{false};  // set after broken_
  std::atomic<bool> has_registered_{false};
};

}  // namespace fastsync
