#include "doubles/nccl/config.h"

#include <algorithm>
#include <cstring>

namespace fastsync::fake_nccl {
namespace {

bool in_range(int value, int least, int most) { return value == kNcclUndefInt || (value >= least && value <= most); }

}  // namespace

ncclResult_t read_config(const ncclConfig_t* config, int version, ncclConfig_t* read, std::string* why) {
  *read = ncclConfig_t{};
  if (config == nullptr) return ncclSuccess;
  std::size_t size = 0;
  std::memcpy(&size, config, sizeof size);
  read->magic = 0;  // so that a structure too short to hold one has none
  std::memcpy(static_cast<void*>(read), config, std::min(size, config_size(version)));
  if (read->magic != kNcclConfigMagic) {
    *why = "ncclConfig_t was not initialized: its magic is wrong";
    return ncclInvalidArgument;
  }
  const ncclConfig_t defaults;
  const auto claimed = static_cast<int>(read->version);
  if (claimed < 21400) read->blocking = defaults.blocking;
  if (claimed < 21700) {
    read->cgaClusterSize = defaults.cgaClusterSize;
    read->minCTAs = defaults.minCTAs;
    read->maxCTAs = defaults.maxCTAs;
    read->netName = defaults.netName;
  }
  if (claimed < 22500) read->trafficClass = defaults.trafficClass;
  if (claimed < 22700) {
    read->collnetEnable = defaults.collnetEnable;
    read->CTAPolicy = defaults.CTAPolicy;
    read->shrinkShare = defaults.shrinkShare;
    read->nvlsCTAs = defaults.nvlsCTAs;
  }
  const bool ordered =
      read->minCTAs == kNcclUndefInt || read->maxCTAs == kNcclUndefInt || read->minCTAs <= read->maxCTAs;
  const char* wrong = !in_range(read->blocking, 0, 1)                    ? "blocking"
                      : !in_range(read->cgaClusterSize, 0, 8)            ? "cgaClusterSize"
                      : !in_range(read->minCTAs, 1, INT_MAX)             ? "minCTAs"
                      : !in_range(read->maxCTAs, 1, INT_MAX) || !ordered ? "maxCTAs"
                      : !in_range(read->splitShare, 0, 1)                ? "splitShare"
                      : !in_range(read->collnetEnable, 0, 1)             ? "collnetEnable"
                      : !in_range(read->shrinkShare, 0, 1)               ? "shrinkShare"
                      : !in_range(read->nvlsCTAs, 1, INT_MAX)            ? "nvlsCTAs"
                                                                         : nullptr;
  if (wrong == nullptr) return ncclSuccess;
  *why = std::string("ncclConfig_t has an invalid value of ") + wrong;
  return ncclInvalidArgument;
}

}  // namespace fastsync::fake_nccl
