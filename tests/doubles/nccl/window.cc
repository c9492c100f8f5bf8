#include "doubles/nccl/window.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>
#include <system_error>

namespace fastsync::fake_nccl {
namespace {

constexpr std::size_t kPage = 4096;

std::size_t round_to_page(std::size_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }
std::size_t pairs(int nranks) { return static_cast<std::size_t>(nranks) * static_cast<std::size_t>(nranks); }
std::size_t channels_offset(int nranks) { return round_to_page(static_cast<std::size_t>(nranks) * sizeof(RankBlock)); }
std::size_t chunks_offset(int nranks) {
  return channels_offset(nranks) + round_to_page(pairs(nranks) * sizeof(Channel));
}
std::size_t window_bytes(int nranks) { return chunks_offset(nranks) + pairs(nranks) * kChunks * kChunkBytes; }

std::uint32_t* futex_word(std::atomic<std::uint32_t>& doorbell) { return reinterpret_cast<std::uint32_t*>(&doorbell); }

}  // namespace

OwnedFd Window::create(int nranks) {
  OwnedFd fd(::memfd_create("fastsync-fake-nccl", MFD_CLOEXEC));
  // Sparse: only what is used is ever there.
  if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(window_bytes(nranks))) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot make the window of a communicator");
  }
  return fd;
}

Window::Window(int fd, int nranks) : size_(window_bytes(nranks)), nranks_(nranks) {
  void* mapped = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "cannot map the window of a communicator");
  }
  base_ = static_cast<std::byte*>(mapped);
}

Window::~Window() { ::munmap(base_, size_); }

RankBlock& Window::rank(int rank) const noexcept { return reinterpret_cast<RankBlock*>(base_)[rank]; }

Channel& Window::channel(int from, int to) const noexcept {
  return reinterpret_cast<Channel*>(base_ + channels_offset(nranks_))[from * nranks_ + to];
}

std::byte* Window::chunk(int from, int to, std::uint64_t number) const noexcept {
  const std::size_t pair =
      static_cast<std::size_t>(from) * static_cast<std::size_t>(nranks_) + static_cast<std::size_t>(to);
  return base_ + chunks_offset(nranks_) + (pair * kChunks + number % kChunks) * kChunkBytes;
}

void Window::ring(int rank) const noexcept {
  std::atomic<std::uint32_t>& doorbell = this->rank(rank).doorbell;
  doorbell.fetch_add(1, std::memory_order_release);
  ::syscall(SYS_futex, futex_word(doorbell), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Window::ring_all() const noexcept {
  for (int rank = 0; rank < nranks_; ++rank) ring(rank);
}

std::uint32_t Window::doorbell(int rank) const noexcept {
  return this->rank(rank).doorbell.load(std::memory_order_acquire);
}

void Window::wait(int rank, std::uint32_t seen, std::chrono::milliseconds most) const noexcept {
  timespec timeout{};
  timeout.tv_sec = static_cast<time_t>(most.count() / 1000);
  timeout.tv_nsec = static_cast<long>(most.count() % 1000) * 1'000'000;
  ::syscall(SYS_futex, futex_word(this->rank(rank).doorbell), FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

}  // namespace fastsync::fake_nccl
