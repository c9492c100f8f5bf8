// WeightSender's way from the Begin frame to the last bucket: the data plane, plans, generators.
#include <algorithm>
#include <array>

#include "comm/ipc/ipc_communicator.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/shm/shm_communicator.h"
#include "sync/weight_sender.h"
#include "sync/weight_sender_headers.h"

namespace fastsync {

namespace {
// What a plan needs bounds its buckets; of a generator nobody knows, and the memory is taken before the first item.
constexpr std::uint64_t kMaxStreamingBucketBytes = std::uint64_t{64} << 20;
// How long a failed sync may take to bring the data plane to rest before it is given up and rebuilt.
constexpr std::chrono::milliseconds kDrainPatience{500};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }
}  // namespace

// --- the data plane -------------------------------------------------------------------------------------------------

void WeightSender::drop_data_plane() noexcept {
  registered_ = {};
  if (comm_ && comm_->name() == "ipc") ring_ = std::static_pointer_cast<IpcCommunicator>(comm_);
  comm_.reset();
  if (ring_) {
    // Readers may have it open: it goes once they have opened the next one, or say that they hold none.
    (void)ring_->detach();
    retired_.push_back(std::move(ring_));
  }
  for (auto& [rank, peer] : peers_) peer.farewell.reset();
  comm_transport_.clear();
}

void WeightSender::prepare_data_plane(std::uint64_t bucket_bytes, std::uint32_t buffers) {
  needs_external_ = false;
  bool stale = !comm_ || comm_transport_ != transport_ || comm_->bucket_bytes() != bucket_bytes ||
               comm_buffers_ != buffers || (comm_->memory_kind() == MemoryKind::kDevice && comm_device_ != runtime_);
  const bool shares_memory = transport_ == "shm" || transport_ == "ipc";
  if (!shares_memory) {
    for (const auto& [rank, peer] : peers_) stale = stale || peer.join.comm_generation != comm_generation_;
    stale = stale || poisoned_ || (transport_ == kFanOut && groups_ != seated_);
  }
  if (!stale) {
    comm_->reset(sync_);
    return;
  }
  drop_data_plane();  // the old buckets first: never two sets at once
  if (std::all_of(peers_.begin(), peers_.end(), [](const auto& p) { return p.second.join.comm_generation == 0; })) {
    retired_.clear();
  }
  ++comm_generation_;
  comm_buffers_ = buffers;
  comm_device_ = runtime_;
  bucket_bytes_ = bucket_bytes;
  poisoned_ = false;
  std::vector<int> ranks;
  for (const auto& [rank, peer] : peers_) ranks.push_back(rank);
  if (transport_ == "shm") {
    comm_ = ShmCommunicator::create(buffers, bucket_bytes, ranks, identity_.rank);
  } else if (transport_ == "ipc") {
    comm_ = IpcCommunicator::create(runtime_, buffers, bucket_bytes, ranks, identity_.rank);
  } else if (transport_ == "nccl") {
    nccl_id_ = NcclCommunicator::make_id();
    return;  // made when every rank is ready: connect_data_plane()
  } else if (transport_ == kFanOut) {
    prepare_fanout();
    return;
  } else {
    needs_external_ = true;  // made by attach_external()
    return;
  }
  comm_transport_ = transport_;
  comm_->reset(sync_);
}

// What a receiver needs of a new data plane, where it does not have it yet.
void WeightSender::send_descriptors(Peer& peer) {
  if (peer.join.comm_generation == comm_generation_) return;
  const auto index = static_cast<std::uint64_t>(std::distance(peers_.begin(), peers_.find(peer.rank)));
  if (transport_ == "shm") {
    const auto& shm = static_cast<const ShmCommunicator&>(*comm_);
    const std::array<int, 2> fds{shm.control_fd(), shm.data_fd()};
    peer.link->send(FrameType::kDescriptors, sync_, index, {}, fds);
  } else if (transport_ == "ipc") {
    const auto& ipc = static_cast<const IpcCommunicator&>(*comm_);
    const IpcDescriptor description = ipc.describe();
    std::vector<int> fds{ipc.control_fd(), ipc.data_fd()};
    if (description.memory.fd) fds.push_back(description.memory.fd.get());
    peer.link->send(FrameType::kDescriptors, sync_, index, description.encode(), fds);
  } else if (transport_ == "nccl") {
    peer.link->send(FrameType::kDescriptors, sync_, index, std::as_bytes(std::span(nccl_id_.internal)));
  } else if (transport_ == kFanOut) {
    send_seat(peer);
  }
}

// Every rank is ready, and those that make a communicator do so now.
void WeightSender::connect_data_plane() {
  if (transport_ == "ipc") {
    auto& ipc = static_cast<IpcCommunicator&>(*comm_);
    std::uint32_t index = 0;
    for (auto& [rank, peer] : peers_) {
      // Also one that opened the ring in a sync that failed before this point.
      if (peer.join.comm_generation != comm_generation_ || peer.events_of != comm_generation_) {
        ipc.add_reader(index, decode_events(peer.ready_data, comm_buffers_));
        peer.events_of = comm_generation_;
        peer.farewell.reset();
      }
      ++index;
    }
  } else if (transport_ == "nccl" && comm_ == nullptr) {
    NcclCommunicator::Place place;
    place.ranks = static_cast<int>(peers_.size()) + 1;
    place.rank = 0;  // NCCL's ranks: the source, then the receivers in their order
    comm_ = NcclCommunicator::create(NcclCommunicator::Role::kSource, runtime_, comm_buffers_, bucket_bytes_, place,
                                     nccl_id_, *headers_, identity_.rank, *wait_);
    comm_transport_ = transport_;
    comm_->reset(sync_);
  } else if (transport_ == kFanOut && comm_ == nullptr) {
    connect_fanout();
  }
}

void WeightSender::attach_external(ExternalOps ops) {
  comm_ = std::make_shared<ExternalCommunicator>(ExternalCommunicator::Role::kSource, "gloo", comm_buffers_,
                                                 bucket_bytes_, std::move(ops), *headers_, identity_.rank);
  comm_transport_ = transport_;
  comm_->reset(sync_);
  needs_external_ = false;
}

// After a failure: the data plane at rest on every rank, or given up. Throws where it could not be brought to rest.
void WeightSender::settle_data_plane(bool had_data) {
  if (comm_) {
    switch (comm_->recovery()) {
      case Recovery::kAbort:
      case Recovery::kReplace:
        comm_->abort();  // wakes the receivers at once; they find the frame
        break;
      case Recovery::kDrain:
        if (!had_data) break;
        if (lost_) throw Error(*lost_);  // what the lost rank was part of never completes
        // Every rank completes the broadcasts that were announced, so the process group stays usable.
        Wait patience(kDrainPatience, [this] {
          for (auto& [other, peer] : peers_) {
            if (peer.link) peer.link->flush();
          }
        });
        comm_->drain(patience);
        break;
    }
  }
  if (device_began_ && !device_->abandon(kDrainPatience)) {
    device_.reset();  // its stream is stuck or broken
    drop_data_plane();
  }
  device_began_ = false;
  if (comm_ && comm_->recovery() == Recovery::kReplace) drop_data_plane();
}

// --- plans ----------------------------------------------------------------------------------------------------------

void WeightSender::send_manifest(Link& link, const Manifest& manifest, std::size_t first, std::size_t last) {
  // Pieces of bounded size; a single entry may be as large as its name.
  while (first < last) {
    std::size_t end = first;
    std::size_t bytes = 0;
    while (end < last && (end == first || bytes < kManifestChunkBytes)) {
      const TensorMeta& meta = manifest[end];
      bytes += meta.name.size() + meta.shape.size() * 8 + meta.tie.strides.size() * 8 + 64;
      ++end;
    }
    link.send(FrameType::kManifest, sync_, first, manifest.serialize(first, end));
    first = end;
  }
}

bool WeightSender::begin(const SyncOptions& options, std::shared_ptr<const SyncPlan> plan, bool streaming) {
  options_ = options;
  plan_ = std::move(plan);
  streaming_ = streaming;
  phase_ = "check";
  Begin begin;
  begin.version = options.version;
  begin.buffers = options.buffers;
  begin.verify = options.verify ? 1 : 0;
  begin.strict = options.strict ? 1 : 0;
  begin.set_id = options.set_id;
  begin.share_bytes = options.share_bytes;
  begin.streaming = streaming ? 1 : 0;
  begin.transport = transport_;
  if (plan_) {
    begin.fingerprint = plan_->manifest.fingerprint();
    begin.tensors = plan_->manifest.size();
    begin.nbytes = plan_->manifest.nbytes();
  }
  begin.asked_bytes = std::max<std::uint64_t>(options.bucket_bytes, 1);
  begin.bucket_bytes = streaming
                           ? align_up(std::clamp<std::uint64_t>(options.bucket_bytes, 1, kMaxStreamingBucketBytes))
                           : plan_->buckets.bucket_bytes;
  bucket_bytes_ = begin.bucket_bytes;
  const bool has_data = !peers_.empty() && options.set_id == 0 && (streaming || !plan_->buckets.buckets.empty());
  if (has_data) {
    prepare_data_plane(begin.bucket_bytes, options.buffers);
    begin.comm_generation = comm_generation_;
  }
  bool all_hold = true;
  for (auto& [rank, peer] : peers_) {
    const auto& held = peer.join.manifests;
    const bool holds = plan_ && std::find(held.begin(), held.end(), begin.fingerprint) != held.end();
    all_hold = all_hold && holds;
    begin.manifest_follows = (plan_ && !holds) ? 1 : 0;
    peer.link->send(FrameType::kBegin, sync_, peer.join.call, encode(begin));
    if (begin.manifest_follows != 0) send_manifest(*peer.link, plan_->manifest, 0, plan_->manifest.size());
    if (has_data) send_descriptors(peer);
  }
  const auto start = Clock::now();
  wait_for("check its destinations", [](const Peer& peer) { return peer.ready; });
  phases_.wait += seconds_since(start);
  send_all(FrameType::kGo, 0, {});
  phase_ = "buckets";
  wait_ = std::make_unique<Wait>(timeout_, [this] { tick(); });
  waiting_since_ = Clock::now();
  if (has_data) connect_data_plane();
  if (streaming_) {
    deviated_ = false;
    count_ = 0;
    closed_ = 0;
    slot_.reset();
    slot_sum_ = {};
    grown_ = Manifest{};
    entries_sent_ = 0;
    planner_ = std::make_unique<BucketPlanner>(begin.bucket_bytes);
  }
  return all_hold;
}

// --- packing on a device --------------------------------------------------------------------------------------------

void WeightSender::begin_device() {
  if (!runtime_ || device_began_ || peers_.empty() || !comm_) return;
  if (!device_ || device_of_ != runtime_) {
    device_.reset();
    device_ = std::make_unique<DevicePacker>(runtime_, CopyDirection::kPack);
    device_of_ = runtime_;
  }
  device_->begin(runtime_->wrap_stream(caller_stream_), DevicePacker::Place::kOwn, options_.verify);
  device_began_ = true;
  if (const BufferView memory = comm_->memory(); memory.data != nullptr) {
    if (!registered_.covers(runtime_.get(), memory.data)) {
      registered_ = {};
      registered_ = HostRegistration(runtime_, memory.data, memory.nbytes);
    }
  }
  comm_->bind_stream(device_->stream());
}

bool WeightSender::sums_go_first() const {
  if (comm_->memory_kind() == MemoryKind::kHost) return true;  // and the bytes must be there, too
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& p) { return p.second.join.verifies_first != 0; });
}

// Waits for the packing, and tells the receivers the checksums that their buckets came without.
void WeightSender::finish_device() {
  if (!device_began_) return;
  const auto start = Clock::now();
  wait_->progress();
  device_->finish(*wait_);
  if (options_.verify && !sums_go_first()) {
    std::vector<Checksum> sums;
    for (std::size_t first = 0; first < next_bucket_; first += sums.size()) {
      sums.clear();
      for (std::size_t b = first; b < next_bucket_ && sums.size() < kMaxSumsPerFrame; ++b) {
        sums.push_back(device_->sum(b));
      }
      send_all(FrameType::kSums, first, encode_sums(sums));
    }
  }
  device_began_ = false;
  phases_.pack += seconds_since(start);
}

namespace {
std::size_t unsent_bytes(const std::vector<Link*>& links) {
  std::size_t sum = 0;
  for (const Link* link : links) sum += link->unsent_bytes();
  return sum;
}

// The communicator knows which receiver is behind; the message is ours, one for all transports.
template <typename F>
auto with_deadline(F&& body, const std::function<void(int)>& time_out) {
  try {
    return body();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kTimeout) throw;
    time_out(-1);
    throw;
  }
}
}  // namespace

BucketSlot WeightSender::acquire_slot() {
  return with_deadline([&] { return comm_->acquire(*wait_); }, [&](int) { time_out(slowest(), "take its buckets"); });
}

void WeightSender::send_plan(std::span<const TensorView> views, std::uint64_t stamp) {
  const BucketPlan& plan = plan_->buckets;
  if (peers_.empty()) {
    next_bucket_ = plan.buckets.size();
    bytes_ = plan_->manifest.nbytes();
    return;
  }
  const std::span<const Fragment> fragments(plan.fragments);
  begin_device();
  if (device_began_) {
    device_->bind(fragments, plan.buckets, views,
                  stamp == 0 ? 0 : stamp ^ plan_->manifest.fingerprint() ^ plan_->asked_bytes);
  }
  const bool late_sums = device_began_ && options_.verify && !sums_go_first();
  for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
    const BucketLayout& layout = plan.buckets[b];
    next_bucket_ = b;
    const auto t0 = Clock::now();
    if (t0 - last_tick_ > kPollInterval) tick();
    waiting_since_ = t0;
    wait_->progress();
    const BucketSlot slot = acquire_slot();
    const auto t1 = Clock::now();
    const auto part = fragments.subspan(layout.first_fragment, layout.fragment_count);
    BucketHeader header;
    header.index = b;
    header.used_bytes = layout.used_bytes;
    header.tensors_end = layout.tensors_end;
    if (device_began_) {
      device_->move(b, slot.data, *wait_);
      if (sums_go_first()) {
        device_->settle(b, *wait_);
        header.checksum = device_->sum(b);
      }
    } else {
      header.checksum = pack(slot.data, part, views, options_.verify);
    }
    const bool last = b + 1 == plan.buckets.size();
    header.flags = BucketFlags{static_cast<std::uint32_t>(plan_->manifest.size()), false, last, late_sums}.encode();
    const auto t2 = Clock::now();
    wait_->progress();
    comm_->send(slot, header, *wait_);
    for (const Fragment& f : part) bytes_ += f.nbytes;
    phases_.transfer += std::chrono::duration<double>(t1 - t0).count() + seconds_since(t2);
    phases_.pack += std::chrono::duration<double>(t2 - t1).count();
  }
  next_bucket_ = plan.buckets.size();
  finish_device();
}

void WeightSender::send_entries(std::size_t upto) {
  if (!deviated_ || upto <= entries_sent_) return;
  for (auto& [rank, peer] : peers_) {
    if (peer.link) send_manifest(*peer.link, grown_, entries_sent_, upto);
  }
  entries_sent_ = upto;
  std::vector<Link*> unsent;
  for (;;) {
    unsent.clear();
    for (auto& [rank, peer] : peers_) {
      if (peer.link && !peer.link->gone() && peer.link->has_unsent()) unsent.push_back(peer.link.get());
    }
    if (unsent.empty()) return;
    const std::size_t before = unsent_bytes(unsent);
    wait_readable(unsent, -1, wait_->slice());
    tick();
    if (unsent_bytes(unsent) < before) wait_->progress();
    if (wait_->expired()) time_out(slowest(), "read the manifest");
  }
}

void WeightSender::close_bucket(bool last) {
  BucketHeader header;
  header.index = next_bucket_;
  if (slot_ || closed_ < planner_->buckets().size()) {
    const BucketLayout& layout = planner_->buckets()[closed_++];
    header.used_bytes = layout.used_bytes;
    header.tensors_end = layout.tensors_end;
  } else {
    header.tensors_end = planner_->tensors();  // an empty last bucket: only says that it is the last
  }
  if (!peers_.empty()) {
    waiting_since_ = Clock::now();
    wait_->progress();  // the generator may have taken its time
    if (!slot_) slot_ = acquire_slot();
    const bool late_sum = device_began_ && options_.verify && !sums_go_first();
    if (device_began_ && !late_sum) {
      device_->settle(next_bucket_, *wait_);
      slot_sum_ = device_->sum(next_bucket_);
    }
    header.checksum = slot_sum_;
    header.flags = BucketFlags{static_cast<std::uint32_t>(planner_->tensors()), deviated_, last, late_sum}.encode();
    const auto start = Clock::now();
    wait_->progress();
    comm_->send(*slot_, header, *wait_);
    // After the bucket, not before it: a receiver that knows of the bucket reads what it needs to understand it, one
    // that waits for it looks at its control connection now and then only.
    send_entries(planner_->tensors());
    phases_.transfer += seconds_since(start);
  }
  slot_.reset();
  slot_sum_ = {};
  ++next_bucket_;
}

void WeightSender::push(TensorMeta meta, const TensorView& view, void* stream) {
  if (runtime_) caller_stream_ = stream;
  begin_device();
  const auto now = Clock::now();
  if (now - last_tick_ > kPollInterval) tick();
  if (!deviated_) {
    bool same = plan_ && count_ < plan_->manifest.size();
    if (same) {
      const TensorMeta& recorded = plan_->manifest[count_];
      same = recorded.name == meta.name && recorded.dtype == meta.dtype && recorded.shape == meta.shape;
    }
    if (!same) {
      deviated_ = true;
      for (std::size_t i = 0; i < count_; ++i) grown_.append(plan_->manifest[i]);
      entries_sent_ = count_;
      send_all(FrameType::kDeviate, count_, {});
    }
  }
  if (deviated_) grown_.append(std::move(meta));
  ++count_;
  const std::size_t first_fragment = planner_->fragments().size();
  planner_->add(view.nbytes);
  stream_fragments(view, first_fragment);
}

// Packs the new fragments, sending each bucket that is full. Returns when the view is no longer needed.
void WeightSender::stream_fragments(const TensorView& view, std::size_t first_fragment) {
  const auto& fragments = planner_->fragments();
  std::size_t next = first_fragment;
  for (;;) {
    const bool closing = closed_ < planner_->buckets().size();
    const std::size_t end =
        closing ? planner_->buckets()[closed_].first_fragment + planner_->buckets()[closed_].fragment_count
                : fragments.size();
    for (; next < end; ++next) {
      if (!peers_.empty()) {
        const auto t0 = Clock::now();
        if (!slot_) {
          waiting_since_ = t0;
          wait_->progress();
          if (t0 - last_tick_ > kPollInterval) tick();
          slot_ = acquire_slot();
        }
        const auto t1 = Clock::now();
        if (device_began_) {
          device_->move_piece(next_bucket_, slot_->data, fragments[next], view, runtime_->wrap_stream(caller_stream_),
                              *wait_);
        } else {
          slot_sum_ += pack_fragment(slot_->data, fragments[next], view, options_.verify);
        }
        phases_.transfer += std::chrono::duration<double>(t1 - t0).count();
        phases_.pack += seconds_since(t1);
      }
      bytes_ += fragments[next].nbytes;
    }
    if (!closing) return;
    close_bucket(false);
  }
}

std::shared_ptr<const SyncPlan> WeightSender::finish_stream() {
  if (!deviated_ && (!plan_ || count_ < plan_->manifest.size())) {  // ended early, or there was nothing to follow
    deviated_ = true;
    for (std::size_t i = 0; i < count_; ++i) grown_.append(plan_->manifest[i]);
    entries_sent_ = count_;
    send_all(FrameType::kDeviate, count_, {});
  }
  begin_device();  // nothing was pushed, perhaps; the last bucket goes over the device all the same
  planner_->finish();
  close_bucket(true);
  finish_device();
  if (!deviated_) return plan_;
  plan_ = SyncPlan::make(std::move(grown_), std::max<std::uint64_t>(options_.bucket_bytes, 1));
  return plan_;
}

}  // namespace fastsync
