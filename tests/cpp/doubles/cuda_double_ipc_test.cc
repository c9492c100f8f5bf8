// The double of libcuda between real processes: legacy handles, interprocess events, descriptors of VMM memory.
#include <signal.h>

#include <thread>

#include "doubles/fake_cuda_process.h"

namespace fastsync::testing {
namespace {

constexpr std::size_t kBytes = 10000;
constexpr unsigned kSharedEvent = CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
constexpr unsigned kLazy = CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;

CUipcMemHandle export_memory(CUdeviceptr memory) {
  CUipcMemHandle handle{};
  EXPECT_EQ(CU(cuIpcGetMemHandle)(&handle, memory), CUDA_SUCCESS);
  return handle;
}

CUdeviceptr import_memory(const CUipcMemHandle& handle) {
  CUdeviceptr memory = 0;
  EXPECT_EQ(CU(cuIpcOpenMemHandle)(&memory, handle, kLazy), CUDA_SUCCESS);
  return memory;
}

TEST(CudaDoubleIpc, SharesMemoryAndOrdersItByAnEvent) {
  const Wire wire;
  auto exporter = fake_process({{"FASTSYNC_FAKE_FAULTS", "symbol=cuMemsetD8Async action=delay ms=200"}}, [&] {
    use_device(0);
    const CUdeviceptr memory = device_memory(kBytes);
    const CUstream stream = new_stream();
    const CUevent written = new_event(kSharedEvent);
    EXPECT_EQ(CU(cuMemsetD8Async)(memory, 7, kBytes, stream), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuEventRecord)(written, stream), CUDA_SUCCESS);
    CUipcEventHandle event_handle{};
    EXPECT_EQ(CU(cuIpcGetEventHandle)(&event_handle, written), CUDA_SUCCESS);
    wire.send(0, export_memory(memory));
    wire.send(0, event_handle);
    (void)wire.receive<char>(0);
    EXPECT_EQ(CU(cuEventDestroy)(written), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuMemFree)(memory), CUDA_SUCCESS);
  });
  auto importer = fake_process({{"CUDA_VISIBLE_DEVICES", "1,0"}}, [&] {
    use_device(1);  // the exporter's device by another ordinal
    const auto handle = wire.receive<CUipcMemHandle>(1);
    const CUdeviceptr memory = import_memory(handle);
    CUevent written = nullptr;
    EXPECT_EQ(CU(cuIpcOpenEventHandle)(&written, wire.receive<CUipcEventHandle>(1)), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuEventQuery)(written), CUDA_ERROR_NOT_READY);
    const CUstream stream = new_stream();
    const CUdeviceptr copy = device_memory(kBytes);
    EXPECT_EQ(CU(cuStreamWaitEvent)(stream, written, 0), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuMemcpyDtoDAsync)(copy, memory, kBytes, stream), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuStreamSynchronize)(stream), CUDA_SUCCESS);
    EXPECT_EQ(contents(copy, kBytes), filled(kBytes, 7));
    EXPECT_EQ(CU(cuEventQuery)(written), CUDA_SUCCESS);

    // Opened again it is the same memory, closed as often as it was opened.
    EXPECT_EQ(import_memory(handle), memory);
    EXPECT_EQ(CU(fastsync_fake_live)("memory_import"), 1);
    EXPECT_EQ(CU(cuIpcCloseMemHandle)(memory), CUDA_SUCCESS);
    EXPECT_EQ(contents(memory, kBytes), filled(kBytes, 7));
    EXPECT_EQ(CU(cuIpcCloseMemHandle)(memory), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuIpcCloseMemHandle)(memory), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(CU(cuMemFree)(memory), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(CU(cuEventDestroy)(written), CUDA_SUCCESS);
    EXPECT_EQ(CU(fastsync_fake_live)("memory_import"), 0);
    EXPECT_EQ(CU(fastsync_fake_live)("event_import"), 0);
    wire.send(1, 'x');
  });
  EXPECT_EQ(importer.join(), 0);
  EXPECT_EQ(exporter.join(), 0);
}

TEST(CudaDoubleIpc, WaitsForTheRecordThatAnotherProcessMade) {
  // The importer records, the exporter waits: a slot that is given back.
  const Wire wire;
  auto exporter = fake_process({}, [&] {
    use_device(0);
    const CUevent free = new_event(kSharedEvent);
    CUipcEventHandle handle{};
    EXPECT_EQ(CU(cuIpcGetEventHandle)(&handle, free), CUDA_SUCCESS);
    wire.send(0, handle);
    for (int round = 0; round < 100; ++round) {
      (void)wire.receive<char>(0);
      EXPECT_EQ(CU(cuEventSynchronize)(free), CUDA_SUCCESS);
      wire.send(0, 'x');
    }
    (void)wire.receive<char>(0);
  });
  auto importer = fake_process({}, [&] {
    use_device(0);
    CUevent free = nullptr;
    EXPECT_EQ(CU(cuIpcOpenEventHandle)(&free, wire.receive<CUipcEventHandle>(1)), CUDA_SUCCESS);
    const CUstream stream = new_stream();
    const CUdeviceptr memory = device_memory(kBytes);
    for (int round = 0; round < 100; ++round) {
      EXPECT_EQ(CU(cuMemsetD8Async)(memory, 1, kBytes, stream), CUDA_SUCCESS);
      EXPECT_EQ(CU(cuEventRecord)(free, stream), CUDA_SUCCESS);
      wire.send(1, 'x');
      (void)wire.receive<char>(1);
      EXPECT_EQ(CU(cuEventQuery)(free), CUDA_SUCCESS);
    }
    EXPECT_EQ(CU(cuEventDestroy)(free), CUDA_SUCCESS);
    wire.send(1, 'x');
  });
  EXPECT_EQ(importer.join(), 0);
  EXPECT_EQ(exporter.join(), 0);
}

TEST(CudaDoubleIpc, RefusesWhatTheDriverRefuses) {
  in_fake_process([] {
    use_device(0);
    const CUdeviceptr memory = device_memory(kBytes);
    CUipcMemHandle handle = export_memory(memory);
    CUdeviceptr opened = 0;
    EXPECT_EQ(CU(cuIpcOpenMemHandle)(&opened, handle, kLazy), CUDA_ERROR_INVALID_CONTEXT);  // its own
    EXPECT_EQ(CU(cuIpcOpenMemHandle)(&opened, handle, 0), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(CU(cuIpcOpenMemHandle)(&opened, CUipcMemHandle{}, kLazy), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(CU(cuIpcGetMemHandle)(&handle, memory + 256), CUDA_ERROR_INVALID_VALUE);
    CUipcEventHandle event_handle{};
    EXPECT_EQ(CU(cuIpcGetEventHandle)(&event_handle, new_event()), CUDA_ERROR_INVALID_VALUE);  // not interprocess
    CUevent event = nullptr;
    EXPECT_EQ(CU(cuEventCreate)(&event, CU_EVENT_INTERPROCESS), CUDA_ERROR_INVALID_VALUE);  // keeps times
    EXPECT_EQ(CU(cuIpcGetEventHandle)(&event_handle, new_event(kSharedEvent)), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuIpcOpenEventHandle)(&event, event_handle), CUDA_ERROR_INVALID_CONTEXT);
  });
}

TEST(CudaDoubleIpc, ReportsMemoryFreedUnderItsImporter) {
  const Wire wire;
  auto exporter = fake_process({}, [&] {
    use_device(0);
    const CUdeviceptr memory = device_memory(kBytes);
    wire.send(0, export_memory(memory));
    (void)wire.receive<char>(0);
    EXPECT_EQ(CU(cuMemFree)(memory), CUDA_SUCCESS);
    expect_violation("free-while-imported");
    wire.send(0, 'x');
  });
  auto importer = fake_process({}, [&] {
    use_device(0);
    const CUstream stream = new_stream();
    const CUdeviceptr mine = device_memory(kBytes);
    const auto handle = wire.receive<CUipcMemHandle>(1);
    const CUdeviceptr memory = import_memory(handle);
    wire.send(1, 'x');
    (void)wire.receive<char>(1);
    EXPECT_EQ(CU(cuMemcpyDtoDAsync)(mine, memory, kBytes, stream), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuStreamSynchronize)(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
    expect_violation("use-after-free");
  });
  EXPECT_EQ(importer.join(), 0);
  EXPECT_EQ(exporter.join(), 0);
}

TEST(CudaDoubleIpc, DoesNotOpenWhatADeadOrAnInvisibleExporterHad) {
  const Wire wire;
  auto exporter = fake_process({}, [&] {
    use_device(0);
    wire.send(0, export_memory(device_memory(kBytes)));
    (void)wire.receive<char>(0);
  });
  const auto handle = wire.receive<CUipcMemHandle>(1);
  in_fake_process({{"CUDA_VISIBLE_DEVICES", "1"}}, [&] {
    use_device(0);
    CUdeviceptr memory = 0;
    EXPECT_EQ(CU(cuIpcOpenMemHandle)(&memory, handle, kLazy), CUDA_ERROR_INVALID_DEVICE);
  });
  exporter.kill(SIGKILL);
  EXPECT_EQ(exporter.join(), -SIGKILL);
  in_fake_process([&] {
    use_device(0);
    CUdeviceptr memory = 0;
    EXPECT_EQ(CU(cuIpcOpenMemHandle)(&memory, handle, kLazy), CUDA_ERROR_INVALID_HANDLE);
  });
}

TEST(CudaDoubleIpc, CanBeRefusedAsInAContainer) {
  const Wire wire;
  auto exporter = fake_process({}, [&] {
    use_device(0);
    const CUevent event = new_event(kSharedEvent);
    CUipcEventHandle event_handle{};
    EXPECT_EQ(CU(cuIpcGetEventHandle)(&event_handle, event), CUDA_SUCCESS);
    wire.send(0, export_memory(device_memory(kBytes)));
    wire.send(0, event_handle);
    (void)wire.receive<char>(0);
  });
  const auto memory_handle = wire.receive<CUipcMemHandle>(1);
  const auto event_handle = wire.receive<CUipcEventHandle>(1);
  for (const std::string refused : {"mem", "event", "all"}) {
    in_fake_process({{"FASTSYNC_FAKE_NO_IPC", refused}}, [&] {
      use_device(0);
      CUdeviceptr memory = 0;
      CUevent event = nullptr;
      EXPECT_EQ(CU(cuIpcOpenMemHandle)(&memory, memory_handle, kLazy),
                refused == "event" ? CUDA_SUCCESS : CUDA_ERROR_MAP_FAILED);
      EXPECT_EQ(CU(cuIpcOpenEventHandle)(&event, event_handle),
                refused == "mem" ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED);
      if (memory != 0) {
        EXPECT_EQ(CU(cuIpcCloseMemHandle)(memory), CUDA_SUCCESS);
      }
      if (event != nullptr) {
        EXPECT_EQ(CU(cuEventDestroy)(event), CUDA_SUCCESS);
      }
    });
  }
  wire.send(1, 'x');
  EXPECT_EQ(exporter.join(), 0);
}

// --- VMM --------------------------------------------------------------------------------------------------------------

constexpr std::size_t kGranule = std::size_t{2} << 20;

CUmemAllocationProp properties() {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
  return prop;
}

CUdeviceptr map(CUmemGenericAllocationHandle handle, std::size_t nbytes, bool access = true) {
  CUdeviceptr memory = 0;
  EXPECT_EQ(CU(cuMemAddressReserve)(&memory, nbytes, 0, 0, 0), CUDA_SUCCESS);
  EXPECT_EQ(CU(cuMemMap)(memory, nbytes, 0, handle, 0), CUDA_SUCCESS);
  CUmemAccessDesc desc{};
  desc.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
  desc.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (access) {
    EXPECT_EQ(CU(cuMemSetAccess)(memory, nbytes, &desc, 1), CUDA_SUCCESS);
  }
  return memory;
}

TEST(CudaDoubleIpc, FaultsOnVmmMemoryWithoutAccess) {
  in_fake_process([] {
    use_device(0);
    const auto prop = properties();
    const CUstream stream = new_stream();
    CUmemGenericAllocationHandle handle = 0;
    EXPECT_EQ(CU(cuMemCreate)(&handle, kGranule + 1, &prop, 0), CUDA_ERROR_INVALID_VALUE);  // not whole granules
    EXPECT_EQ(CU(cuMemCreate)(&handle, kGranule, &prop, 0), CUDA_SUCCESS);
    const CUdeviceptr memory = map(handle, kGranule, false);
    EXPECT_EQ(CU(cuMemsetD8Async)(memory, 1, kGranule, stream), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuStreamSynchronize)(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
    expect_violation("no-access");
  });
}

TEST(CudaDoubleIpc, KeepsPhysicalMemoryUntilHandleAndMappingAreGone) {
  in_fake_process([] {
    use_device(0);
    const auto prop = properties();
    CUmemGenericAllocationHandle handle = 0;
    EXPECT_EQ(CU(cuMemCreate)(&handle, kGranule, &prop, 0), CUDA_SUCCESS);
    const CUdeviceptr memory = map(handle, kGranule);
    CUipcMemHandle legacy{};
    EXPECT_EQ(CU(cuIpcGetMemHandle)(&legacy, memory), CUDA_ERROR_INVALID_VALUE);
    CUmemGenericAllocationHandle again = 0;
    EXPECT_EQ(CU(cuMemRetainAllocationHandle)(&again, reinterpret_cast<void*>(memory)), CUDA_SUCCESS);
    EXPECT_EQ(again, handle);
    EXPECT_EQ(CU(cuMemRelease)(handle), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuMemRelease)(handle), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuMemRelease)(handle), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(CU(cuMemsetD8)(memory, 3, kGranule), CUDA_SUCCESS);
    EXPECT_EQ(CU(fastsync_fake_live)("device_bytes"), static_cast<std::int64_t>(kGranule));
    EXPECT_EQ(CU(cuMemAddressFree)(memory, kGranule), CUDA_ERROR_INVALID_VALUE);  // still mapped
    EXPECT_EQ(CU(cuMemUnmap)(memory, kGranule), CUDA_SUCCESS);
    EXPECT_EQ(CU(fastsync_fake_live)("device_bytes"), 0);
    EXPECT_EQ(CU(cuMemAddressFree)(memory, kGranule), CUDA_SUCCESS);
    for (const char* kind : {"vmm_handle", "vmm_mapping", "vmm_reservation"}) {
      EXPECT_EQ(CU(fastsync_fake_live)(kind), 0) << kind;
    }
  });
}

TEST(CudaDoubleIpc, PassesVmmMemoryByADescriptor) {
  const Wire wire;
  auto exporter = fake_process({}, [&] {
    use_device(0);
    const auto prop = properties();
    CUmemGenericAllocationHandle handle = 0;
    EXPECT_EQ(CU(cuMemCreate)(&handle, kGranule, &prop, 0), CUDA_SUCCESS);
    EXPECT_EQ(CU(cuMemsetD8)(map(handle, kGranule), 9, kGranule), CUDA_SUCCESS);
    int fd = -1;
    EXPECT_EQ(CU(cuMemExportToShareableHandle)(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), CUDA_SUCCESS);
    wire.send_descriptor(0, fd);
    ::close(fd);
  });
  const int fd = wire.receive_descriptor(1);
  EXPECT_EQ(exporter.join(), 0);  // it is gone, its memory is not
  in_fake_process([&] {
    use_device(0);
    CUmemGenericAllocationHandle handle = 0;
    const auto import = CU(cuMemImportFromShareableHandle);
    constexpr auto kFd = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    const auto as_pointer = [](int number) { return reinterpret_cast<void*>(static_cast<std::intptr_t>(number)); };
    EXPECT_EQ(import(&handle, as_pointer(0), kFd), CUDA_ERROR_INVALID_VALUE);  // not ours
    EXPECT_EQ(import(&handle, as_pointer(fd), kFd), CUDA_SUCCESS);
    EXPECT_EQ(contents(map(handle, kGranule), kGranule), filled(kGranule, 9));
  });
  ::close(fd);
}

}  // namespace
}  // namespace fastsync::testing
