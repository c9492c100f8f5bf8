// CudaRuntime's memory: allocation, registration of host memory, and sharing with other processes.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iomanip>
#include <limits>
#include <utility>

#include "common/owned_fd.h"
#include "device/cuda/cuda_runtime.h"
#include "device/host/host_memory.h"

namespace fastsync {
namespace {

using cuda::address_of;
using cuda::pointer_to;

constexpr std::uint64_t kRegistrationBytes = std::uint64_t{1} << 30;
constexpr std::uint64_t kPage = 4096;
constexpr std::string_view kOwnExport = "; a process cannot import what it exported itself";
constexpr std::string_view kImportMemory =
    "; both processes must see the same device and, in containers, share the host's IPC namespace (--ipc=host); "
    "FASTSYNC_IPC=vmm in the exporting process shares by descriptor instead";
constexpr std::string_view kImportEvent =
    "; both processes must see the same device and, in containers, share the host's IPC namespace (--ipc=host)";

std::string mib(std::uint64_t nbytes) {
  return concat(std::fixed, std::setprecision(1), static_cast<double>(nbytes) / (1 << 20), " MiB");
}

cuda::MemAccessDesc access_of(cuda::Device device) {
  return {.location = {.type = cuda::kMemLocationDevice, .id = device}, .flags = cuda::kMemAccessReadWrite};
}

}  // namespace

// ---- Allocation -----------------------------------------------------------------------------------------------------

Allocation CudaRuntime::allocate(MemoryKind kind, std::uint64_t nbytes) {
  if (nbytes == 0) return {};
  Allocation allocation;
  allocation.nbytes = nbytes;
  switch (kind) {
    case MemoryKind::kHost:
    case MemoryKind::kShared: return allocate_host(kind, nbytes, "fastsync");
    case MemoryKind::kPinnedHost: {
      require_memory(nbytes, "pinned host memory");  // the driver would let the OOM killer say no
      const Current current(*this);
      void* data = nullptr;
      check(api_.cuMemHostAlloc(&data, nbytes, cuda::kHostPortable | cuda::kHostDeviceMap), "cuMemHostAlloc",
            [&] { return concat("of ", nbytes, " bytes (", mib(nbytes), ')'); });
      allocation.data = static_cast<std::byte*>(data);
      break;
    }
    case MemoryKind::kDevice: allocation.data = allocate_device(nbytes); break;
  }
  const std::lock_guard lock(mutex_);
  ++counters_.allocations;
  counters_.allocated_bytes += nbytes;
  return allocation;
}

void CudaRuntime::deallocate(MemoryKind kind, const Allocation& allocation) noexcept {
  if (allocation.data == nullptr) return;
  switch (kind) {
    case MemoryKind::kHost:
    case MemoryKind::kShared: deallocate_host(kind, allocation); return;
    case MemoryKind::kPinnedHost: {
      const Current current(*this, std::nothrow);
      if (current) note(api_.cuMemFreeHost(allocation.data), "cuMemFreeHost");
      return;
    }
    case MemoryKind::kDevice: release_device(allocation.data); return;
  }
}

std::byte* CudaRuntime::allocate_device(std::uint64_t nbytes) {
  const Current current(*this);
  DeviceMemory memory;
  std::byte* data = nullptr;
  if (options_.virtual_memory) {
    memory.kind = DeviceMemory::Kind::kVirtual;
    memory.mapped_bytes = whole_granules(nbytes);
    const cuda::MemAllocationProp properties = virtual_properties();
    check(api_.cuMemCreate(&memory.handle, memory.mapped_bytes, &properties, 0), "cuMemCreate",
          [&] { return concat("of ", memory.mapped_bytes, " bytes (", mib(memory.mapped_bytes), memory_text(), ')'); });
    data = map(memory.handle, memory.mapped_bytes, nbytes);
  } else {
    cuda::DevicePtr address = 0;
    check(api_.cuMemAlloc_v2(&address, nbytes), "cuMemAlloc",
          [&] { return concat("of ", nbytes, " bytes (", mib(nbytes), memory_text(), ')'); });
    data = pointer_to(address);
  }
  remember(data, memory);
  return data;
}

void CudaRuntime::remember(std::byte* data, const DeviceMemory& memory) {
  const std::lock_guard lock(mutex_);
  device_memory_[data] = memory;
}

// Of all kinds, imported too. Handles and mappings go in the reverse order of how they came.
void CudaRuntime::release_device(std::byte* data) noexcept {
  DeviceMemory memory;
  {
    const std::lock_guard lock(mutex_);
    const auto found = device_memory_.find(data);
    if (found == device_memory_.end()) return;
    memory = found->second;
    device_memory_.erase(found);
  }
  const Current current(*this, std::nothrow);
  if (!current) return;
  const cuda::DevicePtr address = address_of(data);
  switch (memory.kind) {
    case DeviceMemory::Kind::kLegacy: note(api_.cuMemFree_v2(address), "cuMemFree"); return;
    case DeviceMemory::Kind::kImportedLegacy: note(api_.cuIpcCloseMemHandle(address), "cuIpcCloseMemHandle"); return;
    case DeviceMemory::Kind::kVirtual:
    case DeviceMemory::Kind::kImportedVirtual:
      note(api_.cuMemUnmap(address, memory.mapped_bytes), "cuMemUnmap");
      note(api_.cuMemAddressFree(address, memory.mapped_bytes), "cuMemAddressFree");
      note(api_.cuMemRelease(memory.handle), "cuMemRelease");
      return;
  }
}

cuda::MemAllocationProp CudaRuntime::virtual_properties() const {
  cuda::MemAllocationProp properties{};
  properties.type = cuda::kMemAllocationPinned;
  properties.requested_handle_types = cuda::kMemHandlePosixDescriptor;
  properties.location = {.type = cuda::kMemLocationDevice, .id = device_};
  properties.flags.gpu_direct_rdma_capable = rdma_capable_ ? 1 : 0;
  return properties;
}

std::uint64_t CudaRuntime::whole_granules(std::uint64_t nbytes) const {
  const cuda::MemAllocationProp properties = virtual_properties();
  std::size_t granule = 0;
  check(api_.cuMemGetAllocationGranularity(&granule, &properties, cuda::kGranularityRecommended),
        "cuMemGetAllocationGranularity");
  if (granule == 0 || nbytes > std::numeric_limits<std::uint64_t>::max() - granule) {
    throw DeviceError(concat(nbytes, " bytes cannot be allocated on CUDA device ", ordinal_, " in granules of ",
                             granule, " bytes; ask for less"));
  }
  return (nbytes + granule - 1) / granule * granule;
}

// Takes `handle` over: it is released where this throws.
std::byte* CudaRuntime::map(cuda::AllocationHandle handle, std::uint64_t mapped_bytes, std::uint64_t nbytes) {
  cuda::DevicePtr address = 0;
  const char* step = "cuMemAddressReserve";
  cuda::Result result = api_.cuMemAddressReserve(&address, mapped_bytes, 0, 0, 0);
  if (result == cuda::kSuccess) {
    step = "cuMemMap";
    result = api_.cuMemMap(address, mapped_bytes, 0, handle, 0);
    if (result == cuda::kSuccess) {
      const cuda::MemAccessDesc access = access_of(device_);
      step = "cuMemSetAccess";
      result = api_.cuMemSetAccess(address, mapped_bytes, &access, 1);
      if (result == cuda::kSuccess) return pointer_to(address);
      note(api_.cuMemUnmap(address, mapped_bytes), "cuMemUnmap");
    }
    note(api_.cuMemAddressFree(address, mapped_bytes), "cuMemAddressFree");
  }
  note(api_.cuMemRelease(handle), "cuMemRelease");
  fail(result, step, concat("of ", mapped_bytes, " bytes for a buffer of ", nbytes));
}

// "; 12.0 MiB of 81920.0 MiB are free", for messages.
std::string CudaRuntime::memory_text() const {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  if (api_.cuMemGetInfo_v2(&free_bytes, &total_bytes) != cuda::kSuccess) return {};
  return concat("; ", mib(free_bytes), " of ", mib(total_bytes), " are free");
}

int CudaRuntime::device_of(const void* address) {
  if (address == nullptr || unavailable_reason()) return -1;
  const CudaDriver& driver = CudaDriver::get();
  unsigned type = 0;
  int ordinal = -1;
  std::array<int, 2> attributes = {cuda::kPointerMemoryType, cuda::kPointerDeviceOrdinal};
  std::array<void*, 2> values = {&type, &ordinal};
  // The plural form: the other one makes an error of a pointer that is not CUDA's.
  const cuda::Result result =
      driver.api().cuPointerGetAttributes(attributes.size(), attributes.data(), values.data(), address_of(address));
  if (result == cuda::kInvalidValue) return -1;
  if (result != cuda::kSuccess) {
    // To guess "host" would be to read device memory on the host.
    throw DeviceError(concat("cuPointerGetAttributes cannot say where the memory at ", address,
                             " is: ", driver.describe(result), CudaDriver::remedy(result)));
  }
  return type == cuda::kMemoryTypeDevice ? ordinal : -1;
}

// ---- Host memory of others ------------------------------------------------------------------------------------------

void CudaRuntime::register_host(std::byte* data, std::uint64_t nbytes) {
  if (nbytes == 0) return;
  const Current current(*this);
  {
    const std::lock_guard lock(mutex_);
    if (registrations_.contains(data)) {
      throw InvalidArgument(concat("host memory at ", static_cast<void*>(data), " is registered already"));
    }
  }
  std::vector<std::pair<std::byte*, std::uint64_t>> ours;
  for (std::uint64_t done = 0; done < nbytes;) {
    // Pieces end at pages: two pieces on one page would be registered twice.
    const std::uint64_t into_page = reinterpret_cast<std::uintptr_t>(data + done) % kPage;
    const std::uint64_t piece = std::min(nbytes - done, kRegistrationBytes - into_page);
    const cuda::Result result =
        api_.cuMemHostRegister_v2(data + done, piece, cuda::kHostPortable | cuda::kHostDeviceMap);
    if (result == cuda::kSuccess) {
      ours.emplace_back(data + done, piece);
    } else if (result != cuda::kHostMemoryAlreadyRegistered) {
      for (const auto& [begin, length] : ours) note(api_.cuMemHostUnregister(begin), "cuMemHostUnregister");
      fail(result, "cuMemHostRegister", concat("of ", piece, " bytes (", done, " of ", nbytes, " are done)"));
    }
    done += piece;
  }
  const std::lock_guard lock(mutex_);
  std::vector<std::byte*>& pieces = registrations_[data];
  for (const auto& [begin, length] : ours) {
    pieces.push_back(begin);
    registered_[begin] = length;
    ++counters_.registrations;
  }
  has_registered_.store(true, std::memory_order_release);
}

void CudaRuntime::unregister_host(std::byte* data) noexcept {
  std::vector<std::byte*> pieces;
  {
    const std::lock_guard lock(mutex_);
    const auto found = registrations_.find(data);
    if (found == registrations_.end()) return;
    pieces = std::move(found->second);
    registrations_.erase(found);
    for (const std::byte* piece : pieces) registered_.erase(piece);
  }
  const Current current(*this, std::nothrow);
  if (!current) return;
  for (std::byte* piece : pieces) note(api_.cuMemHostUnregister(piece), "cuMemHostUnregister");
}

// How many of the `nbytes` at `data` lie in one registration, if they lie in one at all.
std::uint64_t CudaRuntime::registered_run(const std::byte* data, std::uint64_t nbytes) const {
  if (!has_registered_.load(std::memory_order_acquire)) return nbytes;
  const std::lock_guard lock(mutex_);
  const auto next = registered_.upper_bound(data);
  if (next == registered_.begin()) return nbytes;
  const auto& [begin, length] = *std::prev(next);
  const auto offset = static_cast<std::uint64_t>(data - begin);
  return offset < length ? std::min(nbytes, length - offset) : nbytes;
}

// ---- Sharing --------------------------------------------------------------------------------------------------------

MemoryHandle CudaRuntime::export_memory(const Allocation& allocation) {
  const Current current(*this);
  DeviceMemory memory;
  {
    const std::lock_guard lock(mutex_);
    const auto found = device_memory_.find(allocation.data);
    if (found == device_memory_.end() || found->second.kind == DeviceMemory::Kind::kImportedLegacy ||
        found->second.kind == DeviceMemory::Kind::kImportedVirtual) {
      throw InvalidArgument(concat("memory at ", static_cast<void*>(allocation.data), " of ", allocation.nbytes,
                                   " bytes is not device memory that this process allocated through fastsync; only "
                                   "that can be shared"));
    }
    memory = found->second;
  }
  const auto size_text = [&] { return concat("of ", allocation.nbytes, " bytes"); };
  MemoryHandle handle;
  handle.nbytes = allocation.nbytes;
  if (memory.kind == DeviceMemory::Kind::kVirtual) {
    int descriptor = -1;
    check(api_.cuMemExportToShareableHandle(&descriptor, memory.handle, cuda::kMemHandlePosixDescriptor, 0),
          "cuMemExportToShareableHandle", size_text);
    handle.fd = OwnedFd(descriptor);
    return handle;
  }
  cuda::IpcMemHandle native{};
  check(api_.cuIpcGetMemHandle(&native, address_of(allocation.data)), "cuIpcGetMemHandle", size_text);
  static_assert(sizeof(native) == sizeof(handle.bytes));
  std::memcpy(handle.bytes.data(), &native, sizeof(native));
  return handle;
}

Allocation CudaRuntime::import_memory(const MemoryHandle& handle) {
  if (handle.nbytes == 0) throw InvalidArgument("a memory handle of 0 bytes cannot be imported");
  const Current current(*this);
  DeviceMemory memory;
  std::byte* data = nullptr;
  if (handle.fd) {
    memory.kind = DeviceMemory::Kind::kImportedVirtual;
    // The exporter rounded its size up in the same way: it is the same device.
    memory.mapped_bytes = whole_granules(handle.nbytes);
    void* const descriptor = cuda::number_as_pointer(static_cast<std::uintptr_t>(handle.fd.get()));
    check(api_.cuMemImportFromShareableHandle(&memory.handle, descriptor, cuda::kMemHandlePosixDescriptor),
          "cuMemImportFromShareableHandle", [&] { return concat("of ", handle.nbytes, " bytes"); });
    data = map(memory.handle, memory.mapped_bytes, handle.nbytes);
  } else {
    memory.kind = DeviceMemory::Kind::kImportedLegacy;
    std::memcpy(&memory.imported, handle.bytes.data(), sizeof(memory.imported));
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [address, other] : device_memory_) {
        // The driver would count and give the same address again; closing one would leave the other dangling here.
        if (other.kind == DeviceMemory::Kind::kImportedLegacy &&
            std::memcmp(&other.imported, &memory.imported, sizeof(memory.imported)) == 0) {
          throw InvalidArgument("this memory handle is imported already; keep the first import instead");
        }
      }
    }
    cuda::DevicePtr address = 0;
    const cuda::Result result = api_.cuIpcOpenMemHandle_v2(&address, memory.imported, cuda::kIpcLazyEnablePeerAccess);
    if (result != cuda::kSuccess) {
      fail(result, "cuIpcOpenMemHandle", concat("of ", handle.nbytes, " bytes"),
           result == cuda::kInvalidContext ? kOwnExport : kImportMemory);
    }
    data = pointer_to(address);
  }
  remember(data, memory);
  const std::lock_guard lock(mutex_);
  ++counters_.imports;
  return {.data = data, .nbytes = handle.nbytes, .fd = -1};
}

void CudaRuntime::close_memory(const Allocation& imported) noexcept {
  if (imported.data != nullptr) release_device(imported.data);
}

void* CudaRuntime::create_shared_event() { return make_event(cuda::kEventDisableTiming | cuda::kEventInterprocess); }

EventHandle CudaRuntime::export_event(void* event) {
  const Current current(*this);
  cuda::IpcEventHandle native{};
  check(api_.cuIpcGetEventHandle(&native, static_cast<cuda::Event>(event)), "cuIpcGetEventHandle");
  EventHandle handle{};
  static_assert(sizeof(native) == sizeof(handle));
  std::memcpy(handle.data(), &native, sizeof(native));
  return handle;
}

void* CudaRuntime::import_event(const EventHandle& handle) {
  const Current current(*this);
  cuda::IpcEventHandle native{};
  std::memcpy(&native, handle.data(), sizeof(native));
  cuda::Event event = nullptr;
  const cuda::Result result = api_.cuIpcOpenEventHandle(&event, native);
  if (result != cuda::kSuccess) {
    fail(result, "cuIpcOpenEventHandle", {}, result == cuda::kInvalidContext ? kOwnExport : kImportEvent);
  }
  const std::lock_guard lock(mutex_);
  ++counters_.imports;
  return event;
}

bool CudaRuntime::can_share_events() {
  {
    const std::lock_guard lock(mutex_);
    if (shares_events_) return *shares_events_;
  }
  const Current current(*this);
  // Opening one can only be tried by another process; what refuses that refuses making a handle, in all that we know of.
  cuda::Event event = nullptr;
  bool shares = api_.cuEventCreate(&event, cuda::kEventDisableTiming | cuda::kEventInterprocess) == cuda::kSuccess;
  if (shares) {
    cuda::IpcEventHandle handle{};
    shares = api_.cuIpcGetEventHandle(&handle, event) == cuda::kSuccess;
    note(api_.cuEventDestroy_v2(event), "cuEventDestroy");
  }
  const std::lock_guard lock(mutex_);
  shares_events_ = shares;
  return shares;
}

}  // namespace fastsync
