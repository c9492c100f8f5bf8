// The state of the double, and what every exported function does first.
//
// Never destroyed: worker threads outlive static objects. At exit (a destructor function of the library) the workers are
// told to stop and waited for, for a bounded time, and the journal is written.
//
// Threads: thread-safe. A forked child of a process that called cuInit gets CUDA_ERROR_NOT_INITIALIZED from everything,
// as from the driver.
#pragma once

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "doubles/common/fault_plan.h"
#include "doubles/common/journal.h"
#include "doubles/cuda/context.h"
#include "doubles/cuda/event.h"
#include "doubles/cuda/handle_table.h"
#include "doubles/cuda/memory.h"
#include "doubles/cuda/module.h"
#include "doubles/cuda/settings.h"

namespace fastsync::fake {

struct Device {
  std::shared_ptr<Context> primary;  // null: nobody retains it
  CUcontext handle = nullptr;
  int references = 0;
};

class Driver {
 public:
  Journal journal{"cuda"};
  Memory memory;
  HandleTable<Context> contexts{0x51};
  HandleTable<Stream> streams{0x52};
  HandleTable<Event> events{0x53};
  HandleTable<Module> modules{0x54};
  HandleTable<Function> functions{0x55};

  std::atomic<bool> initialised{false};
  std::atomic<bool> forked{false};
  std::atomic<bool> stopping{false};

  std::mutex devices_mutex;
  std::vector<Device> devices;

  // Adds who did it behind the kind: "out-of-bounds: <what>: ...".
  void violation(const std::string& problem, std::string_view what);

  void worker_started();
  void worker_ended();
  // Stops the workers; after that nothing queued runs.
  void stop();

 private:
  std::mutex workers_mutex_;
  std::condition_variable worker_ended_;
  int workers_ = 0;
};

[[nodiscard]] Driver& driver();

// --- What every exported function does --------------------------------------------------------------------------------

enum class Needs : std::uint8_t { kNothing, kInit, kContext };
// kQueued: a fault happens to the work that the call queues; kHost: to the call.
enum class Where : std::uint8_t { kHost, kQueued };

struct Call {
  const char* symbol;
  Fault fault;
  std::shared_ptr<Context> context;  // with Needs::kContext: the current one, and well

  // Queues work of this call, with its fault.
  Mark queue(Stream& stream, std::function<CUresult(fastsync_fake_op&)> run) const;
};

[[nodiscard]] CUresult begin_call(Call& call, Needs needs, Where where);

// Counts the call, lets the fault plan have its say, checks what the function needs, and runs the body.
template <typename Body>
CUresult api(const char* symbol, Needs needs, Where where, Body&& body) noexcept {
  Call call{symbol, {}, nullptr};
  try {
    if (const CUresult result = begin_call(call, needs, where); result != CUDA_SUCCESS) return result;
    return body(call);
  } catch (const std::bad_alloc&) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  } catch (const std::system_error&) {
    return CUDA_ERROR_OPERATING_SYSTEM;
  } catch (const std::exception&) {
    return CUDA_ERROR_UNKNOWN;
  }
}

// The calling thread's stack of contexts; the last is current.
[[nodiscard]] std::vector<std::shared_ptr<Context>>& context_stack();
[[nodiscard]] std::shared_ptr<Context> current_context();

// A live stream by its handle, or a default stream of `context`. Null: no stream.
[[nodiscard]] std::shared_ptr<Stream> stream_of(const std::shared_ptr<Context>& context, CUstream handle);

// Retiring streams, events, memory and modules of a context that nobody retains any more.
void destroy_context(const std::shared_ptr<Context>& context, CUcontext handle);

}  // namespace fastsync::fake
