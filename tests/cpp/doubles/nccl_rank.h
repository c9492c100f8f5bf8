// A rank of the NCCL double's tests: a process of its own, with both doubles, a device, a stream and plain buffers.
//
// The test's process never opens a double: every rank is forked before any thread is started, and ends with _exit().
#pragma once

#include <cuda.h>
#include <dirent.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../doubles/nccl/nccl_functions.h"
#include "../../doubles/nccl/nccl_types.h"
#include "support/bounds.h"
#include "support/process.h"

namespace fastsync::testing::nccl {

using namespace fastsync::fake_nccl;  // NOLINT: NCCL's own names
using Environment = std::vector<std::pair<std::string, std::string>>;

inline const char* fake_cuda_path() {
#if defined(FASTSYNC_FAKE_CUDA_PATH)
  return FASTSYNC_FAKE_CUDA_PATH;
#else
  return std::getenv("FASTSYNC_FAKE_CUDA");
#endif
}
inline const char* fake_nccl_path() {
#if defined(FASTSYNC_FAKE_NCCL_PATH)
  return FASTSYNC_FAKE_NCCL_PATH;
#else
  return std::getenv("FASTSYNC_FAKE_NCCL");
#endif
}

class Library {
 public:
  explicit Library(const char* path) : handle_(::dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) throw std::runtime_error(::dlerror());
  }
  // Null if it is not there.
  template <typename Function>
  void find(const char* name, Function* function) const {
    void* symbol = ::dlsym(handle_, name);
    std::memcpy(function, &symbol, sizeof symbol);
  }
  [[nodiscard]] bool has(const char* name) const { return ::dlsym(handle_, name) != nullptr; }

 private:
  void* handle_;
};

// Looks often, and gives up in the end.
inline bool comes_true(const std::function<bool()>& what, std::chrono::milliseconds most = kLongTimeout) {
  const auto end = std::chrono::steady_clock::now() + most;
  while (!what()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

inline int running_threads() {
  int count = 0;
  DIR* folder = ::opendir("/proc/self/task");
  if (folder == nullptr) throw std::runtime_error("no /proc");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count - 2;
}

// The same bytes for the same seed, in every process.
inline std::vector<std::byte> pattern(std::size_t nbytes, std::uint64_t seed) {
  std::vector<std::byte> bytes(nbytes);
  std::uint64_t state = seed * 0x9E3779B97F4A7C15ULL + 1;
  for (std::size_t at = 0; at < nbytes; at += sizeof state) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(bytes.data() + at, &state, std::min(sizeof state, nbytes - at));
  }
  return bytes;
}

// Vectors of std::byte are compared byte by byte otherwise, which takes long under a race detector.
inline bool same(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

struct NcclFunctions {
#define FASTSYNC_POINTER(result, name, parameters) result(*name) parameters = nullptr;
  FASTSYNC_NCCL_FUNCTIONS_BEFORE_2_18(FASTSYNC_POINTER)
  FASTSYNC_NCCL_FUNCTIONS_2_18_1(FASTSYNC_POINTER)
  FASTSYNC_NCCL_FUNCTIONS_2_19_3(FASTSYNC_POINTER)
  FASTSYNC_NCCL_FUNCTIONS_2_27_3(FASTSYNC_POINTER)
  FASTSYNC_NCCL_FUNCTIONS_2_28_9(FASTSYNC_POINTER)
#undef FASTSYNC_POINTER
  std::uint64_t (*count)(const char*) = nullptr;
  std::int64_t (*live)(const char*) = nullptr;
  std::size_t (*violations)(char*, std::size_t) = nullptr;

  explicit NcclFunctions(const Library& library) {
#define FASTSYNC_FIND(result, name, parameters) library.find(#name, &name);
    FASTSYNC_NCCL_FUNCTIONS_BEFORE_2_18(FASTSYNC_FIND)
    FASTSYNC_NCCL_FUNCTIONS_2_18_1(FASTSYNC_FIND)
    FASTSYNC_NCCL_FUNCTIONS_2_19_3(FASTSYNC_FIND)
    FASTSYNC_NCCL_FUNCTIONS_2_27_3(FASTSYNC_FIND)
    FASTSYNC_NCCL_FUNCTIONS_2_28_9(FASTSYNC_FIND)
#undef FASTSYNC_FIND
    library.find("fastsync_fake_nccl_count", &count);
    library.find("fastsync_fake_nccl_live", &live);
    library.find("fastsync_fake_nccl_violations", &violations);
  }
};

struct CudaFunctions {
  decltype(&::cuInit) init = nullptr;
  decltype(&::cuDevicePrimaryCtxRetain) retain = nullptr;
  decltype(&::cuCtxSetCurrent) set_current = nullptr;
  decltype(&::cuMemAlloc) alloc = nullptr;
  decltype(&::cuMemFree) free = nullptr;
  decltype(&::cuMemcpyHtoD) upload = nullptr;
  decltype(&::cuMemcpyDtoH) download = nullptr;
  decltype(&::cuStreamCreate) create_stream = nullptr;
  decltype(&::cuStreamQuery) query = nullptr;
  decltype(&::cuStreamSynchronize) synchronize = nullptr;
  decltype(&::cuIpcGetMemHandle) export_memory = nullptr;
  std::size_t (*violations)(char*, std::size_t) = nullptr;

  explicit CudaFunctions(const Library& library) {
    library.find("cuInit", &init);
    library.find("cuDevicePrimaryCtxRetain", &retain);
    library.find("cuCtxSetCurrent", &set_current);
    library.find("cuMemAlloc_v2", &alloc);
    library.find("cuMemFree_v2", &free);
    library.find("cuMemcpyHtoD_v2", &upload);
    library.find("cuMemcpyDtoH_v2", &download);
    library.find("cuStreamCreate", &create_stream);
    library.find("cuStreamQuery", &query);
    library.find("cuStreamSynchronize", &synchronize);
    library.find("cuIpcGetMemHandle", &export_memory);
    library.find("fastsync_fake_violations", &violations);
  }
};

class Rank {
 public:
  Rank(int rank, int device)
      : rank_(rank),
        cuda_library_(fake_cuda_path()),
        nccl_library_(fake_nccl_path()),
        cuda(cuda_library_),
        nccl(nccl_library_) {
    need(cuda.init(0), "cuInit");
    need(cuda.retain(&context, device), "cuDevicePrimaryCtxRetain");
    need(cuda.set_current(context), "cuCtxSetCurrent");
    stream = new_stream();
  }

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] const Library& nccl_library() const noexcept { return nccl_library_; }

  [[nodiscard]] CUstream new_stream() const {
    CUstream made = nullptr;
    need(cuda.create_stream(&made, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    return made;
  }
  [[nodiscard]] void* buffer(std::size_t nbytes) const {
    CUdeviceptr address = 0;
    need(cuda.alloc(&address, nbytes), "cuMemAlloc");
    return reinterpret_cast<void*>(address);
  }
  [[nodiscard]] void* buffer(const std::vector<std::byte>& bytes) const {
    void* memory = buffer(bytes.size());
    need(cuda.upload(reinterpret_cast<CUdeviceptr>(memory), bytes.data(), bytes.size()), "cuMemcpyHtoD");
    return memory;
  }
  [[nodiscard]] std::vector<std::byte> bytes(const void* memory, std::size_t nbytes) const {
    std::vector<std::byte> copy(nbytes);
    need(cuda.download(copy.data(), reinterpret_cast<CUdeviceptr>(memory), nbytes), "cuMemcpyDtoH");
    return copy;
  }
  [[nodiscard]] bool idle() const { return cuda.query(stream) == CUDA_SUCCESS; }
  // False if it did not end in time.
  [[nodiscard]] bool finish() const {
    return comes_true([this] { return idle(); });
  }

  // --- Communicators. The id goes from rank 0 to the others through a pipe that was made before the fork.
  [[nodiscard]] static ncclConfig_t nonblocking() {
    ncclConfig_t config;
    config.size = config_size(22809);
    config.version = 22809;
    config.blocking = 0;
    return config;
  }
  [[nodiscard]] ncclResult_t state(ncclComm_t communicator) const {
    ncclResult_t result = ncclInternalError;
    EXPECT_EQ(nccl.ncclCommGetAsyncError(communicator, &result), ncclSuccess);
    return result;
  }
  // Waits while it is in progress.
  [[nodiscard]] ncclResult_t settled(ncclComm_t communicator) const {
    ncclResult_t result = ncclInProgress;
    (void)comes_true([&] { return (result = state(communicator)) != ncclInProgress; });
    return result;
  }
  [[nodiscard]] ncclComm_t start(int nranks, const ncclUniqueId& id) const {
    ncclConfig_t config = nonblocking();
    ncclComm_t communicator = nullptr;
    // What it returns is the state by then, whatever that is.
    (void)nccl.ncclCommInitRankConfig(&communicator, nranks, id, rank_, &config);
    EXPECT_NE(communicator, nullptr) << last_error();
    return communicator;
  }
  [[nodiscard]] ncclComm_t join(int nranks, const ncclUniqueId& id) const {
    ncclComm_t communicator = start(nranks, id);
    if (settled(communicator) != ncclSuccess) throw std::runtime_error(last_error());
    return communicator;
  }
  // Broadcasts bytes, and waits until it is queued.
  [[nodiscard]] ncclResult_t broadcast(const void* source, void* target, std::size_t nbytes, int root,
                                       ncclComm_t communicator) const {
    const ncclResult_t result = nccl.ncclBroadcast(source, target, nbytes, ncclUint8, root, communicator, stream);
    return result == ncclInProgress ? settled(communicator) : result;
  }
  [[nodiscard]] std::string last_error() const { return nccl.ncclGetLastError(nullptr); }
  [[nodiscard]] std::string violations() const {
    std::string text(4096, '\0');
    (void)nccl.violations(text.data(), text.size());
    return text.c_str();
  }

 private:
  static void need(CUresult result, const char* what) {
    if (result != CUDA_SUCCESS) throw std::runtime_error(std::string(what) + " returned " + std::to_string(result));
  }

  const int rank_;
  const Library cuda_library_;
  const Library nccl_library_;

 public:
  const CudaFunctions cuda;
  const NcclFunctions nccl;
  CUcontext context = nullptr;
  CUstream stream = nullptr;
};

// What all ranks of a test have: a way for the id, and signals to each other.
class Ranks {
 public:
  explicit Ranks(Environment environment = {}) : environment_(std::move(environment)) { EXPECT_EQ(::pipe(ids_), 0); }
  ~Ranks() {
    processes_.clear();
    ::close(ids_[0]);
    ::close(ids_[1]);
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  // Forks a rank on device `device`. Its failed expectations are the test's.
  void add(int rank, int device, const std::function<void(Rank&)>& body, const Environment& own = {}) {
    processes_.emplace_back([&] {
      ::setenv("FASTSYNC_CUDA_PATH", fake_cuda_path(), 1);
      ::setenv("FASTSYNC_FAKE_DEVICES", "4", 1);
      ::setenv("FASTSYNC_FAKE_RANK", std::to_string(rank).c_str(), 1);
      for (const auto& [name, value] : environment_) ::setenv(name.c_str(), value.c_str(), 1);
      for (const auto& [name, value] : own) ::setenv(name.c_str(), value.c_str(), 1);
      Rank self(rank, device);
      body(self);
      if (::testing::Test::HasFailure()) throw std::runtime_error("rank " + std::to_string(rank) + " failed");
    });
  }
  // `nranks` of them, each on its own device.
  void add_all(int nranks, const std::function<void(Rank&)>& body) {
    for (int rank = 0; rank < nranks; ++rank) add(rank, rank, body);
  }
  void join_all() {
    for (Process& process : processes_) EXPECT_EQ(process.join(), 0);
    processes_.clear();
  }
  [[nodiscard]] Process& process(std::size_t index) { return processes_[index]; }

  // In a rank. Rank 0 makes the id and gives it to the others, each of which takes it once.
  [[nodiscard]] ncclUniqueId share_id(const Rank& rank, int nranks) const {
    ncclUniqueId id{};
    if (rank.rank() == 0) {
      EXPECT_EQ(rank.nccl.ncclGetUniqueId(&id), ncclSuccess);
      for (int other = 1; other < nranks; ++other) {
        if (::write(ids_[1], &id, sizeof id) != sizeof id) throw std::runtime_error("the id was not given");
      }
    } else if (::read(ids_[0], &id, sizeof id) != sizeof id) {
      throw std::runtime_error("the id was not taken");
    }
    return id;
  }

 private:
  Environment environment_;
  int ids_[2] = {-1, -1};
  std::vector<Process> processes_;
};

}  // namespace fastsync::testing::nccl
