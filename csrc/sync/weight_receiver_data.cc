// WeightReceiver's data plane and buckets: from the Ready frame to the last bucket.
#include <algorithm>
#include <cstring>

#include "comm/ipc/ipc_communicator.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/shm/shm_communicator.h"
#include "common/cpu.h"
#include "sync/transport_choice.h"
#include "sync/weight_receiver.h"

namespace fastsync {

namespace {
// How long a failed sync may take to bring the data plane to rest before it is given up and rebuilt.
constexpr std::chrono::milliseconds kDrainPatience{500};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }
}  // namespace

// --- the data plane --------------------------------------------------------------------------------------------------

void WeightReceiver::drop_data_plane() noexcept {
  registered_ = {};
  slot_.reset();
  if (comm_ && comm_->name() == "ipc") {
    // Whose ring it is may have our events open: they go once it has opened the next ones, or given up its ring.
    auto reader = std::static_pointer_cast<IpcCommunicator>(std::exchange(comm_, nullptr));
    if (ring_guest_) {
      ring_guest_->retire(std::move(reader));
    } else {
      if (!reader->detach()) holds_unclosed_ = true;
      retired_.push_back(std::move(reader));
    }
  }
  comm_.reset();
  ring_guest_.reset();
  ring_host_.reset();
  comm_generation_ = 0;
}

// Opens what the source shares with the processes of its host. Nothing is written by that.
void WeightReceiver::attach_shared() {
  const bool ipc = begin_.transport == "ipc";
  if (comm_ && comm_->name() == begin_.transport && comm_generation_ == begin_.comm_generation) return;
  drop_data_plane();
  // What comes with Go came before it.
  if (!go_) wait_until("pass its buckets", [this] { return descriptors_came_; });
  if (descriptors_.size() != 2 && !(ipc && descriptors_.size() == 3)) {
    throw CommError(concat("the source passed ", descriptors_.size(), " descriptors, 2 were expected"),
                    identity_.source);
  }
  const auto index = static_cast<std::uint32_t>(reader_index_);
  if (ipc) {
    IpcDescriptor description = IpcDescriptor::decode(descriptor_data_);
    if (descriptors_.size() == 3) description.memory.fd = std::move(descriptors_[2]);
    comm_ =
        IpcCommunicator::attach(runtime_, std::move(description), descriptors_[0].get(), descriptors_[1].get(), index);
  } else {
    comm_ = ShmCommunicator::attach(descriptors_[0].get(), descriptors_[1].get(), index);
  }
  descriptors_.clear();
  comm_generation_ = begin_.comm_generation;
  comm_device_ = runtime_;
}

void WeightReceiver::connect_nccl() {
  if (comm_ && comm_->name() == "nccl" && comm_generation_ == begin_.comm_generation) return;
  drop_data_plane();
  nccl::UniqueId id{};
  if (descriptor_data_.size() != sizeof(id.internal)) {
    throw CommError(concat("the source passed ", descriptor_data_.size(), " bytes as NCCL's id, ", sizeof(id.internal),
                           " were expected"),
                    identity_.source);
  }
  std::memcpy(id.internal, descriptor_data_.data(), sizeof(id.internal));
  NcclCommunicator::Place place;
  place.ranks = static_cast<int>(identity_.ranks.size());
  place.rank = static_cast<int>(reader_index_) + 1;
  comm_ = NcclCommunicator::create(NcclCommunicator::Role::kReceiver, runtime_, begin_.buffers, begin_.bucket_bytes,
                                   place, id, *headers_, identity_.source, *wait_);
  comm_generation_ = begin_.comm_generation;
  comm_device_ = runtime_;
}

void WeightReceiver::begin_device() {
  if (!runtime_) return;
  const bool device_buckets = comm_ && comm_->memory_kind() == MemoryKind::kDevice;
  // A loader takes the buckets where they are.
  on_device_ = device_buckets || !flexible_;
  if (!on_device_ || !comm_) return;
  if (!device_ || device_of_ != runtime_) {
    device_.reset();
    device_ = std::make_unique<DevicePacker>(runtime_, CopyDirection::kUnpack);
    device_of_ = runtime_;
  }
  // Code that is shown the buckets works on the caller's stream; so does the check that comes before it.
  const auto place = verifies_first_ ? DevicePacker::Place::kCallers : DevicePacker::Place::kOwn;
  device_->begin(runtime_->wrap_stream(caller_stream_), place, begin_.verify != 0);
  device_began_ = true;
  if (!device_buckets) {
    const BufferView memory = comm_->memory();
    if (memory.data == nullptr) {
      throw CommError(concat("transport '", begin_.transport, "' delivers to CPU memory only; use 'gloo', or 'nccl'"),
                      identity_.rank);
    }
    if (!registered_.covers(runtime_.get(), memory.data)) {
      registered_ = {};
      registered_ = HostRegistration(runtime_, memory.data, memory.nbytes);
    }
  }
  comm_->bind_stream(device_->stream());
}

void WeightReceiver::ready() {
  const auto start = Clock::now();
  const bool has_data = begin_.comm_generation != 0;
  const std::string& transport = begin_.transport;
  const bool fans_out = transport == kFanOut;
  const bool wants_device = transport == "ipc" || transport == "nccl" || fans_out;
  if (wants_device && !runtime_) {
    throw CommError(concat("the source chose transport '", transport, "', but this rank's tensors are not on a device"),
                    identity_.rank);
  }
  std::vector<std::byte> answer;
  if (has_data && transport == "ipc") {
    attach_shared();
    answer = encode_events(static_cast<IpcCommunicator&>(*comm_).reader_events());
  } else if (has_data && fans_out) {
    answer = take_seat();
  }
  link_->send(FrameType::kReady, sync_, 0, answer);
  wait_until("report that every rank is ready", [this] { return go_; });
  phase_ = "buckets";
  wait_ = std::make_unique<Wait>(timeout_, [this] { tick(); });
  waiting_since_ = Clock::now();
  if (has_data && transport == "shm") {
    attach_shared();
    comm_->reset(sync_);
  } else if (has_data && transport == "ipc") {
    comm_->reset(sync_);
  } else if (has_data && transport == "nccl") {
    connect_nccl();
    comm_->reset(sync_);
  } else if (has_data && fans_out) {
    connect_seat();
    comm_->reset(sync_);
  } else if (has_data) {
    if (!comm_ || comm_->recovery() != Recovery::kDrain || comm_generation_ != begin_.comm_generation) {
      drop_data_plane();
      needs_external_ = true;
    } else {
      comm_->reset(sync_);
    }
  }
  begin_device();
  if (begin_.streaming != 0)
    planner_ = std::make_unique<BucketPlanner>(std::max<std::uint64_t>(begin_.bucket_bytes, 1));
  phases_.wait += seconds_since(start);
}

void WeightReceiver::attach_external(ExternalOps ops) {
  comm_ = std::make_shared<ExternalCommunicator>(ExternalCommunicator::Role::kReceiver, "gloo", begin_.buffers,
                                                 begin_.bucket_bytes, std::move(ops), *headers_, identity_.source);
  comm_generation_ = begin_.comm_generation;
  comm_->reset(sync_);
  needs_external_ = false;
  begin_device();
}

std::shared_ptr<const Buffer> WeightReceiver::external_memory() const {
  const auto* external = dynamic_cast<const ExternalCommunicator*>(comm_.get());
  return external == nullptr ? nullptr : external->owned_memory();
}

// After a failure: the data plane at rest, or given up. Throws where it could not be brought to rest.
void WeightReceiver::settle_data_plane(bool began) {
  const bool had_data = phase_ == std::string_view("buckets");
  if (comm_) {
    switch (comm_->recovery()) {
      case Recovery::kAbort:
      case Recovery::kReplace:
        comm_->abort();  // wakes the source at once; it finds the frame
        break;
      case Recovery::kDrain: {
        if (!began || lost_ || !had_data) break;
        // Complete what the source announced, until it says that it stopped; then the process group is at rest.
        hook_ = nullptr;
        Wait patience(kDrainPatience, [this] { pump(); });
        while (!failed_by_source_ && link_ && !link_->gone()) {
          comm_->drain(patience);
          if (patience.expired()) throw TimeoutError("the source is still sending");
          Link* const link = link_.get();
          wait_readable({&link, 1}, -1, patience.slice());
          pump();
        }
        comm_->drain(patience);
        break;
      }
    }
  }
  if (device_began_ && !device_->abandon(kDrainPatience)) {
    device_.reset();  // its stream is stuck or broken
    drop_data_plane();
  }
  device_began_ = false;
  // A fan-out's ring may be there without the rest.
  if (ring_host_ || ring_guest_ || (comm_ && comm_->recovery() == Recovery::kReplace)) drop_data_plane();
}

// --- buckets ---------------------------------------------------------------------------------------------------------

std::optional<BucketHeader> WeightReceiver::await_bucket() {
  if (begin_.streaming != 0 ? saw_last_ : next_bucket_ >= plan_->buckets.buckets.size()) return std::nullopt;
  const auto start = Clock::now();
  if (start - last_tick_ > kPollInterval) tick();
  waiting_since_ = start;
  wait_->progress();
  BucketHeader header;
  try {
    slot_ = comm_->receive(header, *wait_);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kTimeout) throw;
    time_out(concat("send bucket ", next_bucket_));
  }
  if (header.index != next_bucket_ || header.used_bytes > slot_->capacity) {
    throw CommError(
        concat("bucket ", next_bucket_, " arrived as bucket ", header.index, " with ", header.used_bytes, " bytes"),
        identity_.source);
  }
  phases_.transfer += seconds_since(start);
  return header;
}

// The layout of the bucket, by our own plan; the source's header must agree with it.
const BucketLayout& WeightReceiver::understand(const BucketHeader& header) {
  static const BucketLayout kEmpty{};
  if (begin_.streaming == 0) {
    const BucketLayout& layout = plan_->buckets.buckets[next_bucket_];
    if (layout.used_bytes != header.used_bytes || layout.tensors_end != header.tensors_end) {
      throw CommError(
          concat("bucket ", next_bucket_, ": the source's plan has ", header.used_bytes, " bytes up to tensor ",
                 header.tensors_end, ", ours ", layout.used_bytes, " and ", layout.tensors_end),
          identity_.source);
    }
    return layout;
  }
  const BucketFlags flags = BucketFlags::decode(header.flags);
  if ((flags.deviated && !deviated_) || manifest().size() < flags.entries) {
    wait_until("send the manifest of its next bucket",
               [&] { return (!flags.deviated || deviated_) && manifest().size() >= flags.entries; });
  }
  if (flags.entries < planned_entries_) throw CommError("the source's manifest shrank", identity_.source);
  for (; planned_entries_ < flags.entries; ++planned_entries_) planner_->add(manifest()[planned_entries_].nbytes);
  if (flags.last) {
    planner_->finish();
    saw_last_ = true;
  }
  if (next_bucket_ >= planner_->buckets().size()) {
    if (!flags.last || header.used_bytes != 0) {
      throw CommError(concat("bucket ", next_bucket_, " is not in the plan of the entries that arrived"),
                      identity_.source);
    }
    return kEmpty;
  }
  const BucketLayout& layout = planner_->buckets()[next_bucket_];
  if (layout.used_bytes != header.used_bytes || layout.tensors_end != header.tensors_end) {
    throw CommError(
        concat("bucket ", next_bucket_, ": the source packed ", header.used_bytes, " bytes up to tensor ",
               header.tensors_end, ", the entries that arrived give ", layout.used_bytes, " and ", layout.tensors_end),
        identity_.source);
  }
  return layout;
}

void WeightReceiver::verify(const BucketHeader& header, std::uint64_t bucket, const Checksum& sum) const {
  if (begin_.verify == 0 || sum == header.checksum) return;
  const auto hex = [](const Checksum& c) { return concat(std::hex, c.product, "/", c.sum); };
  throw ChecksumError(
      concat("rank ", identity_.rank, ", bucket ", bucket, " (", header.used_bytes, " bytes): checksum ", hex(sum),
             " here, ", hex(header.checksum), " at rank ", identity_.source,
             "; the bytes changed on the way, do not use these weights and sync again"),
      identity_.rank);
}

void WeightReceiver::end_stream() {
  // What the generator turned out to be is the plan of the next sync.
  const std::uint64_t total = manifest().size();
  for (; planned_entries_ < total; ++planned_entries_) planner_->add(manifest()[planned_entries_].nbytes);
  planner_->finish();
  if (!deviated_ && plan_) return;
  plans_.put(SyncPlan::make(grown_, begin_.asked_bytes));
}

bool WeightReceiver::receive_into(DestinationBinder& binder, std::uint64_t stamp, std::size_t at_most) {
  const StoreMode mode = [&] {
    // Around the cache only when the model does not fit into it anyway.
    const std::uint64_t total = begin_.streaming != 0 ? ~std::uint64_t{0} : plan_->manifest.nbytes();
    return total > cache_sizes().last_level / 2 ? StoreMode::kStreaming : StoreMode::kCached;
  }();
  const auto bind_upto = [&](std::size_t end) {
    if (end > views_.size()) binder.bind(manifest(), views_.size(), end, views_);
  };
  const bool planned = begin_.streaming == 0;
  if (device_began_ && planned && next_bucket_ == 0) {
    device_->bind(plan_->buckets.fragments, plan_->buckets.buckets, views_,
                  stamp == 0 ? 0 : stamp ^ begin_.fingerprint ^ begin_.asked_bytes);
  }
  std::optional<BucketHeader> header;
  while (at_most-- > 0 && (header = await_bucket())) {
    const BucketLayout& layout = understand(*header);
    if (!planned) bind_upto(planned_entries_);
    const auto start = Clock::now();
    const auto& all = planned ? plan_->buckets.fragments : planner_->fragments();
    const auto part = std::span<const Fragment>(all).subspan(layout.first_fragment, layout.fragment_count);
    wrote_ = wrote_ || !part.empty();
    if (device_began_) {
      if (planned) {
        device_->move(next_bucket_, slot_->data, *wait_);
      } else {
        for (const Fragment& f : part) {
          device_->move_piece(next_bucket_, slot_->data, f, views_[f.tensor], device_->stream(), *wait_);
        }
      }
      // Host buckets must be read before they are given back.
      if (comm_->memory_kind() == MemoryKind::kHost) device_->settle(next_bucket_, *wait_);
      unverified_.push_back(*header);
      phases_.unpack += seconds_since(start);
    } else {
      const Checksum sum = unpack(slot_->data, part, views_, begin_.verify != 0, mode);
      phases_.unpack += seconds_since(start);
      verify(*header, next_bucket_, sum);
    }
    for (const Fragment& f : part) bytes_ += f.nbytes;
    release_bucket();
  }
  if (header) return false;  // its turn is over, more may follow
  finish_device();
  if (!planned) {
    bind_upto(manifest().size());
    binder.finish(manifest());
    end_stream();
  }
  return true;
}

// Waits for the unpacking, and compares every checksum that could not be compared before.
void WeightReceiver::finish_device() {
  if (!device_began_) return;
  const auto start = Clock::now();
  wait_->progress();
  device_->finish(*wait_);
  device_began_ = false;
  phases_.unpack += seconds_since(start);
  if (begin_.verify == 0) return;
  const bool late = std::any_of(unverified_.begin(), unverified_.end(),
                                [](const BucketHeader& header) { return BucketFlags::decode(header.flags).late_sum; });
  if (late) wait_until("send its checksums", [this] { return late_sums_.size() >= next_bucket_; });
  for (BucketHeader& header : unverified_) {
    if (BucketFlags::decode(header.flags).late_sum) header.checksum = late_sums_[header.index];
    verify(header, header.index, device_->sum(header.index));
  }
  unverified_.clear();
}

std::optional<WeightReceiver::Bucket> WeightReceiver::next_bucket(bool exposed) {
  release_bucket();
  auto header = await_bucket();
  if (!header) {
    if (device_began_) {
      device_->finish(*wait_);
      device_began_ = false;
    }
    if (begin_.streaming != 0 && planner_) end_stream();
    return std::nullopt;
  }
  const BucketLayout& layout = understand(*header);
  const auto& all = begin_.streaming != 0 ? planner_->fragments() : plan_->buckets.fragments;
  const auto part = std::span<const Fragment>(all).subspan(layout.first_fragment, layout.fragment_count);
  const auto start = Clock::now();
  if (device_began_) {
    if (BucketFlags::decode(header->flags).late_sum) {
      throw CommError(concat("bucket ", next_bucket_, " came without the checksum that this rank asked for"),
                      identity_.source);
    }
    if (begin_.verify != 0) device_->check(next_bucket_, slot_->data, part, *wait_);
    device_->settle(next_bucket_, *wait_);
    verify(*header, next_bucket_, device_->sum(next_bucket_));
  } else if (begin_.verify != 0) {
    verify(*header, next_bucket_, checksum_bucket(slot_->data, part));
  }
  phases_.unpack += seconds_since(start);
  if (exposed) comm_->mark_exposed(*slot_);
  Bucket bucket;
  bucket.data = slot_->data;
  bucket.used_bytes = header->used_bytes;
  bucket.tensors_begin = tensors_done_;
  bucket.tensors_end = layout.fragment_count == 0 ? tensors_done_ : layout.tensors_end;
  tensors_done_ = bucket.tensors_end;
  for (const Fragment& f : part) {
    bytes_ += f.nbytes;
    bucket.pieces.push_back({f, f.tensor_offset + f.nbytes == manifest()[f.tensor].nbytes});
  }
  return bucket;
}

void WeightReceiver::release_bucket() {
  if (!slot_) return;
  comm_->release(*slot_);
  slot_.reset();
  ++next_bucket_;
  // Of a follower's progress the source learns from nobody else.
  if (begin_.transport == kFanOut) headers_->report_released(next_bucket_);
}

}  // namespace fastsync
