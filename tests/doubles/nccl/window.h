// The memory that the ranks of one communicator share: who wants what, and the bytes on their way.
//
// One memfd, mapped by every rank and found by nobody else; its zeroes are the initial state. Every ordered pair of ranks
// has a channel, a ring of kChunks chunks, so that the memory is bounded whatever is sent. Every rank has a doorbell:
// whoever changes something that a rank may be waiting for rings it.
//
// What a rank publishes comes twice, for even and odd numbers: nobody gets two numbers ahead of a rank that takes part,
// because every operation begins with seeing what all the others published.
//
// Threads: atomics, or written by one rank before the atomic that publishes it. Errors: create() and the constructor
// throw std::system_error.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "common/owned_fd.h"
#include "doubles/nccl/nccl_types.h"

namespace fastsync::fake_nccl {

inline constexpr std::uint64_t kChunkBytes = 256 * 1024;
inline constexpr std::uint64_t kChunks = 4;

static_assert(std::atomic<std::uint32_t>::is_always_lock_free && std::atomic<std::uint64_t>::is_always_lock_free);

// What all ranks must say alike of one collective.
struct CollectiveHeader {
  std::uint32_t kind = 0;
  std::uint32_t dtype = 0;
  std::uint64_t count = 0;
  std::int32_t root = 0;
  std::uint32_t reserved = 0;
  friend bool operator==(const CollectiveHeader&, const CollectiveHeader&) = default;
};

struct alignas(64) RankBlock {
  std::atomic<std::uint32_t> doorbell;
  struct Collective {
    std::atomic<std::uint64_t> number;  // 0: none yet
    CollectiveHeader header;
  } collective[2];
  struct Child {  // a split or a shrink
    std::atomic<std::uint64_t> number;
    std::int32_t color;
    std::int32_t key;
    std::atomic<std::uint64_t> id_number;  // `id` is that of this child; its rank 0 sets it
    ncclUniqueId id;
  } child[2];
};

struct alignas(64) Channel {
  std::atomic<std::uint64_t> written;  // chunks, over the life of the communicator
  std::atomic<std::uint64_t> read;
  // A send and its receive, matched by number: both ends say how much before a byte moves.
  struct Offer {
    std::atomic<std::uint64_t> number;
    std::atomic<std::uint64_t> nbytes;
  } send[2], receive[2];
};

class Window {
 public:
  // The descriptor of a new one.
  [[nodiscard]] static OwnedFd create(int nranks);
  Window(int fd, int nranks);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  [[nodiscard]] RankBlock& rank(int rank) const noexcept;
  [[nodiscard]] Channel& channel(int from, int to) const noexcept;
  [[nodiscard]] std::byte* chunk(int from, int to, std::uint64_t number) const noexcept;

  // Wakes whoever waits for something of `rank`.
  void ring(int rank) const noexcept;
  void ring_all() const noexcept;
  // Read the doorbell, look whether there is anything to do, then wait: returns at the next ring, or after `most`.
  [[nodiscard]] std::uint32_t doorbell(int rank) const noexcept;
  void wait(int rank, std::uint32_t seen, std::chrono::milliseconds most) const noexcept;

 private:
  std::byte* base_ = nullptr;
  std::size_t size_ = 0;
  int nranks_ = 0;
};

}  // namespace fastsync::fake_nccl
