#include "sync/weight_receiver.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "comm/ipc/ipc_communicator.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/shm/shm_communicator.h"
#include "common/cpu.h"
#include "sync/transport_choice.h"

namespace fastsync {

namespace {
constexpr std::chrono::milliseconds kDrainPatience{500};
constexpr std::uint64_t kUnclosedRing = ~std::uint64_t{0};  // a generation that never is
constexpr std::chrono::milliseconds kDeathPatience{100};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }
double as_seconds(std::chrono::nanoseconds d) { return std::chrono::duration<double>(d).count(); }
}  // namespace

class WeightReceiver::Headers final : public HeaderChannel {
 public:
  explicit Headers(WeightReceiver& receiver) : receiver_(receiver) {}
  void send(const BucketHeader& /*header*/) override { throw InternalError("a receiver sends no bucket headers"); }
  BucketHeader receive(Wait& wait) override {
    BucketHeader header;
    while (!try_receive(header)) {
      if (wait.expired()) throw TimeoutError("no bucket was announced");
      Link* const link = receiver_.link_.get();
      wait_readable({&link, 1}, -1, wait.slice());
      wait.check();
    }
    wait.progress();
    return header;
  }
  void wait_released(std::uint64_t /*count*/, Wait& /*wait*/) override {}
  [[nodiscard]] int slowest_receiver() const noexcept override { return -1; }
  void report_released(std::uint64_t count) override {
    if (receiver_.link_) receiver_.link_->send(FrameType::kReleased, receiver_.sync_, count);
  }
  bool try_receive(BucketHeader& header) override {
    if (receiver_.announced_.empty()) receiver_.pump();
    if (receiver_.announced_.empty()) return false;
    header = receiver_.announced_.front();
    receiver_.announced_.pop_front();
    return true;
  }

 private:
  WeightReceiver& receiver_;
};

WeightReceiver::WeightReceiver(Identity identity, std::shared_ptr<Pairing> pairing)
    : identity_(std::move(identity)),
      pid_(::getpid()),
      pairing_(std::move(pairing)),
      calls_(pairing_->receiver),
      headers_(std::make_unique<Headers>(*this)) {}

WeightReceiver::~WeightReceiver() { close(false); }

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

void WeightReceiver::open(std::chrono::nanoseconds timeout, Hook hook) {
  if (active_) throw StateError("a sync is already running on this group");
  if (lost_) throw Error(*lost_);
  active_ = true;
  timeout_ = timeout;
  hook_ = std::move(hook);
  joined_ = began_ = go_ = committed_ = wrote_ = failed_by_source_ = false;
  failure_.reset();
  phase_ = "join";
  phases_ = {};
  next_bucket_ = bytes_ = 0;
  tensors_done_ = 0;
  stalled_rank_ = -1;
  needs_external_ = false;
  runtime_.reset();
  caller_stream_ = nullptr;
  flexible_ = verifies_first_ = on_device_ = device_began_ = false;
  announced_.clear();
  ++calls_.call;
  waiting_since_ = last_said_ = Clock::now();
}

bool WeightReceiver::connect(OwnedFd socket) {
  drop_data_plane();  // it belonged to the source's previous session
  source_closed_ = false;
  auto link = std::make_unique<Link>(std::move(socket));
  if (link->is_unix()) {
    if (link->peer_uid() != ::geteuid()) {
      throw CommError(concat("rank ", identity_.source, "'s socket belongs to user ", link->peer_uid(),
                             ", this process to ", ::geteuid(), "; run all ranks as one user"),
                      identity_.source);
    }
    link->watch_process();
  }
  Hello hello;
  hello.rank = static_cast<std::uint32_t>(identity_.rank);
  hello.world = static_cast<std::uint32_t>(identity_.ranks.size());
  hello.source = static_cast<std::uint32_t>(identity_.source);
  hello.pid = static_cast<std::uint64_t>(::getpid());
  hello.calls_owner = calls_.owner;
  hello.last_sync = calls_.last_sync;
  hello.session = pairing_->session;
  hello.library_version = identity_.library_version;
  hello.token = identity_.token;
  hello.host = identity_.host;
  link->send(FrameType::kHello, 0, 0, encode(hello));
  // The source answers when it is in a call; frames wait in the socket until then. So connected means accepted by the
  // kernel, and join() finds the Welcome or the Reject.
  link_ = std::move(link);
  welcomed_ = false;
  committed_sync_ = 0;
  const auto both_reopened = [&](const auto& failed) {
    return failed.in.own != pairing_->session && failed.in.source != identity_.token;
  };
  std::erase_if(calls_.unmet, both_reopened);
  std::erase_if(calls_.missed, both_reopened);
  // Calls that no sync is known to have met: the source knows which of them one has.
  for (const UnmetCall& unmet : calls_.unmet) {
    Join join;
    join.call = unmet.call;
    join.last_sync = calls_.last_sync;
    join.refused = 1;
    link_->send(FrameType::kJoin, 0, 0, encode(join));
    link_->send(FrameType::kFail, 0, unmet.call, encode(unmet.failure));
  }
  return true;
}

void WeightReceiver::throw_if_failed() const {
  if (failure_) throw Error(*failure_);
  if (lost_) throw Error(*lost_);
}

void WeightReceiver::pump() {
  if (!link_) return;
  link_->poll_now();
  try {
    while (auto frame = link_->receive()) {
      handle(*frame);
      if (!link_) return;
    }
  } catch (const Error& error) {
    link_->close();
    throw CommError(concat("rank ", identity_.source, " (the source): ", error.what()), identity_.source);
  }
  if (link_->gone() && !source_closed_ && !lost_) {
    if (!welcomed_ && !link_->process_ends_within(kDeathPatience)) {
      // It closed its listener before it took our connection.
      source_closed_ = true;
      return;
    }
    lost_.emplace(ErrorKind::kPeerLost,
                  concat("rank ", identity_.source, " (the source) was lost, phase '", phase_, "'",
                         phase_ == std::string_view("buckets") ? concat(", bucket ", next_bucket_) : "",
                         ": its process", link_->peer_pid() > 0 ? concat(" (pid ", link_->peer_pid(), ")") : "",
                         " ended or its connection broke; make a new process group without it"),
                  identity_.source);
  }
}

void WeightReceiver::handle(Frame& frame) {
  const bool current = began_ && frame.sync == sync_;
  switch (frame.type) {
    case FrameType::kWelcome:
      welcomed_ = true;
      calls_.last_sync = std::min(calls_.last_sync, frame.sync);  // less: the source counts from the start again
      std::erase_if(calls_.unmet, [&](const UnmetCall& unmet) { return unmet.call <= frame.aux; });
      return;
    case FrameType::kReject: {
      Failure failure;
      decode(frame.payload, failure);
      failure_.emplace(failure.kind, concat("rank ", identity_.source, " refused the connection: ", failure.message),
                       static_cast<int>(failure.rank));
      link_->close();
      source_closed_ = true;
      return;
    }
    case FrameType::kBegin: {
      calls_.last_sync = std::max(calls_.last_sync, frame.sync);
      if (!joined_ || began_ || frame.aux != calls_.call) return;
      decode(frame.payload, begin_);
      sync_ = frame.sync;
      began_ = true;
      calls_.unmet.clear();
      // Prepared here, because everything that belongs to this sync may follow in the same read.
      descriptors_.clear();
      descriptors_came_ = false;
      announced_.clear();
      late_sums_.clear();
      unverified_.clear();
      deviated_ = false;
      planner_.reset();
      planned_entries_ = 0;
      saw_last_ = false;
      grown_ = Manifest{};
      plan_ = plans_.find(begin_.fingerprint);
      held_plan_ = plan_ != nullptr && begin_.manifest_follows == 0;
      if (begin_.manifest_follows != 0) plan_.reset();
      expected_entries_ = begin_.manifest_follows != 0 ? begin_.tensors : 0;
      return;
    }
    case FrameType::kManifest:
      if (current) grown_.append_serialized(frame.payload);
      return;
    case FrameType::kDeviate:
      if (!current || deviated_) return;
      deviate_at_ = frame.aux;
      if (begin_.streaming == 0 || deviate_at_ < planned_entries_ ||
          deviate_at_ > (plan_ ? plan_->manifest.size() : 0)) {
        throw CommError(concat("the source left its plan at entry ", deviate_at_, ", where this rank cannot follow"));
      }
      grown_ = Manifest{};
      for (std::size_t i = 0; i < deviate_at_; ++i) grown_.append(plan_->manifest[i]);
      deviated_ = true;
      return;
    case FrameType::kGo:
      if (current) go_ = true;
      return;
    case FrameType::kDescriptors:
      if (!current) return;
      descriptors_ = std::move(frame.descriptors);
      descriptor_data_ = std::move(frame.payload);
      descriptors_came_ = true;
      reader_index_ = frame.aux;
      return;
    case FrameType::kBucket: {
      if (!current) return;
      BucketHeader header;
      decode(frame.payload, header);
      announced_.push_back(header);
      if (announced_.size() > 4096) throw CommError("too many buckets announced");
      return;
    }
    case FrameType::kSums:
      if (!current) return;
      if (frame.aux != late_sums_.size()) throw CommError("checksums arrived out of order");
      decode_sums(frame.payload, late_sums_);
      return;
    case FrameType::kCommit:
      if (current) {
        committed_ = true;
        committed_sync_ = sync_;
      }
      return;
    case FrameType::kFail: {
      Failure failure;
      decode(frame.payload, failure);
      const bool newer = frame.sync > calls_.last_sync;
      calls_.last_sync = std::max(calls_.last_sync, frame.sync);
      bool mine = false;
      if (failure.answers != 0) {
        mine = failure.answers == calls_.call && joined_;
        std::erase_if(calls_.unmet, [&](const UnmetCall& unmet) { return unmet.call <= failure.answers; });
      } else if (newer && !calls_.unmet.empty()) {
        calls_.unmet.pop_front();  // the call it belongs to already failed here
      } else if (newer && (began_ || !active_ || failure_)) {
        // It came right behind the end of the call before: it belongs to a later one. Each failed sync ends one call.
        if (calls_.missed.size() == kMaxUnmet) calls_.missed.pop_front();
        calls_.missed.push_back({Error(failure.kind, failure.message, static_cast<int>(failure.rank)),
                                 {pairing_->session, identity_.token}});
      } else {
        mine = newer;
      }
      if (began_ && frame.sync == sync_) failed_by_source_ = true;
      if (mine && failure.kind == ErrorKind::kPeerLost && !lost_) {
        lost_.emplace(failure.kind, failure.message, static_cast<int>(failure.rank));
      }
      if (mine && !failure_) failure_.emplace(failure.kind, failure.message, static_cast<int>(failure.rank));
      return;
    }
    case FrameType::kStall:
      if (!current && !(joined_ && !began_)) return;
      stalled_rank_ = static_cast<int>(frame.aux);
      stalled_at_ = Clock::now();
      return;
    case FrameType::kBye: {
      const std::string why(reinterpret_cast<const char*>(frame.payload.data()), frame.payload.size());
      link_->close();
      source_closed_ = true;
      if (why == "exit") {
        lost_.emplace(
            ErrorKind::kPeerLost,
            concat("rank ", identity_.source, " (the source) was lost: its process ended; make a new process group"),
            identity_.source);
      }
      return;
    }
    default: throw CommError(concat("unexpected control frame of type ", static_cast<int>(frame.type)));
  }
}

void WeightReceiver::tick() {
  last_tick_ = Clock::now();
  if (hook_) hook_();
  pump();
  throw_if_over();
}

void WeightReceiver::throw_if_over() {
  throw_if_failed();
  // Only while it carries this sync: before that the source may have given it up already, and after the last bucket
  // nothing that becomes of it matters.
  if (comm_ && phase_ == std::string_view("buckets")) comm_->poll();
  if (source_closed_) {
    if (began_) {
      throw PeerFailedError(concat("rank ", identity_.source, " (the source) closed its session during the sync"),
                            identity_.source);
    }
    throw SourceClosed();
  }
  say_waiting();
}

// A rank that waits for data says so: the source then knows that it is not the one that is stuck.
void WeightReceiver::say_waiting() {
  if (!began_ || !link_ || phase_ != std::string_view("buckets")) return;
  const auto period = stall_period(timeout_);
  const auto now = Clock::now();
  if (now - waiting_since_ < period || now - last_said_ < period) return;
  last_said_ = now;
  link_->send(FrameType::kStall, sync_, next_bucket_);
}

int WeightReceiver::held_up_by() const noexcept {
  return stalled_rank_ >= 0 && Clock::now() - stalled_at_ < kStallValidity ? stalled_rank_ : -1;
}

void WeightReceiver::time_out(const std::string& what) {
  throw_if_failed();  // the timeout that ended the wait may be one that the source reported
  const int behind = comm_ ? comm_->waiting_for() : -1;  // a rank that follows this one
  const bool other = held_up_by() >= 0 || behind >= 0;
  const int rank = behind >= 0 ? behind : other ? stalled_rank_ : identity_.source;
  throw TimeoutError(
      concat(began_ ? concat("sync ", sync_, ", ") : "", "phase '", phase_, "': ",
             other ? concat("rank ", rank, " held everybody up: ") : concat("rank ", rank, " (the source) did not "),
             what, " within ", as_seconds(timeout_),
             " s; it is stopped, stuck or not in its call (every rank of the group must call; raise timeout_s if it is "
             "only slow)"),
      rank);
}

void WeightReceiver::wait_until(const char* what, const std::function<bool()>& done) {
  waiting_since_ = Clock::now();
  Wait wait(timeout_, nullptr);
  std::size_t entries = grown_.size();
  for (;;) {
    last_tick_ = Clock::now();
    if (hook_) hook_();
    pump();
    pump_ring();
    if (done()) return;  // before anything that came later: a source may commit, close and exit in one breath
    throw_if_over();
    if (grown_.size() != entries) {
      entries = grown_.size();
      wait.progress();
    }
    if (wait.expired()) time_out(what);
    std::vector<Link*> links{link_.get()};
    if (ring_guest_ && ring_guest_->link() != nullptr) links.push_back(ring_guest_->link());
    if (ring_host_) ring_host_->append_links(links);
    wait_readable(links, ring_host_ ? ring_host_->listener() : -1, wait.slice());
  }
}

// What the source said while this rank was away comes first: a failed sync that it missed ends this call.
void WeightReceiver::enter_call() {
  phase_ = "join";
  if (!calls_.missed.empty()) {
    failure_ = calls_.missed.front().error;
    calls_.missed.pop_front();
    if (failure_->kind() == ErrorKind::kPeerLost) lost_ = failure_;
  }
  pump();
  throw_if_failed();
  if (!link_) throw StateError("the receiver is not connected");
  if (source_closed_) throw SourceClosed();
}

void WeightReceiver::send_join(Join join) {
  join.call = calls_.call;
  join.last_sync = calls_.last_sync;
  joined_ = true;
  link_->send(FrameType::kJoin, 0, 0, encode(join));
}

void WeightReceiver::announce() {
  enter_call();
  Join join;
  join.refused = 1;
  send_join(std::move(join));
}

void WeightReceiver::ask(const std::string& transport) {
  enter_call();
  if (runtime_ && comm_ && comm_->memory_kind() == MemoryKind::kDevice && comm_device_ != runtime_) drop_data_plane();
  Join join;
  join.comm_generation = comm_ ? comm_generation_ : holds_unclosed_ ? kUnclosedRing : 0;
  join.transport = transport;
  if (runtime_) {
    join.device_id = runtime_->device_id();
    join.flexible = flexible_ ? 1 : 0;
    join.nccl_version = NcclCommunicator::version();
  }
  join.verifies_first = verifies_first_ ? 1 : 0;
  join.manifests = plans_.fingerprints();
  send_join(std::move(join));
}

const Begin& WeightReceiver::join(const std::string& transport) {
  const auto start = Clock::now();
  if (!joined_) ask(transport);
  wait_until("begin a sync", [this] { return began_; });
  phase_ = "check";
  const bool planned = begin_.streaming == 0 || begin_.fingerprint != 0 || begin_.tensors != 0;
  if (planned && !plan_ && begin_.manifest_follows == 0) {
    throw CommError("the source names a plan that this rank does not hold", identity_.source);
  }
  if (begin_.manifest_follows != 0) {
    wait_until("send the manifest", [this] { return grown_.size() >= expected_entries_; });
    if (grown_.size() != expected_entries_ || grown_.fingerprint() != begin_.fingerprint) {
      throw CommError(concat("the manifest arrived with ", grown_.size(), " entries and fingerprint ", std::hex,
                             grown_.fingerprint(), ", announced were ", std::dec, expected_entries_, " and ", std::hex,
                             begin_.fingerprint),
                      identity_.source);
    }
    plan_ = SyncPlan::make(std::move(grown_), begin_.asked_bytes);
    grown_ = Manifest{};
    plans_.put(plan_);
  } else if (plan_ && begin_.streaming == 0 && plan_->asked_bytes != begin_.asked_bytes) {
    plan_ = SyncPlan::make(plan_->manifest, begin_.asked_bytes);
    plans_.put(plan_);
  }
  if (plan_ && begin_.streaming == 0 && plan_->buckets.bucket_bytes != begin_.bucket_bytes) {
    throw CommError(concat("the source's buckets have ", begin_.bucket_bytes, " bytes, our cuts of its manifest ",
                           plan_->buckets.bucket_bytes),
                    identity_.source);
  }
  phases_.wait += seconds_since(start);
  return begin_;
}

void WeightReceiver::bind(DestinationBinder& binder) {
  views_.clear();
  if (begin_.streaming != 0) return;  // a generator's tensors are checked as they are reached
  binder.bind(plan_->manifest, 0, plan_->manifest.size(), views_);
  binder.finish(plan_->manifest);
}

void WeightReceiver::use_device(std::shared_ptr<DeviceRuntime> runtime, void* stream, bool flexible) {
  runtime_ = std::move(runtime);
  caller_stream_ = stream;
  flexible_ = flexible;
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

// --- buckets --------------------------------------------------------------------------------------------------------

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

void WeightReceiver::verified(const ReadyLists& lists) {
  release_bucket();
  phase_ = "commit";
  auto pieces = encode_lists(lists);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    link_->send(FrameType::kDone, sync_, i + 1 == pieces.size() ? 1 : 0, pieces[i]);
  }
}

void WeightReceiver::commit(const ReadyLists& lists) {
  const auto start = Clock::now();
  verified(lists);
  wait_until("commit", [this] { return committed_; });
  phases_.commit += seconds_since(start);
  if (next_bucket_ > 0) retired_.clear();
  end_call();
}

void WeightReceiver::conclude() noexcept {
  if (!active_) return;
  committed_sync_ = sync_;
  if (next_bucket_ > 0) retired_.clear();
  end_call();
}

void WeightReceiver::end_call() noexcept {
  active_ = joined_ = began_ = false;
  phase_ = "idle";
  hook_ = nullptr;
  planner_.reset();
  plan_.reset();
  grown_ = Manifest{};
  descriptors_.clear();
}

void WeightReceiver::send_failure(const Failure& failure) {
  if (began_) {
    link_->send(FrameType::kFail, sync_, calls_.call, encode(failure));
  } else {
    link_->send(FrameType::kFail, 0, calls_.call, encode(failure));
    if (calls_.unmet.size() == kMaxUnmet) calls_.unmet.pop_front();
    calls_.unmet.push_back({calls_.call, failure, {pairing_->session, identity_.token}});
  }
}

void WeightReceiver::fail(ErrorKind kind, int rank, const std::string& message) noexcept {
  if (!active_) return;
  const bool began = began_;
  const bool told = failure_.has_value() || lost_.has_value() || source_closed_;
  try {
    if (link_ && !link_->gone() && joined_ && !told) {
      Failure failure;
      failure.kind = kind;
      failure.rank = rank;
      failure.reporter = identity_.rank;
      failure.message = cut_message(message);
      if (!began && kind == ErrorKind::kTimeout && held_up_by() < 0) {
        link_->send(FrameType::kCancel, 0, calls_.call);  // not even the source was in this sync yet
      } else {
        send_failure(failure);
      }
    }
    slot_.reset();
    settle_data_plane(began);
  } catch (...) {
    drop_data_plane();  // not at rest: the next sync makes a new one
  }
  if (link_ && link_->gone() && comm_ && comm_->recovery() != Recovery::kAbort) drop_data_plane();
  end_call();
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

void WeightReceiver::close(bool exiting) noexcept {
  if (::getpid() != pid_) {  // a forked child: the connection is the parent's, it alone may end it
    link_.reset();
    drop_data_plane();
    return;
  }
  const std::string_view why = exiting ? "exit" : "close";
  try {
    if (active_) {
      fail(ErrorKind::kPeerFailed, identity_.rank,
           concat("rank ", identity_.rank, " closed its session during the sync"));
    }
  } catch (...) {  // the source sees the connection end
  }
  const OwnedFd source = link_ && !link_->gone() ? OwnedFd::duplicate(link_->fd()) : OwnedFd();
  // Before the goodbye and the connection's end: both tell the source that we have its memory open no more.
  drop_data_plane();
  try {
    if (link_) link_->send(FrameType::kBye, 0, 0, {reinterpret_cast<const std::byte*>(why.data()), why.size()});
  } catch (...) {  // the source sees the connection end
  }
  if (link_) link_->end_sending();
  for (auto& ring : retired_) IpcCommunicator::keep_for(std::move(ring), {&source, 1});
  retired_.clear();
  link_.reset();
  plans_.clear();
  descriptors_.clear();
}

}  // namespace fastsync
