#include "device/host/host_runtime.h"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "common/error.h"
#include "common/thread_name.h"
#include "device/copy_kernel.h"
#include "device/host/host_memory.h"

namespace fastsync {
namespace {

// One stream's queue and progress. Shared by the stream, its worker, the events recorded on it and the streams that wait
// for those, so that an event may outlive its stream.
class HostStream {
 public:
  explicit HostStream(std::string name) : name_(std::move(name)) {}

  void start_worker(std::shared_ptr<HostStream> self, std::optional<std::uint64_t> seed,
                    std::chrono::microseconds max_delay) {
    worker_ = std::thread([self = std::move(self), seed, max_delay] { self->run(seed, max_delay); });
  }

  void finish_and_join() noexcept {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    queued_.notify_all();
    if (worker_.joinable()) worker_.join();
  }

  [[nodiscard]] bool runs_inline() const noexcept { return !worker_.joinable(); }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }

  void enqueue(std::function<void()> task) {
    if (runs_inline()) {
      {
        const std::lock_guard lock(mutex_);
        ++enqueued_;
      }
      complete_one(run_unless_failed(task));
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
      ++enqueued_;
    }
    queued_.notify_one();
  }

  [[nodiscard]] std::uint64_t enqueued() {
    const std::lock_guard lock(mutex_);
    return enqueued_;
  }

  // True once the first `sequence` tasks are done. Throws the error of one of them.
  [[nodiscard]] bool passed(std::uint64_t sequence) {
    const std::lock_guard lock(mutex_);
    return passed_locked(sequence);
  }

  // For workers: bounded by the tasks that come before, which end by themselves.
  void block_until_passed(std::uint64_t sequence) {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return completed_ >= sequence; });
    (void)passed_locked(sequence);
  }

  void host_wait(std::uint64_t sequence, Wait& wait) {
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        if (passed_locked(sequence)) break;
        done_.wait_for(lock, wait.slice(), [&] { return completed_ >= sequence; });
        if (passed_locked(sequence)) break;
      }
      wait.check();  // not under the lock: the hook is somebody else's code
      if (wait.expired()) {
        throw TimeoutError(concat("no progress for ", std::chrono::duration<double>(wait.timeout()).count(),
                                  " s waiting for stream '", name_, "': ", remaining(sequence),
                                  " queued tasks are not done"));
      }
    }
    wait.progress();
  }

 private:
  void run(std::optional<std::uint64_t> seed, std::chrono::microseconds max_delay) {
    set_thread_name(name_);
    std::mt19937_64 random(seed.value_or(0));
    std::uniform_int_distribution<std::int64_t> delay(0, max_delay.count());
    std::unique_lock lock(mutex_);
    for (;;) {
      queued_.wait(lock, [&] { return stopping_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      if (seed) std::this_thread::sleep_for(std::chrono::microseconds(delay(random)));
      std::exception_ptr error = run_unless_failed(task);
      task = nullptr;  // what the task owns is gone before anybody is told that it is done
      complete_one(std::move(error));
      lock.lock();
    }
  }

  [[nodiscard]] std::exception_ptr run_unless_failed(const std::function<void()>& task) {
    {
      const std::lock_guard lock(mutex_);
      if (error_) return nullptr;
    }
    try {
      task();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  void complete_one(std::exception_ptr error) {
    {
      const std::lock_guard lock(mutex_);
      ++completed_;
      if (error && !error_) {
        error_ = std::move(error);
        failed_at_ = completed_;
      }
    }
    done_.notify_all();
  }

  [[nodiscard]] bool passed_locked(std::uint64_t sequence) const {
    if (completed_ < sequence) return false;
    if (error_ && sequence >= failed_at_) std::rethrow_exception(error_);
    return true;
  }

  [[nodiscard]] std::uint64_t remaining(std::uint64_t sequence) {
    const std::lock_guard lock(mutex_);
    return sequence - completed_;
  }

  const std::string name_;
  std::thread worker_;
  std::mutex mutex_;
  std::condition_variable queued_;
  std::condition_variable done_;
  std::deque<std::function<void()>> tasks_;
  std::uint64_t enqueued_ = 0;
  std::uint64_t completed_ = 0;
  std::uint64_t failed_at_ = 0;  // the sequence whose task failed first
  std::exception_ptr error_;
  bool stopping_ = false;
};

using StreamHandle = std::shared_ptr<HostStream>;

struct HostEvent {
  std::mutex mutex;
  StreamHandle stream;  // null: never recorded
  std::uint64_t sequence = 0;

  [[nodiscard]] std::pair<StreamHandle, std::uint64_t> mark() {
    const std::lock_guard lock(mutex);
    return {stream, sequence};
  }
};

HostStream& stream_of(StreamView view) { return **static_cast<StreamHandle*>(view.handle()); }
HostEvent& event_of(void* event) { return *static_cast<HostEvent*>(event); }

}  // namespace

std::shared_ptr<HostRuntime> HostRuntime::create(const Options& options) {
  if (options.max_delay < std::chrono::microseconds::zero()) throw InvalidArgument("max_delay must not be negative");
  return std::shared_ptr<HostRuntime>(new HostRuntime(options));
}

HostRuntime::HostRuntime(const Options& options) : options_(options) {}
HostRuntime::~HostRuntime() = default;

Allocation HostRuntime::allocate(MemoryKind kind, std::uint64_t nbytes) {
  return allocate_host(kind, nbytes, "fastsync");
}

void HostRuntime::deallocate(MemoryKind kind, const Allocation& allocation) noexcept {
  deallocate_host(kind, allocation);
}

void HostRuntime::copy(std::byte* dst, const std::byte* src, std::uint64_t nbytes, StreamView stream) {
  if (nbytes == 0) return;
  enqueue(stream, [dst, src, nbytes] { std::memmove(dst, src, nbytes); });
}

void HostRuntime::fill(std::byte* dst, std::byte value, std::uint64_t nbytes, StreamView stream) {
  if (nbytes == 0) return;
  enqueue(stream, [dst, value, nbytes] { std::memset(dst, std::to_integer<int>(value), nbytes); });
}

void HostRuntime::launch_copy(CopyDirection direction, const CopyArgs& args, StreamView stream) {
  if (args.count == 0) return;
  enqueue(stream, [direction, args] { copy_on_host(direction, args); });
}

void HostRuntime::enqueue(StreamView stream, std::function<void()> task) { stream_of(stream).enqueue(std::move(task)); }

void* HostRuntime::create_stream(std::string_view name) {
  auto handle = std::make_unique<StreamHandle>(std::make_shared<HostStream>(std::string(name)));
  const std::uint64_t number = streams_made_.fetch_add(1, std::memory_order_relaxed);
  std::optional<std::uint64_t> seed;
  if (options_.delay_seed) seed = *options_.delay_seed * 0x9E3779B97F4A7C15ULL + number;
  try {
    (*handle)->start_worker(*handle, seed, options_.max_delay);
  } catch (const std::system_error& error) {
    throw DeviceError(concat("cannot start the worker thread of stream '", name, "': ", error.what(),
                             "; the process or its cgroup has reached its limit of threads"));
  }
  return handle.release();
}

Stream HostRuntime::inline_stream() {
  auto handle = std::make_unique<StreamHandle>(std::make_shared<HostStream>("inline"));
  return {shared_from_this(), handle.release()};
}

void HostRuntime::destroy_stream(void* stream) noexcept {
  const std::unique_ptr<StreamHandle> handle(static_cast<StreamHandle*>(stream));
  (*handle)->finish_and_join();
}

bool HostRuntime::runs_inline(StreamView stream) const noexcept { return stream_of(stream).runs_inline(); }

void HostRuntime::synchronize_stream(StreamView stream, Wait& wait) {
  HostStream& target = stream_of(stream);
  target.host_wait(target.enqueued(), wait);
}

void* HostRuntime::create_event() { return new HostEvent; }

void HostRuntime::destroy_event(void* event) noexcept { delete static_cast<HostEvent*>(event); }

void HostRuntime::record_event(void* event, StreamView stream) {
  const StreamHandle& handle = *static_cast<StreamHandle*>(stream.handle());
  const std::uint64_t sequence = handle->enqueued();
  HostEvent& target = event_of(event);
  const std::lock_guard lock(target.mutex);
  target.stream = handle;
  target.sequence = sequence;
}

bool HostRuntime::query_event(void* event) {
  const auto [stream, sequence] = event_of(event).mark();
  return stream == nullptr || stream->passed(sequence);
}

void HostRuntime::synchronize_event(void* event, Wait& wait) {
  const auto [stream, sequence] = event_of(event).mark();
  if (stream != nullptr) stream->host_wait(sequence, wait);
}

void HostRuntime::stream_wait_event(StreamView stream, void* event) {
  auto [marked, sequence] = event_of(event).mark();
  HostStream& target = stream_of(stream);
  if (marked == nullptr || marked.get() == &target) return;
  if (target.runs_inline() && !marked->passed(sequence)) {
    throw StateError(concat("an inline stream cannot wait for stream '", marked->name(),
                            "', whose work is not done; synchronize the event first"));
  }
  // Also when the event has passed: its error, if there is one, becomes this stream's.
  target.enqueue([marked = std::move(marked), sequence = sequence] { marked->block_until_passed(sequence); });
}

}  // namespace fastsync
