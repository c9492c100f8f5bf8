// What a sync in shares is made of: a session that gives the verdict, and sessions whose verdict another one gives.
#include "group.h"

namespace fastsync::testing {
namespace {

// Up to the point where buckets could flow.
void begin_source(WeightSender& sender, const std::string& transport, FakeGroups& groups, const Weights& weights,
                  const SyncOptions& options) {
  sender.open(kLongTimeout, nullptr);
  (void)sender.join("auto", {transport});
  (void)sender.begin(options, weights.plan(options.bucket_bytes), false);
  if (!sender.needs_external()) return;
  sender.attach_external(groups.ops(sender.comm_generation(), 0));
  groups.keep(sender.external_memory());
}

void begin_receiver(WeightReceiver& receiver, int index, FakeGroups& groups, Destinations& into) {
  receiver.open(kLongTimeout, nullptr);
  receiver.ask("auto");
  (void)receiver.join("auto");
  receiver.bind(into);
  receiver.ready();
  if (!receiver.needs_external()) return;
  receiver.attach_external(groups.ops(receiver.begin().comm_generation, index + 1));
  groups.keep(receiver.external_memory());
}

template <typename Body>
std::future<Outcome> on_source(Group& group, Body body) {
  return std::async(std::launch::async, [&group, body] {
    return run_call(group.sender(), kSource, [&](Outcome&) { body(group.sender()); });
  });
}

template <typename Body>
std::future<Outcome> on_receiver(Group& group, int index, Body body) {
  return std::async(std::launch::async, [&group, index, body] {
    return run_call(group.receiver(index), receiver_rank(index), [&](Outcome&) { body(group.receiver(index)); });
  });
}

class Shares : public EveryTransport {};

TEST_P(Shares, AVerdictSessionSendsItsManifestAndNoBucket) {
  Group group(GetParam(), 2);
  Weights weights = some_weights(1);
  for (std::uint64_t round = 1; round <= 2; ++round) {
    std::vector<Destinations> into(2, Destinations::like(weights));
    const SyncOptions options{.version = round, .bucket_bytes = 1024, .set_id = 9, .share_bytes = 512};
    auto sent = on_source(group, [&](WeightSender& sender) {
      begin_source(sender, GetParam(), group.groups(), weights, options);
      (void)sender.commit();
      EXPECT_EQ(sender.staging_bytes(), 0U);
    });
    std::vector<std::future<Outcome>> got;
    for (int i = 0; i < 2; ++i) {
      got.push_back(on_receiver(group, i, [&, i](WeightReceiver& receiver) {
        begin_receiver(receiver, i, group.groups(), into[static_cast<std::size_t>(i)]);
        EXPECT_EQ(receiver.begin().set_id, 9U);
        EXPECT_EQ(receiver.begin().share_bytes, 512U);
        EXPECT_EQ(receiver.manifest().size(), weights.metas.size());
        EXPECT_EQ(receiver.held_plan(), round > 1);
        receiver.commit({});
        EXPECT_EQ(receiver.staging_bytes(), 0U);
      }));
    }
    const Outcome source = get(std::move(sent));
    EXPECT_TRUE(source.ok) << source;
    for (int i = 0; i < 2; ++i) {
      const Outcome outcome = get(std::move(got[static_cast<std::size_t>(i)]));
      EXPECT_TRUE(outcome.ok) << outcome;
      EXPECT_TRUE(into[static_cast<std::size_t>(i)].untouched());
    }
  }
  group.sync_again();
}

TEST_P(Shares, AReceiverTakesTurnsAndEndsWithoutTheSourcesWord) {
  Group group(GetParam(), 2);
  Weights weights = some_weights(1);
  for (std::uint64_t round = 1; round <= 3; ++round) {
    weights.fill(round);
    std::vector<Destinations> into(2, Destinations::like(weights));
    std::promise<void> verdict;
    const auto given = verdict.get_future().share();
    auto sent = on_source(group, [&](WeightSender& sender) {
      begin_source(sender, GetParam(), group.groups(), weights, {.version = round, .bucket_bytes = 1024});
      sender.send_plan(weights.views());
      sender.verified();
      EXPECT_NE(sender.committed_sync(), sender.sync()) << "verified is not committed";
      await(given);  // the receivers have ended by themselves
      (void)sender.commit();
      EXPECT_EQ(sender.committed_sync(), sender.sync());
    });
    std::vector<std::future<Outcome>> got;
    for (int i = 0; i < 2; ++i) {
      got.push_back(on_receiver(group, i, [&, i](WeightReceiver& receiver) {
        auto& mine = into[static_cast<std::size_t>(i)];
        begin_receiver(receiver, i, group.groups(), mine);
        std::uint64_t turns = 0;
        while (!receiver.receive_into(mine, 0, 1)) EXPECT_EQ(receiver.buckets_received(), ++turns);
        EXPECT_GT(turns, 5U);
        receiver.verified({});
        receiver.conclude();
        EXPECT_EQ(receiver.committed_sync(), receiver.sync());
        EXPECT_FALSE(receiver.active());
      }));
    }
    for (int i = 0; i < 2; ++i) {
      const Outcome outcome = get(std::move(got[static_cast<std::size_t>(i)]));
      EXPECT_TRUE(outcome.ok) << outcome;
      EXPECT_TRUE(into[static_cast<std::size_t>(i)].hold(weights));
    }
    verdict.set_value();
    const Outcome source = get(std::move(sent));
    EXPECT_TRUE(source.ok) << source;
  }
  group.sync_again();
}

TEST_P(Shares, WhatWasVerifiedMayStillFail) {
  Group group(GetParam(), 1);
  Weights weights = some_weights(1);
  auto into = Destinations::like(weights);
  auto sent = on_source(group, [&](WeightSender& sender) {
    begin_source(sender, GetParam(), group.groups(), weights, {.version = 1, .bucket_bytes = 1024});
    sender.send_plan(weights.views());
    sender.verified();
    throw PeerFailedError("another share failed", 30);
  });
  auto got = on_receiver(group, 0, [&](WeightReceiver& receiver) {
    begin_receiver(receiver, 0, group.groups(), into);
    EXPECT_TRUE(receiver.receive_into(into));
    receiver.commit({});
  });
  EXPECT_EQ(get(std::move(sent)).rank, 30);
  const Outcome outcome = get(std::move(got));
  EXPECT_EQ(outcome.kind, ErrorKind::kPeerFailed) << outcome;
  EXPECT_EQ(outcome.rank, 30);
  group.sync_again();
}

INSTANTIATE_TEST_SUITE_P(Transports, Shares, ::testing::Values("shm", "gloo"));

}  // namespace
}  // namespace fastsync::testing
