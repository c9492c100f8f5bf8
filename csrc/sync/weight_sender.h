// The source's half of the protocol: one object per (group, source), kept over all syncs.
//
//   open()       a sync begins: connect whoever is missing
//   join()       every receiver is in its call; agree on the transport
//   begin()      header and, to receivers that lack it, the manifest; every receiver checks its destinations
//   send_plan()  pack and send every bucket of a plan          -- or --
//   push()...finish_stream()   the same, item by item
//   commit()     every receiver verified everything; the version moves
//   fail()       at any point: tells every receiver why
//
// Between open() and commit()/fail() a sync is active. Every sync gets a number; a receiver that was not in its call
// when a sync failed is told when it comes, and its call fails at once, so calls pair up again on every rank.
//
// Ownership: control connections, the data plane, the plan cache. Caller's tensors are only read, until commit()
// returns. Threads: one at a time; none are started. Streams: host memory, unless use_device() named a device: then what
// is packed is what the caller's stream holds when the sync begins (a generator: when the item is pushed), and the
// caller's stream goes on behind the packing.
// Errors: each phase throws the first failure any rank reported (kind and rank kept), PeerLostError when a process
// died (final: the group needs replacing), TimeoutError naming rank and phase. After a throw the caller calls fail().
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bucket/device_packer.h"
#include "bucket/packer.h"
#include "comm/communicator.h"
#include "comm/external/external_communicator.h"
#include "comm/ipc/ipc_communicator.h"
#include "comm/nccl/nccl_library.h"
#include "control/link.h"
#include "sync/pairing.h"
#include "sync/sync_types.h"
#include "sync/transport_choice.h"

namespace fastsync {

class WeightSender {
 public:
  using Hook = Wait::Hook;  // signals and progress; may throw

  // `pairing` outlives sessions: the next one of this (group, source) is given the same.
  explicit WeightSender(Identity identity, std::shared_ptr<Pairing> pairing = std::make_shared<Pairing>());
  ~WeightSender();
  WeightSender(const WeightSender&) = delete;
  WeightSender& operator=(const WeightSender&) = delete;

  [[nodiscard]] const std::string& unix_name() const noexcept { return unix_name_; }
  // Opens a TCP listener beside the Unix one, for receivers on other hosts. Returns its port.
  int listen_tcp();

  // Starts sync number sync(). `hook` runs at least every kPollInterval in every later wait of this sync.
  void open(std::chrono::nanoseconds timeout, Hook hook);
  // Waits until every receiver has a connection. Called by join(); alone when the sync is refused before it begins, so
  // that every rank can be told.
  void connect_all();
  // This sync's tensors lie on a device; `stream` (native handle) is where the caller works on them. Between open() and
  // join(); not called: they lie on the host.
  void use_device(std::shared_ptr<DeviceRuntime> runtime, void* stream);
  // Waits for every receiver. `candidates`: transports this rank can use; `asked`: "auto" or one of them. Returns the
  // transport (see transport_choice.h).
  std::string join(const std::string& asked, const std::vector<std::string>& candidates);
  // Why that transport and none of the others.
  [[nodiscard]] const std::string& transport_reason() const noexcept { return transport_reason_; }

  // `plan` may be null only when `streaming` and nothing was recorded. Returns whether every receiver held the plan.
  bool begin(const SyncOptions& options, std::shared_ptr<const SyncPlan> plan, bool streaming);
  // For transport "gloo": whether a new generation of the data plane must be made now, and its number.
  [[nodiscard]] bool needs_external() const noexcept { return needs_external_; }
  [[nodiscard]] std::uint64_t comm_generation() const noexcept { return comm_generation_; }
  void attach_external(ExternalOps ops);

  // `stamp` changes with any address, shape or stride of the views: tables made for it are used again (0: never).
  void send_plan(std::span<const TensorView> views, std::uint64_t stamp = 0);
  // `stream`: of this item, where tensors are on a device.
  void push(TensorMeta meta, const TensorView& view, void* stream = nullptr);
  // Returns the plan as it turned out, to be kept.
  std::shared_ptr<const SyncPlan> finish_stream();
  [[nodiscard]] bool followed_plan() const noexcept { return !deviated_; }

  // Waits until every receiver has everything and has verified it. commit() begins with it; called by itself where
  // another session gives the verdict (SyncOptions::set_id). Commits nothing: what follows is commit() or fail().
  void verified();
  // Returns the union of what the receivers miss or did not expect, in no particular order. After verified() it waits for
  // nothing more.
  ReadyLists commit();

  // Tells every receiver; brings the data plane to rest, within a bounded time. Never throws, idempotent.
  void fail(ErrorKind kind, int rank, const std::string& message) noexcept;

  // Says goodbye and closes. Local, does not block. `exiting`: the process ends, nobody should wait for it.
  void close(bool exiting) noexcept;

  // Runs the hook and looks at the peers: for callers that wait on something of their own during a sync.
  void check();
  [[nodiscard]] std::chrono::nanoseconds timeout() const noexcept { return timeout_; }

  [[nodiscard]] std::uint64_t sync() const noexcept { return sync_; }
  [[nodiscard]] bool active() const noexcept { return active_; }
  // The last sync that was committed; 0: none.
  [[nodiscard]] std::uint64_t committed_sync() const noexcept { return committed_sync_; }
  [[nodiscard]] const PhaseSeconds& phases() const noexcept { return phases_; }
  [[nodiscard]] std::uint64_t bucket_bytes() const noexcept { return bucket_bytes_; }
  [[nodiscard]] std::uint64_t buckets_sent() const noexcept { return next_bucket_; }
  [[nodiscard]] std::uint64_t bytes_sent() const noexcept { return bytes_; }
  // What the external data plane's operations write to: to be kept alive as long as they run.
  [[nodiscard]] std::shared_ptr<const Buffer> external_memory() const;
  [[nodiscard]] std::uint64_t staging_bytes() const noexcept { return comm_ ? comm_->staging_bytes() : 0; }
  [[nodiscard]] int rank() const noexcept { return identity_.rank; }
  [[nodiscard]] const std::string& transport() const noexcept { return transport_; }
  [[nodiscard]] PlanCache& plans() noexcept { return plans_; }
  // Frees the data plane's buckets; the next sync makes new ones.
  void drop_data_plane() noexcept;
  // The external data plane could not be brought to rest: its owner must park it until its operations end.
  [[nodiscard]] bool external_poisoned() const noexcept { return poisoned_; }

 private:
  struct Peer {
    int rank = -1;
    std::unique_ptr<Link> link;
    std::string host;
    bool said_bye = false;
    bool joined = false;
    bool ready = false;
    bool done = false;
    bool parked = false;                // read no more of its frames in this sync
    bool skip_call = false;             // its current call belongs to a sync that already failed
    Clock::time_point heard{};          // when it last said that it waits for data
    std::uint64_t released = 0;         // buckets it has released, where the data plane does not say
    std::vector<std::byte> ready_data;  // what came with its Ready
    ReadyLists lists;                   // what came with its Done
    std::uint64_t events_of = 0;        // the shared ring for which its events are known
    OwnedFd farewell;                   // its ended connection: it keeps those events until we close that, too
    bool follows = false;               // it gets buckets, and their headers, from its device's leader
    Join join;
    std::optional<Frame> deferred;  // a frame of its next call
    PeerCalls* calls = nullptr;     // in pairing_
  };
  struct Greeting {
    std::unique_ptr<Link> link;
    Clock::time_point since;
  };

  class Headers;  // HeaderChannel over the control links

  void pump();
  void accept_connections();
  bool greet(Greeting& greeting);
  void drain_peer(Peer& peer);
  void handle(Peer& peer, Frame& frame);
  void note_failure(ErrorKind kind, int rank, const std::string& message);
  void throw_if_failed() const;
  void tick();
  void stall(int rank);
  [[nodiscard]] int slowest() const;
  [[noreturn]] void time_out(int rank, const std::string& doing);
  void wait_for(const char* what, const std::function<bool(const Peer&)>& satisfied);
  void send_all(FrameType type, std::uint64_t aux, std::span<const std::byte> payload);
  void send_manifest(Link& link, const Manifest& manifest, std::size_t first, std::size_t last);
  void answer(Peer& peer, const Failure& failure, std::uint64_t sync);
  void note_missed(Peer& peer, const std::shared_ptr<const Failure>& failure);
  void prepare_data_plane(std::uint64_t bucket_bytes, std::uint32_t buffers);
  void send_descriptors(Peer& peer);
  void connect_data_plane();
  // Of a fan-out; see weight_sender_fanout.cc.
  void prepare_fanout();
  void send_seat(Peer& peer);
  void open_door_of(const Peer& leader);
  void connect_fanout();
  void settle_data_plane(bool had_data);
  void begin_device();
  [[nodiscard]] BucketSlot acquire_slot();
  // True where a bucket's checksum must be known before the bucket is sent.
  [[nodiscard]] bool sums_go_first() const;
  void finish_device();
  void stream_fragments(const TensorView& view, std::size_t first_fragment);
  void close_bucket(bool last);
  void send_entries(std::size_t upto);
  [[nodiscard]] std::string where() const;

  Identity identity_;
  pid_t pid_;
  OwnedFd listener_;
  OwnedFd tcp_listener_;
  std::string unix_name_;
  std::map<int, Peer> peers_;
  std::vector<Greeting> greetings_;
  std::optional<Error> lost_;     // a process died: final
  std::optional<Error> failure_;  // first failure of the active sync

  std::shared_ptr<Pairing> pairing_;
  std::uint64_t& sync_;
  std::uint64_t committed_sync_ = 0;
  bool active_ = false;
  bool verified_ = false;
  std::chrono::nanoseconds timeout_{};
  Hook hook_;
  std::unique_ptr<Wait> wait_;
  const char* phase_ = "idle";
  Clock::time_point waiting_since_{};
  Clock::time_point last_stall_{};
  Clock::time_point last_tick_{};

  std::shared_ptr<DeviceRuntime> runtime_;  // of this sync; null: host memory
  void* caller_stream_ = nullptr;
  std::unique_ptr<DevicePacker> device_;      // kept for the next sync on the same device
  std::shared_ptr<DeviceRuntime> device_of_;  // its device
  bool device_began_ = false;
  HostRegistration registered_;  // host buckets that the device reaches; goes before they do

  std::string transport_;
  std::string transport_reason_;
  std::vector<DeviceGroup> groups_;        // of this sync's fan-out
  std::vector<DeviceGroup> seated_;        // of the data plane's
  std::shared_ptr<IpcCommunicator> ring_;  // of a fan-out, where ranks follow this one
  nccl::UniqueId nccl_id_{};
  std::unique_ptr<Headers> headers_;
  std::shared_ptr<Communicator> comm_;
  std::string comm_transport_;
  std::uint64_t comm_generation_ = 0;
  std::uint32_t comm_buffers_ = 0;
  std::vector<std::shared_ptr<Communicator>> retired_;  // shared rings that readers may still have open
  std::shared_ptr<DeviceRuntime> comm_device_;          // whose memory its buckets are
  bool needs_external_ = false;
  bool poisoned_ = false;

  SyncOptions options_;
  std::shared_ptr<const SyncPlan> plan_;
  std::uint64_t bucket_bytes_ = 0;
  PlanCache plans_;
  PhaseSeconds phases_;
  std::uint64_t next_bucket_ = 0;
  std::uint64_t bytes_ = 0;

  // streaming
  bool streaming_ = false;
  bool deviated_ = false;
  std::size_t count_ = 0;         // items pushed
  std::size_t entries_sent_ = 0;  // manifest entries that receivers hold
  Manifest grown_;
  std::unique_ptr<BucketPlanner> planner_;
  std::optional<BucketSlot> slot_;  // the open bucket
  Checksum slot_sum_;
  std::size_t closed_ = 0;  // buckets of the planner that were sent
};

}  // namespace fastsync
