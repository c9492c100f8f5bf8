// WeightReceiver's part in a fan-out: as the leader of its device, or as a follower of one.
#include <unistd.h>

#include "comm/fanout/fanout_communicator.h"
#include "comm/ipc/ipc_communicator.h"
#include "comm/nccl/nccl_communicator.h"
#include "sync/fanout_seat.h"
#include "sync/weight_receiver.h"

namespace fastsync {

void WeightReceiver::pump_ring() {
  if (ring_guest_) ring_guest_->pump();
  if (ring_host_) ring_host_->pump();
}

// Before this rank is ready: a leader opens its door, a follower opens its leader's ring. Returns what the source must
// know: the door's name, or the events of a follower of its own.
std::vector<std::byte> WeightReceiver::take_seat() {
  if (comm_ && comm_generation_ == begin_.comm_generation) return {};
  drop_data_plane();
  retired_.clear();  // the source let go of all that was older before it began this sync
  wait_until("pass its buckets", [this] { return descriptors_came_; });
  const FanoutSeat seat = FanoutSeat::decode(descriptor_data_);
  std::unique_ptr<IpcCommunicator> reader;
  std::vector<std::byte> answer;
  switch (seat.role) {
    case FanoutSeat::Role::kLeader: {
      if (seat.followers.empty()) return {};
      auto ring =
          IpcCommunicator::create(runtime_, begin_.buffers, begin_.bucket_bytes, seat.followers, identity_.rank);
      ring_host_ = std::make_unique<RingHost>(std::move(ring), seat.followers, identity_.token);
      const auto* name = reinterpret_cast<const std::byte*>(ring_host_->door().data());
      return {name, name + ring_host_->door().size()};
    }
    case FanoutSeat::Role::kBeside: {
      if (descriptors_.size() != 2 && descriptors_.size() != 3) {
        throw CommError(concat("the source passed ", descriptors_.size(), " descriptors, 2 were expected"),
                        identity_.source);
      }
      IpcDescriptor ring = IpcDescriptor::decode(seat.ring);
      if (descriptors_.size() == 3) ring.memory.fd = std::move(descriptors_[2]);
      reader = IpcCommunicator::attach(runtime_, std::move(ring), descriptors_[0].get(), descriptors_[1].get(),
                                       static_cast<std::uint32_t>(reader_index_));
      descriptors_.clear();
      answer = encode_events(reader->reader_events());
      break;
    }
    case FanoutSeat::Role::kBehind: {
      Hello hello;
      hello.rank = static_cast<std::uint32_t>(identity_.rank);
      hello.world = static_cast<std::uint32_t>(identity_.ranks.size());
      hello.source = static_cast<std::uint32_t>(identity_.source);
      hello.pid = static_cast<std::uint64_t>(::getpid());
      hello.library_version = identity_.library_version;
      hello.token = identity_.token;
      hello.host = identity_.host;
      ring_guest_ = std::make_unique<RingGuest>(seat.door, seat.leader, std::move(hello));
      wait_until("get it the ring of its device's leader", [this] { return ring_guest_->has_offer(); });
      RingGuest::Offer offer = ring_guest_->take_offer();
      reader = IpcCommunicator::attach(runtime_, std::move(offer.ring), offer.descriptors[0].get(),
                                       offer.descriptors[1].get(), offer.index);
      ring_guest_->answer(reader->reader_events());
      break;
    }
  }
  if (reader->buffers() != begin_.buffers || reader->bucket_bytes() != begin_.bucket_bytes) {
    throw CommError(concat("a ring of ", reader->buffers(), " buckets of ", reader->bucket_bytes(),
                           " bytes came for a sync of ", begin_.buffers, " of ", begin_.bucket_bytes),
                    identity_.source);
  }
  reader->set_recovery(Recovery::kReplace);  // with the leader's ring
  comm_ = std::move(reader);
  comm_generation_ = begin_.comm_generation;
  comm_device_ = runtime_;
  return answer;
}

// Every rank is ready, and the leaders make NCCL's communicator.
void WeightReceiver::connect_seat() {
  if (comm_ && comm_generation_ == begin_.comm_generation) return;
  const FanoutSeat seat = FanoutSeat::decode(descriptor_data_);
  std::shared_ptr<IpcCommunicator> ring;
  if (ring_host_) {
    // They had opened it before they were ready; what they said of it may still be under way.
    wait_until("let the ranks that follow this one open its buckets", [this] { return ring_host_->absent().empty(); });
    ring = ring_host_->ring();
  }
  NcclCommunicator::Place place;
  place.ranks = static_cast<int>(seat.nccl_ranks);
  place.rank = static_cast<int>(seat.nccl_rank);
  auto wire = NcclCommunicator::create(NcclCommunicator::Role::kReceiver, runtime_, begin_.buffers, begin_.bucket_bytes,
                                       place, seat.nccl_id, *headers_, identity_.source, *wait_,
                                       ring ? ring->buckets() : BufferView{});
  const StreamView stream = wire->stream();
  comm_ = std::make_shared<FanoutCommunicator>(FanoutCommunicator::Role::kLeader, std::move(wire), stream,
                                               std::move(ring), *headers_);
  comm_generation_ = begin_.comm_generation;
  comm_device_ = runtime_;
}

}  // namespace fastsync
