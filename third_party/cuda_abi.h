// The part of the CUDA driver API that fastsync calls: libcuda.so.1, drivers of CUDA 12.0 and later.
//
// Facts from NVIDIA's published "CUDA Driver API" reference (docs.nvidia.com/cuda/cuda-driver-api), written by us in our
// own words. tests/cpp/device/abi_test.cc holds every size, offset, value and signature against the vendor's cuda.h.
//
// An enumeration of the vendor is an int here: C passes it as one, and a newer driver may answer with values that we do
// not know. Functions carry the name of the exported symbol, with its version suffix: cuda.h hides the suffix behind a
// macro, and a plain `cuMemAlloc` is the 32-bit function of CUDA 3.1.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastsync::cuda {

using Result = int;
using Device = int;
using DevicePtr = unsigned long long;
using AllocationHandle = unsigned long long;  // of physical memory (cuMemCreate)
using Context = struct ContextObject*;
using Stream = struct StreamObject*;
using Event = struct EventObject*;
using Library = struct LibraryObject*;
using Kernel = struct KernelObject*;
using Function = struct FunctionObject*;

// Results.
inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotInitialized = 3;
inline constexpr Result kDeinitialized = 4;
inline constexpr Result kStubLibrary = 34;
inline constexpr Result kCallRequiresNewerDriver = 36;
inline constexpr Result kNoDevice = 100;
inline constexpr Result kInvalidDevice = 101;
inline constexpr Result kInvalidContext = 201;
inline constexpr Result kMapFailed = 205;
inline constexpr Result kNoBinaryForGpu = 209;
inline constexpr Result kEccUncorrectable = 214;
inline constexpr Result kInvalidPtx = 218;
inline constexpr Result kNvlinkUncorrectable = 220;
inline constexpr Result kJitCompilerNotFound = 221;
inline constexpr Result kUnsupportedPtxVersion = 222;
inline constexpr Result kOperatingSystem = 304;
inline constexpr Result kInvalidHandle = 400;
inline constexpr Result kNotFound = 500;
inline constexpr Result kNotReady = 600;
inline constexpr Result kIllegalAddress = 700;
inline constexpr Result kLaunchTimeout = 702;
inline constexpr Result kContextIsDestroyed = 709;
inline constexpr Result kAssert = 710;
inline constexpr Result kHostMemoryAlreadyRegistered = 712;
inline constexpr Result kHostMemoryNotRegistered = 713;
inline constexpr Result kHardwareStackError = 714;
inline constexpr Result kIllegalInstruction = 715;
inline constexpr Result kMisalignedAddress = 716;
inline constexpr Result kInvalidAddressSpace = 717;
inline constexpr Result kInvalidPc = 718;
inline constexpr Result kLaunchFailed = 719;
inline constexpr Result kNotPermitted = 800;
inline constexpr Result kNotSupported = 801;
inline constexpr Result kSystemNotReady = 802;
inline constexpr Result kSystemDriverMismatch = 803;
inline constexpr Result kUnknown = 999;

// cuDeviceGetAttribute.
inline constexpr int kAttributeMultiprocessorCount = 16;
inline constexpr int kAttributeVirtualMemorySupported = 102;
inline constexpr int kAttributePosixDescriptorSupported = 103;
inline constexpr int kAttributeGpuDirectRdmaWithVirtualMemory = 110;

// cuPointerGetAttributes.
inline constexpr int kPointerMemoryType = 2;
inline constexpr int kPointerDeviceOrdinal = 9;
inline constexpr unsigned kMemoryTypeDevice = 2;

// Flags of creation. An event for other processes must not keep times.
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kEventInterprocess = 4;
inline constexpr unsigned kHostPortable = 1;  // pinned for every context; the same value for alloc and register
inline constexpr unsigned kHostDeviceMap = 2;
inline constexpr unsigned kIpcLazyEnablePeerAccess = 1;

// cuLibraryLoadData: where the compiler of PTX writes what it has to complain about.
inline constexpr int kJitErrorLogBuffer = 5;
inline constexpr int kJitErrorLogBufferBytes = 6;

// Streams that exist without being created.
inline Stream stream_legacy() noexcept { return reinterpret_cast<Stream>(std::uintptr_t{1}); }
inline Stream stream_per_thread() noexcept { return reinterpret_cast<Stream>(std::uintptr_t{2}); }

struct Uuid {
  unsigned char bytes[16];
};

// Both are passed by value when they are opened.
struct IpcMemHandle {
  unsigned char reserved[64];
};
struct IpcEventHandle {
  unsigned char reserved[64];
};

struct MemLocation {
  int type;
  int id;
};
inline constexpr int kMemLocationDevice = 1;

struct MemAllocationProp {
  int type;
  int requested_handle_types;
  MemLocation location;
  void* win32_metadata;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
inline constexpr int kMemAllocationPinned = 1;
inline constexpr int kMemHandlePosixDescriptor = 1;
inline constexpr int kGranularityRecommended = 1;

struct MemAccessDesc {
  MemLocation location;
  int flags;
};
inline constexpr int kMemAccessReadWrite = 3;

}  // namespace fastsync::cuda

// X(symbol, type): every driver of CUDA 12.0 and later exports these.
#define FASTSYNC_CUDA_REQUIRED(X)                                                                                    \
  X(cuInit, Result(unsigned flags))                                                                                  \
  X(cuDriverGetVersion, Result(int* version))                                                                        \
  X(cuGetErrorName, Result(Result result, const char** text))                                                        \
  X(cuGetErrorString, Result(Result result, const char** text))                                                      \
  X(cuDeviceGet, Result(Device* device, int ordinal))                                                                \
  X(cuDeviceGetCount, Result(int* count))                                                                            \
  X(cuDeviceGetAttribute, Result(int* value, int attribute, Device device))                                          \
  X(cuDeviceGetUuid_v2, Result(Uuid* uuid, Device device))                                                           \
  X(cuDevicePrimaryCtxRetain, Result(Context* context, Device device))                                               \
  X(cuDevicePrimaryCtxRelease_v2, Result(Device device))                                                             \
  X(cuCtxGetCurrent, Result(Context* context))                                                                       \
  X(cuCtxSetCurrent, Result(Context context))                                                                        \
  X(cuCtxGetDevice, Result(Device* device))                                                                          \
  X(cuMemGetInfo_v2, Result(std::size_t* free_bytes, std::size_t* total_bytes))                                      \
  X(cuMemAlloc_v2, Result(DevicePtr* address, std::size_t nbytes))                                                   \
  X(cuMemFree_v2, Result(DevicePtr address))                                                                         \
  X(cuMemHostAlloc, Result(void** address, std::size_t nbytes, unsigned flags))                                      \
  X(cuMemFreeHost, Result(void* address))                                                                            \
  X(cuMemHostRegister_v2, Result(void* address, std::size_t nbytes, unsigned flags))                                 \
  X(cuMemHostUnregister, Result(void* address))                                                                      \
  X(cuMemcpyAsync, Result(DevicePtr dst, DevicePtr src, std::size_t nbytes, Stream stream))                          \
  X(cuMemsetD8Async, Result(DevicePtr dst, unsigned char value, std::size_t nbytes, Stream stream))                  \
  X(cuPointerGetAttributes, Result(unsigned count, int* attributes, void** values, DevicePtr address))               \
  X(cuStreamCreate, Result(Stream* stream, unsigned flags))                                                          \
  X(cuStreamDestroy_v2, Result(Stream stream))                                                                       \
  X(cuStreamWaitEvent, Result(Stream stream, Event event, unsigned flags))                                           \
  X(cuEventCreate, Result(Event* event, unsigned flags))                                                             \
  X(cuEventDestroy_v2, Result(Event event))                                                                          \
  X(cuEventRecord, Result(Event event, Stream stream))                                                               \
  X(cuEventQuery, Result(Event event))                                                                               \
  X(cuLaunchKernel,                                                                                                  \
    Result(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
           unsigned block_z, unsigned shared_bytes, Stream stream, void** parameters, void** extra))                 \
  X(cuLibraryLoadData,                                                                                               \
    Result(Library* library, const void* image, int* jit_options, void** jit_values, unsigned jit_count,             \
           int* library_options, void** library_values, unsigned library_count))                                     \
  X(cuLibraryUnload, Result(Library library))                                                                        \
  X(cuLibraryGetKernel, Result(Kernel* kernel, Library library, const char* name))                                   \
  X(cuKernelGetFunction, Result(Function* function, Kernel kernel))                                                  \
  X(cuIpcGetMemHandle, Result(IpcMemHandle* handle, DevicePtr address))                                              \
  X(cuIpcOpenMemHandle_v2, Result(DevicePtr* address, IpcMemHandle handle, unsigned flags))                          \
  X(cuIpcCloseMemHandle, Result(DevicePtr address))                                                                  \
  X(cuIpcGetEventHandle, Result(IpcEventHandle* handle, Event event))                                                \
  X(cuIpcOpenEventHandle, Result(Event* event, IpcEventHandle handle))                                               \
  X(cuMemGetAllocationGranularity, Result(std::size_t* nbytes, const MemAllocationProp* properties, int option))     \
  X(cuMemCreate, Result(AllocationHandle* handle, std::size_t nbytes, const MemAllocationProp* properties,           \
                        unsigned long long flags))                                                                   \
  X(cuMemRelease, Result(AllocationHandle handle))                                                                   \
  X(cuMemAddressReserve,                                                                                             \
    Result(DevicePtr* address, std::size_t nbytes, std::size_t alignment, DevicePtr hint, unsigned long long flags)) \
  X(cuMemAddressFree, Result(DevicePtr address, std::size_t nbytes))                                                 \
  X(cuMemMap, Result(DevicePtr address, std::size_t nbytes, std::size_t offset, AllocationHandle handle,             \
                     unsigned long long flags))                                                                      \
  X(cuMemUnmap, Result(DevicePtr address, std::size_t nbytes))                                                       \
  X(cuMemSetAccess, Result(DevicePtr address, std::size_t nbytes, const MemAccessDesc* access, std::size_t count))   \
  X(cuMemExportToShareableHandle,                                                                                    \
    Result(void* shareable, AllocationHandle handle, int handle_type, unsigned long long flags))                     \
  X(cuMemImportFromShareableHandle, Result(AllocationHandle* handle, void* shareable, int handle_type))

// Newer than 12.0: null where the driver is older.
#define FASTSYNC_CUDA_OPTIONAL(X) X(cuFuncLoad, Result(Function function)) /* 12.4 */
