#include "comm/shm/futex.h"

#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "common/wait.h"
#include "support/bounds.h"

namespace fastsync::testing {
namespace {

using namespace std::chrono_literals;

TEST(Doorbell, RingWakesASleeperLongBeforeItsTimeout) {
  for (int round = 0; round < 20; ++round) {
    Doorbell bell;
    std::atomic<bool> ready{false};
    auto sleeper = std::async(std::launch::async, [&] {
      const auto began = Clock::now();
      while (!ready) bell.sleep([&] { return ready.load(); }, 20s);
      return Clock::now() - began;
    });
    if (round % 2 == 0) std::this_thread::yield();
    ready = true;
    bell.ring();
    EXPECT_LT(sleeper.get(), 10s);
  }
}

TEST(Doorbell, RingAlwaysEndsASleepWhoseConditionStaysFalse) {
  Doorbell bell;
  std::atomic<int> looks{0};
  auto sleeper = std::async(std::launch::async, [&] {
    bell.sleep(
        [&] {
          ++looks;
          return false;
        },
        20s);
    return true;
  });
  const auto began = Clock::now();
  // A ring between the look and the sleep counts too, so it takes one ring after the look, not a well-timed one.
  while (looks == 0) std::this_thread::yield();
  bell.ring_always();
  EXPECT_TRUE(sleeper.get());
  EXPECT_LT(Clock::now() - began, 10s);
}

TEST(Doorbell, DoesNotSleepWhenReadyAndWakesAtItsTimeout) {
  Doorbell bell;
  auto began = Clock::now();
  bell.sleep([] { return true; }, 20s);
  EXPECT_LT(Clock::now() - began, 10s);
  began = Clock::now();
  bell.sleep([] { return false; }, 30ms);
  EXPECT_LT(Clock::now() - began, 10s);
}

TEST(Doorbell, SurvivesAConditionThatThrows) {
  Doorbell bell;
  struct Stop {};
  EXPECT_THROW(bell.sleep([]() -> bool { throw Stop(); }, 20s), Stop);
  bell.ring();  // nobody is counted as asleep
}

}  // namespace
}  // namespace fastsync::testing
