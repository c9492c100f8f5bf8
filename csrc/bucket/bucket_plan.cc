#include "bucket/bucket_plan.h"

#include <algorithm>

#include "common/error.h"

namespace fastsync {
namespace {

constexpr std::uint64_t kMaxBucketBytes = kMaxManifestBytes;
static_assert(kMaxBucketBytes % kAlignment == 0);
static_assert(kMaxItemsize <= kAlignment && kAlignment % kMaxItemsize == 0, "a cut must never halve an element");

std::uint64_t real_bucket_bytes(std::uint64_t asked) {
  if (asked == 0) throw InvalidArgument("bucket_bytes is 0; it must be at least 1");
  return align_up(std::min(asked, kMaxBucketBytes));
}

}  // namespace

BucketPlanner::BucketPlanner(std::uint64_t bucket_bytes) : bucket_bytes_(real_bucket_bytes(bucket_bytes)) {}

void BucketPlanner::add(std::uint64_t nbytes) {
  if (tensors_ >= kMaxTensors) throw InvalidArgument(concat("a plan holds at most ", kMaxTensors, " tensors"));
  if (nbytes > kMaxManifestBytes) {
    throw InvalidArgument(
        concat("tensor number ", tensors_, " has ", nbytes, " bytes; at most ", kMaxManifestBytes, " are supported"));
  }
  // What is left is not 0: a bucket in which nothing can start has been closed.
  std::uint64_t left = bucket_bytes_ - open_bytes();
  const bool next_bucket = nbytes > left && nbytes <= bucket_bytes_;
  if (next_bucket) left = bucket_bytes_;
  const std::uint64_t first = std::min(nbytes, left);
  const std::uint64_t rest = nbytes - first;
  const std::uint64_t pieces = (first > 0 ? 1 : 0) + rest / bucket_bytes_ + (rest % bucket_bytes_ > 0 ? 1 : 0);
  if (pieces > kMaxFragments - fragments_.size()) {
    throw InvalidArgument(concat("tensor number ", tensors_, " of ", nbytes, " bytes needs ", pieces, " buckets of ",
                                 bucket_bytes_, " bytes, with which the plan has more than ", kMaxFragments,
                                 " fragments; raise bucket_bytes"));
  }
  // Growth doubles as push_back's does. One reservation for the whole tensor keeps a failed one from leaving half.
  const auto reserve = [](auto& list, std::uint64_t more) {
    if (list.capacity() - list.size() < more) list.reserve(std::max(list.size() + more, 2 * list.capacity()));
  };
  reserve(fragments_, pieces);
  reserve(buckets_, pieces + 1);

  if (next_bucket) close();
  for (std::uint64_t offset = 0, piece = first; piece > 0; piece = std::min(nbytes - offset, bucket_bytes_)) {
    const bool last = offset + piece == nbytes;
    place(offset, piece);
    offset += piece;
    if (last) open_.tensors_end = tensors_ + 1;
    if (open_bytes() == bucket_bytes_) close();
  }
  ++tensors_;
  if (nbytes == 0) open_.tensors_end = tensors_;
}

void BucketPlanner::place(std::uint64_t tensor_offset, std::uint64_t nbytes) {
  Fragment fragment;
  fragment.tensor = static_cast<std::uint32_t>(tensors_);
  fragment.tensor_offset = tensor_offset;
  fragment.bucket_offset = open_bytes();
  fragment.nbytes = nbytes;
  fragments_.push_back(fragment);
  ++open_.fragment_count;
  open_.used_bytes = fragment.bucket_offset + nbytes;
}

void BucketPlanner::close() {
  buckets_.push_back(open_);
  open_.first_fragment = fragments_.size();
  open_.fragment_count = 0;
  open_.used_bytes = 0;
}

void BucketPlanner::finish() {
  if (open_.fragment_count > 0) close();
}

BucketPlan BucketPlan::make(const Manifest& manifest, std::uint64_t bucket_bytes) {
  BucketPlanner planner(bucket_bytes);
  for (const TensorMeta& meta : manifest.tensors()) planner.add(meta.nbytes);
  planner.finish();
  BucketPlan plan;
  plan.fragments = planner.fragments();
  plan.buckets = planner.buckets();
  plan.bucket_bytes = kAlignment;
  for (const BucketLayout& bucket : plan.buckets) {
    plan.bucket_bytes = std::max(plan.bucket_bytes, align_up(bucket.used_bytes));
  }
  return plan;
}

}  // namespace fastsync
