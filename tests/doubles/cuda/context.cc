#include "doubles/cuda/context.h"

#include <utility>

namespace fastsync::fake {

void Context::fail(CUresult error) noexcept {
  int well = CUDA_SUCCESS;
  state_.compare_exchange_strong(well, error);
}

std::shared_ptr<Stream> Context::null_stream() {
  const std::lock_guard lock(mutex_);
  if (null_stream_ == nullptr) null_stream_ = Stream::create(shared_from_this(), Stream::Kind::kNull);
  return null_stream_;
}

std::shared_ptr<Stream> Context::existing_null_stream() {
  const std::lock_guard lock(mutex_);
  return null_stream_;
}

std::shared_ptr<Stream> Context::thread_stream() {
  const auto id = std::this_thread::get_id();
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = thread_streams_.find(id); found != thread_streams_.end()) return found->second;
  }
  auto made = Stream::create(shared_from_this(), Stream::Kind::kBlocking);  // only this thread makes this one
  const std::lock_guard lock(mutex_);
  return thread_streams_[id] = std::move(made);
}

void Context::add_blocking(const std::shared_ptr<Stream>& stream) {
  const std::lock_guard lock(mutex_);
  std::erase_if(blocking_, [](const std::weak_ptr<Stream>& one) { return one.expired(); });
  blocking_.push_back(stream);
}

std::vector<Mark> Context::blocking_marks() {
  std::vector<std::shared_ptr<Stream>> streams;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& one : blocking_) {
      if (auto stream = one.lock()) streams.push_back(std::move(stream));
    }
  }
  std::vector<Mark> marks;
  marks.reserve(streams.size());
  for (const auto& stream : streams) marks.push_back(stream->mark());
  return marks;
}

void Context::destroy() {
  state_ = CUDA_ERROR_CONTEXT_IS_DESTROYED;
  std::shared_ptr<Stream> null;
  std::map<std::thread::id, std::shared_ptr<Stream>> threads;
  {
    const std::lock_guard lock(mutex_);
    null = std::exchange(null_stream_, nullptr);
    threads = std::exchange(thread_streams_, {});
  }
  if (null != nullptr) null->close();
  for (const auto& [id, stream] : threads) stream->close();
}

}  // namespace fastsync::fake
