#include "doubles/nccl/communicator.h"

#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>
#include <span>
#include <unordered_map>

#include "doubles/nccl/launch.h"
#include "doubles/nccl/report.h"
#include "doubles/nccl/seqpacket.h"

namespace fastsync::fake_nccl {
namespace {

const CudaDouble& driver() {
  std::string ignored;
  return *cuda(&ignored);  // there is a communicator, hence there is a driver
}

ncclResult_t closed_meanwhile() {
  return failed(ncclInvalidArgument, "the communicator was destroyed or aborted by another thread meanwhile");
}

bool is_error(ncclResult_t state) { return state != ncclSuccess && state != ncclInProgress; }

}  // namespace

Communicator::Communicator(const Options& options) : options_(options), wake_(make_event()), id_(options.id) {
  journal().live("communicator", 1);
}

Communicator::~Communicator() { journal().live("communicator", -1); }

void Communicator::start(Join join, Joined joined) {
  const std::scoped_lock closing(close_mutex_);
  if (closed_) return;  // somebody who knew it already was quicker
  service_ = std::thread([this, join = std::move(join), joined = std::move(joined)] {
    ::pthread_setname_np(::pthread_self(), "fake-nccl");
    serve(join, joined);
  });
}

// --- Joining ----------------------------------------------------------------------------------------------------------

bool Communicator::sleep_unless_aborted(std::chrono::milliseconds time) const {
  const auto end = std::chrono::steady_clock::now() + time;
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    if (aborted_ || left.count() <= 0) return !aborted_;
    pollfd waiting{wake_.get(), POLLIN, 0};
    (void)::poll(&waiting, 1, static_cast<int>(std::min<std::chrono::milliseconds>(left, kLook).count()));
  }
}

ncclResult_t Communicator::join_by(const Join& join, std::string* why) {
  switch (options_.fault.action) {
    case fake::FaultAction::kFailLater:
      *why = "injected failure of the initialization";
      return static_cast<ncclResult_t>(options_.fault.code);
    case fake::FaultAction::kHang:
      while (sleep_unless_aborted(kLook)) {
      }
      return ncclInProgress;
    case fake::FaultAction::kDelay:
      if (!sleep_unless_aborted(options_.fault.delay)) return ncclInProgress;
      break;
    default: break;
  }
  Mesh mesh;
  ncclUniqueId id = options_.id;
  const ncclResult_t result = join(&mesh, &id, why);
  const std::scoped_lock lock(mutex_);
  id_ = id;
  if (result == ncclSuccess && mesh.window != nullptr) {
    gone_.assign(static_cast<std::size_t>(mesh.nranks), 0);
    lost_ = gone_;
    mesh_ = std::make_shared<const Mesh>(std::move(mesh));
    exchange_ = std::make_unique<Exchange>(*mesh_, options_.settings);
  }
  return result;
}

void Communicator::serve(const Join& join, const Joined& joined) {
  std::string why;
  const ncclResult_t result = join_by(join, &why);
  if (result == ncclInProgress) return;  // aborted
  set_state(result, why);
  {
    const std::scoped_lock lock(mutex_);
    joined_ = true;
  }
  changed_.notify_all();
  if (joined) joined(result);
  if (mesh() != nullptr) watch();
}

ncclResult_t Communicator::wait_joined() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return joined_ || aborted_; });
  return aborted_ ? ncclInvalidUsage : state_;
}

// --- The service thread -----------------------------------------------------------------------------------------------

void Communicator::watch() {
  const std::shared_ptr<const Mesh> mesh = this->mesh();
  for (;;) {
    std::vector<pollfd> waiting{{wake_.get(), POLLIN, 0}};
    std::vector<int> ranks{-1};
    for (int rank = 0; rank < mesh->nranks; ++rank) {
      if (rank == mesh->rank || lost_[static_cast<std::size_t>(rank)] != 0) continue;
      waiting.push_back({mesh->peers[static_cast<std::size_t>(rank)].get(), POLLIN, 0});
      ranks.push_back(rank);
    }
    if (::poll(waiting.data(), waiting.size(), -1) < 0) continue;  // EINTR
    drain_event(wake_.get());
    for (std::size_t i = 1; i < waiting.size(); ++i) {
      if (waiting[i].revents != 0) hear(ranks[i]);
    }
    {
      const std::scoped_lock lock(mutex_);
      if (stop_) return;
    }
    run_jobs();
    if (finalize_step()) changed_.notify_all();
  }
}

// A byte is a goodbye; the end without one is a death, or an abort.
void Communicator::hear(int peer) {
  std::byte byte{};
  const auto index = static_cast<std::size_t>(peer);
  if (receive_message(mesh_->peers[index].get(), std::span(&byte, 1))) {
    gone_[index] = 1;
    return;
  }
  const bool expected = gone_[index] != 0;
  gone_[index] = 1;
  lost_[index] = 1;
  if (!expected && options_.settings.peer_loss_is_error) {
    set_state(ncclRemoteError,
              "the connection to rank " + std::to_string(peer) + " ended: its process died or aborted");
  }
}

void Communicator::run_jobs() {
  std::deque<std::function<void()>> jobs;
  {
    const std::scoped_lock lock(mutex_);
    jobs.swap(jobs_);
  }
  for (const auto& job : jobs) job();
}

// True when it has just been done: nothing in flight here, and all ranks say so.
bool Communicator::finalize_step() {
  const std::scoped_lock lock(mutex_);
  if (!finalize_called_ || finalized_ || serving_ != next_ticket_) return false;
  if (!said_bye_) {
    const std::byte bye{1};
    for (const OwnedFd& peer : mesh_->peers) {
      if (peer) (void)send_message(peer.get(), std::span(&bye, 1));
    }
    said_bye_ = true;
  }
  for (std::size_t peer = 0; options_.settings.destroy_waits && peer < gone_.size(); ++peer) {
    if (gone_[peer] == 0 && static_cast<int>(peer) != mesh_->rank) return false;
  }
  finalized_ = true;
  if (!is_error(state_)) state_ = ncclSuccess;
  return true;
}

// --- State ------------------------------------------------------------------------------------------------------------

std::shared_ptr<const Mesh> Communicator::mesh() const {
  const std::scoped_lock lock(mutex_);
  return mesh_;
}

ncclResult_t Communicator::state() const {
  const std::scoped_lock lock(mutex_);
  return state_;
}

ncclResult_t Communicator::ready() const {
  const ncclResult_t now = state();
  if (now != ncclInProgress) return now;
  return failed(ncclInvalidArgument, "the communicator was used before its previous call had come to ncclSuccess");
}

void Communicator::set_state(ncclResult_t state, const std::string& text) {
  {
    const std::scoped_lock lock(mutex_);
    if (is_error(state_)) return;
    state_ = state;
  }
  if (!text.empty()) (void)failed(state, text);
  changed_.notify_all();
}

void Communicator::clear_error() {
  const std::scoped_lock lock(mutex_);
  if (is_error(state_)) state_ = ncclSuccess;
}

// --- Operations -------------------------------------------------------------------------------------------------------

// NCCL connects two ranks when they first need it. Without blocking, that is done by another thread, which then also
// queues the operation: later than the call that asked for it.
bool Communicator::needs_connection(const std::vector<Operation>& operations) {
  if (options_.blocking || options_.settings.defer == Defer::kNever) return false;
  bool fresh = options_.settings.defer == Defer::kAlways;
  for (const Operation& operation : operations) {
    const bool pairwise = operation.kind == Kind::kSend || operation.kind == Kind::kReceive;
    fresh |= connected_.insert({operation.kind, pairwise ? operation.peer : -1}).second;
  }
  return fresh;
}

ncclResult_t Communicator::launch(std::vector<Operation> operations) {
  std::vector<CUstream> streams;
  for (const Operation& operation : operations) {
    if (std::ranges::find(streams, operation.stream) == streams.end()) streams.push_back(operation.stream);
  }
  std::uint64_t ticket = 0;
  bool defer = false;
  {
    const std::scoped_lock lock(mutex_);
    if (stop_) return closed_meanwhile();
    ticket = next_ticket_++;
    defer = needs_connection(operations);
    if (defer && !is_error(state_)) state_ = ncclInProgress;
  }
  journal().live("operation", 1);
  const std::shared_ptr<Communicator> self = shared_from_this();
  auto work = std::make_shared<StreamWork>(
      std::move(streams),
      [self, ticket, all = std::move(operations)](fastsync_fake_op* op) { return self->execute(all, ticket, op); },
      [self, ticket] { return ticket < self->skip_below_; }, [self, ticket] { self->retire(ticket); });
  if (!defer) {
    const CUresult result = work->enqueue("nccl");
    if (result == CUDA_SUCCESS) return ncclSuccess;
    return failed(ncclUnhandledCudaError, "the stream refused the operation: CUDA error " + std::to_string(result));
  }
  CUcontext context = nullptr;
  (void)driver().get_context(&context);
  std::function<void()> job = [self, work = std::move(work), context] {
    (void)driver().set_context(context);
    const CUresult result = work->enqueue("nccl");
    (void)driver().set_context(nullptr);
    if (result == CUDA_SUCCESS) {
      self->set_state(ncclSuccess);
    } else {
      self->set_state(ncclUnhandledCudaError, "the stream refused the operation: CUDA error " + std::to_string(result));
    }
  };
  {
    const std::scoped_lock lock(mutex_);
    if (!stop_) {
      jobs_.push_back(std::move(job));
      signal_event(wake_.get());
      return ncclInProgress;
    }
  }
  return closed_meanwhile();
}

void Communicator::retire(std::uint64_t ticket) {
  journal().live("operation", -1);
  {
    const std::scoped_lock lock(mutex_);
    retired_.insert(ticket);
    while (!retired_.empty() && *retired_.begin() == serving_) {
      retired_.erase(retired_.begin());
      ++serving_;
    }
  }
  changed_.notify_all();
  signal_event(wake_.get());
}

CUresult Communicator::execute(const std::vector<Operation>& operations, std::uint64_t ticket, fastsync_fake_op* op) {
  const Exchange::StopTest stop = [this, ticket, op] { return ticket < skip_below_ || driver().stopping(op) != 0; };
  {
    std::unique_lock lock(mutex_);
    if (stop()) return CUDA_SUCCESS;
    ++running_;
    while (serving_ != ticket && !stop()) changed_.wait_for(lock, kLook);
  }
  CUresult result = CUDA_SUCCESS;
  bool pairwise = false;
  for (const Operation& operation : operations) {
    if (operation.kind == Kind::kSend || operation.kind == Kind::kReceive) {
      pairwise = true;
    } else if (result == CUDA_SUCCESS && !stop()) {
      result = collective(operation, op, stop);
    }
  }
  if (pairwise && result == CUDA_SUCCESS && !stop()) result = point_to_point(operations, op, stop);
  {
    const std::scoped_lock lock(mutex_);
    --running_;
  }
  changed_.notify_all();
  return result;
}

bool Communicator::suffer(const fake::Fault& fault, const Exchange::StopTest& stop) {
  const auto end = std::chrono::steady_clock::now() + fault.delay;
  switch (fault.action) {
    case fake::FaultAction::kFailLater:
      set_state(static_cast<ncclResult_t>(fault.code), "injected failure of an operation");
      return true;
    case fake::FaultAction::kHang: exchange_->wait_for_stop(stop); return true;
    case fake::FaultAction::kDelay: {
      const Exchange::StopTest over = [&] { return stop() || std::chrono::steady_clock::now() >= end; };
      exchange_->wait_for_stop(over);
      return stop();
    }
    default: return false;
  }
}

void Communicator::disagree(const std::string& text, const Exchange::StopTest& stop) {
  journal().violation("mismatch: " + text);
  if (options_.settings.diagnose) {
    set_state(ncclInvalidUsage, text);
  } else {
    exchange_->wait_for_stop(stop);
  }
}

CUresult Communicator::collective(const Operation& operation, fastsync_fake_op* op, const Exchange::StopTest& stop) {
  if (suffer(operation.fault, stop)) return CUDA_SUCCESS;
  const bool gathers = operation.kind == Kind::kAllGather;
  const bool reads = gathers || operation.peer == mesh_->rank;
  const std::uint64_t target_bytes =
      gathers ? operation.nbytes * static_cast<std::uint64_t>(mesh_->nranks) : operation.nbytes;
  void* source = nullptr;
  void* target = nullptr;
  CUresult result = driver().translate(op, operation.target, target_bytes, 1, &target);
  if (result == CUDA_SUCCESS && reads) {
    result = driver().translate(op, operation.source, operation.nbytes, 0, &source);
  }
  if (result != CUDA_SUCCESS) return result;
  CollectiveHeader header;
  header.kind = static_cast<std::uint32_t>(operation.kind);
  header.dtype = operation.dtype;
  header.count = operation.count;
  header.root = gathers ? 0 : operation.peer;
  std::string mismatch;
  const auto* from = static_cast<const std::byte*>(source);
  auto* to = static_cast<std::byte*>(target);
  const Outcome outcome = gathers ? exchange_->all_gather(header, from, to, operation.nbytes, stop, &mismatch)
                                  : exchange_->broadcast(header, from, to, operation.nbytes, stop, &mismatch);
  if (outcome == Outcome::kMismatch) disagree(mismatch, stop);
  if (outcome == Outcome::kDone && operation.fault.action == fake::FaultAction::kCorrupt && from != to) {
    fake::corrupt_bytes(std::span(to, target_bytes), operation.fault.bytes);
  }
  return CUDA_SUCCESS;
}

CUresult Communicator::point_to_point(const std::vector<Operation>& operations, fastsync_fake_op* op,
                                      const Exchange::StopTest& stop) {
  std::vector<PointToPoint> parts;
  for (const Operation& operation : operations) {
    const bool sends = operation.kind == Kind::kSend;
    if (!sends && operation.kind != Kind::kReceive) continue;
    if (suffer(operation.fault, stop)) return CUDA_SUCCESS;
    void* memory = nullptr;
    if (operation.nbytes > 0) {
      const CUresult result =
          driver().translate(op, sends ? operation.source : operation.target, operation.nbytes, sends ? 0 : 1, &memory);
      if (result != CUDA_SUCCESS) return result;
    }
    parts.push_back({sends, operation.peer, static_cast<std::byte*>(memory), operation.nbytes});
  }
  std::string mismatch;
  const Outcome outcome = exchange_->send_and_receive(parts, stop, &mismatch);
  if (outcome == Outcome::kMismatch) disagree(mismatch, stop);
  if (outcome != Outcome::kDone) return CUDA_SUCCESS;
  std::size_t index = 0;
  for (const Operation& operation : operations) {
    if (operation.kind != Kind::kSend && operation.kind != Kind::kReceive) continue;
    const PointToPoint& part = parts[index++];
    if (operation.fault.action == fake::FaultAction::kCorrupt && !part.is_send) {
      fake::corrupt_bytes(std::span(part.memory, part.nbytes), operation.fault.bytes);
    }
  }
  return CUDA_SUCCESS;
}

// --- Endings ----------------------------------------------------------------------------------------------------------

ncclResult_t Communicator::begin_finalize() {
  {
    const std::scoped_lock lock(mutex_);
    if (finalize_called_) return failed(ncclInvalidArgument, "the communicator is being finalized already");
    finalize_called_ = true;
    if (!is_error(state_)) state_ = ncclInProgress;
  }
  signal_event(wake_.get());
  return ncclSuccess;
}

ncclResult_t Communicator::wait_finalized() {
  std::unique_lock lock(mutex_);
  if (!finalize_called_) {
    finalize_called_ = true;
    signal_event(wake_.get());
  }
  changed_.wait(lock, [this] { return finalized_ || aborted_ || stop_; });
  return state_;
}

void Communicator::wake_waiters() {
  if (const auto mesh = this->mesh()) mesh->window->ring(mesh->rank);
  changed_.notify_all();
  signal_event(wake_.get());
}

void Communicator::flush() {
  std::unique_lock lock(mutex_);
  skip_below_ = std::max<std::uint64_t>(skip_below_, next_ticket_);
  lock.unlock();
  wake_waiters();
  lock.lock();
  changed_.wait(lock, [this] { return running_ == 0; });
}

void Communicator::revoke() {
  revoked_ = true;
  flush();
  const std::scoped_lock lock(mutex_);
  finalize_called_ = true;
  finalized_ = true;
  state_ = ncclSuccess;
}

void* Communicator::add_registration() {
  const std::scoped_lock lock(mutex_);
  registrations_.insert(++next_registration_);
  journal().live("registration", 1);
  return reinterpret_cast<void*>(next_registration_);  // NOLINT(performance-no-int-to-ptr): an opaque handle
}

bool Communicator::remove_registration(void* handle) {
  const std::scoped_lock lock(mutex_);
  if (registrations_.erase(reinterpret_cast<std::uintptr_t>(handle)) == 0) return false;
  journal().live("registration", -1);
  return true;
}

bool Communicator::keep_child(std::shared_ptr<Communicator> child) {
  const std::scoped_lock lock(mutex_);
  if (stop_) return false;
  pending_children_.push_back(std::move(child));
  return true;
}

void Communicator::release_child(const Communicator* child) {
  std::vector<std::shared_ptr<Communicator>> released;  // destroyed without the lock
  const std::scoped_lock lock(mutex_);
  std::erase_if(pending_children_, [&](std::shared_ptr<Communicator>& one) {
    if (one.get() != child) return false;
    released.push_back(std::move(one));
    return true;
  });
}

void Communicator::close(bool abort) {
  if (abort) {
    {
      const std::scoped_lock lock(mutex_);  // so that nobody misses it between looking and waiting
      aborted_ = true;
      skip_below_ = std::numeric_limits<std::uint64_t>::max();
    }
    wake_waiters();
  }
  const std::scoped_lock closing(close_mutex_);
  if (closed_) return;
  closed_ = true;
  std::vector<std::shared_ptr<Communicator>> children;
  std::deque<std::function<void()>> jobs;
  {
    const std::scoped_lock lock(mutex_);
    stop_ = true;
    skip_below_ = std::numeric_limits<std::uint64_t>::max();
    children.swap(pending_children_);
    jobs.swap(jobs_);
  }
  wake_waiters();
  jobs.clear();
  for (const auto& child : children) child->close(true);
  if (service_.joinable()) service_.join();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return running_ == 0; });
  const std::shared_ptr<const Mesh> mesh = std::move(mesh_);
  exchange_.reset();
  journal().live("registration", -static_cast<std::int64_t>(registrations_.size()));
  registrations_.clear();
  const ncclUniqueId id = id_;
  lock.unlock();
  if (is_unique_id(id)) close_rendezvous(id);
}

// --- Handles ----------------------------------------------------------------------------------------------------------

namespace {

struct Handles {
  std::mutex mutex;
  std::unordered_map<std::uintptr_t, std::shared_ptr<Communicator>> by_value;
  std::uintptr_t next = 0x4e43434c0000;  // no address of this process; never given out twice
};
// Never destroyed: what nobody destroyed ends with the process.
Handles& handles() {
  static auto* all = new Handles();
  return *all;
}

}  // namespace

ncclComm_t publish(std::shared_ptr<Communicator> communicator) {
  Handles& all = handles();
  const std::scoped_lock lock(all.mutex);
  all.next += 16;
  all.by_value.emplace(all.next, std::move(communicator));
  return reinterpret_cast<ncclComm_t>(all.next);  // NOLINT(performance-no-int-to-ptr): an opaque handle
}

std::shared_ptr<Communicator> find(ncclComm_t handle) {
  Handles& all = handles();
  const std::scoped_lock lock(all.mutex);
  const auto value = reinterpret_cast<std::uintptr_t>(handle);
  if (const auto found = all.by_value.find(value); found != all.by_value.end()) return found->second;
  if (value > 0x4e43434c0000 && value <= all.next) {
    journal().violation("use-after-destroy: a communicator was used after it was destroyed or aborted");
  }
  return nullptr;
}

void withdraw(ncclComm_t handle) {
  Handles& all = handles();
  std::shared_ptr<Communicator> last;  // destroyed without the lock
  const std::scoped_lock lock(all.mutex);
  const auto found = all.by_value.find(reinterpret_cast<std::uintptr_t>(handle));
  if (found == all.by_value.end()) return;
  last = std::move(found->second);
  all.by_value.erase(found);
}

}  // namespace fastsync::fake_nccl
