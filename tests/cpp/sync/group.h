// A source and its receivers in one process, a thread a rank, driven the way a session drives them.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bucket/manifest.h"
#include "common/error.h"
#include "control/link.h"
#include "support/bounds.h"
#include "support/fake_broadcast.h"
#include "support/shared_device.h"
#include "sync/weight_receiver.h"
#include "sync/weight_sender.h"

namespace fastsync::testing {

// Not 0 and 1, so that a rank which is taken for an index shows.
inline constexpr int kSource = 10;
inline constexpr int kFirstReceiver = 20;
inline constexpr int receiver_rank(int index) { return kFirstReceiver + index; }

// --- what is sent ---------------------------------------------------------------------------------------------------

using Bytes = std::vector<std::byte>;

struct Weights {
  std::vector<TensorMeta> metas;
  std::vector<Bytes> data;

  Weights& add(const std::string& name, std::uint64_t nbytes) {
    TensorMeta meta;
    meta.name = name;
    meta.dtype = "uint8";
    meta.shape = {static_cast<std::int64_t>(nbytes)};
    meta.nbytes = nbytes;
    metas.push_back(std::move(meta));
    data.emplace_back(nbytes);
    return *this;
  }
  Weights& fill(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (Bytes& bytes : data) {
      for (std::byte& b : bytes) b = static_cast<std::byte>(random());
    }
    return *this;
  }
  [[nodiscard]] std::vector<TensorView> views() {
    std::vector<TensorView> out(data.size());
    for (std::size_t i = 0; i < data.size(); ++i) {
      out[i].data = data[i].data();
      out[i].nbytes = data[i].size();
    }
    return out;
  }
  [[nodiscard]] std::shared_ptr<const SyncPlan> plan(std::uint64_t bucket_bytes) const {
    Manifest manifest;
    for (const TensorMeta& meta : metas) manifest.append(meta);
    return SyncPlan::make(std::move(manifest), bucket_bytes);
  }
};

inline Weights weights_of(const std::vector<std::uint64_t>& sizes, std::uint64_t seed) {
  Weights weights;
  for (std::size_t i = 0; i < sizes.size(); ++i) weights.add(concat("layer.", i), sizes[i]);
  weights.fill(seed);
  return weights;
}

// Spans buckets of 1 KiB, ends inside, at and behind their ends, and has empty tensors in every place.
inline Weights some_weights(std::uint64_t seed) {
  return weights_of({0, 100, 1024, 5000, 1, 0, 0, 255, 256, 257, 1023, 3 * 1024, 7, 0}, seed);
}

// --- where it goes --------------------------------------------------------------------------------------------------

class Destinations final : public DestinationBinder {
 public:
  bool strict = true;
  std::map<std::string, Bytes> tensors;
  ReadyLists lists;
  std::function<void(std::size_t first)> at_bind;

  static Destinations like(const Weights& weights) {
    Destinations out;
    for (const TensorMeta& meta : weights.metas)
      out.tensors[std::string(meta.name)] = Bytes(meta.nbytes, std::byte{0xA5});
    return out;
  }

  void bind(const Manifest& manifest, std::size_t first, std::size_t last, std::vector<TensorView>& views) override {
    if (at_bind) at_bind(first);
    for (std::size_t i = first; i < last; ++i) {
      TensorView view;
      const auto found = tensors.find(std::string(manifest[i].name));
      if (found != tensors.end()) {
        if (found->second.size() != manifest[i].nbytes) {
          throw ManifestMismatch(
              concat("tensor ", describe(manifest[i]), " has a destination of ", found->second.size(), " bytes"));
        }
        view.data = found->second.data();
        view.nbytes = found->second.size();
      } else if (strict) {
        throw ManifestMismatch(concat("tensor ", describe(manifest[i]), " has no destination"));
      } else {
        lists.unexpected.emplace_back(manifest[i].name);
      }
      views.push_back(view);
    }
  }
  void finish(const Manifest& manifest) override {
    for (const auto& [name, bytes] : tensors) {
      if (manifest.find(name)) continue;
      if (strict) throw ManifestMismatch(concat("tensor '", name, "' was not sent"));
      lists.missing.push_back(name);
    }
  }

  [[nodiscard]] ::testing::AssertionResult hold(const Weights& weights) const {
    for (std::size_t i = 0; i < weights.metas.size(); ++i) {
      const auto found = tensors.find(std::string(weights.metas[i].name));
      if (found == tensors.end()) return ::testing::AssertionFailure() << weights.metas[i].name << " is not there";
      if (found->second != weights.data[i]) return ::testing::AssertionFailure() << weights.metas[i].name << " differs";
    }
    return ::testing::AssertionSuccess();
  }
  [[nodiscard]] bool untouched() const {
    for (const auto& [name, bytes] : tensors) {
      for (const std::byte b : bytes) {
        if (b != std::byte{0xA5}) return false;
      }
    }
    return true;
  }
};

// --- one call of one rank -------------------------------------------------------------------------------------------

// Where a rank is in its call. A test's `at` may throw there, or wait.
enum class Step {
  kOpened,  // before it joins
  kJoined,  // everybody is there (source); the manifest is known (receiver)
  kBound,   // receiver: its destinations fit
  kReady,   // everybody's do
  kBucket,  // after each item pushed by a generator, or each bucket taken by next_bucket()
  kMoved,   // everything is sent, or has come
};

inline std::ostream& operator<<(std::ostream& out, Step step) {
  constexpr std::array<const char*, 6> kNames{"Opened", "Joined", "Bound", "Ready", "Bucket", "Moved"};
  return out << kNames.at(static_cast<std::size_t>(step));
}

using At = std::function<void(Step step, std::size_t count)>;

// What an error in code that is not ours looks like: a loader's, a generator's.
class UserError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Outcome {
  bool ok = false;
  bool source_closed = false;
  bool user_error = false;
  std::optional<ErrorKind> kind;
  int rank = -1;
  std::string message;
  Clock::time_point when{};  // the rank knew
  bool reused = false;       // the plan
  bool wrote = false;
  std::uint64_t version = 0;
  std::uint64_t buckets = 0;
  ReadyLists lists;
};

inline std::ostream& operator<<(std::ostream& out, const Outcome& outcome) {
  if (outcome.ok) return out << "committed version " << outcome.version;
  if (outcome.source_closed) return out << "source closed";
  out << (outcome.user_error ? "own error" : concat("kind ", outcome.kind ? static_cast<int>(*outcome.kind) : -1));
  return out << ", rank " << outcome.rank << ": " << outcome.message;
}

// Runs body(), and tells the session's other half what it threw.
template <typename Half, typename Body>
Outcome run_call(Half& half, int own_rank, Body body) {
  Outcome out;
  const auto fail = [&](ErrorKind kind, int rank, const std::string& message) {
    out.when = Clock::now();
    if constexpr (std::is_same_v<Half, WeightReceiver>) out.wrote = half.wrote();
    half.fail(kind, rank, message);
  };
  try {
    body(out);
    out.ok = true;
    out.when = Clock::now();
  } catch (const Error& error) {
    out.kind = error.kind();
    out.rank = error.rank();
    out.message = error.what();
    const bool unnamed = error.rank() < 0;
    fail(error.kind(), unnamed ? own_rank : error.rank(),
         unnamed ? concat("rank ", own_rank, ": ", error.what()) : error.what());
  } catch (const SourceClosed& closed) {
    out.source_closed = true;
    fail(ErrorKind::kPeerFailed, own_rank, closed.what());
  } catch (const std::exception& error) {
    out.user_error = true;
    out.message = error.what();
    fail(ErrorKind::kPeerFailed, own_rank, error.what());
  }
  return out;
}

// Fake process groups, one for each generation of the data plane. They keep the buckets that they may still write to.
class FakeGroups {
 public:
  explicit FakeGroups(int receivers) : receivers_(receivers) {}
  [[nodiscard]] ExternalOps ops(std::uint64_t generation, int rank) {
    const std::lock_guard lock(mutex_);
    auto& group = groups_[generation];
    if (!group) group = std::make_unique<FakeBroadcast>(receivers_);
    return group->ops(rank);
  }
  void keep(std::shared_ptr<const Buffer> memory) {
    const std::lock_guard lock(mutex_);
    memory_.push_back(std::move(memory));
  }
  [[nodiscard]] std::size_t made() {
    const std::lock_guard lock(mutex_);
    return groups_.size();
  }
  // Where the ranks' tensors are on a device: that of the source (0) or of a receiver (from 1).
  void use_devices(std::vector<std::unique_ptr<RankDevice>> devices) { devices_ = std::move(devices); }
  [[nodiscard]] RankDevice* device(int rank) {
    return devices_.empty() ? nullptr : devices_.at(static_cast<std::size_t>(rank)).get();
  }

 private:
  std::vector<std::unique_ptr<RankDevice>> devices_;
  int receivers_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<const Buffer>> memory_;
  std::map<std::uint64_t, std::unique_ptr<FakeBroadcast>> groups_;  // last: their links end first
};

struct SourceCall {
  Weights* weights = nullptr;
  SyncOptions options{.version = 1, .bucket_bytes = 1024};
  std::shared_ptr<const SyncPlan> plan =
      nullptr;  // made from `weights` where there is none; streaming: what was recorded
  bool streaming = false;
  std::string asked = "auto";
  std::chrono::nanoseconds timeout = kLongTimeout;
  At at = [](Step, std::size_t) {};
  Wait::Hook hook = nullptr;
  std::shared_ptr<const SyncPlan>* recorded = nullptr;  // streaming: where the new plan goes
};

struct ReceiverCall {
  Destinations* into = nullptr;
  bool pull = false;  // next_bucket() instead of receive_into()
  std::string asked = "auto";
  std::chrono::nanoseconds timeout = kLongTimeout;
  At at = [](Step, std::size_t) {};
  Wait::Hook hook = nullptr;
};

inline Outcome run_source(WeightSender& sender, const std::string& transport, FakeGroups* groups,
                          const SourceCall& call) {
  return run_call(sender, kSource, [&](Outcome& out) {
    sender.open(call.timeout, call.hook);
    RankDevice* const device = groups == nullptr ? nullptr : groups->device(0);
    void* const stream = device == nullptr ? nullptr : device->caller.view().handle();
    if (device != nullptr) sender.use_device(device->runtime, stream);
    try {
      call.at(Step::kOpened, 0);
    } catch (...) {
      sender.connect_all();  // so that everybody can be told
      throw;
    }
    (void)sender.join(call.asked, {transport});
    call.at(Step::kJoined, 0);
    auto plan = call.plan;
    if (!plan && !call.streaming) plan = call.weights->plan(call.options.bucket_bytes);
    out.version = call.options.version;
    out.reused = sender.begin(call.options, plan, call.streaming);
    if (sender.needs_external()) {
      sender.attach_external(groups->ops(sender.comm_generation(), 0));
      groups->keep(sender.external_memory());
    }
    call.at(Step::kReady, 0);
    const std::vector<TensorView> views = call.weights->views();
    if (call.streaming) {
      for (std::size_t i = 0; i < views.size(); ++i) {
        sender.push(call.weights->metas[i], views[i], stream);
        call.at(Step::kBucket, i);
      }
      const auto turned_out = sender.finish_stream();
      out.reused = out.reused && sender.followed_plan();
      if (call.recorded != nullptr) *call.recorded = turned_out;
    } else {
      sender.send_plan(views);
    }
    out.buckets = sender.buckets_sent();
    call.at(Step::kMoved, 0);
    out.lists = sender.commit();
  });
}

inline void take_by_bucket(WeightReceiver& receiver, Destinations& into, const At& at) {
  std::size_t count = 0;
  std::vector<TensorView> views;
  while (const auto bucket = receiver.next_bucket(false)) {
    const Manifest& manifest = receiver.manifest();
    for (const WeightReceiver::Piece& piece : bucket->pieces) {
      const TensorMeta& meta = manifest[piece.fragment.tensor];
      Bytes& bytes = into.tensors.at(std::string(meta.name));
      if (piece.fragment.tensor_offset + piece.fragment.nbytes > bytes.size())
        throw UserError(concat(meta.name, " is too large"));
      std::memcpy(bytes.data() + piece.fragment.tensor_offset, bucket->data + piece.fragment.bucket_offset,
                  piece.fragment.nbytes);
    }
    at(Step::kBucket, count++);
  }
  // The names of what had no byte are known now.
  into.finish(receiver.manifest());
}

inline Outcome run_receiver(WeightReceiver& receiver, int index, FakeGroups* groups, const ReceiverCall& call) {
  return run_call(receiver, receiver_rank(index), [&](Outcome& out) {
    receiver.open(call.timeout, call.hook);
    if (RankDevice* const device = groups == nullptr ? nullptr : groups->device(index + 1)) {
      receiver.use_device(device->runtime, device->caller.view().handle(), call.pull);
      receiver.verify_first(call.pull);
    }
    try {
      call.at(Step::kOpened, 0);
    } catch (...) {
      receiver.announce();  // so that the source hears of it
      throw;
    }
    out.version = receiver.join(call.asked).version;
    call.at(Step::kJoined, 0);
    if (!call.pull) receiver.bind(*call.into);
    call.at(Step::kBound, 0);
    receiver.ready();
    if (receiver.needs_external()) {
      receiver.attach_external(groups->ops(receiver.begin().comm_generation, index + 1));
      groups->keep(receiver.external_memory());
    }
    call.at(Step::kReady, 0);
    if (call.pull) {
      take_by_bucket(receiver, *call.into, call.at);
    } else {
      receiver.receive_into(*call.into);
    }
    call.at(Step::kMoved, 0);
    out.reused = receiver.held_plan() && !receiver.deviated();
    out.buckets = receiver.buckets_received();
    receiver.commit(call.into->lists);
    out.lists = call.into->lists;
  });
}

// --- the ranks ------------------------------------------------------------------------------------------------------

// In slices, so that a machine that was suspended in between has lost one of them and not all.
template <typename Future>
[[nodiscard]] bool is_ready_within(const Future& future, std::chrono::nanoseconds time) {
  constexpr std::chrono::milliseconds kSlice{100};
  for (auto left = time / kSlice; left > 0; --left) {
    if (future.wait_for(kSlice) == std::future_status::ready) return true;
  }
  return false;
}

// A broken test ends here and not at the runner's limit.
template <typename T>
T get(std::future<T> future) {
  if (!is_ready_within(future, 2 * kLongTimeout)) {
    std::fprintf(stderr, "a rank did not come back\n");
    std::abort();
  }
  return future.get();
}

// For a rank that another thread lets go on.
template <typename Future>
void await(const Future& future) {
  if (!is_ready_within(future, kLongTimeout)) throw std::runtime_error("nobody let this rank go on");
}

inline Identity identity_of(int rank, int receivers) {
  Identity identity;
  identity.rank = rank;
  identity.source = kSource;
  identity.ranks.push_back(kSource);
  for (int i = 0; i < receivers; ++i) identity.ranks.push_back(receiver_rank(i));
  identity.token = "the group's token";
  identity.host = "one host";
  identity.library_version = "test";
  return identity;
}

class Group {
 public:
  Group(std::string transport, int receivers, bool connected = true)
      : transport_(std::move(transport)), size_(receivers), groups_(receivers) {
    if (transport_ == "ipc") {
      std::vector<std::unique_ptr<RankDevice>> devices;
      for (int i = 0; i <= receivers; ++i) {
        devices.push_back(std::make_unique<RankDevice>(SharedDevice::create(static_cast<std::uint64_t>(i))));
      }
      groups_.use_devices(std::move(devices));
    }
    for (int i = 0; i <= receivers; ++i) pairings_.push_back(std::make_shared<Pairing>());
    known_.assign(static_cast<std::size_t>(receivers), 1);
    reopen_source();
    for (int i = 0; i < receivers; ++i) {
      receivers_.push_back(make_receiver(i));
      if (connected) connect(i);
    }
  }

  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] WeightSender& sender() { return *sender_; }
  [[nodiscard]] WeightReceiver& receiver(int index) { return *receivers_[static_cast<std::size_t>(index)]; }
  [[nodiscard]] FakeGroups& groups() { return groups_; }

  // A closed session's next one, of the same rank in the same group.
  void reopen_source() {
    if (sender_) ++pairings_.front()->session;
    sender_ = std::make_unique<WeightSender>(identity_in(kSource), pairings_.front());
  }
  void reopen_receiver(int index) {
    ++pairings_[static_cast<std::size_t>(index) + 1]->session;
    receivers_[static_cast<std::size_t>(index)] = make_receiver(index);
    connect(index);
  }
  void connect(int index) {
    if (known_[static_cast<std::size_t>(index)] != pairings_.front()->session) {  // another token, another object
      receiver(index).close(false);
      receivers_[static_cast<std::size_t>(index)] = make_receiver(index);
      known_[static_cast<std::size_t>(index)] = pairings_.front()->session;
    }
    auto socket = connect_unix(sender_->unix_name());
    if (!socket) throw InternalError("the source does not listen");
    receiver(index).connect(std::move(*socket));
  }

  [[nodiscard]] std::future<Outcome> start_source(SourceCall call) {
    return std::async(std::launch::async, [this, call] { return run_source(*sender_, transport_, &groups_, call); });
  }
  [[nodiscard]] std::future<Outcome> start_receiver(int index, ReceiverCall call) {
    return std::async(std::launch::async,
                      [this, index, call] { return run_receiver(receiver(index), index, &groups_, call); });
  }

  // A whole sync that must succeed.
  void sync(const SourceCall& call, bool pull = false) {
    std::vector<Destinations> into(static_cast<std::size_t>(size_), Destinations::like(*call.weights));
    std::vector<std::future<Outcome>> got;
    for (int i = 0; i < size_; ++i) {
      got.push_back(start_receiver(i, {.into = &into[static_cast<std::size_t>(i)], .pull = pull}));
    }
    const Outcome sent = get(start_source(call));
    EXPECT_TRUE(sent.ok) << sent;
    for (int i = 0; i < size_; ++i) {
      const Outcome outcome = get(std::move(got[static_cast<std::size_t>(i)]));
      EXPECT_TRUE(outcome.ok) << "receiver " << i << ": " << outcome;
      EXPECT_EQ(outcome.version, call.options.version);
      EXPECT_TRUE(into[static_cast<std::size_t>(i)].hold(*call.weights)) << "receiver " << i;
    }
  }
  void sync_again(std::uint64_t seed = 77) {
    Weights weights = some_weights(seed);
    SourceCall call{.weights = &weights};
    call.options.version = 1000 + seed;
    sync(call);
  }

 private:
  [[nodiscard]] std::unique_ptr<WeightReceiver> make_receiver(int index) const {
    return std::make_unique<WeightReceiver>(identity_in(receiver_rank(index)),
                                            pairings_[static_cast<std::size_t>(index) + 1]);
  }

  std::string transport_;
  int size_;
  FakeGroups groups_;  // outlives the communicators
  // Every session of the source has a token of its own.
  [[nodiscard]] Identity identity_in(int rank) const {
    Identity identity = identity_of(rank, size_);
    const std::uint64_t session = pairings_.front()->session;
    if (session > 1) identity.token += concat(", session ", session);
    return identity;
  }

  std::vector<std::shared_ptr<Pairing>> pairings_;  // the source's first
  std::vector<std::uint64_t> known_;                // the source's session that each receiver's object is for
  std::unique_ptr<WeightSender> sender_;
  std::vector<std::unique_ptr<WeightReceiver>> receivers_;
};

// Every test of this kind runs over shared memory and over somebody else's broadcast.
class EveryTransport : public ::testing::TestWithParam<const char*> {};

}  // namespace fastsync::testing
