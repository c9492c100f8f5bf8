#include "device/buffer.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "common/error.h"
#include "device/host/host_memory.h"
#include "device/host/host_runtime.h"

namespace fastsync {
namespace {

TEST(Buffer, HeapIsAlignedToAPageAndWritable) {
  for (const std::uint64_t nbytes : {std::uint64_t{1}, std::uint64_t{4096}, (std::uint64_t{8} << 20) + 5}) {
    const Buffer buffer = Buffer::heap(nbytes);
    EXPECT_EQ(buffer.nbytes(), nbytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 4096, 0U);
    EXPECT_EQ(buffer.fd(), -1);
    std::memset(buffer.data(), 1, nbytes);
  }
}

TEST(Buffer, SharedIsAMemfdOfSealedSizeWithItsPagesReserved) {
  const std::uint64_t nbytes = 5 * 4096 + 100;
  const Buffer buffer = Buffer::shared(nbytes, "buffer-test");
  struct stat status{};
  ASSERT_EQ(::fstat(buffer.fd(), &status), 0);
  EXPECT_EQ(static_cast<std::uint64_t>(status.st_size), nbytes);
  EXPECT_GE(static_cast<std::uint64_t>(status.st_blocks) * 512, nbytes);
  const int seals = ::fcntl(buffer.fd(), F_GET_SEALS);
  EXPECT_NE(seals & F_SEAL_SHRINK, 0);
  EXPECT_NE(seals & F_SEAL_GROW, 0);
  EXPECT_NE(::fcntl(buffer.fd(), F_GETFD) & FD_CLOEXEC, 0);
  std::memset(buffer.data(), 7, nbytes);
  char byte = 0;
  EXPECT_EQ(::pread(buffer.fd(), &byte, 1, static_cast<off_t>(nbytes) - 1), 1);
  EXPECT_EQ(byte, 7);
}

TEST(Buffer, RefusesMoreThanTheMachineHasWithoutTouchingAPage) {
  const std::uint64_t absurd = std::uint64_t{1} << 45;
  for (const bool shared : {false, true}) {
    try {
      const Buffer buffer = shared ? Buffer::shared(absurd) : Buffer::heap(absurd);
      FAIL();
    } catch (const DeviceError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("35184372088832 bytes"), std::string::npos) << text;
      EXPECT_NE(text.find("free"), std::string::npos) << text;
      EXPECT_NE(text.find("lower bucket_bytes"), std::string::npos) << text;
    }
  }
}

TEST(Buffer, EmptyHasNoMemory) {
  EXPECT_EQ(Buffer::heap(0).data(), nullptr);
  EXPECT_EQ(Buffer::shared(0).fd(), -1);
}

TEST(Buffer, MovesItsMemoryAndClosesItsDescriptorOnce) {
  Buffer a = Buffer::shared(4096);
  const int fd = a.fd();
  std::byte* const data = a.data();
  Buffer b = std::move(a);
  EXPECT_EQ(b.data(), data);
  EXPECT_EQ(a.data(), nullptr);  // NOLINT(bugprone-use-after-move): what is left is specified
  b = Buffer::heap(16);
  EXPECT_EQ(::fcntl(fd, F_GETFD), -1);
  EXPECT_EQ(b.nbytes(), 16U);
}

TEST(Buffer, ViewsStayInside) {
  const Buffer buffer = Buffer::heap(100);
  EXPECT_EQ(buffer.view(20, 80).data, buffer.data() + 20);
  EXPECT_EQ(buffer.view(100, 0).nbytes, 0U);
  EXPECT_THROW((void)buffer.view(20, 81), InvalidArgument);
  EXPECT_THROW((void)buffer.view(101, 0), InvalidArgument);
  EXPECT_THROW((void)buffer.view(~std::uint64_t{0}, 2), InvalidArgument);
}

TEST(Buffer, KeepsItsRuntimeAlive) {
  auto runtime = HostRuntime::create();
  const std::weak_ptr<HostRuntime> watch = runtime;
  {
    const Buffer buffer = Buffer::allocate(std::move(runtime), MemoryKind::kDevice, 4096);
    EXPECT_EQ(buffer.kind(), MemoryKind::kDevice);
    EXPECT_FALSE(watch.expired());
  }
  EXPECT_TRUE(watch.expired());
}

// --- how much is free, read from a made-up machine -----------------------------------------------------------------

class AvailableMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "fastsync-memory-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    write("proc/meminfo", "MemTotal: 2000 kB\nMemAvailable:    1000 kB\nSwapFree:  24 kB\n");
  }
  void TearDown() override { std::filesystem::remove_all(root_); }
  void write(const std::string& path, const std::string& text) const {
    const auto full = root_ / path;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }
  [[nodiscard]] AvailableMemory read() const {
    return available_memory((root_ / "proc").string(), (root_ / "cgroup").string());
  }
  std::filesystem::path root_;
};

TEST_F(AvailableMemoryTest, IsMemAvailableAndSwapWithoutACgroup) {
  EXPECT_EQ(read().bytes, 1024U * 1024U);
  EXPECT_EQ(read().limited_by, "MemAvailable");
}

TEST_F(AvailableMemoryTest, IsWhatTheNarrowestV2GroupLeaves) {
  write("proc/self/cgroup", "0::/a/b\n");
  write("cgroup/a/memory.max", "500000\n");
  write("cgroup/a/memory.current", "300000\n");
  write("cgroup/a/memory.stat", "anon 5\ninactive_file 50000\n");
  write("cgroup/a/b/memory.max", "max\n");
  write("cgroup/a/b/memory.current", "100\n");
  EXPECT_EQ(read().bytes, 250000U);
  EXPECT_EQ(read().limited_by, "the cgroup limit");
}

TEST_F(AvailableMemoryTest, ReadsV1AndAContainersOwnRoot) {
  write("proc/self/cgroup", "9:cpu,memory:/docker/0123\n1:name=systemd:/x\n");
  write("cgroup/memory/memory.limit_in_bytes", "600000\n");
  write("cgroup/memory/memory.usage_in_bytes", "700000\n");
  EXPECT_EQ(read().bytes, 0U);
  write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(read().bytes, 1024U * 1024U);
}

TEST_F(AvailableMemoryTest, KnowsNoLimitWhereNothingCanBeRead) {
  EXPECT_EQ(available_memory("/nonexistent", "/nonexistent").bytes, ~std::uint64_t{0});
}

}  // namespace
}  // namespace fastsync
