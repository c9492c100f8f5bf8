// Error texts, and functions by name and version.
#include <cuda.h>

#include <cstdlib>
#include <cstring>
#include <string_view>

#include "doubles/cuda/driver.h"
#include "doubles/cuda/hidden.h"

using namespace fastsync::fake;

// --- Functions that only newer drivers have ---------------------------------------------------------------------------

namespace {

// Not settings(): a resolver may run before anything of the library is initialised.
bool driver_has(int version) {
  const char* text = std::getenv("FASTSYNC_FAKE_DRIVER");
  return text == nullptr || *text == '\0' || std::strtol(text, nullptr, 10) >= version;
}

}  // namespace

extern "C" {

// The declaration is cuda.h's; the resolver's type is what the compiler checks the implementation against.
#define FASTSYNC_FAKE_RESOLVE(symbol, version)                                             \
  static decltype(&symbol) resolve_##symbol() {                                            \
    return driver_has(version) ? static_cast<decltype(&symbol)>(&fake_##symbol) : nullptr; \
  }
FASTSYNC_FAKE_HIDDEN(FASTSYNC_FAKE_RESOLVE)
#undef FASTSYNC_FAKE_RESOLVE

CUresult CUDAAPI cuLibraryLoadData(CUlibrary*, const void*, CUjit_option*, void**, unsigned int, CUlibraryOption*,
                                   void**, unsigned int) __attribute__((ifunc("resolve_cuLibraryLoadData")));
CUresult CUDAAPI cuLibraryUnload(CUlibrary) __attribute__((ifunc("resolve_cuLibraryUnload")));
CUresult CUDAAPI cuLibraryGetKernel(CUkernel*, CUlibrary, const char*)
    __attribute__((ifunc("resolve_cuLibraryGetKernel")));
CUresult CUDAAPI cuKernelGetFunction(CUfunction*, CUkernel) __attribute__((ifunc("resolve_cuKernelGetFunction")));
CUresult CUDAAPI cuFuncLoad(CUfunction) __attribute__((ifunc("resolve_cuFuncLoad")));
CUresult CUDAAPI cuGetProcAddress_v2(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*)
    __attribute__((ifunc("resolve_cuGetProcAddress_v2")));

}  // extern "C"

namespace {

struct Entry {
  const char* name;  // without version suffix, as cuGetProcAddress wants it
  int since;
  void* function;
};

template <typename F>
void* pointer_to(F* function) {
  return reinterpret_cast<void*>(function);
}

// Newest first where a name has several.
#define FASTSYNC_FAKE_ENTRY(name, symbol, since) \
  Entry { name, since, pointer_to(&symbol) }
const Entry* find_function(std::string_view name, int version, bool& known) {
  static const Entry kEntries[] = {
      FASTSYNC_FAKE_ENTRY("cuInit", cuInit, 2000),
      FASTSYNC_FAKE_ENTRY("cuDriverGetVersion", cuDriverGetVersion, 2020),
      FASTSYNC_FAKE_ENTRY("cuDeviceGet", cuDeviceGet, 2000),
      FASTSYNC_FAKE_ENTRY("cuDeviceGetCount", cuDeviceGetCount, 2000),
      FASTSYNC_FAKE_ENTRY("cuDeviceGetName", cuDeviceGetName, 2000),
      FASTSYNC_FAKE_ENTRY("cuDeviceGetUuid", cuDeviceGetUuid_v2, 11040),
      FASTSYNC_FAKE_ENTRY("cuDeviceGetPCIBusId", cuDeviceGetPCIBusId, 4010),
      FASTSYNC_FAKE_ENTRY("cuDeviceTotalMem", cuDeviceTotalMem_v2, 3020),
      FASTSYNC_FAKE_ENTRY("cuDeviceGetAttribute", cuDeviceGetAttribute, 2000),
      FASTSYNC_FAKE_ENTRY("cuDeviceCanAccessPeer", cuDeviceCanAccessPeer, 4000),
      FASTSYNC_FAKE_ENTRY("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain, 7000),
      FASTSYNC_FAKE_ENTRY("cuDevicePrimaryCtxRelease", cuDevicePrimaryCtxRelease_v2, 11000),
      FASTSYNC_FAKE_ENTRY("cuDevicePrimaryCtxGetState", cuDevicePrimaryCtxGetState, 7000),
      FASTSYNC_FAKE_ENTRY("cuCtxGetCurrent", cuCtxGetCurrent, 4000),
      FASTSYNC_FAKE_ENTRY("cuCtxSetCurrent", cuCtxSetCurrent, 4000),
      FASTSYNC_FAKE_ENTRY("cuCtxPushCurrent", cuCtxPushCurrent_v2, 4000),
      FASTSYNC_FAKE_ENTRY("cuCtxPopCurrent", cuCtxPopCurrent_v2, 4000),
      FASTSYNC_FAKE_ENTRY("cuCtxGetDevice", cuCtxGetDevice, 2000),
      FASTSYNC_FAKE_ENTRY("cuCtxGetStreamPriorityRange", cuCtxGetStreamPriorityRange, 5050),
      FASTSYNC_FAKE_ENTRY("cuCtxSynchronize", cuCtxSynchronize, 2000),
      FASTSYNC_FAKE_ENTRY("cuMemGetInfo", cuMemGetInfo_v2, 3020),
      FASTSYNC_FAKE_ENTRY("cuMemAlloc", cuMemAlloc_v2, 3020),
      FASTSYNC_FAKE_ENTRY("cuMemFree", cuMemFree_v2, 3020),
      FASTSYNC_FAKE_ENTRY("cuMemGetAddressRange", cuMemGetAddressRange_v2, 3020),
      FASTSYNC_FAKE_ENTRY("cuMemHostAlloc", cuMemHostAlloc, 2020),
      FASTSYNC_FAKE_ENTRY("cuMemFreeHost", cuMemFreeHost, 2000),
      FASTSYNC_FAKE_ENTRY("cuMemHostRegister", cuMemHostRegister_v2, 6050),
      FASTSYNC_FAKE_ENTRY("cuMemHostUnregister", cuMemHostUnregister, 4000),
      FASTSYNC_FAKE_ENTRY("cuMemHostGetDevicePointer", cuMemHostGetDevicePointer_v2, 3020),
      FASTSYNC_FAKE_ENTRY("cuMemcpyAsync", cuMemcpyAsync, 4000),
      FASTSYNC_FAKE_ENTRY("cuMemcpyHtoDAsync", cuMemcpyHtoDAsync_v2, 3020),
      FASTSYNC_FAKE_ENTRY("cuMemcpyDtoHAsync", cuMemcpyDtoHAsync_v2, 3020),
      FASTSYNC_FAKE_ENTRY("cuMemcpyDtoDAsync", cuMemcpyDtoDAsync_v2, 3020),
      FASTSYNC_FAKE_ENTRY("cuMemcpyHtoD", cuMemcpyHtoD_v2, 3020),
      FASTSYNC_FAKE_ENTRY("cuMemcpyDtoH", cuMemcpyDtoH_v2, 3020),
      FASTSYNC_FAKE_ENTRY("cuMemsetD8Async", cuMemsetD8Async, 3020),
      FASTSYNC_FAKE_ENTRY("cuMemsetD8", cuMemsetD8_v2, 3020),
      FASTSYNC_FAKE_ENTRY("cuPointerGetAttribute", cuPointerGetAttribute, 4000),
      FASTSYNC_FAKE_ENTRY("cuPointerGetAttributes", cuPointerGetAttributes, 7000),
      FASTSYNC_FAKE_ENTRY("cuStreamCreate", cuStreamCreate, 2000),
      FASTSYNC_FAKE_ENTRY("cuStreamCreateWithPriority", cuStreamCreateWithPriority, 5050),
      FASTSYNC_FAKE_ENTRY("cuStreamDestroy", cuStreamDestroy_v2, 4000),
      FASTSYNC_FAKE_ENTRY("cuStreamGetCtx", cuStreamGetCtx, 9020),
      FASTSYNC_FAKE_ENTRY("cuStreamGetFlags", cuStreamGetFlags, 5050),
      FASTSYNC_FAKE_ENTRY("cuStreamQuery", cuStreamQuery, 2000),
      FASTSYNC_FAKE_ENTRY("cuStreamSynchronize", cuStreamSynchronize, 2000),
      FASTSYNC_FAKE_ENTRY("cuStreamWaitEvent", cuStreamWaitEvent, 3020),
      FASTSYNC_FAKE_ENTRY("cuLaunchHostFunc", cuLaunchHostFunc, 10000),
      FASTSYNC_FAKE_ENTRY("cuEventCreate", cuEventCreate, 2000),
      FASTSYNC_FAKE_ENTRY("cuEventDestroy", cuEventDestroy_v2, 4000),
      FASTSYNC_FAKE_ENTRY("cuEventRecord", cuEventRecord, 2000),
      FASTSYNC_FAKE_ENTRY("cuEventQuery", cuEventQuery, 2000),
      FASTSYNC_FAKE_ENTRY("cuEventSynchronize", cuEventSynchronize, 2000),
      FASTSYNC_FAKE_ENTRY("cuIpcGetMemHandle", cuIpcGetMemHandle, 4010),
      FASTSYNC_FAKE_ENTRY("cuIpcOpenMemHandle", cuIpcOpenMemHandle_v2, 11000),
      FASTSYNC_FAKE_ENTRY("cuIpcCloseMemHandle", cuIpcCloseMemHandle, 4010),
      FASTSYNC_FAKE_ENTRY("cuIpcGetEventHandle", cuIpcGetEventHandle, 4010),
      FASTSYNC_FAKE_ENTRY("cuIpcOpenEventHandle", cuIpcOpenEventHandle, 4010),
      FASTSYNC_FAKE_ENTRY("cuMemCreate", cuMemCreate, 10020),
      FASTSYNC_FAKE_ENTRY("cuMemRelease", cuMemRelease, 10020),
      FASTSYNC_FAKE_ENTRY("cuMemRetainAllocationHandle", cuMemRetainAllocationHandle, 11000),
      FASTSYNC_FAKE_ENTRY("cuMemAddressReserve", cuMemAddressReserve, 10020),
      FASTSYNC_FAKE_ENTRY("cuMemAddressFree", cuMemAddressFree, 10020),
      FASTSYNC_FAKE_ENTRY("cuMemMap", cuMemMap, 10020),
      FASTSYNC_FAKE_ENTRY("cuMemUnmap", cuMemUnmap, 10020),
      FASTSYNC_FAKE_ENTRY("cuMemSetAccess", cuMemSetAccess, 10020),
      FASTSYNC_FAKE_ENTRY("cuMemExportToShareableHandle", cuMemExportToShareableHandle, 10020),
      FASTSYNC_FAKE_ENTRY("cuMemImportFromShareableHandle", cuMemImportFromShareableHandle, 10020),
      FASTSYNC_FAKE_ENTRY("cuMemGetAllocationGranularity", cuMemGetAllocationGranularity, 10020),
      FASTSYNC_FAKE_ENTRY("cuModuleLoadDataEx", cuModuleLoadDataEx, 2010),
      FASTSYNC_FAKE_ENTRY("cuModuleUnload", cuModuleUnload, 2000),
      FASTSYNC_FAKE_ENTRY("cuModuleGetFunction", cuModuleGetFunction, 2000),
      FASTSYNC_FAKE_ENTRY("cuLaunchKernel", cuLaunchKernel, 4000),
      FASTSYNC_FAKE_ENTRY("cuGetErrorName", cuGetErrorName, 6000),
      FASTSYNC_FAKE_ENTRY("cuGetErrorString", cuGetErrorString, 6000),
      FASTSYNC_FAKE_ENTRY("cuLibraryLoadData", fake_cuLibraryLoadData, 12000),
      FASTSYNC_FAKE_ENTRY("cuLibraryUnload", fake_cuLibraryUnload, 12000),
      FASTSYNC_FAKE_ENTRY("cuLibraryGetKernel", fake_cuLibraryGetKernel, 12000),
      FASTSYNC_FAKE_ENTRY("cuKernelGetFunction", fake_cuKernelGetFunction, 12000),
      FASTSYNC_FAKE_ENTRY("cuFuncLoad", fake_cuFuncLoad, 12040),
      FASTSYNC_FAKE_ENTRY("cuGetProcAddress", fake_cuGetProcAddress_v2, 12000),
  };
  known = false;
  for (const Entry& entry : kEntries) {
    if (name != entry.name || entry.since > settings().driver_version) continue;
    known = true;
    if (entry.since <= version) return &entry;
  }
  return nullptr;
}
#undef FASTSYNC_FAKE_ENTRY

}  // namespace

CUresult fake_cuGetProcAddress_v2(const char* symbol, void** pfn, int version, cuuint64_t flags,
                                  CUdriverProcAddressQueryResult* status) {
  return api("cuGetProcAddress_v2", Needs::kNothing, Where::kHost, [&](Call&) {
    if (symbol == nullptr || pfn == nullptr || flags > CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    bool known = false;
    const Entry* found = find_function(symbol, version, known);
    *pfn = found == nullptr ? nullptr : found->function;
    if (status != nullptr) {
      *status = found != nullptr ? CU_GET_PROC_ADDRESS_SUCCESS
                : known          ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                                 : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
      return CUDA_SUCCESS;
    }
    return found == nullptr ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
  });
}

// --- Errors -----------------------------------------------------------------------------------------------------------

// X(enumerator, text)
#define FASTSYNC_FAKE_ERRORS(X)                                                                   \
  X(CUDA_SUCCESS, "no error")                                                                     \
  X(CUDA_ERROR_INVALID_VALUE, "invalid argument")                                                 \
  X(CUDA_ERROR_OUT_OF_MEMORY, "out of memory")                                                    \
  X(CUDA_ERROR_NOT_INITIALIZED, "initialization error")                                           \
  X(CUDA_ERROR_DEINITIALIZED, "driver shutting down")                                             \
  X(CUDA_ERROR_STUB_LIBRARY, "CUDA driver is a stub library")                                     \
  X(CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER, "call requires a newer driver")                        \
  X(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")                                   \
  X(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal")                                          \
  X(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid")                                   \
  X(CUDA_ERROR_INVALID_CONTEXT, "invalid device context")                                         \
  X(CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed")                                     \
  X(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for the device")                  \
  X(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered")                          \
  X(CUDA_ERROR_INVALID_PTX, "a PTX JIT compilation failed")                                       \
  X(CUDA_ERROR_NVLINK_UNCORRECTABLE, "uncorrectable NVLink error")                                \
  X(CUDA_ERROR_JIT_COMPILER_NOT_FOUND, "PTX JIT compiler library not found")                      \
  X(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "PTX of an unsupported version")                          \
  X(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed")                                                \
  X(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle")                                         \
  X(CUDA_ERROR_NOT_FOUND, "named symbol not found")                                               \
  X(CUDA_ERROR_NOT_READY, "device not ready")                                                     \
  X(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered")                       \
  X(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated")                         \
  X(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed")                                      \
  X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the memory is already registered") \
  X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "the memory is not registered")                        \
  X(CUDA_ERROR_ILLEGAL_INSTRUCTION, "an illegal instruction was encountered")                     \
  X(CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned address")                                          \
  X(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure")                                       \
  X(CUDA_ERROR_NOT_PERMITTED, "operation not permitted")                                          \
  X(CUDA_ERROR_NOT_SUPPORTED, "operation not supported")                                          \
  X(CUDA_ERROR_SYSTEM_NOT_READY, "system not yet initialized")                                    \
  X(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "driver and kernel module do not match")                   \
  X(CUDA_ERROR_UNKNOWN, "unknown error")

CUresult CUDAAPI cuGetErrorName(CUresult error, const char** text) {
  if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *text = nullptr;
#define FASTSYNC_FAKE_NAME(name, meaning) \
  if (error == name) *text = #name;
  FASTSYNC_FAKE_ERRORS(FASTSYNC_FAKE_NAME)
#undef FASTSYNC_FAKE_NAME
  return *text == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char** text) {
  if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *text = nullptr;
#define FASTSYNC_FAKE_TEXT(name, meaning) \
  if (error == name) *text = meaning;
  FASTSYNC_FAKE_ERRORS(FASTSYNC_FAKE_TEXT)
#undef FASTSYNC_FAKE_TEXT
  return *text == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
