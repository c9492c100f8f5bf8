#include "doubles/nccl/device.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace fastsync::fake_nccl {
namespace {

template <typename Function>
void find(void* library, const char* name, Function* function, std::string* missing) {
  void* symbol = ::dlsym(library, name);
  if (symbol == nullptr && missing->empty()) *missing = name;
  *function = reinterpret_cast<Function>(symbol);
}

struct Opened {
  CudaDouble functions;
  std::string why;  // empty: usable
};

Opened open_double() {
  Opened opened;
  const char* path = std::getenv("FASTSYNC_CUDA_PATH");
  if (path == nullptr || *path == '\0') {
    opened.why = "no CUDA driver: FASTSYNC_CUDA_PATH does not name the CUDA double";
    return opened;
  }
  void* library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    opened.why = std::string("no CUDA driver: ") + ::dlerror();
    return opened;
  }
  std::string missing;
  CudaDouble& f = opened.functions;
  find(library, "fastsync_fake_enqueue", &f.enqueue, &missing);
  find(library, "fastsync_fake_stopping", &f.stopping, &missing);
  find(library, "fastsync_fake_translate", &f.translate, &missing);
  find(library, "fastsync_fake_current_device", &f.current_device, &missing);
  find(library, "fastsync_fake_stream_device", &f.stream_device, &missing);
  find(library, "fastsync_fake_context_error", &f.context_error, &missing);
  find(library, "cuCtxGetCurrent", &f.get_context, &missing);
  find(library, "cuCtxSetCurrent", &f.set_context, &missing);
  find(library, "cuDeviceGetUuid_v2", &f.get_uuid, &missing);
  find(library, "cuMemGetAllocationGranularity", &f.granularity, &missing);
  find(library, "cuMemCreate", &f.create, &missing);
  find(library, "cuMemRelease", &f.release, &missing);
  find(library, "cuMemAddressReserve", &f.reserve, &missing);
  find(library, "cuMemAddressFree", &f.unreserve, &missing);
  find(library, "cuMemMap", &f.map, &missing);
  find(library, "cuMemUnmap", &f.unmap, &missing);
  find(library, "cuMemSetAccess", &f.set_access, &missing);
  if (!missing.empty()) {
    opened.why = std::string(path) + " has no '" + missing + "'; FASTSYNC_CUDA_PATH must name the CUDA double";
  }
  return opened;
}

std::mutex g_mutex;
std::map<void*, std::size_t>& allocations() {  // never destroyed
  static auto* live = new std::map<void*, std::size_t>();
  return *live;
}

}  // namespace

const CudaDouble* cuda(std::string* why) {
  static const auto* const kOpened = new Opened(open_double());
  if (kOpened->why.empty()) return &kOpened->functions;
  *why = kOpened->why;
  return nullptr;
}

bool current_device(Device* device, std::string* why) {
  const CudaDouble* driver = cuda(why);
  if (driver == nullptr) return false;
  device->ordinal = driver->current_device();
  if (device->ordinal < 0) {
    *why = "no CUDA context is current on the calling thread; set the device's primary context first";
    return false;
  }
  CUuuid uuid{};
  if (const CUresult result = driver->get_uuid(&uuid, device->ordinal); result != CUDA_SUCCESS) {
    *why = "cuDeviceGetUuid_v2 returned " + std::to_string(result);
    return false;
  }
  std::memcpy(device->uuid.data(), uuid.bytes, device->uuid.size());
  return true;
}

bool allocate_memory(std::size_t nbytes, void** pointer, std::string* why) {
  Device device;
  if (!current_device(&device, why)) return false;
  const CudaDouble* driver = cuda(why);
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device.ordinal;
  std::size_t step = 0;
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr address = 0;
  const char* what = "cuMemGetAllocationGranularity";
  CUresult result = driver->granularity(&step, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  const std::size_t size = result == CUDA_SUCCESS ? (nbytes + step - 1) / step * step : 0;
  if (result == CUDA_SUCCESS) {
    what = "cuMemCreate";
    result = driver->create(&handle, size, &properties, 0);
  }
  if (result == CUDA_SUCCESS) {
    what = "cuMemAddressReserve";
    result = driver->reserve(&address, size, step, 0, 0);
    if (result == CUDA_SUCCESS) {
      what = "cuMemMap";
      result = driver->map(address, size, 0, handle, 0);
      if (result == CUDA_SUCCESS) {
        CUmemAccessDesc access{};
        access.location = properties.location;
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        what = "cuMemSetAccess";
        result = driver->set_access(address, size, &access, 1);
        if (result != CUDA_SUCCESS) (void)driver->unmap(address, size);
      }
      if (result != CUDA_SUCCESS) (void)driver->unreserve(address, size);
    }
    (void)driver->release(handle);  // the mapping keeps the memory
  }
  if (result != CUDA_SUCCESS) {
    *why = std::string(what) + " returned " + std::to_string(result) + " for " + std::to_string(nbytes) + " bytes";
    return false;
  }
  *pointer = reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr): CUdeviceptr is a number
  const std::scoped_lock lock(g_mutex);
  allocations()[*pointer] = size;
  return true;
}

bool free_memory(void* pointer, std::string* why) {
  const CudaDouble* driver = cuda(why);
  if (driver == nullptr) return false;
  std::size_t size = 0;
  {
    const std::scoped_lock lock(g_mutex);
    const auto found = allocations().find(pointer);
    if (found == allocations().end()) {
      *why = "the pointer is not the beginning of memory from ncclMemAlloc";
      return false;
    }
    size = found->second;
    allocations().erase(found);
  }
  const auto address = reinterpret_cast<CUdeviceptr>(pointer);
  const CUresult unmapped = driver->unmap(address, size);
  const CUresult freed = driver->unreserve(address, size);
  if (unmapped == CUDA_SUCCESS && freed == CUDA_SUCCESS) return true;
  *why = "cuMemUnmap returned " + std::to_string(unmapped) + ", cuMemAddressFree " + std::to_string(freed);
  return false;
}

}  // namespace fastsync::fake_nccl
