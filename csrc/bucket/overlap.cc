// overlaps_itself() and share_bytes() of packer.h.
//
// Both ask whether two elements at different indices touch one byte: whether a sum of stride * index, each index in its
// own range, can fall into a short interval. The search decides one index after the other, largest stride first, and
// prunes by what the smaller strides can still add (a range, and a common divisor). Where strides nest, as in every
// view made by slicing and transposing, one value of each index survives, so the search never branches.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <numeric>

#include "bucket/packer.h"

namespace fastsync {
namespace {

__extension__ typedef __int128 Wide;  // a sum of two extents of up to 2^62 and an address

// stride * index, index in [0, last].
struct Term {
  std::int64_t stride = 0;  // > 0
  std::int64_t last = 0;    // > 0
};

class BoundedSum {
 public:
  void add(std::int64_t stride, std::int64_t last) noexcept { terms_[count_++] = {stride, last}; }
  // Terms of one stride are one term: two indices in [0, m] and [0, n] add up to every index in [0, m + n].
  void merge_equal_strides() noexcept {
    sort();
    std::size_t kept = 0;
    for (std::size_t k = 0; k < count_; ++k) {
      if (kept > 0 && terms_[kept - 1].stride == terms_[k].stride) {
        terms_[kept - 1].last += terms_[k].last;
      } else {
        terms_[kept++] = terms_[k];
      }
    }
    count_ = kept;
  }
  // Can the sum be in [low, high]?
  [[nodiscard]] bool reaches(Wide low, Wide high) noexcept {
    sort();
    rest_max_[count_] = 0;
    rest_divisor_[count_] = 0;
    for (std::size_t k = count_; k-- > 0;) {
      rest_max_[k] = rest_max_[k + 1] + Wide{terms_[k].stride} * terms_[k].last;
      rest_divisor_[k] = std::gcd(rest_divisor_[k + 1], terms_[k].stride);
    }
    return search(0, low, high);
  }

 private:
  void sort() noexcept {
    std::sort(terms_.begin(), terms_.begin() + static_cast<std::ptrdiff_t>(count_),
              [](const Term& a, const Term& b) { return a.stride > b.stride; });
  }
  // Over terms k and up.
  [[nodiscard]] bool search(std::size_t k, Wide low, Wide high) const noexcept {
    low = std::max(low, Wide{0});
    high = std::min(high, rest_max_[k]);
    if (low > high) return false;
    if (low == 0 || high == rest_max_[k]) return true;  // all indices first, or all last
    const Wide divisor = rest_divisor_[k];
    if (high / divisor * divisor < low) return false;
    const Wide stride = terms_[k].stride;
    const Wide short_of = low - rest_max_[k + 1];
    const Wide first = short_of <= 0 ? Wide{0} : (short_of + stride - 1) / stride;
    const Wide last = std::min(Wide{terms_[k].last}, high / stride);
    for (Wide index = last; index >= first; --index) {
      if (search(k + 1, low - index * stride, high - index * stride)) return true;
    }
    return false;
  }

  std::array<Term, 2 * kMaxDims> terms_;
  std::array<Wide, 2 * kMaxDims + 1> rest_max_;
  std::array<std::int64_t, 2 * kMaxDims + 1> rest_divisor_;
  std::size_t count_ = 0;
};

// A view as equal runs of bytes: the innermost dimension, where that is contiguous, belongs to the run.
struct Runs {
  std::int64_t nbytes = 0;
  std::size_t dims = 0;  // that choose the run
};

Runs runs_of(const TensorView& view) noexcept {
  if (view.contiguous) return {static_cast<std::int64_t>(view.nbytes), 0};
  const auto itemsize = static_cast<std::int64_t>(view.itemsize);
  const std::size_t dims = view.shape.size();
  if (dims > 0 && view.strides[dims - 1] == itemsize) return {itemsize * view.shape[dims - 1], dims - 1};
  return {itemsize, dims};
}

}  // namespace

bool overlaps_itself(const TensorView& view) noexcept {
  if (view.nbytes == 0) return false;
  const Runs runs = runs_of(view);
  std::array<Term, kMaxDims> terms;
  std::size_t count = 0;
  for (std::size_t k = 0; k < runs.dims; ++k) {
    if (view.shape[k] <= 1) continue;
    if (view.strides[k] == 0) return true;
    terms[count++] = {std::abs(view.strides[k]), view.shape[k] - 1};
  }
  // Two runs differ first in index k, by 1 or more (or less: that is the same pair the other way round), and anyhow in
  // the indices behind it. They overlap if they start less than a run apart.
  for (std::size_t k = 0; k < count; ++k) {
    BoundedSum distance;
    Wide smallest = terms[k].stride;
    if (terms[k].last > 1) distance.add(terms[k].stride, terms[k].last - 1);
    for (std::size_t j = k + 1; j < count; ++j) {
      distance.add(terms[j].stride, 2 * terms[j].last);
      smallest -= Wide{terms[j].stride} * terms[j].last;
    }
    if (distance.reaches(-(runs.nbytes - 1) - smallest, runs.nbytes - 1 - smallest)) return true;
  }
  return false;
}

bool share_bytes(const TensorView& a, const TensorView& b) noexcept {
  if (a.nbytes == 0 || b.nbytes == 0) return false;
  const ByteRange range_a = touched_range(a);
  const ByteRange range_b = touched_range(b);
  const Wide low_a = Wide{reinterpret_cast<std::intptr_t>(a.data)} + range_a.low;
  const Wide low_b = Wide{reinterpret_cast<std::intptr_t>(b.data)} + range_b.low;
  const Wide high_a = low_a + (range_a.high - range_a.low);
  const Wide high_b = low_b + (range_b.high - range_b.low);
  if (high_a <= low_b || high_b <= low_a) return false;
  if (a.contiguous && b.contiguous) return true;

  // Start of a's run minus start of b's: from the first of a and the last of b upwards, all terms add.
  const Runs runs_a = runs_of(a);
  const Runs runs_b = runs_of(b);
  BoundedSum distance;
  const auto add_dims = [&](const TensorView& view, const Runs& runs) {
    for (std::size_t k = 0; k < runs.dims; ++k) {
      if (view.shape[k] > 1 && view.strides[k] != 0) distance.add(std::abs(view.strides[k]), view.shape[k] - 1);
    }
  };
  add_dims(a, runs_a);
  add_dims(b, runs_b);
  distance.merge_equal_strides();
  const Wide smallest = low_a - (high_b - runs_b.nbytes);
  return distance.reaches(-(runs_a.nbytes - 1) - smallest, runs_b.nbytes - 1 - smallest);
}

}  // namespace fastsync
