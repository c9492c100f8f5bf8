#include "device/buffer.h"

#include <utility>

#include "common/error.h"
#include "device/host/host_memory.h"

namespace fastsync {

Buffer Buffer::heap(std::uint64_t nbytes, const std::string& name) {
  return {MemoryKind::kHost, allocate_host(MemoryKind::kHost, nbytes, name)};
}

Buffer Buffer::shared(std::uint64_t nbytes, const std::string& name) {
  return {MemoryKind::kShared, allocate_host(MemoryKind::kShared, nbytes, name)};
}

Buffer Buffer::allocate(std::shared_ptr<DeviceRuntime> runtime, MemoryKind kind, std::uint64_t nbytes) {
  Buffer buffer(kind, runtime->allocate(kind, nbytes));
  buffer.runtime_ = std::move(runtime);
  return buffer;
}

BufferView Buffer::view(std::uint64_t offset, std::uint64_t nbytes) const {
  if (offset > allocation_.nbytes || nbytes > allocation_.nbytes - offset) {
    throw InvalidArgument(concat("bytes [", offset, ", ", offset, " + ", nbytes, ") are not inside a buffer of ",
                                 allocation_.nbytes, " bytes"));
  }
  return {allocation_.data + offset, nbytes, kind_};
}

void Buffer::reset() noexcept {
  if (runtime_ != nullptr) {
    runtime_->deallocate(kind_, allocation_);
  } else {
    deallocate_host(kind_, allocation_);
  }
  allocation_ = {};
  runtime_.reset();
}

void Buffer::swap(Buffer& other) noexcept {
  std::swap(runtime_, other.runtime_);
  std::swap(kind_, other.kind_);
  std::swap(allocation_, other.allocation_);
}

}  // namespace fastsync
