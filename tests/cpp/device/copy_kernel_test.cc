// The kernel's body, run on a CPU as a grid, against the host packer: two pieces of code that share nothing but the
// definition of the checksum.
#include "device/copy_kernel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bucket/bucket_plan.h"
#include "bucket/packer.h"
#include "common/checksum.h"
#include "common/error.h"
#include "copy_tensors.h"
#include "device/cuda/copy_kernel_ptx.h"
#include "support/sanitizers.h"

namespace fastsync {
namespace {

using namespace testing;  // fastsync::testing

constexpr std::uint64_t kUnit = kCopyUnitBytes;

// ---- Against the host packer ----------------------------------------------------------------------------------------

TEST(CopyKernel, PacksWhatTheHostPackerPacks) {
  std::mt19937 random(1);
  for (int round = 0; round < rounds_of_one_thread(250); ++round) {
    const std::vector<Tensor> tensors = random_tensors(random, /*source=*/true);
    const std::vector<TensorView> views = views_of(tensors);
    const BucketPlanner plan = random_plan(tensors, random);
    for (const BucketLayout& layout : plan.buckets()) {
      const auto fragments = std::span(plan.fragments()).subspan(layout.first_fragment, layout.fragment_count);
      const Table table(CopyDirection::kPack, fragments, views);
      const bool verify = random() % 4 != 0;
      Bucket expected(layout.used_bytes);
      Bucket actual(layout.used_bytes);
      const Checksum expected_sum = pack(expected.data(), fragments, views, verify);
      const Checksum sum = table.run(CopyDirection::kPack, actual.data(), verify);
      ASSERT_EQ(actual.image(), expected.image()) << "round " << round << describe_views(fragments, views);
      ASSERT_EQ(sum, expected_sum) << "round " << round << describe_views(fragments, views);
    }
  }
}

TEST(CopyKernel, UnpacksWhatTheHostPackerUnpacksAndWritesNothingElse) {
  std::mt19937 random(2);
  for (int round = 0; round < rounds_of_one_thread(250); ++round) {
    std::vector<Tensor> tensors = random_tensors(random, /*source=*/false);
    const BucketPlanner plan = random_plan(tensors, random);
    std::vector<TensorView> views = views_of(tensors);
    for (TensorView& view : views) {
      if (random() % 6 == 0) view.nbytes = 0;  // no destination
    }
    std::vector<Bytes> images;  // of the tensors: as they are, then as the host packer leaves them
    for (const Tensor& tensor : tensors) images.push_back(tensor.memory);
    const bool verify = random() % 4 != 0;
    const std::uint64_t seed = random();
    std::vector<Checksum> expected_sums;
    for (const bool expected : {true, false}) {
      for (std::size_t i = 0; i < plan.buckets().size(); ++i) {
        const BucketLayout& layout = plan.buckets()[i];
        const auto fragments = std::span(plan.fragments()).subspan(layout.first_fragment, layout.fragment_count);
        Bucket bucket(layout.used_bytes);
        bucket.randomize(seed + i);
        if (expected) {
          expected_sums.push_back(unpack(bucket.data(), fragments, views, verify, StoreMode::kCached));
          continue;
        }
        const Bytes before = bucket.image();
        const Table table(CopyDirection::kUnpack, fragments, views);
        ASSERT_EQ(table.run(CopyDirection::kUnpack, bucket.data(), verify), expected_sums[i])
            << "round " << round << describe_views(fragments, views);
        ASSERT_EQ(bucket.image(), before);
      }
      for (std::size_t i = 0; expected && i < tensors.size(); ++i) {
        std::swap_ranges(images[i].begin(), images[i].end(), tensors[i].memory.begin());  // in place: views point here
      }
    }
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      ASSERT_EQ(tensors[i].memory, images[i]) << "round " << round << describe_views(plan.fragments(), views);
    }
  }
}

// ---- Alignment and ends ---------------------------------------------------------------------------------------------

std::vector<std::uint64_t> interesting_sizes() {
  std::vector<std::uint64_t> sizes;
  for (std::uint64_t n = 1; n <= 66; ++n) sizes.push_back(n);
  for (const std::uint64_t around : {std::uint64_t{512}, std::uint64_t{2048}, kUnit, 2 * kUnit}) {
    for (const std::uint64_t n : {around - 17, around - 8, around - 1, around, around + 1, around + 15, around + 24}) {
      sizes.push_back(n);
    }
  }
  return sizes;
}

TEST(CopyKernel, MovesEveryLengthAtEveryAddress) {
  for (const std::uint64_t nbytes : interesting_sizes()) {
    for (std::size_t skew = 0; skew < 16; ++skew) {
      Tensor tensor = contiguous_tensor(nbytes, skew, nbytes * 16 + skew);
      const std::vector<TensorView> views = {tensor.view};
      const std::vector<Fragment> fragments = {{0, 0, 512, nbytes}};
      Bucket bucket(512 + nbytes);
      const Checksum packed =
          Table(CopyDirection::kPack, fragments, views).run(CopyDirection::kPack, bucket.data(), true);
      const Checksum expected = checksum_bytes(tensor.view.data, nbytes, 512);
      ASSERT_EQ(std::memcmp(bucket.data() + 512, tensor.view.data, nbytes), 0) << nbytes << " bytes, skew " << skew;
      ASSERT_EQ(packed, expected) << nbytes << " bytes, skew " << skew;

      const Bytes image = tensor.memory;
      std::fill_n(tensor.view.data, nbytes, kGuard);
      const Checksum unpacked =
          Table(CopyDirection::kUnpack, fragments, views).run(CopyDirection::kUnpack, bucket.data(), true);
      ASSERT_EQ(tensor.memory, image) << nbytes << " bytes, skew " << skew;
      ASSERT_EQ(unpacked, expected) << nbytes << " bytes, skew " << skew;
    }
  }
}

TEST(CopyKernel, EveryByteOfAnEndCounts) {
  for (std::uint64_t nbytes = 1; nbytes <= 48; ++nbytes) {
    Tensor tensor = contiguous_tensor(nbytes, nbytes % 3, nbytes);
    const Table table(CopyDirection::kPack, std::vector<Fragment>{{0, 0, 256, nbytes}}, std::vector{tensor.view});
    Bucket bucket(256 + nbytes);
    const Checksum whole = table.run(CopyDirection::kPack, bucket.data(), true);
    for (std::uint64_t i = 0; i < nbytes; ++i) {
      tensor.view.data[i] ^= std::byte{0x10};
      ASSERT_NE(table.run(CopyDirection::kPack, bucket.data(), true), whole) << "byte " << i << " of " << nbytes;
      tensor.view.data[i] ^= std::byte{0x10};
    }
  }
}

TEST(CopyKernel, BytesBetweenPiecesAreNeitherWrittenNorCounted) {
  Tensor first = contiguous_tensor(1000, 0, 1);
  Tensor second = contiguous_tensor(20001, 0, 2);
  const std::vector<TensorView> views = {first.view, second.view};
  const std::vector<Fragment> fragments = {{0, 0, 0, 1000}, {1, 0, 40960, 20001}};
  Bucket bucket(60961);
  const Checksum packed = Table(CopyDirection::kPack, fragments, views).run(CopyDirection::kPack, bucket.data(), true);
  EXPECT_TRUE(std::all_of(bucket.data() + 1000, bucket.data() + 40960, [](std::byte b) { return b == kGuard; }));

  std::fill(bucket.data() + 1000, bucket.data() + 40960, std::byte{0xE1});
  const Table back(CopyDirection::kUnpack, fragments, views);
  EXPECT_EQ(back.run(CopyDirection::kUnpack, bucket.data(), true), packed);
}

void pack_and_unpack(TensorView view, std::uint64_t nbytes) {
  normalize(view);
  const std::vector<TensorView> views = {view};
  const std::vector<Fragment> fragments = {{0, 0, 0, nbytes}};
  Bucket bucket(nbytes);
  const Checksum packed = Table(CopyDirection::kPack, fragments, views).run(CopyDirection::kPack, bucket.data(), true);
  EXPECT_EQ(packed, pack(bucket.data(), fragments, views, true)) << nbytes << " bytes";
  const Table back(CopyDirection::kUnpack, fragments, views);
  EXPECT_EQ(back.run(CopyDirection::kUnpack, bucket.data(), true), packed) << nbytes << " bytes";
}

TEST(CopyKernel, TouchesNothingBeyondATensorsEnds) {
  const FencedPages pages(3 * kUnit);
  for (const std::uint64_t nbytes : interesting_sizes()) {
    TensorView view;
    view.nbytes = nbytes;
    view.data = pages.end() - nbytes;
    pack_and_unpack(view, nbytes);
    view.data = pages.begin();
    pack_and_unpack(view, nbytes);
  }
}

TEST(CopyKernel, TouchesNothingBeyondAStridedTensorsEnds) {
  const FencedPages pages(3 * kUnit);
  for (const std::uint32_t itemsize : {1U, 2U, 4U, 8U, 16U, 32U}) {
    for (const std::int64_t rows : {1, 3, 7}) {
      for (const std::int64_t columns : {2, 5, 33}) {
        const std::int64_t item = itemsize;
        const std::vector<std::vector<std::int64_t>> all_strides = {{columns * item + item, item},
                                                                    {item, rows * item},
                                                                    {-(columns + 1) * item, item},
                                                                    {item, -2 * rows * item}};
        for (const std::vector<std::int64_t>& strides : all_strides) {
          TensorView view;
          view.itemsize = itemsize;
          view.nbytes = static_cast<std::uint64_t>(rows * columns) * itemsize;
          view.contiguous = false;
          view.shape = {rows, columns};
          view.strides = strides;
          const ByteRange range = touched_range(view);
          view.data = pages.end() - range.high;
          pack_and_unpack(view, view.nbytes);
          view.data = pages.begin() - range.low;
          pack_and_unpack(view, view.nbytes);
        }
      }
    }
  }
}

// ---- Layouts --------------------------------------------------------------------------------------------------------

TEST(CopyKernel, AFlipEndsWithTheLastElement) {
  for (const std::uint32_t itemsize : {1U, 2U, 4U, 8U, 16U}) {
    for (std::uint64_t elements = 1; elements <= 20; ++elements) {
      Tensor tensor = contiguous_tensor(elements * itemsize, 0, elements);
      tensor.view.itemsize = itemsize;
      tensor.view.flip_real = 1;
      const std::vector<TensorView> views = {tensor.view};
      const std::vector<Fragment> fragments = {{0, 0, 0, tensor.view.nbytes}};
      Bucket expected(tensor.view.nbytes);
      Bucket actual(tensor.view.nbytes);
      const Checksum expected_sum = pack(expected.data(), fragments, views, true);
      const Table table(CopyDirection::kPack, fragments, views);
      ASSERT_EQ(table.run(CopyDirection::kPack, actual.data(), true), expected_sum) << itemsize << " x " << elements;
      ASSERT_EQ(actual.image(), expected.image()) << itemsize << " x " << elements;
    }
  }
}

TEST(CopyKernel, AnElementFarIntoALogicalTensorIsFound) {
  // 16 GiB of logical bytes in 4 KiB of memory; offsets and indices do not fit into 32 bits.
  Tensor tensor = strided_tensor(2, {std::int64_t{1} << 22, 3, 683}, {0, 1366, 2}, 0, 3);
  ASSERT_FALSE(tensor.view.contiguous);
  const std::uint64_t start = (std::uint64_t{11} << 30) + 512;
  for (const std::uint64_t nbytes : {std::uint64_t{256}, std::uint64_t{20000}, tensor.view.nbytes - start}) {
    const std::uint64_t offset = nbytes == tensor.view.nbytes - start ? (tensor.view.nbytes - 3000) / 256 * 256 : start;
    const std::vector<Fragment> fragments = {{0, offset, 0, std::min(nbytes, tensor.view.nbytes - offset)}};
    const std::vector<TensorView> views = {tensor.view};
    Bucket expected(fragments[0].nbytes);
    Bucket actual(fragments[0].nbytes);
    const Checksum expected_sum = pack(expected.data(), fragments, views, true);
    const Table table(CopyDirection::kPack, fragments, views);
    EXPECT_EQ(table.run(CopyDirection::kPack, actual.data(), true), expected_sum) << "from " << offset;
    EXPECT_EQ(actual.image(), expected.image()) << "from " << offset;
  }
}

TEST(CopyKernel, SixtyFourDimensionsAreWalked) {
  // Sizes of 1 but for a few; normalize() would drop them, the kernel must not need that.
  std::vector<std::int64_t> shape(64, 1);
  std::vector<std::int64_t> strides(64, 12345);
  shape[3] = 5;
  strides[3] = 4;
  shape[31] = 7;
  strides[31] = -20;
  shape[63] = 3;
  strides[63] = 140;
  Tensor tensor;
  tensor.view.itemsize = 4;
  tensor.view.nbytes = 5 * 7 * 3 * 4;
  tensor.view.contiguous = false;
  tensor.view.shape = shape;
  tensor.view.strides = strides;
  give_memory(tensor, 0, 5);
  TensorView normal = tensor.view;
  normalize(normal);
  ASSERT_LT(normal.shape.size(), 4U);
  const std::vector<Fragment> fragments = {{0, 0, 0, tensor.view.nbytes}};
  Bucket expected(tensor.view.nbytes);
  Bucket actual(tensor.view.nbytes);
  const Checksum expected_sum = pack(expected.data(), fragments, std::vector{normal}, true);
  const Table table(CopyDirection::kPack, fragments, std::vector{tensor.view});
  EXPECT_EQ(table.run(CopyDirection::kPack, actual.data(), true), expected_sum);
  EXPECT_EQ(actual.image(), expected.image());
}

// ---- The launch -----------------------------------------------------------------------------------------------------

TEST(CopyKernel, AnyGridMovesTheSame) {
  std::mt19937 random(4);
  std::vector<Tensor> tensors;
  for (int i = 0; i < 40; ++i) tensors.push_back(random_tensor(random, /*source=*/true));
  const std::vector<TensorView> views = views_of(tensors);
  BucketPlanner plan(std::uint64_t{1} << 30);
  for (const Tensor& tensor : tensors) plan.add(tensor.view.nbytes);
  plan.finish();
  ASSERT_EQ(plan.buckets().size(), 1U);
  const std::uint64_t used = plan.buckets()[0].used_bytes;
  const std::uint64_t units = copy_units(used);
  ASSERT_GT(units, 20U);
  Bucket expected(used);
  const Checksum expected_sum = pack(expected.data(), plan.fragments(), views, true);
  const Table table(CopyDirection::kPack, plan.fragments(), views);
  for (const std::uint64_t warps :
       {std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{7}, units - 1, units, units + 1, std::uint64_t{1000}}) {
    Bucket actual(used);
    EXPECT_EQ(table.run(CopyDirection::kPack, actual.data(), true, warps), expected_sum) << warps << " warps";
    EXPECT_EQ(actual.image(), expected.image()) << warps << " warps";
  }
}

TEST(CopyKernel, APieceAloneLateInABucketIsMoved) {
  // A plan that still grows is packed piece by piece: the table begins far from the bucket's start.
  Tensor tensor = contiguous_tensor(3 * kUnit + 5, 2, 6);
  const std::uint64_t offset = 9 * kUnit + 256;
  const std::vector<Fragment> fragments = {{0, 0, offset, tensor.view.nbytes}};
  const std::vector<TensorView> views = {tensor.view};
  Bucket bucket(offset + tensor.view.nbytes);
  const Table table(CopyDirection::kPack, fragments, views);
  EXPECT_EQ(table.run(CopyDirection::kPack, bucket.data(), true),
            checksum_bytes(tensor.view.data, tensor.view.nbytes, offset));
  EXPECT_EQ(std::memcmp(bucket.data() + offset, tensor.view.data, tensor.view.nbytes), 0);
  EXPECT_TRUE(std::all_of(bucket.data(), bucket.data() + offset, [](std::byte b) { return b == kGuard; }));
}

TEST(CopyKernel, AnEmptyBucketIsMoved) {
  for (const CopyDirection direction : {CopyDirection::kPack, CopyDirection::kUnpack}) {
    Checksum sum{3, 4};
    CopyArgs args;
    args.sum = &sum;
    copy_on_host(direction, args);
    detail::copy_on_host_grid(direction, args, 5);
    EXPECT_EQ(sum, (Checksum{3, 4}));
    args.sum = nullptr;
    copy_on_host(direction, args);
  }
}

TEST(CopyKernel, ChecksumsOfLaunchesAddUp) {
  Tensor tensor = contiguous_tensor(5000, 0, 8);
  const std::vector<TensorView> views = {tensor.view};
  Bucket bucket(8192 + 904);
  const Table first(CopyDirection::kPack, std::vector<Fragment>{{0, 0, 0, 4096}}, views);
  const Table second(CopyDirection::kPack, std::vector<Fragment>{{0, 4096, 8192, 904}}, views);
  Checksum sum;
  copy_on_host(CopyDirection::kPack, first.args_of(bucket.data(), &sum));
  copy_on_host(CopyDirection::kPack, second.args_of(bucket.data(), &sum));
  Checksum expected = checksum_bytes(tensor.view.data, 4096, 0);
  expected += checksum_bytes(tensor.view.data + 4096, 904, 8192);
  EXPECT_EQ(sum, expected);
}

TEST(CopyKernel, GridCoversTheBucketAndIsBounded) {
  EXPECT_EQ(copy_grid_blocks(0, 132), 1U);
  EXPECT_EQ(copy_grid_blocks(1, 132), 1U);
  EXPECT_EQ(copy_grid_blocks(kUnit * kCopyBlockWarps, 132), 1U);
  EXPECT_EQ(copy_grid_blocks(kUnit * kCopyBlockWarps + 1, 132), 2U);
  EXPECT_EQ(copy_grid_blocks(std::uint64_t{1} << 50, 132), 132U * kCopyBlocksPerMultiprocessor);
  EXPECT_EQ(copy_grid_blocks(std::uint64_t{1} << 50, 0), 1U);
}

TEST(CopyKernel, AnAccessThatAGpuWouldTrapIsAnError) {
  alignas(16) std::array<std::byte, 32> memory{};
  EXPECT_THROW((void)detail::load_16(memory.data() + 8), InternalError);
  EXPECT_THROW((void)detail::load<8>(memory.data() + 4), InternalError);
  EXPECT_THROW(detail::store<2>(memory.data() + 1, 0), InternalError);
  EXPECT_THROW(detail::store_16(memory.data() + 1, {}), InternalError);
  EXPECT_EQ(detail::load<1>(memory.data() + 1), 0U);
}

// ---- Large buckets --------------------------------------------------------------------------------------------------

constexpr std::uint64_t kFourGiB = std::uint64_t{1} << 32;

TEST(CopyKernel, PiecesBeyondFourGibibytesOfABucketAreMoved) {
  const SparseMemory bucket(kFourGiB + 8 * kUnit);
  if (bucket.data() == nullptr) GTEST_SKIP() << "no address space of 4 GiB";
  Tensor tensor = contiguous_tensor(3 * kUnit + 12, 4, 9);
  const std::vector<TensorView> views = {tensor.view};
  // One before the boundary, one across, one behind.
  const std::vector<Fragment> fragments = {
      {0, 0, 0, 1024}, {0, 1024, kFourGiB - kUnit - 256, 2 * kUnit}, {0, 1024 + 2 * kUnit, kFourGiB + 3 * kUnit, 5004}};
  const Table table(CopyDirection::kPack, fragments, views);
  const Checksum packed = table.run(CopyDirection::kPack, bucket.data(), true);
  Checksum expected;
  for (const Fragment& fragment : fragments) {
    const std::byte* source = tensor.view.data + fragment.tensor_offset;
    expected += checksum_bytes(source, fragment.nbytes, fragment.bucket_offset);
    EXPECT_EQ(std::memcmp(bucket.data() + fragment.bucket_offset, source, fragment.nbytes), 0);
  }
  EXPECT_EQ(packed, expected);
  // Where 32 bits would have wrapped to.
  EXPECT_TRUE(
      std::all_of(bucket.data() + 1024, bucket.data() + 8 * kUnit, [](std::byte b) { return b == std::byte{}; }));
}

TEST(CopyKernel, APieceLargerThanFourGibibytesIsMovedAtItsFarEnd) {
  const std::uint64_t nbytes = kFourGiB + 5 * kUnit + 77;
  const SparseMemory source(nbytes + 16);
  const SparseMemory bucket(nbytes + kAlignment);
  if (source.data() == nullptr || bucket.data() == nullptr) GTEST_SKIP() << "no address space of 8 GiB";
  TensorView view;
  view.data = source.data() + 2;
  view.nbytes = nbytes;
  const Table table(CopyDirection::kPack, std::vector<Fragment>{{0, 0, 0, nbytes}}, std::vector{view});
  Checksum unused;
  const CopyArgs args = table.args_of(bucket.data(), &unused);
  // Only what two warps of so many would do: the unit behind the boundary, and the last.
  const std::uint64_t warps = copy_units(nbytes);
  for (const std::uint64_t warp : {kFourGiB / kUnit, warps - 1}) {
    const std::uint64_t begin = warp * kUnit;
    const std::uint64_t size = std::min(kUnit, nbytes - begin);
    fill_random({view.data + begin, static_cast<std::size_t>(size)}, warp);
    Checksum sum;
    for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
      const detail::LaneChecksum part = detail::copy_lane<CopyDirection::kPack>(args, warp, warps, lane);
      sum += Checksum{part.product, part.sum};
    }
    EXPECT_EQ(std::memcmp(bucket.data() + begin, view.data + begin, size), 0) << "unit at " << begin;
    EXPECT_EQ(sum, checksum_bytes(view.data + begin, size, begin)) << "unit at " << begin;
  }
}

// ---- The compiled image ---------------------------------------------------------------------------------------------

TEST(CopyKernel, ImageIsPtxThatNamesBothKernels) {
  const std::string_view image = kCopyKernelPtx;
  EXPECT_EQ(image.substr(0, 8), ".version");
  for (const char* name : {kPackKernelName, kUnpackKernelName}) {
    EXPECT_NE(image.find(concat(".visible .entry ", name, "(")), std::string_view::npos) << name;
  }
}

}  // namespace
}  // namespace fastsync
