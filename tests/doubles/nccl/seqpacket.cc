#include "doubles/nccl/seqpacket.h"

#include <sys/eventfd.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>

namespace fastsync::fake_nccl {
namespace {

socklen_t abstract_address(std::string_view name, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  const std::size_t length = name.size() < sizeof address->sun_path - 1 ? name.size() : sizeof address->sun_path - 1;
  std::memcpy(address->sun_path + 1, name.data(), length);  // a leading zero: no file
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}

OwnedFd new_socket() { return OwnedFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)); }

}  // namespace

OwnedFd listen_abstract(std::string_view name) {
  sockaddr_un address;
  const socklen_t length = abstract_address(name, &address);
  OwnedFd fd = new_socket();
  if (!fd || ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::listen(fd.get(), SOMAXCONN) != 0) {
    return OwnedFd();
  }
  return fd;
}

OwnedFd accept_own(int listener) {
  OwnedFd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  ucred other{};
  socklen_t length = sizeof other;
  if (!fd || ::getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &other, &length) != 0 || other.uid != ::getuid()) {
    return OwnedFd();
  }
  return fd;
}

OwnedFd connect_abstract(std::string_view name) {
  sockaddr_un address;
  const socklen_t length = abstract_address(name, &address);
  OwnedFd fd = new_socket();
  if (!fd || ::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) return OwnedFd();
  return fd;
}

bool socket_pair(OwnedFd* one, OwnedFd* other) {
  int ends[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return false;
  one->reset(ends[0]);
  other->reset(ends[1]);
  return true;
}

bool send_message(int fd, std::span<const std::byte> message, std::span<const int> descriptors) {
  iovec part{const_cast<std::byte*>(message.data()), message.size()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  std::vector<std::byte> control;
  if (!descriptors.empty()) {
    control.resize(CMSG_SPACE(descriptors.size_bytes()));
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size_bytes());
  }
  for (;;) {
    const ssize_t sent = ::sendmsg(fd, &header, MSG_NOSIGNAL);
    if (sent >= 0) return static_cast<std::size_t>(sent) == message.size();
    if (errno != EINTR) return false;
  }
}

bool receive_message(int fd, std::span<std::byte> message, std::vector<OwnedFd>* descriptors) {
  iovec part{message.data(), message.size()};
  std::array<std::byte, CMSG_SPACE(kMaxDescriptors * sizeof(int))> control;
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  ssize_t got = 0;
  do {
    got = ::recvmsg(fd, &header, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  std::vector<OwnedFd> received;
  for (cmsghdr* rights = CMSG_FIRSTHDR(&header); got >= 0 && rights != nullptr; rights = CMSG_NXTHDR(&header, rights)) {
    if (rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int one = -1;
      std::memcpy(&one, CMSG_DATA(rights) + i * sizeof(int), sizeof one);
      received.emplace_back(one);
    }
  }
  if (descriptors != nullptr) *descriptors = std::move(received);
  const bool cut = (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
  return got > 0 && static_cast<std::size_t>(got) == message.size() && !cut;
}

OwnedFd make_event() { return OwnedFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)); }

void signal_event(int fd) noexcept {
  const std::uint64_t one = 1;
  while (::write(fd, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

void drain_event(int fd) noexcept {
  std::uint64_t count = 0;
  while (::read(fd, &count, sizeof count) < 0 && errno == EINTR) {
  }
}

}  // namespace fastsync::fake_nccl
