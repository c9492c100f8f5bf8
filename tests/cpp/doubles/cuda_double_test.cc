// The double of libcuda, held to what it promises: each rule is broken once, and the double must notice.
// Here the library, streams, contexts, faults and the journal.
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "doubles/fake_cuda_kernel.h"
#include "doubles/fake_cuda_process.h"

namespace fastsync::testing {
namespace {

constexpr std::size_t kBytes = 4096;

// --- The library -----------------------------------------------------------------------------------------------------

TEST(CudaDouble, ExportsTheDriversNamesWithTheirSuffixes) {
  in_fake_process([] {
    for (const char* name : {"cuMemAlloc_v2", "cuMemHostRegister_v2", "cuStreamDestroy_v2", "cuIpcOpenMemHandle_v2",
                             "cuDevicePrimaryCtxRelease_v2", "cuGetProcAddress_v2", "fastsync_fake_cuda"}) {
      EXPECT_NE(::dlsym(fake_library(), name), nullptr) << name;
    }
    for (const char* name : {"cuMemAlloc", "cuMemHostRegister", "cuStreamDestroy", "cuIpcOpenMemHandle"}) {
      EXPECT_EQ(::dlsym(fake_library(), name), nullptr) << name;
    }
    EXPECT_EQ(*fake_function<const int*>("fastsync_fake_cuda"), 1);
  });
}

TEST(CudaDouble, HasOnlyTheFunctionsOfItsDriverVersion) {
  in_fake_process({{"FASTSYNC_FAKE_DRIVER", "11080"}}, [] {
    EXPECT_EQ(::dlsym(fake_library(), "cuLibraryLoadData"), nullptr);
    EXPECT_NE(::dlsym(fake_library(), "cuModuleLoadDataEx"), nullptr);
    int version = 0;
    EXPECT_EQ(CU(cuDriverGetVersion)(&version), CUDA_SUCCESS);
    EXPECT_EQ(version, 11080);
  });
  in_fake_process({{"FASTSYNC_FAKE_DRIVER", "12000"}}, [] {
    EXPECT_EQ(::dlsym(fake_library(), "cuFuncLoad"), nullptr);
    void* found = nullptr;
    CUdriverProcAddressQueryResult status{};
    const auto ask = CU(cuGetProcAddress);
    EXPECT_EQ(ask("cuMemAlloc", &found, 12000, 0, &status), CUDA_SUCCESS);
    EXPECT_EQ(found, ::dlsym(fake_library(), "cuMemAlloc_v2"));
    EXPECT_EQ(ask("cuLibraryLoadData", &found, 12000, 0, &status), CUDA_SUCCESS);
    EXPECT_NE(found, nullptr);
    EXPECT_EQ(ask("cuLibraryLoadData", &found, 11080, 0, &status), CUDA_SUCCESS);
    EXPECT_EQ(status, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
    EXPECT_EQ(ask("cuFuncLoad", &found, 12040, 0, nullptr), CUDA_ERROR_NOT_FOUND);
    EXPECT_EQ(ask("cuMemAlloc_v2", &found, 12000, 0, nullptr), CUDA_ERROR_NOT_FOUND);
  });
}

TEST(CudaDouble, StartsAsTheEnvironmentSays) {
  in_fake_process({{"FASTSYNC_FAKE_CUDA_INIT", "34"}}, [] {
    EXPECT_EQ(CU(cuInit)(0), CUDA_ERROR_STUB_LIBRARY);
    int count = 0;
    EXPECT_EQ(CU(cuDeviceGetCount)(&count), CUDA_ERROR_NOT_INITIALIZED);
  });
  in_fake_process({{"CUDA_VISIBLE_DEVICES", ""}}, [] { EXPECT_EQ(CU(cuInit)(0), CUDA_ERROR_NO_DEVICE); });
  EXPECT_EQ(fake_process({{"FASTSYNC_FAKE_DRIVER", "new"}}, [] { (void)CU(cuInit)(0); }).join(), 70);
  EXPECT_EQ(
      fake_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuInit action=explode"}}, [] { (void)CU(cuInit)(0); }).join(), 70);
}

TEST(CudaDouble, NamesADeviceAlikeInProcessesThatSeeDifferentOnes) {
  const auto uuid_of = [](const Environment& environment, int ordinal) {
    const Wire wire;
    auto process = fake_process(environment, [&] {
      EXPECT_EQ(CU(cuInit)(0), CUDA_SUCCESS);
      CUuuid uuid{};
      EXPECT_EQ(CU(cuDeviceGetUuid)(&uuid, ordinal), CUDA_SUCCESS);
      wire.send(0, uuid);
    });
    const auto uuid = wire.receive<CUuuid>(1);
    EXPECT_EQ(process.join(), 0);
    return std::string(std::begin(uuid.bytes), std::end(uuid.bytes));
  };
  const std::string first = uuid_of({}, 0);
  const std::string second = uuid_of({}, 1);
  EXPECT_NE(first, second);
  EXPECT_EQ(uuid_of({{"CUDA_VISIBLE_DEVICES", "1"}}, 0), second);
  EXPECT_EQ(uuid_of({{"CUDA_VISIBLE_DEVICES", "1,0,7,1"}}, 1), first);
}

TEST(CudaDouble, DoesNotSurviveFork) {
  in_fake_process([] {
    use_device(0);
    Process child([] {
      int count = 0;
      if (CU(cuDeviceGetCount)(&count) != CUDA_ERROR_NOT_INITIALIZED) throw std::runtime_error("it worked");
    });
    EXPECT_EQ(child.join(), 0);
  });
}

// --- Streams and events ----------------------------------------------------------------------------------------------

TEST(CudaDouble, QueuesWorkAndReturns) {
  in_fake_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuMemsetD8Async action=hang"}}, [] {
    use_device(0);
    const CUdeviceptr memory = device_memory(kBytes);
    const CUstream stream = new_stream();
    const CUevent event = new_event();
    EXPECT_EQ(CU(cuMemsetD8Async)(memory, 1, kBytes, stream), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuEventRecord)(event, stream), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuStreamQuery)(stream), CUDA_ERROR_NOT_READY);
    EXPECT_EQ(CU(cuEventQuery)(event), CUDA_ERROR_NOT_READY);
    EXPECT_EQ(contents(memory, kBytes), filled(kBytes, kFresh));  // a non-blocking stream does not hold the null stream
  });
}

TEST(CudaDouble, ShowsAMissingStreamWaitAsWrongBytes) {
  SKIP_PLANTED_RACE();
  for (const bool waits : {false, true}) {
    in_fake_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuMemsetD8Async action=delay ms=200"}}, [&] {
      use_device(0);
      const CUdeviceptr from = device_memory(kBytes);
      const CUdeviceptr to = device_memory(kBytes);
      const CUstream writer = new_stream();
      const CUstream reader = new_stream();
      const CUevent written = new_event();
      EXPECT_EQ(CU(cuMemsetD8Async)(from, 1, kBytes, writer), CUDA_SUCCESS);
      EXPECT_EQ(CU(cuEventRecord)(written, writer), CUDA_SUCCESS);
      if (waits) {
        EXPECT_EQ(CU(cuStreamWaitEvent)(reader, written, 0), CUDA_SUCCESS);
      }
      EXPECT_EQ(CU(cuMemcpyDtoDAsync)(to, from, kBytes, reader), CUDA_SUCCESS);
      EXPECT_EQ(CU(cuStreamSynchronize)(reader), CUDA_SUCCESS);
      EXPECT_EQ(contents(to, kBytes), filled(kBytes, waits ? 1 : kFresh));
    });
  }
}

TEST(CudaDouble, ShakesUnorderedStreamsByItsSeed) {
  SKIP_PLANTED_RACE();
  in_fake_process({{"FASTSYNC_FAKE_DELAY_US", "2000"}, {"FASTSYNC_FAKE_SEED", "7"}}, [] {
    use_device(0);
    const CUdeviceptr from = device_memory(kBytes);
    const CUdeviceptr to = device_memory(kBytes);
    const CUstream writer = new_stream();
    const CUstream reader = new_stream();
    int wrong = 0;
    for (unsigned char round = 1; round <= 40; ++round) {
      EXPECT_EQ(CU(cuMemsetD8Async)(from, round, kBytes, writer), CUDA_SUCCESS);
      EXPECT_EQ(CU(cuMemcpyDtoDAsync)(to, from, kBytes, reader), CUDA_SUCCESS);
      EXPECT_EQ(CU(cuCtxSynchronize)(), CUDA_SUCCESS);
      wrong += contents(to, kBytes) == filled(kBytes, round) ? 0 : 1;
    }
    EXPECT_GT(wrong, 0);
    EXPECT_LT(wrong, 40);
  });
}

TEST(CudaDouble, WaitsForTheMarkThatTheEventHadAtTheCall) {
  in_fake_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuMemsetD8Async nth=2 action=hang"}}, [] {
    use_device(0);
    const CUdeviceptr memory = device_memory(kBytes);
    const CUstream writer = new_stream();
    const CUstream reader = new_stream();
    const CUevent event = new_event();
    EXPECT_EQ(CU(cuEventQuery)(event), CUDA_SUCCESS);  // never recorded: complete, and no wait
    EXPECT_EQ(CU(cuStreamWaitEvent)(reader, event, 0), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuMemsetD8Async)(memory, 1, kBytes, writer), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuEventRecord)(event, writer), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuStreamWaitEvent)(reader, event, 0), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuMemsetD8Async)(memory, 2, kBytes, writer), CUDA_SUCCESS);  // hangs
    EXPECT_EQ(CU(cuEventRecord)(event, writer), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuStreamSynchronize)(reader), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuEventQuery)(event), CUDA_ERROR_NOT_READY);
    EXPECT_EQ(CU(cuEventDestroy)(event), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuEventQuery)(event), CUDA_ERROR_INVALID_HANDLE);
  });
}

TEST(CudaDouble, OrdersTheNullStreamWithBlockingStreamsOnly) {
  SKIP_PLANTED_RACE();
  for (const CUstream null : {CUstream{}, CU_STREAM_LEGACY}) {
    in_fake_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuMemsetD8Async action=delay ms=200"}}, [&] {
      use_device(0);
      const CUdeviceptr a = device_memory(kBytes);
      const CUdeviceptr b = device_memory(kBytes);
      const CUdeviceptr c = device_memory(kBytes);
      const CUstream blocking = new_stream(CU_STREAM_DEFAULT);
      const CUstream free = new_stream(CU_STREAM_NON_BLOCKING);
      const auto copy = CU(cuMemcpyDtoDAsync);
      EXPECT_EQ(CU(cuMemsetD8Async)(a, 1, kBytes, blocking), CUDA_SUCCESS);
      EXPECT_EQ(copy(b, a, kBytes, null), CUDA_SUCCESS);      // behind the blocking stream
      EXPECT_EQ(copy(c, b, kBytes, blocking), CUDA_SUCCESS);  // behind the null stream
      EXPECT_EQ(copy(b, b, kBytes, free), CUDA_SUCCESS);
      EXPECT_EQ(CU(cuStreamSynchronize)(free), CUDA_SUCCESS);
      EXPECT_EQ(CU(cuStreamQuery)(null), CUDA_ERROR_NOT_READY);  // and not before `free`
      EXPECT_EQ(CU(cuStreamSynchronize)(blocking), CUDA_SUCCESS);
      EXPECT_EQ(contents(c, kBytes), filled(kBytes, 1));
      EXPECT_EQ(CU(cuStreamDestroy)(null), CUDA_ERROR_INVALID_HANDLE);
    });
  }
}

TEST(CudaDouble, GivesEachThreadADefaultStreamOfItsOwn) {
  in_fake_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuMemsetD8Async nth=1 action=hang"}}, [] {
    const CUcontext context = use_device(0);
    const CUdeviceptr memory = device_memory(kBytes);
    EXPECT_EQ(CU(cuMemsetD8Async)(memory, 1, kBytes, CU_STREAM_PER_THREAD), CUDA_SUCCESS);
    std::thread([&] {
      EXPECT_EQ(CU(cuCtxSetCurrent)(context), CUDA_SUCCESS);
      EXPECT_EQ(CU(cuMemsetD8Async)(memory, 2, kBytes, CU_STREAM_PER_THREAD), CUDA_SUCCESS);
      EXPECT_EQ(CU(cuStreamSynchronize)(CU_STREAM_PER_THREAD), CUDA_SUCCESS);
    }).join();
    EXPECT_EQ(CU(cuStreamQuery)(CU_STREAM_PER_THREAD), CUDA_ERROR_NOT_READY);
  });
}

TEST(CudaDouble, FinishesTheWorkOfADestroyedStream) {
  in_fake_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuMemsetD8Async action=delay ms=50"}}, [] {
    use_device(0);
    const CUdeviceptr memory = device_memory(kBytes);
    const CUstream stream = new_stream();
    const CUevent event = new_event();
    EXPECT_EQ(CU(cuMemsetD8Async)(memory, 1, kBytes, stream), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuEventRecord)(event, stream), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuStreamDestroy)(stream), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuMemsetD8Async)(memory, 2, kBytes, stream), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_EQ(CU(cuEventSynchronize)(event), CUDA_SUCCESS);
    EXPECT_EQ(contents(memory, kBytes), filled(kBytes, 1));
    EXPECT_EQ(CU(fastsync_fake_live)("stream"), 0);
  });
}

TEST(CudaDouble, RefusesDriverCallsInsideAHostFunction) {
  in_fake_process([] {
    use_device(0);
    const CUstream stream = new_stream();
    CUresult inside = CUDA_SUCCESS;
    const CUhostFn function = [](void* out) {
      int count = 0;
      *static_cast<CUresult*>(out) = CU(cuDeviceGetCount)(&count);
    };
    EXPECT_EQ(CU(cuLaunchHostFunc)(stream, function, &inside), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuStreamSynchronize)(stream), CUDA_SUCCESS);
    EXPECT_EQ(inside, CUDA_ERROR_NOT_PERMITTED);
    expect_violation("call-in-host-function");
  });
}

// --- Contexts --------------------------------------------------------------------------------------------------------

TEST(CudaDouble, NeedsAContextOnEveryThread) {
  in_fake_process([] {
    const CUcontext context = use_device(0);
    std::thread([&] {
      CUdeviceptr memory = 0;
      CUstream stream = nullptr;
      EXPECT_EQ(CU(cuMemAlloc)(&memory, kBytes), CUDA_ERROR_INVALID_CONTEXT);
      EXPECT_EQ(CU(cuStreamCreate)(&stream, 0), CUDA_ERROR_INVALID_CONTEXT);
      EXPECT_EQ(CU(cuCtxPushCurrent)(context), CUDA_SUCCESS);
      EXPECT_EQ(CU(cuMemAlloc)(&memory, kBytes), CUDA_SUCCESS);
      EXPECT_EQ(CU(cuCtxPopCurrent)(nullptr), CUDA_SUCCESS);
      EXPECT_EQ(CU(cuMemFree)(memory), CUDA_ERROR_INVALID_CONTEXT);
    }).join();
  });
}

TEST(CudaDouble, EndsAContextWithItsLastReference) {
  in_fake_process([] {
    const CUcontext context = use_device(0);
    EXPECT_EQ(use_device(0), context);
    device_memory(kBytes);
    const CUstream stream = new_stream();
    EXPECT_EQ(CU(cuDevicePrimaryCtxRelease)(0), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuStreamQuery)(stream), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuDevicePrimaryCtxRelease)(0), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuStreamQuery)(stream), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    EXPECT_EQ(CU(cuCtxSetCurrent)(context), CUDA_ERROR_INVALID_CONTEXT);
    EXPECT_EQ(CU(cuDevicePrimaryCtxRelease)(0), CUDA_ERROR_INVALID_CONTEXT);
    for (const char* kind : {"device_memory", "device_bytes", "stream", "primary_context"}) {
      EXPECT_EQ(CU(fastsync_fake_live)(kind), 0) << kind;
    }
    use_device(0);
    device_memory(kBytes);
  });
}

TEST(CudaDouble, RefusesAStreamOfAnotherContextWhereTheDriverDoes) {
  in_fake_process([] {
    use_device(1);
    const CUstream stream = new_stream();
    use_device(0);
    EXPECT_EQ(CU(cuEventRecord)(new_event(), stream), CUDA_ERROR_INVALID_HANDLE);
    const OnePiece piece(device_memory(kBytes), device_memory(kBytes), kBytes);
    EXPECT_EQ(launch(kernel(kPackKernelName), piece.args, stream), CUDA_ERROR_INVALID_HANDLE);
  });
}

// --- Faults and the journal ------------------------------------------------------------------------------------------

TEST(CudaDouble, FailsTheChosenCallOfTheChosenRank) {
  for (const int rank : {0, 1}) {
    in_fake_process({{"FASTSYNC_FAKE_FAULTS", "rank=1 symbol=cuMemAlloc_v2 nth=2 action=fail code=2; ;"},
                     {"FASTSYNC_FAKE_RANK", std::to_string(rank)}},
                    [&] {
                      use_device(0);
                      CUdeviceptr memory = 0;
                      EXPECT_EQ(CU(cuMemAlloc)(&memory, kBytes), CUDA_SUCCESS);
                      EXPECT_EQ(CU(cuMemAlloc)(&memory, kBytes), rank == 1 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS);
                      EXPECT_EQ(CU(cuMemAlloc)(&memory, kBytes), CUDA_SUCCESS);
                      EXPECT_EQ(CU(fastsync_fake_count)("cuMemAlloc_v2"), 3U);
                    });
  }
}

TEST(CudaDouble, FailsLaterOnTheStream) {
  in_fake_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuMemsetD8Async action=fail_later code=719"}}, [] {
    use_device(0);
    const CUstream stream = new_stream();
    EXPECT_EQ(CU(cuMemsetD8Async)(device_memory(kBytes), 1, kBytes, stream), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuStreamSynchronize)(stream), CUDA_ERROR_LAUNCH_FAILED);
  });
}

TEST(CudaDouble, CorruptsWhatTheWorkWrote) {
  in_fake_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuMemsetD8Async action=corrupt bytes=3"}}, [] {
    use_device(0);
    const CUstream stream = new_stream();
    const CUdeviceptr memory = device_memory(kBytes);
    EXPECT_EQ(CU(cuMemsetD8Async)(memory, 0, kBytes, stream), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuStreamSynchronize)(stream), CUDA_SUCCESS);
    const auto bytes = contents(memory, kBytes);
    EXPECT_EQ(std::count(bytes.begin(), bytes.end(), 0xFF), 3);
  });
  in_fake_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuLaunchKernel action=corrupt bytes=1"}}, [] {
    use_device(0);
    const CUstream stream = new_stream();
    const CUdeviceptr bucket = device_memory(kBytes);
    const OnePiece piece(device_memory(kBytes), bucket, kBytes);
    EXPECT_EQ(launch(kernel(kPackKernelName), piece.args, stream), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuStreamSynchronize)(stream), CUDA_SUCCESS);
    const auto bytes = contents(bucket, kBytes);
    EXPECT_EQ(std::count(bytes.begin(), bytes.end(), kFresh), static_cast<std::ptrdiff_t>(kBytes) - 1);
  });
}

TEST(CudaDouble, KillsTheProcess) {
  const int status = fake_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuStreamCreate action=kill"}}, [] {
                       use_device(0);
                       new_stream();
                     }).join();
  EXPECT_EQ(status, -SIGKILL);
}

TEST(CudaDouble, WritesItsJournalAndExitsWhileWorkHangs) {
  char folder[] = "/tmp/fastsync-journal-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::alarm(60);
    ::setenv("FASTSYNC_FAKE_JOURNAL", folder, 1);
    ::setenv("FASTSYNC_FAKE_RANK", "3", 1);
    ::setenv("FASTSYNC_FAKE_FAULTS", "symbol=cuMemsetD8Async action=hang", 1);
    use_device(0);
    const CUstream stream = new_stream();
    const CUdeviceptr memory = device_memory(kBytes);
    (void)CU(cuMemsetD8Async)(memory, 1, kBytes, stream);
    (void)CU(cuMemsetD8Async)(memory + kBytes, 1, kBytes, stream);
    std::exit(0);  // not _exit(): that is the point
  }
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  const std::string path = std::string(folder) + "/" + std::to_string(pid) + ".json";
  std::ifstream file(path);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  for (const char* part : {"\"rank\": 3", "\"cuMemsetD8Async\": 2", "\"stream\": 1", "\"device_bytes\": 4096",
                           "\"wild-pointer: cuMemsetD8Async: "}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  }
  EXPECT_EQ(::unlink(path.c_str()), 0);
  EXPECT_EQ(::rmdir(folder), 0);
}

// --- What the other doubles use --------------------------------------------------------------------------------------

TEST(CudaDouble, RunsAnotherDoublesWorkInOrder) {
  in_fake_process([] {
    use_device(0);
    const CUstream stream = new_stream();
    struct Job {
      CUdeviceptr memory = 0;
      std::atomic<int> released{0};
      CUresult translated = CUDA_ERROR_UNKNOWN;
    } job;
    job.memory = device_memory(kBytes);
    EXPECT_EQ(CU(fastsync_fake_check)(job.memory, kBytes, 0), CUDA_SUCCESS);
    EXPECT_EQ(CU(fastsync_fake_check)(job.memory, kBytes + 1, 0), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(CU(fastsync_fake_stream_device)(stream), 0);
    const fastsync_fake_run run = [](void* user, fastsync_fake_op* op) {
      auto& mine = *static_cast<Job*>(user);
      void* host = nullptr;
      mine.translated = CU(fastsync_fake_translate)(op, mine.memory, kBytes, 1, &host);
      if (mine.translated == CUDA_SUCCESS) std::memset(host, 5, kBytes);
      return mine.translated;
    };
    const fastsync_fake_release release = [](void* user) { ++static_cast<Job*>(user)->released; };
    EXPECT_EQ(CU(cuMemsetD8Async)(job.memory, 4, kBytes, stream), CUDA_SUCCESS);
    EXPECT_EQ(CU(fastsync_fake_enqueue)(stream, "test", run, &job, release), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuStreamSynchronize)(stream), CUDA_SUCCESS);
    EXPECT_EQ(contents(job.memory, kBytes), filled(kBytes, 5));
    EXPECT_EQ(job.released, 1);

    job.memory += 1;  // out of bounds: the context breaks, and what is queued later is only released
    EXPECT_EQ(CU(fastsync_fake_enqueue)(stream, "test", run, &job, release), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuStreamSynchronize)(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_EQ(CU(fastsync_fake_enqueue)(stream, "test", run, &job, release), CUDA_ERROR_ILLEGAL_ADDRESS);
    EXPECT_EQ(job.released, 3);
    EXPECT_EQ(CU(fastsync_fake_context_error)(), CUDA_ERROR_ILLEGAL_ADDRESS);
    expect_violation("out-of-bounds");
  });
}

}  // namespace
}  // namespace fastsync::testing
