#include "sync/weight_receiver.h"

#include <unistd.h>

#include <algorithm>

#include "comm/ipc/ipc_communicator.h"
#include "comm/nccl/nccl_communicator.h"

namespace fastsync {

namespace {
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
