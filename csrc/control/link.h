// One control connection: framed, non-blocking, with a death notice.
//
// A Link owns a stream socket (AF_UNIX on one host, AF_INET between hosts) and, where the peer's pid is known and the
// kernel has it, a pidfd: a peer is dead when its socket ends or its process does. The pidfd matters because a forked
// child of the peer (a data loader's worker) can hold the socket open after the peer was killed.
//
// Threads: one at a time. Streams: none.
// Errors: a peer that is gone is a state (gone()), not an exception, so that frames it sent before are still read.
// Frames that are not ours throw CommError.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/owned_fd.h"
#include "control/frame.h"

namespace fastsync {

class Link {
 public:
  // Takes a connected socket and makes it non-blocking.
  explicit Link(OwnedFd socket);
  ~Link() = default;
  Link(Link&&) noexcept = default;
  Link& operator=(Link&&) noexcept = default;

  // Queues a frame and sends what the socket takes now; flush() sends the rest. Descriptors are duplicated into the
  // kernel when sent; the caller keeps its own. Does nothing once gone().
  void send(FrameType type, std::uint64_t sync, std::uint64_t aux, std::span<const std::byte> payload = {},
            std::span<const int> descriptors = {});
  void flush();
  [[nodiscard]] bool has_unsent() const noexcept { return !out_.empty(); }

  [[nodiscard]] std::size_t unsent_bytes() const noexcept;

  // The next whole frame, if one has arrived.
  [[nodiscard]] std::optional<Frame> receive();
  // EOF, reset, or the peer's process ended; frames that had arrived are still returned by receive().
  [[nodiscard]] bool gone() const noexcept { return gone_; }
  // The process at the other end is known to have ended (not only its connection).
  [[nodiscard]] bool process_ended() const noexcept { return process_ended_; }
  // Reads what is there and looks at the pidfd. Never blocks. If the link is gone() afterwards, nothing is left unread.
  void poll_now();
  // Whether that process ends within `patience`: a connection ends a moment before the process that is killed.
  [[nodiscard]] bool process_ends_within(std::chrono::milliseconds patience);
  // How much a peer can make us hold: a frame with a larger payload is not ours, more descriptors are closed unseen.
  void limit(std::size_t payload_bytes, std::size_t descriptors) noexcept {
    max_payload_bytes_ = payload_bytes;
    max_descriptors_ = descriptors;
  }

  // Opens a pidfd for the process at the other end of a Unix socket (SO_PEERCRED). No-op where impossible.
  void watch_process();
  [[nodiscard]] pid_t peer_pid() const noexcept { return peer_pid_; }
  [[nodiscard]] uid_t peer_uid() const noexcept { return peer_uid_; }
  [[nodiscard]] bool is_unix() const noexcept { return unix_; }
  [[nodiscard]] int fd() const noexcept { return socket_.get(); }
  [[nodiscard]] int pidfd() const noexcept { return pidfd_.get(); }
  // The other end sees this as the connection's end, even while a duplicate of our descriptor is still open.
  void end_sending() noexcept;
  void close() noexcept;

 private:
  struct Outgoing {
    std::vector<std::byte> bytes;
    std::vector<OwnedFd> descriptors;  // duplicates, until they are sent
    std::size_t sent = 0;
  };
  OwnedFd socket_;
  OwnedFd pidfd_;
  bool unix_ = false;
  bool gone_ = false;
  bool process_ended_ = false;
  pid_t peer_pid_ = 0;
  uid_t peer_uid_ = 0;
  std::deque<Outgoing> out_;
  std::vector<std::byte> in_;
  std::size_t in_start_ = 0;
  std::vector<OwnedFd> in_descriptors_;
  std::size_t max_payload_bytes_ = kMaxPayloadBytes;
  std::size_t max_descriptors_ = 64;
};

// Waits until one of the links (or `listener`, if >= 0) has something, at most `timeout`. Interrupted by signals.
void wait_readable(std::span<Link* const> links, int listener, std::chrono::nanoseconds timeout);

// Listening and connecting. Abstract Unix names leave nothing in any file system.
[[nodiscard]] OwnedFd listen_unix(std::string& name_out);
[[nodiscard]] OwnedFd listen_tcp(int& port_out);
[[nodiscard]] std::optional<OwnedFd> accept_one(int listener);
// Empty when nobody listens there (any more).
[[nodiscard]] std::optional<OwnedFd> connect_unix(const std::string& name);
[[nodiscard]] std::optional<OwnedFd> connect_tcp(const std::string& numeric_host, int port,
                                                 std::chrono::milliseconds timeout);

}  // namespace fastsync
