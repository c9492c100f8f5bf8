// Owns one allocation of any kind; BufferView is a borrowed piece of one.
//
// Ownership: a Buffer is move-only and frees its memory; a runtime's Buffer keeps the runtime alive. A BufferView is a
// value that must not outlive its Buffer.
// Threads: values. Streams: freeing does not wait for queued work that uses the memory; whoever queued it does.
// Errors: making one throws DeviceError with the size, the free memory and a remedy, without touching a page when the
// size is out of reach; view() throws InvalidArgument outside the buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "device/device_runtime.h"

namespace fastsync {

struct BufferView {
  std::byte* data = nullptr;
  std::uint64_t nbytes = 0;
  MemoryKind kind = MemoryKind::kHost;
};

class Buffer {
 public:
  Buffer() = default;
  // Host memory needs no runtime: heap is aligned to at least a page; shared is a memfd whose size is sealed and whose
  // pages are reserved. `name` shows in messages and, for shared, in /proc/<pid>/maps.
  [[nodiscard]] static Buffer heap(std::uint64_t nbytes, const std::string& name = "fastsync");
  [[nodiscard]] static Buffer shared(std::uint64_t nbytes, const std::string& name = "fastsync");
  [[nodiscard]] static Buffer allocate(std::shared_ptr<DeviceRuntime> runtime, MemoryKind kind, std::uint64_t nbytes);

  ~Buffer() { reset(); }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    if (this != &other) {
      reset();
      swap(other);
    }
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  [[nodiscard]] std::byte* data() const noexcept { return allocation_.data; }
  [[nodiscard]] std::uint64_t nbytes() const noexcept { return allocation_.nbytes; }
  [[nodiscard]] MemoryKind kind() const noexcept { return kind_; }
  // The memfd of a shared buffer, -1 otherwise. Stays the buffer's.
  [[nodiscard]] int fd() const noexcept { return allocation_.fd; }
  [[nodiscard]] BufferView view() const noexcept { return {allocation_.data, allocation_.nbytes, kind_}; }
  [[nodiscard]] BufferView view(std::uint64_t offset, std::uint64_t nbytes) const;

 private:
  Buffer(MemoryKind kind, Allocation allocation) noexcept : kind_(kind), allocation_(allocation) {}
  void reset() noexcept;
  void swap(Buffer& other) noexcept;

  std::shared_ptr<DeviceRuntime> runtime_;
  MemoryKind kind_ = MemoryKind::kHost;
  Allocation allocation_;
};

}  // namespace fastsync
