// What the packer leaves on its stream when a sync ends early. That it moves and sums what it should is shown by the
// copy kernel's tests and by those of whole syncs.
#include "bucket/device_packer.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <utility>

#include "common/error.h"
#include "device/host/host_runtime.h"
#include "support/bounds.h"

namespace fastsync::testing {
namespace {

using namespace std::chrono_literals;
using Place = DevicePacker::Place;

// A packer, and a caller whose stream is held up until open().
class DevicePackerTest : public ::testing::Test {
 protected:
  DevicePackerTest() : runtime_(HostRuntime::create({})), caller_(runtime_, "caller") {
    runtime_->enqueue(caller_.view(), [gate = gate_.get_future().share()] { gate.wait(); });
  }
  ~DevicePackerTest() override { open(); }  // first of all: streams end with their queues
  void open() {
    if (!std::exchange(is_open_, true)) gate_.set_value();
  }

  std::promise<void> gate_;
  bool is_open_ = false;
  std::shared_ptr<HostRuntime> runtime_;
  Stream caller_;
  DevicePacker packer_{runtime_, CopyDirection::kPack};
};

class DevicePackerOn : public DevicePackerTest, public ::testing::WithParamInterface<Place> {};

// Or it would run in the middle of the next sync, whose work may be on another stream.
TEST_P(DevicePackerOn, AbandonWaitsForTheClearingOfTheSumsToo) {
  packer_.begin(caller_.view(), GetParam(), true);
  EXPECT_FALSE(packer_.abandon(20ms));
  open();
  EXPECT_TRUE(packer_.abandon(kLongTimeout));
}

TEST_P(DevicePackerOn, FinishWaitsForTheClearingOfTheSumsOfASyncWithoutBuckets) {
  packer_.begin(caller_.view(), GetParam(), true);
  Wait brief(20ms, nullptr);
  EXPECT_THROW(packer_.finish(brief), TimeoutError);
  open();
  Wait wait(kLongTimeout, nullptr);
  packer_.finish(wait);
}

// Nothing of it was queued, so the caller's work is not waited for.
TEST_F(DevicePackerTest, AbandonOfASyncThatQueuedNothingDoesNotWait) {
  packer_.begin(caller_.view(), Place::kOwn, false);
  EXPECT_TRUE(packer_.abandon(20ms));
}

INSTANTIATE_TEST_SUITE_P(Any, DevicePackerOn, ::testing::Values(Place::kOwn, Place::kCallers),
                         [](const auto& at) { return at.param == Place::kOwn ? "ItsOwnStream" : "TheCallersStream"; });

}  // namespace
}  // namespace fastsync::testing
