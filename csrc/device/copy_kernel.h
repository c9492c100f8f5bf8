// The body of the multi-tensor copy (copy_args.h), written once: nvcc compiles it for the device (cuda/copy_kernel.cu),
// every other compiler as host C++, where copy_on_host() runs it as a grid would. What is fuzzed on a CPU is what runs
// on a GPU, down to the index arithmetic of each lane; only loads, stores and the final reduction differ.
//
// The bucket is cut into units of kCopyUnitBytes, from the first piece on, and warp w of W takes units w, w + W, ... A
// warp finds the first piece of its unit by bisection and walks on from there. Within a piece each lane moves 16-byte
// vectors, those of a warp side by side, four of each lane in flight. Pieces begin at multiples of 256 in the bucket,
// so vectors are aligned there; in the tensor they may not be, and take several accesses of 8, 4, 2 or 1 bytes. Pieces
// with a layout are moved word by word, each word's elements being looked up. No byte outside the pieces is touched.
//
// What decides the speed is bytes in flight: a device that copies 2 TB/s with a latency of a microsecond needs 2 MB of
// them, some 15 KB a multiprocessor. The 32 warps that kCopyBlocksResident provides have up to 64 KB, so that searches,
// ends of pieces and idle lanes hide behind other warps. Instructions are not the limit: with the checksum some 45 for
// a warp's 512 bytes, where 220 could be issued in the time. Misaligned loads cost accesses to the first-level cache,
// not memory; misaligned stores of 1 or 2 bytes are the slow case. A transposed source has each sector read once for
// every row that has an element in it, from the second-level cache. All this is reckoned, not measured.
//
// Threads and streams: pure functions over the caller's memory. Errors: none on the device. On the host an access that
// is not aligned to its width, which a GPU would trap, is an InternalError.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/copy_access.h"
#include "device/copy_args.h"

#if !defined(__CUDACC__)
#include <atomic>
#include <bit>
#endif

namespace fastsync {

// ---- The launch -----------------------------------------------------------------------------------------------------

inline constexpr unsigned kWarpLanes = 32;
inline constexpr std::uint64_t kCopyUnitBytes = 16 * 1024;
// A launch has this many threads a block, in one dimension, and no dynamic shared memory.
inline constexpr unsigned kCopyBlockThreads = 256;
inline constexpr unsigned kCopyBlockWarps = kCopyBlockThreads / kWarpLanes;
// What the compiler is asked to make room for; with it no more than 64 registers a thread.
inline constexpr unsigned kCopyBlocksResident = 4;
// Several times what is resident: where another kernel (a broadcast) holds some multiprocessors, the others take more
// blocks. Beyond that warps take several units, so that adding up the checksum stays a few thousand atomics.
inline constexpr unsigned kCopyBlocksPerMultiprocessor = 16;

[[nodiscard]] constexpr std::uint64_t copy_units(std::uint64_t used_bytes) noexcept {
  return used_bytes / kCopyUnitBytes + (used_bytes % kCopyUnitBytes != 0 ? 1 : 0);
}

// Blocks of a launch, in one dimension: at least 1, so that an empty bucket is a valid launch. Any number is correct.
[[nodiscard]] constexpr unsigned copy_grid_blocks(std::uint64_t used_bytes, unsigned multiprocessors) noexcept {
  const std::uint64_t wanted = (copy_units(used_bytes) + kCopyBlockWarps - 1) / kCopyBlockWarps;
  const std::uint64_t most = std::uint64_t{multiprocessors} * kCopyBlocksPerMultiprocessor;
  const std::uint64_t blocks = wanted < most ? wanted : most;
  return blocks > 0 ? static_cast<unsigned>(blocks) : 1;
}

namespace detail {

// ---- The checksum ---------------------------------------------------------------------------------------------------

FASTSYNC_HOST_DEVICE std::uint64_t checksum_key(std::uint64_t bucket_offset) noexcept {
  return kChecksumSeed + bucket_offset / kWordBytes * kChecksumStep;
}

// What one lane has added up.
struct LaneChecksum {
  std::uint64_t product = 0;
  std::uint64_t sum = 0;

  FASTSYNC_HOST_DEVICE void add(std::uint64_t word, std::uint64_t key) noexcept {
    const std::uint64_t mixed = word ^ key;
    product += (mixed & 0xFFFFFFFFU) * (mixed >> 32);
    sum += word;
  }
};

// ---- Contiguous pieces ----------------------------------------------------------------------------------------------

// The part of a piece that lies in one unit.
struct CopySpan {
  std::byte* bucket = nullptr;      // a multiple of 256
  std::uint64_t bucket_offset = 0;  // of the same byte
  std::uint32_t nbytes = 0;         // not a multiple of 16 only at the end of the piece
  std::uint64_t tensor =
      0;  // contiguous: address of the first byte, 0: none. With a layout: logical byte in the tensor.
};

// kAccess divides the tensor's address.
template <CopyDirection kDirection, std::uint32_t kAccess>
FASTSYNC_HOST_DEVICE void copy_contiguous(const CopySpan& span, unsigned lane, bool checked, LaneChecksum& sum) {
  // One vector of narrow loads keeps as many of them in flight as four of wide ones.
  constexpr std::uint32_t kInFlight = kAccess >= 4 ? 4 : 1;
  std::byte* const tensor = pointer_to(span.tensor);
  const std::uint32_t vectors = span.nbytes / kVectorBytes;
  FASTSYNC_NO_UNROLL
  for (std::uint32_t first = lane; first < vectors; first += kInFlight * kWarpLanes) {
    CopyVector data[kInFlight];
    FASTSYNC_UNROLL
    for (std::uint32_t k = 0; k < kInFlight; ++k) {
      const std::uint32_t v = first + k * kWarpLanes;
      if (v >= vectors) continue;
      if constexpr (kDirection == CopyDirection::kPack) {
        data[k] = load_vector<kAccess>(tensor + v * kVectorBytes);
      } else {
        data[k] = load_16(span.bucket + v * kVectorBytes);
      }
    }
    FASTSYNC_UNROLL
    for (std::uint32_t k = 0; k < kInFlight; ++k) {
      const std::uint32_t v = first + k * kWarpLanes;
      if (v >= vectors) continue;
      if constexpr (kDirection == CopyDirection::kPack) {
        store_16(span.bucket + v * kVectorBytes, data[k]);
      } else {
        if (span.tensor != 0) store_vector<kAccess>(tensor + v * kVectorBytes, data[k]);
      }
      if (checked) {
        const std::uint64_t key = checksum_key(span.bucket_offset + v * kVectorBytes);
        sum.add(data[k].low, key);
        sum.add(data[k].high, key + kChecksumStep);
      }
    }
  }
}

// What is left behind the last vector: up to 15 bytes, one word for each of the two lanes whose turn it would be. A
// word that is not there does not count.
template <CopyDirection kDirection>
FASTSYNC_HOST_DEVICE void copy_contiguous_tail(const CopySpan& span, unsigned lane, bool checked, LaneChecksum& sum) {
  const std::uint32_t vectors = span.nbytes / kVectorBytes;
  const std::uint32_t at = vectors * kVectorBytes + (lane - vectors) % kWarpLanes * kWordBytes;
  if (at >= span.nbytes) return;
  const std::uint32_t nbytes = span.nbytes - at < kWordBytes ? span.nbytes - at : kWordBytes;
  std::uint64_t word = 0;
  if constexpr (kDirection == CopyDirection::kPack) {
    word = load_bytes(pointer_to(span.tensor + at), nbytes);
    store_bytes(span.bucket + at, word, nbytes);
  } else {
    word = load_bytes(span.bucket + at, nbytes);
    if (span.tensor != 0) store_bytes(pointer_to(span.tensor + at), word, nbytes);
  }
  if (checked) sum.add(word, checksum_key(span.bucket_offset + at));
}

// ---- Pieces with a layout -------------------------------------------------------------------------------------------

struct CopyLayout {
  std::uint64_t address = 0;  // of element [0, 0, ...]
  const std::uint64_t* sizes = nullptr;
  const std::uint64_t* strides = nullptr;  // signed; sums that wrap around are what signed ones would be
  std::uint32_t dims = 0;
  std::uint32_t itemsize = 0;
  std::uint32_t item_shift = 0;  // its logarithm
};

FASTSYNC_HOST_DEVICE CopyLayout read_layout(const std::uint64_t* words, std::uint64_t address) noexcept {
  CopyLayout layout;
  layout.address = address;
  layout.dims = static_cast<std::uint32_t>(words[0]);
  layout.itemsize = static_cast<std::uint32_t>(words[1]);
  FASTSYNC_NO_UNROLL
  while ((1U << layout.item_shift) < layout.itemsize) ++layout.item_shift;
  layout.sizes = words + kCopyLayoutHeaderWords;
  layout.strides = layout.sizes + layout.dims;
  return layout;
}

// What divides the address of every part of every element: the width of an access.
FASTSYNC_HOST_DEVICE std::uint32_t layout_alignment(const CopyLayout& layout) noexcept {
  std::uint64_t bits = layout.address | layout.itemsize;
  FASTSYNC_NO_UNROLL
  for (std::uint32_t k = 0; k < layout.dims; ++k) bits |= layout.strides[k];
  return alignment_of(bits, kWordBytes);
}

// Both below 2^63. Two numbers of 32 bits are the rule; the compiler's own division of longer ones takes more registers
// than all the rest of the kernel leaves free.
FASTSYNC_HOST_DEVICE std::uint64_t divide(std::uint64_t dividend, std::uint64_t divisor) noexcept {
  if (((dividend | divisor) >> 32) == 0) {
    return static_cast<std::uint32_t>(dividend) / static_cast<std::uint32_t>(divisor);
  }
  std::uint64_t quotient = 0;
  std::uint64_t rest = 0;
  FASTSYNC_NO_UNROLL
  for (std::uint32_t bit = 64; bit-- > 0;) {
    rest = rest << 1 | (dividend >> bit & 1);
    quotient <<= 1;
    if (rest >= divisor) {
      rest -= divisor;
      quotient |= 1;
    }
  }
  return quotient;
}

// The address of element 0 of a row: the rows are what all dimensions but the last count.
FASTSYNC_HOST_DEVICE std::uint64_t row_address(const CopyLayout& layout, std::uint64_t row) noexcept {
  std::uint64_t address = layout.address;
  FASTSYNC_NO_UNROLL
  for (std::uint32_t k = layout.dims - 1; k-- > 1;) {
    const std::uint64_t outer = divide(row, layout.sizes[k]);
    address += (row - outer * layout.sizes[k]) * layout.strides[k];
    row = outer;
  }
  return address + row * layout.strides[0];  // with one dimension the row is 0
}

FASTSYNC_HOST_DEVICE std::uint64_t element_address(const CopyLayout& layout, std::uint64_t element) noexcept {
  const std::uint64_t size = layout.sizes[layout.dims - 1];
  const std::uint64_t row = divide(element, size);
  return row_address(layout, row) + (element - row * size) * layout.strides[layout.dims - 1];
}

FASTSYNC_HOST_DEVICE std::uint64_t byte_address(const CopyLayout& layout, std::uint64_t at) noexcept {
  return element_address(layout, at >> layout.item_shift) + (at & (layout.itemsize - 1));
}

// Where one word of a tensor is: its elements, or the part of one element that it holds.
struct WordPlace {
  std::uint64_t first = 0;  // element
  std::uint64_t start = 0;  // its address
  std::uint64_t stride = 0;
  bool one_row = false;     // its elements are one stride apart
  bool one_access = false;  // side by side as well, and aligned: a slice of rows
};

FASTSYNC_HOST_DEVICE WordPlace find_word(const CopyLayout& layout, std::uint64_t at) noexcept {
  const std::uint64_t size = layout.sizes[layout.dims - 1];
  WordPlace place;
  place.stride = layout.strides[layout.dims - 1];
  place.first = at >> layout.item_shift;
  const std::uint64_t others = ((at + kWordBytes - 1) >> layout.item_shift) - place.first;
  const std::uint64_t row = divide(place.first, size);
  const std::uint64_t column = place.first - row * size;
  place.start = row_address(layout, row) + column * place.stride;
  place.one_row = others < size - column;
  place.one_access = place.one_row && (others == 0 || place.stride == layout.itemsize) &&
                     (place.start + (at & (layout.itemsize - 1))) % kWordBytes == 0;
  return place;
}

// Calls move(address, shift) for each access of kAccess bytes that a word in one row takes; `shift` is where in the
// word its bits are. kAccess divides the itemsize, so none spans two elements.
template <std::uint32_t kAccess, typename Move>
FASTSYNC_HOST_DEVICE void for_each_access(const CopyLayout& layout, const WordPlace& place, std::uint64_t at,
                                          const Move& move) {
  FASTSYNC_UNROLL
  for (std::uint32_t i = 0; i < kWordBytes; i += kAccess) {
    const std::uint64_t element = (at + i) >> layout.item_shift;
    move(place.start + (element - place.first) * place.stride + ((at + i) & (layout.itemsize - 1)), 8 * i);
  }
}

template <std::uint32_t kAccess>
FASTSYNC_HOST_DEVICE std::uint64_t gather_row(const CopyLayout& layout, const WordPlace& place, std::uint64_t at) {
  std::uint64_t word = 0;
  for_each_access<kAccess>(layout, place, at, [&](std::uint64_t address, std::uint32_t shift) {
    word |= load<kAccess>(pointer_to(address)) << shift;
  });
  return word;
}

template <std::uint32_t kAccess>
FASTSYNC_HOST_DEVICE void scatter_row(const CopyLayout& layout, const WordPlace& place, std::uint64_t at,
                                      std::uint64_t word) {
  for_each_access<kAccess>(layout, place, at, [&](std::uint64_t address, std::uint32_t shift) {
    store<kAccess>(pointer_to(address), word >> shift);
  });
}

// Width and address of an access that are known at run time only.
FASTSYNC_HOST_DEVICE std::uint64_t load_any(std::uint64_t address, std::uint32_t access) {
  switch (access) {
    case 8: return load<8>(pointer_to(address));
    case 4: return load<4>(pointer_to(address));
    case 2: return load<2>(pointer_to(address));
    default: return load<1>(pointer_to(address));
  }
}

FASTSYNC_HOST_DEVICE void store_any(std::uint64_t address, std::uint32_t access, std::uint64_t value) {
  switch (access) {
    case 8: return store<8>(pointer_to(address), value);
    case 4: return store<4>(pointer_to(address), value);
    case 2: return store<2>(pointer_to(address), value);
    default: return store<1>(pointer_to(address), value);
  }
}

// `access` divides every address of the layout.
FASTSYNC_HOST_DEVICE std::uint64_t gather_word(const CopyLayout& layout, std::uint64_t at, std::uint32_t access) {
  const WordPlace place = find_word(layout, at);
  if (place.one_access) return load<8>(pointer_to(place.start + (at & (layout.itemsize - 1))));
  if (place.one_row) {
    switch (access) {
      case 8: return gather_row<8>(layout, place, at);
      case 4: return gather_row<4>(layout, place, at);
      case 2: return gather_row<2>(layout, place, at);
      default: return gather_row<1>(layout, place, at);
    }
  }
  std::uint64_t word = 0;
  FASTSYNC_NO_UNROLL
  for (std::uint32_t i = 0; i < kWordBytes; i += access) {
    word |= load_any(byte_address(layout, at + i), access) << (8 * i);
  }
  return word;
}

FASTSYNC_HOST_DEVICE void scatter_word(const CopyLayout& layout, std::uint64_t at, std::uint32_t access,
                                       std::uint64_t word) {
  const WordPlace place = find_word(layout, at);
  if (place.one_access) return store<8>(pointer_to(place.start + (at & (layout.itemsize - 1))), word);
  if (place.one_row) {
    switch (access) {
      case 8: return scatter_row<8>(layout, place, at, word);
      case 4: return scatter_row<4>(layout, place, at, word);
      case 2: return scatter_row<2>(layout, place, at, word);
      default: return scatter_row<1>(layout, place, at, word);
    }
  }
  FASTSYNC_NO_UNROLL
  for (std::uint32_t i = 0; i < kWordBytes; i += access) {
    store_any(byte_address(layout, at + i), access, word >> (8 * i));
  }
}

// `flip` is for this lane's words: their numbers are all odd or all even.
template <CopyDirection kDirection>
FASTSYNC_HOST_DEVICE void copy_strided(const CopySpan& span, const CopyLayout& layout, std::uint64_t flip,
                                       unsigned lane, bool checked, LaneChecksum& sum) {
  const std::uint32_t access = layout_alignment(layout);
  const std::uint32_t words = span.nbytes / kWordBytes;
  FASTSYNC_NO_UNROLL
  for (std::uint32_t k = lane; k < words; k += kWarpLanes) {
    const std::uint32_t at = k * kWordBytes;
    std::uint64_t word = 0;
    if constexpr (kDirection == CopyDirection::kPack) {
      word = gather_word(layout, span.tensor + at, access) ^ flip;
      store<8>(span.bucket + at, word);
    } else {
      word = load<8>(span.bucket + at);
      scatter_word(layout, span.tensor + at, access, word);
    }
    if (checked) sum.add(word, checksum_key(span.bucket_offset + at));
  }
}

// What is left behind the last word: up to 7 bytes, for the lane whose turn it would be, byte by byte.
template <CopyDirection kDirection>
FASTSYNC_HOST_DEVICE void copy_strided_tail(const CopySpan& span, const CopyLayout& layout, std::uint64_t flip,
                                            unsigned lane, bool checked, LaneChecksum& sum) {
  const std::uint32_t tail = span.nbytes / kWordBytes * kWordBytes;
  if (tail == span.nbytes || lane != tail / kWordBytes % kWarpLanes) return;
  std::uint64_t word = 0;
  FASTSYNC_NO_UNROLL
  for (std::uint32_t i = 0; tail + i < span.nbytes; ++i) {
    std::byte* const place = pointer_to(byte_address(layout, span.tensor + tail + i));
    if constexpr (kDirection == CopyDirection::kPack) {
      const std::uint64_t byte = load<1>(place) ^ (flip >> (8 * i) & 0xFF);
      store<1>(span.bucket + tail + i, byte);
      word |= byte << (8 * i);
    } else {
      const std::uint64_t byte = load<1>(span.bucket + tail + i);
      store<1>(place, byte);
      word |= byte << (8 * i);
    }
  }
  if (checked) sum.add(word, checksum_key(span.bucket_offset + tail));
}

// ---- Units ----------------------------------------------------------------------------------------------------------

// The first piece from `from` on that ends behind `begin`; args.count where there is none.
FASTSYNC_HOST_DEVICE std::uint32_t find_piece(const CopyArgs& args, std::uint64_t begin, std::uint32_t from) noexcept {
  std::uint32_t low = from;
  std::uint32_t high = args.count;
  FASTSYNC_NO_UNROLL
  while (low < high) {
    const std::uint32_t middle = low + (high - low) / 2;
    if (args.pieces[middle].bucket_offset + args.pieces[middle].nbytes <= begin) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// One lane's share of `piece` in [begin, end) of the bucket.
template <CopyDirection kDirection>
FASTSYNC_HOST_DEVICE void copy_piece(const CopyArgs& args, const CopyPiece& piece, std::uint64_t begin,
                                     std::uint64_t end, unsigned lane, LaneChecksum& sum) {
  const bool checked = args.sum != nullptr;
  const std::uint64_t piece_end = piece.bucket_offset + piece.nbytes;
  const std::uint64_t from = begin > piece.bucket_offset ? begin : piece.bucket_offset;
  const std::uint64_t to = end < piece_end ? end : piece_end;
  const std::uint64_t skipped = from - piece.bucket_offset;
  CopySpan span;
  span.bucket = args.bucket + from;
  span.bucket_offset = from;
  span.nbytes = static_cast<std::uint32_t>(to - from);

  if (piece.layout != 0 && piece.address != 0) {
    const std::uint64_t* const words = args.layouts + (piece.layout - 1);
    const CopyLayout layout = read_layout(words, piece.address);
    const std::uint64_t flip = kDirection == CopyDirection::kPack ? words[2 + lane % 2] : 0;
    span.tensor = piece.tensor_offset + skipped;
    copy_strided<kDirection>(span, layout, flip, lane, checked, sum);
    copy_strided_tail<kDirection>(span, layout, flip, lane, checked, sum);
    return;
  }
  span.tensor = piece.address != 0 ? piece.address + skipped : 0;
  switch (alignment_of(span.tensor, kVectorBytes)) {
    case 16: copy_contiguous<kDirection, 16>(span, lane, checked, sum); break;
    case 8: copy_contiguous<kDirection, 8>(span, lane, checked, sum); break;
    case 4: copy_contiguous<kDirection, 4>(span, lane, checked, sum); break;
    case 2: copy_contiguous<kDirection, 2>(span, lane, checked, sum); break;
    default: copy_contiguous<kDirection, 1>(span, lane, checked, sum);
  }
  copy_contiguous_tail<kDirection>(span, lane, checked, sum);
}

// All that one lane does in a launch of `warps` warps in all.
template <CopyDirection kDirection>
FASTSYNC_HOST_DEVICE LaneChecksum copy_lane(const CopyArgs& args, std::uint64_t warp, std::uint64_t warps,
                                            unsigned lane) {
  LaneChecksum sum;
  if (args.count == 0) return sum;
  std::uint32_t first = 0;
  const std::uint64_t origin = args.pieces[0].bucket_offset;
  FASTSYNC_NO_UNROLL
  for (std::uint64_t begin = origin + warp * kCopyUnitBytes; begin < args.used_bytes; begin += warps * kCopyUnitBytes) {
    const std::uint64_t end = begin + kCopyUnitBytes;
    first = find_piece(args, begin, first);
    FASTSYNC_NO_UNROLL
    for (std::uint32_t i = first; i < args.count; ++i) {
      const CopyPiece piece = args.pieces[i];
      if (piece.bucket_offset >= end) break;
      if (kDirection == CopyDirection::kUnpack && piece.address == 0 && args.sum == nullptr) continue;
      copy_piece<kDirection>(args, piece, begin, end, lane, sum);
    }
  }
  return sum;
}

// ---- The grid on a CPU ----------------------------------------------------------------------------------------------

#if !defined(__CUDACC__)

// 0 ... count - 1, each once, in an order of no pattern that code could rely on.
template <typename Visit>
void visit_scrambled(std::uint64_t count, std::uint64_t seed, const Visit& visit) {
  const std::uint64_t mask = std::bit_ceil(count) - 1;
  for (std::uint64_t i = 0; i <= mask; ++i) {
    const std::uint64_t index = (i * 0x9E3779B97F4A7C15ULL + seed) & mask;  // odd, hence a permutation
    if (index < count) visit(index);
  }
}

template <CopyDirection kDirection>
void run_grid(const CopyArgs& args, std::uint64_t warps) {
  LaneChecksum total;
  visit_scrambled(warps, warps / 3, [&](std::uint64_t warp) {
    visit_scrambled(kWarpLanes, warp, [&](std::uint64_t lane) {
      const LaneChecksum sum = copy_lane<kDirection>(args, warp, warps, static_cast<unsigned>(lane));
      total.product += sum.product;
      total.sum += sum.sum;
    });
  });
  if (args.sum == nullptr) return;
  std::atomic_ref(args.sum->product).fetch_add(total.product, std::memory_order_relaxed);
  std::atomic_ref(args.sum->sum).fetch_add(total.sum, std::memory_order_relaxed);
}

// A launch of so many warps, at least 1.
inline void copy_on_host_grid(CopyDirection direction, const CopyArgs& args, std::uint64_t warps) {
  if (direction == CopyDirection::kPack) {
    run_grid<CopyDirection::kPack>(args, warps);
  } else {
    run_grid<CopyDirection::kUnpack>(args, warps);
  }
}

#endif

}  // namespace detail

#if !defined(__CUDACC__)

// The launch on the calling thread: every lane's own code, one lane after the other, warps and lanes in scrambled
// order. Warps have several units each, and few enough for the caches. Throws InternalError for an access that a GPU
// would trap; nothing else.
inline void copy_on_host(CopyDirection direction, const CopyArgs& args) {
  constexpr std::uint64_t kUnitsPerWarp = 3;
  if (args.count == 0) return;
  const std::uint64_t bytes = args.used_bytes - args.pieces[0].bucket_offset;
  detail::copy_on_host_grid(direction, args, copy_units(bytes) / kUnitsPerWarp + 1);
}

#endif

}  // namespace fastsync
