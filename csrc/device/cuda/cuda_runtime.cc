#include "device/cuda/cuda_runtime.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "device/copy_kernel.h"
#include "device/cuda/copy_kernel_ptx.h"

namespace fastsync {
namespace {

using cuda::address_of;
using namespace std::chrono_literals;

cuda::Stream native(StreamView stream) { return static_cast<cuda::Stream>(stream.handle()); }
cuda::Event native(void* event) { return static_cast<cuda::Event>(event); }

// After one of these every call in the context fails, with this or another code, until the process ends.
bool breaks_context(cuda::Result result) {
  switch (result) {
    case cuda::kEccUncorrectable:
    case cuda::kNvlinkUncorrectable:
    case cuda::kIllegalAddress:
    case cuda::kLaunchTimeout:
    case cuda::kContextIsDestroyed:
    case cuda::kAssert:
    case cuda::kHardwareStackError:
    case cuda::kIllegalInstruction:
    case cuda::kMisalignedAddress:
    case cuda::kInvalidAddressSpace:
    case cuda::kInvalidPc:
    case cuda::kLaunchFailed: return true;
    default: return false;
  }
}

bool wants_virtual_memory() {
  const char* value = std::getenv("FASTSYNC_IPC");
  const std::string_view wanted = value == nullptr ? "" : value;
  if (wanted.empty() || wanted == "legacy") return false;
  if (wanted == "vmm") return true;
  throw InvalidArgument(concat("FASTSYNC_IPC is '", wanted, "'; it can be 'legacy' or 'vmm'"));
}

// Polls of an event. At first a wait is expected to be short and costs a core; then each sleep is a sixteenth of what
// has been waited, so that a wait ends late by that much at most, and a long one costs next to nothing.
class Backoff {
 public:
  // How long to sleep before the next poll: zero for the first polls.
  [[nodiscard]] std::chrono::nanoseconds next(const Wait& wait) {
    const auto waited = Clock::now() - started_;
    if (waited < kSpin) return 0ns;
    return std::min({std::clamp<std::chrono::nanoseconds>(waited / 16, kShortest, kLongest), wait.slice()});
  }

 private:
  static constexpr std::chrono::microseconds kSpin = 50us;
  static constexpr std::chrono::nanoseconds kShortest = 20us;
  static constexpr std::chrono::nanoseconds kLongest = 2ms;
  Clock::time_point started_ = Clock::now();
};

}  // namespace

// ---- The context ----------------------------------------------------------------------------------------------------

cuda::Result CudaRuntime::Current::enter(const CudaRuntime& runtime) noexcept {
  cuda::Result result = api_.cuCtxGetCurrent(&previous_);
  if (result != cuda::kSuccess || previous_ == runtime.context_) return result;
  result = api_.cuCtxSetCurrent(runtime.context_);
  changed_ = result == cuda::kSuccess;
  return result;
}

CudaRuntime::Current::Current(const CudaRuntime& runtime) : api_(runtime.api_) {
  runtime.throw_if_broken();
  result_ = enter(runtime);
  runtime.check(result_, "cuCtxSetCurrent");
}

CudaRuntime::Current::~Current() {
  if (changed_) static_cast<void>(api_.cuCtxSetCurrent(previous_));
}

struct CudaRuntime::Registry {
  std::mutex mutex;
  std::map<int, std::shared_ptr<CudaRuntime>> runtimes;
};

CudaRuntime::Registry& CudaRuntime::registry() {
  // Leaked: when the process ends, the driver may be gone before whoever would destroy these.
  static auto* const instance = new Registry;
  return *instance;
}

std::shared_ptr<CudaRuntime> CudaRuntime::get(int ordinal) {
  const CudaDriver& driver = CudaDriver::get();
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  if (const auto found = all.runtimes.find(ordinal); found != all.runtimes.end()) return found->second;
  const std::shared_ptr<CudaRuntime> made(new CudaRuntime(driver, ordinal, {.virtual_memory = wants_virtual_memory()}));
  all.runtimes.emplace(ordinal, made);
  return made;
}

std::shared_ptr<CudaRuntime> CudaRuntime::create(int ordinal, const Options& options) {
  return std::shared_ptr<CudaRuntime>(new CudaRuntime(CudaDriver::get(), ordinal, options));
}

CudaRuntime::CudaRuntime(const CudaDriver& driver, int ordinal, const Options& options)
    : driver_(driver), api_(driver.api()), options_(options), ordinal_(ordinal) {
  if (ordinal < 0 || ordinal >= driver.device_count()) {
    throw InvalidArgument(concat("there is no CUDA device ", ordinal, ": this process sees ", driver.device_count(),
                                 " (numbered from 0)", CudaDriver::remedy(cuda::kInvalidDevice)));
  }
  check(api_.cuDeviceGet(&device_, ordinal), "cuDeviceGet");
  cuda::Uuid uuid{};
  check(api_.cuDeviceGetUuid_v2(&uuid, device_), "cuDeviceGetUuid");
  for (const unsigned char byte : uuid.bytes) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    device_id_ += kDigits[byte >> 4];
    device_id_ += kDigits[byte & 15];
  }
  int value = 0;
  check(api_.cuDeviceGetAttribute(&value, cuda::kAttributeMultiprocessorCount, device_), "cuDeviceGetAttribute");
  multiprocessors_ = static_cast<unsigned>(std::max(value, 1));
  if (options.virtual_memory) {
    for (const int attribute : {cuda::kAttributeVirtualMemorySupported, cuda::kAttributePosixDescriptorSupported}) {
      check(api_.cuDeviceGetAttribute(&value, attribute, device_), "cuDeviceGetAttribute");
      if (value == 0) {
        throw DeviceError(concat("CUDA device ", ordinal, " cannot share virtual memory by descriptors (attribute ",
                                 attribute, " is 0); unset FASTSYNC_IPC or set it to 'legacy'"));
      }
    }
    check(api_.cuDeviceGetAttribute(&value, cuda::kAttributeGpuDirectRdmaWithVirtualMemory, device_),
          "cuDeviceGetAttribute");
    rdma_capable_ = value != 0;
  }
  check(api_.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
  try {
    load_kernels();
  } catch (...) {
    if (library_ != nullptr) note(api_.cuLibraryUnload(library_), "cuLibraryUnload");
    note(api_.cuDevicePrimaryCtxRelease_v2(device_), "cuDevicePrimaryCtxRelease");
    throw;
  }
}

CudaRuntime::~CudaRuntime() {
  {
    const Current current(*this, std::nothrow);
    for (const cuda::Event event : idle_events_) note(api_.cuEventDestroy_v2(event), "cuEventDestroy");
    note(api_.cuLibraryUnload(library_), "cuLibraryUnload");
  }
  note(api_.cuDevicePrimaryCtxRelease_v2(device_), "cuDevicePrimaryCtxRelease");
}

void CudaRuntime::load_kernels() {
  const Current current(*this);
  std::array<char, 2048> log{};
  std::array<int, 2> options = {cuda::kJitErrorLogBuffer, cuda::kJitErrorLogBufferBytes};
  std::array<void*, 2> values = {log.data(), cuda::number_as_pointer(log.size() - 1)};
  check(api_.cuLibraryLoadData(&library_, kCopyKernelPtx, options.data(), values.data(), options.size(), nullptr,
                               nullptr, 0),
        "cuLibraryLoadData", [&] {
          return concat("of the copy kernel",
                        log[0] == '\0' ? std::string() : concat(" (the driver's compiler says: ", log.data(), ')'));
        });
  for (const auto& [name, function] : {std::pair{kPackKernelName, &pack_}, std::pair{kUnpackKernelName, &unpack_}}) {
    cuda::Kernel kernel = nullptr;
    const auto details = [name = name] { return concat("of ", name); };
    check(api_.cuLibraryGetKernel(&kernel, library_, name), "cuLibraryGetKernel", details);
    check(api_.cuKernelGetFunction(function, kernel), "cuKernelGetFunction", details);
    // Otherwise the code goes to the device at the first launch (since 12.2 by default), which can wait for what runs.
    if (api_.cuFuncLoad != nullptr) check(api_.cuFuncLoad(*function), "cuFuncLoad", details);
  }
}

int CudaRuntime::current_device() {
  if (unavailable_reason()) return 0;
  const cuda::Api& api = CudaDriver::get().api();
  cuda::Context context = nullptr;
  cuda::Device device = 0;
  if (api.cuCtxGetCurrent(&context) != cuda::kSuccess || context == nullptr) return 0;
  // A CUdevice is the ordinal that it was got by.
  if (api.cuCtxGetDevice(&device) == cuda::kSuccess) return device;
  // A broken context answers that with its error. Whoever calls shall hear of it from the device that it is.
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  for (const auto& [ordinal, runtime] : all.runtimes) {
    if (runtime->context_ == context) return ordinal;
  }
  return 0;
}

CudaRuntime::Counters CudaRuntime::counters() const noexcept {
  const std::lock_guard lock(mutex_);
  return counters_;
}

// ---- Errors ---------------------------------------------------------------------------------------------------------

void CudaRuntime::throw_if_broken() const {
  if (!is_broken_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  std::rethrow_exception(broken_);
}

void CudaRuntime::fail(cuda::Result result, const char* function, const std::string& details,
                       std::string_view remedy) const {
  throw_if_broken();  // what comes after the first failure says nothing new
  const DeviceError error(concat(function, details.empty() ? "" : " ", details, " failed on CUDA device ", ordinal_,
                                 ": ", driver_.describe(result),
                                 remedy.empty() ? CudaDriver::remedy(result) : std::string(remedy)));
  if (breaks_context(result)) {
    {
      const std::lock_guard lock(mutex_);
      if (!broken_) broken_ = std::make_exception_ptr(error);
    }
    is_broken_.store(true, std::memory_order_release);
    throw_if_broken();
  }
  throw error;
}

void CudaRuntime::note(cuda::Result result, const char* function) const noexcept {
  if (result == cuda::kSuccess || result == cuda::kDeinitialized || breaks_context(result) ||
      is_broken_.load(std::memory_order_acquire)) {
    return;
  }
  const char* text = nullptr;
  if (api_.cuGetErrorName(result, &text) != cuda::kSuccess || text == nullptr) text = "unknown CUDA error";
  std::fprintf(stderr, "fastsync: %s failed on CUDA device %d: %s (%d)\n", function, ordinal_, text, result);
}

// ---- Work -----------------------------------------------------------------------------------------------------------

void CudaRuntime::copy(std::byte* dst, const std::byte* src, std::uint64_t nbytes, StreamView stream) {
  if (nbytes == 0) return;
  const Current current(*this);
  while (nbytes > 0) {
    // One copy must not cross from one registration into the next.
    const std::uint64_t piece = std::min(registered_run(dst, nbytes), registered_run(src, nbytes));
    check(api_.cuMemcpyAsync(address_of(dst), address_of(src), piece, native(stream)), "cuMemcpyAsync",
          [&] { return concat("of ", piece, " bytes on ", stream_text(stream)); });
    dst += piece;
    src += piece;
    nbytes -= piece;
  }
}

void CudaRuntime::fill(std::byte* dst, std::byte value, std::uint64_t nbytes, StreamView stream) {
  if (nbytes == 0) return;
  const Current current(*this);
  check(api_.cuMemsetD8Async(address_of(dst), std::to_integer<unsigned char>(value), nbytes, native(stream)),
        "cuMemsetD8Async", [&] { return concat("of ", nbytes, " bytes on ", stream_text(stream)); });
}

void CudaRuntime::launch_copy(CopyDirection direction, const CopyArgs& args, StreamView stream) {
  if (args.count == 0) return;
  const Current current(*this);
  CopyArgs parameter = args;  // the driver takes a copy, but its interface wants to be able to write
  std::array<void*, 1> parameters = {&parameter};
  const bool packs = direction == CopyDirection::kPack;
  check(api_.cuLaunchKernel(packs ? pack_ : unpack_, copy_grid_blocks(args.used_bytes, multiprocessors_), 1, 1,
                            kCopyBlockThreads, 1, 1, 0, native(stream), parameters.data(), nullptr),
        "cuLaunchKernel", [&] {
          return concat("of ", packs ? kPackKernelName : kUnpackKernelName, ", ", args.count, " pieces, on ",
                        stream_text(stream));
        });
}

void CudaRuntime::enqueue(StreamView, std::function<void()>) {
  throw DeviceError("host code cannot be queued on a CUDA stream; synchronize an event and run it on the host");
}

// ---- Streams and events ---------------------------------------------------------------------------------------------

void* CudaRuntime::create_stream(std::string_view name) {
  const Current current(*this);
  cuda::Stream stream = nullptr;
  check(api_.cuStreamCreate(&stream, cuda::kStreamNonBlocking), "cuStreamCreate",
        [&] { return concat("of '", name, "'"); });
  const std::lock_guard lock(mutex_);
  stream_names_[stream] = name;
  ++counters_.streams;
  return stream;
}

void CudaRuntime::destroy_stream(void* stream) noexcept {
  const Current current(*this, std::nothrow);
  {
    const std::lock_guard lock(mutex_);
    stream_names_.erase(stream);
  }
  // Returns at once; the driver frees the stream when its work is done.
  if (current) note(api_.cuStreamDestroy_v2(static_cast<cuda::Stream>(stream)), "cuStreamDestroy");
}

StreamView CudaRuntime::wrap_stream(void* native_stream) {
  switch (reinterpret_cast<std::uintptr_t>(native_stream)) {
    case 0:
    case 1: return {this, cuda::stream_legacy()};
    case 2: return {this, cuda::stream_per_thread()};
    default: return {this, native_stream};
  }
}

std::string CudaRuntime::stream_text(StreamView stream) const {
  if (native(stream) == nullptr || native(stream) == cuda::stream_legacy()) return "the default stream";
  if (native(stream) == cuda::stream_per_thread()) return "the thread's default stream";
  const std::lock_guard lock(mutex_);
  const auto found = stream_names_.find(stream.handle());
  return found == stream_names_.end() ? std::string("the caller's stream") : concat("stream '", found->second, "'");
}

void CudaRuntime::synchronize_stream(StreamView stream, Wait& wait) {
  cuda::Event event = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!idle_events_.empty()) {
      event = idle_events_.back();
      idle_events_.pop_back();
    }
  }
  if (event == nullptr) event = static_cast<cuda::Event>(make_event(cuda::kEventDisableTiming));
  // Also when the wait ends early: an event may be recorded again while its old mark is pending.
  const auto give_back = [this](cuda::Event* held) {
    const std::lock_guard lock(mutex_);
    idle_events_.push_back(*held);
  };
  const std::unique_ptr<cuda::Event, decltype(give_back)> lent(&event, give_back);
  record_event(event, stream);
  wait_for_event(event, wait, stream_text(stream));
}

void* CudaRuntime::make_event(unsigned flags) {
  const Current current(*this);
  cuda::Event event = nullptr;
  check(api_.cuEventCreate(&event, flags), "cuEventCreate",
        [&] { return std::string((flags & cuda::kEventInterprocess) != 0 ? "for other processes" : ""); });
  const std::lock_guard lock(mutex_);
  ++counters_.events;
  return event;
}

void* CudaRuntime::create_event() { return make_event(cuda::kEventDisableTiming); }

void CudaRuntime::destroy_event(void* event) noexcept {
  const Current current(*this, std::nothrow);
  if (current) note(api_.cuEventDestroy_v2(native(event)), "cuEventDestroy");
}

void CudaRuntime::record_event(void* event, StreamView stream) {
  const Current current(*this);
  check(api_.cuEventRecord(native(event), native(stream)), "cuEventRecord",
        [&] { return concat("on ", stream_text(stream)); });
}

bool CudaRuntime::query_event(void* event) {
  const Current current(*this);
  const cuda::Result result = api_.cuEventQuery(native(event));
  if (result == cuda::kNotReady) return false;
  check(result, "cuEventQuery");
  return true;
}

void CudaRuntime::synchronize_event(void* event, Wait& wait) { wait_for_event(native(event), wait, "an event"); }

void CudaRuntime::stream_wait_event(StreamView stream, void* event) {
  const Current current(*this);
  check(api_.cuStreamWaitEvent(native(stream), native(event), 0), "cuStreamWaitEvent",
        [&] { return concat("on ", stream_text(stream)); });
}

// The driver's own waits have no deadline and cannot be interrupted.
void CudaRuntime::wait_for_event(cuda::Event event, Wait& wait, std::string_view what) {
  Backoff backoff;
  auto checked = Clock::now();
  for (;;) {
    if (query_event(event)) break;
    const auto pause = backoff.next(wait);
    if (pause > 0ns) {
      std::this_thread::sleep_for(pause);
    } else {
      std::this_thread::yield();
    }
    const bool expired = wait.expired();
    // The hook looks at sockets and signals: not at every poll, but always before giving up, as it may know why.
    if (expired || Clock::now() - checked >= kPollInterval / 2) {
      wait.check();
      checked = Clock::now();
    }
    if (expired && !query_event(event)) {
      throw TimeoutError(concat("no progress for ", std::chrono::duration<double>(wait.timeout()).count(),
                                " s waiting for ", what, " on CUDA device ", ordinal_,
                                ": the work queued there is not done"));
    }
  }
  wait.progress();
}

}  // namespace fastsync
