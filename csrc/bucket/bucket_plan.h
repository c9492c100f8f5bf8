// Which bytes of which tensor lie where: a pure function of the tensors' sizes, bucket_bytes and the alignment.
//
// Rules: tensors lie in manifest order; every fragment starts at a multiple of kAlignment in its bucket; a tensor that
// fits into one bucket is never split (it starts the next bucket if it does not fit into what is left of this one); a
// larger one starts in what is left and spans buckets, cut at multiples of kAlignment; an empty tensor has no fragment
// and completes in the bucket that is open when it comes. So nothing but a tensor larger than a bucket ever needs
// assembling. A bucket closes as soon as no fragment can start in it any more, so it can travel before the next tensor
// is known. The planner works online, so a generator of unknown length gets the same cuts as the finished list.
//
// Threads: values. Streams: none. Errors: InvalidArgument for bucket_bytes of zero, and for a plan of more than
// kMaxFragments fragments; a call that throws changes nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bucket/manifest.h"

namespace fastsync {

inline constexpr std::uint64_t kAlignment = 256;
// A plan beyond this (8 GiB of bookkeeping) is a mistake in bucket_bytes. There are never more buckets than fragments.
inline constexpr std::uint64_t kMaxFragments = std::uint64_t{1} << 28;

[[nodiscard]] constexpr std::uint64_t align_up(std::uint64_t n) noexcept {
  return (n + (kAlignment - 1)) / kAlignment * kAlignment;
}

struct Fragment {
  std::uint32_t tensor = 0;         // index in the manifest
  std::uint64_t tensor_offset = 0;  // in the tensor's contiguous logical bytes
  std::uint64_t bucket_offset = 0;  // multiple of kAlignment
  std::uint64_t nbytes = 0;         // > 0
  friend bool operator==(const Fragment&, const Fragment&) = default;
};

struct BucketLayout {
  std::size_t first_fragment = 0;
  std::size_t fragment_count = 0;
  std::uint64_t used_bytes = 0;  // end of the last fragment; what travels
  std::size_t tensors_end = 0;   // tensors [previous tensors_end, this) have their last byte in this bucket
  friend bool operator==(const BucketLayout&, const BucketLayout&) = default;
};

class BucketPlanner {
 public:
  // bucket_bytes is rounded up to kAlignment, and down to 2^62 where it is above that.
  explicit BucketPlanner(std::uint64_t bucket_bytes);
  [[nodiscard]] std::uint64_t bucket_bytes() const noexcept { return bucket_bytes_; }

  // Adds the next tensor. Buckets that this closes are appended to buckets(); the open one is not there yet.
  void add(std::uint64_t nbytes);
  // Closes the open bucket, if it has a fragment. Idempotent. Trailing empty tensors belong to no bucket.
  void finish();

  [[nodiscard]] const std::vector<Fragment>& fragments() const noexcept { return fragments_; }
  [[nodiscard]] const std::vector<BucketLayout>& buckets() const noexcept { return buckets_; }
  [[nodiscard]] std::size_t tensors() const noexcept { return tensors_; }
  // Where the next tensor would start in the open bucket: a multiple of kAlignment below bucket_bytes().
  [[nodiscard]] std::uint64_t open_bytes() const noexcept { return align_up(open_.used_bytes); }

 private:
  void place(std::uint64_t tensor_offset, std::uint64_t nbytes);
  void close();

  std::uint64_t bucket_bytes_;
  std::vector<Fragment> fragments_;
  std::vector<BucketLayout> buckets_;
  BucketLayout open_;
  std::size_t tensors_ = 0;
};

struct BucketPlan {
  std::uint64_t bucket_bytes = 0;  // real: aligned, cut down to the largest bucket that is used, at least kAlignment
  std::vector<Fragment> fragments;
  std::vector<BucketLayout> buckets;

  [[nodiscard]] static BucketPlan make(const Manifest& manifest, std::uint64_t bucket_bytes);
};

}  // namespace fastsync
