// Moves bytes between a caller's device tensors and buckets, by one kernel launch a bucket, and checks them on the way.
//
// What Packer is for host memory, with the same cuts and the same checksums; the difference is that nothing has happened
// when a call returns. Work is queued on stream(), behind what the caller's stream held when the sync began, and
// finish() waits for all of it. Tables of addresses are made once a plan and kept on the device; a steady sync makes no
// allocation, no stream and no event, and synchronises once.
//
// Ownership: keeps the runtime, its stream, tables and checksums. Tensors and buckets are the caller's, and must live
// until finish() or abandon() returned.
// Threads: one at a time. Streams: begin() decides whether the work runs on a stream of our own or on the caller's.
// Errors: DeviceError from the device; the waits throw TimeoutError and what Wait::check() throws. A view must have been
// through normalize().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "bucket/bucket_plan.h"
#include "bucket/packer.h"
#include "device/buffer.h"
#include "device/device_runtime.h"

namespace fastsync {

class DevicePacker {
 public:
  // kOwn: beside the caller's work. kCallers: in it, for buckets whose memory the caller's own code will look at.
  enum class Place : std::uint8_t { kOwn, kCallers };

  DevicePacker(std::shared_ptr<DeviceRuntime> runtime, CopyDirection direction);
  ~DevicePacker();
  DevicePacker(const DevicePacker&) = delete;
  DevicePacker& operator=(const DevicePacker&) = delete;

  // A sync begins. What is queued from now on runs behind what `caller` holds now.
  void begin(StreamView caller, Place place, bool verify);
  // Where the buckets are touched.
  [[nodiscard]] StreamView stream() const noexcept { return current_; }

  // The table of a plan's pieces. Kept: the next call with the same `stamp` (not 0) costs nothing.
  void bind(std::span<const Fragment> fragments, std::span<const BucketLayout> buckets,
            std::span<const TensorView> views, std::uint64_t stamp);
  // Queues bucket number `index` of the bound plan; buckets come in order. `data` is device memory, or host memory that
  // the runtime registered.
  void move(std::size_t index, std::byte* data, Wait& wait);
  // The same piece by piece, for a plan that is still growing. The caller's stream waits for the piece's end, so that
  // what is queued there next may overwrite the tensor; `caller` may be another one each time.
  void move_piece(std::size_t index, std::byte* data, const Fragment& fragment, const TensorView& view,
                  StreamView caller, Wait& wait);
  // Adds the checksum of pieces that lie in the bucket, and copies nothing.
  void check(std::size_t index, const std::byte* data, std::span<const Fragment> fragments, Wait& wait);

  // Waits until bucket `index`, the last one moved, is done; its checksum is then known.
  void settle(std::size_t index, Wait& wait);
  // Waits for everything, and lets the caller's stream go on behind it.
  void finish(Wait& wait);
  // After a failure: the caller's stream runs behind what is queued, and the host waits for it, if it ends in time; also
  // for what the caller's own code has queued on buckets that it was shown (kCallers).
  // False: it did not, and the memory must not be reused.
  [[nodiscard]] bool abandon(std::chrono::nanoseconds patience) noexcept;

  // Of a bucket that settle() or finish() waited for; zero without verify, and for a bucket without pieces.
  [[nodiscard]] Checksum sum(std::size_t index) const;
  // Tables and checksums, on the device and pinned.
  [[nodiscard]] std::uint64_t table_bytes() const noexcept;

 private:
  static constexpr std::size_t kSums = 2048;       // checksums on the device at a time
  static constexpr std::size_t kLoosePieces = 64;  // pieces of growing plans in flight

  void launch(std::size_t index, CopyArgs args);
  [[nodiscard]] CopyPiece describe(const Fragment& fragment, const TensorView& view,
                                   std::vector<std::uint64_t>& layouts) const;
  void make_room(std::size_t index, Wait& wait);
  void fetch_sums(std::size_t first, std::size_t end, Wait& wait);
  void collect(Wait& wait);
  void host_wait(Wait& wait);

  std::shared_ptr<DeviceRuntime> runtime_;
  CopyDirection direction_;
  Stream stream_;
  Event entered_;  // what the caller's stream held
  Event reached_;  // the end of our own queue
  StreamView caller_;
  StreamView current_;
  bool verify_ = true;
  bool queued_ = false;  // anything since begin()

  // Of the bound plan.
  std::uint64_t stamp_ = 0;
  std::vector<std::pair<std::size_t, std::size_t>> ranges_;  // pieces [first, last) of each bucket
  std::vector<std::uint64_t> used_;
  Buffer device_table_;  // pieces, then layouts
  Buffer pinned_table_;
  std::uint64_t layouts_offset_ = 0;
  bool has_layouts_ = false;

  // Of growing plans: two halves, each reused behind its event.
  Buffer loose_;
  std::size_t loose_next_ = 0;
  Event loose_done_[2];

  Buffer device_sums_;
  Buffer pinned_sums_;
  std::vector<Checksum> sums_;  // [0, collected)
  std::size_t first_sum_ = 0;   // the bucket whose checksum lies first on the device
  std::size_t end_sum_ = 0;     // one past the last that was queued
};

}  // namespace fastsync
