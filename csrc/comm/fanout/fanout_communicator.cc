#include "comm/fanout/fanout_communicator.h"

#include <utility>

#include "common/error.h"

namespace fastsync {

FanoutCommunicator::FanoutCommunicator(Role role, std::shared_ptr<Communicator> wire, StreamView wire_stream,
                                       std::shared_ptr<IpcCommunicator> ring, HeaderChannel& channel)
    : role_(role), ring_(std::move(ring)), wire_(std::move(wire)), wire_stream_(wire_stream), channel_(channel) {
  if (ring_ && (ring_->buffers() != wire_->buffers() || ring_->bucket_bytes() != wire_->bucket_bytes())) {
    throw InvalidArgument(concat("a ring of ", ring_->buffers(), " buckets of ", ring_->bucket_bytes(), " bytes and a ",
                                 wire_->name(), " of ", wire_->buffers(), " of ", wire_->bucket_bytes(),
                                 " do not go together"));
  }
  // What the followers may read is there when the wire's stream has written it.
  if (ring_ && role_ == Role::kLeader) ring_->bind_stream(wire_stream_);
}

std::uint64_t FanoutCommunicator::staging_bytes() const noexcept {
  return wire_->staging_bytes() + (ring_ ? ring_->staging_bytes() : 0);
}

void FanoutCommunicator::bind_stream(StreamView stream) {
  wire_->bind_stream(stream);
  if (ring_ && role_ == Role::kSource) ring_->bind_stream(stream);
}

// While it runs, and after it threw, waiting_for() names a rank.
template <typename F>
void FanoutCommunicator::wait_for_ranks(F&& body) {
  waits_for_ranks_ = true;
  body();
  waits_for_ranks_ = false;
}

BucketSlot FanoutCommunicator::acquire(Wait& wait) {
  if (role_ != Role::kSource) throw StateError("acquire() is a call of the source; this rank receives");
  wait_for_ranks([&] {
    if (next_ >= buffers()) channel_.wait_released(next_ - buffers() + 1, wait);
    if (ring_) shown_ = ring_->acquire(wait);
  });
  return wire_->acquire(wait);
}

void FanoutCommunicator::send(const BucketSlot& slot, const BucketHeader& header, Wait& wait) {
  wire_->send(slot, header, wait);  // first: it has the longer way
  if (ring_) ring_->send(shown_, header, wait);
  ++next_;
}

void FanoutCommunicator::flush(Wait& wait) {
  if (ring_) wait_for_ranks([&] { ring_->flush(wait); });
  wire_->flush(wait);
}

BucketSlot FanoutCommunicator::receive(BucketHeader& header, Wait& wait) {
  if (role_ != Role::kLeader) throw StateError("receive() is a call of a receiver; this rank is the source");
  // The wire's stream runs behind the followers' reads of the slot before the next bucket is queued on it.
  if (ring_) wait_for_ranks([&] { shown_ = ring_->acquire(wait); });
  const BucketSlot slot = wire_->receive(header, wait);
  if (ring_) ring_->send(shown_, header, wait);
  return slot;
}

void FanoutCommunicator::reset(std::uint64_t epoch) {
  if (ring_) ring_->reset(epoch);
  wire_->reset(epoch);
  next_ = 0;
  waits_for_ranks_ = false;
}

int FanoutCommunicator::waiting_for() const noexcept {
  if (!waits_for_ranks_) return -1;
  return role_ == Role::kSource ? channel_.slowest_receiver() : ring_->waiting_for();
}

void FanoutCommunicator::abort() noexcept {
  if (ring_) ring_->abort();
  wire_->abort();
}

}  // namespace fastsync
