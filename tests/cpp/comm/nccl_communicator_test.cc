// NcclCommunicator's own errors, over the doubles. What every communicator does alike is in the suites of sync/.
#include "comm/nccl/nccl_communicator.h"

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <utility>

#include "common/error.h"
#include "device/cuda/cuda_runtime.h"
#include "device/cuda_process.h"
#include "support/bounds.h"
#include "support/expect_words.h"

namespace fastsync {
namespace {

using testing::Channel;
using testing::cuda_process;
using testing::CudaJournal;
using testing::expect_words;

constexpr std::uint64_t kBucketBytes = 1 << 20;
constexpr std::uint32_t kBuffers = 2;
constexpr int kSource = 0;
constexpr int kReceiver = 1;

// Announces one bucket after `before`.
class OneHeader final : public HeaderChannel {
 public:
  explicit OneHeader(std::function<void()> before = {}) : before_(std::move(before)) {}
  void send(const BucketHeader& /*header*/) override {}
  void wait_released(std::uint64_t /*count*/, Wait& /*wait*/) override {}
  [[nodiscard]] int slowest_receiver() const noexcept override { return -1; }
  [[nodiscard]] BucketHeader receive(Wait& /*wait*/) override {
    before_();
    BucketHeader header{};
    header.used_bytes = kBucketBytes;
    return header;
  }
  [[nodiscard]] bool try_receive(BucketHeader& /*header*/) override { return false; }
  void report_released(std::uint64_t /*count*/) override {}

 private:
  std::function<void()> before_;
};

// A kernel of somebody else's fails, and nobody has asked the driver since.
void break_device(int ordinal, StreamView stream) {
  const auto current = CudaRuntime::get(ordinal)->make_current();
  std::uint64_t memory = 0;
  ASSERT_EQ(CudaJournal::function<int(std::uint64_t*, std::size_t)>("cuMemAlloc_v2")(&memory, 64), 0);
  ASSERT_EQ(CudaJournal::function<int(std::uint64_t, unsigned char, std::size_t, void*)>("cuMemsetD8Async")(
                memory, 1, 64, stream.handle()),
            0);
  ASSERT_EQ(CudaJournal::function<int(void*)>("cuStreamSynchronize")(stream.handle()), 700);
}

TEST(NcclCommunicator, RefusalByABrokenDeviceIsTheDevicesError) {
#if !defined(FASTSYNC_FAKE_NCCL_PATH)
  GTEST_SKIP() << "no double of libnccl was built";
#else
  if (!testing::cuda_is_double()) GTEST_SKIP() << "breaks a device, which only the double gets over";
  const Channel channel;
  const testing::Environment both = {{"FASTSYNC_NCCL_PATH", FASTSYNC_FAKE_NCCL_PATH}};
  testing::Environment receivers = both;
  receivers.emplace_back("FASTSYNC_FAKE_FAULTS", "symbol=cuMemsetD8Async action=fail_later code=700");
  testing::Process receiver = cuda_process(receivers, [&] {
    Wait wait(testing::kLongTimeout, nullptr);
    const auto runtime = CudaRuntime::get(1);
    const Stream stream(runtime, "test");
    ASSERT_EQ(NcclLibrary::unavailable_reason({}), std::nullopt);
    nccl::UniqueId id{};
    (void)channel.receive(kReceiver, &id, sizeof(id));
    OneHeader headers([&] { break_device(1, stream.view()); });
    const auto comm = NcclCommunicator::create(NcclCommunicator::Role::kReceiver, runtime, kBuffers, kBucketBytes,
                                               {2, kReceiver}, id, headers, kSource, wait);
    comm->bind_stream(stream.view());
    comm->reset(1);
    BucketHeader header{};
    for (int attempt = 0; attempt < 2; ++attempt) {  // the first error is kept
      try {
        (void)comm->receive(header, wait);
        ADD_FAILURE() << "received a bucket on a broken device";
      } catch (const DeviceError& error) {
        expect_words(error.what(), {"CUDA_ERROR_ILLEGAL_ADDRESS (700)", "device 1", "restart the process"});
      }
    }
  });
  testing::Process source = cuda_process(both, [&] {
    Wait wait(testing::kLongTimeout, nullptr);
    const auto runtime = CudaRuntime::get(0);
    ASSERT_EQ(NcclLibrary::unavailable_reason({}), std::nullopt);
    const nccl::UniqueId id = NcclCommunicator::make_id();
    channel.send(kSource, &id, sizeof(id));
    OneHeader headers;
    const auto comm = NcclCommunicator::create(NcclCommunicator::Role::kSource, runtime, kBuffers, kBucketBytes,
                                               {2, kSource}, id, headers, kSource, wait);
    char done = 0;
    (void)channel.receive(kSource, &done, 1);
  });
  EXPECT_EQ(receiver.join(), 0);
  channel.send(kReceiver, "d", 1);  // not the receiver, which may have failed
  EXPECT_EQ(source.join(), 0);
#endif
}

}  // namespace
}  // namespace fastsync
