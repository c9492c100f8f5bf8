#include "device/host/host_runtime.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/checksum.h"
#include "common/error.h"

namespace fastsync {
namespace {

using namespace std::chrono_literals;

Wait long_wait() { return {30s, nullptr}; }

// Work that a test holds open.
class Gate {
 public:
  [[nodiscard]] std::function<void()> task() {
    return [opened = opened_] { opened.wait(); };
  }
  void open() { promise_.set_value(); }

 private:
  std::promise<void> promise_;
  std::shared_future<void> opened_ = promise_.get_future().share();
};

class HostRuntimeTest : public ::testing::Test {
 protected:
  std::shared_ptr<HostRuntime> runtime_ = HostRuntime::create({.delay_seed = 3, .max_delay = 300us});
  Wait wait_ = long_wait();
};

TEST_F(HostRuntimeTest, RunsAStreamsWorkInOrderOnAThreadOfThatName) {
  Stream stream(runtime_, "pack");
  std::vector<int> order;
  std::array<char, 16> name{};
  for (int i = 0; i < 100; ++i) runtime_->enqueue(stream.view(), [&order, i] { order.push_back(i); });
  runtime_->enqueue(stream.view(), [&name] { ::pthread_getname_np(::pthread_self(), name.data(), name.size()); });
  stream.synchronize(wait_);
  ASSERT_EQ(order.size(), 100U);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  EXPECT_STREQ(name.data(), "pack");
}

TEST_F(HostRuntimeTest, QueueingDoesNotBlockTheHost) {
  Stream stream(runtime_, "s");
  Gate gate;
  runtime_->enqueue(stream.view(), gate.task());
  std::array<std::byte, 8> src{std::byte{1}};
  std::array<std::byte, 8> dst{};
  runtime_->copy(dst.data(), src.data(), 8, stream.view());
  Event event(runtime_);
  event.record(stream.view());
  EXPECT_FALSE(event.query());
  gate.open();
  event.synchronize(wait_);
  EXPECT_TRUE(event.query());
  EXPECT_EQ(dst, src);
}

TEST_F(HostRuntimeTest, FillsAndLaunchesCopiesWhenTheStreamGetsThere) {
  Stream stream(runtime_, "s");
  Gate gate;
  alignas(256) std::array<std::byte, 256> bucket{};
  std::array<std::byte, 100> source{};
  Checksum sum;
  CopyPiece piece;
  piece.address = reinterpret_cast<std::uint64_t>(source.data());
  piece.nbytes = source.size();
  CopyArgs args;
  args.pieces = &piece;
  args.bucket = bucket.data();
  args.sum = &sum;
  args.used_bytes = source.size();
  args.count = 1;
  runtime_->enqueue(stream.view(), gate.task());
  runtime_->fill(source.data(), std::byte{7}, source.size(), stream.view());
  runtime_->launch_copy(CopyDirection::kPack, args, stream.view());
  EXPECT_EQ(bucket[0], std::byte{0});
  gate.open();
  stream.synchronize(wait_);
  EXPECT_TRUE(std::equal(source.begin(), source.end(), bucket.begin()));
  EXPECT_EQ(bucket[99], std::byte{7});
  EXPECT_EQ(bucket[100], std::byte{0});
  EXPECT_EQ(sum, checksum_bytes(source.data(), source.size(), 0));
}

TEST_F(HostRuntimeTest, SaysThatItCannotShareWithOtherProcesses) {
  EXPECT_FALSE(runtime_->can_share_events());
  EXPECT_THROW((void)runtime_->export_memory({}), DeviceError);
  EXPECT_THROW((void)runtime_->import_memory({}), DeviceError);
  EXPECT_THROW((void)runtime_->create_shared_event(), DeviceError);
  EXPECT_EQ(runtime_->device_id(), "");
}

TEST_F(HostRuntimeTest, StreamsAreOrderedByEventsAndTheHostIsNotHeld) {
  Stream producer(runtime_, "producer");
  Stream consumer(runtime_, "consumer");
  Event ready(runtime_);
  for (int round = 0; round < 50; ++round) {
    int value = 0;
    int seen = -1;
    Gate gate;
    runtime_->enqueue(producer.view(), gate.task());
    runtime_->enqueue(producer.view(), [&] { value = round + 1; });
    ready.record(producer.view());
    ready.stream_wait(consumer.view());  // returns although the producer is held open
    runtime_->enqueue(consumer.view(), [&] { seen = value; });
    gate.open();
    consumer.synchronize(wait_);
    EXPECT_EQ(seen, round + 1);
  }
}

TEST_F(HostRuntimeTest, WithoutAnEventTheOrderIsNotThere) {
  // The reason for the delays: a missing event shows. Some round must see the value of before.
  Stream producer(runtime_, "producer");
  Stream consumer(runtime_, "consumer");
  int stale = 0;
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> value{0};
    int seen = -1;
    runtime_->enqueue(producer.view(), [&] { value = 1; });
    runtime_->enqueue(consumer.view(), [&] { seen = value; });
    producer.synchronize(wait_);
    consumer.synchronize(wait_);
    stale += seen == 0 ? 1 : 0;
  }
  EXPECT_GT(stale, 0);
}

TEST_F(HostRuntimeTest, EventMarksWhatWasQueuedWhenItWasRecorded) {
  Stream stream(runtime_, "s");
  Event event(runtime_);
  EXPECT_TRUE(event.query());  // never recorded
  event.synchronize(wait_);
  event.record(stream.view());
  Gate gate;
  runtime_->enqueue(stream.view(), gate.task());
  event.synchronize(wait_);  // does not wait for later work
  event.record(stream.view());
  EXPECT_FALSE(event.query());
  gate.open();
  event.synchronize(wait_);
}

TEST_F(HostRuntimeTest, SynchronizeEndsAtItsDeadlineAndCallsTheHook) {
  Stream stream(runtime_, "stuck");
  Gate gate;
  runtime_->enqueue(stream.view(), gate.task());
  int calls = 0;
  Wait brief(180ms, [&] { ++calls; });
  try {
    stream.synchronize(brief);
    ADD_FAILURE();
  } catch (const TimeoutError& error) {
    EXPECT_NE(std::string(error.what()).find("stuck"), std::string::npos) << error.what();
  }
  EXPECT_GE(calls, 2);
  struct Interrupt {};
  Wait interrupted(30s, [] { throw Interrupt(); });
  EXPECT_THROW(stream.synchronize(interrupted), Interrupt);
  gate.open();
  stream.synchronize(wait_);
}

TEST_F(HostRuntimeTest, ErrorIsStickyAndSkipsLaterWork) {
  Stream stream(runtime_, "s");
  Event before(runtime_);
  before.record(stream.view());
  runtime_->enqueue(stream.view(), [] { throw DeviceError("kernel failed"); });
  std::atomic<bool> ran{false};
  runtime_->enqueue(stream.view(), [&] { ran = true; });
  Event after(runtime_);
  after.record(stream.view());
  EXPECT_THROW(stream.synchronize(wait_), DeviceError);
  EXPECT_THROW(stream.synchronize(wait_), DeviceError);
  EXPECT_THROW((void)after.query(), DeviceError);
  EXPECT_THROW(after.synchronize(wait_), DeviceError);
  EXPECT_NO_THROW(before.synchronize(wait_));  // the work that it marks was fine
  EXPECT_FALSE(ran);
}

TEST_F(HostRuntimeTest, ErrorCrossesToStreamsThatDependOnIt) {
  Stream failing(runtime_, "failing");
  Stream dependent(runtime_, "dependent");
  Stream bystander(runtime_, "bystander");
  Event event(runtime_);
  runtime_->enqueue(failing.view(), [] { throw DeviceError("kernel failed"); });
  event.record(failing.view());
  event.stream_wait(dependent.view());
  EXPECT_THROW(dependent.synchronize(wait_), DeviceError);
  EXPECT_NO_THROW(bystander.synchronize(wait_));
}

TEST_F(HostRuntimeTest, DestroyingAStreamCompletesItsWork) {
  int count = 0;
  Event event(runtime_);
  {
    Stream stream(runtime_, "s");
    for (int i = 0; i < 20; ++i) runtime_->enqueue(stream.view(), [&] { ++count; });
    event.record(stream.view());
  }
  EXPECT_EQ(count, 20);
  EXPECT_TRUE(event.query());  // outlives its stream
}

TEST_F(HostRuntimeTest, TaskIsFreedBeforeItCountsAsDone) {
  Stream stream(runtime_, "s");
  for (int i = 0; i < 50; ++i) {
    auto owned = std::make_shared<int>(i);
    const std::weak_ptr<int> watch = owned;
    runtime_->enqueue(stream.view(), [owned = std::move(owned)] {});
    stream.synchronize(wait_);
    EXPECT_TRUE(watch.expired());
  }
}

TEST_F(HostRuntimeTest, InlineStreamRunsOnTheCallerAtOnce) {
  Stream stream = runtime_->inline_stream();
  EXPECT_TRUE(runtime_->runs_inline(stream.view()));
  std::thread::id ran_on;
  runtime_->enqueue(stream.view(), [&] { ran_on = std::this_thread::get_id(); });
  EXPECT_EQ(ran_on, std::this_thread::get_id());
  Event event(runtime_);
  event.record(stream.view());
  EXPECT_TRUE(event.query());
  runtime_->enqueue(stream.view(), [] { throw DeviceError("failed"); });
  EXPECT_THROW(stream.synchronize(wait_), DeviceError);
}

TEST_F(HostRuntimeTest, InlineStreamCannotBeHeldBack) {
  Stream worker(runtime_, "worker");
  EXPECT_FALSE(runtime_->runs_inline(worker.view()));
  Stream here = runtime_->inline_stream();
  Gate gate;
  runtime_->enqueue(worker.view(), gate.task());
  Event event(runtime_);
  event.record(worker.view());
  EXPECT_THROW(event.stream_wait(here.view()), StateError);
  gate.open();
  event.synchronize(wait_);
  EXPECT_NO_THROW(event.stream_wait(here.view()));
}

TEST_F(HostRuntimeTest, ManyThreadsMayQueueOnOneStream) {
  Stream stream(runtime_, "s");
  std::uint64_t sum = 0;  // only touched on the stream
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) runtime_->enqueue(stream.view(), [&] { ++sum; });
    });
  }
  for (auto& thread : threads) thread.join();
  stream.synchronize(wait_);
  EXPECT_EQ(sum, 200U);
}

}  // namespace
}  // namespace fastsync
