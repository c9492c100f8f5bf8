// CudaRuntime's sharing of memory and events, between real processes.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>

#include "common/error.h"
#include "device/buffer.h"
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
using testing::in_cuda_process;

constexpr std::uint64_t kBytes = 3 << 20;  // not a whole number of granules
constexpr int kExporter = 0;
constexpr int kImporter = 1;

Wait long_wait() { return {testing::kLongTimeout, nullptr}; }

template <typename Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

class CudaIpcTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (testing::cuda_path().empty()) {
      GTEST_SKIP() << "no double of libcuda was built, and FASTSYNC_CUDA_PATH is not set";
    }
  }
  [[nodiscard]] static testing::Environment environment() { return {{"FASTSYNC_IPC", GetParam()}}; }
  [[nodiscard]] static bool by_descriptor() { return std::string(GetParam()) == "vmm"; }
};

// Round by round: the exporter writes, the importer reads on its own stream, ordered by events on the device. The hosts
// only tell each other that an event has been recorded.
TEST_P(CudaIpcTest, TwoProcessesShareMemoryOrderedByEventsAlone) {
  constexpr int kRounds = 20;
  const Channel channel;
  auto exporter = cuda_process(environment(), [&] {
    const auto runtime = CudaRuntime::get(0);
    ASSERT_TRUE(runtime->can_share_events());
    Stream stream(runtime, "exporter");
    const Buffer memory = Buffer::allocate(runtime, MemoryKind::kDevice, kBytes);
    const MemoryHandle handle = runtime->export_memory({memory.data(), memory.nbytes(), -1});
    EXPECT_EQ(static_cast<bool>(handle.fd), by_descriptor());
    channel.send_memory(kExporter, handle);
    const Event written(runtime, runtime->create_shared_event());
    const EventHandle exported = runtime->export_event(written.handle());
    channel.send(kExporter, exported.data(), exported.size());
    EventHandle theirs{};
    (void)channel.receive(kExporter, theirs.data(), theirs.size());
    {
      Event read(runtime, runtime->import_event(theirs));
      for (int round = 0; round < kRounds; ++round) {
        read.stream_wait(stream.view());
        runtime->fill(memory.data(), static_cast<std::byte>(round + 1), kBytes, stream.view());
        runtime->record_event(written.handle(), stream.view());
        channel.give(kExporter);
        channel.take(kExporter);  // the importer has recorded its event
      }
      Wait wait = long_wait();
      stream.synchronize(wait);
    }
    // Each side closes what it imported before the other destroys what it exported.
    channel.give(kExporter);
    channel.take(kExporter);
  });
  auto importer = cuda_process(environment(), [&] {
    const auto runtime = CudaRuntime::get(0);
    Stream stream(runtime, "importer");
    const Event read(runtime, runtime->create_shared_event());
    {
      const Allocation shared = runtime->import_memory(channel.receive_memory(kImporter));
      EXPECT_EQ(shared.nbytes, kBytes);
      EventHandle theirs{};
      (void)channel.receive(kImporter, theirs.data(), theirs.size());
      Event written(runtime, runtime->import_event(theirs));
      const EventHandle exported = runtime->export_event(read.handle());
      channel.send(kImporter, exported.data(), exported.size());
      const Buffer home = Buffer::allocate(runtime, MemoryKind::kPinnedHost, kBytes);
      const CudaRuntime::Counters before = runtime->counters();
      for (int round = 0; round < kRounds; ++round) {
        channel.take(kImporter);
        written.stream_wait(stream.view());
        runtime->copy(home.data(), shared.data, kBytes, stream.view());
        runtime->record_event(read.handle(), stream.view());
        channel.give(kImporter);
        Wait wait = long_wait();
        runtime->synchronize_event(read.handle(), wait);
        const auto value = static_cast<std::byte>(round + 1);
        ASSERT_TRUE(std::all_of(home.data(), home.data() + kBytes, [&](std::byte b) { return b == value; })) << round;
      }
      EXPECT_EQ(runtime->counters(), before);  // opened once, used for ever
      runtime->close_memory(shared);
    }
    if (testing::cuda_is_double()) {
      for (const char* kind : {"memory_import", "event_import", "vmm_handle", "vmm_mapping", "vmm_reservation"}) {
        EXPECT_EQ(CudaJournal::live(kind), 0) << kind;
      }
    }
    channel.give(kImporter);
    channel.take(kImporter);
  });
  EXPECT_EQ(importer.join(), 0);
  EXPECT_EQ(exporter.join(), 0);
}

INSTANTIATE_TEST_SUITE_P(, CudaIpcTest, ::testing::Values("legacy", "vmm"),
                         [](const auto& test) { return std::string(test.param); });

class CudaSharingTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (testing::cuda_path().empty()) {
      GTEST_SKIP() << "no double of libcuda was built, and FASTSYNC_CUDA_PATH is not set";
    }
  }
};

TEST_F(CudaSharingTest, ExporterCannotImportItsOwn) {
  in_cuda_process([] {
    const auto runtime = CudaRuntime::get(0);
    const Buffer memory = Buffer::allocate(runtime, MemoryKind::kDevice, kBytes);
    const MemoryHandle handle = runtime->export_memory({memory.data(), memory.nbytes(), -1});
    expect_words(error_of([&] { (void)runtime->import_memory(handle); }), {"cuIpcOpenMemHandle", "exported itself"});
    const Event event(runtime, runtime->create_shared_event());
    const EventHandle exported = runtime->export_event(event.handle());
    expect_words(error_of([&] { (void)runtime->import_event(exported); }), {"cuIpcOpenEventHandle", "exported itself"});
  });
}

TEST_F(CudaSharingTest, OnlyWholeDeviceAllocationsOfItsOwnAreExported) {
  in_cuda_process([] {
    const auto runtime = CudaRuntime::get(0);
    const Buffer memory = Buffer::allocate(runtime, MemoryKind::kDevice, kBytes);
    const Buffer pinned = Buffer::allocate(runtime, MemoryKind::kPinnedHost, kBytes);
    EXPECT_THROW((void)runtime->export_memory({memory.data() + 256, 256, -1}), InvalidArgument);
    EXPECT_THROW((void)runtime->export_memory({pinned.data(), kBytes, -1}), InvalidArgument);
    EXPECT_THROW((void)runtime->import_memory(MemoryHandle()), InvalidArgument);
  });
}

TEST_F(CudaSharingTest, SecondImportOfAHandleIsRefused) {
  const Channel channel;
  auto exporter = cuda_process({}, [&] {
    const auto runtime = CudaRuntime::get(0);
    const Buffer memory = Buffer::allocate(runtime, MemoryKind::kDevice, kBytes);
    channel.send_memory(kExporter, runtime->export_memory({memory.data(), memory.nbytes(), -1}));
    channel.take(kExporter);
  });
  auto importer = cuda_process({}, [&] {
    const auto runtime = CudaRuntime::get(0);
    const MemoryHandle handle = channel.receive_memory(kImporter);
    const Allocation first = runtime->import_memory(handle);
    EXPECT_THROW((void)runtime->import_memory(handle), InvalidArgument);
    // What was imported is not this process's to share on.
    EXPECT_THROW((void)runtime->export_memory(first), InvalidArgument);
    runtime->close_memory(first);
    const Allocation again = runtime->import_memory(handle);
    runtime->close_memory(again);
    channel.give(kImporter);
  });
  EXPECT_EQ(importer.join(), 0);
  EXPECT_EQ(exporter.join(), 0);
}

TEST_F(CudaSharingTest, RefusalOfAContainerIsReadable) {
  if (!testing::cuda_is_double()) GTEST_SKIP() << "needs the double of libcuda";
  in_cuda_process({{"FASTSYNC_FAKE_NO_IPC", "event"}}, [] { EXPECT_FALSE(CudaRuntime::get(0)->can_share_events()); });
  in_cuda_process([] { EXPECT_TRUE(CudaRuntime::get(0)->can_share_events()); });
  const Channel channel;
  auto exporter = cuda_process({}, [&] {
    const auto runtime = CudaRuntime::get(0);
    const Buffer memory = Buffer::allocate(runtime, MemoryKind::kDevice, kBytes);
    channel.send_memory(kExporter, runtime->export_memory({memory.data(), memory.nbytes(), -1}));
    channel.take(kExporter);
  });
  auto importer = cuda_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuIpcOpenMemHandle_v2 action=fail code=304"}}, [&] {
    const auto runtime = CudaRuntime::get(0);
    const MemoryHandle handle = channel.receive_memory(kImporter);
    expect_words(error_of([&] { (void)runtime->import_memory(handle); }),
                 {"cuIpcOpenMemHandle", "CUDA_ERROR_OPERATING_SYSTEM", "--ipc=host", "FASTSYNC_IPC=vmm"});
    channel.give(kImporter);
  });
  EXPECT_EQ(importer.join(), 0);
  EXPECT_EQ(exporter.join(), 0);
}

TEST_F(CudaSharingTest, UnknownWayOfSharingIsRefused) {
  in_cuda_process({{"FASTSYNC_IPC", "telepathy"}},
                  [] { expect_words(error_of([] { (void)CudaRuntime::get(0); }), {"telepathy", "legacy", "vmm"}); });
}

}  // namespace
}  // namespace fastsync
