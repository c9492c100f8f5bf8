#include "sync/sync_types.h"

#include <algorithm>

namespace fastsync {

std::shared_ptr<const SyncPlan> SyncPlan::make(Manifest manifest, std::uint64_t asked_bytes) {
  auto plan = std::make_shared<SyncPlan>();
  plan->manifest = std::move(manifest);
  plan->buckets = BucketPlan::make(plan->manifest, asked_bytes);
  plan->asked_bytes = asked_bytes;
  return plan;
}

std::shared_ptr<const SyncPlan> PlanCache::find(std::uint64_t fingerprint) const {
  for (const auto& plan : plans_) {
    if (plan->manifest.fingerprint() == fingerprint) return plan;
  }
  return nullptr;
}

void PlanCache::put(std::shared_ptr<const SyncPlan> plan) {
  const auto same = [&](const auto& other) { return other->manifest.fingerprint() == plan->manifest.fingerprint(); };
  plans_.erase(std::remove_if(plans_.begin(), plans_.end(), same), plans_.end());
  plans_.push_front(std::move(plan));
  if (plans_.size() > kCapacity) plans_.pop_back();
}

std::vector<std::uint64_t> PlanCache::fingerprints() const {
  std::vector<std::uint64_t> out;
  for (const auto& plan : plans_) out.push_back(plan->manifest.fingerprint());
  return out;
}

}  // namespace fastsync
