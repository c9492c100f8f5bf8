#include "common/cpu.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace fastsync {
namespace {

constexpr CacheSizes kFallback{11 * 1024, 22 * 1024, 33 * 1024};

class CacheDirectory : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "fastsync_cpu_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    path_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(path_); }

  void add(int index, const std::string& level, const std::string& type, const std::string& size) {
    const std::filesystem::path entry = path_ / ("index" + std::to_string(index));
    std::filesystem::create_directory(entry);
    std::ofstream(entry / "level") << level << '\n';
    std::ofstream(entry / "type") << type << '\n';
    std::ofstream(entry / "size") << size << '\n';
  }
  CacheSizes read() const { return read_cache_sizes(path_.string(), kFallback); }

  std::filesystem::path path_;
};

TEST_F(CacheDirectory, ReadsALaptop) {
  add(0, "1", "Data", "48K");
  add(1, "1", "Instruction", "64K");
  add(2, "2", "Unified", "2048K");
  add(3, "3", "Unified", "36M");
  EXPECT_EQ(read(), (CacheSizes{48 * 1024, 2048 * 1024, 36 * 1024 * 1024}));
}

TEST_F(CacheDirectory, WithoutAnL3TheL2IsTheLastLevel) {
  add(0, "1", "Data", "64K");
  add(1, "2", "Unified", "1024K");
  EXPECT_EQ(read(), (CacheSizes{64 * 1024, 1024 * 1024, 1024 * 1024}));
}

TEST_F(CacheDirectory, WhatIsMissingComesFromTheFallback) {
  EXPECT_EQ(read(), kFallback);
  add(0, "2", "Unified", "512K");
  EXPECT_EQ(read(), (CacheSizes{kFallback.l1d, 512 * 1024, 512 * 1024}));
}

TEST_F(CacheDirectory, AbsurdEntriesAreIgnored) {
  add(0, "1", "Data", "0K");
  add(1, "2", "Unified", "minus one");
  add(2, "3", "Unified", "99999999999999999999G");
  add(3, "x", "Unified", "512K");
  EXPECT_EQ(read(), kFallback);
}

TEST(CacheSizes, OfThisMachineAreOrdered) {
  const CacheSizes& sizes = cache_sizes();
  EXPECT_GE(sizes.l1d, 4U * 1024);
  EXPECT_GE(sizes.l2, sizes.l1d);
  EXPECT_GE(sizes.last_level, sizes.l2);
}

TEST(CpuFeatures, ANewerVectorUnitComesWithTheOlder) {
  const CpuFeatures& features = cpu_features();
  if (features.avx512f) {
    EXPECT_TRUE(features.avx2);
  }
#if defined(__aarch64__)
  EXPECT_TRUE(features.neon);
#endif
}

}  // namespace
}  // namespace fastsync
