#include "bucket/packer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "common/error.h"

namespace fastsync {
namespace {

using Bytes = std::vector<std::byte>;
constexpr std::byte kGuard{0x5C};

Bytes random_bytes(std::size_t nbytes, unsigned seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(nbytes);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

// Byte offsets of a view's elements from its data, in logical order: the definition the packer is held against.
std::vector<std::int64_t> element_offsets(const std::vector<std::int64_t>& shape,
                                          const std::vector<std::int64_t>& strides) {
  std::vector<std::int64_t> offsets = {0};
  for (std::size_t k = 0; k < shape.size(); ++k) {
    std::vector<std::int64_t> next;
    for (const std::int64_t offset : offsets) {
      for (std::int64_t i = 0; i < shape[k]; ++i) next.push_back(offset + i * strides[k]);
    }
    offsets = std::move(next);
  }
  return offsets;
}

TensorView raw_view(std::byte* data, std::uint32_t itemsize, std::vector<std::int64_t> shape,
                    std::vector<std::int64_t> strides) {
  TensorView view;
  view.data = data;
  view.itemsize = itemsize;
  view.nbytes = itemsize;
  for (const std::int64_t size : shape) view.nbytes *= static_cast<std::uint64_t>(size);
  view.contiguous = false;
  view.shape = std::move(shape);
  view.strides = std::move(strides);
  return view;
}

TensorView normalized(TensorView view) {
  normalize(view);
  return view;
}

TensorView contiguous_view(Bytes& bytes) {
  TensorView view;
  view.data = bytes.data();
  view.nbytes = bytes.size();
  return view;
}

// A strided tensor with memory of its own, its elements' offsets and its logical bytes.
struct Strided {
  Bytes memory;
  TensorView view;
  std::vector<std::int64_t> offsets;

  Bytes logical() const {
    Bytes result;
    for (const std::int64_t offset : offsets) {
      result.insert(result.end(), view.data + offset, view.data + offset + view.itemsize);
    }
    return result;
  }
};

// `skew` misaligns the first element. Any strides: memory is as large as they need.
Strided make_strided(std::uint32_t itemsize, const std::vector<std::int64_t>& shape,
                     const std::vector<std::int64_t>& strides, std::size_t skew, unsigned seed) {
  Strided result;
  result.view = raw_view(nullptr, itemsize, shape, strides);
  const ByteRange range = touched_range(result.view);
  result.memory = random_bytes(static_cast<std::size_t>(range.high - range.low) + skew, seed);
  result.view.data = result.memory.data() + skew - range.low;
  if (result.view.nbytes > 0) result.offsets = element_offsets(shape, strides);
  normalize(result.view);
  return result;
}

// Row-major strides of a larger base, in a random order of dimensions, with steps, flips and expansions: everything
// that views are made of.
Strided random_strided(std::mt19937& random, bool may_expand) {
  const std::uint32_t itemsize = 1U << (random() % 5);
  const std::size_t dims = random() % 5;
  std::vector<std::size_t> order(dims);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::shuffle(order.begin(), order.end(), random);
  std::vector<std::int64_t> shape(dims);
  std::vector<std::int64_t> strides(dims);
  std::int64_t next = itemsize;
  std::int64_t elements = 1;
  for (const std::size_t k : order) {
    const std::int64_t step = random() % 3 == 0 ? 1 + static_cast<std::int64_t>(random() % 3) : 1;
    shape[k] = 1 + static_cast<std::int64_t>(random() % (random() % 3 == 0 && elements < 300 ? 90 : 9));
    elements *= shape[k];
    strides[k] = next * step;
    next = strides[k] * (shape[k] + (random() % 3 == 0 ? static_cast<std::int64_t>(random() % 3) : 0));
    if (random() % 5 == 0) strides[k] = -strides[k];
    if (may_expand && random() % 8 == 0) strides[k] = 0;
  }
  return make_strided(itemsize, shape, strides, random() % 3, static_cast<unsigned>(random()));
}

Checksum by_definition(const std::byte* bucket, const std::vector<Fragment>& fragments) {
  Checksum sum;
  for (const Fragment& fragment : fragments) {
    for (std::uint64_t at = 0; at < fragment.nbytes; at += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, bucket + fragment.bucket_offset + at, std::min<std::uint64_t>(8, fragment.nbytes - at));
      const std::uint64_t key = kChecksumSeed + (fragment.bucket_offset + at) / 8 * kChecksumStep;
      const std::uint64_t mixed = word ^ key;
      sum += Checksum{(mixed & 0xFFFFFFFFU) * (mixed >> 32), word};
    }
  }
  return sum;
}

// The tensor cut into fragments at random multiples of the alignment, each in a bucket place of its own.
std::vector<Fragment> random_fragments(std::uint64_t nbytes, std::mt19937& random) {
  std::vector<Fragment> fragments;
  std::uint64_t place = kAlignment * (random() % 3);
  for (std::uint64_t at = 0; at < nbytes;) {
    std::uint64_t size = nbytes - at;
    if (random() % 3 != 0)
      size = std::min<std::uint64_t>(size, kAlignment * (1 + random() % (nbytes / kAlignment + 1)));
    fragments.push_back({0, at, place, size});
    at += size;
    place = align_up(place + size) + kAlignment * (random() % 2);
  }
  std::shuffle(fragments.begin(), fragments.end(), random);
  return fragments;
}

std::uint64_t bucket_size(const std::vector<Fragment>& fragments) {
  std::uint64_t end = 0;
  for (const Fragment& fragment : fragments) end = std::max(end, fragment.bucket_offset + fragment.nbytes);
  return end;
}

void expect_packs(const Strided& tensor, const Bytes& logical, std::mt19937& random, const std::string& what) {
  const std::vector<Fragment> fragments = random_fragments(logical.size(), random);
  const std::vector<TensorView> views = {tensor.view};
  for (const bool verify : {true, false}) {
    Bytes bucket(bucket_size(fragments) + 64, kGuard);
    const Checksum sum = pack(bucket.data(), fragments, views, verify);
    Bytes expected(bucket.size(), kGuard);
    for (const Fragment& fragment : fragments) {
      std::memcpy(expected.data() + fragment.bucket_offset, logical.data() + fragment.tensor_offset, fragment.nbytes);
    }
    ASSERT_EQ(bucket, expected) << what;
    ASSERT_EQ(sum, verify ? by_definition(expected.data(), fragments) : Checksum{}) << what;
    ASSERT_EQ(checksum_bucket(bucket.data(), fragments), by_definition(expected.data(), fragments)) << what;
  }
}

void expect_unpacks(Strided& tensor, std::mt19937& random, const std::string& what) {
  const std::vector<Fragment> fragments = random_fragments(tensor.view.nbytes, random);
  const Bytes bucket = random_bytes(bucket_size(fragments), static_cast<unsigned>(random()));
  Bytes sent(tensor.view.nbytes);
  for (const Fragment& fragment : fragments) {
    std::memcpy(sent.data() + fragment.tensor_offset, bucket.data() + fragment.bucket_offset, fragment.nbytes);
  }
  for (const StoreMode mode : {StoreMode::kCached, StoreMode::kStreaming}) {
    for (const bool verify : {true, false}) {
      std::fill(tensor.memory.begin(), tensor.memory.end(), kGuard);
      Bytes expected = tensor.memory;
      std::byte* first = expected.data() + (tensor.view.data - tensor.memory.data());
      for (std::size_t i = 0; i < tensor.offsets.size(); ++i) {
        std::memcpy(first + tensor.offsets[i], sent.data() + i * tensor.view.itemsize, tensor.view.itemsize);
      }
      const Checksum sum = unpack(bucket.data(), fragments, std::vector{tensor.view}, verify, mode);
      ASSERT_EQ(tensor.memory, expected) << what;
      ASSERT_EQ(sum, verify ? by_definition(bucket.data(), fragments) : Checksum{}) << what;
    }
  }
}

std::string text_of(const Strided& tensor) {
  std::string text = concat("itemsize ", tensor.view.itemsize, ", normalised shape x stride:");
  for (std::size_t k = 0; k < tensor.view.shape.size(); ++k) {
    text += concat(" ", tensor.view.shape[k], "x", tensor.view.strides[k]);
  }
  return text;
}

// ---- Packing --------------------------------------------------------------------------------------------------------

TEST(Packer, RandomViewsSendTheirLogicalValues) {
  std::mt19937 random(1);
  for (int round = 0; round < 600; ++round) {
    const Strided tensor = random_strided(random, /*may_expand=*/true);
    expect_packs(tensor, tensor.logical(), random, concat("round ", round, ": ", text_of(tensor)));
    if (HasFatalFailure()) return;
  }
}

TEST(Packer, RandomStridedDestinationsAreWrittenThroughAndNothingElseIs) {
  std::mt19937 random(2);
  for (int round = 0; round < 600; ++round) {
    Strided tensor = random_strided(random, /*may_expand=*/false);
    expect_unpacks(tensor, random, concat("round ", round, ": ", text_of(tensor)));
    if (HasFatalFailure()) return;
  }
}

struct Case {
  const char* name;
  std::uint32_t itemsize;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  // in elements
};

// Sizes around the tile sides and the block size, in both directions.
const Case kDistinctViews[] = {
    {"transposed_bytes", 1, {129, 200}, {1, 129}},
    {"transposed_halves", 2, {64, 64}, {1, 64}},
    {"transposed_halves_odd", 2, {65, 131}, {1, 67}},
    {"transposed_floats", 4, {33, 1000}, {1, 40}},
    {"transposed_doubles", 8, {100, 31}, {1, 128}},
    {"transposed_complex", 16, {17, 50}, {1, 17}},
    {"transposed_wide", 2, {200, 3000}, {1, 200}},
    {"transposed_backwards", 4, {70, 70}, {-1, -70}},
    {"batched_transpose", 4, {3, 40, 50}, {2000, 1, 40}},
    {"channels_last", 4, {16, 9, 3, 3}, {81, 1, 27, 9}},
    {"every_other", 2, {50001}, {2}},
    {"columns", 2, {300, 40}, {100, 1}},
    {"wide_columns", 2, {20, 4096}, {6000, 1}},
    {"odd_columns", 1, {301, 577}, {1000, 1}},
    {"reversed", 8, {5000}, {-1}},
    {"scalar_in_dims", 8, {1, 1, 1}, {7, 0, -3}},
    {"wide_items", 64, {40, 30}, {1, 40}},
};
const Case kOverlappingViews[] = {
    {"expanded_rows", 4, {1000, 3}, {0, 1}},
    {"expanded_element", 2, {9999}, {0}},
    {"sliding_window", 4, {100, 30}, {1, 1}},
};

Strided make_case(const Case& test, std::size_t skew) {
  std::vector<std::int64_t> strides = test.strides;
  for (std::int64_t& stride : strides) stride *= test.itemsize;
  return make_strided(test.itemsize, test.shape, strides, skew, 4);
}
std::string name_of(const testing::TestParamInfo<Case>& test) { return test.param.name; }

class PackerSource : public testing::TestWithParam<Case> {};
class PackerDestination : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Distinct, PackerSource, testing::ValuesIn(kDistinctViews), name_of);
INSTANTIATE_TEST_SUITE_P(Overlapping, PackerSource, testing::ValuesIn(kOverlappingViews), name_of);
INSTANTIATE_TEST_SUITE_P(Distinct, PackerDestination, testing::ValuesIn(kDistinctViews), name_of);

TEST_P(PackerSource, SendsItsLogicalValues) {
  std::mt19937 random(3);
  for (const std::size_t skew : {0, 1}) {
    const Strided tensor = make_case(GetParam(), skew);
    for (int round = 0; round < 4; ++round) expect_packs(tensor, tensor.logical(), random, GetParam().name);
  }
}

TEST_P(PackerDestination, IsWrittenThrough) {
  std::mt19937 random(5);
  Strided tensor = make_case(GetParam(), 1);
  for (int round = 0; round < 4; ++round) expect_unpacks(tensor, random, GetParam().name);
}

TEST(Packer, ManyTensorsInOneBucket) {
  std::mt19937 random(7);
  std::vector<Bytes> sources;
  std::vector<Bytes> targets;
  Manifest manifest;
  for (int i = 0; i < 200; ++i) {
    sources.push_back(random_bytes(random() % 5000, static_cast<unsigned>(i)));
    targets.emplace_back(sources.back().size(), kGuard);
    TensorMeta meta;
    meta.name = std::to_string(i);
    meta.dtype = "uint8";
    meta.shape = {static_cast<std::int64_t>(sources.back().size())};
    meta.nbytes = sources.back().size();
    manifest.append(meta);
  }
  std::vector<TensorView> from;
  std::vector<TensorView> to;
  for (Bytes& source : sources) from.push_back(contiguous_view(source));
  for (Bytes& target : targets) to.push_back(contiguous_view(target));
  for (const std::uint64_t bucket_bytes : {256, 4096, 65536, 1 << 22}) {
    const BucketPlan plan = BucketPlan::make(manifest, bucket_bytes);
    for (Bytes& target : targets) std::fill(target.begin(), target.end(), kGuard);
    Bytes bucket(plan.bucket_bytes);
    for (const BucketLayout& layout : plan.buckets) {
      const std::span<const Fragment> fragments(plan.fragments.data() + layout.first_fragment, layout.fragment_count);
      const Checksum packed = pack(bucket.data(), fragments, from, true);
      EXPECT_EQ(packed, checksum_bucket(bucket.data(), fragments));
      EXPECT_EQ(packed, unpack(bucket.data(), fragments, to, true, StoreMode::kStreaming));
      std::fill(bucket.begin(), bucket.end(), std::byte{0xEE});
    }
    EXPECT_EQ(targets, sources) << bucket_bytes;
  }
}

TEST(Packer, AFragmentWithoutDestinationIsCheckedAndNotCopied) {
  const Bytes bucket = random_bytes(1000, 8);
  const std::vector<Fragment> fragments = {{0, 0, 0, 1000}};
  const std::vector<TensorView> nowhere(1);
  EXPECT_EQ(unpack(bucket.data(), fragments, nowhere, true, StoreMode::kCached),
            by_definition(bucket.data(), fragments));
  EXPECT_EQ(unpack(bucket.data(), fragments, nowhere, false, StoreMode::kCached), Checksum{});
}

TEST(Packer, AChangedByteChangesTheChecksumOfUnpack) {
  Bytes bucket = random_bytes(1000, 9);
  Bytes target(1000);
  const std::vector<Fragment> fragments = {{0, 0, 0, 1000}};
  const std::vector<TensorView> views = {contiguous_view(target)};
  const Checksum good = unpack(bucket.data(), fragments, views, true, StoreMode::kCached);
  bucket[999] ^= std::byte{1};
  EXPECT_NE(unpack(bucket.data(), fragments, views, true, StoreMode::kCached), good);
}

// ---- Sign flips -----------------------------------------------------------------------------------------------------

struct Flip {
  std::uint32_t itemsize;
  bool complex;
  bool real;
  bool imag;
};

class PackerFlip : public testing::TestWithParam<Flip> {};

INSTANTIATE_TEST_SUITE_P(Signs, PackerFlip,
                         testing::Values(Flip{2, false, true, false}, Flip{4, false, true, false},
                                         Flip{8, false, true, false}, Flip{1, false, true, false},
                                         Flip{4, true, false, true}, Flip{8, true, false, true},
                                         Flip{16, true, false, true}, Flip{16, true, true, true},
                                         Flip{8, true, true, false}),
                         [](const auto& test) {
                           const Flip& flip = test.param;
                           return concat(flip.complex ? "complex" : "real", flip.itemsize * 8, flip.real ? "_neg" : "",
                                         flip.imag ? "_conj" : "");
                         });

TEST_P(PackerFlip, ChangesSignBitsOfThePackedBytesOnly) {
  const Flip& flip = GetParam();
  std::mt19937 random(10);
  const std::int64_t item = flip.itemsize;
  const std::vector<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>> layouts = {
      {{9001}, {item}},                  // contiguous, longer than a block
      {{77, 90}, {item, 77 * item}},     // transposed
      {{501}, {3 * item}},               // stepped
      {{5, 1024}, {2048 * item, item}},  // long runs
  };
  for (const auto& [shape, strides] : layouts) {
    Strided tensor = make_strided(flip.itemsize, shape, strides, 1, 11);
    tensor.view.complex = flip.complex;
    tensor.view.flip_real = flip.real ? 1 : 0;
    tensor.view.flip_imag = flip.imag ? 1 : 0;
    normalize(tensor.view);
    const Bytes before = tensor.memory;
    Bytes expected = tensor.logical();
    for (std::size_t at = 0; at < expected.size(); at += flip.itemsize) {
      const std::size_t part = flip.complex ? flip.itemsize / 2 : flip.itemsize;
      if (flip.real) expected[at + part - 1] ^= std::byte{0x80};
      if (flip.imag) expected[at + flip.itemsize - 1] ^= std::byte{0x80};
    }
    for (int round = 0; round < 4; ++round) expect_packs(tensor, expected, random, text_of(tensor));
    EXPECT_EQ(tensor.memory, before);
  }
}

// ---- Views ----------------------------------------------------------------------------------------------------------

TEST(Normalize, MergesWhatIsContiguous) {
  std::byte memory[4096];
  TensorView view = normalized(raw_view(memory, 4, {2, 3, 4}, {48, 16, 4}));
  EXPECT_TRUE(view.contiguous);
  EXPECT_TRUE(view.shape.empty());

  view = normalized(raw_view(memory, 4, {2, 1, 3, 4}, {100, 999, 16, 4}));
  EXPECT_FALSE(view.contiguous);
  EXPECT_EQ(view.shape, (std::vector<std::int64_t>{2, 12}));
  EXPECT_EQ(view.strides, (std::vector<std::int64_t>{100, 4}));

  view = normalized(raw_view(memory, 4, {5, 6, 7}, {0, 0, 0}));
  EXPECT_EQ(view.shape, (std::vector<std::int64_t>{210}));

  view = normalized(raw_view(memory, 2, {10, 10}, {2, 20}));
  EXPECT_EQ(view.shape, (std::vector<std::int64_t>{10, 10}));
  EXPECT_FALSE(view.contiguous);
}

TEST(Normalize, ScalarsAndEmptyViewsAreContiguous) {
  std::byte memory[16];
  EXPECT_TRUE(normalized(raw_view(memory, 8, {}, {})).contiguous);
  EXPECT_TRUE(normalized(raw_view(memory, 8, {1, 1}, {-8, 0})).contiguous);
  EXPECT_TRUE(normalized(raw_view(nullptr, 8, {3, 0, 5}, {7, 7, 7})).contiguous);
}

TEST(Normalize, IsIdempotent) {
  std::mt19937 random(12);
  for (int round = 0; round < 300; ++round) {
    const Strided tensor = random_strided(random, true);
    TensorView again = tensor.view;
    normalize(again);
    EXPECT_EQ(again.shape, tensor.view.shape);
    EXPECT_EQ(again.strides, tensor.view.strides);
    EXPECT_EQ(again.contiguous, tensor.view.contiguous);
  }
}

TEST(Normalize, RefusesViewsThatContradictThemselves) {
  std::byte memory[64];
  const auto refused = [](TensorView view) { EXPECT_THROW(normalize(view), InvalidArgument); };
  TensorView good = raw_view(memory, 4, {2, 3}, {12, 4});
  TensorView view = good;
  view.nbytes += 4;
  refused(view);
  view = good;
  view.strides.pop_back();
  refused(view);
  view = good;
  view.shape[0] = -2;
  refused(view);
  view = good;
  view.itemsize = 3;
  refused(view);
  view = good;
  view.itemsize = 0;
  refused(view);
  view = good;
  view.shape = {std::int64_t{1} << 40, std::int64_t{1} << 40};
  refused(view);
  view = good;
  view.strides = {INT64_MIN, 4};
  refused(view);
  view = good;
  view.strides = {(std::int64_t{1} << 62) - 1, (std::int64_t{1} << 61)};
  refused(view);
  view = raw_view(memory, 1, std::vector<std::int64_t>(65, 1), std::vector<std::int64_t>(65, 1));
  refused(view);
  view = good;
  view.flip_imag = 1;
  refused(view);
  view = good;
  view.contiguous = true;
  view.nbytes = 23;
  refused(view);
}

TEST(TouchedRange, CoversEveryElementAndNoMore) {
  std::mt19937 random(13);
  for (int round = 0; round < 500; ++round) {
    const Strided tensor = random_strided(random, true);
    const auto [low, high] = std::minmax_element(tensor.offsets.begin(), tensor.offsets.end());
    const ByteRange range = touched_range(tensor.view);
    EXPECT_EQ(range.low, *low);
    EXPECT_EQ(range.high, *high + tensor.view.itemsize);
  }
  EXPECT_EQ(touched_range(TensorView{}).high, 0);
}

// ---- Overlap --------------------------------------------------------------------------------------------------------

// Any strides at all, mostly small, so that overlaps and near misses are common.
TensorView tangled_view(std::mt19937& random, std::byte* data) {
  const std::uint32_t itemsize = 1U << (random() % 4);
  const std::size_t dims = random() % 4;
  std::vector<std::int64_t> shape(dims);
  std::vector<std::int64_t> strides(dims);
  for (std::size_t k = 0; k < dims; ++k) {
    shape[k] = 1 + static_cast<std::int64_t>(random() % 6);
    strides[k] = static_cast<std::int64_t>(random() % 60) - 25;
    if (random() % 2 == 0) strides[k] *= itemsize;
  }
  return raw_view(data, itemsize, shape, strides);
}

std::vector<std::byte*> touched_bytes(const TensorView& view) {
  std::vector<std::byte*> bytes;
  for (const std::int64_t offset : element_offsets(view.shape, view.strides)) {
    for (std::uint32_t k = 0; k < view.itemsize; ++k) bytes.push_back(view.data + offset + k);
  }
  return bytes;
}

TEST(OverlapsItself, AgreesWithEnumeration) {
  static std::byte memory[8192];
  std::mt19937 random(14);
  int overlapping = 0;
  constexpr int kRounds = 20000;
  for (int round = 0; round < kRounds; ++round) {
    const TensorView raw = tangled_view(random, memory + 4096);
    const std::vector<std::byte*> bytes = touched_bytes(raw);
    const bool expected = std::set<std::byte*>(bytes.begin(), bytes.end()).size() != bytes.size();
    overlapping += expected ? 1 : 0;
    ASSERT_EQ(overlaps_itself(raw), expected) << "round " << round;
    ASSERT_EQ(overlaps_itself(normalized(raw)), expected) << "round " << round;
  }
  EXPECT_GT(overlapping, kRounds / 10);
  EXPECT_LT(overlapping, kRounds * 9 / 10);
}

TEST(ShareBytes, AgreesWithEnumeration) {
  static std::byte memory[8192];
  std::mt19937 random(15);
  int sharing = 0;
  constexpr int kRounds = 20000;
  for (int round = 0; round < kRounds; ++round) {
    const TensorView a = tangled_view(random, memory + 4096);
    const TensorView b = tangled_view(random, memory + 4096 + random() % 200);
    const std::vector<std::byte*> bytes_a = touched_bytes(a);
    const std::set<std::byte*> set_a(bytes_a.begin(), bytes_a.end());
    const std::vector<std::byte*> bytes_b = touched_bytes(b);
    const bool expected =
        std::any_of(bytes_b.begin(), bytes_b.end(), [&](std::byte* p) { return set_a.count(p) != 0; });
    sharing += expected ? 1 : 0;
    ASSERT_EQ(share_bytes(a, b), expected) << "round " << round;
    ASSERT_EQ(share_bytes(b, a), expected) << "round " << round;
    ASSERT_EQ(share_bytes(normalized(a), normalized(b)), expected) << "round " << round;
  }
  EXPECT_GT(sharing, kRounds / 10);
  EXPECT_LT(sharing, kRounds * 9 / 10);
}

// The addresses are never touched, so these may be as large as a real model's and larger.
std::byte* address(std::uintptr_t value) { return reinterpret_cast<std::byte*>(value); }

TEST(ShareBytes, HugeInterleavedViewsAreDecidedAtOnce) {
  constexpr std::int64_t kRows = 1 << 20;
  constexpr std::int64_t kPitch = 1 << 20;
  const auto columns = [](std::int64_t first, std::int64_t count) {
    return normalized(
        raw_view(address(0x10000000 + static_cast<std::uintptr_t>(first)), 2, {kRows, count / 2}, {kPitch, 2}));
  };
  EXPECT_FALSE(share_bytes(columns(0, kPitch / 2), columns(kPitch / 2, kPitch / 2)));
  EXPECT_TRUE(share_bytes(columns(0, kPitch / 2 + 2), columns(kPitch / 2, kPitch / 2)));
  const TensorView even = normalized(raw_view(address(0x10000000), 4, {std::int64_t{1} << 36}, {8}));
  const TensorView odd = normalized(raw_view(address(0x10000004), 4, {std::int64_t{1} << 36}, {8}));
  EXPECT_FALSE(share_bytes(even, odd));
  EXPECT_TRUE(share_bytes(even, even));
  // Row-major and column-major halves of one matrix: tiles that meet only in a corner.
  const TensorView upper = normalized(raw_view(address(0x10000000), 2, {1000, 1000}, {4000, 2}));
  const TensorView right = normalized(raw_view(address(0x10000000 + 2000), 2, {1000, 2000}, {2, 4000}));
  EXPECT_FALSE(share_bytes(upper, right));
}

TEST(OverlapsItself, HugeViewsAreDecidedAtOnce) {
  constexpr std::int64_t kBig = std::int64_t{1} << 30;
  EXPECT_FALSE(overlaps_itself(normalized(raw_view(address(0x1000), 2, {kBig, 1024}, {2, 2 * kBig}))));
  EXPECT_TRUE(overlaps_itself(normalized(raw_view(address(0x1000), 2, {kBig, 1024}, {2, 2 * kBig - 2}))));
  EXPECT_TRUE(overlaps_itself(normalized(raw_view(address(0x1000), 2, {kBig, 7}, {0, 2}))));
  EXPECT_FALSE(overlaps_itself(normalized(raw_view(address(0x1000), 16, {3, kBig}, {-16, -64}))));
}

TEST(ShareBytes, EmptyViewsShareNothing) {
  std::byte memory[16];
  TensorView empty;
  empty.data = memory;
  TensorView full;
  full.data = memory;
  full.nbytes = 16;
  EXPECT_FALSE(share_bytes(empty, full));
  EXPECT_FALSE(share_bytes(full, empty));
  EXPECT_FALSE(overlaps_itself(empty));
  EXPECT_TRUE(share_bytes(full, full));
}

}  // namespace
}  // namespace fastsync
