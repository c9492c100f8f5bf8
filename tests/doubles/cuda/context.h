// A device's primary context: its health, and the streams whose order it keeps.
//
// Threads: thread-safe. Errors: the first error of queued work is the context's for ever; every later call returns it.
#pragma once

#include <cuda.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "doubles/cuda/stream.h"

namespace fastsync::fake {

class Context : public std::enable_shared_from_this<Context> {
 public:
  explicit Context(int device) noexcept : device_(device) {}

  [[nodiscard]] int device() const noexcept { return device_; }  // ordinal in this process
  // CUDA_SUCCESS, the sticky error, or CUDA_ERROR_CONTEXT_IS_DESTROYED.
  [[nodiscard]] CUresult state() const noexcept { return static_cast<CUresult>(state_.load()); }
  void fail(CUresult error) noexcept;

  [[nodiscard]] std::shared_ptr<Stream> null_stream();
  [[nodiscard]] std::shared_ptr<Stream> existing_null_stream();
  // The calling thread's default stream (CU_STREAM_PER_THREAD).
  [[nodiscard]] std::shared_ptr<Stream> thread_stream();
  void add_blocking(const std::shared_ptr<Stream>& stream);
  [[nodiscard]] std::vector<Mark> blocking_marks();

  // Ends queued work and closes its own streams.
  void destroy();

 private:
  const int device_;
  std::atomic<int> state_{CUDA_SUCCESS};
  std::mutex mutex_;
  std::shared_ptr<Stream> null_stream_;
  std::map<std::thread::id, std::shared_ptr<Stream>> thread_streams_;
  std::vector<std::weak_ptr<Stream>> blocking_;
};

}  // namespace fastsync::fake
