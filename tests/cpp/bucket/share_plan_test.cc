#include "bucket/share_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "common/error.h"

namespace fastsync {
namespace {

struct Entry {
  std::uint64_t nbytes = 0;
  std::uint32_t tie = 0;
};

Manifest manifest_of(const std::vector<Entry>& entries) {
  Manifest manifest;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    TensorMeta meta;
    meta.name = std::to_string(i);
    meta.dtype = "uint8";
    meta.shape = {static_cast<std::int64_t>(entries[i].nbytes)};
    meta.nbytes = entries[i].nbytes;
    meta.tie.group = entries[i].tie;
    manifest.append(std::move(meta));
  }
  return manifest;
}

using Shares = std::vector<std::vector<std::uint32_t>>;

TEST(SharePlan, GivesTheLargestFirstToWhoHasLeast) {
  const Manifest manifest = manifest_of({{1}, {8}, {5}, {4}, {3}});
  const SharePlan plan = SharePlan::make(manifest, 2);
  // 8 | 5, then 4 to the second, 3 to the first, 1 to the second.
  EXPECT_EQ(plan.shares, (Shares{{1, 4}, {0, 2, 3}}));
  EXPECT_EQ(plan.nbytes, (std::vector<std::uint64_t>{11, 10}));
  EXPECT_DOUBLE_EQ(plan.imbalance(), 11 / 10.5);
}

TEST(SharePlan, TakesEqualOnesInTheOrderOfTheManifest) {
  const SharePlan plan = SharePlan::make(manifest_of(std::vector<Entry>(7, Entry{4})), 3);
  EXPECT_EQ(plan.shares, (Shares{{0, 3, 6}, {1, 4}, {2, 5}}));
}

TEST(SharePlan, KeepsTiedTensorsTogetherAndCountsEachOfThem) {
  // The tie (2 + 6 bytes, sent twice over) weighs more than the 7 bytes.
  const SharePlan plan = SharePlan::make(manifest_of({{7}, {2, 5}, {1}, {6, 5}}), 2);
  EXPECT_EQ(plan.shares, (Shares{{1, 3}, {0, 2}}));
  EXPECT_EQ(plan.nbytes, (std::vector<std::uint64_t>{8, 8}));
}

TEST(SharePlan, SaysThatOnePieceIsTooLarge) {
  EXPECT_DOUBLE_EQ(SharePlan::make(manifest_of({{10}, {90}}), 2).imbalance(), 1.8);
  EXPECT_DOUBLE_EQ(SharePlan::make(manifest_of({{10}}), 4).imbalance(), 4.0);
}

TEST(SharePlan, LeavesSomeWithoutAnythingWhereThereIsTooLittle) {
  const SharePlan plan = SharePlan::make(manifest_of({{3}}), 3);
  EXPECT_EQ(plan.shares, (Shares{{0}, {}, {}}));
  for (const auto& entries : {std::vector<Entry>{}, std::vector<Entry>{{0}, {0}}}) {
    const SharePlan empty = SharePlan::make(manifest_of(entries), 3);
    EXPECT_EQ(empty.shares.size(), 3U);
    EXPECT_DOUBLE_EQ(empty.imbalance(), 1.0);
  }
}

TEST(SharePlan, RefusesNoTrainers) { EXPECT_THROW((void)SharePlan::make(manifest_of({{1}}), 0), InvalidArgument); }

TEST(SharePlan, AShareIsTheManifestWithoutTheOthers) {
  const Manifest whole = manifest_of({{7}, {2, 5}, {1}, {6, 5}});
  const SharePlan plan = SharePlan::make(whole, 2);
  const Manifest share = plan.manifest_of(whole, 0);
  ASSERT_EQ(share.size(), 2U);
  EXPECT_EQ(share[0], whole[1]) << "the tie is kept";
  EXPECT_EQ(share[1], whole[3]);
  EXPECT_THROW((void)plan.manifest_of(whole, 2), InternalError);
  EXPECT_THROW((void)plan.manifest_of(manifest_of({{7}}), 0), InternalError);
}

TEST(SharePlan, FollowsItsRulesForRandomManifests) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 2000; ++round) {
    std::vector<Entry> entries(random() % 60);
    const std::uint64_t scale = 1ULL << (random() % 40);
    for (Entry& entry : entries) {
      entry.nbytes = random() % 5 == 0 ? 0 : random() % scale;
      if (random() % 4 == 0) entry.tie = 1 + static_cast<std::uint32_t>(random() % 4);
    }
    const Manifest manifest = manifest_of(entries);
    const std::size_t trainers = 1 + random() % 9;
    const SharePlan plan = SharePlan::make(manifest, trainers);
    ASSERT_EQ(plan.shares.size(), trainers);
    ASSERT_EQ(plan.nbytes.size(), trainers);

    std::vector<std::size_t> owner(entries.size(), trainers);
    std::map<std::uint32_t, std::set<std::size_t>> owners_of_tie;
    std::map<std::uint32_t, std::uint64_t> tied_bytes;
    std::uint64_t largest_piece = 0;
    std::uint64_t total = 0;
    for (std::size_t k = 0; k < trainers; ++k) {
      ASSERT_TRUE(std::is_sorted(plan.shares[k].begin(), plan.shares[k].end()));
      std::uint64_t sum = 0;
      for (const std::uint32_t i : plan.shares[k]) {
        ASSERT_EQ(owner.at(i), trainers) << "each tensor once";
        owner[i] = k;
        sum += entries[i].nbytes;
        if (entries[i].tie == 0) {
          largest_piece = std::max(largest_piece, entries[i].nbytes);
        } else {
          owners_of_tie[entries[i].tie].insert(k);
          tied_bytes[entries[i].tie] += entries[i].nbytes;
        }
      }
      ASSERT_EQ(plan.nbytes[k], sum);
      total += sum;
    }
    ASSERT_EQ(std::count(owner.begin(), owner.end(), trainers), 0) << "none left out";
    for (const auto& [tie, ranks] : owners_of_tie) ASSERT_EQ(ranks.size(), 1U) << "tied tensors stay together";
    for (const auto& [tie, bytes] : tied_bytes) largest_piece = std::max(largest_piece, bytes);
    const std::uint64_t most = *std::max_element(plan.nbytes.begin(), plan.nbytes.end());
    const std::uint64_t least = *std::min_element(plan.nbytes.begin(), plan.nbytes.end());
    ASSERT_LE(most - least, largest_piece) << "who has most had least before its last piece came";
    ASSERT_GE(plan.imbalance(), 1.0 - 1e-12);
    if (total > 0) {
      ASSERT_NEAR(plan.imbalance(),
                  static_cast<double>(most) * static_cast<double>(trainers) / static_cast<double>(total), 1e-9);
    }
    const SharePlan again = SharePlan::make(manifest_of(entries), trainers);
    ASSERT_EQ(again.shares, plan.shares) << "a pure function";
  }
}

TEST(FirstDifference, NamesTheTensor) {
  const Manifest here = manifest_of({{1}, {2}, {3}});
  EXPECT_EQ(first_difference(here, manifest_of({{1}, {2}, {3}})), "");
  EXPECT_EQ(first_difference(here, manifest_of({{1}, {4}, {3}})),
            "tensor number 1 is '1' uint8[2] here, '1' uint8[4] there");
  EXPECT_EQ(first_difference(here, manifest_of({{1}, {2}})),
            "tensor number 2, '2' uint8[3], is only here (3 tensors here, 2 there)");
  EXPECT_EQ(first_difference(manifest_of({}), here),
            "tensor number 0, '0' uint8[1], is only there (0 tensors here, 3 there)");
  EXPECT_EQ(first_difference(here, manifest_of({{1}, {2, 1}, {3, 1}})),
            "tensor '1' uint8[2] does not share its memory with the same tensors in the same way");
}

}  // namespace
}  // namespace fastsync
