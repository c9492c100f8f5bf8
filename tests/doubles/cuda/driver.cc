#include "doubles/cuda/driver.h"

#include <pthread.h>

#include <chrono>
#include <thread>

namespace fastsync::fake {
namespace {

// A callback of the application may block for ever; the process is to end all the same.
constexpr std::chrono::seconds kStopTimeout{5};

__attribute__((destructor)) void at_exit() {
  Driver& all = driver();
  if (all.forked || !all.initialised) return;
  all.stop();
  all.journal.write_if_asked();
}

}  // namespace

Driver& driver() {
  static Driver* const instance = [] {
    auto* made = new Driver;
    made->devices.resize(settings().visible.size());
    ::pthread_atfork(nullptr, nullptr, [] {
      if (driver().initialised) driver().forked = true;
    });
    return made;
  }();
  return *instance;
}

void Driver::violation(const std::string& problem, std::string_view what) {
  const std::size_t colon = problem.find(": ");
  journal.violation(problem.substr(0, colon + 2) + std::string(what) + problem.substr(colon));
}

void Driver::worker_started() {
  const std::lock_guard lock(workers_mutex_);
  ++workers_;
}

void Driver::worker_ended() {
  const std::lock_guard lock(workers_mutex_);
  --workers_;
  worker_ended_.notify_all();
}

void Driver::stop() {
  stopping = true;
  std::unique_lock lock(workers_mutex_);
  worker_ended_.wait_for(lock, kStopTimeout, [&] { return workers_ == 0; });
}

std::vector<std::shared_ptr<Context>>& context_stack() {
  thread_local std::vector<std::shared_ptr<Context>> stack;
  return stack;
}

std::shared_ptr<Context> current_context() {
  const auto& stack = context_stack();
  return stack.empty() ? nullptr : stack.back();
}

std::shared_ptr<Stream> stream_of(const std::shared_ptr<Context>& context, CUstream handle) {
  if (handle != nullptr && handle != CU_STREAM_LEGACY && handle != CU_STREAM_PER_THREAD) {
    return driver().streams.find(handle);
  }
  if (context == nullptr) return nullptr;
  return handle == CU_STREAM_PER_THREAD ? context->thread_stream() : context->null_stream();
}

void destroy_context(const std::shared_ptr<Context>& context, CUcontext handle) {
  Driver& all = driver();
  all.contexts.take(handle);
  context->destroy();
  for (const auto& stream : all.streams.take_if([&](const Stream& one) { return &one.context() == context.get(); })) {
    stream->close();
    all.journal.live("stream", -1);
  }
  for (const auto& event : all.events.take_if([&](const Event& one) { return &one.context() == context.get(); })) {
    all.journal.live(event->imported() ? "event_import" : "event", -1);
  }
  all.memory.drop_context(*context);
}

Mark Call::queue(Stream& stream, std::function<CUresult(fastsync_fake_op&)> run) const {
  Work work;
  work.what = symbol;
  work.fault = fault;
  work.run = std::move(run);
  return stream.enqueue(std::move(work));
}

CUresult begin_call(Call& call, Needs needs, Where where) {
  Driver& all = driver();
  if (all.forked) return CUDA_ERROR_NOT_INITIALIZED;
  if (all.stopping) return CUDA_ERROR_DEINITIALIZED;
  all.journal.call(call.symbol);
  if (in_host_function()) {
    all.journal.violation(std::string("call-in-host-function: ") + call.symbol +
                          " was called by a callback of cuLaunchHostFunc");
    return CUDA_ERROR_NOT_PERMITTED;
  }
  call.fault = FaultPlan::of_process().on_call(call.symbol);
  if (call.fault.action == FaultAction::kFail) return static_cast<CUresult>(call.fault.code);
  if (where == Where::kHost) {
    switch (call.fault.action) {
      case FaultAction::kDelay: std::this_thread::sleep_for(call.fault.delay); break;
      case FaultAction::kHang:
        while (!all.stopping) std::this_thread::sleep_for(kSlice);
        return CUDA_ERROR_DEINITIALIZED;
      case FaultAction::kFailLater:
      case FaultAction::kCorrupt:
        all.journal.violation(std::string("fault-plan: ") + call.symbol +
                              " queues no work that could fail later or be corrupted");
        break;
      default: break;
    }
  }
  if (needs != Needs::kNothing && !all.initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if (needs != Needs::kContext) return CUDA_SUCCESS;
  call.context = current_context();
  if (call.context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return call.context->state();
}

}  // namespace fastsync::fake
