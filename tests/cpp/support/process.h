// Forked ranks, and what tests of processes need. Fork before any thread is started.
#pragma once

#include <dirent.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <utility>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

namespace fastsync::testing {

// What this process allocated and lost, which a rank that ends by _exit() is never asked otherwise. Printed where found.
inline bool has_leaked() {
#ifdef __SANITIZE_ADDRESS__
  return __lsan_do_recoverable_leak_check() != 0;
#else
  return false;
#endif
}

// A forked rank. The body's exception becomes exit status 1, as does a leak, and an alarm ends it if the test does not.
class Process {
 public:
  template <typename Body>
  explicit Process(Body body) {
    std::fflush(nullptr);  // or the child writes it again
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::alarm(60);
    int status = 0;
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "forked rank: %s\n", error.what());
      status = 1;
    }
    if (status == 0 && has_leaked()) status = 1;
    ::_exit(status);
  }
  ~Process() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    (void)join();
  }
  Process(Process&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
  Process& operator=(Process&&) = delete;
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void kill(int signal) const { ASSERT_EQ(::kill(pid_, signal), 0); }
  // Exit status, or minus the signal that ended it.
  [[nodiscard]] int join() {
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  [[nodiscard]] bool is_dead() const {
    siginfo_t info{};
    return ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid_;
  }

 private:
  pid_t pid_ = -1;
};

// A byte through a pipe: "I am there now". Reading it is bounded by the writer's alarm.
class Signal {
 public:
  Signal() { EXPECT_EQ(::pipe(ends_), 0); }
  ~Signal() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  Signal(const Signal&) = delete;
  Signal& operator=(const Signal&) = delete;
  void give() const {
    const char byte = 1;
    if (::write(ends_[1], &byte, 1) != 1) std::abort();
  }
  void take() const {
    char byte = 0;
    if (::read(ends_[0], &byte, 1) != 1) std::abort();
  }

 private:
  int ends_[2] = {-1, -1};
};

// Of this process.
inline int open_descriptors() {
  int count = 0;
  DIR* folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

}  // namespace fastsync::testing
