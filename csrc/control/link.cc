#include "control/link.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <random>

namespace fastsync {

namespace {
constexpr int kBacklog = 512;
constexpr std::size_t kReadBytes = 64 * 1024;
constexpr std::size_t kMaxDescriptors = 4;  // of one frame

int open_pidfd(pid_t pid) noexcept {
#ifdef SYS_pidfd_open
  return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
#else
  (void)pid;
  return -1;
#endif
}

bool readable_now(int fd) noexcept {
  pollfd p{fd, POLLIN, 0};
  return ::poll(&p, 1, 0) > 0 && (p.revents & (POLLIN | POLLHUP | POLLERR)) != 0;
}

sockaddr_un abstract_address(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // sun_path[0] stays NUL: the abstract name space.
  const std::size_t n = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), n);
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n);
  return address;
}
}  // namespace

Link::Link(OwnedFd socket) : socket_(std::move(socket)) {
  const int flags = ::fcntl(socket_.get(), F_GETFL, 0);
  if (flags < 0 || ::fcntl(socket_.get(), F_SETFL, flags | O_NONBLOCK) < 0) {
    throw CommError(concat("control socket: cannot make it non-blocking: ", errno_text(errno)));
  }
  int domain = 0;
  socklen_t length = sizeof(domain);
  if (::getsockopt(socket_.get(), SOL_SOCKET, SO_DOMAIN, &domain, &length) == 0) unix_ = domain == AF_UNIX;
  if (unix_) {
    ucred credentials{};
    length = sizeof(credentials);
    if (::getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0) {
      peer_pid_ = credentials.pid;
      peer_uid_ = credentials.uid;
    }
  } else {
    const int on = 1;
    ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  }
}

void Link::end_sending() noexcept {
  if (socket_) ::shutdown(socket_.get(), SHUT_WR);
}

void Link::close() noexcept {
  out_.clear();
  in_descriptors_.clear();
  socket_.reset();
  pidfd_.reset();
  gone_ = true;
}

void Link::watch_process() {
  if (peer_pid_ > 0) pidfd_.reset(open_pidfd(peer_pid_));
}

void Link::send(FrameType type, std::uint64_t sync, std::uint64_t aux, std::span<const std::byte> payload,
                std::span<const int> descriptors) {
  if (gone_) return;
  if (payload.size() > kMaxPayloadBytes) throw InternalError(concat("control frame of ", payload.size(), " bytes"));
  if (descriptors.size() > kMaxDescriptors)
    throw InternalError(concat("control frame with ", descriptors.size(), " descriptors"));
  Outgoing item;
  item.bytes.resize(kFrameHeaderBytes + payload.size());
  FrameHeader header;
  header.type = type;
  header.payload_bytes = static_cast<std::uint32_t>(payload.size());
  header.descriptor_count = static_cast<std::uint32_t>(descriptors.size());
  header.sync = sync;
  header.aux = aux;
  encode_frame_header(header, item.bytes.data());
  if (!payload.empty()) std::memcpy(item.bytes.data() + kFrameHeaderBytes, payload.data(), payload.size());
  for (const int fd : descriptors) {
    OwnedFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!copy) throw CommError(concat("cannot duplicate a descriptor to pass on: ", errno_text(errno)));
    item.descriptors.push_back(std::move(copy));
  }
  out_.push_back(std::move(item));
  flush();
}

void Link::flush() {
  while (!out_.empty() && !gone_) {
    Outgoing& item = out_.front();
    iovec vector{item.bytes.data() + item.sent, item.bytes.size() - item.sent};
    msghdr message{};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxDescriptors)] = {};
    if (item.sent == 0 && !item.descriptors.empty()) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(sizeof(int) * item.descriptors.size());
      cmsghdr* c = CMSG_FIRSTHDR(&message);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(sizeof(int) * item.descriptors.size());
      for (std::size_t i = 0; i < item.descriptors.size(); ++i) {
        const int fd = item.descriptors[i].get();
        std::memcpy(CMSG_DATA(c) + i * sizeof(int), &fd, sizeof(int));
      }
    }
    const ssize_t n = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS) return;
      gone_ = true;  // what the peer sent before it went stays readable
      out_.clear();
      return;
    }
    if (n > 0) item.descriptors.clear();
    item.sent += static_cast<std::size_t>(n);
    if (item.sent == item.bytes.size()) out_.pop_front();
  }
}

std::size_t Link::unsent_bytes() const noexcept {
  std::size_t sum = 0;
  for (const Outgoing& item : out_) sum += item.bytes.size() - item.sent;
  return sum;
}

void Link::poll_now() {
  if (!socket_) return;
  flush();
  // Asked before reading, and read to the end: whoever sees gone() has then got all that the process ever sent.
  const bool ended = pidfd_ && readable_now(pidfd_.get());
  for (;;) {
    const std::size_t old = in_.size();
    // A peer cannot make us hold more than one oversize-checked frame and a read's worth beyond it.
    if (old - in_start_ > kFrameHeaderBytes + max_payload_bytes_ + kReadBytes) return;
    in_.resize(old + kReadBytes);
    iovec vector{in_.data() + old, kReadBytes};
    msghdr message{};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxDescriptors)] = {};
    if (unix_) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
    }
    const ssize_t n = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    in_.resize(old + static_cast<std::size_t>(std::max<ssize_t>(n, 0)));
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) gone_ = true;
      break;
    }
    for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
      if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
      const std::size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < count; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
        OwnedFd arrived(fd);
        if (in_descriptors_.size() < max_descriptors_) in_descriptors_.push_back(std::move(arrived));
      }
    }
    if (n == 0) {
      gone_ = true;
      break;
    }
  }
  if (ended) gone_ = process_ended_ = true;
}

bool Link::process_ends_within(std::chrono::milliseconds patience) {
  if (!process_ended_ && pidfd_) {
    pollfd p{pidfd_.get(), POLLIN, 0};
    if (::poll(&p, 1, static_cast<int>(patience.count())) > 0) gone_ = process_ended_ = true;
  }
  return process_ended_;
}

std::optional<Frame> Link::receive() {
  if (in_.size() - in_start_ < kFrameHeaderBytes) return std::nullopt;
  const FrameHeader header = decode_frame_header(in_.data() + in_start_);
  if (header.payload_bytes > max_payload_bytes_) {
    throw CommError(concat("control frame: payload of ", header.payload_bytes, " bytes, at most ", max_payload_bytes_));
  }
  const std::size_t total = kFrameHeaderBytes + header.payload_bytes;
  if (in_.size() - in_start_ < total) return std::nullopt;
  if (header.descriptor_count > in_descriptors_.size()) {
    throw CommError(concat("control frame: ", header.descriptor_count, " descriptors announced, ",
                           in_descriptors_.size(), " arrived"));
  }
  Frame frame;
  frame.type = header.type;
  frame.flags = header.flags;
  frame.sync = header.sync;
  frame.aux = header.aux;
  const std::byte* payload = in_.data() + in_start_ + kFrameHeaderBytes;
  frame.payload.assign(payload, payload + header.payload_bytes);
  const auto first = in_descriptors_.begin();
  const auto last = first + header.descriptor_count;
  frame.descriptors.assign(std::make_move_iterator(first), std::make_move_iterator(last));
  in_descriptors_.erase(first, last);
  in_start_ += total;
  if (in_start_ == in_.size()) {
    in_.clear();
    in_start_ = 0;
    if (in_.capacity() > 4 * kReadBytes) in_.shrink_to_fit();
  } else if (in_start_ > in_.size() / 2) {
    in_.erase(in_.begin(), in_.begin() + static_cast<std::ptrdiff_t>(in_start_));
    in_start_ = 0;
  }
  return frame;
}

void wait_readable(std::span<Link* const> links, int listener, std::chrono::nanoseconds timeout) {
  std::vector<pollfd> fds;
  fds.reserve(links.size() * 2 + 1);
  for (Link* link : links) {
    if (link->fd() < 0 || link->gone()) continue;
    fds.push_back({link->fd(), static_cast<short>(POLLIN | (link->has_unsent() ? POLLOUT : 0)), 0});
    if (link->pidfd() >= 0) fds.push_back({link->pidfd(), POLLIN, 0});
  }
  if (listener >= 0) fds.push_back({listener, POLLIN, 0});
  const auto ns = std::max<std::chrono::nanoseconds>(timeout, std::chrono::nanoseconds::zero()).count();
  const timespec ts{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  ::ppoll(fds.data(), fds.size(), &ts, nullptr);  // EINTR is a wake-up like any other
}

OwnedFd listen_unix(std::string& name_out) {
  OwnedFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw CommError(concat("cannot make a Unix socket: ", errno_text(errno)));
  std::random_device random;
  for (int attempt = 0; attempt < 16; ++attempt) {
    const std::uint64_t bits = (std::uint64_t{random()} << 32) | random();
    std::string name = concat("fastsync-", ::getpid(), "-", std::hex, bits);
    socklen_t length = 0;
    const sockaddr_un address = abstract_address(name, length);
    if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0) {
      if (::listen(fd.get(), kBacklog) != 0)
        throw CommError(concat("cannot listen on a Unix socket: ", errno_text(errno)));
      name_out = std::move(name);
      return fd;
    }
    if (errno != EADDRINUSE) break;
  }
  throw CommError(concat("cannot bind an abstract Unix socket: ", errno_text(errno)));
}

OwnedFd listen_tcp(int& port_out) {
  OwnedFd fd(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd) {
    const int off = 0;
    ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    address.sin6_addr = in6addr_any;
    if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) fd.reset();
  }
  if (!fd) {  // a host without IPv6
    fd.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    if (!fd || ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
      throw CommError(concat("cannot bind a TCP control socket: ", errno_text(errno)));
    }
  }
  if (::listen(fd.get(), kBacklog) != 0) throw CommError(concat("cannot listen on a TCP socket: ", errno_text(errno)));
  sockaddr_storage bound{};
  socklen_t length = sizeof(bound);
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &length) != 0) {
    throw CommError(concat("getsockname: ", errno_text(errno)));
  }
  port_out = bound.ss_family == AF_INET6 ? ntohs(reinterpret_cast<sockaddr_in6&>(bound).sin6_port)
                                         : ntohs(reinterpret_cast<sockaddr_in&>(bound).sin_port);
  return fd;
}

std::optional<OwnedFd> accept_one(int listener) {
  const int fd = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) return std::nullopt;
  return OwnedFd(fd);
}

std::optional<OwnedFd> connect_unix(const std::string& name) {
  OwnedFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) throw CommError(concat("cannot make a Unix socket: ", errno_text(errno)));
  socklen_t length = 0;
  const sockaddr_un address = abstract_address(name, length);
  // Non-blocking: a full backlog is "not now" (EAGAIN), never a wait that nothing bounds.
  const int flags = ::fcntl(fd.get(), F_GETFL, 0);
  ::fcntl(fd.get(), F_SETFL, flags | O_NONBLOCK);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) return std::nullopt;
  return fd;
}

std::optional<OwnedFd> connect_tcp(const std::string& numeric_host, int port, std::chrono::milliseconds timeout) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (::getaddrinfo(numeric_host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return std::nullopt;
  std::optional<OwnedFd> result;
  OwnedFd fd(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd) {
    int rc = ::connect(fd.get(), found->ai_addr, found->ai_addrlen);
    if (rc != 0 && errno == EINPROGRESS) {
      const auto deadline = std::chrono::steady_clock::now() + timeout;
      pollfd p{fd.get(), POLLOUT, 0};
      int ready = 0;
      do {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
        ready = ::poll(&p, 1, static_cast<int>(std::max<std::int64_t>(left.count(), 0)));
      } while (ready < 0 && errno == EINTR);
      if (ready == 1) {
        int error = 0;
        socklen_t length = sizeof(error);
        ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
        rc = error == 0 ? 0 : -1;
      }
    }
    if (rc == 0) result = std::move(fd);
  }
  ::freeaddrinfo(found);
  return result;
}

}  // namespace fastsync
