// Holds third_party/cuda_abi.h and nccl_abi.h against the vendors' own headers, where the build was given them.
//
// The comparison is of what a call and a layout depend on: number and class of the parameters, sizes, offsets, values.
// Names of types differ on purpose. Everything is checked by the compiler; the tests say which header it was.
#include <gtest/gtest.h>

#include <cstddef>
#include <iostream>
#include <type_traits>
#include <utility>

#include "comm/nccl/nccl_library.h"
#include "device/cuda/cuda_driver.h"

#if __has_include(<cuda.h>)
#include <cuda.h>
#define FASTSYNC_HAS_CUDA_HEADER 1
#endif
// nccl.h includes headers of the CUDA runtime.
#if __has_include(<nccl.h>) && __has_include(<cuda_runtime.h>)
#include <nccl.h>
#define FASTSYNC_HAS_NCCL_HEADER 1
#endif

namespace fastsync {
namespace {

// Whether the calling convention cannot tell two parameters apart.
template <typename A, typename B>
constexpr bool same_parameter() {
  if constexpr (std::is_pointer_v<A> || std::is_pointer_v<B>) {
    return std::is_pointer_v<A> && std::is_pointer_v<B>;
  } else if constexpr (std::is_class_v<A> || std::is_class_v<B>) {
    return std::is_class_v<A> && std::is_class_v<B> && sizeof(A) == sizeof(B) && alignof(A) == alignof(B) &&
           std::is_trivially_copyable_v<A> && std::is_trivially_copyable_v<B>;
  } else {
    constexpr bool kBothNumbers =
        (std::is_integral_v<A> || std::is_enum_v<A>) && (std::is_integral_v<B> || std::is_enum_v<B>);
    // An enumeration has the signedness that the compiler gives it.
    constexpr bool kSigns = std::is_enum_v<A> || std::is_enum_v<B> || std::is_signed_v<A> == std::is_signed_v<B>;
    return kBothNumbers && kSigns && sizeof(A) == sizeof(B);
  }
}

// Pointers to functions.
template <typename A, typename B>
struct SameCall : std::false_type {};
template <typename R, typename... P, typename S, typename... Q>
struct SameCall<R (*)(P...), S (*)(Q...)> {
  static constexpr bool parameters() {
    if constexpr (sizeof...(P) == sizeof...(Q)) {
      return (same_parameter<P, Q>() && ...);
    } else {
      return false;
    }
  }
  static constexpr bool value = parameters() && same_parameter<R, S>();
};

// The comparison itself can fail: otherwise the rest proves nothing.
struct SixtyFour {
  unsigned char bytes[64];
};
static_assert(SameCall<int (*)(int*, cuda::IpcMemHandle, unsigned), int (*)(char*, SixtyFour, unsigned)>::value);
static_assert(!SameCall<int (*)(int*, cuda::IpcMemHandle), int (*)(int*, SixtyFour*)>::value);
static_assert(!SameCall<int (*)(int*, cuda::IpcMemHandle), int (*)(int*, cuda::Uuid)>::value);
static_assert(!SameCall<int (*)(unsigned), int (*)(unsigned long)>::value);
static_assert(!SameCall<int (*)(int), int (*)(int, int)>::value);
static_assert(!SameCall<int (*)(int), const char* (*)(int)>::value);
static_assert(!SameCall<int (*)(int), int (*)(unsigned)>::value);

#define FASTSYNC_SAME_CALL(symbol, ...)                                      \
  static_assert(SameCall<decltype(Api::symbol), decltype(&::symbol)>::value, \
                #symbol " is declared otherwise in the vendor's header");
#define FASTSYNC_SAME_VALUE(ours, theirs) \
  static_assert(static_cast<long long>(ours) == static_cast<long long>(theirs), #ours " is not " #theirs);
#define FASTSYNC_SAME_SIZE(ours, theirs) \
  static_assert(sizeof(ours) == sizeof(theirs) && alignof(ours) == alignof(theirs), #ours " is not as " #theirs);
#define FASTSYNC_SAME_OFFSET(type, ours, vendor_type, theirs)                                        \
  static_assert(offsetof(type, ours) == offsetof(vendor_type, theirs) &&                             \
                    sizeof(std::declval<type>().ours) == sizeof(std::declval<vendor_type>().theirs), \
                #type "::" #ours " is not where " #vendor_type "::" #theirs " is");

#if defined(FASTSYNC_HAS_CUDA_HEADER)

namespace cuda_checks {
using namespace cuda;

FASTSYNC_CUDA_REQUIRED(FASTSYNC_SAME_CALL)
#if CUDA_VERSION >= 12040
FASTSYNC_CUDA_OPTIONAL(FASTSYNC_SAME_CALL)
#endif

FASTSYNC_SAME_SIZE(Result, CUresult)
FASTSYNC_SAME_SIZE(Device, CUdevice)
FASTSYNC_SAME_SIZE(DevicePtr, CUdeviceptr)
FASTSYNC_SAME_SIZE(AllocationHandle, CUmemGenericAllocationHandle)
FASTSYNC_SAME_SIZE(Uuid, CUuuid)
FASTSYNC_SAME_SIZE(IpcMemHandle, CUipcMemHandle)
FASTSYNC_SAME_SIZE(IpcEventHandle, CUipcEventHandle)
FASTSYNC_SAME_SIZE(MemAllocationProp, CUmemAllocationProp)
FASTSYNC_SAME_OFFSET(MemAllocationProp, type, CUmemAllocationProp, type)
FASTSYNC_SAME_OFFSET(MemAllocationProp, requested_handle_types, CUmemAllocationProp, requestedHandleTypes)
FASTSYNC_SAME_OFFSET(MemAllocationProp, location, CUmemAllocationProp, location)
FASTSYNC_SAME_OFFSET(MemAllocationProp, win32_metadata, CUmemAllocationProp, win32HandleMetaData)
FASTSYNC_SAME_OFFSET(MemAllocationProp, flags.compression_type, CUmemAllocationProp, allocFlags.compressionType)
FASTSYNC_SAME_OFFSET(MemAllocationProp, flags.gpu_direct_rdma_capable, CUmemAllocationProp,
                     allocFlags.gpuDirectRDMACapable)
FASTSYNC_SAME_OFFSET(MemAllocationProp, flags.usage, CUmemAllocationProp, allocFlags.usage)
FASTSYNC_SAME_SIZE(MemLocation, CUmemLocation)
FASTSYNC_SAME_OFFSET(MemLocation, type, CUmemLocation, type)
FASTSYNC_SAME_OFFSET(MemLocation, id, CUmemLocation, id)
FASTSYNC_SAME_SIZE(MemAccessDesc, CUmemAccessDesc)
FASTSYNC_SAME_OFFSET(MemAccessDesc, location, CUmemAccessDesc, location)
FASTSYNC_SAME_OFFSET(MemAccessDesc, flags, CUmemAccessDesc, flags)

FASTSYNC_SAME_VALUE(kSuccess, CUDA_SUCCESS)
FASTSYNC_SAME_VALUE(kInvalidValue, CUDA_ERROR_INVALID_VALUE)
FASTSYNC_SAME_VALUE(kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY)
FASTSYNC_SAME_VALUE(kNotInitialized, CUDA_ERROR_NOT_INITIALIZED)
FASTSYNC_SAME_VALUE(kDeinitialized, CUDA_ERROR_DEINITIALIZED)
FASTSYNC_SAME_VALUE(kStubLibrary, CUDA_ERROR_STUB_LIBRARY)
FASTSYNC_SAME_VALUE(kCallRequiresNewerDriver, CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER)
FASTSYNC_SAME_VALUE(kNoDevice, CUDA_ERROR_NO_DEVICE)
FASTSYNC_SAME_VALUE(kInvalidDevice, CUDA_ERROR_INVALID_DEVICE)
FASTSYNC_SAME_VALUE(kInvalidContext, CUDA_ERROR_INVALID_CONTEXT)
FASTSYNC_SAME_VALUE(kMapFailed, CUDA_ERROR_MAP_FAILED)
FASTSYNC_SAME_VALUE(kNoBinaryForGpu, CUDA_ERROR_NO_BINARY_FOR_GPU)
FASTSYNC_SAME_VALUE(kEccUncorrectable, CUDA_ERROR_ECC_UNCORRECTABLE)
FASTSYNC_SAME_VALUE(kInvalidPtx, CUDA_ERROR_INVALID_PTX)
FASTSYNC_SAME_VALUE(kNvlinkUncorrectable, CUDA_ERROR_NVLINK_UNCORRECTABLE)
FASTSYNC_SAME_VALUE(kJitCompilerNotFound, CUDA_ERROR_JIT_COMPILER_NOT_FOUND)
FASTSYNC_SAME_VALUE(kUnsupportedPtxVersion, CUDA_ERROR_UNSUPPORTED_PTX_VERSION)
FASTSYNC_SAME_VALUE(kOperatingSystem, CUDA_ERROR_OPERATING_SYSTEM)
FASTSYNC_SAME_VALUE(kInvalidHandle, CUDA_ERROR_INVALID_HANDLE)
FASTSYNC_SAME_VALUE(kNotFound, CUDA_ERROR_NOT_FOUND)
FASTSYNC_SAME_VALUE(kNotReady, CUDA_ERROR_NOT_READY)
FASTSYNC_SAME_VALUE(kIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS)
FASTSYNC_SAME_VALUE(kLaunchTimeout, CUDA_ERROR_LAUNCH_TIMEOUT)
FASTSYNC_SAME_VALUE(kContextIsDestroyed, CUDA_ERROR_CONTEXT_IS_DESTROYED)
FASTSYNC_SAME_VALUE(kAssert, CUDA_ERROR_ASSERT)
FASTSYNC_SAME_VALUE(kHostMemoryAlreadyRegistered, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
FASTSYNC_SAME_VALUE(kHostMemoryNotRegistered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
FASTSYNC_SAME_VALUE(kHardwareStackError, CUDA_ERROR_HARDWARE_STACK_ERROR)
FASTSYNC_SAME_VALUE(kIllegalInstruction, CUDA_ERROR_ILLEGAL_INSTRUCTION)
FASTSYNC_SAME_VALUE(kMisalignedAddress, CUDA_ERROR_MISALIGNED_ADDRESS)
FASTSYNC_SAME_VALUE(kInvalidAddressSpace, CUDA_ERROR_INVALID_ADDRESS_SPACE)
FASTSYNC_SAME_VALUE(kInvalidPc, CUDA_ERROR_INVALID_PC)
FASTSYNC_SAME_VALUE(kLaunchFailed, CUDA_ERROR_LAUNCH_FAILED)
FASTSYNC_SAME_VALUE(kNotPermitted, CUDA_ERROR_NOT_PERMITTED)
FASTSYNC_SAME_VALUE(kNotSupported, CUDA_ERROR_NOT_SUPPORTED)
FASTSYNC_SAME_VALUE(kSystemNotReady, CUDA_ERROR_SYSTEM_NOT_READY)
FASTSYNC_SAME_VALUE(kSystemDriverMismatch, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)
FASTSYNC_SAME_VALUE(kUnknown, CUDA_ERROR_UNKNOWN)

FASTSYNC_SAME_VALUE(kAttributeMultiprocessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
FASTSYNC_SAME_VALUE(kAttributeVirtualMemorySupported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
FASTSYNC_SAME_VALUE(kAttributePosixDescriptorSupported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
FASTSYNC_SAME_VALUE(kAttributeGpuDirectRdmaWithVirtualMemory,
                    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)
FASTSYNC_SAME_VALUE(kPointerMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
FASTSYNC_SAME_VALUE(kPointerDeviceOrdinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
FASTSYNC_SAME_VALUE(kMemoryTypeDevice, CU_MEMORYTYPE_DEVICE)
FASTSYNC_SAME_VALUE(kStreamNonBlocking, CU_STREAM_NON_BLOCKING)
FASTSYNC_SAME_VALUE(kEventDisableTiming, CU_EVENT_DISABLE_TIMING)
FASTSYNC_SAME_VALUE(kEventInterprocess, CU_EVENT_INTERPROCESS)
FASTSYNC_SAME_VALUE(kHostPortable, CU_MEMHOSTALLOC_PORTABLE)
FASTSYNC_SAME_VALUE(kHostPortable, CU_MEMHOSTREGISTER_PORTABLE)
FASTSYNC_SAME_VALUE(kHostDeviceMap, CU_MEMHOSTALLOC_DEVICEMAP)
FASTSYNC_SAME_VALUE(kHostDeviceMap, CU_MEMHOSTREGISTER_DEVICEMAP)
FASTSYNC_SAME_VALUE(kIpcLazyEnablePeerAccess, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
FASTSYNC_SAME_VALUE(kJitErrorLogBuffer, CU_JIT_ERROR_LOG_BUFFER)
FASTSYNC_SAME_VALUE(kJitErrorLogBufferBytes, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES)
FASTSYNC_SAME_VALUE(kMemLocationDevice, CU_MEM_LOCATION_TYPE_DEVICE)
FASTSYNC_SAME_VALUE(kMemAllocationPinned, CU_MEM_ALLOCATION_TYPE_PINNED)
FASTSYNC_SAME_VALUE(kMemHandlePosixDescriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
FASTSYNC_SAME_VALUE(kGranularityRecommended, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
FASTSYNC_SAME_VALUE(kMemAccessReadWrite, CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
}  // namespace cuda_checks

TEST(CudaAbi, IsThatOfTheVendorsHeader) {
  // What the compiler cannot compare: the vendor writes these as casts.
  EXPECT_EQ(static_cast<void*>(cuda::stream_legacy()), static_cast<void*>(CU_STREAM_LEGACY));
  EXPECT_EQ(static_cast<void*>(cuda::stream_per_thread()), static_cast<void*>(CU_STREAM_PER_THREAD));
  RecordProperty("cuda_version", CUDA_VERSION);
  std::cout << "held against cuda.h of version " << CUDA_VERSION << '\n';
}

#else

TEST(CudaAbi, IsThatOfTheVendorsHeader) { GTEST_SKIP() << "no cuda.h: give its folder as FASTSYNC_CUDA_INCLUDE_DIR"; }

#endif

#if defined(FASTSYNC_HAS_NCCL_HEADER)

namespace nccl_checks {
using namespace nccl;

FASTSYNC_NCCL_REQUIRED(FASTSYNC_SAME_CALL)
#if NCCL_VERSION_CODE >= 22809
FASTSYNC_NCCL_OPTIONAL(FASTSYNC_SAME_CALL)
#endif

FASTSYNC_SAME_SIZE(Result, ncclResult_t)
FASTSYNC_SAME_SIZE(UniqueId, ncclUniqueId)
FASTSYNC_SAME_VALUE(kSuccess, ncclSuccess)
FASTSYNC_SAME_VALUE(kUnhandledCudaError, ncclUnhandledCudaError)
FASTSYNC_SAME_VALUE(kSystemError, ncclSystemError)
FASTSYNC_SAME_VALUE(kInternalError, ncclInternalError)
FASTSYNC_SAME_VALUE(kInvalidArgument, ncclInvalidArgument)
FASTSYNC_SAME_VALUE(kInvalidUsage, ncclInvalidUsage)
FASTSYNC_SAME_VALUE(kRemoteError, ncclRemoteError)
FASTSYNC_SAME_VALUE(kInProgress, ncclInProgress)
#if NCCL_VERSION_CODE >= 23003
FASTSYNC_SAME_VALUE(kTimeout, ncclTimeout)
#endif
FASTSYNC_SAME_VALUE(kUint8, ncclUint8)
FASTSYNC_SAME_VALUE(kConfigUndefined, NCCL_CONFIG_UNDEF_INT)
FASTSYNC_SAME_OFFSET(Config, size, ncclConfig_t, size)
FASTSYNC_SAME_OFFSET(Config, magic, ncclConfig_t, magic)
FASTSYNC_SAME_OFFSET(Config, version, ncclConfig_t, version)
FASTSYNC_SAME_OFFSET(Config, blocking, ncclConfig_t, blocking)
FASTSYNC_SAME_OFFSET(Config, cga_cluster_size, ncclConfig_t, cgaClusterSize)
FASTSYNC_SAME_OFFSET(Config, min_ctas, ncclConfig_t, minCTAs)
FASTSYNC_SAME_OFFSET(Config, max_ctas, ncclConfig_t, maxCTAs)
FASTSYNC_SAME_OFFSET(Config, net_name, ncclConfig_t, netName)
FASTSYNC_SAME_OFFSET(Config, split_share, ncclConfig_t, splitShare)
#if NCCL_VERSION_CODE >= 22703
FASTSYNC_SAME_OFFSET(Config, traffic_class, ncclConfig_t, trafficClass)
FASTSYNC_SAME_OFFSET(Config, comm_name, ncclConfig_t, commName)
FASTSYNC_SAME_OFFSET(Config, collnet_enable, ncclConfig_t, collnetEnable)
FASTSYNC_SAME_OFFSET(Config, cta_policy, ncclConfig_t, CTAPolicy)
FASTSYNC_SAME_OFFSET(Config, shrink_share, ncclConfig_t, shrinkShare)
FASTSYNC_SAME_OFFSET(Config, nvls_ctas, ncclConfig_t, nvlsCTAs)
FASTSYNC_SAME_VALUE(kShrinkDefault, NCCL_SHRINK_DEFAULT)
FASTSYNC_SAME_VALUE(kShrinkAbort, NCCL_SHRINK_ABORT)
#endif
}  // namespace nccl_checks

TEST(NcclAbi, IsThatOfTheVendorsHeader) {
  // The initialiser shows what cannot be named: the magic number, and what "undefined" is.
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  const nccl::Config ours;
  EXPECT_EQ(ours.magic, theirs.magic);
  EXPECT_EQ(ours.blocking, theirs.blocking);
  EXPECT_EQ(ours.net_name, theirs.netName);
  EXPECT_LE(ours.size, theirs.size);
  RecordProperty("nccl_version", NCCL_VERSION_CODE);
  std::cout << "held against nccl.h of version " << NCCL_VERSION_CODE << '\n';
}

#else

TEST(NcclAbi, IsThatOfTheVendorsHeader) {
  GTEST_SKIP() << "no nccl.h (with the CUDA runtime's headers): give its folder as FASTSYNC_NCCL_INCLUDE_DIR";
}

#endif

static_assert(sizeof(nccl::Config) == 72);

TEST(NcclAbi, ConfigIsCutToWhatAnOlderVersionKnows) {
  nccl::Config config;
  nccl::set_config_version(config, 21805);
  EXPECT_EQ(config.size, offsetof(nccl::Config, comm_name));
  EXPECT_EQ(config.version, 21800U);
  nccl::set_config_version(config, 22605);
  EXPECT_EQ(config.size, offsetof(nccl::Config, comm_name));
  nccl::set_config_version(config, 23203);
  EXPECT_EQ(config.size, sizeof(nccl::Config));
  EXPECT_EQ(config.version, 22700U);
}

}  // namespace
}  // namespace fastsync
