// cuInit, devices and contexts.
#include <cuda.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "doubles/cuda/driver.h"

using namespace fastsync::fake;

namespace {

bool is_device(CUdevice device) { return device >= 0 && device < static_cast<int>(settings().visible.size()); }

int attribute_of(CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 48 << 10;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 4;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 3;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return 0;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: return 0x10 + settings().visible[device];
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: return -1;
    default: return 0;
  }
}

}  // namespace

CUresult CUDAAPI cuInit(unsigned int flags) {
  return api("cuInit", Needs::kNothing, Where::kHost, [&](Call&) {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (settings().init_code != 0) return static_cast<CUresult>(settings().init_code);
    if (settings().visible.empty()) return CUDA_ERROR_NO_DEVICE;
    driver().initialised = true;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDriverGetVersion(int* version) {
  return api("cuDriverGetVersion", Needs::kNothing, Where::kHost, [&](Call&) {
    if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *version = settings().driver_version;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceGetCount(int* count) {
  return api("cuDeviceGetCount", Needs::kInit, Where::kHost, [&](Call&) {
    if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *count = static_cast<int>(settings().visible.size());
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
  return api("cuDeviceGet", Needs::kInit, Where::kHost, [&](Call&) {
    if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceGetName(char* name, int len, CUdevice dev) {
  return api("cuDeviceGetName", Needs::kInit, Where::kHost, [&](Call&) {
    if (name == nullptr || len <= 0) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
    std::snprintf(name, static_cast<std::size_t>(len), "fastsync test double %d", settings().visible[dev]);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice dev) {
  return api("cuDeviceGetUuid_v2", Needs::kInit, Where::kHost, [&](Call&) {
    if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
    const Uuid number = device_uuid(settings().visible[dev]);
    std::memcpy(uuid->bytes, number.data(), number.size());
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceGetPCIBusId(char* id, int len, CUdevice dev) {
  return api("cuDeviceGetPCIBusId", Needs::kInit, Where::kHost, [&](Call&) {
    if (id == nullptr || len < 13) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
    std::snprintf(id, static_cast<std::size_t>(len), "0000:%02x:00.0", 0x10 + settings().visible[dev]);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceTotalMem_v2(size_t* bytes, CUdevice dev) {
  return api("cuDeviceTotalMem_v2", Needs::kInit, Where::kHost, [&](Call&) {
    if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = settings().memory_bytes;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice dev) {
  return api("cuDeviceGetAttribute", Needs::kInit, Where::kHost, [&](Call&) {
    if (value == nullptr || attribute <= 0 || attribute >= CU_DEVICE_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
    *value = attribute_of(attribute, dev);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceCanAccessPeer(int* can, CUdevice dev, CUdevice peer) {
  return api("cuDeviceCanAccessPeer", Needs::kInit, Where::kHost, [&](Call&) {
    if (can == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(dev) || !is_device(peer)) return CUDA_ERROR_INVALID_DEVICE;
    *can = dev != peer ? 1 : 0;
    return CUDA_SUCCESS;
  });
}

// --- Contexts ---------------------------------------------------------------------------------------------------------

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice dev) {
  return api("cuDevicePrimaryCtxRetain", Needs::kInit, Where::kHost, [&](Call&) {
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
    Driver& all = driver();
    const std::lock_guard lock(all.devices_mutex);
    Device& device = all.devices[static_cast<std::size_t>(dev)];
    if (device.primary == nullptr) {
      device.primary = std::make_shared<Context>(dev);
      device.handle = static_cast<CUcontext>(all.contexts.add(device.primary));
    }
    ++device.references;
    all.journal.live("primary_context", 1);
    *context = device.handle;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
  return api("cuDevicePrimaryCtxRelease_v2", Needs::kInit, Where::kHost, [&](Call&) {
    if (!is_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
    Driver& all = driver();
    Device last;
    {
      const std::lock_guard lock(all.devices_mutex);
      Device& device = all.devices[static_cast<std::size_t>(dev)];
      if (device.references == 0) return CUDA_ERROR_INVALID_CONTEXT;
      all.journal.live("primary_context", -1);
      if (--device.references == 0) last = std::exchange(device, Device());
    }
    if (last.primary != nullptr) destroy_context(last.primary, last.handle);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int* flags, int* active) {
  return api("cuDevicePrimaryCtxGetState", Needs::kInit, Where::kHost, [&](Call&) {
    if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
    Driver& all = driver();
    const std::lock_guard lock(all.devices_mutex);
    *flags = 0;
    *active = all.devices[static_cast<std::size_t>(dev)].references > 0 ? 1 : 0;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext* context) {
  return api("cuCtxGetCurrent", Needs::kInit, Where::kHost, [&](Call&) {
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *context = nullptr;
    const auto current = current_context();
    if (current == nullptr) return CUDA_SUCCESS;
    Driver& all = driver();
    const std::lock_guard lock(all.devices_mutex);
    for (const Device& device : all.devices) {
      if (device.primary == current) *context = device.handle;
    }
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) {
  return api("cuCtxSetCurrent", Needs::kInit, Where::kHost, [&](Call&) {
    auto& stack = context_stack();
    if (context == nullptr) {
      if (!stack.empty()) stack.pop_back();
      return CUDA_SUCCESS;
    }
    auto found = driver().contexts.find(context);
    if (found == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (stack.empty()) stack.emplace_back();
    stack.back() = std::move(found);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuCtxPushCurrent_v2(CUcontext context) {
  return api("cuCtxPushCurrent_v2", Needs::kInit, Where::kHost, [&](Call&) {
    auto found = driver().contexts.find(context);
    if (found == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    context_stack().push_back(std::move(found));
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuCtxPopCurrent_v2(CUcontext* context) {
  return api("cuCtxPopCurrent_v2", Needs::kInit, Where::kHost, [&](Call&) {
    auto& stack = context_stack();
    if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    if (context != nullptr) {
      Driver& all = driver();
      const std::lock_guard lock(all.devices_mutex);
      *context = nullptr;
      for (const Device& device : all.devices) {
        if (device.primary == stack.back()) *context = device.handle;
      }
    }
    stack.pop_back();
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuCtxGetDevice(CUdevice* device) {
  return api("cuCtxGetDevice", Needs::kContext, Where::kHost, [&](Call& call) {
    if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *device = call.context->device();
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return api("cuCtxGetStreamPriorityRange", Needs::kContext, Where::kHost, [&](Call&) {
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuCtxSynchronize(void) {
  return api("cuCtxSynchronize", Needs::kContext, Where::kHost, [&](Call& call) {
    Driver& all = driver();
    std::vector<Mark> marks = call.context->blocking_marks();  // those of CU_STREAM_PER_THREAD too
    if (const auto null = call.context->existing_null_stream()) marks.push_back(null->mark());
    for (const auto& stream : all.streams.all()) {
      if (&stream->context() == call.context.get()) marks.push_back(stream->mark());
    }
    for (const Mark& mark : marks) {
      mark.stream->wait_until(mark.sequence, [&] { return all.stopping || call.context->state() != CUDA_SUCCESS; });
    }
    return all.stopping ? CUDA_ERROR_DEINITIALIZED : call.context->state();
  });
}
