// Owns one file descriptor.
//
// Move-only; closes on destruction. Threads: a value. Errors: none; closing cannot usefully fail for the descriptors
// that we hold (memfds, sockets).
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <utility>

namespace fastsync {

class OwnedFd {
 public:
  OwnedFd() = default;
  explicit OwnedFd(int fd) noexcept : fd_(fd) {}
  ~OwnedFd() { reset(); }
  OwnedFd(OwnedFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  OwnedFd(const OwnedFd&) = delete;
  OwnedFd& operator=(const OwnedFd&) = delete;
  // Another descriptor of the same file; empty where the process can have no more.
  [[nodiscard]] static OwnedFd duplicate(int fd) noexcept { return OwnedFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] explicit operator bool() const noexcept { return fd_ >= 0; }
  [[nodiscard]] int release() noexcept { return std::exchange(fd_, -1); }
  void reset(int fd = -1) noexcept {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

}  // namespace fastsync
