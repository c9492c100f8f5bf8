#include "device/cuda/cuda_driver.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "common/error.h"
#include "device/cuda/cuda_runtime.h"
#include "device/cuda_process.h"
#include "support/expect_words.h"

namespace fastsync {
namespace {

using testing::expect_words;
using testing::in_cuda_process;

std::string reason_of(const std::string& file) {
  std::string reason;
  return CudaDriver::open(file, reason) == nullptr ? reason : std::string("it opened");
}

TEST(CudaDriver, SaysThatThereIsNone) {
  expect_words(reason_of("/no/such/libcuda.so.1"),
               {"no CUDA driver", "/no/such/libcuda.so.1", "install the NVIDIA driver"});
}

TEST(CudaDriver, RefusesALibraryThatIsNoDriver) {
  expect_words(reason_of("libm.so.6"), {"libm.so.6", "lacks", "cuInit", "not a CUDA driver"});
}

TEST(CudaDriver, TellsTheToolkitsStubFromADriver) {
  const std::string stub = "/usr/local/cuda/lib64/stubs/libcuda.so";
  if (::access(stub.c_str(), R_OK) != 0) GTEST_SKIP() << "no CUDA toolkit here";
  expect_words(reason_of(stub), {"stub", "CUDA_ERROR_STUB_LIBRARY", "LD_LIBRARY_PATH"});
}

class CudaDriverDoubleTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!testing::cuda_is_double()) GTEST_SKIP() << "needs the double of libcuda";
  }
  // In a process of that environment, which has not asked before.
  static void expect_unavailable(const testing::Environment& environment, std::initializer_list<const char*> words) {
    in_cuda_process(environment, [&] {
      const auto reason = CudaDriver::unavailable_reason();
      ASSERT_TRUE(reason.has_value());
      expect_words(*reason, words);
      try {
        (void)CudaDriver::get();
        ADD_FAILURE() << "a driver that cannot be used was given out";
      } catch (const DeviceError& error) {
        EXPECT_EQ(error.what(), *reason);
      }
    });
  }
};

TEST_F(CudaDriverDoubleTest, OpensAndKnowsThatItIsADouble) {
  in_cuda_process([] {
    EXPECT_EQ(CudaDriver::unavailable_reason(), std::nullopt);
    EXPECT_TRUE(CudaDriver::get().is_fake());
    EXPECT_GE(CudaDriver::get().version(), CudaDriver::kMinVersion);
    EXPECT_EQ(CudaDriver::get().path(), testing::cuda_path());
    EXPECT_EQ(CudaDriver::get().describe(2).find("CUDA_ERROR_OUT_OF_MEMORY (2)"), 0U);
    EXPECT_NE(CudaDriver::get().describe(54321).find("54321"), std::string::npos);
  });
}

TEST_F(CudaDriverDoubleTest, IsAskedOnce) {
  in_cuda_process([] {
    for (int i = 0; i < 3; ++i) EXPECT_EQ(CudaDriver::unavailable_reason(), std::nullopt);
    EXPECT_EQ(testing::CudaJournal::calls("cuInit"), 1U);
  });
}

TEST_F(CudaDriverDoubleTest, RefusesADoubleThatNobodyAllowed) {
  expect_unavailable({{"FASTSYNC_ALLOW_FAKE", "0"}}, {"test double", "FASTSYNC_ALLOW_FAKE"});
}

TEST_F(CudaDriverDoubleTest, RefusesAnOldDriverByItsVersion) {
  expect_unavailable({{"FASTSYNC_FAKE_DRIVER", "11080"}}, {"CUDA 11.8", "12.0", "update the NVIDIA driver"});
}

TEST_F(CudaDriverDoubleTest, SaysWhyTheDriverDoesNotStart) {
  expect_unavailable({{"FASTSYNC_FAKE_CUDA_INIT", "100"}}, {"cuInit", "CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES"});
  expect_unavailable({{"FASTSYNC_FAKE_CUDA_INIT", "34"}}, {"stub", "LD_LIBRARY_PATH"});
  expect_unavailable({{"FASTSYNC_FAKE_CUDA_INIT", "803"}}, {"different versions", "reboot"});
}

TEST_F(CudaDriverDoubleTest, SaysThatNoDeviceIsVisible) {
  expect_unavailable({{"CUDA_VISIBLE_DEVICES", ""}}, {"CUDA_VISIBLE_DEVICES is ''"});
}

TEST_F(CudaDriverDoubleTest, TellsAForkedChildThatItCannotUseCuda) {
  in_cuda_process([] {
    ASSERT_EQ(CudaDriver::unavailable_reason(), std::nullopt);
    testing::Process child([] {
      const auto reason = CudaDriver::unavailable_reason();
      if (!reason || reason->find("fork") == std::string::npos) throw std::runtime_error(reason.value_or("no reason"));
      EXPECT_THROW((void)CudaRuntime::get(0), DeviceError);
    });
    EXPECT_EQ(child.join(), 0);
  });
}

}  // namespace
}  // namespace fastsync
