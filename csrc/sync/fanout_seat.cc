#include "sync/fanout_seat.h"

#include "common/error.h"
#include "control/frame.h"

namespace fastsync {

namespace {
constexpr std::uint32_t kMaxFollowers = 4096;
constexpr std::size_t kMaxDoorBytes = 107;  // of an abstract Unix name
}  // namespace

std::vector<std::byte> FanoutSeat::encode() const {
  PayloadWriter out;
  out.u8(static_cast<std::uint8_t>(role));
  switch (role) {
    case Role::kLeader:
      out.u32(nccl_rank);
      out.u32(nccl_ranks);
      out.raw(nccl_id.internal, sizeof(nccl_id.internal));
      out.u32(static_cast<std::uint32_t>(followers.size()));
      for (const int rank : followers) out.i64(rank);
      break;
    case Role::kBeside: out.raw(ring.data(), ring.size()); break;
    case Role::kBehind:
      out.i64(leader);
      out.text(door);
      break;
  }
  return out.take();
}

FanoutSeat FanoutSeat::decode(std::span<const std::byte> bytes) {
  PayloadReader in(bytes);
  FanoutSeat seat;
  const std::uint8_t role = in.u8();
  switch (static_cast<Role>(role)) {
    case Role::kLeader: {
      seat.role = Role::kLeader;
      seat.nccl_rank = in.u32();
      seat.nccl_ranks = in.u32();
      for (char& byte : seat.nccl_id.internal) byte = static_cast<char>(in.u8());
      const std::uint32_t count = in.u32();
      if (seat.nccl_rank == 0 || seat.nccl_rank >= seat.nccl_ranks || count > kMaxFollowers) {
        throw CommError(concat("a place as rank ", seat.nccl_rank, " of ", seat.nccl_ranks, " with ", count,
                               " followers is none that a source gives"));
      }
      for (std::uint32_t i = 0; i < count; ++i) seat.followers.push_back(static_cast<int>(in.i64()));
      in.end();
      return seat;
    }
    case Role::kBeside:
      seat.role = Role::kBeside;
      seat.ring.assign(bytes.begin() + 1, bytes.end());
      return seat;
    case Role::kBehind:
      seat.role = Role::kBehind;
      seat.leader = static_cast<int>(in.i64());
      seat.door = in.text(kMaxDoorBytes);
      in.end();
      return seat;
  }
  throw CommError(concat("a place of kind ", static_cast<int>(role), " is none that a source gives"));
}

}  // namespace fastsync
