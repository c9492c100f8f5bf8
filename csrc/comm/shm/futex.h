// A doorbell in shared memory: sleep until another process rings.
//
// The bell says "look again", nothing more; what is waited for lies in other atomics. Ringing costs one load while
// nobody sleeps. For that to be safe the waker must have stored what is waited for, and the sleeper's `ready` must load
// it, with memory_order_seq_cst: either the sleeper sees the store, or the waker sees the sleeper.
//
// Threads: any number of wakers and sleepers, in any process that maps the page. A sleeper that is killed leaves its
// mark behind; ringing then costs a system call more, and stays right.
// Errors: none. sleep() returns early for any reason (signal, ring, timeout); the caller looks again.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace fastsync {

// Tells the core that it spins: saves power and gives its twin hyper-thread the execution units.
inline void cpu_relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // `yield` is a no-op on most cores
#else
  asm volatile("" ::: "memory");
#endif
}

class Doorbell {
 public:
  // Wakes whoever sleeps now.
  void ring() noexcept {
    if (sleepers_.load(std::memory_order_seq_cst) != 0) ring_always();
  }
  void ring_always() noexcept {
    tickets_.fetch_add(1, std::memory_order_seq_cst);
    // Not FUTEX_PRIVATE: the sleepers are other processes.
    ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&tickets_), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  // Sleeps at most `at_most`, unless ready() holds. ready() may throw.
  template <typename Ready>
  void sleep(Ready&& ready, std::chrono::nanoseconds at_most) {
    const Sleeping mark(sleepers_);
    // The ticket is read before ready(): a ring in between makes the kernel return at once.
    const std::uint32_t ticket = tickets_.load(std::memory_order_seq_cst);
    if (ready()) return;
    const timespec timeout{static_cast<time_t>(at_most.count() / 1'000'000'000),
                           static_cast<long>(at_most.count() % 1'000'000'000)};
    ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&tickets_), FUTEX_WAIT, ticket, &timeout, nullptr, 0);
  }

 private:
  struct Sleeping {
    explicit Sleeping(std::atomic<std::uint32_t>& sleepers) noexcept : count(sleepers) {
      count.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Sleeping() { count.fetch_sub(1, std::memory_order_seq_cst); }
    Sleeping(const Sleeping&) = delete;
    Sleeping& operator=(const Sleeping&) = delete;
    std::atomic<std::uint32_t>& count;
  };

  std::atomic<std::uint32_t> tickets_{0};
  std::atomic<std::uint32_t> sleepers_{0};
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free && sizeof(std::atomic<std::uint32_t>) == 4,
              "a futex word is a plain 32-bit integer");

}  // namespace fastsync
