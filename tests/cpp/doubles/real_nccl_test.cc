// The vendor's own libnccl.so.2, where FASTSYNC_REAL_NCCL names one: what can be asked of it without a GPU.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "doubles/nccl_rank.h"

namespace fastsync::testing::nccl {
namespace {

class RealNccl : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = std::getenv("FASTSYNC_REAL_NCCL");
    if (path_ == nullptr || *path_ == '\0') {
      GTEST_SKIP() << "FASTSYNC_REAL_NCCL is not set: name a libnccl.so.2 (the nvidia-nccl wheels have one)";
    }
  }
  // In a process of its own: the library starts threads that nothing ends.
  template <typename Body>
  void run(const Body& body) {
    Process process([&] {
      const Library library(path_);
      body(library, NcclFunctions(library));
      if (::testing::Test::HasFailure()) throw std::runtime_error("an expectation failed there");
    });
    EXPECT_EQ(process.join(), 0);
  }
  const char* path_ = nullptr;
};

TEST_F(RealNccl, HasEveryFunctionOfTheDouble) {
  run([](const Library& library, const NcclFunctions& nccl) {
    int version = 0;
    ASSERT_EQ(nccl.ncclGetVersion(&version), ncclSuccess);
    std::fprintf(stderr, "libnccl.so.2 is version %d\n", version);
    EXPECT_GE(version, 21801) << "fastsync needs ncclCommSplit";
#define FASTSYNC_HAS(result, name, parameters) EXPECT_TRUE(library.has(#name)) << #name;
    FASTSYNC_NCCL_FUNCTIONS_BEFORE_2_18(FASTSYNC_HAS)
    FASTSYNC_NCCL_FUNCTIONS_2_18_1(FASTSYNC_HAS)
    if (version >= 21903) {
      FASTSYNC_NCCL_FUNCTIONS_2_19_3(FASTSYNC_HAS)
    }
#undef FASTSYNC_HAS
    // Both ways: what a version does not have, the double hides.
    EXPECT_EQ(library.has("ncclCommShrink"), version >= 22703);
    EXPECT_EQ(library.has("ncclCommRevoke"), version >= 22809);
  });
}

TEST_F(RealNccl, GivesDifferentIds) {
  run([](const Library&, const NcclFunctions& nccl) {
    ncclUniqueId one{};
    ncclUniqueId other{};
    EXPECT_EQ(nccl.ncclGetUniqueId(&one), ncclSuccess);
    EXPECT_EQ(nccl.ncclGetUniqueId(&other), ncclSuccess);
    EXPECT_NE(std::memcmp(&one, &other, sizeof one), 0);
    EXPECT_EQ(nccl.ncclGetUniqueId(nullptr), ncclInvalidArgument);
  });
}

TEST_F(RealNccl, HasATextForEveryResult) {
  run([](const Library&, const NcclFunctions& nccl) {
    for (int result = 0; result <= static_cast<int>(ncclInProgress); ++result) {
      const char* text = nccl.ncclGetErrorString(static_cast<ncclResult_t>(result));
      ASSERT_NE(text, nullptr) << result;
      EXPECT_GT(std::strlen(text), 0U) << result;
    }
  });
}

TEST_F(RealNccl, FailsReadablyWithoutADriver) {
  if (::access("/dev/nvidiactl", F_OK) == 0) GTEST_SKIP() << "there is a driver";
  run([](const Library&, const NcclFunctions& nccl) {
    ncclUniqueId id{};
    ASSERT_EQ(nccl.ncclGetUniqueId(&id), ncclSuccess);
    ncclComm_t communicator = nullptr;
    EXPECT_EQ(nccl.ncclCommInitRank(&communicator, 1, id, 0), ncclUnhandledCudaError);
    const std::string text = nccl.ncclGetLastError(nullptr);
    std::fprintf(stderr, "without a driver: %s\n", text.c_str());
    EXPECT_NE(text.find("CUDA"), std::string::npos) << text;
    ncclConfig_t config;
    config.magic = 0;
    config.size = config_size(22809);
    EXPECT_NE(nccl.ncclCommInitRankConfig(&communicator, 1, id, 0, &config), ncclSuccess);
  });
}

TEST_F(RealNccl, AgreesWithTheDoubleOnWhatNeedsNoDevice) {
  run([](const Library&, const NcclFunctions& nccl) {
    EXPECT_EQ(nccl.ncclGroupEnd(), ncclInvalidUsage) << "without ncclGroupStart()";
    EXPECT_EQ(nccl.ncclCommDestroy(nullptr), ncclSuccess);
    EXPECT_EQ(nccl.ncclCommAbort(nullptr), ncclSuccess);
    EXPECT_EQ(nccl.ncclCommFinalize(nullptr), ncclSuccess);
    ncclResult_t state = ncclSuccess;
    int count = 0;
    EXPECT_EQ(nccl.ncclCommGetAsyncError(nullptr, &state), ncclInvalidArgument);
    EXPECT_EQ(nccl.ncclCommCount(nullptr, &count), ncclInvalidArgument);
    EXPECT_EQ(nccl.ncclBroadcast(&count, &count, 1, ncclUint8, 0, nullptr, nullptr), ncclInvalidArgument);
  });
}

}  // namespace
}  // namespace fastsync::testing::nccl
