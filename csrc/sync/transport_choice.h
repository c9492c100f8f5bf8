// Which transport a sync uses: a pure function of where the ranks and their tensors are.
//
// "auto" takes the first that reaches everybody; a named one is taken or refused with the reason. The reasons that
// speak against the others are kept for the report: nothing is chosen silently.
//
// "nccl" becomes "nccl+ipc" where some ranks share a device and others do not: NCCL takes no device twice, so one rank of
// each device, its leader, takes part, and the others of the device, its followers, read the leader's buckets in place.
// That holds also where NCCL was told to let ranks share a device: one copy over the wire a device is better than two.
// A follower needs no NCCL. Where all ranks are on one device there is nothing to fan out, and "ipc" is what fits.
//
// Threads: pure. Errors: InvalidArgument where ranks name different transports, CommError where none fits.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace fastsync {

struct RankPlace {
  int rank = 0;
  std::string host;                // equal: they can share memory and sockets
  std::string asked = "auto";      // a transport or "auto"
  std::string device_id;           // of its tensors (or of the device it could use); empty: CPU
  std::uint32_t nccl_version = 0;  // 0: NCCL cannot be used there
  bool flexible = false;           // takes tensors wherever they come
  bool shares_device = false;      // the source's only: its NCCL was told to let ranks share a device
};

// The ranks of one device.
struct DeviceGroup {
  int leader = 0;              // the source on its own device, else the lowest rank
  std::vector<int> followers;  // the others, by rank
  [[nodiscard]] bool operator==(const DeviceGroup&) const = default;
};
// By device: the source's first, the others by their leaders.
[[nodiscard]] std::vector<DeviceGroup> group_by_device(const RankPlace& source, std::span<const RankPlace> receivers);

inline constexpr const char* kFanOut = "nccl+ipc";  // resolved, never asked for

struct TransportChoice {
  std::string transport;            // as asked for, or kFanOut
  std::string reason;               // why it and none of the others, in one line
  std::vector<DeviceGroup> groups;  // kFanOut only
};

// `candidates`: what the source itself can use, in no particular order.
[[nodiscard]] TransportChoice choose_transport(const RankPlace& source, std::span<const RankPlace> receivers,
                                               std::span<const std::string> candidates);

}  // namespace fastsync
