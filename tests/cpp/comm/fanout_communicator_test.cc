// The fan-out over devices whose ranks are threads: the order that keeps a slot from being used too early, and that each
// rule of it, once broken, would show.
#include "comm/fanout/fanout_communicator.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/fake_wire.h"
#include "common/error.h"
#include "support/bounds.h"
#include "support/sanitizers.h"

namespace fastsync::testing {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kBucketBytes = 4096;
constexpr std::uint64_t kBuckets = 24;
// Ranks: 0 is the source and leads 1; 2 leads 3 and 4 on another device; 5 is alone on a third.
constexpr std::size_t kRanks = 6;
constexpr std::array<int, kRanks> kLeaderOf{0, 0, 2, 2, 2, 5};

// What the control connections carry.
class Released final : public HeaderChannel {
 public:
  void send(const BucketHeader& /*header*/) override {}
  void wait_released(std::uint64_t count, Wait& wait) override {
    while (least() < count) {
      wait.check();
      if (wait.expired()) throw TimeoutError("a rank does not release its buckets");
      std::this_thread::yield();
    }
    wait.progress();
  }
  [[nodiscard]] int slowest_receiver() const noexcept override {
    int slowest = 1;
    for (int rank = 2; rank < static_cast<int>(kRanks); ++rank) {
      if (counts_[static_cast<std::size_t>(rank)] < counts_[static_cast<std::size_t>(slowest)]) slowest = rank;
    }
    return slowest;
  }
  [[nodiscard]] BucketHeader receive(Wait& /*wait*/) override { throw InternalError("the wire has its own"); }
  [[nodiscard]] bool try_receive(BucketHeader& /*header*/) override { return false; }
  void report_released(std::uint64_t /*count*/) override {}
  void report(std::size_t rank, std::uint64_t count) { counts_[rank] = count; }

 private:
  [[nodiscard]] std::uint64_t least() const { return counts_[static_cast<std::size_t>(slowest_receiver())]; }
  std::array<std::atomic<std::uint64_t>, kRanks> counts_{};
};

class Fanout {
 public:
  explicit Fanout(std::uint32_t buffers, std::uint64_t seed = 1, bool shares_events = true) : buffers_(buffers) {
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      const std::string id = std::string("device of ") + std::to_string(kLeaderOf[rank]);
      devices_.push_back(std::make_unique<RankDevice>(SharedDevice::create(seed * 100 + rank, shares_events, id)));
    }
    rings_[0] = lead(0, {1});
    rings_[2] = lead(2, {3, 4});
    lonely_.resize(buffers * kBucketBytes);
    const auto wire = std::make_shared<FakeWire>(2);
    comms_[0] = over(wire, 0, 0, rings_[0]);
    comms_[2] = over(wire, 1, 2, rings_[2]);
    comms_[5] = over(wire, 2, 5, nullptr);
    for (std::size_t rank = 0; rank < kRanks; ++rank) comms_[rank]->bind_stream(devices_[rank]->caller.view());
  }
  // Queued work uses the rings and events.
  ~Fanout() {
    for (auto& comm : comms_) comm->abort();
    for (auto& device : devices_) {
      Wait wait(kLongTimeout, nullptr);
      device->caller.synchronize(wait);
    }
  }

  // How much a rank's stream has to do before it reads a bucket.
  std::array<int, kRanks> busy{};

  [[nodiscard]] Communicator& comm(std::size_t rank) { return *comms_[rank]; }
  [[nodiscard]] SharedDevice& device(std::size_t rank) { return *devices_[rank]->runtime; }
  [[nodiscard]] Released& released() { return released_; }

  void reset_all() {
    for (auto& comm : comms_) comm->reset(epoch_);
    ++epoch_;
    for (std::size_t rank = 1; rank < kRanks; ++rank) released_.report(rank, 0);
  }
  // Sends kBuckets from the source; true: every rank read each of them as it was sent.
  [[nodiscard]] bool sync() {
    reset_all();
    std::vector<std::future<bool>> receivers;
    for (std::size_t rank = 1; rank < kRanks; ++rank) {
      receivers.push_back(std::async(std::launch::async, [this, rank] { return receive_all(rank); }));
    }
    send_all();
    bool right = true;
    for (auto& receiver : receivers) right = receiver.get() && right;
    return right;
  }
  [[nodiscard]] int wrong_rounds(int rounds) {
    int wrong = 0;
    for (int i = 0; i < rounds; ++i) wrong += sync() ? 0 : 1;
    return wrong;
  }
  void send_one(std::uint64_t index, Wait& wait) {
    const BucketSlot slot = comm(0).acquire(wait);
    devices_[0]->runtime->enqueue(devices_[0]->caller.view(), [slot, value = value_of(index)] {
      std::memset(slot.data, static_cast<int>(value), kBucketBytes);
    });
    BucketHeader header;
    header.index = index;
    header.used_bytes = kBucketBytes;
    comm(0).send(slot, header, wait);
  }

 private:
  [[nodiscard]] std::shared_ptr<IpcCommunicator> lead(std::size_t rank, const std::vector<int>& followers) {
    std::shared_ptr<IpcCommunicator> ring =
        IpcCommunicator::create(devices_[rank]->runtime, buffers_, kBucketBytes, followers, static_cast<int>(rank));
    std::uint32_t index = 0;
    for (const int follower : followers) {
      auto reader = IpcCommunicator::attach(devices_[static_cast<std::size_t>(follower)]->runtime, ring->describe(),
                                            ring->control_fd(), ring->data_fd(), index);
      ring->add_reader(index++, reader->reader_events());
      comms_[static_cast<std::size_t>(follower)] = std::move(reader);
    }
    return ring;
  }
  [[nodiscard]] std::shared_ptr<Communicator> over(const std::shared_ptr<FakeWire>& wire, std::size_t number,
                                                   std::size_t rank, std::shared_ptr<IpcCommunicator> ring) {
    std::byte* const memory = ring ? ring->buckets().data : lonely_.data();
    auto end = std::make_shared<FakeWireEnd>(wire, number, devices_[rank]->runtime, memory, buffers_, kBucketBytes);
    const StreamView stream = end->stream();
    const auto role = number == 0 ? FanoutCommunicator::Role::kSource : FanoutCommunicator::Role::kLeader;
    return std::make_shared<FanoutCommunicator>(role, std::move(end), stream, std::move(ring), released_);
  }
  [[nodiscard]] std::uint8_t value_of(std::uint64_t index) const {
    return static_cast<std::uint8_t>(epoch_ * 31 + index * 7 + 1);
  }
  void send_all() {
    Wait wait(kLongTimeout, nullptr);
    for (std::uint64_t i = 0; i < kBuckets; ++i) send_one(i, wait);
    comm(0).flush(wait);
  }
  [[nodiscard]] bool receive_all(std::size_t rank) {
    Wait wait(kLongTimeout, nullptr);
    RankDevice& device = *devices_[rank];
    std::vector<std::vector<std::byte>> got(kBuckets, std::vector<std::byte>(kBucketBytes));
    for (std::uint64_t i = 0; i < kBuckets; ++i) {
      BucketHeader header;
      const BucketSlot slot = comm(rank).receive(header, wait);
      if (header.index != i || header.used_bytes != kBucketBytes) return false;
      // Each of these starts after a random pause.
      for (int n = 0; n < busy[rank]; ++n) device.runtime->enqueue(device.caller.view(), [] {});
      device.runtime->copy(got[i].data(), slot.data, kBucketBytes, device.caller.view());
      comm(rank).release(slot);
      released_.report(rank, i + 1);
    }
    device.caller.synchronize(wait);
    for (std::uint64_t i = 0; i < kBuckets; ++i) {
      for (const std::byte b : got[i]) {
        if (b != std::byte{value_of(i)}) return false;
      }
    }
    return true;
  }

  std::uint32_t buffers_;
  std::uint64_t epoch_ = 1;
  Released released_;
  std::vector<std::unique_ptr<RankDevice>> devices_;
  std::array<std::shared_ptr<IpcCommunicator>, kRanks> rings_;
  std::vector<std::byte> lonely_;
  std::array<std::shared_ptr<Communicator>, kRanks> comms_;
};

constexpr int kRounds = 15;

TEST(FanoutCommunicator, EveryRankReadsEveryBucketAsItWasSent) {
  for (const std::uint32_t buffers : {1U, 2U, 3U}) {
    Fanout fanout(buffers, buffers);
    EXPECT_EQ(fanout.wrong_rounds(kRounds), 0) << buffers << " buffers";
    fanout.busy = {0, 10, 0, 0, 10, 0};
    EXPECT_EQ(fanout.wrong_rounds(3), 0) << buffers << " buffers, slow followers";
  }
}

TEST(FanoutCommunicator, OrdersItsBucketsByTheHostsWhereEventsCannotBeShared) {
  Fanout fanout(2, 1, false);
  EXPECT_EQ(fanout.wrong_rounds(kRounds), 0);
}

TEST(FanoutCommunicator, ASteadySyncMakesNothing) {
  Fanout fanout(2);
  ASSERT_TRUE(fanout.sync());
  std::vector<std::array<int, 3>> before;
  const auto made = [&](std::size_t rank) {
    const SharedDevice& device = fanout.device(rank);
    return std::array<int, 3>{device.allocations, device.streams, device.events};
  };
  for (std::size_t rank = 0; rank < kRanks; ++rank) before.push_back(made(rank));
  EXPECT_EQ(fanout.wrong_rounds(3), 0);
  for (std::size_t rank = 0; rank < kRanks; ++rank) EXPECT_EQ(made(rank), before[rank]) << "rank " << rank;
}

// Planted: the leader's wire fills a slot before its followers have read what was in it.
TEST(FanoutCommunicator, ASlotThatTheLeaderReusesTooEarlyWouldShow) {
  SKIP_PLANTED_RACE();
  Fanout fanout(2);
  ASSERT_TRUE(fanout.sync());
  fanout.busy[3] = 10;
  fanout.device(2).forget.stream_wait = [&](void* event) { return fanout.device(2).is_imported(event); };
  EXPECT_GT(fanout.wrong_rounds(kRounds), 0);
}

// Planted: the same at the source, whose packing is what comes too early.
TEST(FanoutCommunicator, ASlotThatTheSourceReusesTooEarlyWouldShow) {
  SKIP_PLANTED_RACE();
  Fanout fanout(2);
  ASSERT_TRUE(fanout.sync());
  fanout.busy[1] = 10;
  fanout.device(0).forget.stream_wait = [&](void* event) { return fanout.device(0).is_imported(event); };
  EXPECT_GT(fanout.wrong_rounds(kRounds), 0);
}

// Planted: one of two followers never says on its stream that it has read.
TEST(FanoutCommunicator, ASlotThatIsReusedBeforeAllFollowersAreDoneWouldShow) {
  SKIP_PLANTED_RACE();
  Fanout fanout(2);
  fanout.busy[4] = 10;
  fanout.device(4).forget.event_record = [&](void* event) { return fanout.device(4).is_exported(event); };
  EXPECT_GT(fanout.wrong_rounds(kRounds), 0);
}

// Planted: a follower does not wait until the wire has brought the bucket.
TEST(FanoutCommunicator, ABucketThatAFollowerReadsTooEarlyWouldShow) {
  SKIP_PLANTED_RACE();
  Fanout fanout(2);
  fanout.device(3).forget.stream_wait = [&](void* event) { return fanout.device(3).is_imported(event); };
  EXPECT_GT(fanout.wrong_rounds(kRounds), 0);
}

// The source lends no slot that a rank anywhere still holds, and says which rank that is.
TEST(FanoutCommunicator, TheSourceIsAtMostTheRingAheadOfTheSlowestRank) {
  for (const std::size_t slow : {std::size_t{1}, std::size_t{3}, std::size_t{5}}) {
    Fanout fanout(2);
    fanout.reset_all();
    Wait wait(300ms, nullptr);
    fanout.send_one(0, wait);
    fanout.send_one(1, wait);
    for (std::size_t rank = 1; rank < kRanks; ++rank) {
      if (rank != slow) fanout.released().report(rank, 1);
    }
    EXPECT_THROW(fanout.send_one(2, wait), TimeoutError);
    EXPECT_EQ(fanout.comm(0).waiting_for(), static_cast<int>(slow));
  }
}

TEST(FanoutCommunicator, ALeaderNamesTheFollowerThatHoldsItUp) {
  Fanout fanout(1);
  fanout.reset_all();
  Wait wait(300ms, nullptr);
  fanout.send_one(0, wait);
  BucketHeader header;
  const BucketSlot slot = fanout.comm(2).receive(header, wait);
  EXPECT_EQ(fanout.comm(2).waiting_for(), -1);
  fanout.comm(2).release(slot);
  const BucketSlot read = fanout.comm(3).receive(header, wait);
  fanout.comm(3).release(read);
  EXPECT_THROW((void)fanout.comm(2).receive(header, wait), TimeoutError);  // rank 4 has not
  EXPECT_EQ(fanout.comm(2).waiting_for(), 4);
}

TEST(FanoutCommunicator, AbortWakesTheLeaderAndMakesItsFollowersLookUp) {
  Fanout fanout(1);
  fanout.reset_all();
  std::atomic<int> looked{0};
  auto follower = std::async(std::launch::async, [&] {
    Wait wait(kLongTimeout, [&] {
      if (++looked > 0) throw PeerFailedError("as the control connection says", 2);
    });
    BucketHeader header;
    EXPECT_THROW((void)fanout.comm(3).receive(header, wait), PeerFailedError);
  });
  auto leader = std::async(std::launch::async, [&] {
    Wait wait(kLongTimeout, nullptr);
    BucketHeader header;
    EXPECT_THROW((void)fanout.comm(2).receive(header, wait), StateError);
  });
  fanout.comm(2).abort();
  EXPECT_EQ(leader.wait_for(5s), std::future_status::ready);
  EXPECT_EQ(follower.wait_for(5s), std::future_status::ready);
}

TEST(FanoutCommunicator, CallsOfTheOtherSideAreRefused) {
  Fanout fanout(1);
  fanout.reset_all();
  Wait wait(300ms, nullptr);
  BucketHeader header;
  EXPECT_THROW((void)fanout.comm(2).acquire(wait), StateError);
  EXPECT_THROW((void)fanout.comm(0).receive(header, wait), StateError);
}

TEST(FanoutCommunicator, ARingAndAWireOfDifferentSizesAreRefused) {
  const auto device = SharedDevice::create(1);
  std::shared_ptr<IpcCommunicator> ring = IpcCommunicator::create(device, 2, kBucketBytes, {1}, 0);
  auto end = std::make_shared<FakeWireEnd>(std::make_shared<FakeWire>(1), 0, device, ring->buckets().data, 2, 256);
  Released channel;
  EXPECT_THROW(FanoutCommunicator(FanoutCommunicator::Role::kSource, end, end->stream(), ring, channel),
               InvalidArgument);
}

// A legacy handle maps whole blocks of 2 MiB, and with them whatever else lies there.
TEST(IpcCommunicator, ItsRingIsWholeBlocksThatHoldNothingElse) {
  const auto device = SharedDevice::create(1);
  for (const std::uint64_t bucket_bytes :
       {std::uint64_t{256}, std::uint64_t{1} << 20, (std::uint64_t{1} << 20) + 256}) {
    const auto ring = IpcCommunicator::create(device, 2, bucket_bytes, {1}, 0);
    EXPECT_EQ(ring->describe().memory.nbytes % (2 << 20), 0U);
    EXPECT_EQ(ring->buckets().nbytes, 2 * bucket_bytes);
    EXPECT_LE(ring->staging_bytes(), 2 * bucket_bytes + (1 << 20));
  }
}

}  // namespace
}  // namespace fastsync::testing
