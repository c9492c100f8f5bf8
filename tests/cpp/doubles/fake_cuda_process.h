// Processes that use the double of libcuda directly, through cuda.h's own declarations.
//
// The double reads its environment once and does not survive fork(), so every test forks and its own process never opens
// the library.
#pragma once

#include <cuda.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "doubles/cuda/fake_cuda_internal.h"
#include "support/bounds.h"
#include "support/process.h"

namespace fastsync::testing {

inline void* fake_library() {
  static void* const library = ::dlopen(FASTSYNC_FAKE_CUDA_PATH, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(::dlerror());
  return library;
}

template <typename F>
F fake_function(const char* name) {
  void* const found = ::dlsym(fake_library(), name);
  if (found == nullptr) throw std::runtime_error(std::string("the double has no ") + name);
  return reinterpret_cast<F>(found);
}

// The exported function; cuda.h's macros give the name its suffix.
#define FASTSYNC_TEXT_OF(symbol) #symbol
#define FASTSYNC_NAME_OF(symbol) FASTSYNC_TEXT_OF(symbol)
#define CU(symbol) ::fastsync::testing::fake_function<decltype(&symbol)>(FASTSYNC_NAME_OF(symbol))

// What new memory is filled with.
inline constexpr unsigned char kFresh = 0xCD;

using Environment = std::vector<std::pair<std::string, std::string>>;

inline std::string violations() {
  std::array<char, 8192> text{};
  CU(fastsync_fake_violations)(text.data(), text.size());
  return text.data();
}

// A process with that environment, the library not yet opened. Its failed expectations are the test's; a violation that
// the body has not cleared is one too.
template <typename Body>
Process fake_process(const Environment& environment, Body body) {
  return Process([&] {
    for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
    body();
    EXPECT_EQ(violations(), "");
    if (::testing::Test::HasFailure()) throw std::runtime_error("an expectation failed there");
  });
}
template <typename Body>
void in_fake_process(const Environment& environment, Body body) {
  EXPECT_EQ(fake_process(environment, std::move(body)).join(), 0);
}
template <typename Body>
void in_fake_process(Body body) {
  in_fake_process(Environment(), std::move(body));
}

// Expects violations of that kind only, and forgets them.
inline void expect_violation(const std::string& kind) {
  const std::string all = violations();
  EXPECT_EQ(all.rfind(kind + ": ", 0), 0U) << "violations: " << all;
  CU(fastsync_fake_clear_violations)();
}

inline CUcontext use_device(int ordinal) {
  EXPECT_EQ(CU(cuInit)(0), CUDA_SUCCESS);
  CUcontext context = nullptr;
  EXPECT_EQ(CU(cuDevicePrimaryCtxRetain)(&context, ordinal), CUDA_SUCCESS);
  EXPECT_EQ(CU(cuCtxSetCurrent)(context), CUDA_SUCCESS);
  return context;
}

inline CUdeviceptr device_memory(std::size_t nbytes) {
  CUdeviceptr memory = 0;
  EXPECT_EQ(CU(cuMemAlloc)(&memory, nbytes), CUDA_SUCCESS);
  return memory;
}

inline CUstream new_stream(unsigned flags = CU_STREAM_NON_BLOCKING) {
  CUstream stream = nullptr;
  EXPECT_EQ(CU(cuStreamCreate)(&stream, flags), CUDA_SUCCESS);
  return stream;
}

inline CUevent new_event(unsigned flags = CU_EVENT_DISABLE_TIMING) {
  CUevent event = nullptr;
  EXPECT_EQ(CU(cuEventCreate)(&event, flags), CUDA_SUCCESS);
  return event;
}

template <typename T>
T* pinned(std::size_t count) {
  void* memory = nullptr;
  EXPECT_EQ(CU(cuMemHostAlloc)(&memory, count * sizeof(T), CU_MEMHOSTALLOC_PORTABLE), CUDA_SUCCESS);
  return static_cast<T*>(memory);
}
inline CUdeviceptr address_of(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

// What the device memory holds, by a synchronous copy.
inline std::vector<unsigned char> contents(CUdeviceptr memory, std::size_t nbytes) {
  std::vector<unsigned char> bytes(nbytes);
  EXPECT_EQ(CU(cuMemcpyDtoH)(bytes.data(), memory, nbytes), CUDA_SUCCESS);
  return bytes;
}
inline std::vector<unsigned char> filled(std::size_t nbytes, unsigned char value) {
  return std::vector<unsigned char>(nbytes, value);
}

// Both ends of a socket for two forked processes.
class Wire {
 public:
  Wire() { EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends_), 0); }
  ~Wire() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  template <typename T>
  void send(int end, const T& value) const {
    if (::send(ends_[end], &value, sizeof value, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof value)) {
      throw std::runtime_error("the other process is gone");
    }
  }
  template <typename T>
  [[nodiscard]] T receive(int end) const {
    T value{};
    if (::recv(ends_[end], &value, sizeof value, 0) != static_cast<ssize_t>(sizeof value)) {
      throw std::runtime_error("the other process is gone");
    }
    return value;
  }
  void send_descriptor(int end, int descriptor) const {
    char byte = 0;
    iovec piece{&byte, 1};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    *reinterpret_cast<int*>(CMSG_DATA(header)) = descriptor;
    if (::sendmsg(ends_[end], &message, MSG_NOSIGNAL) != 1) throw std::runtime_error("the other process is gone");
  }
  [[nodiscard]] int receive_descriptor(int end) const {
    char byte = 0;
    iovec piece{&byte, 1};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    if (::recvmsg(ends_[end], &message, MSG_CMSG_CLOEXEC) != 1 || CMSG_FIRSTHDR(&message) == nullptr) {
      throw std::runtime_error("the other process is gone");
    }
    return *reinterpret_cast<int*>(CMSG_DATA(CMSG_FIRSTHDR(&message)));
  }

 private:
  int ends_[2] = {-1, -1};
};

}  // namespace fastsync::testing
