// What both halves of the protocol share: who takes part, what a sync was asked to do, what came of it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bucket/bucket_plan.h"
#include "bucket/manifest.h"
#include "control/frame.h"

namespace fastsync {

// Who this process is in the group. Ranks are global ranks, as in torch.distributed.
struct Identity {
  int rank = 0;
  int source = 0;
  std::vector<int> ranks;  // of the group, the source included
  std::string token;       // shared through the group's store; a stranger does not know it
  std::string host;        // ranks with equal host ids can share memory and sockets
  std::string library_version;
};

// A manifest and its cuts: made once, kept by both sides, named by fingerprint.
struct SyncPlan {
  Manifest manifest;
  BucketPlan buckets;
  std::uint64_t asked_bytes = 0;  // the bucket size it was made for, before it was rounded and cut down

  [[nodiscard]] static std::shared_ptr<const SyncPlan> make(Manifest manifest, std::uint64_t asked_bytes);
};

// Newest first; bounded, so that a caller whose manifests keep changing does not grow.
class PlanCache {
 public:
  static constexpr std::size_t kCapacity = 4;
  [[nodiscard]] std::shared_ptr<const SyncPlan> find(std::uint64_t fingerprint) const;
  void put(std::shared_ptr<const SyncPlan> plan);
  [[nodiscard]] std::vector<std::uint64_t> fingerprints() const;
  void clear() { plans_.clear(); }

 private:
  std::deque<std::shared_ptr<const SyncPlan>> plans_;
};

struct SyncOptions {
  std::uint64_t version = 0;
  std::uint64_t bucket_bytes = 0;  // as asked for, > 0
  std::uint32_t buffers = 2;
  bool verify = true;
  bool strict = true;
  // Not 0: this session gives the verdict of a set of sessions that carry the manifest's bytes in shares. Its own manifest
  // travels and is checked, no bucket does. The number names the set, `share_bytes` is the bucket size asked for there.
  std::uint64_t set_id = 0;
  std::uint64_t share_bytes = 0;
};

// Seconds, by what this rank's thread did.
struct PhaseSeconds {
  double pack = 0, transfer = 0, unpack = 0, wait = 0, commit = 0;
};

// How often a rank that waits says so: often enough to be known before anybody's deadline, also where another rank's is
// much shorter.
[[nodiscard]] inline std::chrono::nanoseconds stall_period(std::chrono::nanoseconds timeout) noexcept {
  return std::clamp<std::chrono::nanoseconds>(timeout / 8, std::chrono::milliseconds(10),
                                              std::chrono::milliseconds(100));
}
// How long what it said holds.
inline constexpr std::chrono::milliseconds kStallValidity{500};

// Flags of a BucketHeader that the protocol uses: how many manifest entries a receiver must hold to understand the
// bucket, whether the generator left the recorded plan, whether the bucket is the last, and whether its checksum was
// not known yet when it was sent (a device computes it) and follows at the end.
struct BucketFlags {
  std::uint32_t entries = 0;
  bool deviated = false;
  bool last = false;
  bool late_sum = false;
  [[nodiscard]] std::uint32_t encode() const noexcept {
    return (entries << 3U) | (late_sum ? 4U : 0U) | (deviated ? 2U : 0U) | (last ? 1U : 0U);
  }
  [[nodiscard]] static BucketFlags decode(std::uint32_t flags) noexcept {
    return {flags >> 3U, (flags & 2U) != 0, (flags & 1U) != 0, (flags & 4U) != 0};
  }
};

}  // namespace fastsync
