// Moves buckets, in order, from one source rank to every receiver.
//
// The base names no backend. A communicator owns `buffers` equal buckets (or maps the source's) and lends them:
//   source:    acquire() -> fill -> send() ... flush()
//   receiver:  receive() -> read -> release()
// Bucket k reuses the memory of bucket k - buffers, once every receiver has released that. The source is therefore at
// most `buffers` buckets ahead of the slowest receiver.
//
// Ownership: a lent bucket belongs to the communicator; its pointer is valid until send() or release().
// Threads: one thread at a time. abort() may be called from any thread.
// Streams: host memory is ready when the call returns. Device memory (memory_kind()) is touched on the stream that
// bind_stream() named, and only there: acquire() and receive() hold that stream back until the bucket may be touched,
// send() and release() mark what it holds then. Such a communicator has work in flight when its calls return.
// Errors: TimeoutError (with the rank that was waited for) and whatever Wait::check() throws end a wait; CommError comes
// from the backend, StateError from calls out of order and from every call after abort(). The first error that the
// communicator itself raised is kept and thrown again by later calls, until reset(). A wait that ended well counts as
// progress: it restarts the Wait's clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "common/checksum.h"
#include "common/wait.h"
#include "device/buffer.h"
#include "device/device_runtime.h"

namespace fastsync {

// Travels beside the bucket, never inside it.
struct BucketHeader {
  std::uint64_t index = 0;
  std::uint64_t used_bytes = 0;
  std::uint64_t tensors_end = 0;  // as BucketLayout::tensors_end
  Checksum checksum;
  std::uint32_t flags = 0;  // opaque to the communicator
};

// One lent bucket: a plain value, to be handed back with send() or release(). (BucketLease of bucket/bucket_ring.h is
// the owning type, for memory whose reuse is ordered by streams.)
struct BucketSlot {
  std::byte* data = nullptr;
  std::uint64_t capacity = 0;
  std::uint64_t index = 0;
  std::uint64_t epoch = 0;  // of the reset() it was lent under; a slot of an older epoch is ignored when handed back
};

// What brings a communicator to rest after a failed sync, so that the next one can use it.
enum class Recovery : std::uint8_t {
  kAbort,    // abort(), then reset()
  kDrain,    // drain() on every rank, then reset()
  kReplace,  // nothing: abort() frees every rank, and a new one is made
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  [[nodiscard]] virtual std::string_view name() const noexcept = 0;
  [[nodiscard]] virtual std::uint64_t bucket_bytes() const noexcept = 0;
  [[nodiscard]] virtual std::uint32_t buffers() const noexcept = 0;
  [[nodiscard]] virtual MemoryKind memory_kind() const noexcept { return MemoryKind::kHost; }
  // Device memory: the stream that fills or reads the buckets from now on.
  virtual void bind_stream(StreamView /*stream*/) {}
  // Throws an error of work in flight that has come to light. Cheap; for waits that are not ours.
  virtual void poll() {}
  // Host memory: all of it that buckets lie in, for a device that is to reach it; null where that cannot be.
  [[nodiscard]] virtual BufferView memory() const noexcept { return {}; }
  // Bytes of bucket memory this process holds (mapped or owned).
  [[nodiscard]] virtual std::uint64_t staging_bytes() const noexcept = 0;

  // Source. Waits until the bucket's last readers are done.
  [[nodiscard]] virtual BucketSlot acquire(Wait& wait) = 0;
  // `header.index` must be the slot's; `header.used_bytes` may be 0.
  virtual void send(const BucketSlot& slot, const BucketHeader& header, Wait& wait) = 0;
  // Waits until every bucket sent has been taken out of the source's memory (by all receivers).
  virtual void flush(Wait& wait) = 0;

  // Receiver. The buckets come in order, each once; up to `buffers` may be held at a time, released in order. What is
  // written to `slot.data` no other rank sees, and it does not outlive release().
  [[nodiscard]] virtual BucketSlot receive(BucketHeader& header, Wait& wait) = 0;
  // Call before code that is not ours is shown the bucket's memory: it may write there. Buckets that only we read need
  // no clean-up when they are released, and skip it.
  virtual void mark_exposed(const BucketSlot& /*slot*/) {}
  virtual void release(const BucketSlot& slot) = 0;

  [[nodiscard]] virtual Recovery recovery() const noexcept = 0;
  // After a failure, before reset(): completes the operations that the source has already announced, discarding their
  // data, so that the transport is at rest on every rank. Slots that are still held are taken back.
  virtual void drain(Wait& /*wait*/) {}
  // A new sync begins at bucket 0, on all sides with the same epoch: greater than the last one, below 2^32. Forgets the
  // kept error and abort(), takes back every slot. A side that is late still works in its old epoch; neither what it
  // reads there nor what it hands back touches the new one.
  virtual void reset(std::uint64_t epoch) = 0;
  // Which receiver (global rank) the source waits for, or -1: for the timeout's message.
  [[nodiscard]] virtual int waiting_for() const noexcept = 0;
  // Ends every wait on this side with StateError, and makes the other sides' waits call Wait::check() at once: their
  // hooks know why, or they wait on.
  virtual void abort() noexcept = 0;

 protected:
  Communicator() = default;
};

}  // namespace fastsync
