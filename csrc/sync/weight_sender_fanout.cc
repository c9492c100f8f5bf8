// WeightSender's part in a fan-out: who sits where, and how each follower gets to its leader's ring.
#include <algorithm>
#include <array>

#include "comm/fanout/fanout_communicator.h"
#include "comm/nccl/nccl_communicator.h"
#include "sync/fanout_seat.h"
#include "sync/weight_sender.h"
#include "sync/weight_sender_headers.h"

namespace fastsync {

// What can be told before every rank is ready: NCCL's id, and the ring that our own followers open.
void WeightSender::prepare_fanout() {
  seated_ = groups_;
  nccl_id_ = NcclCommunicator::make_id();
  const std::vector<int>& followers = seated_.front().followers;
  if (followers.empty()) return;
  ring_ = IpcCommunicator::create(runtime_, comm_buffers_, bucket_bytes_, followers, identity_.rank);
}

// A follower of another leader is told when that leader is ready to hand out its ring: open_door_of().
void WeightSender::send_seat(Peer& peer) {
  FanoutSeat seat;
  for (std::size_t g = 0; g < seated_.size(); ++g) {
    const DeviceGroup& group = seated_[g];
    if (group.leader == peer.rank) {
      seat.role = FanoutSeat::Role::kLeader;
      seat.nccl_rank = static_cast<std::uint32_t>(g);
      seat.nccl_ranks = static_cast<std::uint32_t>(seated_.size());
      seat.nccl_id = nccl_id_;
      seat.followers = group.followers;
      peer.link->send(FrameType::kDescriptors, sync_, 0, seat.encode());
      return;
    }
  }
  const auto& beside = seated_.front().followers;
  const auto found = std::find(beside.begin(), beside.end(), peer.rank);
  if (found == beside.end()) return;
  seat.role = FanoutSeat::Role::kBeside;
  const IpcDescriptor description = ring_->describe();
  seat.ring = description.encode();
  std::vector<int> fds{ring_->control_fd(), ring_->data_fd()};
  if (description.memory.fd) fds.push_back(description.memory.fd.get());
  peer.link->send(FrameType::kDescriptors, sync_, static_cast<std::uint64_t>(found - beside.begin()), seat.encode(),
                  fds);
}

void WeightSender::open_door_of(const Peer& leader) {
  if (leader.join.comm_generation == comm_generation_ || leader.ready_data.empty()) return;
  for (std::size_t g = 1; g < seated_.size(); ++g) {
    if (seated_[g].leader != leader.rank) continue;
    FanoutSeat seat;
    seat.role = FanoutSeat::Role::kBehind;
    seat.leader = leader.rank;
    seat.door.assign(reinterpret_cast<const char*>(leader.ready_data.data()), leader.ready_data.size());
    for (const int rank : seated_[g].followers) {
      const Peer& follower = peers_.at(rank);
      if (follower.link) follower.link->send(FrameType::kDescriptors, sync_, 0, seat.encode());
    }
  }
}

void WeightSender::connect_fanout() {
  if (ring_) {
    std::uint32_t index = 0;
    for (const int rank : seated_.front().followers) {
      Peer& peer = peers_.at(rank);
      ring_->add_reader(index++, decode_events(peer.ready_data, comm_buffers_));
      peer.events_of = comm_generation_;
      peer.farewell.reset();
    }
  }
  NcclCommunicator::Place place;
  place.ranks = static_cast<int>(seated_.size());
  place.rank = 0;
  auto wire =
      NcclCommunicator::create(NcclCommunicator::Role::kSource, runtime_, comm_buffers_, bucket_bytes_, place, nccl_id_,
                               *headers_, identity_.rank, *wait_, ring_ ? ring_->buckets() : BufferView{});
  const StreamView stream = wire->stream();
  comm_ = std::make_shared<FanoutCommunicator>(FanoutCommunicator::Role::kSource, std::move(wire), stream, ring_,
                                               *headers_);
  comm_transport_ = transport_;
  comm_->reset(sync_);
}

}  // namespace fastsync
