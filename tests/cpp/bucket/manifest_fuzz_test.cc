// Bytes from a peer, as a broken or foreign peer would send them. Seeded and bounded, so a failure repeats.
//
// Whatever the bytes, append_serialized() parses them or throws CommError, leaves the manifest whole, and asks for memory
// in proportion to the message. Build with FASTSYNC_SANITIZE=address to see reads outside it as well.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "bucket/manifest.h"
#include "common/error.h"

namespace {
// The largest single request and the total of the current measurement. One thread measures.
std::atomic<bool> g_measuring{false};
std::atomic<std::size_t> g_largest{0};
std::atomic<std::size_t> g_total{0};
}  // namespace

// The whole test program allocates through these. Inlined, they would look to GCC like a new that is freed by free().
[[gnu::noinline]] void* operator new(std::size_t nbytes) {
  if (g_measuring.load(std::memory_order_relaxed)) {
    g_total += nbytes;
    g_largest = std::max(g_largest.load(), nbytes);
  }
  if (void* memory = std::malloc(nbytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t nbytes, const std::nothrow_t&) noexcept {
  return std::malloc(nbytes);  // std::stable_sort's; a sanitizer's own would not go with the operators below
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace fastsync {
namespace {

using Bytes = std::vector<std::byte>;

TensorMeta random_meta(std::mt19937_64& random, int serial) {
  TensorMeta meta;
  meta.name = concat("layer.", serial, std::string(random() % 20, 'x'));
  meta.dtype = random() % 2 == 0 ? "bfloat16" : "float8_e4m3fn";
  meta.itemsize = 1U << (random() % 5);
  meta.nbytes = meta.itemsize;
  for (std::size_t k = random() % 5; k > 0; --k) {
    meta.shape.push_back(static_cast<std::int64_t>(random() % 5000));
    meta.nbytes *= static_cast<std::uint64_t>(meta.shape.back());
  }
  if (random() % 3 == 0) {
    meta.tie.group = 1 + static_cast<std::uint32_t>(random() % 1000);
    meta.tie.byte_offset = random() >> (random() % 64);
    for (const std::int64_t dim : meta.shape) meta.tie.strides.push_back(dim - 2500);
  }
  return meta;
}

Bytes random_message(std::mt19937_64& random) {
  Manifest manifest;
  for (int i = 0, n = static_cast<int>(random() % 12); i < n; ++i) manifest.append(random_meta(random, i));
  return manifest.serialize(0, manifest.size());
}

void mutate(Bytes& bytes, std::mt19937_64& random) {
  for (std::size_t n = 1 + random() % 4; n > 0 && !bytes.empty(); --n) {
    const std::size_t at = random() % bytes.size();
    const auto position = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    switch (random() % 6) {
      case 0: bytes[at] ^= static_cast<std::byte>(1U << (random() % 8)); break;
      case 1: bytes[at] = static_cast<std::byte>(random()); break;
      case 2: bytes[at] = std::byte{0xFF}; break;
      case 3:
        bytes.erase(position,
                    bytes.begin() + static_cast<std::ptrdiff_t>(std::min(bytes.size(), at + 1 + random() % 8)));
        break;
      case 4: bytes.insert(position, 1 + random() % 12, static_cast<std::byte>(random())); break;
      default: bytes.resize(at); break;
    }
  }
}

// Allocation allowed for a message: an entry of 5 bytes becomes a TensorMeta and a place in the index, and vectors
// double as they grow.
std::size_t memory_bound(const Bytes& bytes) { return 16 * 1024 + 256 * bytes.size(); }

// True where the bytes were accepted.
bool parses(const Bytes& bytes) {
  Manifest manifest;
  TensorMeta first;
  first.name = "already there";
  first.dtype = "uint8";
  first.nbytes = 1;
  manifest.append(first);
  const std::uint64_t before = manifest.fingerprint();
  // An exact heap copy, so that a sanitizer sees any read past its end.
  const Bytes exact(bytes.begin(), bytes.end());
  g_largest = 0;
  g_total = 0;
  g_measuring = true;
  bool accepted = true;
  try {
    manifest.append_serialized(exact);
  } catch (const CommError&) {
    accepted = false;
  }
  g_measuring = false;
  EXPECT_LE(g_total.load(), memory_bound(bytes)) << bytes.size() << " bytes";
  if (!accepted) {
    EXPECT_EQ(manifest.size(), 1U);
    EXPECT_EQ(manifest.fingerprint(), before);
    EXPECT_EQ(manifest.nbytes(), 1U);
  } else {
    // There is one serialized form: what parses is what serialize() writes.
    EXPECT_EQ(manifest.serialize(1, manifest.size()), bytes);
  }
  return accepted;
}

TEST(ManifestFuzz, RandomBytesAreRefused) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 50000; ++round) {
    Bytes bytes(random() % 200);
    for (std::byte& b : bytes) b = static_cast<std::byte>(random());
    if (!bytes.empty() && random() % 2 == 0) bytes[0] = std::byte{1};
    if (bytes.size() > 1 && random() % 2 == 0) bytes[1] = static_cast<std::byte>(random() % 30);
    parses(bytes);
    ASSERT_FALSE(HasFailure()) << "round " << round;
  }
}

TEST(ManifestFuzz, MutatedMessagesParseOrAreRefused) {
  std::mt19937_64 random(2);
  int accepted = 0;
  constexpr int kRounds = 50000;
  for (int round = 0; round < kRounds; ++round) {
    Bytes bytes = random_message(random);
    mutate(bytes, random);
    accepted += parses(bytes) ? 1 : 0;
    ASSERT_FALSE(HasFailure()) << "round " << round;
  }
  // A changed letter or dimension is another valid message: some must get through, or the mutations are too coarse.
  EXPECT_GT(accepted, kRounds / 100);
  EXPECT_LT(accepted, kRounds / 2);
}

TEST(ManifestFuzz, UnchangedMessagesParse) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 2000; ++round) ASSERT_TRUE(parses(random_message(random))) << "round " << round;
}

TEST(ManifestFuzz, HugeCountsAndLengthsAskForNoMemory) {
  const auto message = [](std::initializer_list<int> values) {
    Bytes bytes;
    for (const int value : values) bytes.push_back(static_cast<std::byte>(value));
    return bytes;
  };
  const std::vector<Bytes> messages = {
      // 2^63 entries
      message({1, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 1}),
      // a name of 2^32 bytes
      message({1, 1, 0x80, 0x80, 0x80, 0x80, 0x10, 'x', 'x', 'x', 'x'}),
      // a name of 64 KiB that is not there
      message({1, 1, 0x80, 0x80, 0x04, 'x', 'x', 'x', 'x'}),
      // 255 dimensions
      message({1, 1, 1, 'x', 1, 'y', 0, 255, 1, 1, 1}),
      // 64 dimensions that are not there
      message({1, 1, 1, 'x', 1, 'y', 0, 64, 1, 1, 1}),
      // a number of more than 64 bits
      message({1, 1, 1, 'x', 1, 'y', 0, 1, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F}),
      // a dimension that is negative as a signed number
      message({1, 1, 1, 'x', 1, 'y', 0, 1, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x01}),
      // a one in two bytes
      message({1, 1, 1, 'x', 1, 'y', 0, 1, 0x81, 0x00}),
      // an itemsize of 2^31
      message({1, 1, 1, 'x', 1, 'y', 31, 1, 1}),
      // the flag for a tie, and the empty one
      message({1, 1, 1, 'x', 1, 'y', 0x80, 1, 1, 0, 0, 0}),
      // two entries of one name
      message({1, 2, 1, 'x', 1, 'y', 0, 0, 1, 'x', 1, 'y', 0, 0}),
      // a surrogate as a name
      message({1, 1, 3, 0xED, 0xA0, 0x80, 1, 'y', 0, 0}),
      // an unknown format
      message({2, 0}),
  };
  for (const Bytes& bytes : messages) {
    EXPECT_FALSE(parses(bytes)) << testing::PrintToString(bytes);
    EXPECT_LT(g_largest.load(), 4096U) << testing::PrintToString(bytes);
  }
  EXPECT_TRUE(parses(message({1, 1, 1, 'x', 1, 'y', 0, 0}))) << "the pattern the others deviate from";
}

}  // namespace
}  // namespace fastsync
