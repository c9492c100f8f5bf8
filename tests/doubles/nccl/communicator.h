// One rank's communicator.
//
// A service thread joins the other ranks, then watches their sockets, hands deferred launches to their streams and
// finalizes. Operations run on the streams they were given, through the CUDA double, one after the other in the order in
// which they were launched, whatever streams that was.
//
// Ownership: shared by the registry, by operations that a stream has not passed yet, and by the parent while a child is on
// its way. close() ends everything: no thread, no descriptor, no mapping is left, and queued operations become nothing.
// Threads: thread-safe. Errors: ncclResult_t with a text in last_error(). The first asynchronous error is kept.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/owned_fd.h"
#include "doubles/common/fault_plan.h"
#include "doubles/nccl/device.h"
#include "doubles/nccl/exchange.h"
#include "doubles/nccl/nccl_types.h"
#include "doubles/nccl/rendezvous.h"
#include "doubles/nccl/settings.h"

namespace fastsync::fake_nccl {

enum class Kind : std::uint32_t { kBroadcast = 1, kAllGather = 2, kSend = 3, kReceive = 4 };

struct Operation {
  Kind kind = Kind::kBroadcast;
  CUdeviceptr source = 0;
  CUdeviceptr target = 0;
  std::uint64_t count = 0;
  std::uint64_t nbytes = 0;
  std::uint32_t dtype = 0;
  int peer = 0;  // or root
  CUstream stream = nullptr;
  fake::Fault fault;
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  struct Options {
    Device device;
    bool blocking = true;
    Settings settings;
    fake::Fault fault;  // of the call that makes it
    ncclUniqueId id{};  // where it joins, if that is known; closed in the end
  };
  // Runs on the service thread. ncclInProgress: it was aborted. `id`: where it joined, if that was not known before.
  using Join = std::function<ncclResult_t(Mesh* mesh, ncclUniqueId* id, std::string* why)>;
  // Runs on the service thread when it has joined, or failed to.
  using Joined = std::function<void(ncclResult_t)>;

  explicit Communicator(const Options& options);
  ~Communicator();  // after close()
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  void start(Join join, Joined joined = {});
  // Until it has joined. Only for blocking communicators.
  [[nodiscard]] ncclResult_t wait_joined();

  [[nodiscard]] const Device& device() const noexcept { return options_.device; }
  [[nodiscard]] const Settings& settings() const noexcept { return options_.settings; }
  [[nodiscard]] bool blocking() const noexcept { return options_.blocking; }
  [[nodiscard]] int wake_fd() const noexcept { return wake_.get(); }
  [[nodiscard]] bool aborted() const noexcept { return aborted_; }
  [[nodiscard]] bool revoked() const noexcept { return revoked_; }
  // Null before it has joined and after it was closed.
  [[nodiscard]] std::shared_ptr<const Mesh> mesh() const;

  // What ncclCommGetAsyncError() says.
  [[nodiscard]] ncclResult_t state() const;
  // Success, or why nothing may be called now.
  [[nodiscard]] ncclResult_t ready() const;
  // An earlier error stays. `text`, if there is one, is for last_error().
  void set_state(ncclResult_t state, const std::string& text = {});
  void clear_error();

  // Queues them as one: on their streams, or later from the service thread (ncclInProgress).
  [[nodiscard]] ncclResult_t launch(std::vector<Operation> operations);

  [[nodiscard]] ncclResult_t begin_finalize();
  [[nodiscard]] ncclResult_t wait_finalized();
  // What was launched so far ends without effect; returns when nothing of it runs.
  void flush();
  void revoke();
  // Ends everything. With `abort`, also what others wait for.
  void close(bool abort);

  // User buffers: only the handles are kept.
  [[nodiscard]] void* add_registration();
  [[nodiscard]] bool remove_registration(void* handle);

  // A split or shrink that is on its way: closed with this one, unless it was released before. False: this one is closed.
  [[nodiscard]] std::uint64_t next_child() noexcept { return ++children_; }
  [[nodiscard]] bool keep_child(std::shared_ptr<Communicator> child);
  void release_child(const Communicator* child);

 private:
  void serve(const Join& join, const Joined& joined);
  [[nodiscard]] ncclResult_t join_by(const Join& join, std::string* why);
  void watch();
  void hear(int peer);
  [[nodiscard]] bool finalize_step();
  [[nodiscard]] bool sleep_unless_aborted(std::chrono::milliseconds time) const;
  void run_jobs();

  [[nodiscard]] CUresult execute(const std::vector<Operation>& operations, std::uint64_t ticket, fastsync_fake_op* op);
  [[nodiscard]] CUresult collective(const Operation& operation, fastsync_fake_op* op, const Exchange::StopTest& stop);
  [[nodiscard]] CUresult point_to_point(const std::vector<Operation>& operations, fastsync_fake_op* op,
                                        const Exchange::StopTest& stop);
  // True: the operation has had its end.
  [[nodiscard]] bool suffer(const fake::Fault& fault, const Exchange::StopTest& stop);
  void disagree(const std::string& text, const Exchange::StopTest& stop);
  void retire(std::uint64_t ticket);
  [[nodiscard]] bool needs_connection(const std::vector<Operation>& operations);
  void wake_waiters();

  const Options options_;
  const OwnedFd wake_;
  std::atomic<bool> aborted_{false};
  std::atomic<bool> revoked_{false};
  std::atomic<std::uint64_t> skip_below_{0};  // operations with a lower ticket end without effect
  std::atomic<std::uint64_t> children_{0};

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  ncclResult_t state_ = ncclInProgress;
  bool joined_ = false;
  bool stop_ = false;
  bool finalize_called_ = false;
  bool said_bye_ = false;
  bool finalized_ = false;
  ncclUniqueId id_;
  std::shared_ptr<const Mesh> mesh_;
  std::unique_ptr<Exchange> exchange_;
  std::vector<char> gone_;  // by peer: it said bye, or its connection ended
  std::vector<char> lost_;  // by peer: its connection ended
  std::deque<std::function<void()>> jobs_;
  std::set<std::pair<Kind, int>> connected_;
  std::uint64_t next_ticket_ = 0;
  std::uint64_t serving_ = 0;
  std::set<std::uint64_t> retired_;
  int running_ = 0;
  std::vector<std::shared_ptr<Communicator>> pending_children_;
  std::set<std::uintptr_t> registrations_;
  std::uintptr_t next_registration_ = 0;

  std::mutex close_mutex_;
  bool closed_ = false;
  std::thread service_;
};

// Gives out handles, which are no addresses, and finds what they stand for: a handle that was destroyed is found out.
[[nodiscard]] ncclComm_t publish(std::shared_ptr<Communicator> communicator);
[[nodiscard]] std::shared_ptr<Communicator> find(ncclComm_t handle);
void withdraw(ncclComm_t handle);

}  // namespace fastsync::fake_nccl
