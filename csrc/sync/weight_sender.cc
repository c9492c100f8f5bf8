#include "sync/weight_sender.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "comm/ipc/ipc_communicator.h"
#include "comm/nccl/nccl_communicator.h"
#include "sync/weight_sender_headers.h"

namespace fastsync {

namespace {
constexpr std::size_t kMaxGreetings = 256;
constexpr std::size_t kMaxHelloBytes = 4096;
constexpr std::chrono::seconds kGreetingPatience{10};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::string list_ranks(const std::vector<int>& ranks) {
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i == 16) return out + concat(", ... (", ranks.size(), " in all)");
    out += concat(i == 0 ? "" : ", ", ranks[i]);
  }
  return out;
}

double as_seconds(std::chrono::nanoseconds d) { return std::chrono::duration<double>(d).count(); }
}  // namespace

WeightSender::WeightSender(Identity identity, std::shared_ptr<Pairing> pairing)
    : identity_(std::move(identity)), pid_(::getpid()), pairing_(std::move(pairing)), sync_(pairing_->sync) {
  listener_ = listen_unix(unix_name_);
  for (const int rank : identity_.ranks) {
    if (rank == identity_.rank) continue;
    Peer& peer = peers_[rank];
    peer.rank = rank;
    peer.calls = &pairing_->peers[rank];
  }
  headers_ = std::make_unique<Headers>(*this);
}

WeightSender::~WeightSender() { close(false); }

int WeightSender::listen_tcp() {
  int port = 0;
  tcp_listener_ = fastsync::listen_tcp(port);
  return port;
}

// --- connections ----------------------------------------------------------------------------------------------------

void WeightSender::accept_connections() {
  for (OwnedFd* listener : {&listener_, &tcp_listener_}) {
    while (*listener) {
      auto fd = accept_one(listener->get());
      if (!fd) break;
      if (greetings_.size() >= kMaxGreetings) greetings_.erase(greetings_.begin());
      try {
        auto link = std::make_unique<Link>(std::move(*fd));
        // Only our own user may map our memory, and only it may make us act.
        if (link->is_unix() && link->peer_uid() != ::geteuid()) continue;
        link->limit(kMaxHelloBytes, 0);
        greetings_.push_back({std::move(link), Clock::now()});
      } catch (const Error&) {
        continue;  // the connection broke before it said anything
      }
    }
  }
  for (auto it = greetings_.begin(); it != greetings_.end();) {
    it = greet(*it) ? greetings_.erase(it) : it + 1;
  }
}

// True when the greeting is over, one way or the other.
bool WeightSender::greet(Greeting& greeting) {
  Link& link = *greeting.link;
  link.poll_now();
  std::optional<Frame> frame;
  Hello hello;
  try {
    frame = link.receive();
    if (frame && frame->type == FrameType::kHello) decode(frame->payload, hello);
  } catch (const Error&) {
    return true;  // not one of ours: closed without a word
  }
  if (!frame) return link.gone() || Clock::now() - greeting.since > kGreetingPatience;
  if (frame->type != FrameType::kHello) return true;

  const auto reject = [&](ErrorKind kind, const std::string& why) {
    Failure failure;
    failure.kind = kind;
    failure.rank = identity_.rank;
    failure.reporter = identity_.rank;
    failure.message = why;
    link.send(FrameType::kReject, 0, 0, encode(failure));
    return true;
  };
  if (hello.protocol != kProtocolVersion) {
    const std::string why = concat("rank ", identity_.rank, " speaks fastsync protocol ", kProtocolVersion,
                                   " (fastsync ", identity_.library_version, "), a peer speaks protocol ",
                                   hello.protocol, "; install one version everywhere");
    note_failure(ErrorKind::kComm, identity_.rank, why);
    return reject(ErrorKind::kComm, why);
  }
  if (hello.token != identity_.token) return reject(ErrorKind::kComm, "wrong token: this is another group's source");
  if (hello.source != static_cast<std::uint32_t>(identity_.rank) || hello.world != identity_.ranks.size()) {
    return reject(ErrorKind::kInvalidArgument,
                  concat("rank ", hello.rank, " expects source ", hello.source, " in a group of ", hello.world,
                         " ranks; this is rank ", identity_.rank, " in a group of ", identity_.ranks.size()));
  }
  const auto found = peers_.find(static_cast<int>(hello.rank));
  if (found == peers_.end()) {
    return reject(ErrorKind::kInvalidArgument, concat("rank ", hello.rank, " is not in this group"));
  }
  Peer& peer = found->second;
  if (peer.link && !peer.said_bye && !peer.link->gone()) drain_peer(peer);  // its goodbye may be unread
  if (peer.link && !peer.said_bye && !peer.link->gone()) {
    return reject(ErrorKind::kInvalidArgument,
                  concat("rank ", hello.rank, " is already connected from process ", peer.link->peer_pid(),
                         "; process ", hello.pid, " claims the same rank: give every process its own"));
  }
  if (link.is_unix()) link.watch_process();
  link.limit(kMaxPayloadBytes, 0);
  peer.link = std::move(greeting.link);
  peer.host = hello.host;
  PeerCalls& calls = *peer.calls;
  if (calls.owner != 0 && calls.owner != hello.calls_owner) calls = PeerCalls{};
  calls.owner = hello.calls_owner;
  // What it heard of is its own affair; the rest is said again, as the answer to its next calls.
  calls.session = hello.session;
  std::erase_if(calls.missed, [&](const MissedSync& m) {
    const bool heard = m.sent && m.sync <= hello.last_sync;
    const bool same_for_it = m.receiver_session != 0 && m.receiver_session == hello.session;
    return heard || (m.session != pairing_->session && !same_for_it);
  });
  for (MissedSync& missed : calls.missed) missed.sent = false;
  peer.skip_call = false;
  peer.deferred.reset();
  // Where the active sync has met a call of its last session already, what comes now is of the next sync.
  peer.said_bye = peer.ready = peer.done = false;
  peer.parked = active_ && peer.joined;
  peer.link->send(FrameType::kWelcome, sync_, calls.last_call);
  return true;
}

void WeightSender::drain_peer(Peer& peer) {
  if (!peer.link) return;
  peer.link->poll_now();
  if (peer.deferred && !peer.parked) {
    Frame frame = std::move(*peer.deferred);
    peer.deferred.reset();
    handle(peer, frame);
  }
  while (!peer.parked && peer.link) {
    std::optional<Frame> frame;
    try {
      frame = peer.link->receive();
    } catch (const Error& error) {
      peer.link->close();
      note_failure(ErrorKind::kComm, peer.rank,
                   concat("rank ", peer.rank, " sent bytes that are not ours: ", error.what()));
      return;
    }
    if (!frame) break;
    try {
      handle(peer, *frame);
    } catch (const Error& error) {
      peer.link->close();
      note_failure(ErrorKind::kComm, peer.rank, concat("rank ", peer.rank, ": ", error.what()));
      return;
    }
  }
  if (peer.link && peer.link->gone() && !peer.said_bye && !lost_) {
    // A goodbye may wait behind the frames of a parked peer. Nothing else that it said matters any more.
    peer.deferred.reset();
    try {
      while (auto frame = peer.link->receive()) {
        if (frame->type != FrameType::kBye) continue;
        handle(peer, *frame);
        return;
      }
    } catch (const Error&) {  // it ended in bytes that are not ours
    }
    lost_.emplace(ErrorKind::kPeerLost,
                  concat("rank ", peer.rank, " was lost while ", where(), ": its process",
                         peer.link->peer_pid() > 0 ? concat(" (pid ", peer.link->peer_pid(), ")") : "",
                         " ended or its connection broke; make a new process group without it"),
                  peer.rank);
  }
}

void WeightSender::handle(Peer& peer, Frame& frame) {
  const bool current = active_ && frame.sync == sync_;
  switch (frame.type) {
    case FrameType::kJoin: {
      Join join;
      decode(frame.payload, join);
      if (active_ && peer.joined) {  // its next call; this one is over for it
        peer.deferred = std::move(frame);
        peer.parked = true;
        return;
      }
      PeerCalls& calls = *peer.calls;
      if (join.call <= calls.last_call) {
        // Said again over a new connection, but it has met its sync. Had a failure been on its way to end it: it ended
        // by itself before that was read.
        std::erase_if(calls.missed, [&](const MissedSync& m) { return m.call == join.call; });
        peer.skip_call = true;
        peer.join = std::move(join);
        return;
      }
      calls.last_call = join.call;
      std::erase_if(calls.missed, [&](const MissedSync& m) { return m.sent && m.sync <= join.last_sync; });
      peer.join = std::move(join);
      peer.skip_call = !calls.missed.empty();
      peer.joined = !peer.skip_call;
      if (peer.joined) return;
      MissedSync& missed = calls.missed.front();
      if (missed.sent) {
        missed.call = peer.join.call;  // on its way, and ends this call
        return;
      }
      // Answered to this very call: should it be over already, by its own deadline, the next one is not touched.
      answer(peer, *missed.failure, missed.sync);
      calls.missed.pop_front();
      return;
    }
    case FrameType::kCancel:
      if (peer.skip_call || frame.aux != peer.join.call) return;
      if (active_ && peer.joined && phase_ != std::string_view("join")) {
        note_failure(ErrorKind::kTimeout, identity_.rank,
                     concat("rank ", peer.rank, " gave up its call before the sync began"));
        peer.parked = true;  // that call was this sync's; its next one is the next sync's
        return;
      }
      peer.joined = false;
      return;
    case FrameType::kReady:
      if (!current) return;
      peer.ready = true;
      peer.ready_data = std::move(frame.payload);
      if (transport_ == kFanOut) open_door_of(peer);
      return;
    case FrameType::kDone:
      if (!current) return;
      decode_lists(frame.payload, peer.lists);
      if (frame.aux != 0) peer.done = true;
      return;
    case FrameType::kStall:
      if (current) peer.heard = Clock::now();
      return;
    case FrameType::kReleased:
      if (!current) return;
      peer.heard = Clock::now();
      peer.released = std::max(peer.released, frame.aux);
      return;
    case FrameType::kFail: {
      const bool of_call = frame.sync == 0 && peer.joined && frame.aux == peer.join.call;
      if (peer.skip_call && frame.sync == 0 && frame.aux == peer.join.call) {
        // Its call failed by itself, before it heard of the failure that would have ended it. It knows that the two
        // were one (ReceiverCalls::unmet), so its next call is of a later sync.
        peer.skip_call = false;
        std::erase_if(peer.calls->missed, [&](const MissedSync& m) { return m.call == frame.aux; });
        return;
      }
      if (peer.skip_call || !active_ || !(current || of_call)) return;
      Failure failure;
      decode(frame.payload, failure);
      note_failure(failure.kind, static_cast<int>(failure.rank), failure.message);
      peer.parked = true;
      return;
    }
    case FrameType::kBye: {
      std::string why(reinterpret_cast<const char*>(frame.payload.data()), frame.payload.size());
      peer.said_bye = true;
      if (((comm_ && comm_->name() == "ipc") || ring_) && peer.events_of == comm_generation_) {
        peer.farewell = OwnedFd::duplicate(peer.link->fd());
      }
      peer.link->close();
      if (why == "exit" && !lost_) {
        lost_.emplace(ErrorKind::kPeerLost,
                      concat("rank ", peer.rank, " was lost while ", where(),
                             ": its process ended; make a new process group without it"),
                      peer.rank);
      } else if (active_ && peer.joined) {
        // Its call was of this sync: it has missed none, and its next session starts afresh.
        note_failure(ErrorKind::kPeerFailed, peer.rank,
                     concat("rank ", peer.rank, " closed its session during the sync"));
      }
      return;
    }
    default: throw CommError(concat("unexpected control frame of type ", static_cast<int>(frame.type)));
  }
}

void WeightSender::note_failure(ErrorKind kind, int rank, const std::string& message) {
  if (active_ && !failure_) failure_.emplace(kind, message, rank);
}

void WeightSender::throw_if_failed() const {
  if (failure_) throw Error(*failure_);
  if (lost_) throw Error(*lost_);
}

void WeightSender::pump() {
  accept_connections();
  for (auto& [rank, peer] : peers_) drain_peer(peer);
}

void WeightSender::tick() {
  last_tick_ = Clock::now();
  if (hook_) hook_();
  pump();
  throw_if_failed();
  // Only while it carries this sync: before that it may be one that the receivers have given up already.
  const bool in_use =
      phase_ == std::string_view("buckets") || (phase_ == std::string_view("commit") && next_bucket_ > 0);
  if (comm_ && in_use) comm_->poll();
  if (comm_ && phase_ == std::string_view("buckets") && last_tick_ - waiting_since_ > stall_period(timeout_)) {
    const int rank = slowest();
    if (rank >= 0) stall(rank);
  }
}

int WeightSender::slowest() const { return comm_ ? comm_->waiting_for() : -1; }

std::shared_ptr<const Buffer> WeightSender::external_memory() const {
  const auto* external = dynamic_cast<const ExternalCommunicator*>(comm_.get());
  return external == nullptr ? nullptr : external->owned_memory();
}

void WeightSender::check() { tick(); }

// Tells the receivers whom we wait for, so that they blame the right rank at their own deadline.
void WeightSender::stall(int rank) {
  const auto period = stall_period(timeout_);
  const auto now = Clock::now();
  if (now - waiting_since_ < period || now - last_stall_ < period) return;
  last_stall_ = now;
  for (auto& [other, peer] : peers_) {
    if (other == rank || !peer.link || !peer.joined) continue;
    peer.link->send(FrameType::kStall, sync_, static_cast<std::uint64_t>(rank));
  }
}

std::string WeightSender::where() const {
  const std::string_view phase = phase_;
  if (phase == "join") return "waiting for every rank to call";
  if (phase == "check") return "the ranks checked their destinations";
  if (phase == "buckets") return concat("sending bucket ", next_bucket_);
  if (phase == "commit") return "the ranks verified and committed";
  return "no sync ran";
}

void WeightSender::time_out(int rank, const std::string& doing) {
  throw_if_failed();  // the timeout that ended the wait may be one that a receiver reported
  std::string who = rank >= 0 ? concat("rank ", rank) : "a receiver";
  throw TimeoutError(
      concat("sync ", sync_, ", phase '", phase_, "': ", who, " did not ", doing, " within ", as_seconds(timeout_),
             " s; it is stopped, stuck or not in its call (raise timeout_s if it is only slow)"),
      rank);
}

void WeightSender::wait_for(const char* what, const std::function<bool(const Peer&)>& satisfied) {
  waiting_since_ = Clock::now();
  Wait wait(timeout_, nullptr);
  std::size_t left = peers_.size() + 1;
  for (;;) {
    tick();
    std::vector<int> missing;
    for (const auto& [rank, peer] : peers_) {
      if (!satisfied(peer)) missing.push_back(rank);
    }
    if (missing.empty()) return;
    if (missing.size() < left) {
      left = missing.size();
      wait.progress();
      waiting_since_ = Clock::now();
    }
    if (wait.expired()) {
      throw TimeoutError(concat("sync ", sync_, ", phase '", phase_, "': ", list_ranks(missing), " did not ", what,
                                " within ", as_seconds(timeout_),
                                " s; stopped, stuck or not in the call (every rank of the group must call; raise "
                                "timeout_s if it is only slow)"),
                         missing.front());
    }
    stall(missing.front());
    std::vector<Link*> links;
    for (auto& [rank, peer] : peers_) {
      if (peer.link && !peer.parked) links.push_back(peer.link.get());
    }
    for (auto& greeting : greetings_) links.push_back(greeting.link.get());
    // The TCP listener is looked at on every wake; only the Unix one wakes us.
    wait_readable(links, listener_.get(), wait.slice());
  }
}

void WeightSender::send_all(FrameType type, std::uint64_t aux, std::span<const std::byte> payload) {
  for (auto& [rank, peer] : peers_) {
    if (peer.link) peer.link->send(type, sync_, aux, payload);
  }
}

// --- one sync -------------------------------------------------------------------------------------------------------

void WeightSender::open(std::chrono::nanoseconds timeout, Hook hook) {
  if (active_) throw StateError("a sync is already running on this group");
  if (lost_) throw Error(*lost_);
  if (!listener_) throw StateError("the session is closed");
  ++sync_;
  active_ = true;
  timeout_ = timeout;
  hook_ = std::move(hook);
  verified_ = false;
  failure_.reset();
  phase_ = "join";
  phases_ = {};
  runtime_.reset();
  caller_stream_ = nullptr;
  device_began_ = false;
  next_bucket_ = bytes_ = 0;
  needs_external_ = false;
  for (auto& [rank, peer] : peers_) {
    peer.joined = peer.ready = peer.done = peer.parked = false;
    peer.released = 0;
    peer.ready_data.clear();
    peer.lists = {};
    peer.heard = Clock::now();
  }
  waiting_since_ = last_stall_ = Clock::now();
}

void WeightSender::connect_all() {
  wait_for("connect", [](const Peer& peer) { return peer.link != nullptr && !peer.said_bye; });
}

std::string WeightSender::join(const std::string& asked, const std::vector<std::string>& candidates) {
  const auto start = Clock::now();
  wait_for("join", [](const Peer& peer) { return peer.joined && peer.join.refused == 0; });
  phases_.wait += seconds_since(start);
  RankPlace here;
  here.rank = identity_.rank;
  here.host = identity_.host;
  here.asked = asked;
  if (runtime_) {
    here.device_id = runtime_->device_id();
    here.nccl_version = NcclCommunicator::version();
    here.shares_device = NcclCommunicator::ranks_may_share_device();
  }
  std::vector<RankPlace> there;
  for (const auto& [rank, peer] : peers_) {
    there.push_back(
        {rank, peer.host, peer.join.transport, peer.join.device_id, peer.join.nccl_version, peer.join.flexible != 0});
  }
  TransportChoice choice = choose_transport(here, there, candidates);
  transport_reason_ = std::move(choice.reason);
  groups_ = std::move(choice.groups);
  for (auto& [rank, peer] : peers_) peer.follows = false;
  for (const DeviceGroup& group : groups_) {
    for (const int rank : group.followers) peers_.at(rank).follows = true;
  }
  return transport_ = std::move(choice.transport);
}

void WeightSender::use_device(std::shared_ptr<DeviceRuntime> runtime, void* stream) {
  runtime_ = std::move(runtime);
  caller_stream_ = stream;
}

namespace {
// Each name once: unexpected ones in the order in which they were sent, missing ones in the receivers' order, one
// receiver after the other.
ReadyLists tidy(ReadyLists lists, const Manifest* manifest) {
  const auto unique = [](std::vector<std::string>& names) {
    std::unordered_set<std::string> seen;
    std::erase_if(names, [&](const std::string& name) { return !seen.insert(name).second; });
  };
  unique(lists.missing);
  unique(lists.unexpected);
  if (manifest != nullptr) {
    const auto place = [&](const std::string& name) { return manifest->find(name).value_or(0); };
    std::stable_sort(lists.unexpected.begin(), lists.unexpected.end(),
                     [&](const std::string& a, const std::string& b) { return place(a) < place(b); });
  }
  return lists;
}

}  // namespace

void WeightSender::verified() {
  phase_ = "commit";
  const auto start = Clock::now();
  wait_for("verify and commit", [](const Peer& peer) { return peer.done; });
  if (comm_ && !peers_.empty() && next_bucket_ > 0) comm_->flush(*wait_);
  phases_.commit += seconds_since(start);
  verified_ = true;
}

ReadyLists WeightSender::commit() {
  if (!verified_) verified();
  const auto start = Clock::now();
  send_all(FrameType::kCommit, options_.version, {});
  committed_sync_ = sync_;
  phases_.commit += seconds_since(start);
  for (auto& [rank, peer] : peers_) {
    peer.joined = false;
  }
  if (next_bucket_ > 0) retired_.clear();  // every reader has closed the old ring before it opened this one
  active_ = false;
  phase_ = "idle";
  hook_ = nullptr;
  slot_.reset();
  planner_.reset();
  ReadyLists lists;
  for (auto& [rank, peer] : peers_) {  // by rank, whoever answered first
    std::move(peer.lists.missing.begin(), peer.lists.missing.end(), std::back_inserter(lists.missing));
    std::move(peer.lists.unexpected.begin(), peer.lists.unexpected.end(), std::back_inserter(lists.unexpected));
    peer.lists = {};
  }
  return tidy(std::move(lists), plan_ ? &plan_->manifest : nullptr);
}

void WeightSender::answer(Peer& peer, const Failure& failure, std::uint64_t sync) {
  if (!peer.link) return;
  Failure mine = failure;
  mine.answers = peer.join.call;
  peer.link->send(FrameType::kFail, sync, 0, encode(mine));
}

// It is not in its call: it hears of the failure now where it can, and else when it comes.
void WeightSender::note_missed(Peer& peer, const std::shared_ptr<const Failure>& failure) {
  std::deque<MissedSync>& missed = peer.calls->missed;
  if (missed.size() == kMaxUnmet) missed.pop_front();
  const bool connected = peer.link && !peer.link->gone() && !peer.said_bye;
  missed.push_back({sync_, failure, connected, 0, pairing_->session, peer.calls->session});
  if (connected) peer.link->send(FrameType::kFail, sync_, 0, encode(*failure));
}

void WeightSender::fail(ErrorKind kind, int rank, const std::string& message) noexcept {
  if (!active_) return;
  active_ = false;
  const std::string_view phase = phase_;
  const bool had_data = phase == "buckets" || phase == "commit";
  phase_ = "idle";
  hook_ = nullptr;
  slot_.reset();
  planner_.reset();
  try {
    const auto failure = std::make_shared<Failure>();
    failure->kind = kind;
    failure->rank = rank;
    failure->reporter = identity_.rank;
    failure->message = cut_message(message);
    // A receiver that is not in its call yet learns when it comes. But a source that waited in vain for everybody was
    // alone: there was no sync that a receiver could have missed.
    const bool anyone = std::any_of(peers_.begin(), peers_.end(), [](const auto& p) { return p.second.joined; });
    const bool alone = kind == ErrorKind::kTimeout && !anyone;
    for (auto& [other, peer] : peers_) {
      if (alone) continue;
      if (peer.joined) {
        answer(peer, *failure, sync_);
      } else {
        note_missed(peer, failure);
      }
      peer.joined = false;
    }
    settle_data_plane(had_data);
  } catch (...) {
    // The transport did not come to rest: the next sync makes a new one.
    poisoned_ = true;
    drop_data_plane();
  }
}

void WeightSender::close(bool exiting) noexcept {
  if (::getpid() != pid_) {  // a forked child: the connections are the parent's, it alone may end them
    for (auto& [rank, peer] : peers_) peer.link.reset();
    greetings_.clear();
    listener_.reset();
    tcp_listener_.reset();
    drop_data_plane();
    return;
  }
  const std::string_view why = exiting ? "exit" : "close";
  try {
    if (active_)
      fail(ErrorKind::kPeerFailed, identity_.rank,
           concat("rank ", identity_.rank, " closed its session during the sync"));
    std::vector<OwnedFd> readers;
    for (auto& [rank, peer] : peers_) {
      if (peer.link && !peer.link->gone()) readers.push_back(OwnedFd::duplicate(peer.link->fd()));
    }
    drop_data_plane();
    for (auto& ring : retired_) IpcCommunicator::keep_for(std::move(ring), readers);
    retired_.clear();
    for (auto& [rank, peer] : peers_) {
      if (!peer.link) continue;
      peer.link->send(FrameType::kBye, sync_, 0, {reinterpret_cast<const std::byte*>(why.data()), why.size()});
      peer.link->end_sending();
      peer.link.reset();
    }
  } catch (...) {  // a peer that cannot be told sees the connection end
    for (auto& [rank, peer] : peers_) peer.link.reset();
  }
  greetings_.clear();
  // Receivers that connected but were never greeted wait for a word, too.
  for (OwnedFd* listener : {&listener_, &tcp_listener_}) {
    while (*listener) {
      auto fd = accept_one(listener->get());
      if (!fd) break;
      try {
        Link(std::move(*fd))
            .send(FrameType::kBye, sync_, 0, {reinterpret_cast<const std::byte*>(why.data()), why.size()});
      } catch (...) {  // it sees the connection end
      }
    }
  }
  listener_.reset();
  tcp_listener_.reset();
  drop_data_plane();
  plans_.clear();
}

}  // namespace fastsync
