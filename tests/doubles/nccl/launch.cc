#include "doubles/nccl/launch.h"

#include <string>
#include <utility>

#include "doubles/nccl/exchange.h"

namespace fastsync::fake_nccl {
namespace {

const CudaDouble& driver() {
  std::string ignored;
  return *cuda(&ignored);  // there is a communicator, hence there is a driver
}

}  // namespace

StreamWork::StreamWork(std::vector<CUstream> streams, std::function<CUresult(fastsync_fake_op*)> run,
                       std::function<bool()> stop, std::function<void()> released)
    : streams_(std::move(streams)), run_(std::move(run)), stop_(std::move(stop)), released_(std::move(released)) {}

StreamWork::~StreamWork() { released_(); }

CUresult StreamWork::enqueue(const char* what) {
  for (CUstream stream : streams_) {
    auto part = std::make_unique<std::shared_ptr<StreamWork>>(shared_from_this());
    const CUresult result = driver().enqueue(
        stream, what,
        [](void* user, fastsync_fake_op* op) { return (*static_cast<std::shared_ptr<StreamWork>*>(user))->arrive(op); },
        part.release(),
        [](void* user) {
          const std::unique_ptr<std::shared_ptr<StreamWork>> mine(static_cast<std::shared_ptr<StreamWork>*>(user));
          (*mine)->leave();
        });
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

CUresult StreamWork::arrive(fastsync_fake_op* op) {
  std::unique_lock lock(mutex_);
  if (done_) return CUDA_SUCCESS;
  if (++arrived_ < streams_.size()) {
    while (!done_ && !stop_() && driver().stopping(op) == 0) changed_.wait_for(lock, kLook);
    return CUDA_SUCCESS;
  }
  lock.unlock();
  const CUresult result = run_(op);
  lock.lock();
  done_ = true;
  changed_.notify_all();
  return result;
}

void StreamWork::leave() {
  // Of a stream that never got here the others must not wait; of one that did, it is done already.
  const std::scoped_lock lock(mutex_);
  done_ = true;
  changed_.notify_all();
}

}  // namespace fastsync::fake_nccl
