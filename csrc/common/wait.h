// Deadlines and the one way to wait.
//
// Every wait of the core is bounded and wakes at least every kPollInterval. `Wait` carries what such a wait needs:
// how long without progress is too long, and a hook that is called on every wake. The hook looks after the outside
// world (signals, peers that died, failures that a peer reports) and throws to end the wait.
//
// Threads: a Wait belongs to the thread that runs the sync. Streams: none. Errors: expired() never throws; whoever
// waits throws TimeoutError with the rank and phase it waited for.
#pragma once

#include <chrono>
#include <functional>
#include <utility>

namespace fastsync {

using Clock = std::chrono::steady_clock;
// The longest a rank sleeps before it looks at its peers and its signals: EOF and Ctrl-C are seen within this.
inline constexpr std::chrono::milliseconds kPollInterval{50};

class Wait {
 public:
  using Hook = std::function<void()>;

  Wait(std::chrono::nanoseconds timeout, Hook hook)
      : timeout_(timeout), hook_(std::move(hook)), deadline_(Clock::now() + timeout) {}
  // The same deadline with another hook, for a layer that has more to look after (its hook calls outer.check() too).
  Wait(const Wait& outer, Hook hook) : timeout_(outer.timeout_), hook_(std::move(hook)), deadline_(outer.deadline_) {}

  // Something moved: the clock starts again.
  void progress() noexcept { deadline_ = Clock::now() + timeout_; }
  [[nodiscard]] bool expired() const noexcept { return Clock::now() >= deadline_; }
  [[nodiscard]] std::chrono::nanoseconds timeout() const noexcept { return timeout_; }
  [[nodiscard]] std::chrono::nanoseconds remaining() const noexcept { return deadline_ - Clock::now(); }
  // How long the next single sleep may last: at most kPollInterval, at most what remains, at least zero.
  [[nodiscard]] std::chrono::nanoseconds slice() const noexcept {
    const auto left = remaining();
    if (left <= std::chrono::nanoseconds::zero()) return std::chrono::nanoseconds::zero();
    return left < kPollInterval ? left : std::chrono::nanoseconds(kPollInterval);
  }
  // Call after each sleep. Throws what the hook throws.
  void check() const {
    if (hook_) hook_();
  }

 private:
  std::chrono::nanoseconds timeout_;
  Hook hook_;
  Clock::time_point deadline_;
};

}  // namespace fastsync
