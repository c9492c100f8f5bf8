#include "comm/shm/shm_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "common/error.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010  // Linux 5.1; older headers lack it
#endif

namespace fastsync {
namespace {

// Documentation/admin-guide/mm/pagemap.rst
constexpr std::uint64_t kPresent = std::uint64_t{1} << 63;
constexpr std::uint64_t kSwapped = std::uint64_t{1} << 62;
constexpr std::uint64_t kFileOrShared = std::uint64_t{1} << 61;

constexpr std::size_t kEntriesPerRead = 512;

void drop_pages(std::byte* data, std::uint64_t nbytes) {
  if (::madvise(data, nbytes, MADV_DONTNEED) != 0) {
    throw DeviceError(concat("madvise(MADV_DONTNEED) of ", nbytes, " bytes of a bucket failed: ", errno_text(errno),
                             "; its memory must not be locked (mlock, mlockall)"));
  }
}

}  // namespace

std::uint64_t page_bytes() noexcept {
  static const auto bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

ShmSegment ShmSegment::shared(const std::string& name, std::uint64_t nbytes) {
  ShmSegment segment;
  segment.memory_ = Buffer::shared(nbytes, name);
  return segment;
}

ShmSegment ShmSegment::written_here(const std::string& name, std::uint64_t nbytes) {
  ShmSegment segment = shared(name, nbytes);
  // Our own mapping exists already, so it stays writable.
  if (::fcntl(segment.memory_.fd(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE) != 0) {
    segment.note_ =
        concat("this kernel cannot seal shared memory against writers (F_SEAL_FUTURE_WRITE: ", errno_text(errno),
               "); readers are kept from writing by a read-only descriptor alone");
  }
  const std::string path = concat("/proc/self/fd/", segment.memory_.fd());
  segment.read_only_.reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!segment.read_only_) {
    throw DeviceError(concat("cannot reopen shared memory '", name, "' read-only through ", path, ": ",
                             errno_text(errno), "; the shm transport needs /proc"));
  }
  return segment;
}

std::uint64_t ShmMapping::checked_size(int fd, const std::string& what) {
  struct stat status{};
  if (::fstat(fd, &status) != 0) {
    throw CommError(concat("the descriptor of the ", what, " cannot be examined: ", errno_text(errno)));
  }
  // Without these seals the peer could cut the memory under us, and our next read would be a SIGBUS.
  const int seals = ::fcntl(fd, F_GET_SEALS);
  constexpr int kWanted = F_SEAL_SHRINK | F_SEAL_GROW;
  if (!S_ISREG(status.st_mode) || seals < 0 || (seals & kWanted) != kWanted) {
    throw CommError(concat("the descriptor of the ", what, " is not a memfd of sealed size"));
  }
  return static_cast<std::uint64_t>(status.st_size);
}

ShmMapping ShmMapping::attach(int fd, std::uint64_t nbytes, Mode mode, const std::string& what) {
  const std::uint64_t size = checked_size(fd, what);
  if (size != nbytes || nbytes == 0) {
    throw CommError(concat("the ", what, " is ", size, " bytes, expected ", nbytes));
  }
  // A private mapping is populated while it is read-only: populating a writable one would copy every page.
  const int protection = mode == Mode::kShared ? PROT_READ | PROT_WRITE : PROT_READ;
  const int flags = (mode == Mode::kShared ? MAP_SHARED : MAP_PRIVATE | MAP_NORESERVE) | MAP_POPULATE;
  void* data = ::mmap(nullptr, nbytes, protection, flags, fd, 0);
  if (data == MAP_FAILED) {
    throw DeviceError(concat("cannot map the ", what, " of ", nbytes, " bytes: ", errno_text(errno)));
  }
  ShmMapping mapping(static_cast<std::byte*>(data), nbytes);
  if (mode == Mode::kPrivate && ::mprotect(data, nbytes, PROT_READ | PROT_WRITE) != 0) {
    throw DeviceError(concat("cannot make the private ", what, " of ", nbytes, " bytes writable: ", errno_text(errno)));
  }
  return mapping;
}

ShmMapping::~ShmMapping() {
  if (data_ != nullptr) ::munmap(data_, nbytes_);
}

ShmMapping::ShmMapping(ShmMapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), nbytes_(std::exchange(other.nbytes_, 0)) {}

ShmMapping& ShmMapping::operator=(ShmMapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(nbytes_, other.nbytes_);
  return *this;
}

PrivatePages::PrivatePages(std::byte* trial) : entries_(kEntriesPerRead) {
  pagemap_.reset(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  if (!pagemap_) return;
  auto* byte = reinterpret_cast<volatile std::uint8_t*>(trial);
  const std::uint8_t value = *byte;
  const Answer after_read = any_written(trial, 1);
  *byte = value;
  const Answer after_write = any_written(trial, 1);
  drop_pages(trial, page_bytes());
  if (after_read != Answer::kClean || after_write != Answer::kWritten) pagemap_.reset();
}

PrivatePages::Answer PrivatePages::any_written(const std::byte* data, std::uint64_t pages) {
  std::uint64_t page = reinterpret_cast<std::uintptr_t>(data) / page_bytes();
  while (pages > 0) {
    const std::uint64_t count = std::min<std::uint64_t>(pages, kEntriesPerRead);
    const auto wanted = static_cast<ssize_t>(count * sizeof(std::uint64_t));
    if (::pread(pagemap_.get(), entries_.data(), static_cast<std::size_t>(wanted),
                static_cast<off_t>(page * sizeof(std::uint64_t))) != wanted) {
      return Answer::kUnreadable;
    }
    for (std::uint64_t i = 0; i < count; ++i) {
      const bool exists = (entries_[i] & (kPresent | kSwapped)) != 0;
      if (exists && (entries_[i] & kFileOrShared) == 0) return Answer::kWritten;
    }
    page += count;
    pages -= count;
  }
  return Answer::kClean;
}

void PrivatePages::drop_written(std::byte* data, std::uint64_t nbytes) {
  if (pagemap_) {
    switch (any_written(data, nbytes / page_bytes())) {
      case Answer::kClean: return;
      case Answer::kWritten: break;
      case Answer::kUnreadable: pagemap_.reset(); break;
    }
  }
  drop_pages(data, nbytes);
}

}  // namespace fastsync
