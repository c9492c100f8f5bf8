// What the tests of the copy kernel move: tensors of every kind, guarded buckets, and the table that tells the kernel
// what the host packer is told by fragments and views.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bucket/bucket_plan.h"
#include "bucket/packer.h"
#include "common/checksum.h"
#include "common/error.h"
#include "device/copy_kernel.h"

namespace fastsync::testing {

// ---- Memory ---------------------------------------------------------------------------------------------------------

using Bytes = std::vector<std::byte>;
inline constexpr std::byte kGuard{0x5C};

inline void fill_random(std::span<std::byte> bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::size_t i = 0;
  for (; bytes.size() - i >= 8; i += 8) {
    const std::uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, 8);
  }
  for (; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(random());
}

// A bucket with guards around it, aligned as buckets are.
class Bucket {
 public:
  explicit Bucket(std::uint64_t nbytes) : memory_(nbytes + 3 * kAlignment, kGuard), nbytes_(nbytes) {
    void* at = memory_.data() + kAlignment;
    std::size_t space = nbytes + 2 * kAlignment;
    data_ = static_cast<std::byte*>(std::align(kAlignment, nbytes + kAlignment, at, space));
  }
  Bucket(const Bucket&) = delete;
  Bucket& operator=(const Bucket&) = delete;
  [[nodiscard]] std::byte* data() noexcept { return data_; }
  // The bucket and a guard on either side.
  [[nodiscard]] Bytes image() const { return {data_ - kAlignment, data_ + nbytes_ + kAlignment}; }
  void randomize(std::uint64_t seed) { fill_random({data_, static_cast<std::size_t>(nbytes_)}, seed); }

 private:
  Bytes memory_;
  std::uint64_t nbytes_;
  std::byte* data_ = nullptr;
};

// Readable memory between two pages that are not, which end the process when touched.
class FencedPages {
 public:
  explicit FencedPages(std::size_t nbytes) : page_(static_cast<std::size_t>(::sysconf(_SC_PAGESIZE))) {
    inner_ = (nbytes + page_ - 1) / page_ * page_;
    void* at = ::mmap(nullptr, inner_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<std::byte*>(at);
    if (::mprotect(base_ + page_, inner_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    fill_random({begin(), inner_}, 7);
  }
  ~FencedPages() { ::munmap(base_, inner_ + 2 * page_); }
  FencedPages(const FencedPages&) = delete;
  FencedPages& operator=(const FencedPages&) = delete;
  [[nodiscard]] std::byte* begin() const noexcept { return base_ + page_; }
  [[nodiscard]] std::byte* end() const noexcept { return begin() + inner_; }

 private:
  std::size_t page_;
  std::size_t inner_ = 0;
  std::byte* base_ = nullptr;
};

// Address space of which only what is touched becomes memory.
class SparseMemory {
 public:
  explicit SparseMemory(std::size_t nbytes) : nbytes_(nbytes) {
    void* at = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    data_ = at == MAP_FAILED ? nullptr : static_cast<std::byte*>(at);
  }
  ~SparseMemory() {
    if (data_ != nullptr) ::munmap(data_, nbytes_);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  [[nodiscard]] std::byte* data() const noexcept { return data_; }

 private:
  std::size_t nbytes_;
  std::byte* data_ = nullptr;
};

// ---- From the host packer's terms to the kernel's -------------------------------------------------------------------

inline std::array<std::uint64_t, 2> flips_of(const TensorView& view) {
  std::array<unsigned char, 16> bytes{};
  const std::uint32_t part = view.complex ? view.itemsize / 2 : view.itemsize;
  for (std::uint32_t i = 0; i < 16; ++i) {
    const std::uint32_t byte = i % view.itemsize;
    const bool sign_of_real = byte == part - 1;
    const bool sign_of_imaginary = view.complex && byte == view.itemsize - 1;
    if ((sign_of_real && view.flip_real != 0) || (sign_of_imaginary && view.flip_imag != 0)) bytes[i] = 0x80;
  }
  return std::bit_cast<std::array<std::uint64_t, 2>>(bytes);
}

struct Table {
  std::vector<CopyPiece> pieces;
  std::vector<std::uint64_t> layouts;

  Table(CopyDirection direction, std::span<const Fragment> fragments, std::span<const TensorView> views) {
    for (const Fragment& fragment : fragments) add(direction, fragment, views[fragment.tensor]);
  }

  // The sum that the kernel adds is the return value, so that it compares with pack() and unpack().
  Checksum run(CopyDirection direction, std::byte* bucket, bool verify, std::uint64_t warps = 0) const {
    Checksum sum;
    const CopyArgs args = args_of(bucket, verify ? &sum : nullptr);
    if (warps == 0) {
      copy_on_host(direction, args);
    } else {
      detail::copy_on_host_grid(direction, args, warps);
    }
    return sum;
  }

  [[nodiscard]] CopyArgs args_of(std::byte* bucket, Checksum* sum) const {
    CopyArgs args;
    args.pieces = pieces.data();
    args.layouts = layouts.empty() ? nullptr : layouts.data();
    args.bucket = bucket;
    args.sum = sum;
    args.count = static_cast<std::uint32_t>(pieces.size());
    args.used_bytes = pieces.empty() ? 0 : pieces.back().bucket_offset + pieces.back().nbytes;
    return args;
  }

 private:
  void add(CopyDirection direction, const Fragment& fragment, const TensorView& view) {
    CopyPiece piece;
    piece.bucket_offset = fragment.bucket_offset;
    piece.nbytes = fragment.nbytes;
    const bool flips = direction == CopyDirection::kPack && (view.flip_real != 0 || view.flip_imag != 0);
    if (view.nbytes == 0) {
      // No destination.
    } else if (view.contiguous && !flips) {
      piece.address = reinterpret_cast<std::uintptr_t>(view.data) + fragment.tensor_offset;
    } else {
      piece.address = reinterpret_cast<std::uintptr_t>(view.data);
      piece.tensor_offset = fragment.tensor_offset;
      piece.layout = layouts.size() + 1;
      const std::array<std::uint64_t, 2> pattern = flips ? flips_of(view) : std::array<std::uint64_t, 2>{};
      const std::vector<std::uint64_t> sizes = view.contiguous
                                                   ? std::vector<std::uint64_t>{view.nbytes / view.itemsize}
                                                   : std::vector<std::uint64_t>(view.shape.begin(), view.shape.end());
      const std::vector<std::uint64_t> strides =
          view.contiguous ? std::vector<std::uint64_t>{view.itemsize}
                          : std::vector<std::uint64_t>(view.strides.begin(), view.strides.end());
      layouts.insert(layouts.end(), {sizes.size(), view.itemsize, pattern[0], pattern[1]});
      layouts.insert(layouts.end(), sizes.begin(), sizes.end());
      layouts.insert(layouts.end(), strides.begin(), strides.end());
    }
    pieces.push_back(piece);
  }
};

// ---- Tensors --------------------------------------------------------------------------------------------------------

// A view and memory of its own, as large as its strides need, the first byte `skew` bytes off an aligned one.
struct Tensor {
  Bytes memory;
  TensorView view;
};

inline void give_memory(Tensor& tensor, std::size_t skew, std::uint64_t seed) {
  constexpr std::size_t kGuardBytes = 64;
  constexpr std::size_t kAligned = 16;
  const ByteRange range = touched_range(tensor.view);
  tensor.memory.resize(static_cast<std::size_t>(range.high - range.low) + 2 * kGuardBytes + 2 * kAligned);
  fill_random(tensor.memory, seed);
  std::byte* first = tensor.memory.data() + kGuardBytes;
  first += (kAligned - reinterpret_cast<std::uintptr_t>(first) % kAligned) % kAligned + skew;
  tensor.view.data = first - range.low;
}

inline Tensor contiguous_tensor(std::uint64_t nbytes, std::size_t skew, std::uint64_t seed) {
  Tensor tensor;
  tensor.view.nbytes = nbytes;
  give_memory(tensor, skew, seed);
  return tensor;
}

// Strides in bytes.
inline Tensor strided_tensor(std::uint32_t itemsize, std::vector<std::int64_t> shape, std::vector<std::int64_t> strides,
                             std::size_t skew, std::uint64_t seed) {
  Tensor tensor;
  tensor.view.itemsize = itemsize;
  tensor.view.nbytes = itemsize;
  for (const std::int64_t size : shape) tensor.view.nbytes *= static_cast<std::uint64_t>(size);
  tensor.view.contiguous = false;
  tensor.view.shape = std::move(shape);
  tensor.view.strides = std::move(strides);
  normalize(tensor.view);
  give_memory(tensor, skew, seed);
  return tensor;
}

inline std::uint64_t random_size(std::mt19937& random) {
  switch (random() % 5) {
    case 0: return 1 + random() % 64;
    case 1: return 200 + random() % 100;
    case 2: return 1 + random() % 5000;
    case 3: return kCopyUnitBytes - 40 + random() % 80;
    default: return 30000 + random() % 50000;
  }
}

// A permutation of a row-major base's dimensions, with steps, gaps and reversals, and expansions where they may be.
inline Tensor random_strided(std::mt19937& random, bool may_expand) {
  const std::uint32_t itemsize = 1U << (random() % (random() % 4 == 0 ? 9 : 5));
  const std::size_t dims = 1 + random() % 5;
  std::vector<std::size_t> order(dims);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::shuffle(order.begin(), order.end(), random);
  std::vector<std::int64_t> shape(dims);
  std::vector<std::int64_t> strides(dims);
  std::int64_t next = itemsize;
  std::int64_t elements = 1;
  constexpr std::int64_t kMostBytes = 60000;
  for (const std::size_t k : order) {
    const std::int64_t room = std::max<std::int64_t>(kMostBytes / itemsize / elements, 1);
    shape[k] = 1 + static_cast<std::int64_t>(random() % (random() % 3 == 0 ? 150 : 7)) % room;
    elements *= shape[k];
    strides[k] = next * (random() % 3 == 0 ? 1 + static_cast<std::int64_t>(random() % 3) : 1);
    next = strides[k] * (shape[k] + (random() % 3 == 0 ? static_cast<std::int64_t>(random() % 3) : 0));
    // Views made by hand need not be aligned to their elements.
    if (random() % 8 == 0) next += 1 + static_cast<std::int64_t>(random() % 7);
    if (random() % 5 == 0) strides[k] = -strides[k];
    if (may_expand && random() % 8 == 0) strides[k] = 0;
  }
  return strided_tensor(itemsize, shape, strides, random() % 3 == 0 ? random() % 16 : 0, random());
}

inline Tensor random_tensor(std::mt19937& random, bool source) {
  Tensor tensor;
  if (random() % 3 == 0) {
    tensor = random_strided(random, /*may_expand=*/source);
  } else {
    const std::uint32_t itemsize = 1U << (random() % 5);
    const std::uint64_t nbytes = (random_size(random) + itemsize - 1) / itemsize * itemsize;
    tensor = contiguous_tensor(nbytes, random() % 2 == 0 ? 0 : random() % 16, random());
    tensor.view.itemsize = itemsize;
  }
  if (source && tensor.view.itemsize <= 16 && random() % 3 == 0) {
    tensor.view.complex = tensor.view.itemsize >= 2 && random() % 2 == 0;
    tensor.view.flip_real = random() % 2;
    tensor.view.flip_imag = tensor.view.complex ? random() % 2 : 0;
  }
  return tensor;
}

inline std::vector<Tensor> random_tensors(std::mt19937& random, bool source) {
  std::vector<Tensor> tensors;
  const std::size_t count = 1 + random() % 12;
  while (tensors.size() < count) tensors.push_back(random_tensor(random, source));
  return tensors;
}

inline std::vector<TensorView> views_of(const std::vector<Tensor>& tensors) {
  std::vector<TensorView> views;
  for (const Tensor& tensor : tensors) views.push_back(tensor.view);
  return views;
}

// Cuts of all kinds: most tensors in one piece, or every one in many.
inline BucketPlanner random_plan(const std::vector<Tensor>& tensors, std::mt19937& random) {
  BucketPlanner planner(random() % 2 == 0 ? 1 + random() % 4096 : 1 + random() % 200000);
  for (const Tensor& tensor : tensors) planner.add(tensor.view.nbytes);
  planner.finish();
  return planner;
}

inline std::string describe_views(std::span<const Fragment> fragments, const std::vector<TensorView>& views) {
  std::string text;
  for (const Fragment& fragment : fragments) {
    const TensorView& view = views[fragment.tensor];
    text += concat("\n  ", fragment.nbytes, " bytes at ", fragment.bucket_offset, " from ", fragment.tensor_offset,
                   " of ", view.nbytes, ", itemsize ", view.itemsize,
                   ", address % 16 = ", reinterpret_cast<std::uintptr_t>(view.data) % 16, ", flips ",
                   int{view.flip_real}, int{view.flip_imag}, ", shape x stride:");
    for (std::size_t k = 0; k < view.shape.size(); ++k) text += concat(" ", view.shape[k], "x", view.strides[k]);
  }
  return text;
}

}  // namespace fastsync::testing
