// Code and kernels.
#include <cuda.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "device/copy_args.h"
#include "doubles/cuda/copy_launch.h"
#include "doubles/cuda/driver.h"
#include "doubles/cuda/hidden.h"

using namespace fastsync::fake;

namespace {

constexpr unsigned kMaxBlockThreads = 1024;
constexpr unsigned kMaxSharedBytes = 48 << 10;

// What the compiler of the driver would have written into the caller's log.
void write_error_log(unsigned count, const CUjit_option* options, void** values, CUresult result) {
  char* buffer = nullptr;
  std::size_t size = 0;
  for (unsigned i = 0; i < count; ++i) {
    if (options[i] == CU_JIT_ERROR_LOG_BUFFER) buffer = static_cast<char*>(values[i]);
    if (options[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES) size = reinterpret_cast<std::uintptr_t>(values[i]);
  }
  if (buffer != nullptr && size != 0) std::snprintf(buffer, size, "ptxas fatal: refused with error %d", result);
}

CUresult load(const void* image, unsigned count, const CUjit_option* options, void** values, void** handle) {
  if (image == nullptr || handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = CUDA_SUCCESS;
  auto module = Module::load(image, result);
  if (module == nullptr) {
    write_error_log(count, options, values, result);
    return result;
  }
  *handle = driver().modules.add(std::move(module));
  driver().journal.live("module", 1);
  return CUDA_SUCCESS;
}

CUresult unload(const void* handle) {
  if (driver().modules.take(handle) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  driver().journal.live("module", -1);
  return CUDA_SUCCESS;
}

CUresult find_kernel(const void* handle, const char* name, void** kernel) {
  if (name == nullptr || kernel == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto module = driver().modules.find(handle);
  if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (!module->has_kernel(name)) return CUDA_ERROR_NOT_FOUND;
  *kernel = driver().functions.add(std::make_shared<Function>(Function{module, name}));
  return CUDA_SUCCESS;
}

bool is_alive(const std::shared_ptr<Function>& function) { return function != nullptr && !function->module.expired(); }

}  // namespace

// --- Libraries and kernels (CUDA 12.0) --------------------------------------------------------------------------------

CUresult fake_cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option* jit_options, void** jit_values,
                                unsigned int jit_count, CUlibraryOption*, void**, unsigned int) {
  return api("cuLibraryLoadData", Needs::kInit, Where::kHost,
             [&](Call&) { return load(code, jit_count, jit_options, jit_values, reinterpret_cast<void**>(library)); });
}

CUresult fake_cuLibraryUnload(CUlibrary library) {
  return api("cuLibraryUnload", Needs::kInit, Where::kHost, [&](Call&) { return unload(library); });
}

CUresult fake_cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  return api("cuLibraryGetKernel", Needs::kInit, Where::kHost,
             [&](Call&) { return find_kernel(library, name, reinterpret_cast<void**>(kernel)); });
}

CUresult fake_cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  return api("cuKernelGetFunction", Needs::kContext, Where::kHost, [&](Call&) {
    if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_alive(driver().functions.find(kernel))) return CUDA_ERROR_INVALID_HANDLE;
    *function = reinterpret_cast<CUfunction>(kernel);
    return CUDA_SUCCESS;
  });
}

CUresult fake_cuFuncLoad(CUfunction function) {
  return api("cuFuncLoad", Needs::kContext, Where::kHost, [&](Call&) {
    return is_alive(driver().functions.find(function)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  });
}

// --- Modules ----------------------------------------------------------------------------------------------------------

CUresult CUDAAPI cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned int count, CUjit_option* options,
                                    void** values) {
  return api("cuModuleLoadDataEx", Needs::kContext, Where::kHost,
             [&](Call&) { return load(image, count, options, values, reinterpret_cast<void**>(module)); });
}

CUresult CUDAAPI cuModuleUnload(CUmodule module) {
  return api("cuModuleUnload", Needs::kContext, Where::kHost, [&](Call&) { return unload(module); });
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  return api("cuModuleGetFunction", Needs::kContext, Where::kHost,
             [&](Call&) { return find_kernel(module, name, reinterpret_cast<void**>(function)); });
}

CUresult CUDAAPI cuLaunchKernel(CUfunction handle, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                                unsigned int block_x, unsigned int block_y, unsigned int block_z,
                                unsigned int shared_bytes, CUstream stream_handle, void** parameters, void** extra) {
  return api("cuLaunchKernel", Needs::kContext, Where::kQueued, [&](Call& call) {
    const auto function = driver().functions.find(handle);
    const auto stream = stream_of(call.context, stream_handle);
    if (!is_alive(function) || stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->shared_context() != call.context) return CUDA_ERROR_INVALID_HANDLE;
    const std::uint64_t block = std::uint64_t{block_x} * block_y * block_z;
    if (std::uint64_t{grid_x} * grid_y * grid_z == 0 || grid_x > 2147483647U || grid_y > 65535 || grid_z > 65535 ||
        block == 0 || block > kMaxBlockThreads || shared_bytes > kMaxSharedBytes) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const bool packs = function->name == fastsync::kPackKernelName;
    if (!packs && function->name != fastsync::kUnpackKernelName) {
      driver().violation("unknown-kernel: '" + function->name + "' has no body on the CPU", call.symbol);
      return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (parameters == nullptr || parameters[0] == nullptr || extra != nullptr) return CUDA_ERROR_INVALID_VALUE;
    fastsync::CopyArgs args;  // by value: the caller's copy may go when this returns
    std::memcpy(&args, parameters[0], sizeof args);
    const auto direction = packs ? fastsync::CopyDirection::kPack : fastsync::CopyDirection::kUnpack;
    call.queue(*stream, [args, direction](fastsync_fake_op& op) { return run_copy(op, direction, args); });
    return CUDA_SUCCESS;
  });
}
