// Which transport a sync uses: a pure function of where the ranks and their tensors are.
//
// "auto" takes the first that reaches everybody; a named one is taken or refused with the reason. The reasons that
// speak against the others are kept for the report: nothing is chosen silently.
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

struct TransportChoice {
  std::string transport;
  std::string reason;  // why it and none of the others, in one line
};

// `candidates`: what the source itself can use, in no particular order.
[[nodiscard]] TransportChoice choose_transport(const RankPlace& source, std::span<const RankPlace> receivers,
                                               std::span<const std::string> candidates);

}  // namespace fastsync
