#include "bucket/bucket_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "common/error.h"

namespace fastsync {
namespace {

using Sizes = std::vector<std::uint64_t>;

struct Plan {
  std::uint64_t bucket_bytes = 0;
  std::vector<Fragment> fragments;
  std::vector<BucketLayout> buckets;
};

Plan plan_online(const Sizes& sizes, std::uint64_t bucket_bytes) {
  BucketPlanner planner(bucket_bytes);
  for (const std::uint64_t size : sizes) planner.add(size);
  planner.finish();
  return {planner.bucket_bytes(), planner.fragments(), planner.buckets()};
}

Manifest manifest_of(const Sizes& sizes) {
  Manifest manifest;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    TensorMeta meta;
    meta.name = std::to_string(i);
    meta.dtype = "uint8";
    meta.shape = {static_cast<std::int64_t>(sizes[i])};
    meta.nbytes = sizes[i];
    manifest.append(std::move(meta));
  }
  return manifest;
}

// Every rule of bucket_plan.h, checked from the finished plan alone.
void expect_follows_the_rules(const Plan& plan, const Sizes& sizes) {
  std::size_t fragment_at = 0;
  std::size_t tensors_end = 0;
  std::uint64_t tensor_at = 0;  // bytes of the current tensor that are placed
  std::size_t tensor = 0;
  const auto skip_empty = [&] {
    while (tensor < sizes.size() && sizes[tensor] == tensor_at) {
      ++tensor;
      tensor_at = 0;
    }
  };
  for (const BucketLayout& bucket : plan.buckets) {
    ASSERT_EQ(bucket.first_fragment, fragment_at) << "buckets take the fragments in order";
    ASSERT_GT(bucket.fragment_count, 0U) << "no bucket is empty";
    std::uint64_t end = 0;
    for (std::size_t k = 0; k < bucket.fragment_count; ++k) {
      const Fragment& fragment = plan.fragments.at(fragment_at++);
      skip_empty();
      ASSERT_EQ(fragment.tensor, tensor) << "tensors in order, none left out";
      ASSERT_EQ(fragment.tensor_offset, tensor_at) << "every byte exactly once, in order";
      ASSERT_EQ(fragment.bucket_offset, align_up(end)) << "packed as densely as the alignment allows";
      ASSERT_EQ(fragment.tensor_offset % kAlignment, 0U);
      ASSERT_GT(fragment.nbytes, 0U);
      ASSERT_LE(fragment.bucket_offset + fragment.nbytes, plan.bucket_bytes);
      ASSERT_LE(tensor_at + fragment.nbytes, sizes[tensor]);
      const bool whole = fragment.nbytes == sizes[tensor];
      ASSERT_TRUE(whole || sizes[tensor] > plan.bucket_bytes) << "a tensor that fits is never split";
      if (tensor_at + fragment.nbytes < sizes[tensor]) {
        ASSERT_EQ(fragment.bucket_offset + fragment.nbytes, plan.bucket_bytes) << "a split tensor fills its bucket";
      }
      if (k == 0 && fragment_at > 1 && tensor_at == 0) {
        const std::uint64_t left = plan.bucket_bytes - align_up(plan.fragments[fragment_at - 2].bucket_offset +
                                                                plan.fragments[fragment_at - 2].nbytes);
        ASSERT_TRUE(left == 0 || (sizes[tensor] > left && whole)) << "a bucket is left only by what does not fit";
      }
      tensor_at += fragment.nbytes;
      end = fragment.bucket_offset + fragment.nbytes;
    }
    ASSERT_EQ(bucket.used_bytes, end);
    ASSERT_GE(bucket.tensors_end, tensors_end);
    // Complete are the tensors whose last byte is placed, and empty ones up to the next that is not empty.
    const std::size_t least = tensor_at == sizes[tensor] ? tensor + 1 : tensor;
    std::size_t most = least;
    while (most < sizes.size() && sizes[most] == 0) ++most;
    ASSERT_GE(bucket.tensors_end, least);
    ASSERT_LE(bucket.tensors_end, most);
    tensors_end = bucket.tensors_end;
  }
  ASSERT_EQ(fragment_at, plan.fragments.size());
  skip_empty();
  ASSERT_EQ(tensor, sizes.size()) << "nothing is left over";
  ASSERT_EQ(tensor_at, 0U);
  for (std::size_t i = tensors_end; i < sizes.size(); ++i) {
    ASSERT_EQ(sizes[i], 0U) << "only trailing empty tensors belong to no bucket";
  }
}

TEST(BucketPlan, FollowsItsRulesAtEverySmallLimit) {
  const Sizes sizes = {6, 20, 3, 32, 7, 8, 0, 1024, 1023, 1025, 0, 0, 256, 255, 257, 1, 5000, 0};
  for (std::uint64_t bucket_bytes = 1; bucket_bytes <= 1300; ++bucket_bytes) {
    const Plan plan = plan_online(sizes, bucket_bytes);
    EXPECT_EQ(plan.bucket_bytes, align_up(bucket_bytes));
    expect_follows_the_rules(plan, sizes);
    ASSERT_FALSE(HasFatalFailure()) << "bucket_bytes " << bucket_bytes;
  }
}

TEST(BucketPlan, FollowsItsRulesForRandomSizes) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 2000; ++round) {
    Sizes sizes(random() % 40);
    const std::uint64_t scale = 1ULL << (random() % 14);
    for (std::uint64_t& size : sizes) {
      size = random() % scale;
      if (random() % 4 == 0) size = size / kAlignment * kAlignment;
      if (random() % 6 == 0) size = 0;
    }
    expect_follows_the_rules(plan_online(sizes, 1 + random() % 5000), sizes);
    ASSERT_FALSE(HasFatalFailure()) << "round " << round;
  }
}

TEST(BucketPlan, OnlineAndFinishedListGiveTheSameCuts) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 200; ++round) {
    Sizes sizes(random() % 60);
    for (std::uint64_t& size : sizes) size = random() % 3000;
    const std::uint64_t bucket_bytes = 1 + random() % 4000;
    const Plan online = plan_online(sizes, bucket_bytes);
    const BucketPlan whole = BucketPlan::make(manifest_of(sizes), bucket_bytes);
    EXPECT_EQ(whole.fragments, online.fragments);
    EXPECT_EQ(whole.buckets, online.buckets);
    EXPECT_LE(whole.bucket_bytes, online.bucket_bytes);
  }
}

TEST(BucketPlan, BucketBytesIsCutDownToWhatIsUsed) {
  EXPECT_EQ(BucketPlan::make(manifest_of({1000, 300}), 1 << 30).bucket_bytes, 1536U);
  EXPECT_EQ(BucketPlan::make(manifest_of({100}), 1 << 30).bucket_bytes, 256U);
  EXPECT_EQ(BucketPlan::make(manifest_of({100000}), 1000).bucket_bytes, 1024U);
  // What does not fit behind 1000 bytes in 1280 opens the second bucket; neither uses all of it.
  EXPECT_EQ(BucketPlan::make(manifest_of({1000, 700}), 1280).bucket_bytes, 1024U);
}

TEST(BucketPlan, NothingToSendHasNoBucketAndStillARealBucketSize) {
  for (const Sizes& sizes : {Sizes{}, Sizes{0}, Sizes{0, 0, 0}}) {
    const BucketPlan plan = BucketPlan::make(manifest_of(sizes), 4096);
    EXPECT_TRUE(plan.buckets.empty());
    EXPECT_TRUE(plan.fragments.empty());
    EXPECT_EQ(plan.bucket_bytes, kAlignment);
  }
}

TEST(BucketPlanner, ABucketClosesAsSoonAsNothingCanStartInIt) {
  BucketPlanner planner(1024);
  planner.add(700);
  EXPECT_TRUE(planner.buckets().empty());
  EXPECT_EQ(planner.open_bytes(), 768U);
  planner.add(200);  // ends at 968: no multiple of 256 is left
  ASSERT_EQ(planner.buckets().size(), 1U);
  EXPECT_EQ(planner.buckets()[0].used_bytes, 968U);
  EXPECT_EQ(planner.open_bytes(), 0U);
}

TEST(BucketPlanner, EmptyTensorsCompleteInTheOpenBucket) {
  BucketPlanner planner(1024);
  planner.add(0);
  planner.add(100);
  planner.add(0);
  planner.add(1024);  // closes the first bucket, and fills the second
  planner.add(0);
  planner.add(10);
  planner.add(0);
  planner.finish();
  ASSERT_EQ(planner.buckets().size(), 3U);
  EXPECT_EQ(planner.buckets()[0].tensors_end, 3U);
  EXPECT_EQ(planner.buckets()[1].tensors_end, 4U);
  EXPECT_EQ(planner.buckets()[2].tensors_end, 7U);
  EXPECT_EQ(planner.tensors(), 7U);
}

TEST(BucketPlanner, ALargeTensorCompletesWithItsLastByte) {
  BucketPlanner planner(1024);
  planner.add(100);
  planner.add(2000);
  planner.finish();
  ASSERT_EQ(planner.buckets().size(), 3U);
  EXPECT_EQ(planner.buckets()[0].tensors_end, 1U);
  EXPECT_EQ(planner.buckets()[1].tensors_end, 1U);
  EXPECT_EQ(planner.buckets()[2].tensors_end, 2U);
  EXPECT_EQ(planner.fragments()[1], (Fragment{1, 0, 256, 768}));
  EXPECT_EQ(planner.fragments()[2], (Fragment{1, 768, 0, 1024}));
  EXPECT_EQ(planner.fragments()[3], (Fragment{1, 1792, 0, 208}));
}

TEST(BucketPlanner, FinishMayBeCalledTwice) {
  BucketPlanner planner(1024);
  planner.add(1);
  planner.finish();
  planner.finish();
  EXPECT_EQ(planner.buckets().size(), 1U);
}

TEST(BucketPlanner, RefusesZeroBucketBytes) { EXPECT_THROW(BucketPlanner(0), InvalidArgument); }

TEST(BucketPlanner, HugeBucketBytesDoNotOverflow) {
  for (const std::uint64_t bucket_bytes : {UINT64_MAX, UINT64_MAX - 255, std::uint64_t{1} << 63}) {
    BucketPlanner planner(bucket_bytes);
    planner.add(std::uint64_t{1} << 61);
    planner.add((std::uint64_t{1} << 62) - 1);
    planner.add(3);
    planner.finish();
    EXPECT_EQ(planner.bucket_bytes(), std::uint64_t{1} << 62);
    EXPECT_EQ(planner.buckets().size(), 3U);  // the second fills its bucket but for a byte
    EXPECT_EQ(BucketPlan::make(manifest_of({5, 6}), bucket_bytes).bucket_bytes, 512U);
  }
}

TEST(BucketPlanner, RefusesBillionsOfFragmentsAndSaysWhatToDo) {
  BucketPlanner planner(256);
  planner.add(100);
  for (const std::uint64_t nbytes : {std::uint64_t{1} << 62, (std::uint64_t{1} << 36) + 1}) {
    try {
      planner.add(nbytes);
      FAIL() << "accepted " << nbytes;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("raise bucket_bytes"), std::string::npos) << error.what();
    }
  }
  EXPECT_THROW(planner.add(UINT64_MAX), InvalidArgument);
  EXPECT_EQ(planner.tensors(), 1U) << "a refused tensor changes nothing";
  EXPECT_EQ(planner.fragments().size(), 1U);
  planner.add(200);
  planner.finish();
  EXPECT_EQ(planner.fragments().size(), 2U);
}

TEST(BucketPlanner, AHugeTensorInHugeBucketsIsFine) {
  BucketPlanner planner(std::uint64_t{1} << 50);
  planner.add((std::uint64_t{1} << 62) - 3);
  planner.finish();
  EXPECT_EQ(planner.buckets().size(), std::size_t{1} << 12);
  EXPECT_EQ(planner.buckets().back().used_bytes, (std::uint64_t{1} << 50) - 3);
}

}  // namespace
}  // namespace fastsync
