#include "doubles/nccl/exchange.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

namespace fastsync::fake_nccl {

// One direction of one pair. A collective's transfers need no offer: its ranks have agreed already.
struct Exchange::Transfer {
  bool is_send = false;
  int peer = 0;
  std::byte* memory = nullptr;
  std::uint64_t nbytes = 0;
  std::uint64_t done = 0;
  std::uint64_t number = 0;  // of a send and its receive; 0: both ends agree on the size
  bool offered = false;
  bool mismatched = false;

  [[nodiscard]] bool finished() const noexcept { return number == 0 && done == nbytes; }
};

Exchange::Transfer Exchange::agreed(bool is_send, int peer, std::byte* memory, std::uint64_t nbytes) {
  Transfer transfer;
  transfer.is_send = is_send;
  transfer.peer = peer;
  transfer.memory = memory;
  transfer.nbytes = nbytes;
  return transfer;
}

namespace {

std::uint64_t seed_of(int rank) {
  const char* seed = std::getenv("FASTSYNC_FAKE_SEED");
  const std::uint64_t number = seed == nullptr ? 1 : std::strtoull(seed, nullptr, 10);
  return (number + 1) * 0x9E3779B97F4A7C15ULL + static_cast<std::uint64_t>(rank) * 0xD1B54A32D192ED03ULL + 1;
}

std::string describe(const CollectiveHeader& header) {
  const char* kind = header.kind == 1 ? "ncclBroadcast" : header.kind == 2 ? "ncclAllGather" : "another operation";
  return std::string(kind) + "(count " + std::to_string(header.count) + ", type " + std::to_string(header.dtype) +
         ", root " + std::to_string(header.root) + ")";
}

}  // namespace

Exchange::Exchange(const Mesh& mesh, const Settings& settings)
    : mesh_(mesh),
      window_(*mesh.window),
      chunk_delay_(settings.chunk_delay),
      random_(seed_of(mesh.rank)),
      sends_(static_cast<std::size_t>(mesh.nranks), 0),
      receives_(static_cast<std::size_t>(mesh.nranks), 0) {}

void Exchange::delay_chunk() {
  if (chunk_delay_.count() == 0) return;
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  const auto most = static_cast<std::uint64_t>(chunk_delay_.count());
  std::this_thread::sleep_for(std::chrono::microseconds(random_ % (most + 1)));
}

// Sees what every rank published under the same number. A peer that offers a send or receive instead can only get here
// after this rank has answered it, which it never will: that is the one other disagreement that can be told from slowness.
Outcome Exchange::agree(const CollectiveHeader& header, const StopTest& must_stop, std::string* mismatch) {
  const std::uint64_t number = ++collectives_;
  RankBlock::Collective& mine = window_.rank(mesh_.rank).collective[number % 2];
  mine.header = header;
  mine.number.store(number, std::memory_order_release);
  window_.ring_all();
  for (;;) {
    const std::uint32_t seen = window_.doorbell(mesh_.rank);
    bool all = true;
    for (int rank = 0; rank < mesh_.nranks; ++rank) {
      const RankBlock::Collective& theirs = window_.rank(rank).collective[number % 2];
      if (theirs.number.load(std::memory_order_acquire) == number) {
        if (theirs.header == header) continue;
        *mismatch = "rank " + std::to_string(mesh_.rank) + " is in " + describe(header) + ", rank " +
                    std::to_string(rank) + " in " + describe(theirs.header);
        return Outcome::kMismatch;
      }
      all = false;
      const auto peer = static_cast<std::size_t>(rank);
      const std::uint64_t next_receive = receives_[peer] + 1;
      const std::uint64_t next_send = sends_[peer] + 1;
      const Channel& from = window_.channel(rank, mesh_.rank);
      const Channel& to = window_.channel(mesh_.rank, rank);
      const bool sends = from.send[next_receive % 2].number.load(std::memory_order_acquire) == next_receive;
      const bool receives = to.receive[next_send % 2].number.load(std::memory_order_acquire) == next_send;
      if (rank != mesh_.rank && (sends || receives)) {
        *mismatch = "rank " + std::to_string(mesh_.rank) + " is in " + describe(header) + ", rank " +
                    std::to_string(rank) + " in " + (sends ? "ncclSend" : "ncclRecv") + " with rank " +
                    std::to_string(mesh_.rank);
        return Outcome::kMismatch;
      }
    }
    if (all) return Outcome::kDone;
    if (must_stop()) return Outcome::kStopped;
    window_.wait(mesh_.rank, seen, kLook);
  }
}

// Publishes this end's size, and looks for the other's. True if something moved.
bool Exchange::step_offer(Transfer& transfer, std::string* mismatch) {
  Channel& channel =
      transfer.is_send ? window_.channel(mesh_.rank, transfer.peer) : window_.channel(transfer.peer, mesh_.rank);
  const std::uint64_t slot = transfer.number % 2;
  Channel::Offer& mine = transfer.is_send ? channel.send[slot] : channel.receive[slot];
  const Channel::Offer& other = transfer.is_send ? channel.receive[slot] : channel.send[slot];
  if (!transfer.offered) {
    mine.nbytes.store(transfer.nbytes, std::memory_order_relaxed);
    mine.number.store(transfer.number, std::memory_order_release);
    transfer.offered = true;
    window_.ring(transfer.peer);
  }
  // Before the offer: a peer that begins the next collective has done with all sends and receives before it.
  const std::uint64_t next = collectives_ + 1;
  const bool elsewhere =
      window_.rank(transfer.peer).collective[next % 2].number.load(std::memory_order_acquire) == next;
  if (other.number.load(std::memory_order_acquire) != transfer.number) {
    if (elsewhere) {
      transfer.mismatched = true;
      *mismatch = "rank " + std::to_string(mesh_.rank) + " is in " + (transfer.is_send ? "ncclSend" : "ncclRecv") +
                  " with rank " + std::to_string(transfer.peer) + ", which is in " +
                  describe(window_.rank(transfer.peer).collective[next % 2].header);
    }
    return false;
  }
  const std::uint64_t theirs = other.nbytes.load(std::memory_order_relaxed);
  if (theirs != transfer.nbytes) {
    transfer.mismatched = true;
    *mismatch = "rank " + std::to_string(mesh_.rank) + (transfer.is_send ? " sends " : " receives ") +
                std::to_string(transfer.nbytes) + " bytes, rank " + std::to_string(transfer.peer) +
                (transfer.is_send ? " receives " : " sends ") + std::to_string(theirs);
    return false;
  }
  transfer.number = 0;
  return true;
}

bool Exchange::step(Transfer& transfer, std::string* mismatch) {
  if (transfer.mismatched) return false;
  if (transfer.number != 0 && !step_offer(transfer, mismatch)) return false;
  const int from = transfer.is_send ? mesh_.rank : transfer.peer;
  const int to = transfer.is_send ? transfer.peer : mesh_.rank;
  Channel& channel = window_.channel(from, to);
  bool moved = false;
  while (transfer.done < transfer.nbytes) {
    const std::uint64_t written = channel.written.load(std::memory_order_acquire);
    const std::uint64_t read = channel.read.load(std::memory_order_acquire);
    if (transfer.is_send ? written - read == kChunks : written == read) break;
    const std::uint64_t part = std::min(kChunkBytes, transfer.nbytes - transfer.done);
    delay_chunk();
    if (transfer.is_send) {
      std::memcpy(window_.chunk(from, to, written), transfer.memory + transfer.done, part);
      channel.written.store(written + 1, std::memory_order_release);
    } else {
      std::memcpy(transfer.memory + transfer.done, window_.chunk(from, to, read), part);
      channel.read.store(read + 1, std::memory_order_release);
    }
    transfer.done += part;
    moved = true;
    window_.ring(transfer.peer);
    break;  // the other transfers get their turn
  }
  return moved;
}

Outcome Exchange::drive(std::vector<Transfer>& transfers, const StopTest& must_stop, std::string* mismatch) {
  for (;;) {
    const std::uint32_t seen = window_.doorbell(mesh_.rank);
    bool moved = false;
    bool all = true;
    bool mismatched = false;
    for (auto transfer = transfers.begin(); transfer != transfers.end(); ++transfer) {
      if (transfer->finished()) continue;
      // A channel carries one transfer at a time, in order.
      const bool behind_another = std::any_of(transfers.begin(), transfer, [&](const Transfer& earlier) {
        return !earlier.finished() && earlier.peer == transfer->peer && earlier.is_send == transfer->is_send;
      });
      if (!behind_another) moved |= step(*transfer, mismatch);
      all &= transfer->finished();
      mismatched |= transfer->mismatched;
    }
    if (all) return Outcome::kDone;
    if (mismatched) return Outcome::kMismatch;
    if (must_stop()) return Outcome::kStopped;
    if (!moved) window_.wait(mesh_.rank, seen, kLook);
  }
}

Outcome Exchange::broadcast(const CollectiveHeader& header, const std::byte* source, std::byte* target,
                            std::uint64_t nbytes, const StopTest& must_stop, std::string* mismatch) {
  if (const Outcome outcome = agree(header, must_stop, mismatch); outcome != Outcome::kDone) return outcome;
  std::vector<Transfer> transfers;
  if (header.root == mesh_.rank) {
    for (int peer = 0; peer < mesh_.nranks; ++peer) {
      if (peer != mesh_.rank) transfers.push_back(agreed(true, peer, const_cast<std::byte*>(source), nbytes));
    }
  } else {
    transfers.push_back(agreed(false, header.root, target, nbytes));
  }
  const Outcome outcome = drive(transfers, must_stop, mismatch);
  if (outcome == Outcome::kDone && header.root == mesh_.rank && source != target) {
    std::memmove(target, source, nbytes);
  }
  return outcome;
}

Outcome Exchange::all_gather(const CollectiveHeader& header, const std::byte* source, std::byte* target,
                             std::uint64_t nbytes, const StopTest& must_stop, std::string* mismatch) {
  if (const Outcome outcome = agree(header, must_stop, mismatch); outcome != Outcome::kDone) return outcome;
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < mesh_.nranks; ++peer) {
    std::byte* part = target + static_cast<std::uint64_t>(peer) * nbytes;
    if (peer == mesh_.rank) {
      if (part != source) std::memmove(part, source, nbytes);
    } else {
      transfers.push_back(agreed(true, peer, const_cast<std::byte*>(source), nbytes));
      transfers.push_back(agreed(false, peer, part, nbytes));
    }
  }
  return drive(transfers, must_stop, mismatch);
}

Outcome Exchange::send_and_receive(std::span<const PointToPoint> operations, const StopTest& must_stop,
                                   std::string* mismatch) {
  std::vector<Transfer> transfers;
  for (const PointToPoint& operation : operations) {
    if (operation.peer != mesh_.rank) {
      auto& numbers = operation.is_send ? sends_ : receives_;
      Transfer transfer = agreed(operation.is_send, operation.peer, operation.memory, operation.nbytes);
      transfer.number = ++numbers[static_cast<std::size_t>(operation.peer)];
      transfers.push_back(transfer);
      continue;
    }
    if (!operation.is_send) continue;
    // The nth send to oneself goes to the nth receive from oneself; the group has checked that they pair up.
    auto ahead = std::count_if(operations.data(), &operation, [&](const PointToPoint& earlier) {
      return earlier.is_send && earlier.peer == mesh_.rank;
    });
    for (const PointToPoint& target : operations) {
      if (target.is_send || target.peer != mesh_.rank || ahead-- != 0) continue;
      std::memmove(target.memory, operation.memory, std::min(target.nbytes, operation.nbytes));
    }
  }
  return drive(transfers, must_stop, mismatch);
}

void Exchange::wait_for_stop(const StopTest& must_stop) const {
  for (;;) {
    const std::uint32_t seen = window_.doorbell(mesh_.rank);
    if (must_stop()) return;
    window_.wait(mesh_.rank, seen, kLook);
  }
}

}  // namespace fastsync::fake_nccl
