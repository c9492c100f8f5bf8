// Holds nccl_functions.h and nccl_types.h against the vendor's nccl.h: whatever differs does not compile.
//
// Built where FASTSYNC_NCCL_INCLUDE_DIR is known. An older header is checked as far as it goes. Emits no code.
#include <nccl.h>

#include <type_traits>

#include "doubles/nccl/nccl_functions.h"
#include "doubles/nccl/nccl_types.h"

namespace {

namespace ours = fastsync::fake_nccl;

// The parameter lists are read here with the vendor's types.
#define FASTSYNC_CHECK_FUNCTION(result, name, parameters) \
  static_assert(std::is_same_v<decltype(::name), result parameters>, #name " is declared otherwise by nccl.h");

FASTSYNC_NCCL_FUNCTIONS_BEFORE_2_18(FASTSYNC_CHECK_FUNCTION)
#if NCCL_VERSION_CODE >= 21801
FASTSYNC_NCCL_FUNCTIONS_2_18_1(FASTSYNC_CHECK_FUNCTION)
#endif
#if NCCL_VERSION_CODE >= 21903
FASTSYNC_NCCL_FUNCTIONS_2_19_3(FASTSYNC_CHECK_FUNCTION)
#endif
#if NCCL_VERSION_CODE >= 22703
FASTSYNC_NCCL_FUNCTIONS_2_27_3(FASTSYNC_CHECK_FUNCTION)
#endif
#if NCCL_VERSION_CODE >= 22809
FASTSYNC_NCCL_FUNCTIONS_2_28_9(FASTSYNC_CHECK_FUNCTION)
#endif

static_assert(sizeof(ours::ncclUniqueId) == sizeof(ncclUniqueId) && sizeof(ncclUniqueId) == NCCL_UNIQUE_ID_BYTES);
static_assert(sizeof(ours::ncclResult_t) == sizeof(ncclResult_t));
static_assert(sizeof(ours::ncclDataType_t) == sizeof(ncclDataType_t));
static_assert(std::is_same_v<std::underlying_type_t<ncclResult_t>, std::underlying_type_t<ours::ncclResult_t>>);
static_assert(std::is_same_v<cudaStream_t, ours::cudaStream_t>);

#define FASTSYNC_CHECK_VALUE(name) static_assert(static_cast<int>(ours::name) == static_cast<int>(::name));
FASTSYNC_CHECK_VALUE(ncclSuccess)
FASTSYNC_CHECK_VALUE(ncclUnhandledCudaError)
FASTSYNC_CHECK_VALUE(ncclSystemError)
FASTSYNC_CHECK_VALUE(ncclInternalError)
FASTSYNC_CHECK_VALUE(ncclInvalidArgument)
FASTSYNC_CHECK_VALUE(ncclInvalidUsage)
FASTSYNC_CHECK_VALUE(ncclRemoteError)
FASTSYNC_CHECK_VALUE(ncclInProgress)
FASTSYNC_CHECK_VALUE(ncclInt8)
FASTSYNC_CHECK_VALUE(ncclUint8)
FASTSYNC_CHECK_VALUE(ncclInt32)
FASTSYNC_CHECK_VALUE(ncclUint32)
FASTSYNC_CHECK_VALUE(ncclInt64)
FASTSYNC_CHECK_VALUE(ncclUint64)
FASTSYNC_CHECK_VALUE(ncclFloat16)
FASTSYNC_CHECK_VALUE(ncclFloat32)
FASTSYNC_CHECK_VALUE(ncclFloat64)
FASTSYNC_CHECK_VALUE(ncclBfloat16)
#if NCCL_VERSION_CODE >= 22400
FASTSYNC_CHECK_VALUE(ncclFloat8e4m3)
FASTSYNC_CHECK_VALUE(ncclFloat8e5m2)
#endif

static_assert(ours::kNcclUndefInt == NCCL_CONFIG_UNDEF_INT);
static_assert(ours::config_size(NCCL_VERSION_CODE) == sizeof(ncclConfig_t));
#define FASTSYNC_CHECK_FIELD(name) static_assert(offsetof(ours::ncclConfig_t, name) == offsetof(::ncclConfig_t, name));
FASTSYNC_CHECK_FIELD(size)
FASTSYNC_CHECK_FIELD(magic)
FASTSYNC_CHECK_FIELD(version)
FASTSYNC_CHECK_FIELD(blocking)
FASTSYNC_CHECK_FIELD(minCTAs)
FASTSYNC_CHECK_FIELD(maxCTAs)
FASTSYNC_CHECK_FIELD(netName)
#if NCCL_VERSION_CODE >= 21801
FASTSYNC_CHECK_FIELD(splitShare)
static_assert(ours::kNcclSplitNoColor == NCCL_SPLIT_NOCOLOR);
#endif
#if NCCL_VERSION_CODE >= 22703
FASTSYNC_CHECK_FIELD(trafficClass)
FASTSYNC_CHECK_FIELD(commName)
FASTSYNC_CHECK_FIELD(shrinkShare)
FASTSYNC_CHECK_FIELD(nvlsCTAs)
static_assert(ours::kNcclShrinkAbort == NCCL_SHRINK_ABORT);
#endif
#if NCCL_VERSION_CODE >= 22803
FASTSYNC_CHECK_FIELD(nChannelsPerNetPeer)
FASTSYNC_CHECK_FIELD(nvlinkCentricSched)
#endif

}  // namespace
