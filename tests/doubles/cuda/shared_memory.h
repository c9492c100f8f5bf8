// Memory behind a memfd, and what two processes know of each other through it. No names anywhere: another process gets at
// it by the exporter's descriptor (/proc/<pid>/fd/<n>) or by a descriptor that was passed to it.
//
// Ownership: SharedMemory owns descriptor and mapping. Threads: creation and destruction by one thread; the control page
// is atomics. Errors: create() throws std::bad_alloc, open() gives null for something that is not ours.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "comm/shm/futex.h"
#include "common/owned_fd.h"
#include "doubles/cuda/settings.h"

namespace fastsync::fake {

inline constexpr std::uint64_t kPageBytes = 4096;
[[nodiscard]] constexpr std::uint64_t round_up(std::uint64_t n, std::uint64_t unit) noexcept {
  return (n + unit - 1) / unit * unit;
}

// Processes that have something open, so that its owner can tell when it takes it away under them.
class Importers {
 public:
  void add(pid_t pid) noexcept;
  void remove(pid_t pid) noexcept;
  // One that still lives, other than this process; 0 if there is none.
  [[nodiscard]] pid_t any_alive() const noexcept;

 private:
  std::array<std::atomic<std::int32_t>, 64> pids_{};
};

// When a process began, in clock ticks: with its pid, an identity. Empty if it is gone or a zombie.
[[nodiscard]] std::optional<std::uint64_t> process_start(pid_t pid) noexcept;

// The page behind the data.
struct ControlPage {
  static constexpr std::uint64_t kMagic = 0x66616b6563756461ULL;  // "fakecuda"
  static constexpr std::size_t kTickets = 64;

  std::uint64_t magic = kMagic;
  std::uint64_t nbytes = 0;
  Uuid uuid{};
  std::atomic<std::uint32_t> freed{0};
  Importers importers;
  // An interprocess event: the newest record, and for each of the last records whether the stream has passed it. A slot
  // holds the newest passed ticket of its residue.
  std::atomic<std::uint64_t> recorded{0};
  std::array<std::atomic<std::uint64_t>, kTickets> passed{};
  Doorbell bell;

  [[nodiscard]] bool has_passed(std::uint64_t ticket) const noexcept {
    return ticket == 0 || passed[ticket % kTickets].load(std::memory_order_seq_cst) >= ticket;
  }
};
static_assert(sizeof(ControlPage) <= kPageBytes);

// What travels in a CUipcMemHandle or CUipcEventHandle.
struct IpcTicket {
  static constexpr std::uint32_t kMemory = 0x6d656d31;
  static constexpr std::uint32_t kEvent = 0x65767431;
  std::uint32_t kind = 0;
  std::int32_t pid = 0;
  std::uint64_t pid_start = 0;
  std::uint64_t device = 0;  // st_dev and st_ino of the memfd: the descriptor number may name something else by now
  std::uint64_t inode = 0;
  std::uint64_t nbytes = 0;
  std::int32_t fd = -1;
  std::uint32_t reserved[5] = {};
};
static_assert(sizeof(IpcTicket) == 64);

class SharedMemory {
 public:
  [[nodiscard]] static std::shared_ptr<SharedMemory> create(std::uint64_t nbytes, const Uuid& uuid);
  [[nodiscard]] static std::shared_ptr<SharedMemory> open(OwnedFd fd) noexcept;
  // The exporter's, if that still lives and still has it.
  [[nodiscard]] static std::shared_ptr<SharedMemory> open(const IpcTicket& ticket) noexcept;
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  [[nodiscard]] IpcTicket ticket(std::uint32_t kind) const noexcept;
  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::uint64_t nbytes() const noexcept { return nbytes_; }
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  [[nodiscard]] ControlPage& control() const noexcept { return *control_; }

 private:
  SharedMemory() = default;
  [[nodiscard]] bool map(std::uint64_t nbytes) noexcept;

  OwnedFd fd_;
  std::byte* data_ = nullptr;
  std::uint64_t mapped_bytes_ = 0;
  std::uint64_t nbytes_ = 0;
  ControlPage* control_ = nullptr;
};

}  // namespace fastsync::fake
