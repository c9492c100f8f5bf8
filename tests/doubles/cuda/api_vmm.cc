// Physical memory, address ranges and mappings.
#include <cuda.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>

#include "doubles/cuda/driver.h"

using namespace fastsync::fake;

namespace {

// The handles of one physical memory are one number with a count.
class Handles {
 public:
  CUmemGenericAllocationHandle add(std::shared_ptr<Physical> physical) {
    const std::lock_guard lock(mutex_);
    for (auto& [handle, entry] : entries_) {
      if (entry.physical != physical) continue;
      ++entry.references;
      driver().journal.live("vmm_handle", 1);
      return handle;
    }
    next_ += 16;
    entries_.emplace(next_, Entry{std::move(physical), 1});
    driver().journal.live("vmm_handle", 1);
    return next_;
  }
  std::shared_ptr<Physical> find(CUmemGenericAllocationHandle handle) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(handle);
    return found == entries_.end() ? nullptr : found->second.physical;
  }
  bool release(CUmemGenericAllocationHandle handle) {
    std::shared_ptr<Physical> last;  // outlives the lock
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(handle);
    if (found == entries_.end()) return false;
    driver().journal.live("vmm_handle", -1);
    if (--found->second.references == 0) {
      last = std::move(found->second.physical);
      entries_.erase(found);
    }
    return true;
  }

 private:
  struct Entry {
    std::shared_ptr<Physical> physical;
    int references = 0;
  };
  std::mutex mutex_;
  std::map<CUmemGenericAllocationHandle, Entry> entries_;
  CUmemGenericAllocationHandle next_ = std::uint64_t{0x56} << 32U;
};

Handles& handles() {
  static auto* const all = new Handles;
  return *all;
}

bool is_device(int device) { return device >= 0 && device < static_cast<int>(settings().visible.size()); }

CUresult check_properties(const CUmemAllocationProp* prop) {
  if (prop == nullptr || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  if (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  if (!is_device(prop->location.id)) return CUDA_ERROR_INVALID_DEVICE;
  constexpr unsigned kFabric = CU_MEM_HANDLE_TYPE_FABRIC;
  if ((static_cast<unsigned>(prop->requestedHandleTypes) & kFabric) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  return CUDA_SUCCESS;
}

bool is_granular(std::uint64_t n) { return n != 0 && n % kGranularity == 0; }

}  // namespace

CUresult CUDAAPI cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* prop,
                                               CUmemAllocationGranularity_flags) {
  return api("cuMemGetAllocationGranularity", Needs::kInit, Where::kHost, [&](Call&) {
    if (granularity == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *granularity = kGranularity;
    return check_properties(prop);
  });
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop,
                             unsigned long long flags) {
  return api("cuMemCreate", Needs::kInit, Where::kHost, [&](Call&) {
    if (handle == nullptr || flags != 0 || !is_granular(size)) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult bad = check_properties(prop); bad != CUDA_SUCCESS) return bad;
    auto physical = driver().memory.make_physical(prop->location.id, size, prop->requestedHandleTypes);
    if (physical == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = handles().add(std::move(physical));
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
  return api("cuMemRelease", Needs::kInit, Where::kHost,
             [&](Call&) { return handles().release(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; });
}

CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* addr) {
  return api("cuMemRetainAllocationHandle", Needs::kInit, Where::kHost, [&](Call&) {
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    auto physical = driver().memory.physical_at(reinterpret_cast<CUdeviceptr>(addr));
    if (physical == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *handle = handles().add(std::move(physical));
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr* ptr, size_t size, size_t alignment, CUdeviceptr,
                                     unsigned long long flags) {
  return api("cuMemAddressReserve", Needs::kInit, Where::kHost, [&](Call&) {
    if (ptr == nullptr || flags != 0 || !is_granular(size)) return CUDA_ERROR_INVALID_VALUE;
    if (alignment != 0 && !std::has_single_bit(alignment)) return CUDA_ERROR_INVALID_VALUE;
    *ptr = driver().memory.reserve(size, alignment);
    return *ptr == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr ptr, size_t size) {
  return api("cuMemAddressFree", Needs::kInit, Where::kHost,
             [&](Call&) { return driver().memory.free_reservation(ptr, size); });
}

CUresult CUDAAPI cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                          unsigned long long flags) {
  return api("cuMemMap", Needs::kInit, Where::kHost, [&](Call&) {
    if (flags != 0 || offset != 0 || !is_granular(size) || ptr % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
    auto physical = handles().find(handle);
    if (physical == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return driver().memory.map(ptr, size, std::move(physical), offset);
  });
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr ptr, size_t size) {
  return api("cuMemUnmap", Needs::kInit, Where::kHost, [&](Call&) { return driver().memory.unmap(ptr, size); });
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc* desc, size_t count) {
  return api("cuMemSetAccess", Needs::kInit, Where::kHost, [&](Call&) {
    if (desc == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
    for (std::size_t i = 0; i < count; ++i) {
      if (desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
      if (!is_device(desc[i].location.id)) return CUDA_ERROR_INVALID_DEVICE;
      const bool reads = desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE;
      const bool writes = desc[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      const CUresult result = driver().memory.set_access(ptr, size, desc[i].location.id, reads, writes);
      if (result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                              CUmemAllocationHandleType type, unsigned long long flags) {
  return api("cuMemExportToShareableHandle", Needs::kInit, Where::kHost, [&](Call&) {
    if (shareable == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    const auto physical = handles().find(handle);
    if (physical == nullptr || (physical->handle_types & unsigned{type}) == 0) return CUDA_ERROR_INVALID_VALUE;
    const int fd = ::fcntl(physical->memory->fd(), F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    *static_cast<int*>(shareable) = fd;  // the caller's
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* os_handle,
                                                CUmemAllocationHandleType type) {
  return api("cuMemImportFromShareableHandle", Needs::kInit, Where::kHost, [&](Call&) {
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    // The descriptor stays the caller's.
    const int fd = ::fcntl(static_cast<int>(reinterpret_cast<std::intptr_t>(os_handle)), F_DUPFD_CLOEXEC, 0);
    auto memory = SharedMemory::open(fastsync::OwnedFd(fd));
    if (memory == nullptr) return CUDA_ERROR_INVALID_VALUE;
    for (std::size_t i = 0; i < settings().visible.size(); ++i) {
      if (device_uuid(settings().visible[i]) != memory->control().uuid) continue;
      *handle = handles().add(std::make_shared<Physical>(std::move(memory), static_cast<int>(i), true, unsigned{type}));
      return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_DEVICE;
  });
}
