#include "bucket/device_packer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/error.h"

namespace fastsync {

namespace {

constexpr std::uint64_t kLooseLayoutWords = kCopyLayoutHeaderWords + 2 * kMaxDims;
constexpr std::uint64_t kLooseStride = align_up(sizeof(CopyPiece) + kLooseLayoutWords * sizeof(std::uint64_t));

[[nodiscard]] bool has_layout(const TensorView& view, CopyDirection direction) {
  return !view.contiguous || (direction == CopyDirection::kPack && (view.flip_real != 0 || view.flip_imag != 0));
}

// What is xor-ed into 16 packed bytes: the sign bits of the elements (or of their parts) that they hold.
void flip_masks(const TensorView& view, std::uint64_t& low, std::uint64_t& high) {
  std::byte mask[16] = {};
  if (view.flip_real != 0 || view.flip_imag != 0) {
    // Little-endian: the sign is in the last byte of a part.
    const std::uint32_t part = view.complex ? view.itemsize / 2 : view.itemsize;
    for (std::uint32_t at = part - 1, number = 0; at < 16; at += part, ++number) {
      const bool imaginary = view.complex && number % 2 == 1;
      if (imaginary ? view.flip_imag != 0 : view.flip_real != 0) mask[at] = std::byte{0x80};
    }
  }
  std::memcpy(&low, mask, 8);
  std::memcpy(&high, mask + 8, 8);
}

}  // namespace

DevicePacker::DevicePacker(std::shared_ptr<DeviceRuntime> runtime, CopyDirection direction)
    : runtime_(std::move(runtime)),
      direction_(direction),
      stream_(runtime_, direction == CopyDirection::kPack ? "fastsync-pack" : "fastsync-unpack"),
      entered_(runtime_),
      reached_(runtime_),
      loose_done_{Event(runtime_), Event(runtime_)},
      device_sums_(Buffer::allocate(runtime_, MemoryKind::kDevice, kSums * sizeof(Checksum))),
      pinned_sums_(Buffer::allocate(runtime_, MemoryKind::kPinnedHost, kSums * sizeof(Checksum))) {}

DevicePacker::~DevicePacker() = default;

std::uint64_t DevicePacker::table_bytes() const noexcept {
  return device_table_.nbytes() + pinned_table_.nbytes() + loose_.nbytes() + device_sums_.nbytes() +
         pinned_sums_.nbytes();
}

void DevicePacker::begin(StreamView caller, Place place, bool verify) {
  caller_ = caller;
  current_ = place == Place::kOwn ? stream_.view() : caller;
  verify_ = verify;
  queued_ = verify;  // the fill below: late, it would clear what another sync's kernels have added
  first_sum_ = end_sum_ = 0;
  sums_.clear();
  if (place == Place::kOwn) {
    entered_.record(caller);
    entered_.stream_wait(current_);
  }
  if (verify_) runtime_->fill(device_sums_.data(), std::byte{0}, device_sums_.nbytes(), current_);
}

CopyPiece DevicePacker::describe(const Fragment& fragment, const TensorView& view,
                                 std::vector<std::uint64_t>& layouts) const {
  CopyPiece piece;
  piece.bucket_offset = fragment.bucket_offset;
  piece.nbytes = fragment.nbytes;
  if (view.nbytes == 0) return piece;  // no destination
  const auto base = reinterpret_cast<std::uint64_t>(view.data);
  if (!has_layout(view, direction_)) {
    piece.address = base + fragment.tensor_offset;
    return piece;
  }
  piece.address = base;
  piece.tensor_offset = fragment.tensor_offset;
  piece.layout = layouts.size() + 1;
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  if (direction_ == CopyDirection::kPack) flip_masks(view, low, high);
  const bool flat = view.contiguous;
  layouts.push_back(flat ? 1 : view.shape.size());
  layouts.push_back(view.itemsize);
  layouts.push_back(low);
  layouts.push_back(high);
  if (flat) {
    layouts.push_back(view.nbytes / view.itemsize);
    layouts.push_back(view.itemsize);
  } else {
    for (const std::int64_t size : view.shape) layouts.push_back(static_cast<std::uint64_t>(size));
    for (const std::int64_t stride : view.strides) layouts.push_back(static_cast<std::uint64_t>(stride));
  }
  return piece;
}

void DevicePacker::bind(std::span<const Fragment> fragments, std::span<const BucketLayout> buckets,
                        std::span<const TensorView> views, std::uint64_t stamp) {
  if (stamp != 0 && stamp == stamp_) return;
  stamp_ = 0;  // until the new tables are whole
  std::vector<CopyPiece> pieces;
  std::vector<std::uint64_t> layouts;
  pieces.reserve(fragments.size());
  // A tensor in several buckets has one layout.
  std::uint32_t last_tensor = ~std::uint32_t{0};
  std::uint64_t last_layout = 0;
  for (const Fragment& fragment : fragments) {
    const TensorView& view = views[fragment.tensor];
    if (fragment.tensor == last_tensor && last_layout != 0) {
      CopyPiece piece;
      piece.bucket_offset = fragment.bucket_offset;
      piece.nbytes = fragment.nbytes;
      piece.address = reinterpret_cast<std::uint64_t>(view.data);
      piece.tensor_offset = fragment.tensor_offset;
      piece.layout = last_layout;
      pieces.push_back(piece);
      continue;
    }
    pieces.push_back(describe(fragment, view, layouts));
    last_tensor = fragment.tensor;
    last_layout = pieces.back().layout;
  }
  ranges_.clear();
  used_.clear();
  for (const BucketLayout& bucket : buckets) {
    ranges_.emplace_back(bucket.first_fragment, bucket.first_fragment + bucket.fragment_count);
    used_.push_back(bucket.used_bytes);
  }
  layouts_offset_ = align_up(pieces.size() * sizeof(CopyPiece));
  has_layouts_ = !layouts.empty();
  const std::uint64_t needed = layouts_offset_ + layouts.size() * sizeof(std::uint64_t);
  if (needed == 0) {
    stamp_ = stamp;
    return;
  }
  if (device_table_.nbytes() < needed) {
    device_table_ = Buffer();
    pinned_table_ = Buffer();
    device_table_ = Buffer::allocate(runtime_, MemoryKind::kDevice, align_up(needed));
    pinned_table_ = Buffer::allocate(runtime_, MemoryKind::kPinnedHost, align_up(needed));
  }
  std::memcpy(pinned_table_.data(), pieces.data(), pieces.size() * sizeof(CopyPiece));
  if (has_layouts_) {
    std::memcpy(pinned_table_.data() + layouts_offset_, layouts.data(), layouts.size() * sizeof(std::uint64_t));
  }
  runtime_->copy(device_table_.data(), pinned_table_.data(), needed, current_);
  queued_ = true;
  stamp_ = stamp;
}

// Checksums lie in one stretch on the device: before it is full, what is there is brought home.
void DevicePacker::make_room(std::size_t index, Wait& wait) {
  if (index < end_sum_) return;  // another piece of the same bucket
  if (verify_ && index - first_sum_ >= kSums) {
    collect(wait);
    first_sum_ = index;
    runtime_->fill(device_sums_.data(), std::byte{0}, device_sums_.nbytes(), current_);
  }
  end_sum_ = index + 1;
}

void DevicePacker::launch(std::size_t index, CopyArgs args) {
  if (verify_) {
    args.sum = reinterpret_cast<Checksum*>(device_sums_.data()) + (index - first_sum_);
  }
  runtime_->launch_copy(direction_, args, current_);
  queued_ = true;
}

void DevicePacker::move(std::size_t index, std::byte* data, Wait& wait) {
  const auto [first, last] = ranges_.at(index);
  make_room(index, wait);
  if (first == last) return;
  CopyArgs args;
  args.pieces = reinterpret_cast<const CopyPiece*>(device_table_.data()) + first;
  args.layouts =
      has_layouts_ ? reinterpret_cast<const std::uint64_t*>(device_table_.data() + layouts_offset_) : nullptr;
  args.bucket = data;
  args.used_bytes = used_[index];
  args.count = static_cast<std::uint32_t>(last - first);
  launch(index, args);
}

void DevicePacker::move_piece(std::size_t index, std::byte* data, const Fragment& fragment, const TensorView& view,
                              StreamView caller, Wait& wait) {
  make_room(index, wait);
  if (loose_.nbytes() == 0) {
    loose_ = Buffer::allocate(runtime_, MemoryKind::kPinnedHost, kLoosePieces * kLooseStride);
  }
  constexpr std::size_t kHalf = kLoosePieces / 2;
  const std::size_t half = loose_next_ / kHalf;
  if (loose_next_ % kHalf == 0) {
    // The kernel reads the table when it runs: whoever used this half last must have run.
    loose_done_[half].synchronize(wait);
  }
  std::byte* const place = loose_.data() + loose_next_ * kLooseStride;
  std::vector<std::uint64_t> layouts;
  CopyPiece piece = describe(fragment, view, layouts);
  std::memcpy(place, &piece, sizeof(piece));
  if (!layouts.empty()) {
    std::memcpy(place + sizeof(piece), layouts.data(), layouts.size() * sizeof(std::uint64_t));
  }
  if (caller.handle() != current_.handle()) {
    entered_.record(caller);
    entered_.stream_wait(current_);
  }
  CopyArgs args;
  args.pieces = reinterpret_cast<const CopyPiece*>(place);
  args.layouts = layouts.empty() ? nullptr : reinterpret_cast<const std::uint64_t*>(place + sizeof(piece));
  args.bucket = data;
  args.used_bytes = fragment.bucket_offset + fragment.nbytes;
  args.count = 1;
  launch(index, args);
  if (caller.handle() != current_.handle()) {
    reached_.record(current_);
    reached_.stream_wait(caller);
  }
  loose_next_ = (loose_next_ + 1) % kLoosePieces;
  if (loose_next_ % kHalf == 0) loose_done_[half].record(current_);
}

void DevicePacker::check(std::size_t index, const std::byte* data, std::span<const Fragment> fragments, Wait& wait) {
  const TensorView nowhere;
  for (const Fragment& fragment : fragments) {
    move_piece(index, const_cast<std::byte*>(data), fragment, nowhere, current_, wait);
  }
}

void DevicePacker::host_wait(Wait& wait) {
  reached_.record(current_);
  reached_.synchronize(wait);
}

void DevicePacker::fetch_sums(std::size_t first, std::size_t end, Wait& wait) {
  const std::size_t count = verify_ && end > first ? end - first : 0;
  const std::uint64_t at = count > 0 ? (first - first_sum_) * sizeof(Checksum) : 0;
  if (count > 0) {
    runtime_->copy(pinned_sums_.data() + at, device_sums_.data() + at, count * sizeof(Checksum), current_);
    queued_ = true;
  }
  if (queued_) host_wait(wait);
  if (count == 0) return;
  if (sums_.size() < end) sums_.resize(end);
  std::memcpy(sums_.data() + first, pinned_sums_.data() + at, count * sizeof(Checksum));
}

void DevicePacker::collect(Wait& wait) { fetch_sums(first_sum_, end_sum_, wait); }

void DevicePacker::settle(std::size_t index, Wait& wait) { fetch_sums(index, std::min(index + 1, end_sum_), wait); }

void DevicePacker::finish(Wait& wait) {
  collect(wait);
  if (current_.handle() != caller_.handle()) {
    reached_.record(current_);
    reached_.stream_wait(caller_);
  }
  queued_ = false;
}

bool DevicePacker::abandon(std::chrono::nanoseconds patience) noexcept {
  stamp_ = 0;
  // The caller's own code may have queued work on the buckets that it was shown.
  if (!queued_ && current_.handle() != caller_.handle()) return true;
  try {
    reached_.record(current_);
    if (current_.handle() != caller_.handle()) reached_.stream_wait(caller_);
    Wait wait(patience, nullptr);
    reached_.synchronize(wait);
    queued_ = false;
    return true;
  } catch (const Error&) {
    return false;  // stuck, or the device is broken
  }
}

Checksum DevicePacker::sum(std::size_t index) const { return index < sums_.size() ? sums_[index] : Checksum{}; }

}  // namespace fastsync
