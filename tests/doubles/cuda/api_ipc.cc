// Legacy IPC: memory and events by handles of 64 bytes.
//
// A handle says which descriptor of which process is meant, so that nothing has a name and nothing is left behind.
#include <cuda.h>
#include <unistd.h>

#include <bit>
#include <memory>
#include <string>
#include <utility>

#include "doubles/cuda/driver.h"

using namespace fastsync::fake;

namespace {

static_assert(sizeof(IpcTicket) == sizeof(CUipcMemHandle) && sizeof(IpcTicket) == sizeof(CUipcEventHandle));

// This process's ordinal of the device that exported; -1 if it is not visible here.
int ordinal_of(const Uuid& uuid) {
  for (std::size_t i = 0; i < settings().visible.size(); ++i) {
    if (device_uuid(settings().visible[i]) == uuid) return static_cast<int>(i);
  }
  return -1;
}

// What a ticket leads to, unless it is of the wrong kind, of this process, of a process that is gone, or was freed.
CUresult follow(const IpcTicket& ticket, std::uint32_t kind, std::shared_ptr<SharedMemory>& memory) {
  if (ticket.kind != kind) return CUDA_ERROR_INVALID_VALUE;
  if (ticket.pid == ::getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  memory = SharedMemory::open(ticket);
  if (memory == nullptr || memory->control().freed.load() != 0) return CUDA_ERROR_INVALID_HANDLE;
  return CUDA_SUCCESS;
}

}  // namespace

CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr dptr) {
  return api("cuIpcGetMemHandle", Needs::kContext, Where::kHost, [&](Call&) {
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto region = driver().memory.find(dptr);
    // Only whole allocations of cuMemAlloc: not VMM ranges, not imports, not their insides.
    if (region == nullptr || region->kind != RegionKind::kDevice || region->base != dptr) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    *handle = std::bit_cast<CUipcMemHandle>(region->shared->ticket(IpcTicket::kMemory));
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuIpcOpenMemHandle_v2(CUdeviceptr* dptr, CUipcMemHandle handle, unsigned int flags) {
  return api("cuIpcOpenMemHandle_v2", Needs::kContext, Where::kHost, [&](Call& call) {
    if (dptr == nullptr || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
    if (settings().refuse_memory_ipc) return CUDA_ERROR_MAP_FAILED;
    const auto ticket = std::bit_cast<IpcTicket>(handle);
    std::shared_ptr<SharedMemory> memory;
    if (const CUresult bad = follow(ticket, IpcTicket::kMemory, memory); bad != CUDA_SUCCESS) return bad;
    const int owner = ordinal_of(memory->control().uuid);
    if (owner < 0) return CUDA_ERROR_INVALID_DEVICE;
    *dptr = driver().memory.reopen(ticket, call.context->device());
    if (*dptr == 0) *dptr = driver().memory.import(call.context, ticket, owner, std::move(memory));
    return *dptr == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr dptr) {
  return api("cuIpcCloseMemHandle", Needs::kContext, Where::kHost,
             [&](Call&) { return driver().memory.close_import(dptr); });
}

CUresult CUDAAPI cuIpcGetEventHandle(CUipcEventHandle* handle, CUevent event_handle) {
  return api("cuIpcGetEventHandle", Needs::kContext, Where::kHost, [&](Call&) {
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (settings().refuse_event_ipc) return CUDA_ERROR_NOT_SUPPORTED;
    const auto event = driver().events.find(event_handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (event->shared() == nullptr || event->imported()) return CUDA_ERROR_INVALID_VALUE;
    *handle = std::bit_cast<CUipcEventHandle>(event->shared()->ticket(IpcTicket::kEvent));
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuIpcOpenEventHandle(CUevent* event, CUipcEventHandle handle) {
  return api("cuIpcOpenEventHandle", Needs::kContext, Where::kHost, [&](Call& call) {
    if (event == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (settings().refuse_event_ipc) return CUDA_ERROR_NOT_SUPPORTED;
    const auto ticket = std::bit_cast<IpcTicket>(handle);
    std::shared_ptr<SharedMemory> memory;
    if (const CUresult bad = follow(ticket, IpcTicket::kEvent, memory); bad != CUDA_SUCCESS) return bad;
    if (ordinal_of(memory->control().uuid) != call.context->device()) return CUDA_ERROR_INVALID_DEVICE;
    memory->control().importers.add(::getpid());
    *event = static_cast<CUevent>(driver().events.add(std::make_shared<Event>(call.context, std::move(memory), true)));
    driver().journal.live("event_import", 1);
    return CUDA_SUCCESS;
  });
}
