// Streams, events and host functions.
#include <cuda.h>

#include <memory>
#include <string>
#include <utility>

#include "doubles/cuda/driver.h"

using namespace fastsync::fake;

namespace {

bool is_default(CUstream handle) {
  return handle == nullptr || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD;
}

CUresult create_stream(const Call& call, CUstream* stream, unsigned flags) {
  if (stream == nullptr || (flags & ~unsigned{CU_STREAM_NON_BLOCKING}) != 0) return CUDA_ERROR_INVALID_VALUE;
  const auto kind = flags == CU_STREAM_NON_BLOCKING ? Stream::Kind::kNonBlocking : Stream::Kind::kBlocking;
  *stream = static_cast<CUstream>(driver().streams.add(Stream::create(call.context, kind)));
  driver().journal.live("stream", 1);
  return CUDA_SUCCESS;
}

bool ending(const Context& context) { return driver().stopping || context.state() != CUDA_SUCCESS; }

CUresult outcome(const Context& context) { return driver().stopping ? CUDA_ERROR_DEINITIALIZED : context.state(); }

// An imported event whose exporter has destroyed it: undefined on a device.
void check_exporter(const Call& call, const Event& event) {
  if (!event.imported() || event.shared()->control().freed.load() == 0) return;
  driver().violation("use-after-free: an imported event that its exporter has destroyed", call.symbol);
}

}  // namespace

CUresult CUDAAPI cuStreamCreate(CUstream* stream, unsigned int flags) {
  return api("cuStreamCreate", Needs::kContext, Where::kHost,
             [&](Call& call) { return create_stream(call, stream, flags); });
}

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int) {
  return api("cuStreamCreateWithPriority", Needs::kContext, Where::kHost,
             [&](Call& call) { return create_stream(call, stream, flags); });
}

CUresult CUDAAPI cuStreamDestroy_v2(CUstream handle) {
  return api("cuStreamDestroy_v2", Needs::kContext, Where::kHost, [&](Call&) {
    if (is_default(handle)) return CUDA_ERROR_INVALID_HANDLE;
    const auto stream = driver().streams.take(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    stream->close();
    driver().journal.live("stream", -1);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamGetCtx(CUstream handle, CUcontext* context) {
  return api("cuStreamGetCtx", Needs::kContext, Where::kHost, [&](Call& call) {
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto stream = stream_of(call.context, handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    Driver& all = driver();
    const std::lock_guard lock(all.devices_mutex);
    *context = all.devices[static_cast<std::size_t>(stream->context().device())].handle;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamGetFlags(CUstream handle, unsigned int* flags) {
  return api("cuStreamGetFlags", Needs::kContext, Where::kHost, [&](Call& call) {
    if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto stream = stream_of(call.context, handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    *flags = stream->kind() == Stream::Kind::kNonBlocking ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamQuery(CUstream handle) {
  return api("cuStreamQuery", Needs::kContext, Where::kHost, [&](Call& call) {
    const auto stream = stream_of(call.context, handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const bool idle = stream->mark().passed();
    const CUresult state = stream->context().state();
    return state != CUDA_SUCCESS ? state : idle ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

CUresult CUDAAPI cuStreamSynchronize(CUstream handle) {
  return api("cuStreamSynchronize", Needs::kContext, Where::kHost, [&](Call& call) {
    const auto stream = stream_of(call.context, handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    stream->wait_until(stream->mark().sequence, [&] { return ending(stream->context()); });
    return outcome(stream->context());
  });
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned int flags) {
  return api("cuStreamWaitEvent", Needs::kContext, Where::kQueued, [&](Call& call) {
    if ((flags & ~unsigned{CU_EVENT_WAIT_EXTERNAL}) != 0) return CUDA_ERROR_INVALID_VALUE;
    const auto stream = stream_of(call.context, handle);
    const auto event = driver().events.find(event_handle);
    if (stream == nullptr || event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    check_exporter(call, *event);
    Event::Moment moment = event->now();
    Work work;
    work.what = call.symbol;
    work.fault = call.fault;
    if (moment.mark().stream != nullptr) {
      work.after.push_back(moment.mark());
      work.run = [](fastsync_fake_op&) { return CUDA_SUCCESS; };
    } else {
      work.run = [moment = std::move(moment)](fastsync_fake_op& op) {
        moment.wait([&] { return op.stopping(); });
        return CUDA_SUCCESS;
      };
    }
    stream->enqueue(std::move(work));
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuLaunchHostFunc(CUstream handle, CUhostFn function, void* user) {
  return api("cuLaunchHostFunc", Needs::kContext, Where::kQueued, [&](Call& call) {
    if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto stream = stream_of(call.context, handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    call.queue(*stream, [function, user](fastsync_fake_op&) {
      in_host_function() = true;
      function(user);
      in_host_function() = false;
      return CUDA_SUCCESS;
    });
    return CUDA_SUCCESS;
  });
}

// --- Events -----------------------------------------------------------------------------------------------------------

CUresult CUDAAPI cuEventCreate(CUevent* event, unsigned int flags) {
  return api("cuEventCreate", Needs::kContext, Where::kHost, [&](Call& call) {
    constexpr unsigned kAll = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    if (event == nullptr || (flags & ~kAll) != 0) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<SharedMemory> shared;
    if ((flags & CU_EVENT_INTERPROCESS) != 0) {
      if ((flags & CU_EVENT_DISABLE_TIMING) == 0) return CUDA_ERROR_INVALID_VALUE;
      shared = SharedMemory::create(1, device_uuid(settings().visible[call.context->device()]));
    }
    *event = static_cast<CUevent>(driver().events.add(std::make_shared<Event>(call.context, std::move(shared), false)));
    driver().journal.live("event", 1);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuEventDestroy_v2(CUevent handle) {
  return api("cuEventDestroy_v2", Needs::kContext, Where::kHost, [&](Call&) {
    const auto event = driver().events.take(handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    driver().journal.live(event->imported() ? "event_import" : "event", -1);
    if (event->shared() == nullptr) return CUDA_SUCCESS;
    ControlPage& page = event->shared()->control();
    if (event->imported()) {
      page.importers.remove(::getpid());
      return CUDA_SUCCESS;
    }
    if (const pid_t pid = page.importers.any_alive(); pid != 0) {
      driver().journal.violation("free-while-imported: an event is destroyed and process " + std::to_string(pid) +
                                 " has it open");
    }
    page.freed = 1;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuEventRecord(CUevent event_handle, CUstream handle) {
  return api("cuEventRecord", Needs::kContext, Where::kQueued, [&](Call& call) {
    const auto event = driver().events.find(event_handle);
    const auto stream = stream_of(call.context, handle);
    if (event == nullptr || stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (&event->context() != &stream->context()) return CUDA_ERROR_INVALID_HANDLE;
    check_exporter(call, *event);
    event->record(stream, call.fault);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuEventQuery(CUevent handle) {
  return api("cuEventQuery", Needs::kContext, Where::kHost, [&](Call& call) {
    const auto event = driver().events.find(handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    check_exporter(call, *event);
    const bool passed = event->now().passed();
    const CUresult state = event->context().state();
    return state != CUDA_SUCCESS ? state : passed ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

CUresult CUDAAPI cuEventSynchronize(CUevent handle) {
  return api("cuEventSynchronize", Needs::kContext, Where::kHost, [&](Call& call) {
    const auto event = driver().events.find(handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    check_exporter(call, *event);
    event->now().wait([&] { return ending(event->context()); });
    return outcome(event->context());
  });
}
