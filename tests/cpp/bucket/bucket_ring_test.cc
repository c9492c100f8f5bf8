#include "bucket/bucket_ring.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <future>
#include <thread>
#include <vector>

#include "common/error.h"
#include "device/host/host_runtime.h"

namespace fastsync {
namespace {

using namespace std::chrono_literals;

class BucketRingTest : public ::testing::Test {
 protected:
  std::shared_ptr<HostRuntime> runtime_ = HostRuntime::create({.delay_seed = 11, .max_delay = 200us});
  Stream writer_{runtime_, "writer"};
  Stream reader_{runtime_, "reader"};
  Stream here_ = runtime_->inline_stream();
  Wait wait_{30s, nullptr};
};

TEST_F(BucketRingTest, LendsEachBucketOnceAndInTurn) {
  BucketRing ring(runtime_, MemoryKind::kHost, 3, 4096);
  EXPECT_EQ(ring.buckets(), 3U);
  EXPECT_EQ(ring.memory().nbytes(), 3U * 4096);
  BucketLease a = ring.acquire(here_.view(), wait_);
  BucketLease b = ring.acquire(here_.view(), wait_);
  BucketLease c = ring.acquire(here_.view(), wait_);
  EXPECT_EQ(b.data(), a.data() + 4096);
  EXPECT_EQ(c.data(), b.data() + 4096);
  EXPECT_EQ(a.nbytes(), 4096U);
  EXPECT_FALSE(ring.try_acquire(here_.view()).has_value());
  std::byte* const second = b.data();
  b.release();
  a.release();
  EXPECT_FALSE(static_cast<bool>(a));
  EXPECT_EQ(ring.acquire(here_.view(), wait_).data(), second);
}

TEST_F(BucketRingTest, ReusesBucketOnlyBehindTheLastReadersEvent) {
  constexpr int kRounds = 200;
  BucketRing ring(runtime_, MemoryKind::kDevice, 2, 4096);
  std::vector<std::vector<std::byte>> out(kRounds, std::vector<std::byte>(4096));
  Event written(runtime_);
  for (int i = 0; i < kRounds; ++i) {
    BucketLease lease = ring.acquire(writer_.view(), wait_);
    std::byte* const data = lease.data();
    runtime_->enqueue(writer_.view(), [data, i] { std::memset(data, i, 4096); });
    written.record(writer_.view());
    written.stream_wait(reader_.view());
    runtime_->copy(out[static_cast<std::size_t>(i)].data(), data, 4096, reader_.view());
    lease.used_on(reader_.view());
  }  // given back with the reader's work still queued; the host waited for nothing
  reader_.synchronize(wait_);
  for (int i = 0; i < kRounds; ++i) {
    EXPECT_EQ(out[static_cast<std::size_t>(i)], std::vector<std::byte>(4096, static_cast<std::byte>(i))) << i;
  }
}

TEST_F(BucketRingTest, KeepsAnOldReadersMarkForAHolderOnAnotherStream) {
  BucketRing ring(runtime_, MemoryKind::kHost, 1, 64);
  std::promise<void> promise;
  const std::shared_future<void> gate = promise.get_future().share();
  {
    BucketLease lease = ring.acquire(writer_.view(), wait_);
    runtime_->enqueue(reader_.view(), [gate] { gate.wait(); });
    lease.used_on(reader_.view());
  }
  // The next holder queues nothing. The one after it comes with another stream, and must still be behind the reader.
  ring.acquire(writer_.view(), wait_).release();
  Stream other(runtime_, "other");
  const BucketLease lease = ring.acquire(other.view(), wait_);
  Event event(runtime_);
  event.record(other.view());
  EXPECT_FALSE(event.query());
  promise.set_value();
  event.synchronize(wait_);
}

TEST_F(BucketRingTest, InlineStreamWaitsForTheReadersOnTheHost) {
  BucketRing ring(runtime_, MemoryKind::kHost, 1, 64);
  std::promise<void> promise;
  const std::shared_future<void> gate = promise.get_future().share();
  {
    BucketLease lease = ring.acquire(here_.view(), wait_);
    runtime_->enqueue(reader_.view(), [gate] { gate.wait(); });
    lease.used_on(reader_.view());
  }
  EXPECT_FALSE(ring.try_acquire(here_.view()).has_value());
  EXPECT_THROW((void)ring.acquire(here_.view(), 60ms), TimeoutError);
  promise.set_value();
  EXPECT_TRUE(static_cast<bool>(ring.acquire(here_.view(), wait_)));  // the timeout had given it back
}

TEST_F(BucketRingTest, WaitsForABucketUntilItsDeadline) {
  BucketRing ring(runtime_, MemoryKind::kHost, 1, 64);
  BucketLease lease = ring.acquire(here_.view(), wait_);
  int calls = 0;
  Wait brief(180ms, [&] { ++calls; });
  const auto began = Clock::now();
  EXPECT_THROW((void)ring.acquire(here_.view(), brief), TimeoutError);
  EXPECT_GE(Clock::now() - began, 180ms);
  EXPECT_GE(calls, 2);
  auto waiting = std::async(std::launch::async, [&] { return ring.acquire(here_.view(), 30s); });
  lease.release();
  EXPECT_TRUE(static_cast<bool>(waiting.get()));
}

TEST_F(BucketRingTest, CloseWakesEveryWaiterAndLeavesLeasesValid) {
  BucketRing ring(runtime_, MemoryKind::kHost, 1, 64);
  BucketLease lease = ring.acquire(here_.view(), wait_);
  std::atomic<int> inside{0};
  std::vector<std::future<void>> waiters;
  for (int i = 0; i < 3; ++i) {
    waiters.push_back(std::async(std::launch::async, [&] {
      Wait wait(30s, [&] { ++inside; });
      (void)ring.acquire(writer_.view(), wait);
    }));
  }
  while (inside < 3) std::this_thread::yield();
  const auto began = Clock::now();
  ring.close();
  ring.close();
  for (auto& waiter : waiters) EXPECT_THROW(waiter.get(), StateError);
  EXPECT_LE(Clock::now() - began, 1s);
  std::memset(lease.data(), 1, lease.nbytes());
  EXPECT_THROW((void)ring.try_acquire(here_.view()), StateError);
}

TEST_F(BucketRingTest, LeaseKeepsTheMemoryAlive) {
  BucketLease lease;
  {
    BucketRing ring(runtime_, MemoryKind::kHost, 1, 4096);
    lease = ring.acquire(here_.view(), wait_);
  }
  std::memset(lease.data(), 1, lease.nbytes());
  BucketLease moved = std::move(lease);
  EXPECT_FALSE(static_cast<bool>(lease));  // NOLINT(bugprone-use-after-move): what is left is specified
  EXPECT_THROW(lease.used_on(here_.view()), StateError);
  EXPECT_TRUE(static_cast<bool>(moved));
}

TEST_F(BucketRingTest, FailedReaderIsReportedOnceAndTheBucketComesFree) {
  BucketRing ring(runtime_, MemoryKind::kHost, 1, 64);
  {
    Stream failing(runtime_, "failing");
    BucketLease lease = ring.acquire(here_.view(), wait_);
    runtime_->enqueue(failing.view(), [] { throw DeviceError("kernel failed"); });
    lease.used_on(failing.view());
  }
  Stream dependent(runtime_, "dependent");
  ring.acquire(dependent.view(), wait_).release();
  EXPECT_THROW(dependent.synchronize(wait_), DeviceError);
  EXPECT_NO_THROW((void)ring.acquire(here_.view(), wait_));
}

TEST_F(BucketRingTest, RefusesSizesThatMakeNoSense) {
  EXPECT_THROW(BucketRing(runtime_, MemoryKind::kHost, 0, 64), InvalidArgument);
  EXPECT_THROW(BucketRing(runtime_, MemoryKind::kHost, 2, 0), InvalidArgument);
  EXPECT_THROW(BucketRing(runtime_, MemoryKind::kHost, 2, ~std::uint64_t{0}), InvalidArgument);
  EXPECT_THROW(BucketRing(runtime_, MemoryKind::kHost, 2, std::uint64_t{1} << 44), DeviceError);
}

}  // namespace
}  // namespace fastsync
