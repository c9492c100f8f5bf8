// What the NCCL double needs of the CUDA double: who the device is, and work on its streams.
//
// NCCL finds libcuda by itself; this double opens the file that FASTSYNC_CUDA_PATH names, which must be the CUDA double
// (the same copy that the core has opened). Nothing is linked.
// Threads: thread-safe. Errors: null, with the reason, where there is no CUDA double.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "doubles/cuda/fake_cuda_internal.h"

namespace fastsync::fake_nccl {

using DeviceUuid = std::array<std::uint8_t, 16>;

// Null pointers inside: not usable. Get it from cuda().
struct CudaDouble {
  decltype(&fastsync_fake_enqueue) enqueue = nullptr;
  decltype(&fastsync_fake_stopping) stopping = nullptr;
  decltype(&fastsync_fake_translate) translate = nullptr;
  decltype(&fastsync_fake_current_device) current_device = nullptr;
  decltype(&fastsync_fake_stream_device) stream_device = nullptr;
  decltype(&fastsync_fake_context_error) context_error = nullptr;
  CUresult (*get_context)(CUcontext*) = nullptr;
  CUresult (*set_context)(CUcontext) = nullptr;
  CUresult (*get_uuid)(CUuuid*, CUdevice) = nullptr;
  CUresult (*granularity)(size_t*, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) = nullptr;
  CUresult (*create)(CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long) = nullptr;
  CUresult (*release)(CUmemGenericAllocationHandle) = nullptr;
  CUresult (*reserve)(CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long) = nullptr;
  CUresult (*unreserve)(CUdeviceptr, size_t) = nullptr;
  CUresult (*map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) = nullptr;
  CUresult (*unmap)(CUdeviceptr, size_t) = nullptr;
  CUresult (*set_access)(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) = nullptr;
};

// Opened at the first use and kept for ever, as NCCL keeps libcuda. Null: `why` says what is missing.
[[nodiscard]] const CudaDouble* cuda(std::string* why);

// The calling thread's device. Null where there is no context; `why` says so in NCCL's manner.
struct Device {
  int ordinal = -1;
  DeviceUuid uuid{};
};
[[nodiscard]] bool current_device(Device* device, std::string* why);

// ncclMemAlloc() and ncclMemFree(): VMM memory of the current device, which legacy IPC cannot export.
[[nodiscard]] bool allocate_memory(std::size_t nbytes, void** pointer, std::string* why);
[[nodiscard]] bool free_memory(void* pointer, std::string* why);

}  // namespace fastsync::fake_nccl
