#include "device/cuda/cuda_driver.h"

#include <unistd.h>

#include <cstdlib>
#include <string_view>
#include <utility>
#include <vector>

#include "common/error.h"

namespace fastsync {
namespace {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

std::string version_text(int version) { return concat(version / 1000, '.', version % 1000 / 10); }

struct ProcessDriver {
  std::unique_ptr<const CudaDriver> driver;
  std::string reason;
};

const ProcessDriver& process_driver() {
  // Leaked: at exit, streams of other threads may still be in the driver.
  static const ProcessDriver* const instance = [] {
    auto* made = new ProcessDriver;
    const std::string named = environment("FASTSYNC_CUDA_PATH");
    made->driver = CudaDriver::open(named.empty() ? "libcuda.so.1" : named, made->reason);
    return made;
  }();
  return *instance;
}

}  // namespace

std::unique_ptr<const CudaDriver> CudaDriver::open(const std::string& file, std::string& reason) {
  std::unique_ptr<CudaDriver> driver(new CudaDriver);
  std::string why;
  driver->library_ = DynamicLibrary::open(file, DynamicLibrary::Mode::kLoad, why);
  if (!driver->library_) {
    reason = concat("no CUDA driver: ", why,
                    "; install the NVIDIA driver, or start the container with access to the GPUs (--gpus all)");
    return nullptr;
  }
  if (!driver->initialize(reason)) return nullptr;
  return driver;
}

bool CudaDriver::initialize(std::string& reason) {
  is_fake_ = library_.symbol<char>("fastsync_fake_cuda") != nullptr;
  if (is_fake_ && environment("FASTSYNC_ALLOW_FAKE") != "1") {
    reason = concat(path(), " is a test double of the CUDA driver, not a driver",
                    "; unset FASTSYNC_CUDA_PATH, or set FASTSYNC_ALLOW_FAKE=1 in a test");
    return false;
  }

  std::vector<std::string> missing;
#define FASTSYNC_LOAD_REQUIRED(name, ...) api_.name = library_.symbol<__VA_ARGS__>(#name, missing);
#define FASTSYNC_LOAD_OPTIONAL(name, ...) api_.name = library_.symbol<__VA_ARGS__>(#name);
  using namespace cuda;
  FASTSYNC_CUDA_REQUIRED(FASTSYNC_LOAD_REQUIRED)
  FASTSYNC_CUDA_OPTIONAL(FASTSYNC_LOAD_OPTIONAL)
#undef FASTSYNC_LOAD_REQUIRED
#undef FASTSYNC_LOAD_OPTIONAL

  // Before what is missing is judged: an old driver lacks functions because it is old, and that is what to say.
  if (api_.cuDriverGetVersion != nullptr && api_.cuDriverGetVersion(&version_) == kSuccess && version_ != 0 &&
      version_ < kMinVersion) {
    reason = concat("the driver ", path(), " is of CUDA ", version_text(version_), ", fastsync needs ",
                    version_text(kMinVersion), " or later; update the NVIDIA driver to 525 or later");
    return false;
  }
  if (!missing.empty()) {
    std::string names = missing.front();
    for (std::size_t i = 1; i < missing.size() && i < 3; ++i) names += ", " + missing[i];
    reason = concat(path(), " lacks ", missing.size(), " functions of CUDA ", version_text(kMinVersion), ": ", names,
                    missing.size() > 3 ? ", ..." : "", "; it is not a CUDA driver, or not a whole one");
    return false;
  }

  Result result = api_.cuInit(0);
  if (result == kStubLibrary) {
    reason =
        concat(path(), " is the CUDA toolkit's stub, which only serves to link against (cuInit: ", describe(result),
               "); take its folder out of LD_LIBRARY_PATH and install the NVIDIA driver");
    return false;
  }
  if (result != kSuccess) {
    reason = concat("the driver ", path(), " cannot start (cuInit: ", describe(result), ")", remedy(result));
    return false;
  }
  result = api_.cuDeviceGetCount(&device_count_);
  if (result != kSuccess || device_count_ == 0) {
    if (result == kSuccess) result = kNoDevice;
    reason =
        concat("the driver ", path(), " shows no device (cuDeviceGetCount: ", describe(result), ")", remedy(result));
    return false;
  }
  initialized_by_ = ::getpid();
  return true;
}

std::optional<std::string> CudaDriver::unavailable_reason() {
  const ProcessDriver& process = process_driver();
  if (process.driver == nullptr) return process.reason;
  if (process.driver->initialized_by_ != ::getpid()) {
    return concat("this process was forked from process ", process.driver->initialized_by_,
                  ", which had initialised CUDA, and CUDA does not survive fork(); start it with spawn, or fork first");
  }
  return std::nullopt;
}

const CudaDriver& CudaDriver::get() {
  if (auto reason = unavailable_reason()) throw DeviceError(*reason);
  return *process_driver().driver;
}

std::string CudaDriver::describe(cuda::Result result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  // Both fail for a number that this driver does not know.
  if (api_.cuGetErrorName(result, &name) != cuda::kSuccess || name == nullptr) name = "unknown CUDA error";
  if (api_.cuGetErrorString(result, &text) != cuda::kSuccess || text == nullptr) return concat(name, " (", result, ")");
  return concat(name, " (", result, "): ", text);
}

std::string CudaDriver::remedy(cuda::Result result) {
  switch (result) {
    case cuda::kOutOfMemory: return "; ask for less (bucket_bytes, buffers), or leave the framework less of the device";
    case cuda::kNotInitialized:
      return "; CUDA does not survive fork(): start the process with spawn, or fork before CUDA is used";
    case cuda::kDeinitialized: return "; the process is shutting down: close fastsync before it exits";
    case cuda::kStubLibrary:
      return "; take the CUDA toolkit's stubs folder out of LD_LIBRARY_PATH and install the NVIDIA driver";
    case cuda::kCallRequiresNewerDriver: return "; update the NVIDIA driver";
    case cuda::kNoDevice:
    case cuda::kInvalidDevice: {
      const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
      return concat("; this process must see the device: CUDA_VISIBLE_DEVICES is ",
                    visible == nullptr ? std::string("not set") : concat("'", visible, "'"),
                    ", and a container needs access to the GPU (--gpus)");
    }
    case cuda::kInvalidContext: return "; the thread has no context of this device, or the device was reset";
    case cuda::kNoBinaryForGpu:
    case cuda::kInvalidPtx:
    case cuda::kJitCompilerNotFound:
    case cuda::kUnsupportedPtxVersion:
      return "; the driver cannot compile fastsync's kernel for this device: it needs a device of compute capability "
             "7.5 or later and a complete driver (libnvidia-ptxjitcompiler)";
    case cuda::kOperatingSystem:
      return "; look at the permissions of /dev/nvidia* and, in a container, at what of the GPU it was given";
    case cuda::kSystemNotReady: return "; the fabric manager of this machine is not running or not ready";
    case cuda::kSystemDriverMismatch:
      return "; kernel module and libcuda are of different versions: reboot, or give the container the host's libcuda";
    case cuda::kUnknown: return "; see the kernel's log (dmesg, Xid lines) and nvidia-smi";
    case cuda::kIllegalAddress:
    case cuda::kLaunchFailed:
    case cuda::kLaunchTimeout:
    case cuda::kContextIsDestroyed:
    case cuda::kAssert:
    case cuda::kHardwareStackError:
    case cuda::kIllegalInstruction:
    case cuda::kMisalignedAddress:
    case cuda::kInvalidAddressSpace:
    case cuda::kInvalidPc:
      return "; this process's CUDA context is broken, whoever's kernel it was: restart the process "
             "(CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer finds the kernel)";
    case cuda::kEccUncorrectable:
    case cuda::kNvlinkUncorrectable:
      return "; the hardware failed and this process's CUDA context is broken: see the kernel's log, restart the "
             "process";
    default: return {};
  }
}

}  // namespace fastsync
