// Walks a strided view in logical order and moves elements between it and packed memory. Private to bucket/.
//
// Threads: one thread at a time. Errors: none; the view went through normalize().
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "bucket/manifest.h"
#include "bucket/packer.h"

namespace fastsync::detail {

enum class Direction { kGather, kScatter };  // into packed memory, out of it

template <Direction kDirection>
using PackedPointer = std::conditional_t<kDirection == Direction::kGather, std::byte*, const std::byte*>;

class StridedCursor {
 public:
  // `first_element` in logical order. Keeps pointers into the view's memory, not to the view.
  StridedCursor(const TensorView& view, std::uint64_t first_element) noexcept;

  // Whether the innermost dimension is contiguous; then next_run() may be used as well.
  [[nodiscard]] bool has_runs() const noexcept { return stride_[last_] == itemsize_; }
  [[nodiscard]] std::uint64_t run_bytes() const noexcept {
    return static_cast<std::uint64_t>(size_[last_] * itemsize_);
  }
  // The contiguous bytes at the cursor, at most `max_bytes` (whole elements); moves past them.
  struct Run {
    std::byte* data;
    std::uint64_t nbytes;
  };
  [[nodiscard]] Run next_run(std::uint64_t max_bytes) noexcept;

  // Moves at least one and at most `max_elements` elements (not zero), about as many as stay in the cache, and stops
  // where it is cheap to go on. Returns how many.
  template <Direction kDirection>
  std::uint64_t step(PackedPointer<kDirection> packed, std::uint64_t max_elements) noexcept;

 private:
  template <Direction kDirection>
  void move_row(PackedPointer<kDirection> packed, std::int64_t count) const noexcept;
  template <Direction kDirection>
  void move_rows(PackedPointer<kDirection> packed, std::int64_t rows) const noexcept;
  void advance(std::int64_t elements) noexcept;  // within the innermost row, or to its end
  void carry(std::size_t dim) noexcept;          // index_[dim] reached its end

  std::array<std::int64_t, kMaxDims> size_;
  std::array<std::int64_t, kMaxDims> stride_;  // in bytes
  std::array<std::int64_t, kMaxDims> index_;
  std::size_t last_ = 0;  // the innermost dimension
  std::byte* at_;
  std::int64_t itemsize_;
  std::int64_t tile_;  // rows of a transposed plane that are moved together
  bool transposed_;    // neighbours in memory are neighbours in the last dimension but one
};

extern template std::uint64_t StridedCursor::step<Direction::kGather>(std::byte*, std::uint64_t) noexcept;
extern template std::uint64_t StridedCursor::step<Direction::kScatter>(const std::byte*, std::uint64_t) noexcept;

}  // namespace fastsync::detail
