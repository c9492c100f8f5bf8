#include "device/cuda/cuda_runtime.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/checksum.h"
#include "common/error.h"
#include "device/buffer.h"
#include "device/cuda_process.h"
#include "support/bounds.h"
#include "support/expect_words.h"

namespace fastsync {
namespace {

using namespace std::chrono_literals;
using testing::CudaJournal;
using testing::Environment;
using testing::expect_words;
using testing::in_cuda_process;

constexpr std::uint64_t kBytes = 1 << 20;

Wait long_wait() { return {testing::kLongTimeout, nullptr}; }

template <typename Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const DeviceError& error) {
    return error.what();
  }
  return "no DeviceError";
}

void fill_random(std::byte* data, std::uint64_t nbytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (std::uint64_t i = 0; i < nbytes; ++i) data[i] = static_cast<std::byte>(random());
}

bool all_equal(const std::byte* data, std::uint64_t nbytes, std::byte value) {
  return std::all_of(data, data + nbytes, [&](std::byte byte) { return byte == value; });
}

// What a test needs most: made inside its process.
struct Device {
  std::shared_ptr<CudaRuntime> runtime = CudaRuntime::get(0);
  Stream stream{runtime, "test"};
  Wait wait = long_wait();

  [[nodiscard]] Buffer device(std::uint64_t nbytes = kBytes) const {
    return Buffer::allocate(runtime, MemoryKind::kDevice, nbytes);
  }
  [[nodiscard]] Buffer pinned(std::uint64_t nbytes = kBytes) const {
    return Buffer::allocate(runtime, MemoryKind::kPinnedHost, nbytes);
  }
};

class CudaRuntimeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (testing::cuda_path().empty()) {
      GTEST_SKIP() << "no double of libcuda was built, and FASTSYNC_CUDA_PATH is not set";
    }
  }
};

// For tests that plan faults or count calls.
class CudaDoubleTest : public CudaRuntimeTest {
 protected:
  void SetUp() override {
    if (!testing::cuda_is_double()) GTEST_SKIP() << "needs the double of libcuda";
  }
};

// ---- The device and its context -------------------------------------------------------------------------------------

TEST_F(CudaRuntimeTest, IsOneForEachDevice) {
  in_cuda_process([] {
    const auto runtime = CudaRuntime::get(0);
    EXPECT_EQ(runtime, CudaRuntime::get(0));
    EXPECT_EQ(runtime->ordinal(), 0);
    EXPECT_EQ(runtime->name(), "cuda");
    EXPECT_EQ(runtime->is_fake(), testing::cuda_is_double());
    EXPECT_EQ(runtime->device_id().size(), 32U);
  });
}

TEST_F(CudaRuntimeTest, RefusesADeviceThatDoesNotExist) {
  in_cuda_process([] {
    for (const int ordinal : {-1, 99}) {
      try {
        (void)CudaRuntime::get(ordinal);
        ADD_FAILURE();
      } catch (const InvalidArgument& error) {
        expect_words(error.what(), {"no CUDA device", "CUDA_VISIBLE_DEVICES"});
      }
    }
  });
}

TEST_F(CudaDoubleTest, DeviceIdFollowsTheDeviceNotItsNumber) {
  testing::Channel channel;
  auto ids_of = [&](int end, const char* visible) {
    return testing::cuda_process({{"CUDA_VISIBLE_DEVICES", visible}}, [&channel, end] {
      const std::string ids = CudaRuntime::get(0)->device_id() + CudaRuntime::get(1)->device_id();
      channel.send(end, ids.data(), 64);
      std::array<char, 64> others{};
      (void)channel.receive(end, others.data(), others.size());
      EXPECT_EQ(ids.substr(0, 32), std::string(others.data() + 32, 32));
      EXPECT_EQ(ids.substr(32), std::string(others.data(), 32));
      EXPECT_NE(ids.substr(0, 32), ids.substr(32));
    });
  };
  auto first = ids_of(0, "0,1");
  auto second = ids_of(1, "1,0");
  EXPECT_EQ(first.join(), 0);
  EXPECT_EQ(second.join(), 0);
}

TEST_F(CudaDoubleTest, LeavesTheThreadsContextAsItWas) {
  in_cuda_process([] {
    auto* const current = CudaJournal::function<int(void**)>("cuCtxGetCurrent");
    Device gpu;
    void* context = nullptr;
    const auto use_everything = [&] {
      const Buffer memory = gpu.device();
      gpu.runtime->fill(memory.data(), std::byte{1}, kBytes, gpu.stream.view());
      Event event(gpu.runtime);
      event.record(gpu.stream.view());
      event.stream_wait(gpu.stream.view());
      event.synchronize(gpu.wait);
      gpu.stream.synchronize(gpu.wait);
      (void)gpu.runtime->export_memory({memory.data(), memory.nbytes(), -1});
      (void)gpu.runtime->can_share_events();
    };
    use_everything();
    ASSERT_EQ(current(&context), 0);
    EXPECT_EQ(context, nullptr);
    EXPECT_EQ(CudaRuntime::current_device(), 0);

    const auto other = CudaRuntime::get(1)->make_current();
    ASSERT_EQ(current(&context), 0);
    void* const others_context = context;
    EXPECT_NE(others_context, nullptr);
    EXPECT_EQ(CudaRuntime::current_device(), 1);
    use_everything();
    ASSERT_EQ(current(&context), 0);
    EXPECT_EQ(context, others_context);
  });
}

TEST_F(CudaRuntimeTest, WorksOnThreadsThatHaveNoContext) {
  in_cuda_process([] {
    Device gpu;
    const Buffer memory = gpu.device();
    const Buffer home = gpu.pinned();
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        Stream stream(gpu.runtime, "thread");
        Wait wait = long_wait();
        const std::uint64_t part = kBytes / 4;
        const auto offset = static_cast<std::uint64_t>(t) * part;
        for (int round = 0; round < 20; ++round) {
          gpu.runtime->fill(memory.data() + offset, static_cast<std::byte>(t + round), part, stream.view());
          gpu.runtime->copy(home.data() + offset, memory.data() + offset, part, stream.view());
          stream.synchronize(wait);
          EXPECT_TRUE(all_equal(home.data() + offset, part, static_cast<std::byte>(t + round)));
        }
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

TEST_F(CudaDoubleTest, OneOfItsOwnGivesEverythingBack) {
  in_cuda_process([] {
    {
      const auto runtime = CudaRuntime::create(0, {.virtual_memory = true});
      Stream stream(runtime, "s");
      Wait wait = long_wait();
      const Buffer memory = Buffer::allocate(runtime, MemoryKind::kDevice, kBytes);
      runtime->fill(memory.data(), std::byte{1}, kBytes, stream.view());
      stream.synchronize(wait);
    }
    for (const char* kind :
         {"primary_context", "module", "stream", "event", "vmm_handle", "vmm_reservation", "vmm_mapping"}) {
      EXPECT_EQ(CudaJournal::live(kind), 0) << kind;
    }
  });
}

TEST_F(CudaDoubleTest, SaysThatTheKernelCannotBeCompiled) {
  in_cuda_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuLibraryLoadData action=fail code=222"}}, [] {
    expect_words(error_of([] { (void)CudaRuntime::get(0); }),
                 {"cuLibraryLoadData", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "compute capability"});
    // The next one has another try, and nothing was left behind.
    EXPECT_EQ(CudaJournal::live("primary_context"), 0);
    EXPECT_NO_THROW((void)CudaRuntime::get(0));
  });
}

// ---- Memory ---------------------------------------------------------------------------------------------------------

TEST_F(CudaDoubleTest, FreesWhatItAllocates) {
  in_cuda_process([] {
    const auto runtime = CudaRuntime::get(0);
    for (const MemoryKind kind :
         {MemoryKind::kHost, MemoryKind::kPinnedHost, MemoryKind::kShared, MemoryKind::kDevice}) {
      const Buffer memory = Buffer::allocate(runtime, kind, kBytes);
      EXPECT_NE(memory.data(), nullptr);
      EXPECT_EQ(memory.nbytes(), kBytes);
      EXPECT_EQ(Buffer::allocate(runtime, kind, 0).data(), nullptr);
      EXPECT_EQ(CudaRuntime::device_of(memory.data()), kind == MemoryKind::kDevice ? 0 : -1) << memory_kind_name(kind);
    }
    EXPECT_EQ(CudaJournal::live("device_memory"), 0);
    EXPECT_EQ(CudaJournal::live("pinned"), 0);
    EXPECT_EQ(runtime->counters().allocations, 2U);
    EXPECT_EQ(runtime->counters().allocated_bytes, 2 * kBytes);
  });
}

TEST_F(CudaDoubleTest, KnowsWhoseMemoryAPointerIs) {
  in_cuda_process([] {
    const auto second = CudaRuntime::get(1);
    const Buffer memory = Buffer::allocate(second, MemoryKind::kDevice, kBytes);
    EXPECT_EQ(CudaRuntime::device_of(memory.data()), 1);
    EXPECT_EQ(CudaRuntime::device_of(memory.data() + kBytes - 1), 1);
    int local = 0;
    EXPECT_EQ(CudaRuntime::device_of(&local), -1);
    EXPECT_EQ(CudaRuntime::device_of(nullptr), -1);
    // On a thread without a context too.
    std::thread([&] { EXPECT_EQ(CudaRuntime::device_of(memory.data()), 1); }).join();
  });
}

TEST_F(CudaRuntimeTest, OutOfMemorySaysHowMuchWhereAndWhatToDo) {
  in_cuda_process([] {
    for (const bool virtual_memory : {false, true}) {
      const auto runtime = CudaRuntime::create(0, {.virtual_memory = virtual_memory});
      const std::uint64_t absurd = std::uint64_t{1} << 44;
      const std::string error = error_of([&] { (void)runtime->allocate(MemoryKind::kDevice, absurd); });
      expect_words(error,
                   {"17592186044416 bytes", "device 0", "CUDA_ERROR_OUT_OF_MEMORY", "MiB are free", "bucket_bytes"});
      // The context is well.
      EXPECT_NE(Buffer::allocate(runtime, MemoryKind::kDevice, kBytes).data(), nullptr);
    }
    expect_words(error_of([] { (void)CudaRuntime::get(0)->allocate(MemoryKind::kPinnedHost, std::uint64_t{1} << 50); }),
                 {"pinned host memory"});
  });
}

TEST_F(CudaDoubleTest, VirtualMemoryThatCannotBeMappedLeavesNothingBehind) {
  for (const char* step : {"cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"}) {
    in_cuda_process({{"FASTSYNC_FAKE_FAULTS", concat("symbol=", step, " action=fail code=2")}}, [&] {
      const auto runtime = CudaRuntime::create(0, {.virtual_memory = true});
      expect_words(error_of([&] { (void)runtime->allocate(MemoryKind::kDevice, kBytes); }), {step, "OUT_OF_MEMORY"});
      for (const char* kind : {"vmm_handle", "vmm_reservation", "vmm_mapping"})
        EXPECT_EQ(CudaJournal::live(kind), 0) << kind;
      EXPECT_NE(Buffer::allocate(runtime, MemoryKind::kDevice, kBytes).data(), nullptr);
    });
  }
}

TEST_F(CudaDoubleTest, RegistersHostMemoryInPiecesOfAtMostAGibibyte) {
  in_cuda_process([] {
    Device gpu;
    constexpr std::uint64_t kGib = std::uint64_t{1} << 30;
    constexpr std::uint64_t kRange = 2 * kGib + kBytes;
    // Address space only: no page of it is touched but those that are copied.
    void* const mapped =
        ::mmap(nullptr, kRange, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(mapped, MAP_FAILED);
    auto* const host = static_cast<std::byte*>(mapped);
    gpu.runtime->register_host(host, kRange);
    EXPECT_EQ(CudaJournal::calls("cuMemHostRegister_v2"), 3U);
    EXPECT_EQ(gpu.runtime->counters().registrations, 3U);
    EXPECT_THROW(gpu.runtime->register_host(host, kRange), InvalidArgument);

    // Across the seam between two registrations.
    const Buffer memory = gpu.device(2 * kBytes);
    std::byte* const seam = host + kGib - kBytes;
    fill_random(seam, 2 * kBytes, 1);
    const std::vector<std::byte> wanted(seam, seam + 2 * kBytes);
    gpu.runtime->copy(memory.data(), seam, 2 * kBytes, gpu.stream.view());
    EXPECT_EQ(CudaJournal::calls("cuMemcpyAsync"), 2U);
    gpu.runtime->copy(host + kGib + kBytes, memory.data(), 2 * kBytes, gpu.stream.view());  // not across one
    EXPECT_EQ(CudaJournal::calls("cuMemcpyAsync"), 3U);
    gpu.stream.synchronize(gpu.wait);
    EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), host + kGib + kBytes));

    gpu.runtime->unregister_host(host);
    gpu.runtime->unregister_host(host);
    EXPECT_EQ(CudaJournal::live("registration"), 0);
    ::munmap(mapped, kRange);
  });
}

TEST_F(CudaDoubleTest, LeavesOthersRegistrationsToThem) {
  in_cuda_process([] {
    const auto runtime = CudaRuntime::get(0);
    const Buffer memory = Buffer::heap(kBytes);
    const auto scope = runtime->make_current();
    ASSERT_EQ(
        CudaJournal::function<int(void*, std::size_t, unsigned)>("cuMemHostRegister_v2")(memory.data(), kBytes, 1), 0);
    runtime->register_host(memory.data(), kBytes);  // theirs already
    EXPECT_EQ(runtime->counters().registrations, 0U);
    runtime->unregister_host(memory.data());
    EXPECT_EQ(CudaJournal::live("registration"), 1);
    EXPECT_EQ(CudaJournal::function<int(void*)>("cuMemHostUnregister")(memory.data()), 0);
  });
}

TEST_F(CudaDoubleTest, FailedRegistrationUndoesItsPieces) {
  in_cuda_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuMemHostRegister_v2 nth=2 action=fail code=2"}}, [] {
    const auto runtime = CudaRuntime::get(0);
    constexpr std::uint64_t kRange = (std::uint64_t{1} << 30) + kBytes;
    void* const mapped =
        ::mmap(nullptr, kRange, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(mapped, MAP_FAILED);
    auto* const host = static_cast<std::byte*>(mapped);
    expect_words(error_of([&] { runtime->register_host(host, kRange); }), {"cuMemHostRegister", "1073741824 of"});
    EXPECT_EQ(CudaJournal::live("registration"), 0);
    EXPECT_NO_THROW(runtime->register_host(host, kRange));
    runtime->unregister_host(host);
    ::munmap(mapped, kRange);
  });
}

// ---- Work and order -------------------------------------------------------------------------------------------------

TEST_F(CudaRuntimeTest, CopiesAndFillsInTheOrderOfTheStream) {
  in_cuda_process([] {
    Device gpu;
    const Buffer memory = gpu.device();
    const Buffer from = gpu.pinned();
    const Buffer to = gpu.pinned();
    fill_random(from.data(), kBytes, 2);
    std::memset(to.data(), 0, kBytes);
    gpu.runtime->fill(memory.data(), std::byte{7}, kBytes, gpu.stream.view());
    gpu.runtime->copy(memory.data() + 5, from.data() + 5, kBytes - 10, gpu.stream.view());
    gpu.runtime->copy(to.data(), memory.data(), kBytes, gpu.stream.view());
    gpu.stream.synchronize(gpu.wait);
    EXPECT_TRUE(std::equal(from.data() + 5, from.data() + kBytes - 5, to.data() + 5));
    EXPECT_TRUE(all_equal(to.data(), 5, std::byte{7}));
    EXPECT_TRUE(all_equal(to.data() + kBytes - 5, 5, std::byte{7}));
    gpu.runtime->copy(nullptr, nullptr, 0, gpu.stream.view());
    gpu.runtime->fill(nullptr, std::byte{1}, 0, gpu.stream.view());
  });
}

TEST_F(CudaRuntimeTest, StreamsAreOrderedByEvents) {
  in_cuda_process([] {
    Device gpu;
    Stream consumer(gpu.runtime, "consumer");
    Event ready(gpu.runtime);
    Event taken(gpu.runtime);
    const Buffer memory = gpu.device();
    const Buffer home = gpu.pinned();
    for (int round = 0; round < 30; ++round) {
      taken.stream_wait(gpu.stream.view());
      gpu.runtime->fill(memory.data(), static_cast<std::byte>(round), kBytes, gpu.stream.view());
      ready.record(gpu.stream.view());
      ready.stream_wait(consumer.view());
      gpu.runtime->copy(home.data(), memory.data(), kBytes, consumer.view());
      taken.record(consumer.view());
      taken.synchronize(gpu.wait);
      ASSERT_TRUE(all_equal(home.data(), kBytes, static_cast<std::byte>(round))) << round;
    }
  });
}

TEST_F(CudaDoubleTest, EventMarksWhatWasQueuedWhenItWasRecorded) {
  // The second fill never ends.
  in_cuda_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuMemsetD8Async nth=2 action=hang"}}, [] {
    Device gpu;
    const Buffer memory = gpu.device();
    Event event(gpu.runtime);
    EXPECT_TRUE(event.query());  // never recorded
    event.synchronize(gpu.wait);
    gpu.runtime->fill(memory.data(), std::byte{1}, kBytes, gpu.stream.view());
    event.record(gpu.stream.view());
    gpu.runtime->fill(memory.data(), std::byte{2}, kBytes, gpu.stream.view());
    event.synchronize(gpu.wait);
    EXPECT_TRUE(event.query());
    event.record(gpu.stream.view());
    EXPECT_FALSE(event.query());
    std::_Exit(::testing::Test::HasFailure() ? 1 : 0);  // the stream can never be destroyed
  });
}

TEST_F(CudaDoubleTest, HostWaitsEndAtTheirDeadlineAndCallTheHook) {
  in_cuda_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuMemsetD8Async action=hang"}}, [] {
    Device gpu;
    const Buffer memory = gpu.device();
    gpu.runtime->fill(memory.data(), std::byte{1}, kBytes, gpu.stream.view());
    Event event(gpu.runtime);
    event.record(gpu.stream.view());
    int calls = 0;
    const auto start = Clock::now();
    Wait brief(180ms, [&] { ++calls; });
    try {
      gpu.stream.synchronize(brief);
      ADD_FAILURE();
    } catch (const TimeoutError& error) {
      expect_words(error.what(), {"0.18 s", "stream 'test'", "device 0"});
    }
    EXPECT_GE(calls, 3);
    EXPECT_LT(Clock::now() - start, 180ms + testing::kAtOnce);
    Wait again(50ms, nullptr);
    EXPECT_THROW(event.synchronize(again), TimeoutError);
    // What the hook throws ends the wait, at once.
    struct Interrupt {};
    const auto interrupted_at = Clock::now();
    Wait interrupted(30s, [] { throw Interrupt(); });
    EXPECT_THROW(event.synchronize(interrupted), Interrupt);
    EXPECT_LT(Clock::now() - interrupted_at, kPollInterval + testing::kAtOnce);
    // A hook that knows better why beats the deadline.
    Wait knowing(10ms, [] { throw PeerLostError("rank 3 is gone", 3); });
    EXPECT_THROW(event.synchronize(knowing), PeerLostError);
    std::_Exit(::testing::Test::HasFailure() ? 1 : 0);
  });
}

TEST_F(CudaDoubleTest, NeverCallsAWaitOfTheDriver) {
  in_cuda_process([] {
    Device gpu;
    const Buffer memory = gpu.device();
    Event event(gpu.runtime);
    for (int round = 0; round < 10; ++round) {
      gpu.runtime->fill(memory.data(), std::byte{1}, kBytes, gpu.stream.view());
      event.record(gpu.stream.view());
      event.synchronize(gpu.wait);
      gpu.stream.synchronize(gpu.wait);
    }
    for (const char* symbol : {"cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"}) {
      EXPECT_EQ(CudaJournal::calls(symbol), 0U) << symbol;
    }
  });
}

TEST_F(CudaDoubleTest, SteadyStateMakesNothing) {
  in_cuda_process([] {
    Device gpu;
    const Buffer memory = gpu.device();
    const Buffer home = gpu.pinned();
    Event event(gpu.runtime);
    const auto sync_once = [&] {
      gpu.runtime->fill(memory.data(), std::byte{1}, kBytes, gpu.stream.view());
      gpu.runtime->copy(home.data(), memory.data(), kBytes, gpu.stream.view());
      event.record(gpu.stream.view());
      event.synchronize(gpu.wait);
      gpu.stream.synchronize(gpu.wait);
      (void)gpu.runtime->can_share_events();
    };
    sync_once();
    const CudaRuntime::Counters before = gpu.runtime->counters();
    const std::uint64_t events = CudaJournal::calls("cuEventCreate");
    for (int round = 0; round < 100; ++round) sync_once();
    EXPECT_EQ(gpu.runtime->counters(), before);
    EXPECT_EQ(CudaJournal::calls("cuEventCreate"), events);
    EXPECT_EQ(CudaJournal::calls("cuStreamCreate"), 1U);
  });
}

TEST_F(CudaRuntimeTest, DefaultStreamsHaveHandlesOfTheirOwn) {
  in_cuda_process([] {
    Device gpu;
    const auto wrapped = [&](std::uintptr_t handle) {
      return reinterpret_cast<std::uintptr_t>(gpu.runtime->wrap_stream(reinterpret_cast<void*>(handle)).handle());
    };
    EXPECT_EQ(wrapped(0), 1U);  // torch says 0, and 0 is a compile-time choice in CUDA
    EXPECT_EQ(wrapped(1), 1U);
    EXPECT_EQ(wrapped(2), 2U);
    EXPECT_EQ(gpu.runtime->wrap_stream(gpu.stream.view().handle()).handle(), gpu.stream.view().handle());
    const Buffer memory = gpu.device();
    const StreamView legacy = gpu.runtime->wrap_stream(nullptr);
    gpu.runtime->fill(memory.data(), std::byte{3}, kBytes, legacy);
    Event event(gpu.runtime);
    event.record(legacy);
    event.stream_wait(gpu.stream.view());
    const Buffer home = gpu.pinned();
    gpu.runtime->copy(home.data(), memory.data(), kBytes, gpu.stream.view());
    gpu.stream.synchronize(gpu.wait);
    EXPECT_TRUE(all_equal(home.data(), kBytes, std::byte{3}));
  });
}

TEST_F(CudaRuntimeTest, RefusesHostCodeOnAStream) {
  in_cuda_process([] {
    Device gpu;
    expect_words(error_of([&] { gpu.runtime->enqueue(gpu.stream.view(), [] {}); }), {"cannot be queued", "event"});
  });
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

TEST_F(CudaRuntimeTest, PacksAndUnpacksInOneLaunchEachWithTheHostsChecksum) {
  in_cuda_process([] {
    Device gpu;
    const std::vector<std::uint64_t> sizes = {1000, 3, 256, 70000, 17};
    std::vector<CopyPiece> pieces;
    const Buffer source = gpu.device(100000);
    const Buffer target = gpu.device(100000);
    std::uint64_t from = 0;
    std::uint64_t used = 0;
    for (const std::uint64_t size : sizes) {
      CopyPiece piece;
      piece.bucket_offset = (used + 255) / 256 * 256;
      piece.nbytes = size;
      piece.address = reinterpret_cast<std::uint64_t>(source.data() + from);
      from += size;
      used = piece.bucket_offset + size;
      pieces.push_back(piece);
    }
    const Buffer table = gpu.pinned(2 * pieces.size() * sizeof(CopyPiece));
    const Buffer bucket = gpu.device(1 << 17);
    const Buffer sums = gpu.device(2 * sizeof(Checksum));
    const Buffer home = gpu.pinned(1 << 17);
    const Buffer data = gpu.pinned(100000);
    fill_random(data.data(), 100000, 3);
    std::memcpy(table.data(), pieces.data(), pieces.size() * sizeof(CopyPiece));
    for (CopyPiece& piece : pieces) piece.address += static_cast<std::uint64_t>(target.data() - source.data());
    std::memcpy(table.data() + pieces.size() * sizeof(CopyPiece), pieces.data(), pieces.size() * sizeof(CopyPiece));

    CopyArgs args;
    args.pieces = reinterpret_cast<const CopyPiece*>(table.data());
    args.bucket = bucket.data();
    args.sum = reinterpret_cast<Checksum*>(sums.data());
    args.used_bytes = used;
    args.count = static_cast<std::uint32_t>(pieces.size());
    const StreamView stream = gpu.stream.view();
    gpu.runtime->copy(source.data(), data.data(), 100000, stream);
    gpu.runtime->fill(target.data(), std::byte{0}, 100000, stream);
    gpu.runtime->fill(sums.data(), std::byte{0}, sums.nbytes(), stream);
    gpu.runtime->launch_copy(CopyDirection::kPack, args, stream);
    args.pieces += pieces.size();
    ++args.sum;
    gpu.runtime->launch_copy(CopyDirection::kUnpack, args, stream);
    args.count = 0;
    gpu.runtime->launch_copy(CopyDirection::kUnpack, args, stream);  // an empty bucket is no launch
    if (testing::cuda_is_double()) {
      EXPECT_EQ(CudaJournal::calls("cuLaunchKernel"), 2U);
    }
    gpu.runtime->copy(home.data(), target.data(), from, stream);
    gpu.stream.synchronize(gpu.wait);
    EXPECT_TRUE(std::equal(home.data(), home.data() + from, data.data()));

    Checksum wanted;
    std::uint64_t at = 0;
    for (const CopyPiece& piece : pieces) {
      wanted += checksum_bytes(data.data() + at, piece.nbytes, piece.bucket_offset);
      at += piece.nbytes;
    }
    gpu.runtime->copy(home.data(), sums.data(), sums.nbytes(), stream);
    gpu.stream.synchronize(gpu.wait);
    std::array<Checksum, 2> got{};
    std::memcpy(got.data(), home.data(), sizeof(got));
    EXPECT_EQ(got[0], wanted);
    EXPECT_EQ(got[1], wanted);
  });
}

// ---- Errors ---------------------------------------------------------------------------------------------------------

TEST_F(CudaDoubleTest, FailedCallNamesWhatWasAsked) {
  in_cuda_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuMemcpyAsync action=fail code=1"}}, [] {
    Device gpu;
    const Buffer memory = gpu.device();
    const Buffer home = gpu.pinned();
    expect_words(error_of([&] { gpu.runtime->copy(memory.data(), home.data(), 4096, gpu.stream.view()); }),
                 {"cuMemcpyAsync", "4096 bytes", "stream 'test'", "device 0", "CUDA_ERROR_INVALID_VALUE (1)"});
    // Only that call failed.
    gpu.runtime->copy(memory.data(), home.data(), 4096, gpu.stream.view());
    EXPECT_NO_THROW(gpu.stream.synchronize(gpu.wait));
  });
}

TEST_F(CudaDoubleTest, FirstErrorOfAKernelIsKeptAndBreaksTheDevice) {
  in_cuda_process(
      {{"FASTSYNC_FAKE_FAULTS",
        "symbol=cuMemsetD8Async nth=1 action=fail_later code=700; symbol=cuMemsetD8Async nth=2+ action=fail code=719"}},
      [] {
        Device gpu;
        const Buffer memory = gpu.device();
        Event event(gpu.runtime);
        gpu.runtime->fill(memory.data(), std::byte{1}, kBytes, gpu.stream.view());  // no error yet
        const std::string first = error_of([&] { gpu.stream.synchronize(gpu.wait); });
        expect_words(first, {"CUDA_ERROR_ILLEGAL_ADDRESS (700)", "context is broken", "restart the process"});
        // Whatever comes after it, with other codes too, says the same.
        EXPECT_EQ(error_of([&] { gpu.runtime->fill(memory.data(), std::byte{1}, 1, gpu.stream.view()); }), first);
        EXPECT_EQ(error_of([&] { gpu.stream.synchronize(gpu.wait); }), first);
        EXPECT_EQ(error_of([&] { (void)event.query(); }), first);
        EXPECT_EQ(error_of([&] { (void)gpu.device(); }), first);
        EXPECT_EQ(error_of([&] { (void)Stream(gpu.runtime, "another"); }), first);
        EXPECT_EQ(error_of([&] { (void)CudaRuntime::get(0)->make_current(); }), first);
      });
}

TEST_F(CudaDoubleTest, ErrorOfOneDeviceLeavesTheOtherAlone) {
  in_cuda_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuMemsetD8Async nth=1 action=fail_later code=719"}}, [] {
    Device gpu;
    const Buffer memory = gpu.device();
    gpu.runtime->fill(memory.data(), std::byte{1}, kBytes, gpu.stream.view());
    EXPECT_THROW(gpu.stream.synchronize(gpu.wait), DeviceError);
    const auto other = CudaRuntime::get(1);
    Stream stream(other, "other");
    const Buffer others = Buffer::allocate(other, MemoryKind::kDevice, kBytes);
    other->fill(others.data(), std::byte{1}, kBytes, stream.view());
    EXPECT_NO_THROW(stream.synchronize(gpu.wait));
  });
}

TEST_F(CudaDoubleTest, BrokenDeviceIsStillTheCurrentOne) {
  in_cuda_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuMemsetD8Async action=fail_later code=700"}}, [] {
    Device gpu;
    const auto other = CudaRuntime::get(1);
    const auto current = other->make_current();
    Stream stream(other, "other");
    const Buffer memory = Buffer::allocate(other, MemoryKind::kDevice, kBytes);
    other->fill(memory.data(), std::byte{1}, kBytes, stream.view());
    EXPECT_THROW(stream.synchronize(gpu.wait), DeviceError);
    EXPECT_EQ(CudaRuntime::current_device(), 1);
  });
}

TEST_F(CudaDoubleTest, ErrorOfAWaitIsNotATimeout) {
  // Work that fails long after it was queued: the poll must see it, not wait for the deadline.
  in_cuda_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuMemsetD8Async action=fail_later code=700"},
                   {"FASTSYNC_FAKE_DELAY_US", "20000"}},
                  [] {
                    Device gpu;
                    const Buffer memory = gpu.device();
                    Event event(gpu.runtime);
                    gpu.runtime->fill(memory.data(), std::byte{1}, kBytes, gpu.stream.view());
                    event.record(gpu.stream.view());
                    EXPECT_THROW(event.synchronize(gpu.wait), DeviceError);
                  });
}

}  // namespace
}  // namespace fastsync
