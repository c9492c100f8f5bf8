// One memfd, as the process that made it and as the processes that map it see it.
//
// A segment has no name anywhere: its descriptor travels over a Unix socket, and the memory goes when the last process
// that maps it goes, also by SIGKILL.
//
// Ownership: ShmSegment owns the memory, its mapping and the descriptors to hand out. ShmMapping owns a mapping only;
// the descriptor it was made from may be closed.
// Threads: values. Errors: DeviceError when memory or the kernel fails us; CommError when a descriptor of a peer is not
// what it should be. Nothing about a peer's descriptor is taken on trust.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/owned_fd.h"
#include "device/buffer.h"

namespace fastsync {

[[nodiscard]] std::uint64_t page_bytes() noexcept;

class ShmSegment {
 public:
  // Every process that maps it may write (control data).
  [[nodiscard]] static ShmSegment shared(const std::string& name, std::uint64_t nbytes);
  // Only this process can write. What peers get is a read-only descriptor, and where the kernel can (Linux 5.1), the
  // seal F_SEAL_FUTURE_WRITE as well; note() says so where it cannot.
  [[nodiscard]] static ShmSegment written_here(const std::string& name, std::uint64_t nbytes);

  [[nodiscard]] std::byte* data() const noexcept { return memory_.data(); }
  [[nodiscard]] std::uint64_t nbytes() const noexcept { return memory_.nbytes(); }
  // To be passed to peers. Stays the segment's.
  [[nodiscard]] int peer_fd() const noexcept { return read_only_ ? read_only_.get() : memory_.fd(); }
  // Empty, or which protection the kernel lacks.
  [[nodiscard]] const std::string& note() const noexcept { return note_; }

 private:
  Buffer memory_;
  OwnedFd read_only_;
  std::string note_;
};

class ShmMapping {
 public:
  // kShared: reads and writes are everybody's. kPrivate: reads see the owner's writes, until this process writes to a
  // page: it then has its own copy of it (drop_private_pages() makes it the owner's again).
  enum class Mode { kShared, kPrivate };

  ShmMapping() = default;
  // Throws CommError unless `fd` is a sealed memfd of exactly `nbytes`. `what` names it in messages.
  [[nodiscard]] static ShmMapping attach(int fd, std::uint64_t nbytes, Mode mode, const std::string& what);
  // The size of a sealed memfd that a peer sent: CommError if it is none.
  [[nodiscard]] static std::uint64_t checked_size(int fd, const std::string& what);

  ~ShmMapping();
  ShmMapping(ShmMapping&& other) noexcept;
  ShmMapping& operator=(ShmMapping&& other) noexcept;
  ShmMapping(const ShmMapping&) = delete;
  ShmMapping& operator=(const ShmMapping&) = delete;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::uint64_t nbytes() const noexcept { return nbytes_; }

 private:
  ShmMapping(std::byte* data, std::uint64_t nbytes) noexcept : data_(data), nbytes_(nbytes) {}
  std::byte* data_ = nullptr;
  std::uint64_t nbytes_ = 0;
};

// Undoes writes to pages of a private mapping.
//
// Which pages were written is read from /proc/self/pagemap, which costs a hundredth of dropping and refaulting them all.
// Where that cannot be read, or says something else than expected of a page that this object wrote on trial, every page
// is dropped every time.
class PrivatePages {
 public:
  // `trial` is a page of a private mapping that nobody uses yet.
  explicit PrivatePages(std::byte* trial);
  // [data, data + nbytes): whole pages of a private mapping. Throws DeviceError if the kernel refuses.
  void drop_written(std::byte* data, std::uint64_t nbytes);
  [[nodiscard]] bool precise() const noexcept { return static_cast<bool>(pagemap_); }

 private:
  enum class Answer { kClean, kWritten, kUnreadable };
  [[nodiscard]] Answer any_written(const std::byte* data, std::uint64_t pages);
  OwnedFd pagemap_;
  std::vector<std::uint64_t> entries_;
};

}  // namespace fastsync
