// One source and its receivers in one process, over any backend: what the conformance suite runs on.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/external/external_communicator.h"
#include "comm/shm/shm_communicator.h"
#include "common/error.h"
#include "support/bounds.h"
#include "support/fake_broadcast.h"

namespace fastsync::testing {

using namespace std::chrono_literals;

inline constexpr int kSourceRank = 10;
inline constexpr int kFirstReceiverRank = 11;

class RankGroup {
 public:
  virtual ~RankGroup() = default;
  [[nodiscard]] virtual Communicator& source() = 0;
  [[nodiscard]] virtual Communicator& receiver(int index) = 0;
  virtual void reset_source(std::uint64_t epoch) { source().reset(epoch); }
  virtual void reset_receiver(int index, std::uint64_t epoch) { receiver(index).reset(epoch); }
  void reset_all(std::uint64_t epoch, int receivers) {
    for (int i = 0; i < receivers; ++i) reset_receiver(i, epoch);
    reset_source(epoch);
  }
};

// --- shm -----------------------------------------------------------------------------------------------------------

class ShmGroup final : public RankGroup {
 public:
  ShmGroup(std::uint32_t buffers, std::uint64_t bucket_bytes, int receivers) {
    std::vector<int> ranks;
    for (int i = 0; i < receivers; ++i) ranks.push_back(kFirstReceiverRank + i);
    source_ = ShmCommunicator::create(buffers, bucket_bytes, ranks, kSourceRank);
    for (int i = 0; i < receivers; ++i) {
      receivers_.push_back(
          ShmCommunicator::attach(source_->control_fd(), source_->data_fd(), static_cast<std::uint32_t>(i)));
    }
  }
  [[nodiscard]] Communicator& source() override { return *source_; }
  [[nodiscard]] Communicator& receiver(int index) override { return *receivers_[static_cast<std::size_t>(index)]; }

 private:
  std::unique_ptr<ShmCommunicator> source_;
  std::vector<std::unique_ptr<ShmCommunicator>> receivers_;
};

// --- external ------------------------------------------------------------------------------------------------------

// The control connections of one source and its receivers.
class FakeControl {
 public:
  explicit FakeControl(int receivers) : inbox_(static_cast<std::size_t>(receivers)), released_(inbox_.size()) {}

  // Rank 0 is the source; each end sees only messages of its own epoch.
  class End final : public HeaderChannel {
   public:
    End(FakeControl& control, int rank) : control_(control), rank_(rank) {}
    void reset(std::uint64_t epoch) {
      const std::lock_guard lock(control_.mutex_);
      epoch_ = epoch;
    }

    void send(const BucketHeader& header) override {
      const std::lock_guard lock(control_.mutex_);
      for (auto& inbox : control_.inbox_) inbox.emplace_back(epoch_, header);
      control_.changed_.notify_all();
    }
    void wait_released(std::uint64_t count, Wait& wait) override {
      for (;;) {
        int slowest = -1;
        {
          std::unique_lock lock(control_.mutex_);
          if (control_.changed_.wait_for(lock, wait.slice(), [&] { return least(&slowest) >= count; })) break;
        }
        wait.check();
        if (wait.expired())
          throw TimeoutError(concat("rank ", slowest, " does not release bucket ", count - 1), slowest);
      }
      wait.progress();
    }
    [[nodiscard]] int slowest_receiver() const noexcept override {
      const std::lock_guard lock(control_.mutex_);
      int slowest = -1;
      (void)least(&slowest);
      return slowest;
    }
    [[nodiscard]] BucketHeader receive(Wait& wait) override {
      BucketHeader header;
      for (;;) {
        {
          std::unique_lock lock(control_.mutex_);
          if (control_.changed_.wait_for(lock, wait.slice(), [&] { return pop(header); })) break;
        }
        wait.check();
        if (wait.expired()) throw TimeoutError(concat("rank ", kSourceRank, " announces no bucket"), kSourceRank);
      }
      wait.progress();
      return header;
    }
    [[nodiscard]] bool try_receive(BucketHeader& header) override {
      const std::lock_guard lock(control_.mutex_);
      return pop(header);
    }
    void report_released(std::uint64_t count) override {
      const std::lock_guard lock(control_.mutex_);
      control_.released_[static_cast<std::size_t>(rank_) - 1] = {epoch_, count};
      control_.changed_.notify_all();
    }

   private:
    [[nodiscard]] bool pop(BucketHeader& header) {
      auto& inbox = control_.inbox_[static_cast<std::size_t>(rank_) - 1];
      while (!inbox.empty() && inbox.front().first < epoch_) inbox.pop_front();
      if (inbox.empty() || inbox.front().first != epoch_) return false;
      header = inbox.front().second;
      inbox.pop_front();
      return true;
    }
    [[nodiscard]] std::uint64_t least(int* rank) const {
      std::uint64_t fewest = UINT64_MAX;
      for (std::size_t i = 0; i < control_.released_.size(); ++i) {
        const auto [epoch, count] = control_.released_[i];
        const std::uint64_t valid = epoch == epoch_ ? count : 0;
        if (valid < fewest) {
          fewest = valid;
          *rank = kFirstReceiverRank + static_cast<int>(i);
        }
      }
      return fewest;
    }
    FakeControl& control_;
    int rank_;
    std::uint64_t epoch_ = 0;
  };

 private:
  friend class End;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<std::pair<std::uint64_t, BucketHeader>>> inbox_;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> released_;
};

class ExternalGroup final : public RankGroup {
 public:
  ExternalGroup(std::uint32_t buffers, std::uint64_t bucket_bytes, int receivers)
      : control_(receivers), broadcast_(std::make_unique<FakeBroadcast>(receivers)) {
    using Role = ExternalCommunicator::Role;
    for (int rank = 0; rank <= receivers; ++rank) {
      ends_.push_back(std::make_unique<FakeControl::End>(control_, rank));
      ranks_.push_back(std::make_unique<ExternalCommunicator>(rank == 0 ? Role::kSource : Role::kReceiver, "fake",
                                                              buffers, bucket_bytes, broadcast_->ops(rank),
                                                              *ends_.back(), kSourceRank));
    }
  }
  ~ExternalGroup() override {
    // The links may still copy into the buckets of a failed test: they end before the memory does.
    std::vector<std::shared_ptr<const Buffer>> memory;
    for (const auto& rank : ranks_) memory.push_back(rank->owned_memory());
    ranks_.clear();
    broadcast_.reset();
  }
  [[nodiscard]] Communicator& source() override { return *ranks_[0]; }
  [[nodiscard]] Communicator& receiver(int index) override { return *ranks_[static_cast<std::size_t>(index) + 1]; }
  void reset_source(std::uint64_t epoch) override {
    ends_[0]->reset(epoch);
    source().reset(epoch);
  }
  void reset_receiver(int index, std::uint64_t epoch) override {
    ends_[static_cast<std::size_t>(index) + 1]->reset(epoch);
    receiver(index).reset(epoch);
  }
  [[nodiscard]] FakeBroadcast& broadcast() { return *broadcast_; }
  [[nodiscard]] FakeControl::End& end(int rank) { return *ends_[static_cast<std::size_t>(rank)]; }

 private:
  FakeControl control_;
  std::unique_ptr<FakeBroadcast> broadcast_;
  std::vector<std::unique_ptr<FakeControl::End>> ends_;
  std::vector<std::unique_ptr<ExternalCommunicator>> ranks_;
};

// --- what is sent, and whether it came ------------------------------------------------------------------------------

// Bytes and headers are functions of (epoch, bucket), so any process can make and check them.
inline std::uint64_t pattern_word(std::uint64_t epoch, std::uint64_t bucket, std::uint64_t word) {
  std::uint64_t x = epoch * 0x9E3779B97F4A7C15ULL + bucket * 0xD1B54A32D192ED03ULL + word + 1;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9ULL;
  return x ^ (x >> 32);
}

inline void fill_pattern(std::byte* data, std::uint64_t nbytes, std::uint64_t epoch, std::uint64_t bucket) {
  for (std::uint64_t at = 0; at < nbytes; at += 8) {
    const std::uint64_t word = pattern_word(epoch, bucket, at);
    std::memcpy(data + at, &word, std::min<std::uint64_t>(8, nbytes - at));
  }
}

inline bool holds_pattern(const std::byte* data, std::uint64_t nbytes, std::uint64_t epoch, std::uint64_t bucket) {
  for (std::uint64_t at = 0; at < nbytes; at += 8) {
    const std::uint64_t word = pattern_word(epoch, bucket, at);
    if (std::memcmp(data + at, &word, std::min<std::uint64_t>(8, nbytes - at)) != 0) return false;
  }
  return true;
}

// Full, empty and odd-sized buckets.
inline std::uint64_t used_bytes_of(std::uint64_t bucket, std::uint64_t bucket_bytes) {
  if (bucket % 7 == 3) return 0;
  if (bucket % 5 == 0) return bucket_bytes;
  return bucket * 977 % bucket_bytes;
}

inline BucketHeader header_of(std::uint64_t epoch, std::uint64_t bucket, std::uint64_t bucket_bytes) {
  BucketHeader header;
  header.index = bucket;
  header.used_bytes = used_bytes_of(bucket, bucket_bytes);
  header.tensors_end = bucket * 3 + epoch;
  header.checksum = {pattern_word(epoch, bucket, 1), pattern_word(epoch, bucket, 2)};
  header.flags = static_cast<std::uint32_t>(bucket);
  return header;
}

inline void send_one(Communicator& source, std::uint64_t epoch, std::uint64_t bucket, Wait& wait) {
  const BucketSlot slot = source.acquire(wait);
  if (slot.index != bucket) throw InternalError(concat("lent bucket ", slot.index, ", expected ", bucket));
  const BucketHeader header = header_of(epoch, bucket, source.bucket_bytes());
  fill_pattern(slot.data, header.used_bytes, epoch, bucket);
  source.send(slot, header, wait);
}

// Receives bucket `bucket`, holds it against what was sent, and returns the slot.
inline BucketSlot receive_one(Communicator& receiver, std::uint64_t epoch, std::uint64_t bucket, Wait& wait) {
  BucketHeader header;
  const BucketSlot slot = receiver.receive(header, wait);
  const BucketHeader expected = header_of(epoch, bucket, receiver.bucket_bytes());
  if (slot.index != bucket || header.index != bucket || header.used_bytes != expected.used_bytes ||
      header.tensors_end != expected.tensors_end || !(header.checksum == expected.checksum) ||
      header.flags != expected.flags) {
    throw InternalError(concat("bucket ", bucket, " of epoch ", epoch, " came with another header (bucket ",
                               header.index, ", ", header.used_bytes, " bytes)"));
  }
  if (!holds_pattern(slot.data, header.used_bytes, epoch, bucket)) {
    throw ChecksumError(concat("bucket ", bucket, " of epoch ", epoch, " came with wrong bytes"));
  }
  return slot;
}

inline void send_all(Communicator& source, std::uint64_t epoch, std::uint64_t buckets, Wait& wait) {
  for (std::uint64_t i = 0; i < buckets; ++i) send_one(source, epoch, i, wait);
  source.flush(wait);
}

inline void receive_all(Communicator& receiver, std::uint64_t epoch, std::uint64_t buckets, Wait& wait) {
  for (std::uint64_t i = 0; i < buckets; ++i) receiver.release(receive_one(receiver, epoch, i, wait));
}

// Runs `body` as one rank; get() throws what it threw. Bodies end by their own Wait's deadline.
template <typename Body>
[[nodiscard]] std::future<void> start_rank(Body body) {
  return std::async(std::launch::async, std::move(body));
}

}  // namespace fastsync::testing
