// Where a receiver sits in a fan-out ("nccl+ipc"), as the source tells it in a Descriptors frame.
//
// Everything here is a peer's words: decode() checks every length. Threads: values. Errors: CommError.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/nccl/nccl_library.h"

namespace fastsync {

struct FanoutSeat {
  enum class Role : std::uint8_t {
    kLeader = 1,  // takes part in NCCL, and has `followers`
    kBeside = 2,  // follows the source itself: `ring` describes its buckets, the frame has the descriptors
    kBehind = 3,  // follows rank `leader`, which hands out its ring at `door`
  };
  Role role = Role::kLeader;
  // kLeader. `nccl_rank`: NCCL's number; the source is 0.
  std::uint32_t nccl_rank = 0;
  std::uint32_t nccl_ranks = 0;
  nccl::UniqueId nccl_id{};
  std::vector<int> followers;
  // kBeside: an encoded IpcDescriptor.
  std::vector<std::byte> ring;
  // kBehind
  int leader = -1;
  std::string door;

  [[nodiscard]] std::vector<std::byte> encode() const;
  [[nodiscard]] static FanoutSeat decode(std::span<const std::byte> bytes);
};

}  // namespace fastsync
