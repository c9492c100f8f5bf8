// A stream: a worker thread with a queue, as independent of the host and of other streams as on a device.
//
// Each piece of work waits for the marks it is to run after, pauses for a random time of up to FASTSYNC_FAKE_DELAY_US,
// and runs. Work that fails breaks the stream's context; work of a broken context is passed over.
// A context has one null stream, which waits for all work queued on its blocking streams before, and they for it.
//
// Ownership: the worker keeps its stream, so a destroyed stream finishes what is queued, unwatched, as on a device.
// Threads: thread-safe. Waiting workers look at least every kSlice whether they should stop: the process exits, or the
// context broke.
#pragma once

#include <cuda.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "doubles/common/fault_plan.h"
#include "doubles/cuda/memory.h"

namespace fastsync::fake {

class Context;
class Stream;

inline constexpr std::chrono::milliseconds kSlice{20};

// Everything that was queued on a stream when the mark was made.
struct Mark {
  std::shared_ptr<Stream> stream;
  std::uint64_t sequence = 0;
  [[nodiscard]] bool passed() const;
};

}  // namespace fastsync::fake

// The work that is running; extern "C" functions hand it to the other doubles.
struct fastsync_fake_op {
  fastsync::fake::Stream* stream = nullptr;
  const char* what = "";
  std::vector<fastsync::fake::Pin> pins;      // what must not go away under it
  std::vector<std::span<std::byte>> written;  // what a fault may corrupt

  [[nodiscard]] bool stopping() const;
  // The host address of a device range, for a copy engine (`any_device`) or for code that runs on the stream's device.
  // Null: out of the rules, and recorded.
  [[nodiscard]] std::byte* translate(std::uint64_t address, std::uint64_t nbytes, bool writes, bool any_device = false);
};

namespace fastsync::fake {

struct Work {
  const char* what = "";
  std::function<CUresult(fastsync_fake_op&)> run;
  std::function<void()> release;  // called once, whatever happens to the work
  std::vector<Mark> after;
  Fault fault;
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  enum class Kind : std::uint8_t { kNull, kBlocking, kNonBlocking };
  // Starts the worker. Throws std::system_error where the system has no thread to give.
  [[nodiscard]] static std::shared_ptr<Stream> create(const std::shared_ptr<Context>& context, Kind kind);
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  [[nodiscard]] Context& context() const noexcept { return *context_; }
  [[nodiscard]] const std::shared_ptr<Context>& shared_context() const noexcept { return context_; }
  [[nodiscard]] Kind kind() const noexcept { return kind_; }

  // The mark of this work.
  Mark enqueue(Work work);
  [[nodiscard]] Mark mark();
  [[nodiscard]] bool has_passed(std::uint64_t sequence) const;
  // Returns at the mark, or when `give_up` says so (asked every kSlice).
  void wait_until(std::uint64_t sequence, const std::function<bool()>& give_up) const;
  // No more work comes; the worker ends with its queue.
  void close();

 private:
  Stream(std::shared_ptr<Context> context, Kind kind, std::uint64_t number);
  void work_loop();
  void perform(Work& work, std::chrono::microseconds pause);
  void sleep_unless_stopping(std::chrono::steady_clock::duration time, const fastsync_fake_op& op);

  const std::shared_ptr<Context> context_;
  const Kind kind_;
  const std::uint64_t number_;
  mutable std::mutex mutex_;
  std::condition_variable queued_;
  mutable std::condition_variable passed_;
  std::deque<Work> queue_;
  std::uint64_t enqueued_ = 0;
  std::uint64_t completed_ = 0;
  bool closed_ = false;
};

// True on a thread that is running a cuLaunchHostFunc callback, which may not call the driver.
[[nodiscard]] bool& in_host_function() noexcept;

}  // namespace fastsync::fake
