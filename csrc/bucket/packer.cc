#include "bucket/packer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "bucket/strided.h"
#include "common/error.h"

namespace fastsync {
namespace {

using detail::Direction;
using detail::StridedCursor;

constexpr std::uint64_t kWord = 8;
// Copied, then checked while it is in the first-level cache.
constexpr std::uint64_t kBlockBytes = 16 * 1024;
// From here on, a contiguous run of a strided tensor is worth a copy of its own.
constexpr std::uint64_t kLongRunBytes = 512;
constexpr std::int64_t kMaxOffset = std::int64_t{1} << 62;

// ---- Sign flips -----------------------------------------------------------------------------------------------------

constexpr std::size_t kFlipPeriod = 16;
using FlipPattern = std::array<std::uint64_t, kFlipPeriod / kWord>;

bool has_flips(const TensorView& view) noexcept { return view.flip_real != 0 || view.flip_imag != 0; }

FlipPattern flip_pattern(const TensorView& view) noexcept {
  std::array<unsigned char, kFlipPeriod> bytes{};
  const std::size_t part = view.complex ? view.itemsize / 2 : view.itemsize;
  for (std::size_t element = 0; element < kFlipPeriod; element += view.itemsize) {
    if (view.flip_real != 0) bytes[element + part - 1] = 0x80;
    if (view.flip_imag != 0) bytes[element + 2 * part - 1] = 0x80;
  }
  return std::bit_cast<FlipPattern>(bytes);
}

// `data` starts at an element.
void flip(std::byte* data, std::uint64_t nbytes, const FlipPattern& pattern) noexcept {
  const auto flip_some = [&](std::byte* at, std::size_t n) {
    FlipPattern words{};
    std::memcpy(&words, at, n);
    for (std::size_t k = 0; k < words.size(); ++k) words[k] ^= pattern[k];
    std::memcpy(at, &words, n);
  };
  std::uint64_t i = 0;
  for (; nbytes - i >= kFlipPeriod; i += kFlipPeriod) flip_some(data + i, kFlipPeriod);
  if (i < nbytes) flip_some(data + i, nbytes - i);
}

// ---- Blocks ---------------------------------------------------------------------------------------------------------

// Checks a fragment piece by piece behind the copy, although pieces may end inside a word.
class TrailingChecksum {
 public:
  TrailingChecksum(const std::byte* data, const Fragment& fragment, bool verify) noexcept
      : data_(data), fragment_(fragment), verify_(verify) {}

  // The first `done` bytes of the fragment are in place.
  void reached(std::uint64_t done) noexcept {
    if (!verify_ || (done - checked_ < kBlockBytes && done < fragment_.nbytes)) return;
    const std::uint64_t ready = done == fragment_.nbytes ? done : done / kWord * kWord;
    sum_ += checksum_bytes(data_ + checked_, ready - checked_, fragment_.bucket_offset + checked_);
    checked_ = ready;
  }
  [[nodiscard]] const Checksum& sum() const noexcept { return sum_; }

 private:
  const std::byte* data_;
  const Fragment& fragment_;
  bool verify_;
  std::uint64_t checked_ = 0;
  Checksum sum_;
};

Checksum move_contiguous(std::byte* dst, const std::byte* src, const Fragment& fragment, bool verify,
                         StoreMode mode) noexcept {
  if (verify) return copy_and_checksum(dst, src, fragment.nbytes, fragment.bucket_offset, mode);
  copy_bytes(dst, src, fragment.nbytes, mode);
  return {};
}

// Runs that start at words of the checksum, so that copy and check are one pass.
bool has_long_runs(const StridedCursor& cursor) noexcept {
  return cursor.has_runs() && cursor.run_bytes() >= kLongRunBytes && cursor.run_bytes() % kWord == 0;
}

template <Direction kDirection>
Checksum move_runs(detail::PackedPointer<kDirection> packed, StridedCursor& cursor, const Fragment& fragment,
                   bool verify, StoreMode mode) noexcept {
  Checksum sum;
  for (std::uint64_t done = 0; done < fragment.nbytes;) {
    const StridedCursor::Run run = cursor.next_run(fragment.nbytes - done);
    Fragment piece = fragment;
    piece.bucket_offset += done;
    piece.nbytes = run.nbytes;
    if constexpr (kDirection == Direction::kGather) {
      sum += move_contiguous(packed + done, run.data, piece, verify, mode);
    } else {
      sum += move_contiguous(run.data, packed + done, piece, verify, mode);
    }
    done += run.nbytes;
  }
  return sum;
}

Checksum pack_flipped_contiguous(std::byte* packed, const Fragment& fragment, const TensorView& view,
                                 bool verify) noexcept {
  const FlipPattern pattern = flip_pattern(view);
  TrailingChecksum check(packed, fragment, verify);
  for (std::uint64_t done = 0; done < fragment.nbytes;) {
    const std::uint64_t block = std::min(kBlockBytes, fragment.nbytes - done);
    std::memcpy(packed + done, view.data + fragment.tensor_offset + done, block);
    flip(packed + done, block, pattern);
    done += block;
    check.reached(done);
  }
  return check.sum();
}

Checksum pack_strided(std::byte* packed, const Fragment& fragment, const TensorView& view, bool verify) noexcept {
  StridedCursor cursor(view, fragment.tensor_offset / view.itemsize);
  const bool flips = has_flips(view);
  if (!flips && has_long_runs(cursor)) {
    return move_runs<Direction::kGather>(packed, cursor, fragment, verify, StoreMode::kCached);
  }
  const FlipPattern pattern = flips ? flip_pattern(view) : FlipPattern{};
  TrailingChecksum check(packed, fragment, verify);
  for (std::uint64_t done = 0; done < fragment.nbytes;) {
    const std::uint64_t left = (fragment.nbytes - done) / view.itemsize;
    const std::uint64_t moved = cursor.step<Direction::kGather>(packed + done, left) * view.itemsize;
    if (flips) flip(packed + done, moved, pattern);
    done += moved;
    check.reached(done);
  }
  return check.sum();
}

Checksum unpack_strided(const std::byte* packed, const Fragment& fragment, const TensorView& view, bool verify,
                        StoreMode mode) noexcept {
  StridedCursor cursor(view, fragment.tensor_offset / view.itemsize);
  if (has_long_runs(cursor)) return move_runs<Direction::kScatter>(packed, cursor, fragment, verify, mode);
  TrailingChecksum check(packed, fragment, verify);
  for (std::uint64_t done = 0; done < fragment.nbytes;) {
    const std::uint64_t left = (fragment.nbytes - done) / view.itemsize;
    done += cursor.step<Direction::kScatter>(packed + done, left) * view.itemsize;
    check.reached(done);
  }
  return check.sum();
}

// ---- Prefetch -------------------------------------------------------------------------------------------------------

constexpr std::size_t kCacheLine = 64;
// How much of a tensor's start to ask for: from there on the copy loops prefetch for themselves.
constexpr std::uint64_t kPrefetchBytes = 1024;
// How far ahead of the copy to ask, in bytes to be copied. Two or three memory latencies.
constexpr std::uint64_t kLookAheadBytes = 2048;
// Behind a longer piece, what was fetched before it has left the cache again.
constexpr std::uint64_t kLongPieceBytes = 128 * 1024;

// Asks for the memory of the fragments behind the one being copied. The copy loops run straight through one tensor, but
// the next may lie anywhere, and with many small ones each would begin with a wait for memory.
template <bool kForWriting>
class LookAhead {
 public:
  // Asks for nothing that is longer than `longest`.
  LookAhead(std::span<const Fragment> fragments, std::span<const TensorView> views, std::uint64_t longest) noexcept
      : fragments_(fragments), views_(views), longest_(longest) {}

  // Call before fragment `i` is copied.
  void before(std::size_t i) noexcept {
    if (i < next_) {
      ahead_bytes_ -= fragments_[i].nbytes;
    } else {
      next_ = i + 1;
      ahead_bytes_ = 0;
    }
    if (fragments_[i].nbytes > kLongPieceBytes) return;
    for (; next_ < fragments_.size() && ahead_bytes_ < kLookAheadBytes; ++next_) {
      const Fragment& fragment = fragments_[next_];
      ahead_bytes_ += fragment.nbytes;
      const TensorView& view = views_[fragment.tensor];
      if (!view.contiguous || view.nbytes == 0 || fragment.nbytes > longest_) continue;
      const std::byte* start = view.data + fragment.tensor_offset;
      for (std::uint64_t at = 0; at < std::min(fragment.nbytes, kPrefetchBytes); at += kCacheLine) {
        __builtin_prefetch(start + at, kForWriting ? 1 : 0, 3);
      }
    }
  }

 private:
  std::span<const Fragment> fragments_;
  std::span<const TensorView> views_;
  std::uint64_t longest_;
  std::size_t next_ = 0;           // the first fragment that has not been asked for
  std::uint64_t ahead_bytes_ = 0;  // of those asked for and not yet copied
};

StoreMode without_fence(StoreMode mode) noexcept {
  return mode == StoreMode::kStreaming ? StoreMode::kStreamingUnfenced : mode;
}

}  // namespace

// ---- Views ----------------------------------------------------------------------------------------------------------

void normalize(TensorView& view) {
  if (!std::has_single_bit(view.itemsize) || view.itemsize > kMaxItemsize) {
    throw InvalidArgument(
        concat("an itemsize of ", view.itemsize, " is not supported; powers of two up to ", kMaxItemsize, " are"));
  }
  if (view.nbytes % view.itemsize != 0) {
    throw InvalidArgument(concat(view.nbytes, " bytes are not a multiple of the itemsize ", view.itemsize));
  }
  if (has_flips(view) &&
      (view.itemsize > kFlipPeriod || (view.complex && view.itemsize < 2) || (view.flip_imag != 0 && !view.complex))) {
    throw InvalidArgument(concat("elements of ", view.itemsize, view.complex ? " bytes (complex)" : " bytes (real)",
                                 " have no such sign to flip"));
  }
  if (view.contiguous) {
    view.shape.clear();
    view.strides.clear();
    return;
  }
  if (view.shape.size() != view.strides.size() || view.shape.size() > kMaxDims) {
    throw InvalidArgument(concat(view.shape.size(), " sizes and ", view.strides.size(),
                                 " strides; there must be as many, and at most ", kMaxDims));
  }
  std::uint64_t elements = 1;
  std::int64_t reach = 0;  // the furthest element from the first, whichever way the strides go
  for (std::size_t k = 0; k < view.shape.size(); ++k) {
    const std::int64_t size = view.shape[k];
    std::int64_t extent = 0;
    bool fits = size >= 0 && !__builtin_mul_overflow(elements, static_cast<std::uint64_t>(size), &elements);
    if (fits && view.nbytes > 0) {
      fits = size > 0 && view.strides[k] > -kMaxOffset && view.strides[k] < kMaxOffset &&
             !__builtin_mul_overflow(size - 1, view.strides[k] < 0 ? -view.strides[k] : view.strides[k], &extent) &&
             extent < kMaxOffset - reach;
    }
    if (!fits) {
      throw InvalidArgument(concat("dimension ", k, " has size ", size, " and stride ", view.strides[k],
                                   ", which no tensor of ", view.nbytes, " bytes can have"));
    }
    reach += extent;
  }
  std::uint64_t bytes = 0;
  if (__builtin_mul_overflow(elements, std::uint64_t{view.itemsize}, &bytes) || bytes != view.nbytes) {
    throw InvalidArgument(
        concat("the shape has ", elements, " elements of ", view.itemsize, " bytes, but nbytes is ", view.nbytes));
  }

  // From the inside out; `kept` dimensions are collected innermost first.
  std::size_t kept = 0;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  if (view.nbytes > 0) {
    for (std::size_t k = view.shape.size(); k-- > 0;) {
      if (view.shape[k] == 1) continue;
      if (kept > 0 && view.strides[k] == strides.back() * shape.back()) {
        shape.back() *= view.shape[k];
        continue;
      }
      shape.push_back(view.shape[k]);
      strides.push_back(view.strides[k]);
      ++kept;
    }
  }
  view.contiguous = kept == 0 || (kept == 1 && strides[0] == static_cast<std::int64_t>(view.itemsize));
  if (view.contiguous) {
    shape.clear();
    strides.clear();
  }
  std::reverse(shape.begin(), shape.end());
  std::reverse(strides.begin(), strides.end());
  view.shape = std::move(shape);
  view.strides = std::move(strides);
}

ByteRange touched_range(const TensorView& view) noexcept {
  if (view.nbytes == 0) return {};
  if (view.contiguous) return {0, static_cast<std::int64_t>(view.nbytes)};
  ByteRange range{0, static_cast<std::int64_t>(view.itemsize)};
  for (std::size_t k = 0; k < view.shape.size(); ++k) {
    const std::int64_t extent = (view.shape[k] - 1) * view.strides[k];
    (extent < 0 ? range.low : range.high) += extent;
  }
  return range;
}

// ---- Pack and unpack ------------------------------------------------------------------------------------------------

Checksum pack_fragment(std::byte* bucket, const Fragment& fragment, const TensorView& view, bool verify) {
  std::byte* packed = bucket + fragment.bucket_offset;
  if (!view.contiguous) return pack_strided(packed, fragment, view, verify);
  if (has_flips(view)) return pack_flipped_contiguous(packed, fragment, view, verify);
  return move_contiguous(packed, view.data + fragment.tensor_offset, fragment, verify, StoreMode::kCached);
}

Checksum unpack_fragment(const std::byte* bucket, const Fragment& fragment, const TensorView& view, bool verify,
                         StoreMode mode) {
  const std::byte* packed = bucket + fragment.bucket_offset;
  if (view.nbytes == 0) return verify ? checksum_bytes(packed, fragment.nbytes, fragment.bucket_offset) : Checksum{};
  if (view.contiguous) return move_contiguous(view.data + fragment.tensor_offset, packed, fragment, verify, mode);
  const Checksum sum = unpack_strided(packed, fragment, view, verify, without_fence(mode));
  if (mode == StoreMode::kStreaming) fence_streaming_stores();
  return sum;
}

Checksum pack(std::byte* bucket, std::span<const Fragment> fragments, std::span<const TensorView> views, bool verify) {
  Checksum sum;
  LookAhead<false> sources(fragments, views, kLongPieceBytes);
  for (std::size_t i = 0; i < fragments.size(); ++i) {
    sources.before(i);
    sum += pack_fragment(bucket, fragments[i], views[fragments[i].tensor], verify);
  }
  return sum;
}

Checksum unpack(const std::byte* bucket, std::span<const Fragment> fragments, std::span<const TensorView> views,
                bool verify, StoreMode mode) {
  Checksum sum;
  // A line that is written around the cache must not be fetched into it first.
  LookAhead<true> destinations(fragments, views, mode == StoreMode::kCached ? kLongPieceBytes : kMinStreamingBytes - 1);
  for (std::size_t i = 0; i < fragments.size(); ++i) {
    destinations.before(i);
    sum += unpack_fragment(bucket, fragments[i], views[fragments[i].tensor], verify, without_fence(mode));
  }
  if (mode == StoreMode::kStreaming) fence_streaming_stores();
  return sum;
}

Checksum checksum_bucket(const std::byte* bucket, std::span<const Fragment> fragments) {
  Checksum sum;
  for (const Fragment& fragment : fragments) {
    sum += checksum_bytes(bucket + fragment.bucket_offset, fragment.nbytes, fragment.bucket_offset);
  }
  return sum;
}

}  // namespace fastsync
