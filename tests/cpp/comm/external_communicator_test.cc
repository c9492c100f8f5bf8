// What is particular to a broadcast driven through callbacks: overlap, credit, and the rule that every rank starts
// exactly what the source announced.
#include "comm/external/external_communicator.h"

#include <gtest/gtest.h>

#include "rank_group.h"

namespace fastsync::testing {
namespace {

using Role = ExternalCommunicator::Role;
constexpr std::uint64_t kBucketBytes = 4096;

// One receiver, driven by hand: headers come from a list, broadcasts are complete when the test says so.
class ByHand final : public HeaderChannel {
 public:
  void send(const BucketHeader& header) override { sent.push_back(header); }
  void wait_released(std::uint64_t count, Wait&) override {
    if (released < count) throw TimeoutError(concat("rank 11 has not released bucket ", count - 1), 11);
  }
  [[nodiscard]] int slowest_receiver() const noexcept override { return 11; }
  [[nodiscard]] BucketHeader receive(Wait&) override {
    BucketHeader header;
    if (!try_receive(header)) throw TimeoutError("rank 10 announces no bucket", 10);
    return header;
  }
  [[nodiscard]] bool try_receive(BucketHeader& header) override {
    if (announced.empty()) return false;
    header = announced.front();
    announced.pop_front();
    return true;
  }
  void report_released(std::uint64_t count) override { released = count; }

  void announce(std::uint64_t index, std::uint64_t used_bytes) {
    BucketHeader header;
    header.index = index;
    header.used_bytes = used_bytes;
    announced.push_back(header);
  }
  [[nodiscard]] ExternalOps ops() {
    return {[this](std::byte* data, std::uint64_t nbytes) {
              if (start_fails) throw CommError("start failed");
              started.emplace_back(data, nbytes);
              return started.size() - 1;
            },
            [this](std::uint64_t handle, std::chrono::milliseconds) {
              if (wait_fails) throw CommError("broadcast failed");
              waited.push_back(handle);
              if (on_wait) on_wait();
              return handle < completed;
            },
            [this](std::uint64_t handle) { dropped.push_back(handle); }};
  }

  std::deque<BucketHeader> announced;
  std::vector<BucketHeader> sent;
  std::uint64_t released = 0;
  std::vector<std::pair<std::byte*, std::uint64_t>> started;
  std::uint64_t completed = 0;
  std::vector<std::uint64_t> waited;
  std::vector<std::uint64_t> dropped;
  std::function<void()> on_wait;
  bool start_fails = false;
  bool wait_fails = false;
};

class ExternalReceiver : public ::testing::Test {
 protected:
  ByHand hand_;
  ExternalCommunicator receiver_{Role::kReceiver, "fake", 2, kBucketBytes, hand_.ops(), hand_, 10};
  Wait wait_{kLongTimeout, nullptr};
  Wait brief_{30ms, nullptr};
  BucketHeader header_;
};

TEST_F(ExternalReceiver, StartsEveryAnnouncedBroadcastItHasABucketFor) {
  for (std::uint64_t i = 0; i < 4; ++i) hand_.announce(i, 100 + i);
  hand_.completed = 1;
  const BucketSlot first = receiver_.receive(header_, wait_);
  EXPECT_EQ(hand_.started.size(), 2U);  // bucket 1 travels while bucket 0 is unpacked
  EXPECT_EQ(hand_.started[0].second, 100U);
  EXPECT_EQ(hand_.started[1].second, 101U);
  receiver_.release(first);
  EXPECT_EQ(hand_.started.size(), 3U);  // release starts the next one
  EXPECT_EQ(hand_.started[2].first, hand_.started[0].first);
  EXPECT_EQ(hand_.released, 1U);
}

TEST_F(ExternalReceiver, StartsWhatIsAnnouncedWhileItWaits) {
  hand_.announce(0, 100);
  hand_.on_wait = [&] {
    if (hand_.waited.size() == 2) hand_.announce(1, 200);
    if (hand_.waited.size() == 4) hand_.completed = 1;
  };
  (void)receiver_.receive(header_, wait_);
  EXPECT_EQ(hand_.started.size(), 2U);
}

TEST_F(ExternalReceiver, RefusesHeadersThatCannotBe) {
  for (const auto& [index, used] : {std::pair<std::uint64_t, std::uint64_t>{1, 8}, {0, kBucketBytes + 1}}) {
    ByHand hand;
    ExternalCommunicator receiver(Role::kReceiver, "fake", 2, kBucketBytes, hand.ops(), hand, 10);
    hand.announce(index, used);
    try {
      (void)receiver.receive(header_, wait_);
      FAIL();
    } catch (const CommError& error) {
      EXPECT_EQ(error.rank(), 10) << error.what();
    }
    EXPECT_TRUE(hand.started.empty());
    EXPECT_THROW((void)receiver.receive(header_, wait_), CommError);  // kept
  }
}

TEST_F(ExternalReceiver, DrainStartsAndFinishesExactlyWhatWasAnnounced) {
  for (std::uint64_t i = 0; i < 5; ++i) hand_.announce(i, i == 3 ? 0 : 64);
  EXPECT_THROW((void)receiver_.receive(header_, brief_), TimeoutError);
  hand_.completed = 5;
  receiver_.drain(wait_);
  EXPECT_EQ(hand_.started.size(), 4U);  // the empty one needs none
  EXPECT_EQ(hand_.dropped.size(), 4U);
  EXPECT_NO_THROW(receiver_.reset(1));
  hand_.announce(0, 8);
  EXPECT_NO_THROW((void)receiver_.receive(header_, wait_));
}

TEST_F(ExternalReceiver, IgnoresABucketThatDrainTookBack) {
  hand_.announce(0, 64);
  hand_.completed = 1;
  const BucketSlot slot = receiver_.receive(header_, wait_);
  receiver_.drain(wait_);
  EXPECT_NO_THROW(receiver_.release(slot));
}

TEST_F(ExternalReceiver, RefusesToResetUnderABroadcastInFlight) {
  hand_.announce(0, 64);
  EXPECT_THROW((void)receiver_.receive(header_, brief_), TimeoutError);
  EXPECT_THROW(receiver_.reset(1), StateError);
}

TEST_F(ExternalReceiver, KeepsTheErrorOfABroadcast) {
  hand_.announce(0, 64);
  hand_.wait_fails = true;
  EXPECT_THROW((void)receiver_.receive(header_, wait_), CommError);
  hand_.wait_fails = false;
  hand_.completed = 1;
  EXPECT_THROW((void)receiver_.receive(header_, wait_), CommError);
}

TEST(ExternalSource, IsHeldBackByWhatTheReceiversReleased) {
  ByHand hand;
  hand.completed = 100;  // the transport would take anything
  ExternalCommunicator source(Role::kSource, "fake", 2, kBucketBytes, hand.ops(), hand);
  Wait wait(kLongTimeout, nullptr);
  for (std::uint64_t i = 0; i < 3; ++i) send_one(source, 1, i, wait);
  EXPECT_THROW((void)source.acquire(wait), TimeoutError);
}

TEST(ExternalSource, DropsWhatItLeavesInFlightAndKeepsItsMemoryForTheLibrary) {
  ByHand hand;
  std::shared_ptr<const Buffer> memory;
  {
    ExternalCommunicator source(Role::kSource, "fake", 2, kBucketBytes, hand.ops(), hand);
    Wait wait(kLongTimeout, nullptr);
    send_one(source, 0, 0, wait);
    memory = source.owned_memory();
  }
  EXPECT_EQ(hand.dropped, std::vector<std::uint64_t>{0});
  std::memset(memory->data(), 0, memory->nbytes());  // still there
}

TEST(ExternalSource, FailureToStartIsKept) {
  ByHand hand;
  hand.start_fails = true;
  ExternalCommunicator source(Role::kSource, "fake", 2, kBucketBytes, hand.ops(), hand);
  Wait wait(kLongTimeout, nullptr);
  EXPECT_THROW(send_one(source, 0, 0, wait), CommError);
  hand.start_fails = false;
  EXPECT_THROW((void)source.acquire(wait), CommError);
}

TEST(ExternalCommunicator, RefusesWhatItCannotWorkWith) {
  ByHand hand;
  ExternalOps incomplete = hand.ops();
  incomplete.drop = nullptr;
  EXPECT_THROW(ExternalCommunicator(Role::kSource, "fake", 2, 4096, incomplete, hand), InvalidArgument);
  EXPECT_THROW(ExternalCommunicator(Role::kSource, "fake", 0, 4096, hand.ops(), hand), InvalidArgument);
  EXPECT_THROW(ExternalCommunicator(Role::kSource, "fake", 2, 100, hand.ops(), hand), InvalidArgument);
  EXPECT_THROW(ExternalCommunicator(Role::kSource, "fake", 2, std::uint64_t{1} << 40, hand.ops(), hand), DeviceError);
}

TEST(ExternalCommunicator, EveryRankStartsAsManyBroadcastsAsTheSourceAlsoAfterAFailure) {
  ExternalGroup group(2, kBucketBytes, 2);
  group.reset_all(1, 2);
  Wait wait(kLongTimeout, nullptr);
  // Receiver 0 fails at bucket 1; the source is three buckets on, receiver 1 has seen nothing.
  auto failing = start_rank([&] {
    Wait own(kLongTimeout, nullptr);
    group.receiver(0).release(receive_one(group.receiver(0), 1, 0, own));
    (void)receive_one(group.receiver(0), 1, 1, own);
  });
  auto late = start_rank([&] {
    Wait own(kLongTimeout, nullptr);
    group.receiver(1).release(receive_one(group.receiver(1), 1, 0, own));
    group.receiver(1).release(receive_one(group.receiver(1), 1, 1, own));
  });
  for (std::uint64_t i = 0; i < 3; ++i) send_one(group.source(), 1, i, wait);
  EXPECT_NO_THROW(failing.get());
  EXPECT_NO_THROW(late.get());
  auto drain0 = start_rank([&] {
    Wait own(kLongTimeout, nullptr);
    group.receiver(0).drain(own);
  });
  auto drain1 = start_rank([&] {
    Wait own(kLongTimeout, nullptr);
    group.receiver(1).drain(own);
  });
  group.source().drain(wait);
  EXPECT_NO_THROW(drain0.get());
  EXPECT_NO_THROW(drain1.get());
  EXPECT_EQ(group.broadcast().started(1), group.broadcast().started(0));
  EXPECT_EQ(group.broadcast().started(2), group.broadcast().started(0));
}

}  // namespace
}  // namespace fastsync::testing
