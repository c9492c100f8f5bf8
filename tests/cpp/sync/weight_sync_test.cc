// Syncs that succeed: every byte under its name on every receiver, plans made once, generators that change.
#include <sys/mman.h>

#include <fstream>
#include <sstream>

#include "group.h"
#include "support/process.h"

namespace fastsync::testing {
namespace {

using namespace std::chrono_literals;

class Sync : public EveryTransport {};

TEST_P(Sync, DeliversEveryByteToEveryReceiver) {
  for (const int receivers : {1, 2, 3}) {
    Group group(GetParam(), receivers);
    Weights weights = some_weights(1);
    group.sync({.weights = &weights});
  }
}

TEST_P(Sync, DeliversBucketByBucketToACalleeThatPulls) {
  Group group(GetParam(), 2);
  Weights weights = some_weights(1);
  group.sync({.weights = &weights}, true);
}

TEST_P(Sync, WorksWithoutChecksumsAndWithManyBuffers) {
  Group group(GetParam(), 2);
  Weights weights = some_weights(2);
  SourceCall call{.weights = &weights};
  call.options.verify = false;
  call.options.buffers = 7;
  group.sync(call);
}

TEST_P(Sync, NeedsNoManifestForAPlanThatEverybodyHolds) {
  Group group(GetParam(), 2);
  for (std::uint64_t round = 1; round <= 3; ++round) {
    Weights weights = some_weights(round);
    SourceCall call{.weights = &weights, .plan = weights.plan(1024)};
    call.options.version = round;
    auto into = Destinations::like(weights);
    auto also_into = Destinations::like(weights);
    auto a = group.start_receiver(0, {.into = &into});
    auto b = group.start_receiver(1, {.into = &also_into, .pull = true});
    const Outcome sent = get(group.start_source(call));
    const Outcome got = get(std::move(a));
    const Outcome also_got = get(std::move(b));
    ASSERT_TRUE(sent.ok && got.ok && also_got.ok) << sent << "; " << got << "; " << also_got;
    EXPECT_EQ(sent.reused, round > 1);
    EXPECT_EQ(got.reused, round > 1);
    EXPECT_EQ(also_got.reused, round > 1);
    EXPECT_EQ(got.buckets, sent.buckets);
    EXPECT_EQ(got.version, round);
    EXPECT_TRUE(into.hold(weights));
    EXPECT_TRUE(also_into.hold(weights));
  }
}

TEST_P(Sync, TakesAnotherBucketSizeForAKnownManifest) {
  Group group(GetParam(), 2);
  std::uint64_t version = 0;
  for (const std::uint64_t bucket_bytes : {1024, 256, 4096, 4096, 1024, 1 << 20}) {
    Weights weights = some_weights(++version);
    SourceCall call{.weights = &weights};
    call.options.version = version;
    call.options.bucket_bytes = bucket_bytes;
    group.sync(call);
  }
}

TEST_P(Sync, RemembersAFewManifestsAndRelearnsTheOthers) {
  Group group(GetParam(), 1);
  std::uint64_t version = 0;
  for (int round = 0; round < 2; ++round) {
    for (std::uint64_t shape = 1; shape <= PlanCache::kCapacity + 2; ++shape) {
      Weights weights = weights_of({shape * 10, 300, shape}, ++version);
      SourceCall call{.weights = &weights};
      call.options.version = version;
      group.sync(call);
    }
  }
}

TEST_P(Sync, CommitsAnEmptyManifestAndOneOfEmptyTensors) {
  Group group(GetParam(), 2);
  std::uint64_t version = 0;
  for (int round = 0; round < 2; ++round) {
    for (const std::vector<std::uint64_t>& sizes : {std::vector<std::uint64_t>{}, {0}, {0, 0, 0}, {0, 5, 0}}) {
      for (const bool streaming : {false, true}) {
        for (const bool pull : {false, true}) {
          Weights weights = weights_of(sizes, 1);
          SourceCall call{.weights = &weights, .streaming = streaming};
          call.options.version = ++version;
          group.sync(call, pull);
        }
      }
    }
  }
}

TEST(SyncOfOneRank, Commits) {
  Group group("shm", 0);
  Weights weights = some_weights(1);
  group.sync({.weights = &weights});
  group.sync({.weights = &weights, .streaming = true});
}

TEST_P(Sync, TellsTheSourceWhichNamesTheReceiversMissAndDidNotExpect) {
  Group group(GetParam(), 2);
  Weights weights = some_weights(1);
  SourceCall call{.weights = &weights};
  call.options.strict = false;
  auto first = Destinations::like(weights);
  auto second = Destinations::like(weights);
  first.strict = second.strict = false;
  first.tensors.erase("layer.3");
  first.tensors["extra.a"] = Bytes(3);
  second.tensors["extra.b"] = Bytes(4);
  auto a = group.start_receiver(0, {.into = &first});
  auto b = group.start_receiver(1, {.into = &second});
  Outcome sent = get(group.start_source(call));
  ASSERT_TRUE(sent.ok) << sent;
  ASSERT_TRUE(get(std::move(a)).ok);
  ASSERT_TRUE(get(std::move(b)).ok);
  std::sort(sent.lists.missing.begin(), sent.lists.missing.end());
  EXPECT_EQ(sent.lists.missing, (std::vector<std::string>{"extra.a", "extra.b"}));
  EXPECT_EQ(sent.lists.unexpected, (std::vector<std::string>{"layer.3"}));
  EXPECT_TRUE(second.hold(weights));
  // They are of that sync alone.
  SourceCall next{.weights = &weights};
  next.options.version = 2;
  group.sync(next);
}

TEST_P(Sync, CarriesListsThatAreLongerThanAFrame) {
  Group group(GetParam(), 1);
  Weights weights = weights_of({10}, 1);
  SourceCall call{.weights = &weights};
  call.options.strict = false;
  auto into = Destinations::like(weights);
  into.strict = false;
  for (int i = 0; i < 60; ++i) into.tensors[concat(std::string(50'000, 'n'), i)] = Bytes(1);
  auto got = group.start_receiver(0, {.into = &into});
  const Outcome sent = get(group.start_source(call));
  ASSERT_TRUE(sent.ok) << sent;
  const Outcome outcome = get(std::move(got));
  ASSERT_TRUE(outcome.ok) << outcome;
  EXPECT_EQ(sent.lists.missing, outcome.lists.missing);
  EXPECT_EQ(sent.lists.missing.size(), 60U);
}

// --- generators -----------------------------------------------------------------------------------------------------

struct Change {
  const char* what;
  std::vector<std::uint64_t> sizes;  // of layer.0, layer.1, ...
  bool follows;                      // the recorded plan
};

TEST_P(Sync, FollowsAGeneratorThatChanges) {
  const std::vector<Change> passes{
      {"the first", {10, 3000, 0, 500, 70, 2048}, false},
      {"the same", {10, 3000, 0, 500, 70, 2048}, true},
      {"shorter", {10, 3000, 0, 500}, false},
      {"as short again", {10, 3000, 0, 500}, true},
      {"longer", {10, 3000, 0, 500, 70, 2048, 9, 5000}, false},
      {"another middle", {10, 3000, 0, 501, 70, 2048, 9, 5000}, false},
      {"the same again", {10, 3000, 0, 501, 70, 2048, 9, 5000}, true},
      {"another start", {11, 3000, 0, 501, 70, 2048, 9, 5000}, false},
      {"nothing", {}, false},
      {"nothing again", {}, true},
      {"something again", {4000, 1}, false},
  };
  Group group(GetParam(), 2);
  std::shared_ptr<const SyncPlan> recorded;
  std::uint64_t version = 0;
  for (const Change& pass : passes) {
    SCOPED_TRACE(pass.what);
    Weights weights = weights_of(pass.sizes, ++version);
    SourceCall call{.weights = &weights, .plan = recorded, .streaming = true, .recorded = &recorded};
    call.options.version = version;
    auto into = Destinations::like(weights);
    auto also_into = Destinations::like(weights);
    auto a = group.start_receiver(0, {.into = &into});
    auto b = group.start_receiver(1, {.into = &also_into, .pull = true});
    const Outcome sent = get(group.start_source(call));
    const Outcome got = get(std::move(a));
    const Outcome also_got = get(std::move(b));
    ASSERT_TRUE(sent.ok && got.ok && also_got.ok) << sent << "; " << got << "; " << also_got;
    EXPECT_TRUE(into.hold(weights));
    EXPECT_TRUE(also_into.hold(weights));
    EXPECT_EQ(sent.reused, pass.follows);
    EXPECT_EQ(got.reused, pass.follows);
    EXPECT_EQ(also_got.reused, pass.follows);
    ASSERT_TRUE(recorded);
    EXPECT_EQ(recorded->manifest.size(), pass.sizes.size());
  }
}

TEST_P(Sync, FollowsAGeneratorWhoseNamesOrTypesChange) {
  Group group(GetParam(), 2);
  std::shared_ptr<const SyncPlan> recorded;
  std::uint64_t version = 0;
  for (const char* change : {"", "name", "dtype", "order", ""}) {
    SCOPED_TRACE(change);
    Weights weights = weights_of({1500, 1500, 1500}, ++version);
    if (change == std::string_view("name")) weights.metas[1].name = "other";
    if (change == std::string_view("dtype")) weights.metas[1].dtype = "int8";
    if (change == std::string_view("order")) std::swap(weights.metas[1].name, weights.metas[2].name);
    SourceCall call{.weights = &weights, .plan = recorded, .streaming = true, .recorded = &recorded};
    call.options.version = version;
    group.sync(call, version % 2 == 0);
    ASSERT_EQ(recorded->manifest[1].name, weights.metas[1].name);
    ASSERT_EQ(recorded->manifest[1].dtype, weights.metas[1].dtype);
  }
}

TEST_P(Sync, MixesPlansAndGeneratorsOfOneManifest) {
  Group group(GetParam(), 2);
  std::shared_ptr<const SyncPlan> recorded;
  for (std::uint64_t version = 1; version <= 8; ++version) {
    Weights weights = some_weights(version);
    const bool streaming = version % 3 != 0;
    SourceCall call{
        .weights = &weights, .plan = streaming ? recorded : nullptr, .streaming = streaming, .recorded = &recorded};
    call.options.version = version;
    group.sync(call, version % 2 == 0);
  }
}

// A generator may be read while the item before it still travels; whoever refills one buffer must not be seen.
TEST_P(Sync, IsDoneWithAnItemWhenItAsksForTheNext) {
  if (GetParam() == std::string_view("ipc")) GTEST_SKIP() << "on a device its stream orders the refill: device_test.cc";
  Group group(GetParam(), 1);
  Weights weights = some_weights(1);
  Weights sent = weights;
  SourceCall call{.weights = &sent, .streaming = true};
  call.at = [&](Step step, std::size_t count) {
    if (step == Step::kBucket) std::fill(sent.data[count].begin(), sent.data[count].end(), std::byte{0xEE});
  };
  auto into = Destinations::like(weights);
  auto got = group.start_receiver(0, {.into = &into});
  ASSERT_TRUE(get(group.start_source(call)).ok);
  ASSERT_TRUE(get(std::move(got)).ok);
  EXPECT_TRUE(into.hold(weights));
}

// --- checksums ------------------------------------------------------------------------------------------------------

// The source's own, writable view of its buckets.
std::byte* find_buckets_of_the_source() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("fastsync-data") == std::string::npos || line.find(" rw-s ") == std::string::npos) continue;
    return reinterpret_cast<std::byte*>(std::stoull(line, nullptr, 16));
  }
  return nullptr;
}

// A source whose buckets change between its checksum and their readers, as memory does that is broken or shared by
// mistake.
struct Corrupted {
  Outcome sent;
  Outcome got;
  Destinations into;
};
Corrupted sync_with_a_flipped_bit(Group& group, Weights& weights, bool verify, bool pull) {
  Corrupted result{{}, {}, Destinations::like(weights)};
  std::promise<void> packed;
  std::promise<void> flipped;
  SourceCall call{.weights = &weights};
  call.options.verify = verify;
  call.options.bucket_bytes = 1024;
  call.at = [&](Step step, std::size_t) {
    if (step == Step::kMoved) packed.set_value();
  };
  auto flipped_future = flipped.get_future().share();
  auto got =
      group.start_receiver(0, {.into = &result.into, .pull = pull, .at = [flipped_future](Step step, std::size_t) {
                                 if (step == Step::kReady) await(flipped_future);
                               }});
  auto sent = group.start_source(call);
  await(packed.get_future());
  std::byte* buckets = find_buckets_of_the_source();
  EXPECT_NE(buckets, nullptr);
  if (buckets != nullptr) buckets[700] ^= std::byte{0x10};
  flipped.set_value();
  result.sent = get(std::move(sent));
  result.got = get(std::move(got));
  return result;
}

TEST(Verify, CatchesAFlippedBit) {
  for (const bool pull : {false, true}) {
    Group group("shm", 1);
    Weights weights = weights_of({800}, 1);
    const Corrupted result = sync_with_a_flipped_bit(group, weights, true, pull);
    EXPECT_EQ(result.got.kind, ErrorKind::kChecksum) << result.got;
    EXPECT_EQ(result.got.rank, receiver_rank(0));
    EXPECT_NE(result.got.message.find("bucket 0"), std::string::npos) << result.got.message;
    EXPECT_EQ(result.sent.kind, ErrorKind::kChecksum) << result.sent;
    EXPECT_EQ(result.sent.rank, receiver_rank(0));
    EXPECT_EQ(result.sent.message, result.got.message);
    if (pull) {
      EXPECT_TRUE(result.into.untouched());
    }
    group.sync_again();
  }
}

// The control experiment: without the checksum the same bit arrives.
TEST(Verify, IsWhatCatchesIt) {
  Group group("shm", 1);
  Weights weights = weights_of({800}, 1);
  const Corrupted result = sync_with_a_flipped_bit(group, weights, false, false);
  EXPECT_TRUE(result.sent.ok) << result.sent;
  EXPECT_TRUE(result.got.ok) << result.got;
  weights.data[0][700] ^= std::byte{0x10};
  EXPECT_TRUE(result.into.hold(weights));
}

// --- transports -----------------------------------------------------------------------------------------------------

TEST_P(Sync, IsNamedByAnyRank) {
  Group group(GetParam(), 2);
  Weights weights = some_weights(1);
  for (int who = 0; who < 3; ++who) {
    auto into = Destinations::like(weights);
    auto also_into = Destinations::like(weights);
    SourceCall call{.weights = &weights, .asked = who == 0 ? GetParam() : "auto"};
    auto a = group.start_receiver(0, {.into = &into, .asked = who == 1 ? GetParam() : "auto"});
    auto b = group.start_receiver(1, {.into = &also_into, .asked = who == 2 ? GetParam() : "auto"});
    const Outcome sent = get(group.start_source(call));
    EXPECT_TRUE(sent.ok) << sent;
    EXPECT_TRUE(get(std::move(a)).ok);
    EXPECT_TRUE(get(std::move(b)).ok);
    EXPECT_EQ(group.sender().transport(), GetParam());
  }
}

TEST_P(Sync, IsRefusedOnEveryRankWhereTwoRanksNameDifferentOnes) {
  Group group(GetParam(), 2);
  Weights weights = some_weights(1);
  auto into = Destinations::like(weights);
  auto also_into = Destinations::like(weights);
  auto a = group.start_receiver(0, {.into = &into, .asked = "shm"});
  auto b = group.start_receiver(1, {.into = &also_into, .asked = "gloo"});
  const Outcome outcomes[] = {get(group.start_source({.weights = &weights})), get(std::move(a)), get(std::move(b))};
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.kind, ErrorKind::kInvalidArgument) << outcome;
    EXPECT_EQ(outcome.message, outcomes[0].message);
    for (const char* word : {"shm", "gloo", "20", "21"})
      EXPECT_NE(outcome.message.find(word), std::string::npos) << word;
  }
  EXPECT_TRUE(into.untouched());
  group.sync_again();
}

TEST_P(Sync, SaysWhichRankAskedForOneThatTheSourceLacks) {
  Group group(GetParam(), 1);
  Weights weights = some_weights(1);
  auto into = Destinations::like(weights);
  auto got = group.start_receiver(0, {.into = &into, .asked = "nccl"});
  const Outcome sent = get(group.start_source({.weights = &weights}));
  EXPECT_EQ(sent.kind, ErrorKind::kComm) << sent;
  EXPECT_NE(sent.message.find("'nccl', asked for by rank 20"), std::string::npos) << sent.message;
  const Outcome told = get(std::move(got));
  EXPECT_NE(told.message.find(sent.message), std::string::npos) << told;
  group.sync_again();
}

// --- many -----------------------------------------------------------------------------------------------------------

TEST_P(Sync, DoesNotGrowOverManySyncs) {
  Group group(GetParam(), 2);
  Weights weights = some_weights(1);
  const auto plan = weights.plan(1024);
  const bool gloo = GetParam() == std::string_view("gloo");
  const std::uint64_t rounds = (GetParam() == std::string_view("shm") ? 1000 : 200) / (FASTSYNC_SANITIZED != 0 ? 5 : 1);
  int before = 0;
  for (std::uint64_t version = 1; version <= rounds; ++version) {
    SourceCall call{.weights = &weights, .plan = plan};
    call.options.version = version;
    group.sync(call, version % 2 == 0);
    if (version == 3) before = open_descriptors();
  }
  EXPECT_EQ(open_descriptors(), before);
  if (gloo) {
    EXPECT_EQ(group.groups().made(), 1U);
  }
}

TEST_P(Sync, DoesNotGrowOverManyFailures) {
  Group group(GetParam(), 2);
  Weights weights = some_weights(1);
  int before = 0;
  for (std::uint64_t version = 1; version <= 30; ++version) {
    auto into = Destinations::like(weights);
    auto also_into = Destinations::like(weights);
    const auto fail_at = static_cast<Step>(version % 6);
    const At fails = [fail_at](Step step, std::size_t) {
      if (step == fail_at) throw UserError("on purpose");
    };
    auto a = group.start_receiver(0, {.into = &into, .pull = true, .at = fails});
    auto b = group.start_receiver(1, {.into = &also_into});
    SourceCall call{.weights = &weights};
    call.options.version = version;
    EXPECT_EQ(get(group.start_source(call)).kind, ErrorKind::kPeerFailed);
    EXPECT_TRUE(get(std::move(a)).user_error);
    EXPECT_EQ(get(std::move(b)).kind, ErrorKind::kPeerFailed);
    if (version == 6) before = open_descriptors();
  }
  EXPECT_LE(open_descriptors(), before);
  group.sync_again();
}

INSTANTIATE_TEST_SUITE_P(Over, Sync, ::testing::Values("shm", "gloo", "ipc"),
                         [](const auto& one) { return std::string(one.param); });

}  // namespace
}  // namespace fastsync::testing
