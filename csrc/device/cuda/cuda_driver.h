// The CUDA driver of this process, opened at run time: libcuda.so.1, or the file that FASTSYNC_CUDA_PATH names.
//
// A table of functions and what the driver said when it was initialised. Nothing links to it, so that one build runs with
// and without a GPU. A library that calls itself a double (it exports `fastsync_fake_cuda`) is refused unless
// FASTSYNC_ALLOW_FAKE=1: a test's library path must never pass for a GPU.
//
// Asking initialises CUDA in this process (cuInit), and a process that has done so must not fork children that use CUDA.
//
// Ownership: the process's driver is opened at the first question and never closed: it has threads of its own.
// Threads: all calls are thread-safe. Errors: that there is no driver is a reason, not an exception; get() throws it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>

#include "common/dynamic_library.h"
#include "cuda_abi.h"

namespace fastsync {

namespace cuda {

// Named as the library's symbols are, so that a call reads as what it is.
struct Api {
#define FASTSYNC_DECLARE(symbol, ...) std::add_pointer_t<__VA_ARGS__> symbol = nullptr;
  FASTSYNC_CUDA_REQUIRED(FASTSYNC_DECLARE)
  FASTSYNC_CUDA_OPTIONAL(FASTSYNC_DECLARE)
#undef FASTSYNC_DECLARE
};

// Host and device share one address space.
inline DevicePtr address_of(const void* data) noexcept {
  return static_cast<DevicePtr>(reinterpret_cast<std::uintptr_t>(data));
}
inline std::byte* pointer_to(DevicePtr address) noexcept {
  return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address));  // NOLINT(performance-no-int-to-ptr)
}

// A number where the driver's interface has a pointer (a size, a descriptor).
inline void* number_as_pointer(std::uintptr_t number) noexcept {
  return reinterpret_cast<void*>(number);  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace cuda

class CudaDriver {
 public:
  static constexpr int kMinVersion = 12000;  // CUDA 12.0, as cuDriverGetVersion writes it

  // Why this process cannot use CUDA: no library, no device, too old a driver. Empty when it can.
  [[nodiscard]] static std::optional<std::string> unavailable_reason();
  // Throws DeviceError with that reason.
  [[nodiscard]] static const CudaDriver& get();

  // One library, without any state of the process; null with a reason. For get(), and for tests of the reasons.
  [[nodiscard]] static std::unique_ptr<const CudaDriver> open(const std::string& file, std::string& reason);

  [[nodiscard]] const cuda::Api& api() const noexcept { return api_; }
  [[nodiscard]] const std::string& path() const noexcept { return library_.path(); }
  [[nodiscard]] int version() const noexcept { return version_; }
  [[nodiscard]] int device_count() const noexcept { return device_count_; }
  // A test double, let in by FASTSYNC_ALLOW_FAKE.
  [[nodiscard]] bool is_fake() const noexcept { return is_fake_; }

  // "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory".
  [[nodiscard]] std::string describe(cuda::Result result) const;
  // What a user can do about it, beginning with "; ". Empty for results that only say what we did.
  [[nodiscard]] static std::string remedy(cuda::Result result);

 private:
  CudaDriver() = default;
  [[nodiscard]] bool initialize(std::string& reason);

  DynamicLibrary library_;
  cuda::Api api_;
  int version_ = 0;
  int device_count_ = 0;
  bool is_fake_ = false;
  pid_t initialized_by_ = 0;
};

}  // namespace fastsync
