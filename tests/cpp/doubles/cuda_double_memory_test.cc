// The double of libcuda, held to what it promises: memory, errors that stay, and the copy kernel.
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "common/checksum.h"
#include "device/copy_args.h"
#include "doubles/fake_cuda_kernel.h"
#include "doubles/fake_cuda_process.h"

namespace fastsync::testing {
namespace {

constexpr std::size_t kBytes = 4096;

// --- Memory ----------------------------------------------------------------------------------------------------------

TEST(CudaDoubleMemory, CrashesAHostThatReadsADevicePointer) {
  const int status = fake_process({}, [] {
                       use_device(0);
                       ::signal(SIGSEGV, SIG_DFL);  // a sanitizer would make a report of it
                       const CUdeviceptr memory = device_memory(kBytes);
                       const unsigned char byte = *reinterpret_cast<const volatile unsigned char*>(memory);
                       throw std::runtime_error("read " + std::to_string(byte));
                     }).join();
  EXPECT_EQ(status, -SIGSEGV);
}

TEST(CudaDoubleMemory, FillsNewMemoryWithPoison) {
  in_fake_process([] {
    use_device(0);
    EXPECT_EQ(contents(device_memory(100), 100), filled(100, kFresh));
    EXPECT_EQ(pinned<unsigned char>(10)[9], kFresh);
  });
}

TEST(CudaDoubleMemory, RefusesAPointerThatIsNotAlive) {
  in_fake_process([] {
    use_device(0);
    const CUstream stream = new_stream();
    const CUdeviceptr memory = device_memory(kBytes);
    const CUdeviceptr freed = device_memory(kBytes);
    EXPECT_EQ(CU(cuMemFree)(freed), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuMemFree)(freed), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(CU(cuMemcpyDtoDAsync)(memory, freed, kBytes, stream), CUDA_ERROR_INVALID_VALUE);
    expect_violation("use-after-free");
    EXPECT_EQ(CU(cuMemcpyDtoDAsync)(memory + 1, memory, kBytes, stream), CUDA_ERROR_INVALID_VALUE);
    expect_violation("out-of-bounds");
    EXPECT_EQ(CU(cuMemsetD8Async)(freed + (std::uint64_t{16} << 30), 0, 1, stream), CUDA_ERROR_INVALID_VALUE);
    expect_violation("wild-pointer");
    for (int i = 0; i < 100; ++i) {  // an address is never given out again
      const CUdeviceptr again = device_memory(kBytes);
      EXPECT_NE(again, freed);
      EXPECT_EQ(CU(cuMemFree)(again), CUDA_SUCCESS);
    }
  });
}

TEST(CudaDoubleMemory, ReportsMemoryFreedUnderQueuedWork) {
  in_fake_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuMemsetD8Async action=delay ms=100"}}, [] {
    use_device(0);
    const CUstream stream = new_stream();
    const CUdeviceptr memory = device_memory(kBytes);
    EXPECT_EQ(CU(cuMemsetD8Async)(memory, 1, kBytes, stream), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuMemFree)(memory), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuStreamSynchronize)(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
    expect_violation("use-after-free");
  });
}

TEST(CudaDoubleMemory, ReportsMemoryFreedUnderRunningWork) {
  in_fake_process([] {
    use_device(0);
    const CUstream stream = new_stream();
    struct Job {
      CUdeviceptr memory = 0;
      std::atomic<bool> running{false};
      std::atomic<bool> may_end{false};
    } job;
    job.memory = device_memory(kBytes);
    const fastsync_fake_run run = [](void* user, fastsync_fake_op* op) {
      auto& mine = *static_cast<Job*>(user);
      void* host = nullptr;
      const CUresult result = CU(fastsync_fake_translate)(op, mine.memory, kBytes, 0, &host);
      mine.running = true;
      mine.running.notify_all();
      mine.may_end.wait(false);
      return static_cast<unsigned char*>(host)[kBytes - 1] == 0xDD ? result : CUDA_ERROR_UNKNOWN;  // there, poisoned
    };
    EXPECT_EQ(CU(fastsync_fake_enqueue)(stream, "reader", run, &job, nullptr), CUDA_SUCCESS);
    job.running.wait(false);
    EXPECT_EQ(CU(cuMemFree)(job.memory), CUDA_SUCCESS);
    job.may_end = true;
    job.may_end.notify_all();
    EXPECT_EQ(CU(cuStreamSynchronize)(stream), CUDA_SUCCESS);
    expect_violation("use-after-free");
  });
}

TEST(CudaDoubleMemory, RefusesPinnedMemoryThatWasFreed) {
  in_fake_process([] {
    use_device(0);
    const CUstream stream = new_stream();
    auto* host = pinned<unsigned char>(kBytes);
    EXPECT_EQ(CU(cuMemFreeHost)(host), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuMemcpyHtoDAsync)(device_memory(kBytes), host, kBytes, stream), CUDA_ERROR_INVALID_VALUE);
    expect_violation("use-after-free");
    EXPECT_EQ(CU(cuMemFreeHost)(host), CUDA_ERROR_INVALID_VALUE);
    EXPECT_NE(pinned<unsigned char>(kBytes), host);
  });
}

TEST(CudaDoubleMemory, StagesAndCountsPageableCopies) {
  in_fake_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuMemcpyHtoDAsync_v2 action=delay ms=100"}}, [] {
    use_device(0);
    const CUstream stream = new_stream();
    const CUdeviceptr memory = device_memory(kBytes);
    auto host = filled(kBytes, 1);
    EXPECT_EQ(CU(cuMemcpyHtoDAsync)(memory, host.data(), kBytes, stream), CUDA_SUCCESS);
    std::fill(host.begin(), host.end(), static_cast<unsigned char>(2));  // too late: it was read at the call
    expect_violation("pageable");
    EXPECT_EQ(CU(cuMemcpyDtoHAsync)(host.data(), memory, kBytes, stream), CUDA_SUCCESS);
    EXPECT_EQ(host, filled(kBytes, 1));  // there when the call returns
    expect_violation("pageable");
  });
}

TEST(CudaDoubleMemory, ReadsPinnedMemoryWhenTheStreamGetsThere) {
  SKIP_PLANTED_RACE();
  in_fake_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuMemcpyHtoDAsync_v2 action=delay ms=200"}}, [] {
    use_device(0);
    const CUstream stream = new_stream();
    const CUdeviceptr memory = device_memory(kBytes);
    auto* host = pinned<unsigned char>(kBytes);
    std::memset(host, 1, kBytes);
    EXPECT_EQ(CU(cuMemcpyHtoDAsync)(memory, host, kBytes, stream), CUDA_SUCCESS);
    std::memset(host, 2, kBytes);
    EXPECT_EQ(CU(cuStreamSynchronize)(stream), CUDA_SUCCESS);
    EXPECT_EQ(contents(memory, kBytes), filled(kBytes, 2));
  });
}

TEST(CudaDoubleMemory, RegistersHostMemoryOnce) {
  in_fake_process([] {
    use_device(0);
    const CUstream stream = new_stream();
    const CUdeviceptr memory = device_memory(kBytes);
    std::vector<unsigned char> host(2 * kBytes, 1);
    EXPECT_EQ(CU(cuMemHostUnregister)(host.data()), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    EXPECT_EQ(CU(cuMemHostRegister)(host.data(), kBytes, 0), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuMemHostRegister)(host.data() + kBytes - 1, 8, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    EXPECT_EQ(CU(cuMemHostRegister)(host.data(), std::size_t{512} << 30, 0), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(CU(cuMemcpyHtoDAsync)(memory, host.data(), kBytes, stream), CUDA_SUCCESS);  // and no violation
    EXPECT_EQ(CU(cuStreamSynchronize)(stream), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuMemHostUnregister)(host.data()), CUDA_SUCCESS);
    EXPECT_EQ(CU(fastsync_fake_live)("registration"), 0);
  });
}

TEST(CudaDoubleMemory, LimitsTheMemoryOfADevice) {
  in_fake_process({{"FASTSYNC_FAKE_MEMORY_MB", "3"}}, [] {
    use_device(0);
    const CUdeviceptr memory = device_memory(2 << 20);
    CUdeviceptr more = 0;
    EXPECT_EQ(CU(cuMemAlloc)(&more, 2 << 20), CUDA_ERROR_OUT_OF_MEMORY);
    std::size_t free = 0;
    std::size_t total = 0;
    EXPECT_EQ(CU(cuMemGetInfo)(&free, &total), CUDA_SUCCESS);
    EXPECT_EQ(free, std::size_t{1} << 20);
    EXPECT_EQ(total, std::size_t{3} << 20);
    EXPECT_EQ(CU(cuMemFree)(memory), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuMemAlloc)(&more, 3 << 20), CUDA_SUCCESS);
  });
}

TEST(CudaDoubleMemory, TellsWhatAPointerIs) {
  in_fake_process([] {
    use_device(1);
    const CUdeviceptr memory = device_memory(kBytes);
    const auto* host = pinned<unsigned char>(kBytes);
    unsigned type = 7;
    int ordinal = 7;
    CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
    void* values[] = {&type, &ordinal};
    const auto ask = CU(cuPointerGetAttributes);
    EXPECT_EQ(ask(2, attributes, values, memory + 5), CUDA_SUCCESS);
    EXPECT_EQ(type, unsigned{CU_MEMORYTYPE_DEVICE});
    EXPECT_EQ(ordinal, 1);
    EXPECT_EQ(ask(1, attributes, values, address_of(host)), CUDA_SUCCESS);
    EXPECT_EQ(type, unsigned{CU_MEMORYTYPE_HOST});
    EXPECT_EQ(ask(2, attributes, values, address_of(&type)), CUDA_SUCCESS);
    EXPECT_EQ(type, 0U);
    EXPECT_LT(ordinal, 0);
    EXPECT_EQ(CU(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address_of(&type)),
              CUDA_ERROR_INVALID_VALUE);
  });
}

// --- Sticky errors ---------------------------------------------------------------------------------------------------

TEST(CudaDoubleMemory, BreaksTheContextOfAKernelThatFaults) {
  in_fake_process([] {
    use_device(0);
    const CUstream stream = new_stream();
    const CUfunction pack = kernel(kPackKernelName);
    const CUdeviceptr bucket = device_memory(kBytes);
    const OnePiece bad(device_memory(kBytes) + 1, bucket, kBytes);
    EXPECT_EQ(launch(pack, bad.args, stream), CUDA_SUCCESS);  // not at the launch
    EXPECT_EQ(CU(cuStreamSynchronize)(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
    expect_violation("out-of-bounds");
    CUdeviceptr memory = 0;
    CUstream another = nullptr;
    EXPECT_EQ(CU(cuMemAlloc)(&memory, kBytes), CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_EQ(CU(cuStreamCreate)(&another, 0), CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_EQ(CU(cuMemFree)(bucket), CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_EQ(CU(cuStreamQuery)(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_EQ(launch(pack, bad.args, stream), CUDA_ERROR_ILLEGAL_ADDRESS);
    use_device(1);  // another context is well
    EXPECT_EQ(CU(cuMemAlloc)(&memory, kBytes), CUDA_SUCCESS);
  });
}

TEST(CudaDoubleMemory, FaultsOnAnotherDevicesMemoryAndOnPageableMemory) {
  for (const bool host : {false, true}) {
    in_fake_process([&] {
      use_device(1);
      const CUdeviceptr other = device_memory(kBytes);
      const std::vector<unsigned char> pageable(kBytes);
      use_device(0);
      const CUstream stream = new_stream();
      const OnePiece bad(host ? address_of(pageable.data()) : other, device_memory(kBytes), kBytes);
      EXPECT_EQ(launch(kernel(kPackKernelName), bad.args, stream), CUDA_SUCCESS);
      EXPECT_EQ(CU(cuStreamSynchronize)(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
      expect_violation(host ? "not-accessible" : "wrong-device");
    });
  }
}

// --- Kernels ---------------------------------------------------------------------------------------------------------

TEST(CudaDoubleMemory, RunsTheCopyKernelThroughItsTranslation) {
  in_fake_process([] {
    use_device(0);
    const CUstream stream = new_stream();
    // A contiguous piece of 1000 bytes, and a 3 x 5 view of 2-byte elements, transposed, with a negative stride.
    const CUdeviceptr flat = device_memory(1000);
    const CUdeviceptr view = device_memory(64);
    std::vector<unsigned char> flat_bytes(1000);
    std::vector<unsigned char> view_bytes(64);
    for (std::size_t i = 0; i < flat_bytes.size(); ++i) flat_bytes[i] = static_cast<unsigned char>(i * 7);
    for (std::size_t i = 0; i < view_bytes.size(); ++i) view_bytes[i] = static_cast<unsigned char>(100 + i);
    EXPECT_EQ(CU(cuMemcpyHtoD)(flat, flat_bytes.data(), 1000), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuMemcpyHtoD)(view, view_bytes.data(), 64), CUDA_SUCCESS);
    constexpr std::int64_t kRow = -2;
    constexpr std::int64_t kColumn = 6;
    auto* layouts = pinned<std::uint64_t>(9);
    const std::uint64_t words[] = {
        2, 2, 0, 0, 3, 5, static_cast<std::uint64_t>(kRow), static_cast<std::uint64_t>(kColumn)};
    std::copy(std::begin(words), std::end(words), layouts + 1);  // not at the beginning
    auto* pieces = pinned<CopyPiece>(2);
    pieces[0] = CopyPiece{.address = flat, .bucket_offset = 0, .nbytes = 1000};
    pieces[1] = CopyPiece{.address = view + 4, .bucket_offset = 1024, .nbytes = 30, .layout = 2};
    const CUdeviceptr bucket = device_memory(2048);
    const CUdeviceptr sum = device_memory(sizeof(Checksum));
    EXPECT_EQ(CU(cuMemsetD8Async)(sum, 0, sizeof(Checksum), stream), CUDA_SUCCESS);
    CopyArgs args;
    args.pieces = pieces;
    args.layouts = layouts;
    args.bucket = reinterpret_cast<std::byte*>(bucket);
    args.sum = reinterpret_cast<Checksum*>(sum);
    args.used_bytes = 1054;
    args.count = 2;
    EXPECT_EQ(launch(kernel(kPackKernelName), args, stream), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuStreamSynchronize)(stream), CUDA_SUCCESS);

    std::vector<unsigned char> logical;
    for (int row = 0; row < 3; ++row) {
      for (int column = 0; column < 5; ++column) {
        const auto at = static_cast<std::size_t>(4 + row * kRow + column * kColumn);
        logical.insert(logical.end(), view_bytes.begin() + at, view_bytes.begin() + at + 2);
      }
    }
    const auto packed = contents(bucket, 2048);
    EXPECT_TRUE(std::equal(flat_bytes.begin(), flat_bytes.end(), packed.begin()));
    EXPECT_TRUE(std::equal(logical.begin(), logical.end(), packed.begin() + 1024));
    EXPECT_EQ(packed[1054], kFresh);
    Checksum expected = checksum_bytes(flat_bytes.data(), 1000, 0);
    expected += checksum_bytes(logical.data(), logical.size(), 1024);
    Checksum computed;
    EXPECT_EQ(CU(cuMemcpyDtoH)(&computed, sum, sizeof computed), CUDA_SUCCESS);
    EXPECT_EQ(computed, expected);

    // And back, into fresh memory.
    const CUdeviceptr flat_copy = device_memory(1000);
    const CUdeviceptr view_copy = device_memory(64);
    pieces[0].address = flat_copy;
    pieces[1].address = view_copy + 4;
    args.sum = nullptr;
    EXPECT_EQ(launch(kernel(kUnpackKernelName), args, stream), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuStreamSynchronize)(stream), CUDA_SUCCESS);
    EXPECT_EQ(contents(flat_copy, 1000), flat_bytes);
    const auto written = contents(view_copy, 64);
    EXPECT_TRUE(std::equal(written.begin(), written.begin() + 30, view_bytes.begin()));
    EXPECT_EQ(written[30], kFresh);
  });
}

TEST(CudaDoubleMemory, ReportsALaunchThatBreaksTheKernelsContract) {
  in_fake_process([] {
    use_device(0);
    const CUstream stream = new_stream();
    const OnePiece bad(device_memory(kBytes), device_memory(kBytes), kBytes);
    bad.piece->bucket_offset = 8;
    EXPECT_EQ(launch(kernel(kPackKernelName), bad.args, stream), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuStreamSynchronize)(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
    expect_violation("bad-launch");
  });
}

TEST(CudaDoubleMemory, LoadsOnlyWhatIsCodeAndNamesTheKernel) {
  in_fake_process({{"FASTSYNC_FAKE_DRIVER", "12040"}}, [] {
    use_device(0);
    const auto load = [](const std::string& image) {
      CUmodule module = nullptr;
      return CU(cuModuleLoadDataEx)(&module, image.c_str(), 0, nullptr, nullptr);
    };
    const std::string ptx = kPtx;
    const auto with = [&](const char* from, const char* to) {
      std::string changed = ptx;
      return changed.replace(changed.find(from), std::strlen(from), to);
    };
    EXPECT_EQ(load(ptx), CUDA_SUCCESS);
    EXPECT_EQ(load("garbage"), CUDA_ERROR_INVALID_IMAGE);
    EXPECT_EQ(load(""), CUDA_ERROR_INVALID_IMAGE);
    EXPECT_EQ(load(".version 7.0\n"), CUDA_ERROR_INVALID_PTX);
    EXPECT_EQ(load(with(".version 7.0", ".version 8.4")), CUDA_SUCCESS);
    EXPECT_EQ(load(with(".version 7.0", ".version 8.5")), CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
    EXPECT_EQ(load(with("sm_75", "sm_120")), CUDA_ERROR_NO_BINARY_FOR_GPU);

    CUmodule module = nullptr;
    CUfunction function = nullptr;
    EXPECT_EQ(CU(cuModuleLoadDataEx)(&module, kPtx, 0, nullptr, nullptr), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuModuleGetFunction)(&function, module, "fastsync"), CUDA_ERROR_NOT_FOUND);
    EXPECT_EQ(CU(cuModuleGetFunction)(&function, module, "unknown_kernel"), CUDA_SUCCESS);
    EXPECT_EQ(launch(function, CopyArgs(), nullptr), CUDA_ERROR_NOT_SUPPORTED);
    expect_violation("unknown-kernel");
    EXPECT_EQ(CU(cuModuleUnload)(module), CUDA_SUCCESS);
    EXPECT_EQ(launch(function, CopyArgs(), nullptr), CUDA_ERROR_INVALID_HANDLE);
  });
}

}  // namespace
}  // namespace fastsync::testing
