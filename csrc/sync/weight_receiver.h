// A receiver's half of the protocol: one object per (group, source), kept over all syncs.
//
//   connect()       once, and again when the source reopened
//   join()          this rank is in its call; returns what the source is about to send
//   ready()         its destinations fit; everybody's do
//   next_bucket()   a verified bucket, in order, until it says no more    -- or --
//   receive_into()  all of them, straight into the destinations
//   commit()        everything arrived and was verified; the version moves         -- or --
//   verified() ... conclude()   the same, where another session gives the verdict
//   fail()          at any point: tells the source, which tells the others
//
// Ownership: the control connection, the mapped or own buckets, the plan cache. Destinations stay the caller's.
// Threads: one at a time; none are started. Streams: host memory.
// Errors: as WeightSender. SourceClosed when the source closed its session on purpose: connect() to its next one.
#pragma once

#include <chrono>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bucket/device_packer.h"
#include "bucket/packer.h"
#include "comm/communicator.h"
#include "comm/external/external_communicator.h"
#include "control/link.h"
#include "sync/pairing.h"
#include "sync/ring_door.h"
#include "sync/sync_types.h"

namespace fastsync {

// Not a failure: the source closed (or reopened) its session; the receiver looks for the new one.
class SourceClosed : public std::runtime_error {
 public:
  SourceClosed() : std::runtime_error("the source closed its session") {}
};

// Finds destinations for manifest entries. Throws ManifestMismatch or InvalidArgument naming the tensor.
class DestinationBinder {
 public:
  virtual ~DestinationBinder() = default;
  // Appends one view per entry of [first, last) to `views`; an empty view where there is no destination.
  virtual void bind(const Manifest& manifest, std::size_t first, std::size_t last, std::vector<TensorView>& views) = 0;
  // No more entries will come: everything that is missing is known.
  virtual void finish(const Manifest& manifest) = 0;
};

class WeightReceiver {
 public:
  using Hook = Wait::Hook;

  // `pairing` outlives sessions: the next one of this (group, source) is given the same.
  explicit WeightReceiver(Identity identity, std::shared_ptr<Pairing> pairing = std::make_shared<Pairing>());
  ~WeightReceiver();
  WeightReceiver(const WeightReceiver&) = delete;
  WeightReceiver& operator=(const WeightReceiver&) = delete;

  // Starts a call: later waits last at most `timeout` without progress and run `hook`.
  void open(std::chrono::nanoseconds timeout, Hook hook);
  [[nodiscard]] bool connected() const noexcept { return link_ != nullptr && !link_->gone(); }
  // The next call fails without the source: it is known already that the sync it belongs to failed.
  [[nodiscard]] bool has_missed() const noexcept {
    return !calls_.missed.empty() && calls_.missed.front().in.own == pairing_->session;
  }
  // True when connected: false when nobody listens there any more. Throws what the source rejects with.
  bool connect(OwnedFd socket);

  // This rank's tensors lie on a device, or may (`flexible`: a loader takes them wherever they come); `stream` (native
  // handle) is where the caller works on them. `verifies_first`: the caller's code is shown buckets, so each must be
  // checked before. Between open() and join(); not called: host tensors.
  void use_device(std::shared_ptr<DeviceRuntime> runtime, void* stream, bool flexible);
  void verify_first(bool value) noexcept { verifies_first_ = value; }
  // Whether this sync's buckets, and so its tensors, lie on the device.
  [[nodiscard]] bool on_device() const noexcept { return on_device_; }

  // Sends Join without waiting: for a call that fails before it can take part, so that the source hears why.
  void announce();
  // Sends Join for a call that takes part, without waiting. join() does it where this was not called: it is apart, so that
  // a caller of several sessions asks all of them before it waits for one.
  void ask(const std::string& transport);
  // Waits for Begin and the whole manifest it announces.
  const Begin& join(const std::string& transport);
  [[nodiscard]] const Manifest& manifest() const noexcept { return deviated_ || !plan_ ? grown_ : plan_->manifest; }
  [[nodiscard]] const Begin& begin() const noexcept { return begin_; }
  [[nodiscard]] bool held_plan() const noexcept { return held_plan_; }
  // A generator at the source left the plan that it was expected to follow.
  [[nodiscard]] bool deviated() const noexcept { return deviated_; }

  // Finds the destinations of everything that was announced, before any of it is written (streaming: as they come).
  void bind(DestinationBinder& binder);
  // Tells the source, and waits until every rank is ready.
  void ready();
  [[nodiscard]] bool needs_external() const noexcept { return needs_external_; }
  void attach_external(ExternalOps ops);
  // What the external data plane's operations write to: to be kept alive as long as they run.
  [[nodiscard]] std::shared_ptr<const Buffer> external_memory() const;

  // `stamp`: as WeightSender::send_plan(). Takes at most `at_most` buckets and returns whether that was all of them: a
  // caller that drives several sessions takes turns, and calls again until it is.
  bool receive_into(DestinationBinder& binder, std::uint64_t stamp = 0,
                    std::size_t at_most = std::numeric_limits<std::size_t>::max());

  struct Piece {
    Fragment fragment;
    bool completes = false;  // the tensor's last byte is here
  };
  struct Bucket {
    std::byte* data = nullptr;
    std::uint64_t used_bytes = 0;
    std::vector<Piece> pieces;
    std::size_t tensors_begin = 0;  // tensors that are complete after this bucket and were not before
    std::size_t tensors_end = 0;
  };
  // Verified when the source asked for it. Valid until release_bucket(). Empty at the end, when the manifest is whole.
  [[nodiscard]] std::optional<Bucket> next_bucket(bool exposed);
  void release_bucket();
  // Keeps the memory of lent buckets mapped: a callee that holds on to a tensor reads stale bytes, but no fault.
  [[nodiscard]] std::shared_ptr<void> bucket_owner() const { return comm_; }

  // Tells the source that everything arrived and was verified. `lists`: names for its report.
  void verified(const ReadyLists& lists);
  // verified(), and waits for the verdict.
  void commit(const ReadyLists& lists);
  // After verified(): ends the call as committed, because another session has given the verdict. Waits for nothing.
  void conclude() noexcept;

  // `about_destination`: the others see ManifestMismatch. Never throws.
  void fail(ErrorKind kind, int rank, const std::string& message) noexcept;
  void close(bool exiting) noexcept;
  void check() { tick(); }
  [[nodiscard]] std::chrono::nanoseconds timeout() const noexcept { return timeout_; }

  [[nodiscard]] int source() const noexcept { return identity_.source; }
  [[nodiscard]] bool active() const noexcept { return active_; }
  [[nodiscard]] std::uint64_t sync() const noexcept { return sync_; }
  // The last sync that was committed; 0: none.
  [[nodiscard]] std::uint64_t committed_sync() const noexcept { return committed_sync_; }
  [[nodiscard]] bool began() const noexcept { return began_; }
  // True once a destination byte may have been written in this sync.
  [[nodiscard]] bool wrote() const noexcept { return wrote_; }
  [[nodiscard]] const PhaseSeconds& phases() const noexcept { return phases_; }
  [[nodiscard]] std::uint64_t buckets_received() const noexcept { return next_bucket_; }
  [[nodiscard]] std::uint64_t bytes_received() const noexcept { return bytes_; }
  [[nodiscard]] std::uint64_t staging_bytes() const noexcept { return comm_ ? comm_->staging_bytes() : 0; }

 private:
  class Headers;

  void attach_shared();
  void connect_nccl();
  // Of a fan-out; see weight_receiver_fanout.cc.
  [[nodiscard]] std::vector<std::byte> take_seat();
  void connect_seat();
  void pump_ring();
  void begin_device();
  void finish_device();
  void settle_data_plane(bool began);
  void tick();
  void throw_if_over();
  void end_call() noexcept;
  void pump();
  void handle(Frame& frame);
  void wait_until(const char* what, const std::function<bool()>& done);
  [[noreturn]] void time_out(const std::string& what);
  void throw_if_failed() const;
  void say_waiting();
  // Whom the source waits for, as far as this rank has heard; -1: for nobody.
  [[nodiscard]] int held_up_by() const noexcept;
  void enter_call();
  void send_join(Join join);
  void send_failure(const Failure& failure);
  std::optional<BucketHeader> await_bucket();
  const BucketLayout& understand(const BucketHeader& header);
  void verify(const BucketHeader& header, std::uint64_t bucket, const Checksum& sum) const;
  void end_stream();
  void drop_data_plane() noexcept;

  Identity identity_;
  pid_t pid_;
  std::unique_ptr<Link> link_;
  std::optional<Error> lost_;
  std::optional<Error> failure_;
  std::shared_ptr<Pairing> pairing_;
  ReceiverCalls& calls_;
  bool source_closed_ = false;
  bool welcomed_ = false;

  std::uint64_t sync_ = 0;  // current (or last) sync number
  std::uint64_t committed_sync_ = 0;
  bool active_ = false;
  bool joined_ = false;
  bool began_ = false;
  bool go_ = false;
  bool committed_ = false;
  bool wrote_ = false;
  bool failed_by_source_ = false;
  std::chrono::nanoseconds timeout_{};
  Hook hook_;
  std::unique_ptr<Wait> wait_;
  Clock::time_point waiting_since_{};
  Clock::time_point last_said_{};
  Clock::time_point last_tick_{};
  const char* phase_ = "idle";
  int stalled_rank_ = -1;  // whom the source waits for
  Clock::time_point stalled_at_{};

  Begin begin_;
  std::shared_ptr<const SyncPlan> plan_;
  bool held_plan_ = false;
  Manifest grown_;  // the manifest while it arrives
  std::size_t expected_entries_ = 0;
  PlanCache plans_;

  std::shared_ptr<DeviceRuntime> runtime_;  // of this call; null: host memory
  void* caller_stream_ = nullptr;
  bool flexible_ = false;
  bool verifies_first_ = false;
  bool on_device_ = false;
  std::unique_ptr<DevicePacker> device_;      // kept for the next sync on the same device
  std::shared_ptr<DeviceRuntime> device_of_;  // its device
  bool device_began_ = false;
  HostRegistration registered_;           // host buckets that the device reaches; goes before they do
  std::vector<BucketHeader> unverified_;  // headers of buckets whose own checksum the device still computes
  std::vector<Checksum> late_sums_;       // what the source sent at the end
  std::vector<std::byte> descriptor_data_;
  bool descriptors_came_ = false;

  std::unique_ptr<HeaderChannel> headers_;  // over the control link
  std::shared_ptr<Communicator> comm_;      // shared with tensors that were lent to code that is not ours
  std::uint64_t comm_generation_ = 0;
  bool holds_unclosed_ = false;                         // a ring of the source that a broken device holds open
  std::shared_ptr<DeviceRuntime> comm_device_;          // whose memory its buckets are
  std::unique_ptr<RingHost> ring_host_;                 // of a fan-out: this rank leads others on its device
  std::unique_ptr<RingGuest> ring_guest_;               // ... or follows one that is not the source
  std::vector<std::shared_ptr<Communicator>> retired_;  // whose events the source may still have open
  bool needs_external_ = false;
  std::deque<BucketHeader> announced_;
  std::vector<OwnedFd> descriptors_;
  std::uint64_t reader_index_ = 0;

  bool deviated_ = false;
  std::uint64_t deviate_at_ = 0;
  std::unique_ptr<BucketPlanner> planner_;  // streaming
  std::size_t planned_entries_ = 0;
  bool saw_last_ = false;
  std::vector<TensorView> views_;
  std::optional<BucketSlot> slot_;
  std::uint64_t next_bucket_ = 0;
  std::size_t tensors_done_ = 0;
  std::uint64_t bytes_ = 0;
  PhaseSeconds phases_;
};

}  // namespace fastsync
