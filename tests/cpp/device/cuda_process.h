// Processes that use CUDA, in tests: over the double of libcuda, or over a real driver where FASTSYNC_CUDA_PATH names it.
//
// Every test forks. A driver is chosen and initialised once a process, does not survive fork(), and an error of a kernel
// breaks it for good; so the test's own process never touches it, and tests do not see each other.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/owned_fd.h"
#include "device/device_runtime.h"
#include "support/process.h"

namespace fastsync::testing {

using Environment = std::vector<std::pair<std::string, std::string>>;

// Empty where the build made no double and none is named.
inline std::string cuda_path() {
  if (const char* named = std::getenv("FASTSYNC_CUDA_PATH"); named != nullptr && *named != '\0') return named;
#if defined(FASTSYNC_FAKE_CUDA_PATH)
  return FASTSYNC_FAKE_CUDA_PATH;
#else
  return {};
#endif
}

inline bool cuda_is_double() { return cuda_path().find("fake") != std::string::npos; }

// What the double saw in this process. For use in a process of its own.
class CudaJournal {
 public:
  // Calls of an exported name.
  [[nodiscard]] static std::uint64_t calls(const char* symbol) {
    return function<std::uint64_t(const char*)>("fastsync_fake_count")(symbol);
  }
  // Things that exist: device_memory, pinned, stream, event, memory_import, ...
  [[nodiscard]] static std::int64_t live(const char* kind) {
    return function<std::int64_t(const char*)>("fastsync_fake_live")(kind);
  }
  // Rules that were broken, one a line. Empty for a real driver, which keeps no list.
  [[nodiscard]] static std::string violations() {
    if (!cuda_is_double()) return {};
    std::array<char, 4096> text{};
    (void)function<std::size_t(char*, std::size_t)>("fastsync_fake_violations")(text.data(), text.size());
    return text.data();
  }
  // Any of its symbols, to look past the code under test.
  template <typename F>
  [[nodiscard]] static F* function(const char* symbol) {
    static void* const library = ::dlopen(cuda_path().c_str(), RTLD_NOW | RTLD_LOCAL);
    void* const found = library == nullptr ? nullptr : ::dlsym(library, symbol);
    if (found == nullptr) throw std::runtime_error(std::string("the double has no ") + symbol);
    return reinterpret_cast<F*>(found);
  }
};

// A process with the double in its environment. Its failed expectations are the test's.
template <typename Body>
Process cuda_process(const Environment& environment, Body body) {
  return Process([&] {
    ::setenv("FASTSYNC_CUDA_PATH", cuda_path().c_str(), 1);
    ::setenv("FASTSYNC_ALLOW_FAKE", "1", 1);
    for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
    body();
    EXPECT_EQ(CudaJournal::violations(), "");
    if (::testing::Test::HasFailure()) throw std::runtime_error("an expectation failed there");
  });
}

template <typename Body>
void in_cuda_process(const Environment& environment, Body body) {
  EXPECT_EQ(cuda_process(environment, body).join(), 0);
}
template <typename Body>
void in_cuda_process(Body body) {
  in_cuda_process(Environment(), std::move(body));
}

// Two ends, one for each of two processes, that carry values and descriptors.
class Channel {
 public:
  Channel() { EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends_), 0); }
  ~Channel() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  void send(int end, const void* data, std::size_t nbytes, int descriptor = -1) const {
    iovec piece{const_cast<void*>(data), nbytes};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    if (descriptor >= 0) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* const header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(header), &descriptor, sizeof(descriptor));
    }
    if (::sendmsg(ends_[end], &message, MSG_NOSIGNAL) != static_cast<ssize_t>(nbytes)) {
      throw std::runtime_error("the other process is gone");
    }
  }
  // The descriptor that came with it, if one did.
  OwnedFd receive(int end, void* data, std::size_t nbytes) const {
    iovec piece{data, nbytes};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    if (::recvmsg(ends_[end], &message, MSG_CMSG_CLOEXEC) != static_cast<ssize_t>(nbytes)) {
      throw std::runtime_error("the other process is gone");
    }
    const cmsghdr* const header = CMSG_FIRSTHDR(&message);
    if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return {};
    int descriptor = -1;
    std::memcpy(&descriptor, CMSG_DATA(header), sizeof(descriptor));
    return OwnedFd(descriptor);
  }

  void send_memory(int end, const MemoryHandle& handle) const {
    const MemoryWords words{handle.bytes, handle.nbytes};
    send(end, &words, sizeof(words), handle.fd.get());
  }
  [[nodiscard]] MemoryHandle receive_memory(int end) const {
    MemoryWords words{};
    MemoryHandle handle;
    handle.fd = receive(end, &words, sizeof(words));
    handle.bytes = words.bytes;
    handle.nbytes = words.nbytes;
    return handle;
  }
  void give(int end) const { send(end, "", 1); }
  void take(int end) const {
    char byte = 0;
    (void)receive(end, &byte, 1);
  }

 private:
  struct MemoryWords {
    std::array<std::byte, 64> bytes;
    std::uint64_t nbytes;
  };
  int ends_[2] = {-1, -1};
};

}  // namespace fastsync::testing
