// Unix sockets that keep messages apart and carry descriptors.
//
// Threads: values. Errors: false, with errno.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "common/owned_fd.h"

namespace fastsync::fake_nccl {

inline constexpr std::size_t kMaxDescriptors = 253;  // Linux passes no more in one message

[[nodiscard]] OwnedFd listen_abstract(std::string_view name);
[[nodiscard]] OwnedFd accept_own(int listener);  // none if the other end belongs to another user
[[nodiscard]] OwnedFd connect_abstract(std::string_view name);
[[nodiscard]] bool socket_pair(OwnedFd* one, OwnedFd* other);

[[nodiscard]] bool send_message(int fd, std::span<const std::byte> message, std::span<const int> descriptors = {});
// Exactly `message`; anything else, the end included, is false.
[[nodiscard]] bool receive_message(int fd, std::span<std::byte> message, std::vector<OwnedFd>* descriptors = nullptr);

[[nodiscard]] OwnedFd make_event();  // an eventfd, to wake a poll()
void signal_event(int fd) noexcept;
void drain_event(int fd) noexcept;

}  // namespace fastsync::fake_nccl
