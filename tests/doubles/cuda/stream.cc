#include "doubles/cuda/stream.h"

#include <atomic>
#include <exception>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "common/thread_name.h"
#include "doubles/cuda/context.h"
#include "doubles/cuda/driver.h"

namespace fastsync::fake {

bool& in_host_function() noexcept {
  thread_local bool inside = false;
  return inside;
}

bool Mark::passed() const { return stream == nullptr || stream->has_passed(sequence); }

Stream::Stream(std::shared_ptr<Context> context, Kind kind, std::uint64_t number)
    : context_(std::move(context)), kind_(kind), number_(number) {}

std::shared_ptr<Stream> Stream::create(const std::shared_ptr<Context>& context, Kind kind) {
  static std::atomic<std::uint64_t> made{0};
  std::shared_ptr<Stream> stream(new Stream(context, kind, made.fetch_add(1)));
  driver().worker_started();
  try {
    std::thread([stream] {
      set_thread_name("cu" + std::to_string(stream->number_));
      stream->work_loop();
      driver().worker_ended();
    }).detach();
  } catch (...) {
    driver().worker_ended();
    throw;
  }
  if (kind == Kind::kBlocking) context->add_blocking(stream);
  return stream;
}

Mark Stream::enqueue(Work work) {
  // What the null stream's rule orders this work behind; marks only of work that is queued already, so no cycle.
  if (kind_ == Kind::kNull) {
    for (Mark& mark : context_->blocking_marks()) work.after.push_back(std::move(mark));
  } else if (kind_ == Kind::kBlocking) {
    if (const auto null = context_->existing_null_stream()) work.after.push_back(null->mark());
  }
  std::erase_if(work.after, [&](const Mark& mark) { return mark.stream.get() == this || mark.passed(); });
  Mark mine{shared_from_this(), 0};
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    mine.sequence = ++enqueued_;
  }
  queued_.notify_one();
  return mine;
}

Mark Stream::mark() {
  const std::lock_guard lock(mutex_);
  return {shared_from_this(), enqueued_};
}

bool Stream::has_passed(std::uint64_t sequence) const {
  const std::lock_guard lock(mutex_);
  return completed_ >= sequence;
}

void Stream::wait_until(std::uint64_t sequence, const std::function<bool()>& give_up) const {
  std::unique_lock lock(mutex_);
  while (completed_ < sequence) {
    passed_.wait_for(lock, kSlice);
    if (completed_ >= sequence) return;
    lock.unlock();
    if (give_up()) return;
    lock.lock();
  }
}

void Stream::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  queued_.notify_one();
}

void Stream::work_loop() {
  std::mt19937_64 random(settings().seed * 0x9E3779B97F4A7C15ULL + number_);
  std::uniform_int_distribution<std::int64_t> pauses(0, settings().max_delay.count());
  std::unique_lock lock(mutex_);
  for (;;) {
    // In slices: the exiting process tells no stream in particular.
    while (queue_.empty() && !closed_ && !driver().stopping) queued_.wait_for(lock, kSlice * 5);
    if (queue_.empty()) return;
    Work work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    perform(work, std::chrono::microseconds(pauses(random)));
    work = Work();  // what it owns is gone before anybody is told that it is done
    lock.lock();
    ++completed_;
    passed_.notify_all();
  }
}

void Stream::sleep_unless_stopping(std::chrono::steady_clock::duration time, const fastsync_fake_op& op) {
  const auto end = std::chrono::steady_clock::now() + time;
  for (auto left = time; left.count() > 0 && !op.stopping(); left = end - std::chrono::steady_clock::now()) {
    std::this_thread::sleep_for(std::min<std::chrono::steady_clock::duration>(left, kSlice));
  }
}

void Stream::perform(Work& work, std::chrono::microseconds pause) {
  fastsync_fake_op op;
  op.stream = this;
  op.what = work.what;
  for (const Mark& mark : work.after) mark.stream->wait_until(mark.sequence, [&] { return op.stopping(); });
  sleep_unless_stopping(pause, op);
  if (work.fault.action == FaultAction::kDelay) sleep_unless_stopping(work.fault.delay, op);
  while (work.fault.action == FaultAction::kHang && !op.stopping()) sleep_unless_stopping(kSlice, op);

  if (!op.stopping()) {
    CUresult result = CUDA_SUCCESS;
    if (work.fault.action == FaultAction::kFailLater) {
      result = static_cast<CUresult>(work.fault.code);
    } else {
      try {
        result = work.run(op);
      } catch (const std::exception& error) {
        driver().journal.violation(std::string("crashed: ") + work.what + ": " + error.what());
        result = CUDA_ERROR_LAUNCH_FAILED;
      }
    }
    if (work.fault.action == FaultAction::kCorrupt) {
      std::uint64_t left = work.fault.bytes;
      for (const auto& range : op.written) {
        corrupt_bytes(range, left);
        left -= std::min<std::uint64_t>(left, range.size());
      }
      if (op.written.empty()) {
        driver().journal.violation(std::string("fault-plan: ") + work.what + " wrote nothing that could be corrupted");
      }
    }
    for (const Pin& pin : op.pins) {
      if (pin.region().live) continue;
      driver().journal.violation(std::string("use-after-free: ") + work.what + ": memory was freed while it ran");
    }
    if (result != CUDA_SUCCESS) context_->fail(result);
  }
  if (work.release) work.release();
}

}  // namespace fastsync::fake

bool fastsync_fake_op::stopping() const {
  return fastsync::fake::driver().stopping || stream->context().state() != CUDA_SUCCESS;
}

std::byte* fastsync_fake_op::translate(std::uint64_t address, std::uint64_t nbytes, bool writes, bool any_device) {
  using namespace fastsync::fake;
  Driver& all = driver();
  const int device = any_device ? kAnyDevice : stream->context().device();
  Translation found = all.memory.translate(address, nbytes, device, writes);
  if (found.host == nullptr) {
    all.violation(found.problem, what);
    return nullptr;
  }
  pins.push_back(std::move(found.pin.front()));
  return found.host;
}
