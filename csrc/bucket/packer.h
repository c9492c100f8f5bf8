// Moves bytes between a caller's tensors and a bucket, and checks them on the way.
//
// A TensorView is a caller's memory: the packer never owns, keeps or frees it. A bucket fragment is a range of the
// tensor's logical bytes (row-major order of its shape), whatever its strides: strided, expanded, transposed and
// offset views send their logical values, and strided destinations are written through.
//
// Threads: stateless, thread-safe. Streams: the host packer runs on the calling thread, or on a HostRuntime stream
// when enqueued there. Errors: none at run time. normalize() validates a view; every other function takes only views
// that went through it, and fragments that lie inside their view, cut at whole elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "bucket/bucket_plan.h"
#include "common/checksum.h"

namespace fastsync {

struct TensorView {
  std::byte* data = nullptr;  // address of element [0, 0, ...]; may be null when nbytes is 0
  std::uint64_t nbytes = 0;   // logical bytes
  std::uint32_t itemsize = 1;
  bool contiguous = true;  // logical order is memory order; shape and strides are then unused
  // Lazily conjugated or negated floating-point sources: sign bits are flipped in the packed bytes, never in the
  // tensor's own. unpack() ignores these.
  std::uint8_t flip_real = 0;  // 1: flip the sign bit of the (real part of the) element
  std::uint8_t flip_imag = 0;  // 1: flip the sign bit of the imaginary part (complex only)
  bool complex = false;
  std::vector<std::int64_t> shape;    // non-contiguous only
  std::vector<std::int64_t> strides;  // in BYTES; may be 0 or negative

  [[nodiscard]] bool operator==(const TensorView&) const = default;
};

// Validates, drops size-1 dimensions, merges dimensions that are contiguous with each other, sets `contiguous`. Throws
// InvalidArgument, without a name, for a view that contradicts itself: sizes that do not give nbytes, an itemsize that
// is not a power of two up to kMaxItemsize, more than kMaxDims dimensions, offsets beyond 2^62, flips of something that
// has no such part. It does not look at `data`.
void normalize(TensorView& view);

// [low, high) byte addresses that the view touches, relative to data; {0, 0} when empty.
struct ByteRange {
  std::int64_t low = 0;
  std::int64_t high = 0;
};
[[nodiscard]] ByteRange touched_range(const TensorView& view) noexcept;
// Exact answers. No memory is touched or allocated; time is a few divisions for everything that slicing, transposing
// and expanding can make. Only hand-made stride tricks need a search, of at most the product of the sizes but the last.
[[nodiscard]] bool overlaps_itself(const TensorView& view) noexcept;
[[nodiscard]] bool share_bytes(const TensorView& a, const TensorView& b) noexcept;

// Copies fragments [first, first + count) of tensors `views` into `bucket`. Returns the checksum of the fragments, or
// a zero checksum when `verify` is false.
[[nodiscard]] Checksum pack(std::byte* bucket, std::span<const Fragment> fragments, std::span<const TensorView> views,
                            bool verify);
// The reverse. A view with nbytes 0 for a fragment means "no destination": its bytes are checked but not copied.
// kStreaming fences once, behind the last fragment.
[[nodiscard]] Checksum unpack(const std::byte* bucket, std::span<const Fragment> fragments,
                              std::span<const TensorView> views, bool verify, StoreMode mode);
// Checks without copying.
[[nodiscard]] Checksum checksum_bucket(const std::byte* bucket, std::span<const Fragment> fragments);

// One fragment of one tensor; what the streaming path uses.
[[nodiscard]] Checksum pack_fragment(std::byte* bucket, const Fragment& fragment, const TensorView& view, bool verify);
[[nodiscard]] Checksum unpack_fragment(const std::byte* bucket, const Fragment& fragment, const TensorView& view,
                                       bool verify, StoreMode mode);

}  // namespace fastsync
