// Memory of cuMemAlloc, host memory, copies and pointer attributes.
#include <cuda.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "doubles/cuda/driver.h"

using namespace fastsync::fake;

namespace {

CUdeviceptr address_of(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

enum class Place : std::uint8_t { kDevice, kPinned, kPageable, kBad };

// What a copy's operand is when the call is made.
Place place_of(CUdeviceptr address, std::size_t nbytes) {
  const Memory& memory = driver().memory;
  const auto region = memory.find(address);
  if (region == nullptr) {
    if (memory.is_device_address(address) || memory.was_freed(address)) return Place::kBad;
    return is_mapped(host_pointer(address), nbytes) ? Place::kPageable : Place::kBad;
  }
  const bool inside = nbytes <= region->base + region->nbytes - address;
  if (region->kind == RegionKind::kPinned || region->kind == RegionKind::kRegistered) {
    return inside ? Place::kPinned : Place::kPageable;  // the driver treats a range that is partly pinned as pageable
  }
  return inside ? Place::kDevice : Place::kBad;
}

CUresult refuse(const Call& call, CUdeviceptr address, std::size_t nbytes, bool writes) {
  const Translation why = driver().memory.translate(address, nbytes, kAnyDevice, writes);
  driver().violation(why.problem.empty() ? "bad-pointer: of a copy" : why.problem, call.symbol);
  return CUDA_ERROR_INVALID_VALUE;
}

void blame_pageable(const Call& call, std::size_t nbytes) {
  driver().violation("pageable: " + std::to_string(nbytes) +
                         " bytes of host memory that is neither pinned nor registered; the copy is not asynchronous",
                     call.symbol);
}

CUresult wait_for(const Mark& mark) {
  Context& context = mark.stream->context();
  mark.stream->wait_until(mark.sequence, [&] { return driver().stopping || context.state() != CUDA_SUCCESS; });
  return driver().stopping ? CUDA_ERROR_DEINITIALIZED : context.state();
}

struct Copy {
  CUdeviceptr dst = 0;
  CUdeviceptr src = 0;
  std::size_t nbytes = 0;
  bool dst_must_be_device = false;
  bool src_must_be_device = false;
  bool synchronous = false;
};

CUresult queue_copy(const Call& call, const Copy& copy, CUstream handle) {
  const auto stream = stream_of(call.context, handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (const CUresult state = stream->context().state(); state != CUDA_SUCCESS) return state;
  if (copy.nbytes == 0) return CUDA_SUCCESS;
  const Place from = place_of(copy.src, copy.nbytes);
  const Place to = place_of(copy.dst, copy.nbytes);
  if (from == Place::kBad || (copy.src_must_be_device && from != Place::kDevice)) {
    return refuse(call, copy.src, copy.nbytes, false);
  }
  if (to == Place::kBad || (copy.dst_must_be_device && to != Place::kDevice)) {
    return refuse(call, copy.dst, copy.nbytes, true);
  }
  const bool pageable = from == Place::kPageable || to == Place::kPageable;
  if (pageable && !copy.synchronous) blame_pageable(call, copy.nbytes);

  // Pageable sources are read now, pageable destinations are written before the call returns. Everything else is read
  // and written when the stream gets there.
  std::shared_ptr<std::vector<std::byte>> staged;
  if (from == Place::kPageable) {
    const std::byte* begin = host_pointer(copy.src);
    staged = std::make_shared<std::vector<std::byte>>(begin, begin + copy.nbytes);
  }
  auto* unpinned_dst = to == Place::kPageable ? host_pointer(copy.dst) : nullptr;
  const Mark mark = call.queue(*stream, [copy, staged, unpinned_dst](fastsync_fake_op& op) {
    const std::byte* src = staged != nullptr ? staged->data() : op.translate(copy.src, copy.nbytes, false, true);
    std::byte* dst = unpinned_dst != nullptr ? unpinned_dst : op.translate(copy.dst, copy.nbytes, true, true);
    if (src == nullptr || dst == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
    std::memmove(dst, src, copy.nbytes);
    op.written.push_back({dst, copy.nbytes});
    return CUDA_SUCCESS;
  });
  return copy.synchronous || to == Place::kPageable ? wait_for(mark) : CUDA_SUCCESS;
}

CUresult queue_fill(const Call& call, CUdeviceptr dst, unsigned char value, std::size_t nbytes, CUstream handle,
                    bool synchronous) {
  const auto stream = stream_of(call.context, handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (const CUresult state = stream->context().state(); state != CUDA_SUCCESS) return state;
  if (nbytes == 0) return CUDA_SUCCESS;
  const Place to = place_of(dst, nbytes);
  if (to != Place::kDevice && to != Place::kPinned) return refuse(call, dst, nbytes, true);
  const Mark mark = call.queue(*stream, [dst, value, nbytes](fastsync_fake_op& op) {
    std::byte* memory = op.translate(dst, nbytes, true);
    if (memory == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
    std::memset(memory, value, nbytes);
    op.written.push_back({memory, nbytes});
    return CUDA_SUCCESS;
  });
  return synchronous ? wait_for(mark) : CUDA_SUCCESS;
}

template <typename T>
void store(void* out, T value) {
  std::memcpy(out, &value, sizeof value);
}

// `region` may be null: host memory that CUDA does not know.
CUresult pointer_attribute(void* out, CUpointer_attribute attribute, CUdeviceptr address, const Region* region) {
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const bool known = region != nullptr;
  const bool host = known && (region->kind == RegionKind::kPinned || region->kind == RegionKind::kRegistered);
  const std::shared_ptr<Physical> physical = known && !host ? driver().memory.physical_at(address) : nullptr;
  const auto context = known ? region->context.lock() : nullptr;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      store(out, !known ? 0U : host ? unsigned{CU_MEMORYTYPE_HOST} : unsigned{CU_MEMORYTYPE_DEVICE});
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: store(out, known ? address : 0); return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: store(out, host ? address : 0); return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      store(out, !known     ? kHostDevice
                 : physical ? physical->device
                 : host     ? (context != nullptr ? context->device() : 0)
                            : region->device);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      store(out, known && region->kind == RegionKind::kDevice ? 1 : 0);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      store(out, physical ? std::uint64_t{physical->handle_types} : std::uint64_t{0});
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: store(out, known ? region->base : 0); return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: store(out, known ? std::size_t{region->nbytes} : 0); return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: store(out, known ? region->base : 0); return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: store(out, 0); return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
      store(out, known && (region->kind != RegionKind::kReservation || physical != nullptr) ? 1 : 0);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: store(out, 0); return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}

}  // namespace

// --- Device memory ----------------------------------------------------------------------------------------------------

CUresult CUDAAPI cuMemGetInfo_v2(size_t* free, size_t* total) {
  return api("cuMemGetInfo_v2", Needs::kContext, Where::kHost, [&](Call& call) {
    if (free == nullptr || total == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *total = settings().memory_bytes;
    *free = settings().memory_bytes - driver().memory.used_bytes(call.context->device());
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr* dptr, size_t bytesize) {
  return api("cuMemAlloc_v2", Needs::kContext, Where::kHost, [&](Call& call) {
    if (dptr == nullptr || bytesize == 0) return CUDA_ERROR_INVALID_VALUE;
    *dptr = driver().memory.allocate(call.context, bytesize);
    return *dptr == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemFree_v2(CUdeviceptr dptr) {
  return api("cuMemFree_v2", Needs::kContext, Where::kHost, [&](Call&) { return driver().memory.free_device(dptr); });
}

CUresult CUDAAPI cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr dptr) {
  return api("cuMemGetAddressRange_v2", Needs::kContext, Where::kHost, [&](Call&) {
    const auto region = driver().memory.find(dptr);
    if (region == nullptr) return CUDA_ERROR_NOT_FOUND;
    if (base != nullptr) *base = region->base;
    if (size != nullptr) *size = region->nbytes;
    return CUDA_SUCCESS;
  });
}

// --- Host memory ------------------------------------------------------------------------------------------------------

CUresult CUDAAPI cuMemHostAlloc(void** pp, size_t bytesize, unsigned int flags) {
  return api("cuMemHostAlloc", Needs::kContext, Where::kHost, [&](Call& call) {
    constexpr unsigned kAll = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
    if (pp == nullptr || bytesize == 0 || (flags & ~kAll) != 0) return CUDA_ERROR_INVALID_VALUE;
    *pp = driver().memory.allocate_pinned(call.context, bytesize, flags);
    return *pp == nullptr ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemFreeHost(void* p) {
  return api("cuMemFreeHost", Needs::kContext, Where::kHost, [&](Call&) { return driver().memory.free_pinned(p); });
}

CUresult CUDAAPI cuMemHostRegister_v2(void* p, size_t bytesize, unsigned int flags) {
  return api("cuMemHostRegister_v2", Needs::kContext, Where::kHost, [&](Call& call) {
    constexpr unsigned kAll = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_IOMEMORY |
                              CU_MEMHOSTREGISTER_READ_ONLY;
    if (p == nullptr || bytesize == 0 || (flags & ~kAll) != 0) return CUDA_ERROR_INVALID_VALUE;
    return driver().memory.register_host(call.context, p, bytesize, flags);
  });
}

CUresult CUDAAPI cuMemHostUnregister(void* p) {
  return api("cuMemHostUnregister", Needs::kContext, Where::kHost,
             [&](Call&) { return driver().memory.unregister_host(p); });
}

CUresult CUDAAPI cuMemHostGetDevicePointer_v2(CUdeviceptr* dptr, void* p, unsigned int flags) {
  return api("cuMemHostGetDevicePointer_v2", Needs::kContext, Where::kHost, [&](Call&) {
    if (dptr == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    const auto region = driver().memory.find(address_of(p));
    if (region == nullptr || (region->kind != RegionKind::kPinned && region->kind != RegionKind::kRegistered)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    *dptr = address_of(p);
    return CUDA_SUCCESS;
  });
}

// --- Copies -----------------------------------------------------------------------------------------------------------

CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t nbytes, CUstream stream) {
  return api("cuMemcpyAsync", Needs::kContext, Where::kQueued,
             [&](Call& call) { return queue_copy(call, {.dst = dst, .src = src, .nbytes = nbytes}, stream); });
}

CUresult CUDAAPI cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void* src, size_t nbytes, CUstream stream) {
  return api("cuMemcpyHtoDAsync_v2", Needs::kContext, Where::kQueued, [&](Call& call) {
    return queue_copy(call, {.dst = dst, .src = address_of(src), .nbytes = nbytes, .dst_must_be_device = true}, stream);
  });
}

CUresult CUDAAPI cuMemcpyDtoHAsync_v2(void* dst, CUdeviceptr src, size_t nbytes, CUstream stream) {
  return api("cuMemcpyDtoHAsync_v2", Needs::kContext, Where::kQueued, [&](Call& call) {
    return queue_copy(call, {.dst = address_of(dst), .src = src, .nbytes = nbytes, .src_must_be_device = true}, stream);
  });
}

CUresult CUDAAPI cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t nbytes, CUstream stream) {
  return api("cuMemcpyDtoDAsync_v2", Needs::kContext, Where::kQueued, [&](Call& call) {
    return queue_copy(
        call, {.dst = dst, .src = src, .nbytes = nbytes, .dst_must_be_device = true, .src_must_be_device = true},
        stream);
  });
}

CUresult CUDAAPI cuMemcpyHtoD_v2(CUdeviceptr dst, const void* src, size_t nbytes) {
  return api("cuMemcpyHtoD_v2", Needs::kContext, Where::kQueued, [&](Call& call) {
    return queue_copy(
        call, {.dst = dst, .src = address_of(src), .nbytes = nbytes, .dst_must_be_device = true, .synchronous = true},
        nullptr);
  });
}

CUresult CUDAAPI cuMemcpyDtoH_v2(void* dst, CUdeviceptr src, size_t nbytes) {
  return api("cuMemcpyDtoH_v2", Needs::kContext, Where::kQueued, [&](Call& call) {
    return queue_copy(
        call, {.dst = address_of(dst), .src = src, .nbytes = nbytes, .src_must_be_device = true, .synchronous = true},
        nullptr);
  });
}

CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t nbytes, CUstream stream) {
  return api("cuMemsetD8Async", Needs::kContext, Where::kQueued,
             [&](Call& call) { return queue_fill(call, dst, value, nbytes, stream, false); });
}

CUresult CUDAAPI cuMemsetD8_v2(CUdeviceptr dst, unsigned char value, size_t nbytes) {
  return api("cuMemsetD8_v2", Needs::kContext, Where::kQueued,
             [&](Call& call) { return queue_fill(call, dst, value, nbytes, nullptr, true); });
}

// --- Pointers ---------------------------------------------------------------------------------------------------------

CUresult CUDAAPI cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr ptr) {
  return api("cuPointerGetAttribute", Needs::kInit, Where::kHost, [&](Call&) {
    const auto region = driver().memory.find(ptr);
    if (region == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return pointer_attribute(data, attribute, ptr, region.get());
  });
}

CUresult CUDAAPI cuPointerGetAttributes(unsigned int count, CUpointer_attribute* attributes, void** data,
                                        CUdeviceptr ptr) {
  return api("cuPointerGetAttributes", Needs::kInit, Where::kHost, [&](Call&) {
    if (attributes == nullptr || data == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto region = driver().memory.find(ptr);
    for (unsigned i = 0; i < count; ++i) {
      const CUresult result = pointer_attribute(data[i], attributes[i], ptr, region.get());
      if (result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
  });
}
