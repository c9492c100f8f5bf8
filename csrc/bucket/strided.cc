#include "bucket/strided.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace fastsync::detail {
namespace {

// Small enough to stay in the first-level cache until it is checked.
constexpr std::int64_t kStepBytes = 16 * 1024;
constexpr std::int64_t kMaxTile = 64;
constexpr std::size_t kMaxTileItemsize = 16;

// Elements along one side of a square tile: a row of it is one to four cache lines, all of it 4 to 16 KiB.
constexpr std::int64_t tile_side(std::int64_t itemsize) {
  if (itemsize <= 2) return kMaxTile;
  return itemsize <= 8 ? 32 : 16;
}

// Elements need not be aligned to their size, hence memcpy; the compiler makes a single load and store of each.
template <std::size_t kItemsize, Direction kDirection>
inline void move_element(PackedPointer<kDirection> packed, std::byte* strided) noexcept {
  if constexpr (kDirection == Direction::kGather) {
    std::memcpy(packed, strided, kItemsize);
  } else {
    std::memcpy(strided, packed, kItemsize);
  }
}

template <std::size_t kItemsize, Direction kDirection>
void move_elements(PackedPointer<kDirection> packed, std::byte* strided, std::int64_t count,
                   std::int64_t stride) noexcept {
  constexpr auto kItem = static_cast<std::int64_t>(kItemsize);
  for (std::int64_t i = 0; i < count; ++i) {
    move_element<kItemsize, kDirection>(packed + i * kItem, strided + i * stride);
  }
}

// Sixteen bytes of elements. `pitch` below is the distance of neighbouring columns (or rows) in bytes.
template <std::size_t kItemsize>
struct Lanes;
template <>
struct Lanes<1> {
  typedef std::uint8_t Vector __attribute__((vector_size(16)));
};
template <>
struct Lanes<2> {
  typedef std::uint16_t Vector __attribute__((vector_size(16)));
};
template <>
struct Lanes<4> {
  typedef std::uint32_t Vector __attribute__((vector_size(16)));
};
template <>
struct Lanes<8> {
  typedef std::uint64_t Vector __attribute__((vector_size(16)));
};

// a0 b0 a1 b1 ... of the lower halves, or of the upper ones.
template <bool kUpper, typename Vector, std::size_t... kLane>
inline Vector interleave(Vector a, Vector b, std::index_sequence<kLane...>) noexcept {
  constexpr std::size_t kLanes = sizeof...(kLane);
#if defined(__clang__)
  return __builtin_shufflevector(a, b, ((kLane % 2 * kLanes) + kLane / 2 + (kUpper ? kLanes / 2 : 0))...);
#else
  return __builtin_shuffle(a, b, Vector{((kLane % 2 * kLanes) + kLane / 2 + (kUpper ? kLanes / 2 : 0))...});
#endif
}

// A square of 16 bytes by as many lines as fit elements into them. Each round interleaves the first half of the lines
// with the second, which moves one bit of the line number into the lane number and one back.
template <std::size_t kItemsize>
inline void transpose_square(std::byte* dst, std::int64_t dst_pitch, const std::byte* src,
                             std::int64_t src_pitch) noexcept {
  using Vector = typename Lanes<kItemsize>::Vector;
  constexpr std::size_t kLanes = sizeof(Vector) / kItemsize;
  constexpr auto kSequence = std::make_index_sequence<kLanes>();
  std::array<Vector, kLanes> lines;
  for (std::size_t i = 0; i < kLanes; ++i) {
    std::memcpy(&lines[i], src + static_cast<std::int64_t>(i) * src_pitch, sizeof(Vector));
  }
  for (std::size_t round = 1; round < kLanes; round *= 2) {
    std::array<Vector, kLanes> next;
    for (std::size_t i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = interleave<false>(lines[i], lines[i + kLanes / 2], kSequence);
      next[2 * i + 1] = interleave<true>(lines[i], lines[i + kLanes / 2], kSequence);
    }
    lines = next;
  }
  for (std::size_t i = 0; i < kLanes; ++i) {
    std::memcpy(dst + static_cast<std::int64_t>(i) * dst_pitch, &lines[i], sizeof(Vector));
  }
}

// How many columns ahead of the copy to ask for memory: each is a place of its own, which no hardware foresees.
constexpr std::int64_t kColumnsAhead = 24;

// Moves rows x columns between a plane of the view and a tile that stays in the first-level cache.
template <std::size_t kItemsize, Direction kDirection>
void move_tile(PackedPointer<kDirection> tile, std::byte* strided, std::int64_t rows, std::int64_t columns,
               std::int64_t row_stride, std::int64_t column_stride) noexcept {
  constexpr auto kItem = static_cast<std::int64_t>(kItemsize);
  constexpr std::int64_t kLanes = kItem < 16 ? 16 / kItem : 1;
  const std::int64_t tile_pitch = columns * kItem;
  const auto move_one_by_one = [&](std::int64_t first_row, std::int64_t column) {
    for (std::int64_t r = first_row; r < rows; ++r) {
      move_element<kItemsize, kDirection>(tile + r * tile_pitch + column * kItem,
                                          strided + r * row_stride + column * column_stride);
    }
  };
  std::int64_t c = 0;
  if (kLanes > 1 && row_stride == kItem) {
    const std::int64_t square_rows = rows - rows % kLanes;
    for (; c + kLanes <= columns; c += kLanes) {
      for (std::int64_t k = c; k < c + kLanes; ++k) {
        // Beyond the view's end it is wasted, but never wrong.
        const std::byte* ahead = strided + (k + kColumnsAhead) * column_stride;
        for (std::int64_t at = 0; at < rows * kItem; at += 64) {
          __builtin_prefetch(ahead + at, kDirection == Direction::kScatter ? 1 : 0, 3);
        }
      }
      if constexpr (kLanes > 1) {
        for (std::int64_t r = 0; r < square_rows; r += kLanes) {
          if constexpr (kDirection == Direction::kGather) {
            transpose_square<kItemsize>(tile + r * tile_pitch + c * kItem, tile_pitch,
                                        strided + r * kItem + c * column_stride, column_stride);
          } else {
            transpose_square<kItemsize>(strided + r * kItem + c * column_stride, column_stride,
                                        tile + r * tile_pitch + c * kItem, tile_pitch);
          }
        }
      }
      for (std::int64_t k = c; k < c + kLanes; ++k) move_one_by_one(square_rows, k);
    }
  }
  for (; c < columns; ++c) move_one_by_one(0, c);
}

// Moves a plane of rows x columns, row after row in packed memory, whose rows are close together in the view. Walking
// it row by row would touch one cache line for each element, and again for each row. So it goes tile by tile, and
// through a buffer: whole rows of a tile then go to packed memory, which stays in order even where its rows are a
// multiple of the cache's way size apart.
template <std::size_t kItemsize, Direction kDirection>
void move_plane(PackedPointer<kDirection> packed, std::byte* strided, std::int64_t rows, std::int64_t columns,
                std::int64_t row_stride, std::int64_t column_stride) noexcept {
  constexpr auto kItem = static_cast<std::int64_t>(kItemsize);
  constexpr std::int64_t kSide = tile_side(kItem);
  if (columns <= kSide) {  // the plane is a tile
    move_tile<kItemsize, kDirection>(packed, strided, rows, columns, row_stride, column_stride);
    return;
  }
  alignas(64) std::byte tile[kSide * kSide * kItem];
  for (std::int64_t c = 0; c < columns; c += kSide) {
    const std::int64_t tile_columns = std::min(kSide, columns - c);
    std::byte* corner = strided + c * column_stride;
    const auto row_bytes = static_cast<std::size_t>(tile_columns * kItem);
    if constexpr (kDirection == Direction::kGather) {
      move_tile<kItemsize, kDirection>(tile, corner, rows, tile_columns, row_stride, column_stride);
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      const PackedPointer<kDirection> packed_row = packed + (r * columns + c) * kItem;
      std::byte* tile_row = tile + r * tile_columns * kItem;
      if constexpr (kDirection == Direction::kGather) {
        std::memcpy(packed_row, tile_row, row_bytes);
      } else {
        std::memcpy(tile_row, packed_row, row_bytes);
      }
    }
    if constexpr (kDirection == Direction::kScatter) {
      move_tile<kItemsize, kDirection>(tile, corner, rows, tile_columns, row_stride, column_stride);
    }
  }
}

}  // namespace

StridedCursor::StridedCursor(const TensorView& view, std::uint64_t first_element) noexcept
    : at_(view.data), itemsize_(static_cast<std::int64_t>(view.itemsize)) {
  const std::size_t dims = view.shape.size();
  last_ = dims - 1;
  for (std::size_t k = dims; k-- > 0;) {
    size_[k] = view.shape[k];
    stride_[k] = view.strides[k];
    index_[k] = static_cast<std::int64_t>(first_element % static_cast<std::uint64_t>(size_[k]));
    first_element /= static_cast<std::uint64_t>(size_[k]);
    at_ += index_[k] * stride_[k];
  }
  transposed_ = dims >= 2 && view.itemsize <= kMaxTileItemsize && !has_runs() && size_[last_ - 1] > 1 &&
                std::abs(stride_[last_ - 1]) < std::abs(stride_[last_]);
  tile_ = tile_side(itemsize_);
}

void StridedCursor::carry(std::size_t dim) noexcept {
  while (index_[dim] == size_[dim]) {
    at_ -= size_[dim] * stride_[dim];
    index_[dim] = 0;
    if (dim == 0) return;  // past the last element; nothing more will be asked for
    --dim;
    ++index_[dim];
    at_ += stride_[dim];
  }
}

void StridedCursor::advance(std::int64_t elements) noexcept {
  index_[last_] += elements;
  at_ += elements * stride_[last_];
  carry(last_);
}

StridedCursor::Run StridedCursor::next_run(std::uint64_t max_bytes) noexcept {
  const std::int64_t count = std::min(size_[last_] - index_[last_], static_cast<std::int64_t>(max_bytes) / itemsize_);
  const Run run{at_, static_cast<std::uint64_t>(count * itemsize_)};
  advance(count);
  return run;
}

template <Direction kDirection>
void StridedCursor::move_row(PackedPointer<kDirection> packed, std::int64_t count) const noexcept {
  const std::int64_t stride = stride_[last_];
  if (stride == itemsize_) {
    const auto nbytes = static_cast<std::size_t>(count * itemsize_);
    if constexpr (kDirection == Direction::kGather) {
      std::memcpy(packed, at_, nbytes);
    } else {
      std::memcpy(at_, packed, nbytes);
    }
    return;
  }
  switch (itemsize_) {
    case 1: return move_elements<1, kDirection>(packed, at_, count, stride);
    case 2: return move_elements<2, kDirection>(packed, at_, count, stride);
    case 4: return move_elements<4, kDirection>(packed, at_, count, stride);
    case 8: return move_elements<8, kDirection>(packed, at_, count, stride);
    case 16: return move_elements<16, kDirection>(packed, at_, count, stride);
    case 32: return move_elements<32, kDirection>(packed, at_, count, stride);
    case 64: return move_elements<64, kDirection>(packed, at_, count, stride);
    case 128: return move_elements<128, kDirection>(packed, at_, count, stride);
    case 256: return move_elements<256, kDirection>(packed, at_, count, stride);
    default: return;  // normalize() admits no other
  }
}

template <Direction kDirection>
void StridedCursor::move_rows(PackedPointer<kDirection> packed, std::int64_t rows) const noexcept {
  const std::int64_t columns = size_[last_];
  const std::int64_t row_stride = stride_[last_ - 1];
  const std::int64_t column_stride = stride_[last_];
  switch (itemsize_) {
    case 1: return move_plane<1, kDirection>(packed, at_, rows, columns, row_stride, column_stride);
    case 2: return move_plane<2, kDirection>(packed, at_, rows, columns, row_stride, column_stride);
    case 4: return move_plane<4, kDirection>(packed, at_, rows, columns, row_stride, column_stride);
    case 8: return move_plane<8, kDirection>(packed, at_, rows, columns, row_stride, column_stride);
    case 16: return move_plane<16, kDirection>(packed, at_, rows, columns, row_stride, column_stride);
    default: return;  // not transposed_
  }
}

template <Direction kDirection>
std::uint64_t StridedCursor::step(PackedPointer<kDirection> packed, std::uint64_t max_elements) noexcept {
  const auto limit = static_cast<std::int64_t>(max_elements);
  if (transposed_ && index_[last_] == 0) {
    const std::size_t row = last_ - 1;
    const std::int64_t rows = std::min({tile_, size_[row] - index_[row], limit / size_[last_]});
    if (rows > 1) {
      move_rows<kDirection>(packed, rows);
      index_[row] += rows;
      at_ += rows * stride_[row];
      carry(row);
      return static_cast<std::uint64_t>(rows * size_[last_]);
    }
  }
  // Row by row. In a transposed view that is only what a fragment's edge leaves of a row.
  const std::int64_t enough = transposed_ ? 1 : kStepBytes / itemsize_;
  std::int64_t moved = 0;
  do {
    const std::int64_t count = std::min(size_[last_] - index_[last_], limit - moved);
    move_row<kDirection>(packed + moved * itemsize_, count);
    advance(count);
    moved += count;
  } while (moved < limit && moved < enough);
  return static_cast<std::uint64_t>(moved);
}

template std::uint64_t StridedCursor::step<Direction::kGather>(std::byte*, std::uint64_t) noexcept;
template std::uint64_t StridedCursor::step<Direction::kScatter>(const std::byte*, std::uint64_t) noexcept;

}  // namespace fastsync::detail
