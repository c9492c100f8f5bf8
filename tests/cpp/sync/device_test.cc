// The protocol over a device: what its streams keep in order, what a steady sync costs, and that the bugs that code for a
// device is prone to would show. The whole suite runs over a device as well: "ipc" in weight_sync_test.cc, faults_test.cc.
#include <gtest/gtest.h>

#include <cstring>

#include "comm/ipc/ipc_communicator.h"
#include "sync/group.h"

namespace fastsync::testing {
namespace {

constexpr int kRounds = 25;
constexpr int kBusy = 40;

// A group whose ranks are threads on one device. `weights` are written by the caller's stream, behind whatever it does.
class DeviceGroup {
 public:
  explicit DeviceGroup(int receivers, bool shares_events = true) : group_("ipc", receivers) {
    if (shares_events) return;
    std::vector<std::unique_ptr<RankDevice>> devices;
    for (int i = 0; i <= receivers; ++i) {
      devices.push_back(std::make_unique<RankDevice>(SharedDevice::create(static_cast<std::uint64_t>(i), false)));
    }
    group_.groups().use_devices(std::move(devices));
  }
  [[nodiscard]] Group& group() { return group_; }
  [[nodiscard]] RankDevice& rank(int index) { return *group_.groups().device(index); }

  // One sync of weights that the source's stream fills when it gets there. True: every byte arrived, on every rank.
  [[nodiscard]] bool sync(std::uint64_t version) {
    Weights wanted = weights_of({3000, 1024, 5000, 100, 2048, 700}, version);
    Weights sent = wanted;
    for (Bytes& bytes : sent.data) std::fill(bytes.begin(), bytes.end(), std::byte{0x11});
    RankDevice& source = rank(0);
    // Busy: each of these starts after a random pause.
    for (int i = 0; i < kBusy; ++i) source.runtime->enqueue(source.caller.view(), [] {});
    source.runtime->enqueue(source.caller.view(), [&] {
      for (std::size_t i = 0; i < sent.data.size(); ++i) {
        std::memcpy(sent.data[i].data(), wanted.data[i].data(), wanted.data[i].size());
      }
    });
    std::vector<Destinations> into(static_cast<std::size_t>(group_.size()), Destinations::like(wanted));
    std::vector<std::future<Outcome>> got;
    for (int i = 0; i < group_.size(); ++i) {
      got.push_back(group_.start_receiver(i, {.into = &into[static_cast<std::size_t>(i)]}));
    }
    SourceCall call{.weights = &sent};
    call.options.version = version;
    bool right = get(group_.start_source(call)).ok;
    for (std::size_t i = 0; i < got.size(); ++i) {
      right = get(std::move(got[i])).ok && right;
      right = right && into[i].hold(wanted);
    }
    Wait wait(kLongTimeout, nullptr);
    source.caller.synchronize(wait);  // `sent` is on this thread's stack
    return right;
  }
  // In how many of kRounds something was wrong.
  [[nodiscard]] int wrong_rounds() {
    int wrong = 0;
    for (int round = 1; round <= kRounds; ++round) wrong += sync(static_cast<std::uint64_t>(round)) ? 0 : 1;
    return wrong;
  }

 private:
  Group group_;
};

TEST(Device, SendsWhatTheCallersStreamWrites) {
  DeviceGroup ranks(2);
  EXPECT_EQ(ranks.wrong_rounds(), 0);
}

TEST(Device, OrdersItsBucketsByTheHostsWhereEventsCannotBeShared) {
  DeviceGroup ranks(2, false);
  EXPECT_EQ(ranks.wrong_rounds(), 0);
}

// Planted: the packing does not wait for the stream that makes the weights.
TEST(Device, AMissingWaitForTheCallersStreamWouldShow) {
  SKIP_PLANTED_RACE();
  DeviceGroup ranks(1);
  // DevicePacker::begin() is the first to hold a stream back in each sync.
  std::atomic<int> waits{0};
  ranks.rank(0).runtime->forget.stream_wait = [&](void*) { return waits.fetch_add(1) == 0; };
  int wrong = 0;
  for (int round = 1; round <= kRounds; ++round) {
    waits = 0;
    wrong += ranks.sync(static_cast<std::uint64_t>(round)) ? 0 : 1;
  }
  EXPECT_GT(wrong, 0);
}

// Planted: the source does not wait until the readers' streams have read the slot.
TEST(Device, ASlotThatIsReusedTooEarlyWouldShow) {
  SKIP_PLANTED_RACE();
  DeviceGroup ranks(1);
  ASSERT_TRUE(ranks.sync(1));
  ranks.rank(0).runtime->forget.stream_wait = [&](void* event) { return ranks.rank(0).runtime->is_imported(event); };
  EXPECT_GT(ranks.wrong_rounds(), 0);
}

// Planted: one of two readers never says on its stream that it has read; the other one does.
TEST(Device, ASlotThatIsReusedBeforeAllReadersAreDoneWouldShow) {
  SKIP_PLANTED_RACE();
  DeviceGroup ranks(2);
  ranks.rank(2).runtime->forget.event_record = [&](void* event) { return ranks.rank(2).runtime->is_exported(event); };
  EXPECT_GT(ranks.wrong_rounds(), 0);
}

// Planted: the readers do not wait for the packing.
TEST(Device, ABucketThatIsReadTooEarlyWouldShow) {
  SKIP_PLANTED_RACE();
  DeviceGroup ranks(1);
  ranks.rank(1).runtime->forget.stream_wait = [&](void* event) { return ranks.rank(1).runtime->is_imported(event); };
  EXPECT_GT(ranks.wrong_rounds(), 0);
}

// A generator that refills one scratch tensor: its stream runs behind the packing of the item before.
TEST(Device, IsDoneWithAnItemBeforeTheCallersStreamRefillsIt) {
  Group group("ipc", 1);
  RankDevice& source = *group.groups().device(0);
  for (std::uint64_t version = 1; version <= 5; ++version) {
    Weights wanted = weights_of({2000, 2000, 2000, 2000, 2000}, version);
    Weights sent = wanted;
    Bytes scratch(2000);
    SourceCall call{.weights = &sent, .streaming = true};
    call.options.version = version;
    const auto refill = [&](std::size_t item) {
      source.runtime->enqueue(source.caller.view(), [&wanted, &scratch, item] {
        std::memcpy(scratch.data(), wanted.data[item].data(), scratch.size());
      });
    };
    // Every item is the same memory.
    auto into = Destinations::like(wanted);
    auto got = group.start_receiver(0, {.into = &into});
    const Outcome outcome = get(std::async(std::launch::async, [&] {
      return run_call(group.sender(), kSource, [&](Outcome&) {
        WeightSender& sender = group.sender();
        sender.open(kLongTimeout, nullptr);
        sender.use_device(source.runtime, source.caller.view().handle());
        (void)sender.join("auto", {"ipc"});
        (void)sender.begin(call.options, nullptr, true);
        for (std::size_t i = 0; i < wanted.metas.size(); ++i) {
          refill(i);
          TensorView view;
          view.data = scratch.data();
          view.nbytes = scratch.size();
          sender.push(wanted.metas[i], view, source.caller.view().handle());
        }
        (void)sender.finish_stream();
        (void)sender.commit();
      });
    }));
    EXPECT_TRUE(outcome.ok) << outcome;
    EXPECT_TRUE(get(std::move(got)).ok);
    EXPECT_TRUE(into.hold(wanted)) << "version " << version;
  }
}

// By count: one launch a bucket on either side, and nothing made.
TEST(Device, ASteadySyncLaunchesOnceABucketAndMakesNothing) {
  Group group("ipc", 2);
  Weights weights = some_weights(1);
  const auto plan = weights.plan(1024);
  std::vector<Destinations> into(2, Destinations::like(weights));
  struct Made {
    int allocations, streams, events, launches;
  };
  const auto made = [&](int rank) {
    const auto& device = *group.groups().device(rank)->runtime;
    return Made{device.allocations, device.streams, device.events, device.launches};
  };
  std::vector<Made> before(3);
  constexpr int kSyncs = 6;
  for (int version = 1; version <= kSyncs; ++version) {
    if (version == 3) {
      for (int rank = 0; rank < 3; ++rank) before[static_cast<std::size_t>(rank)] = made(rank);
    }
    SourceCall call{.weights = &weights, .plan = plan};
    call.options.version = static_cast<std::uint64_t>(version);
    auto a = group.start_receiver(0, {.into = &into[0]});
    auto b = group.start_receiver(1, {.into = &into[1]});
    ASSERT_TRUE(get(group.start_source(call)).ok);
    ASSERT_TRUE(get(std::move(a)).ok);
    ASSERT_TRUE(get(std::move(b)).ok);
  }
  const int buckets = static_cast<int>(plan->buckets.buckets.size());
  for (int rank = 0; rank < 3; ++rank) {
    const Made then = before[static_cast<std::size_t>(rank)];
    const Made now = made(rank);
    EXPECT_EQ(now.allocations, then.allocations) << "rank " << rank;
    EXPECT_EQ(now.streams, then.streams) << "rank " << rank;
    EXPECT_EQ(now.events, then.events) << "rank " << rank;
    EXPECT_LE(now.launches - then.launches, (kSyncs - 2) * buckets) << "rank " << rank;
  }
}

// What is shared is given back when the sessions end.
TEST(Device, LeavesNothingBehind) {
  std::vector<std::shared_ptr<SharedDevice>> devices;
  {
    Group group("ipc", 2);
    for (int rank = 0; rank < 3; ++rank) devices.push_back(group.groups().device(rank)->runtime);
    group.sync_again(5);
    Weights weights = some_weights(1);
    SourceCall call{.weights = &weights, .options = {.version = 2000, .bucket_bytes = 4096}};
    group.sync(call);
    for (int i = 0; i < 2; ++i) group.receiver(i).close(false);
    group.sender().close(false);
  }
  // The last one to close lets go of what was kept for the others; another ring looks after it.
  (void)IpcCommunicator::create(devices[0], 2, 1024, {1}, 0);
  for (const auto& device : devices) {
    EXPECT_EQ(device->live_allocations, 0);
    EXPECT_EQ(device->live_imports, 0);
    EXPECT_EQ(device->live_events, 0);
  }
}

}  // namespace
}  // namespace fastsync::testing
