#include "common/checksum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "common/checksum_kernel.h"

namespace fastsync {
namespace {

using detail::ChecksumKernel;

// The definition in checksum.h, a byte at a time, so that it shares no code with any kernel.
Checksum by_definition(const std::byte* src, std::size_t nbytes, std::uint64_t bucket_offset) {
  Checksum result;
  for (std::size_t at = 0; at < nbytes; at += 8) {
    std::uint64_t word = 0;
    for (std::size_t k = 0; k < 8 && at + k < nbytes; ++k) {
      word |= std::uint64_t{std::to_integer<std::uint8_t>(src[at + k])} << (8 * k);
    }
    const std::uint64_t index = (bucket_offset + at) / 8;
    const std::uint64_t key = kChecksumSeed + index * kChecksumStep;
    const std::uint64_t mixed = word ^ key;
    result.product += (mixed & 0xFFFFFFFFU) * (mixed >> 32);
    result.sum += word;
  }
  return result;
}

std::vector<std::byte> random_bytes(std::size_t nbytes, unsigned seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(nbytes);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

std::vector<ChecksumKernel> runnable_kernels() {
  std::vector<ChecksumKernel> result;
  for (const ChecksumKernel& kernel : detail::checksum_kernels()) {
    if (kernel.supported) result.push_back(kernel);
  }
  return result;
}

class ChecksumKernelTest : public testing::TestWithParam<ChecksumKernel> {};

INSTANTIATE_TEST_SUITE_P(Runnable, ChecksumKernelTest, testing::ValuesIn(runnable_kernels()),
                         [](const auto& test) { return std::string(test.param.name); });

constexpr std::size_t kMargin = 192;
constexpr std::byte kGuard{0x5C};

TEST_P(ChecksumKernelTest, FollowsTheDefinitionAtEveryLengthAndAlignment) {
  const ChecksumKernel& kernel = GetParam();
  std::vector<std::size_t> lengths;
  for (std::size_t n = 0; n <= 400; ++n) lengths.push_back(n);
  for (const std::size_t n : {1023, 1024, 1025, 1152, 1280, 2047, 2300, 4095, 4096, 4097, 8200, 20011}) {
    lengths.push_back(n);
  }
  const std::vector<std::byte> source = random_bytes(20011 + kMargin, 1);
  std::vector<std::byte> target(20011 + 2 * kMargin);
  std::mt19937 random(2);
  for (const std::size_t length : lengths) {
    for (int round = 0; round < 12; ++round) {
      const std::byte* src = source.data() + random() % 64;
      // Every third destination is word-aligned relative to a line, which takes the streaming kernels' other branch.
      std::byte* dst = target.data() + 64 + (round % 3 == 0 ? random() % 8 * 8 : random() % 64);
      const std::uint64_t offset = (random() % 1000000) * 8;
      const Checksum expected = by_definition(src, length, offset);
      ASSERT_EQ(kernel.checksum(src, length, offset), expected) << "length " << length;

      const auto expect_copied = [&](const char* what) {
        ASSERT_EQ(std::memcmp(dst, src, length), 0) << what << " of " << length << " bytes";
        ASSERT_TRUE(std::all_of(target.data(), dst, [](std::byte b) { return b == kGuard; }))
            << what << " of " << length << " bytes wrote below its destination";
        ASSERT_TRUE(std::all_of(dst + length, dst + length + 64, [](std::byte b) { return b == kGuard; }))
            << what << " of " << length << " bytes wrote past its destination";
        std::fill(target.data(), dst + length + 64, kGuard);
      };
      std::fill(target.data(), dst + length + 64, kGuard);
      ASSERT_EQ(kernel.copy_checksum_cached(dst, src, length, offset), expected) << "length " << length;
      expect_copied("cached copy");
      ASSERT_EQ(kernel.copy_checksum_streaming(dst, src, length, offset), expected) << "length " << length;
      expect_copied("streaming copy");
      kernel.copy_streaming(dst, src, length);
      expect_copied("unchecked streaming copy");
    }
  }
}

TEST_P(ChecksumKernelTest, ReadsNothingBeyondTheEnds) {
  // Heap blocks of the exact size: a sanitizer build reports any read outside.
  for (std::size_t length = 0; length <= 300; ++length) {
    const std::vector<std::byte> source = random_bytes(length, static_cast<unsigned>(length));
    std::vector<std::byte> target(length);
    const Checksum expected = by_definition(source.data(), length, 256);
    EXPECT_EQ(GetParam().copy_checksum_cached(target.data(), source.data(), length, 256), expected);
    EXPECT_EQ(GetParam().copy_checksum_streaming(target.data(), source.data(), length, 256), expected);
    EXPECT_EQ(target, source);
  }
}

TEST_P(ChecksumKernelTest, PassesItsSelfTest) { EXPECT_TRUE(detail::passes_self_test(GetParam())); }

TEST(ChecksumKernels, PortableIsLastAndAlwaysRuns) {
  const ChecksumKernel& last = detail::checksum_kernels().back();
  EXPECT_EQ(last.name, "portable");
  EXPECT_TRUE(last.supported);
}

TEST(ChecksumKernels, TheChosenOneRunsHere) {
  const auto kernels = runnable_kernels();
  EXPECT_TRUE(std::any_of(kernels.begin(), kernels.end(), [](const auto& k) { return k.name == copy_kernel_name(); }))
      << copy_kernel_name();
}

// Kernels with one fault each, as a miscompiled or misdetected vector path would have.
ChecksumKernel faulty(std::string_view name, ChecksumKernel base) {
  base.name = name;
  return base;
}
ChecksumKernel portable() { return detail::checksum_kernels().back(); }

ChecksumKernel wrong_sum() {
  ChecksumKernel kernel = faulty("wrong_sum", portable());
  kernel.checksum = [](const std::byte* src, std::size_t nbytes, std::uint64_t offset) noexcept {
    Checksum result = portable().checksum(src, nbytes, offset);
    if (nbytes > 4000) result.sum += 1;
    return result;
  };
  return kernel;
}

ChecksumKernel drops_last_byte() {
  ChecksumKernel kernel = faulty("drops_last_byte", portable());
  kernel.copy_streaming = [](std::byte* dst, const std::byte* src, std::size_t nbytes) noexcept {
    if (nbytes > 1) std::memcpy(dst, src, nbytes - 1);
  };
  return kernel;
}

ChecksumKernel writes_past_end() {
  ChecksumKernel kernel = faulty("writes_past_end", portable());
  kernel.copy_checksum_cached = [](std::byte* dst, const std::byte* src, std::size_t nbytes,
                                   std::uint64_t offset) noexcept {
    const Checksum result = portable().copy_checksum_cached(dst, src, nbytes, offset);
    if (nbytes == 65) dst[nbytes] = std::byte{1};
    return result;
  };
  return kernel;
}

ChecksumKernel ignores_offset() {
  ChecksumKernel kernel = faulty("ignores_offset", portable());
  kernel.copy_checksum_streaming = [](std::byte* dst, const std::byte* src, std::size_t nbytes,
                                      std::uint64_t) noexcept {
    return portable().copy_checksum_streaming(dst, src, nbytes, 0);
  };
  return kernel;
}

TEST(ChecksumSelfTest, FindsEachKindOfFault) {
  for (const ChecksumKernel& kernel : {wrong_sum(), drops_last_byte(), writes_past_end(), ignores_offset()}) {
    EXPECT_FALSE(detail::passes_self_test(kernel)) << kernel.name;
  }
}

TEST(ChecksumKernelChoice, FallsToTheNextLowerAfterAFailedSelfTestAndSaysSo) {
  ChecksumKernel good = portable();
  good.name = "good";
  const std::vector<ChecksumKernel> kernels = {wrong_sum(), drops_last_byte(), good, portable()};
  testing::internal::CaptureStderr();
  EXPECT_EQ(detail::choose_kernel(kernels, "").name, "good");
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("'wrong_sum' fails its self-test"), std::string::npos) << said;
  EXPECT_NE(said.find("'drops_last_byte' fails its self-test"), std::string::npos) << said;
}

TEST(ChecksumKernelChoice, SkipsWhatTheCpuLacksWithoutAWord) {
  ChecksumKernel missing = portable();
  missing.name = "missing";
  missing.supported = false;
  const std::vector<ChecksumKernel> kernels = {missing, portable()};
  testing::internal::CaptureStderr();
  EXPECT_EQ(detail::choose_kernel(kernels, "").name, "portable");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(ChecksumKernelChoice, ANameForcesALowerOne) {
  ChecksumKernel best = portable();
  best.name = "best";
  const std::vector<ChecksumKernel> kernels = {best, portable()};
  EXPECT_EQ(detail::choose_kernel(kernels, "").name, "best");
  EXPECT_EQ(detail::choose_kernel(kernels, "portable").name, "portable");
}

TEST(ChecksumKernelChoice, AnUnknownNameIsReportedAndTheBestIsUsed) {
  testing::internal::CaptureStderr();
  const std::vector<ChecksumKernel> kernels = {portable()};
  EXPECT_EQ(detail::choose_kernel(kernels, "mmx").name, "portable");
  EXPECT_NE(testing::internal::GetCapturedStderr().find("'mmx'"), std::string::npos);
}

class ChecksumFaults : public testing::Test {
 protected:
  std::vector<std::byte> bytes_ = random_bytes(4096, 3);
  Checksum good_ = checksum_bytes(bytes_.data(), bytes_.size(), 0);
  void expect_noticed(const char* what) const {
    EXPECT_NE(checksum_bytes(bytes_.data(), bytes_.size(), 0), good_) << what;
  }
};

TEST_F(ChecksumFaults, EverySingleBitFlipIsNoticed) {
  for (std::size_t bit = 0; bit < bytes_.size() * 8; ++bit) {
    const auto mask = static_cast<std::byte>(1U << (bit % 8));
    bytes_[bit / 8] ^= mask;
    ASSERT_NE(checksum_bytes(bytes_.data(), bytes_.size(), 0), good_) << "bit " << bit;
    bytes_[bit / 8] ^= mask;
  }
}

TEST_F(ChecksumFaults, SwappedWordsAreNoticed) {
  std::swap_ranges(bytes_.begin(), bytes_.begin() + 8, bytes_.begin() + 2048);
  expect_noticed("swapped words");
}

TEST_F(ChecksumFaults, AShiftIsNoticed) {
  std::rotate(bytes_.begin(), bytes_.begin() + 256, bytes_.end());
  expect_noticed("bytes moved by one alignment unit");
}

TEST_F(ChecksumFaults, AStaleOrZeroedBlockIsNoticed) {
  std::fill_n(bytes_.begin() + 1024, 64, std::byte{0});
  expect_noticed("zeroed line");
}

TEST(Checksum, IsASumOverPiecesInAnyOrder) {
  const std::vector<std::byte> bytes = random_bytes(10000, 4);
  const Checksum whole = checksum_bytes(bytes.data(), bytes.size(), 512);
  std::vector<std::size_t> cuts = {0, 8, 256, 264, 1032, 5000, 9992, 10000};
  std::vector<std::size_t> order = {5, 0, 3, 6, 1, 4, 2};
  Checksum sum;
  for (const std::size_t piece : order) {
    sum += checksum_bytes(bytes.data() + cuts[piece], cuts[piece + 1] - cuts[piece], 512 + cuts[piece]);
  }
  EXPECT_EQ(sum, whole);
}

TEST(Checksum, APartialLastWordCountsAsZeroExtended) {
  std::vector<std::byte> bytes = random_bytes(24, 5);
  for (std::size_t length = 17; length < 24; ++length) {
    std::vector<std::byte> padded(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(length));
    padded.resize(24);
    EXPECT_EQ(checksum_bytes(bytes.data(), length, 64), checksum_bytes(padded.data(), 24, 64));
  }
}

// Computed from the formula with independent code: they hold the definition itself, which other machines share, in place.
TEST(Checksum, KnownValues) {
  EXPECT_EQ(checksum_bytes(nullptr, 0, 0), Checksum{});
  const std::byte one[1] = {std::byte{1}};
  EXPECT_EQ(checksum_bytes(one, 1, 0), (Checksum{0x4EAB8E1B31C51E74ULL, 1}));
  const std::uint64_t words[2] = {0x0123456789ABCDEFULL, 0xFEDCBA9876543210ULL};
  EXPECT_EQ(checksum_bytes(words, 16, 256), (Checksum{0x836BCDA5634AFFF8ULL, 0xFFFFFFFFFFFFFFFFULL}));
}

TEST(CopyBytes, EveryModeCopiesExactlyTheBytes) {
  const std::vector<std::byte> source = random_bytes(70001, 6);
  for (const StoreMode mode : {StoreMode::kCached, StoreMode::kStreaming, StoreMode::kStreamingUnfenced}) {
    std::vector<std::byte> target(source.size() + 2, kGuard);
    copy_bytes(target.data() + 1, source.data(), source.size(), mode);
    fence_streaming_stores();
    EXPECT_TRUE(std::equal(source.begin(), source.end(), target.begin() + 1));
    EXPECT_EQ(target.front(), kGuard);
    EXPECT_EQ(target.back(), kGuard);
    EXPECT_EQ(copy_and_checksum(target.data() + 1, source.data(), source.size(), 768, mode),
              by_definition(source.data(), source.size(), 768));
  }
}

TEST(CopyBytes, NothingFromNowhereToNowhere) {
  for (const StoreMode mode : {StoreMode::kCached, StoreMode::kStreaming, StoreMode::kStreamingUnfenced}) {
    copy_bytes(nullptr, nullptr, 0, mode);
    EXPECT_EQ(copy_and_checksum(nullptr, nullptr, 0, 0, mode), Checksum{});
  }
}

}  // namespace
}  // namespace fastsync
