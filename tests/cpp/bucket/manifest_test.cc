#include "bucket/manifest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "common/error.h"
#include "support/cpu_time.h"

namespace fastsync {
namespace {

TensorMeta meta_of(std::string name, std::vector<std::int64_t> shape = {4, 8}, std::string dtype = "float32",
                   std::uint32_t itemsize = 4) {
  TensorMeta meta;
  meta.name = std::move(name);
  meta.dtype = std::move(dtype);
  meta.itemsize = itemsize;
  meta.nbytes = itemsize;
  for (const std::int64_t dim : shape) meta.nbytes *= static_cast<std::uint64_t>(dim);
  meta.shape.assign(shape.begin(), shape.end());
  return meta;
}

Manifest manifest_of(const std::vector<TensorMeta>& metas) {
  Manifest manifest;
  for (const TensorMeta& meta : metas) manifest.append(meta);
  return manifest;
}

std::vector<TensorMeta> varied_metas() {
  std::vector<TensorMeta> metas = {meta_of(""),
                                   meta_of("a"),
                                   meta_of("a.b"),
                                   meta_of("scalar", {}),
                                   meta_of("empty", {0, 4}),
                                   meta_of("größe.重み.🙂"),
                                   meta_of(std::string("nul\0inside", 10)),
                                   meta_of("long." + std::string(kMaxNameBytes - 5, 'x')),
                                   meta_of("huge", {std::int64_t{1} << 40, 1 << 10}),
                                   meta_of("bytes", {7}, "uint8", 1),
                                   meta_of("complex", {3}, "complex128", 16),
                                   meta_of("deep", std::vector<std::int64_t>(kMaxDims, 1))};
  metas[1].tie = {1, 0, {8, 1}};
  metas[2].tie = {1, 128, {-1, INT64_MAX, INT64_MIN}};
  metas[3].tie = {UINT32_MAX, UINT64_MAX, {}};
  metas[4].tie = {0, 5, {}};
  return metas;
}

std::string refusal(Manifest& manifest, TensorMeta meta) {
  try {
    manifest.append(std::move(meta));
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

// ---- append ---------------------------------------------------------------------------------------------------------

TEST(Manifest, KeepsOrderTotalAndPositions) {
  const std::vector<TensorMeta> metas = varied_metas();
  const Manifest manifest = manifest_of(metas);
  EXPECT_EQ(manifest.tensors(), metas);
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < metas.size(); ++i) {
    EXPECT_EQ(manifest.find(metas[i].name), i);
    total += metas[i].nbytes;
  }
  EXPECT_EQ(manifest.nbytes(), total);
  EXPECT_EQ(manifest.find("a.bc"), std::nullopt);
}

TEST(Manifest, RefusesADuplicateByNameAndBothPositions) {
  Manifest manifest = manifest_of({meta_of("x"), meta_of("layers.0.weight"), meta_of("y")});
  const std::uint64_t fingerprint = manifest.fingerprint();
  const std::string message = refusal(manifest, meta_of("layers.0.weight", {1}));
  EXPECT_NE(message.find("'layers.0.weight'"), std::string::npos) << message;
  EXPECT_NE(message.find("positions 1 and 3"), std::string::npos) << message;
  EXPECT_EQ(manifest.size(), 3U);
  EXPECT_EQ(manifest.fingerprint(), fingerprint);
  EXPECT_EQ(manifest.find("layers.0.weight"), 1U);
  manifest.append(meta_of("z"));
  EXPECT_EQ(manifest.find("z"), 3U);
}

TEST(Manifest, RefusesWhatContradictsItselfNamingTheTensor) {
  Manifest manifest;
  const auto expect_refused = [&](TensorMeta meta, const std::string& part) {
    const std::string message = refusal(manifest, std::move(meta));
    EXPECT_NE(message.find(part), std::string::npos) << message;
    EXPECT_NE(message.find("'w"), std::string::npos) << message;
    EXPECT_EQ(manifest.size(), 0U);
  };
  TensorMeta meta = meta_of("w");
  meta.nbytes += 1;
  expect_refused(meta, "nbytes is 129");
  meta = meta_of("w");
  meta.shape[1] = -8;
  expect_refused(meta, "-8 is negative");
  meta = meta_of("w");
  meta.itemsize = 3;
  expect_refused(meta, "itemsize is 3");
  meta.itemsize = 0;
  expect_refused(meta, "itemsize is 0");
  expect_refused(meta_of("w", std::vector<std::int64_t>(kMaxDims + 1, 1)), "65 dimensions");
  expect_refused(meta_of("w" + std::string(kMaxNameBytes, 'x')), "longer than 65536");
  expect_refused(meta_of("w", {1}, ""), "dtype");
  meta = meta_of("w", {1});
  meta.shape = {std::int64_t{1} << 40, std::int64_t{1} << 40};
  expect_refused(meta, "larger than");
  meta = meta_of("w");
  meta.tie.strides.resize(kMaxDims + 1);
  expect_refused(meta, "65 strides");
}

TEST(Manifest, AZeroDimensionMakesAnyShapeEmpty) {
  Manifest manifest;
  TensorMeta meta = meta_of("w", {0});
  meta.shape = {INT64_MAX, INT64_MAX, 0, INT64_MAX};
  manifest.append(meta);
  EXPECT_EQ(manifest.nbytes(), 0U);
}

TEST(Manifest, RefusesATotalBeyondItsLimit) {
  Manifest manifest;
  manifest.append(meta_of("a", {(std::int64_t{1} << 62) - 5}, "uint8", 1));
  EXPECT_NE(refusal(manifest, meta_of("b", {6}, "uint8", 1)), "");
  manifest.append(meta_of("b", {5}, "uint8", 1));
  EXPECT_EQ(manifest.nbytes(), kMaxManifestBytes);
}

// ---- UTF-8 ----------------------------------------------------------------------------------------------------------

TEST(Utf8, AcceptsExactlyTheEncodingsOfScalarValues) {
  const auto encode = [](std::uint32_t c) {
    std::string s;
    if (c < 0x80) {
      s += static_cast<char>(c);
    } else if (c < 0x800) {
      s += static_cast<char>(0xC0 | (c >> 6));
      s += static_cast<char>(0x80 | (c & 0x3F));
    } else if (c < 0x10000) {
      s += static_cast<char>(0xE0 | (c >> 12));
      s += static_cast<char>(0x80 | ((c >> 6) & 0x3F));
      s += static_cast<char>(0x80 | (c & 0x3F));
    } else {
      s += static_cast<char>(0xF0 | (c >> 18));
      s += static_cast<char>(0x80 | ((c >> 12) & 0x3F));
      s += static_cast<char>(0x80 | ((c >> 6) & 0x3F));
      s += static_cast<char>(0x80 | (c & 0x3F));
    }
    return s;
  };
  for (std::uint32_t c = 0; c < 0x120000; ++c) {
    const bool valid = c < 0x110000 && (c < 0xD800 || c > 0xDFFF);
    const std::string text = encode(c);
    ASSERT_EQ(is_valid_utf8(text), valid) << std::hex << c;
    ASSERT_EQ(is_valid_utf8("seven77" + text + "eightchr"), valid) << std::hex << c;
    if (text.size() > 1) {
      ASSERT_FALSE(is_valid_utf8(text.substr(0, text.size() - 1))) << "cut short " << std::hex << c;
    }
  }
}

TEST(Utf8, RefusesOverlongAndStrayBytes) {
  for (const char* text : {"\x80", "\xBF", "\xC0\x80", "\xC1\xBF", "\xE0\x80\x80", "\xE0\x9F\xBF", "\xF0\x80\x80\x80",
                           "\xF0\x8F\xBF\xBF", "\xF5\x80\x80\x80", "\xFE", "\xFF", "ascii88\xFF", "12345678\x80",
                           "\xC3(", "\xE2\x82(", "\xED\xA0\x80\xED\xB0\x80"}) {
    EXPECT_FALSE(is_valid_utf8(text)) << ::testing::PrintToString(text);
  }
  EXPECT_TRUE(is_valid_utf8(""));
  EXPECT_TRUE(is_valid_utf8(std::string_view("\0", 1)));
}

TEST(Manifest, ANameThatIsNotUtf8IsRefusedInAPrintableMessage) {
  Manifest manifest;
  const std::string message = refusal(manifest, meta_of("bad\xFFname\n"));
  EXPECT_NE(message.find("bad\\xffname\\x0a"), std::string::npos) << message;
  EXPECT_TRUE(is_valid_utf8(message));
}

TEST(Manifest, ValidateThrowsWhatAppendWould) {
  TensorMeta meta = meta_of("w", {2, -3});
  Manifest manifest;
  const std::string message = refusal(manifest, meta);
  try {
    validate(meta);
    ADD_FAILURE() << "it was taken";
  } catch (const InvalidArgument& why) {
    EXPECT_EQ(why.message(), message);
  }
  EXPECT_NO_THROW(validate(meta_of("w", {2, 3})));
}

TEST(ShownName, EscapesWhatWouldBreakTheLine) {
  EXPECT_EQ(shown_name(std::string_view("a\0b\n", 4)), "a\\x00b\\x0a");
  EXPECT_EQ(shown_name("重み"), "重み");
}

TEST(Describe, IsOneShortLineWhateverTheTensor) {
  EXPECT_EQ(describe(meta_of("layers.0.weight")), "'layers.0.weight' float32[4, 8]");
  EXPECT_EQ(describe(meta_of("s", {})), "'s' float32[]");
  for (const TensorMeta& meta : varied_metas()) {
    const std::string text = describe(meta);
    EXPECT_LT(text.size(), 500U);
    EXPECT_TRUE(is_valid_utf8(text));
    EXPECT_EQ(text.find('\n'), std::string::npos);
    EXPECT_EQ(text.find('\0'), std::string::npos);
  }
  EXPECT_NE(describe(meta_of(std::string(1000, 'x'))).find("(1000 bytes)"), std::string::npos);
  // A cut never halves a character.
  std::string name = "a";
  for (int i = 0; i < 300; ++i) name += "é";
  EXPECT_TRUE(is_valid_utf8(describe(meta_of(name))));
}

// ---- Fingerprint ----------------------------------------------------------------------------------------------------

TEST(Fingerprint, IsEqualForEqualManifestsAndSurvivesTheWire) {
  const Manifest manifest = manifest_of(varied_metas());
  EXPECT_EQ(manifest_of(varied_metas()).fingerprint(), manifest.fingerprint());
  Manifest copy;
  copy.append_serialized(manifest.serialize(0, manifest.size()));
  EXPECT_EQ(copy.fingerprint(), manifest.fingerprint());
}

// Ranks of different builds compare fingerprints, so the function may not change without a new protocol version.
TEST(Fingerprint, KnownValues) {
  EXPECT_EQ(Manifest().fingerprint(), 0U);
  EXPECT_EQ(manifest_of({meta_of("a")}).fingerprint(), 0xC16D395CE2C7DD57ULL);
  TensorMeta tied = meta_of("lm_head.weight", {3, 5}, "bfloat16", 2);
  tied.tie = {1, 64, {5, 1}};
  EXPECT_EQ(manifest_of({meta_of("a"), tied}).fingerprint(), 0xB6C106C8F84746ACULL);
}

TEST(Fingerprint, DependsOnEverythingThatTravels) {
  std::vector<std::vector<TensorMeta>> variants = {{meta_of("a"), meta_of("b")},
                                                   {meta_of("b"), meta_of("a")},
                                                   {meta_of("a")},
                                                   {meta_of("b")},
                                                   {meta_of("ab")},
                                                   {meta_of("a"), meta_of("c")},
                                                   {meta_of("")},
                                                   {meta_of(std::string("\0", 1))},
                                                   {meta_of(std::string("\0\0", 2))},
                                                   {meta_of("a", {8, 4})},
                                                   {meta_of("a", {32})},
                                                   {meta_of("a", {4, 8, 1})},
                                                   {meta_of("a", {4, 8}, "int32")},
                                                   {meta_of("a", {4, 8}, "float32", 8)},
                                                   {meta_of("a", {})},
                                                   {meta_of("a", {0})},
                                                   {meta_of("a", {0, 0})}};
  for (const Tie& tie : {Tie{1, 0, {}}, Tie{2, 0, {}}, Tie{1, 8, {}}, Tie{1, 0, {8, 1}}, Tie{1, 0, {1, 8}}}) {
    TensorMeta meta = meta_of("a");
    meta.tie = tie;
    variants.push_back({meta});
  }
  std::set<std::uint64_t> seen = {0};
  for (const auto& variant : variants) seen.insert(manifest_of(variant).fingerprint());
  EXPECT_EQ(seen.size(), variants.size() + 1);
}

TEST(Fingerprint, EveryBitDependsOnEveryBitOfAName) {
  const std::uint64_t base = manifest_of({meta_of("abcdefgh")}).fingerprint();
  double flipped = 0;
  int pairs = 0;
  for (std::size_t i = 0; i < 8; ++i) {
    for (int bit = 0; bit < 7; ++bit) {
      std::string name = "abcdefgh";
      name[i] = static_cast<char>(name[i] ^ (1 << bit));
      flipped += __builtin_popcountll(base ^ manifest_of({meta_of(name)}).fingerprint());
      ++pairs;
    }
  }
  EXPECT_NEAR(flipped / pairs, 32.0, 3.0);
}

// ---- Serialized form ------------------------------------------------------------------------------------------------

TEST(ManifestWire, PiecesInOrderRebuildTheManifest) {
  const Manifest manifest = manifest_of(varied_metas());
  for (std::size_t piece = 1; piece <= manifest.size(); ++piece) {
    Manifest copy;
    for (std::size_t first = 0; first < manifest.size(); first += piece) {
      copy.append_serialized(manifest.serialize(first, std::min(first + piece, manifest.size())));
    }
    EXPECT_EQ(copy.tensors(), manifest.tensors());
    EXPECT_EQ(copy.nbytes(), manifest.nbytes());
    EXPECT_EQ(copy.fingerprint(), manifest.fingerprint());
  }
}

TEST(ManifestWire, AnEmptyPieceIsFine) {
  Manifest manifest = manifest_of({meta_of("a")});
  manifest.append_serialized(manifest.serialize(1, 1));
  EXPECT_EQ(manifest.size(), 1U);
}

TEST(ManifestWire, ARangeThatDoesNotExistIsRefused) {
  const Manifest manifest = manifest_of({meta_of("a")});
  EXPECT_THROW(static_cast<void>(manifest.serialize(0, 2)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(manifest.serialize(1, 0)), InvalidArgument);
}

TEST(ManifestWire, EveryTruncationAndEveryTrailingByteIsRefused) {
  std::vector<TensorMeta> metas = varied_metas();
  metas.erase(metas.begin() + 7);  // the 64 KiB name: cutting it everywhere takes long and tells nothing new
  const Manifest manifest = manifest_of(metas);
  std::vector<std::byte> bytes = manifest.serialize(0, manifest.size());
  for (std::size_t n = 0; n < bytes.size(); ++n) {
    Manifest copy;
    EXPECT_THROW(copy.append_serialized(std::span(bytes).first(n)), CommError) << n;
    EXPECT_EQ(copy.size(), 0U);
  }
  bytes.push_back(std::byte{0});
  Manifest copy;
  EXPECT_THROW(copy.append_serialized(bytes), CommError);
}

TEST(ManifestWire, AFailureLeavesTheManifestAsItWas) {
  const Manifest other = manifest_of({meta_of("new.0"), meta_of("new.1"), meta_of("old"), meta_of("new.2")});
  Manifest manifest = manifest_of({meta_of("old"), meta_of("older")});
  const std::uint64_t fingerprint = manifest.fingerprint();
  EXPECT_THROW(manifest.append_serialized(other.serialize(0, 4)), CommError) << "'old' is there already";
  EXPECT_EQ(manifest.size(), 2U);
  EXPECT_EQ(manifest.fingerprint(), fingerprint);
  EXPECT_EQ(manifest.nbytes(), 256U);
  EXPECT_EQ(manifest.find("new.0"), std::nullopt);
  EXPECT_EQ(manifest.find("old"), 0U);
  manifest.append_serialized(other.serialize(0, 2));
  EXPECT_EQ(manifest.find("new.1"), 3U);
}

// ---- Scale ----------------------------------------------------------------------------------------------------------

std::vector<TensorMeta> experts(int count) {
  std::vector<TensorMeta> metas;
  for (int i = 0; i < count; ++i) {
    metas.push_back(meta_of(concat("model.layers.", i / 400, ".mlp.experts.", i % 400, ".down_proj.weight"),
                            {2048, 768}, "bfloat16", 2));
  }
  return metas;
}

TEST(Manifest, MakesTheTripAcrossTheWireWithTwentyThousandTensors) {
  const Manifest manifest = manifest_of(experts(20000));
  const std::vector<std::byte> bytes = manifest.serialize(0, manifest.size());
  EXPECT_LT(bytes.size(), 80U * manifest.size());
  Manifest copy;
  copy.append_serialized(bytes);
  EXPECT_EQ(copy.size(), manifest.size());
  EXPECT_EQ(copy.fingerprint(), manifest.fingerprint());
}

// Four times the tensors take four times the work, not sixteen: no name is looked for among all others.
TEST(Manifest, CostGrowsInProportionToTheNumberOfTensors) {
  const auto cost = [](int count) {
    const std::vector<TensorMeta> metas = experts(count);
    double best = 1e9;
    for (int round = 0; round < 3; ++round) {
      const double start = testing::thread_cpu_seconds();
      Manifest copy;
      const Manifest manifest = manifest_of(metas);
      copy.append_serialized(manifest.serialize(0, manifest.size()));
      best = std::min(best, testing::thread_cpu_seconds() - start);
    }
    return best;
  };
  const double small = cost(10000);
  EXPECT_LT(cost(40000), 9 * small) << "10,000 tensors took " << small << " s";
}

}  // namespace
}  // namespace fastsync
