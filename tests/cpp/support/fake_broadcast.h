// A process group in one process, for what drives somebody else's broadcast.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/external/external_communicator.h"
#include "common/error.h"
#include "device/host/host_runtime.h"

namespace fastsync::testing {

using namespace std::chrono_literals;

// A process group in one process: broadcast i of one rank meets broadcast i of the others. Bytes move on streams with
// random delays, one for each receiver, so a bucket that is touched too early shows wrong bytes (and TSan sees it).
class FakeBroadcast {
 public:
  explicit FakeBroadcast(int receivers)
      : runtime_(HostRuntime::create({.delay_seed = 7, .max_delay = 100us})),
        started_(static_cast<std::size_t>(receivers) + 1, 0) {
    for (int i = 0; i < receivers; ++i) links_.emplace_back(runtime_, concat("link ", i));
  }

  // Rank 0 is the root.
  [[nodiscard]] ExternalOps ops(int rank) {
    return {
        [this, rank](std::byte* data, std::uint64_t nbytes) { return start(rank, data, nbytes); },
        [this, rank](std::uint64_t handle, std::chrono::milliseconds timeout) { return wait(rank, handle, timeout); },
        [this](std::uint64_t) { ++dropped; },
    };
  }

  [[nodiscard]] std::uint64_t started(int rank) {
    const std::lock_guard lock(mutex_);
    return started_[static_cast<std::size_t>(rank)];
  }
  void fail_from_now_on() {
    const std::lock_guard lock(mutex_);
    broken_ = true;
    changed_.notify_all();
  }

  std::atomic<std::uint64_t> dropped{0};

 private:
  struct Member {
    std::byte* data = nullptr;
    std::uint64_t nbytes = 0;
    bool done = false;
  };
  struct Operation {
    std::map<int, Member> members;
  };

  std::uint64_t start(int rank, std::byte* data, std::uint64_t nbytes) {
    const std::lock_guard lock(mutex_);
    const std::uint64_t number = started_[static_cast<std::size_t>(rank)]++;
    Operation& operation = operations_[number];
    operation.members[rank] = {data, nbytes, false};
    const auto root = operation.members.find(0);
    if (root == operation.members.end()) return number;
    for (auto& [member_rank, member] : operation.members) {
      if (member_rank != 0 && (rank == 0 || rank == member_rank)) move_bytes(number, member_rank, root->second, member);
    }
    return number;
  }

  void move_bytes(std::uint64_t number, int rank, const Member& from, const Member& to) {
    const StreamView link = links_[static_cast<std::size_t>(rank) - 1].view();
    const bool sizes_agree = from.nbytes == to.nbytes;
    if (sizes_agree) runtime_->copy(to.data, from.data, to.nbytes, link);
    runtime_->enqueue(link, [this, number, rank, sizes_agree] {
      const std::lock_guard lock(mutex_);
      if (!sizes_agree) broken_ = true;
      Operation& operation = operations_[number];
      operation.members[rank].done = true;
      std::size_t done = 0;
      for (const auto& [other, member] : operation.members) done += (other != 0 && member.done) ? 1 : 0;
      if (done == links_.size()) operation.members[0].done = true;
      changed_.notify_all();
    });
  }

  bool wait(int rank, std::uint64_t handle, std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    const auto done = [&] { return broken_ || operations_[handle].members[rank].done; };
    changed_.wait_for(lock, timeout, done);
    if (broken_) throw CommError("fake broadcast: the group is broken");
    return done();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, Operation> operations_;
  bool broken_ = false;
  std::shared_ptr<HostRuntime> runtime_;
  std::vector<std::uint64_t> started_;
  std::vector<Stream> links_;  // last: their workers use the rest
};

}  // namespace fastsync::testing
