// Which transport a sync uses, by where its ranks are.
#include "sync/transport_choice.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "common/error.h"
#include "support/expect_words.h"

namespace fastsync::testing {
namespace {

constexpr std::uint32_t kVersion = 22809;
const std::vector<std::string> kAll{"shm", "gloo", "ipc", "nccl"};

// A rank whose tensors are on that device ("" for the CPU).
RankPlace at(int rank, const std::string& device, const std::string& asked = "auto") {
  RankPlace place;
  place.rank = rank;
  place.host = "one host";
  place.device_id = device;
  place.asked = asked;
  place.nccl_version = device.empty() ? 0 : kVersion;
  return place;
}

TransportChoice choose(const RankPlace& source, const std::vector<RankPlace>& receivers,
                       const std::vector<std::string>& candidates = kAll) {
  return choose_transport(source, receivers, candidates);
}

std::string refusal(const RankPlace& source, const std::vector<RankPlace>& receivers,
                    const std::vector<std::string>& candidates = kAll) {
  try {
    return "chose " + choose(source, receivers, candidates).transport;
  } catch (const CommError& error) {
    return error.what();
  }
}

TEST(TransportChoice, IsIpcWhereAllRanksAreOnOneDevice) {
  const auto choice = choose(at(0, "A"), {at(1, "A"), at(2, "A")});
  EXPECT_EQ(choice.transport, "ipc");
  EXPECT_TRUE(choice.groups.empty());
}

TEST(TransportChoice, IsPlainNcclWhereNoDeviceIsShared) {
  for (const char* asked : {"auto", "nccl"}) {
    const auto choice = choose(at(0, "A", asked), {at(1, "B"), at(2, "C")});
    EXPECT_EQ(choice.transport, "nccl");
    EXPECT_TRUE(choice.groups.empty());
  }
}

TEST(TransportChoice, FansOutWhereSomeShareADeviceAndOthersDoNot) {
  for (const char* asked : {"auto", "nccl"}) {
    const auto choice = choose(at(4, "A", asked), {at(1, "B"), at(2, "A"), at(3, "B"), at(5, "B"), at(6, "C")});
    EXPECT_EQ(choice.transport, kFanOut);
    const std::vector<DeviceGroup> wanted{{4, {2}}, {1, {3, 5}}, {6, {}}};
    EXPECT_EQ(choice.groups, wanted);
    for (const char* word : {"rank 4 leads rank 2", "rank 1 leads ranks 3 and 5"}) {
      EXPECT_NE(choice.reason.find(word), std::string::npos) << choice.reason;
    }
    EXPECT_EQ(choice.reason.find("rank 6"), std::string::npos) << choice.reason;
  }
}

TEST(TransportChoice, SaysWhyItIsNotIpcWhenItFansOut) {
  const auto choice = choose(at(0, "A"), {at(1, "A"), at(2, "B")});
  EXPECT_NE(choice.reason.find("not ipc: rank 2's device is another than rank 0's"), std::string::npos)
      << choice.reason;
}

TEST(TransportChoice, TheSourceLeadsItsDeviceAndTheLowestRankTheOthers) {
  // Receivers in any order.
  const std::vector<RankPlace> receivers{at(7, "B"), at(0, "A"), at(3, "B"), at(1, "A")};
  const std::vector<DeviceGroup> wanted{{5, {0, 1}}, {3, {7}}};
  EXPECT_EQ(group_by_device(at(5, "A"), receivers), wanted);
}

TEST(TransportChoice, ADeviceOfOneHostIsNotThatOfAnother) {
  RankPlace elsewhere = at(1, "A");
  elsewhere.host = "another host";
  const std::vector<DeviceGroup> wanted{{0, {}}, {1, {}}};
  EXPECT_EQ(group_by_device(at(0, "A"), std::vector<RankPlace>{elsewhere}), wanted);
}

TEST(TransportChoice, FollowersNeedNoNccl) {
  RankPlace without = at(1, "A");
  without.nccl_version = 0;
  RankPlace older = at(3, "B");
  older.nccl_version = 22705;
  EXPECT_EQ(choose(at(0, "A"), {without, at(2, "B"), older}).transport, kFanOut);
}

TEST(TransportChoice, LeadersNeedTheSameNccl) {
  RankPlace leader = at(1, "B", "nccl");
  leader.nccl_version = 0;
  expect_words(refusal(at(0, "A"), {leader, at(2, "B")}), {"rank 1 cannot load NCCL"});
  leader.nccl_version = 22705;
  expect_words(refusal(at(0, "A"), {leader, at(2, "B")}), {"rank 1 has NCCL 22705", "rank 0 has 22809"});
}

TEST(TransportChoice, NcclByNameIsRefusedWhereAllAreOnOneDevice) {
  expect_words(refusal(at(0, "A", "nccl"), {at(1, "A"), at(2, "A")}),
               {"ranks 0 and 1", "share a device", "NCCL_MULTI_RANK_GPU_ENABLE=1", "'ipc'"});
}

TEST(TransportChoice, NcclByNameIsPlainWhereItMayShareTheOneDevice) {
  RankPlace source = at(0, "A", "nccl");
  source.shares_device = true;
  EXPECT_EQ(choose(source, {at(1, "A")}).transport, "nccl");
}

TEST(TransportChoice, FansOutAlsoWhereNcclMayShareDevices) {
  RankPlace source = at(0, "A", "nccl");
  source.shares_device = true;
  EXPECT_EQ(choose(source, {at(1, "A"), at(2, "B")}).transport, kFanOut);
}

TEST(TransportChoice, WithoutIpcRanksThatShareADeviceAreRefused) {
  const std::vector<std::string> candidates{"nccl", "gloo"};
  expect_words(refusal(at(0, "A", "nccl"), {at(1, "B"), at(2, "B")}, candidates), {"ranks 1 and 2", "share a device"});
  EXPECT_EQ(choose(at(0, "A"), {at(1, "B"), at(2, "B")}, candidates).transport, "gloo");
}

TEST(TransportChoice, IpcByNameIsRefusedAcrossDevices) {
  expect_words(refusal(at(0, "A", "ipc"), {at(1, "A"), at(2, "B")}), {"'ipc'", "rank 2's device"});
}

TEST(TransportChoice, TheFanOutIsNotAskedForByName) {
  expect_words(refusal(at(0, "A", kFanOut), {at(1, "A"), at(2, "B")}), {"'nccl+ipc'"});
}

TEST(TransportChoice, ARankOnTheCpuKeepsEverybodyOffTheDevices) {
  EXPECT_EQ(choose(at(0, "A"), {at(1, "A"), at(2, "")}).transport, "gloo");
  expect_words(refusal(at(0, "A", "nccl"), {at(1, "A"), at(2, "")}), {"rank 2's tensors are on the CPU"});
}

TEST(TransportChoice, ALoaderFollowsToTheDevice) {
  RankPlace loader = at(2, "A");
  loader.flexible = true;
  EXPECT_EQ(choose(at(0, "A"), {at(1, "B"), loader}).transport, kFanOut);
}

TEST(TransportChoice, DifferentNamesAreInvalidOnEveryRank) {
  EXPECT_THROW((void)choose(at(0, "A", "nccl"), {at(1, "B", "gloo")}), InvalidArgument);
}

}  // namespace
}  // namespace fastsync::testing
