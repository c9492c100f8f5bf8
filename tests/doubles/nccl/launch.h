// The operations of one group on one communicator, as work on one or several streams.
//
// With several streams the work begins when all of them have got there, and holds them all until it is done.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "doubles/nccl/device.h"
#include "doubles/nccl/nccl_types.h"

namespace fastsync::fake_nccl {

class StreamWork : public std::enable_shared_from_this<StreamWork> {
 public:
  // `run` is called once, or not at all where a stream fails; `stop` says that nobody waits any more.
  // `released` is called once, in the end, whatever happened.
  StreamWork(std::vector<CUstream> streams, std::function<CUresult(fastsync_fake_op*)> run, std::function<bool()> stop,
             std::function<void()> released);
  ~StreamWork();
  StreamWork(const StreamWork&) = delete;
  StreamWork& operator=(const StreamWork&) = delete;

  [[nodiscard]] CUresult enqueue(const char* what);

 private:
  [[nodiscard]] CUresult arrive(fastsync_fake_op* op);
  void leave();

  const std::vector<CUstream> streams_;
  const std::function<CUresult(fastsync_fake_op*)> run_;
  const std::function<bool()> stop_;
  const std::function<void()> released_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t arrived_ = 0;
  bool done_ = false;
};

}  // namespace fastsync::fake_nccl
