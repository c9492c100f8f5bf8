// The part of NCCL's C ABI that this double speaks: constants and layouts, written down as facts.
//
// Names are NCCL's, in a namespace of ours, so that this file and the vendor's nccl.h can be read by one translation unit:
// abi_check.cc holds every line of this file and of nccl_functions.h against the vendor's header where there is one.
// The core declares its own copy of what it calls; the two are independent on purpose.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace fastsync::fake_nccl {

using cudaStream_t = CUstream_st*;  // the same pointer as the driver's CUstream

struct ncclComm;
using ncclComm_t = ncclComm*;

struct ncclUniqueId {  // passed by value
  char internal[128];
};

enum ncclResult_t : unsigned {  // what a C enum without negative values is
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
};
inline constexpr unsigned kNcclTimeout = 8;  // from 2.30 on; before that, the number of results

enum ncclDataType_t : unsigned {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
  ncclFloat8e4m3 = 10,  // from 2.24 on
  ncclFloat8e5m2 = 11,
};

inline constexpr unsigned kNcclConfigMagic = 0xcafebeef;
inline constexpr int kNcclUndefInt = INT_MIN;
inline constexpr int kNcclSplitNoColor = -1;
inline constexpr int kNcclShrinkAbort = 1;

// Grows at its end with every release; its size and version say how much of it the caller knows.
struct ncclConfig_t {
  std::size_t size = 0;
  unsigned magic = kNcclConfigMagic;
  unsigned version = 0;
  int blocking = kNcclUndefInt;
  int cgaClusterSize = kNcclUndefInt;  // 2.17
  int minCTAs = kNcclUndefInt;
  int maxCTAs = kNcclUndefInt;
  const char* netName = nullptr;
  int splitShare = kNcclUndefInt;    // 2.18
  int trafficClass = kNcclUndefInt;  // 2.26
  const char* commName = nullptr;    // 2.27
  int collnetEnable = kNcclUndefInt;
  int CTAPolicy = kNcclUndefInt;
  int shrinkShare = kNcclUndefInt;
  int nvlsCTAs = kNcclUndefInt;
  int nChannelsPerNetPeer = kNcclUndefInt;  // 2.28
  int nvlinkCentricSched = kNcclUndefInt;
  int later[10] = {kNcclUndefInt, kNcclUndefInt, kNcclUndefInt, kNcclUndefInt, kNcclUndefInt,
                   kNcclUndefInt, kNcclUndefInt, kNcclUndefInt, kNcclUndefInt, kNcclUndefInt};  // 2.29 ... 2.32
};
static_assert(sizeof(ncclConfig_t) == 120);

// How much of ncclConfig_t a release knows.
[[nodiscard]] constexpr std::size_t config_size(int version) noexcept {
  if (version < 21700) return 24;
  if (version < 21800) return 40;
  if (version < 22700) return 48;
  if (version < 22800) return 72;
  if (version < 22900) return 80;
  if (version < 23000) return 88;
  if (version < 23100) return 96;
  return 120;
}

}  // namespace fastsync::fake_nccl
