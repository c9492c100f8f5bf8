// Buckets in device memory that processes on one device share: nothing is copied between the source's buckets and the
// readers' tensors but by the two kernels.
//
// The source allocates the ring and exports it once; each reader opens it once and keeps it. Slots are ordered on the
// device by shared events: a reader's stream waits for the slot's "packed" event, the source's stream for every reader's
// "read" event of the slot. An event must be recorded before another process may wait for it, so the hosts shake hands
// through a small shared-memory ring (a ShmCommunicator without data): what it hands over is "recorded", and a slot comes
// back only when all readers have recorded. Where events cannot be shared, each side waits for its own stream before it
// hands over, and the hosts alone order the slots.
//
// The ring is whole blocks of 2 MiB, because a legacy handle maps the whole block that an allocation lies in, and with it
// what the driver put beside it. staging_bytes() counts the buckets (and the handshake), not what fills the last block:
// of a plain allocation the driver takes the same blocks, unseen.
//
// Ownership: the source owns the ring and its events, a reader its own events. What is exported must outlive its use by
// importers: a side that gives the ring up first lets go of what it imported (detach()), and keeps what it exported until
// the other side has done the same, or its connection is gone (keep_for()).
// Threads, errors: as Communicator; DeviceError from the device. Streams: as Communicator, for device memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "comm/shm/shm_communicator.h"
#include "device/buffer.h"
#include "device/device_runtime.h"

namespace fastsync {

// What the source tells its readers about the ring, beside the descriptors. A peer's words: decode() checks them.
struct IpcDescriptor {
  std::uint32_t buffers = 0;
  std::uint64_t bucket_bytes = 0;
  std::string device_id;
  MemoryHandle memory;              // its fd travels as a descriptor
  std::vector<EventHandle> packed;  // one a slot; empty: the hosts order the slots

  [[nodiscard]] std::vector<std::byte> encode() const;
  // Throws CommError. `fd`: what came with it where the memory travels as one.
  [[nodiscard]] static IpcDescriptor decode(std::span<const std::byte> bytes);
};
[[nodiscard]] std::vector<std::byte> encode_events(const std::vector<EventHandle>& events);
[[nodiscard]] std::vector<EventHandle> decode_events(std::span<const std::byte> bytes, std::uint32_t buffers);

class IpcCommunicator final : public Communicator {
 public:
  [[nodiscard]] static std::unique_ptr<IpcCommunicator> create(const std::shared_ptr<DeviceRuntime>& runtime,
                                                               std::uint32_t buffers, std::uint64_t bucket_bytes,
                                                               const std::vector<int>& reader_ranks, int source_rank);
  // The descriptors stay the caller's. `descriptor.memory.fd` is taken.
  [[nodiscard]] static std::unique_ptr<IpcCommunicator> attach(const std::shared_ptr<DeviceRuntime>& runtime,
                                                               IpcDescriptor descriptor, int control_fd, int data_fd,
                                                               std::uint32_t reader_index);
  ~IpcCommunicator() override;

  // Closes what was imported. The object is of no use afterwards, but what it exported lives on. False: the device is
  // broken, and what was imported stays open until this process ends.
  bool detach() noexcept;
  // Keeps a ring alive until every one of these connections has been closed by its other end, however that happens.
  // Never blocks; looked after whenever a ring is made or kept.
  static void keep_for(std::shared_ptr<Communicator> ring, std::span<const OwnedFd> others) noexcept;

  // Source: what to pass to the readers, with the descriptors of the handshake.
  [[nodiscard]] IpcDescriptor describe() const;
  [[nodiscard]] int control_fd() const noexcept { return handshake_->control_fd(); }
  [[nodiscard]] int data_fd() const noexcept { return handshake_->data_fd(); }
  // Reader: its own events, for the source; empty where the hosts order the slots.
  [[nodiscard]] const std::vector<EventHandle>& reader_events() const noexcept { return exported_; }
  // Source: reader `index`'s events, before the first bucket. CommError if their number is wrong.
  void add_reader(std::uint32_t index, const std::vector<EventHandle>& events);
  // Source: the memory of all its buckets, one behind the other.
  [[nodiscard]] BufferView buckets() const { return memory_.view(0, buffers() * bucket_bytes_); }
  // For a reader whose ring does not outlive a failed sync.
  void set_recovery(Recovery recovery) noexcept { recovery_ = recovery; }
  // True where device events order the slots.
  [[nodiscard]] bool shares_events() const noexcept { return !packed_.empty(); }

  [[nodiscard]] std::string_view name() const noexcept override { return "ipc"; }
  [[nodiscard]] std::uint64_t bucket_bytes() const noexcept override { return bucket_bytes_; }
  [[nodiscard]] std::uint32_t buffers() const noexcept override { return handshake_->buffers(); }
  [[nodiscard]] std::uint64_t staging_bytes() const noexcept override;
  [[nodiscard]] MemoryKind memory_kind() const noexcept override { return MemoryKind::kDevice; }
  void bind_stream(StreamView stream) override { stream_ = stream; }

  [[nodiscard]] BucketSlot acquire(Wait& wait) override;
  void send(const BucketSlot& slot, const BucketHeader& header, Wait& wait) override;
  void flush(Wait& wait) override;
  [[nodiscard]] BucketSlot receive(BucketHeader& header, Wait& wait) override;
  void release(const BucketSlot& slot) override;
  [[nodiscard]] Recovery recovery() const noexcept override { return recovery_; }
  void reset(std::uint64_t epoch) override;
  [[nodiscard]] int waiting_for() const noexcept override { return handshake_->waiting_for(); }
  void abort() noexcept override { handshake_->abort(); }

 private:
  IpcCommunicator(std::shared_ptr<DeviceRuntime> runtime, std::unique_ptr<ShmCommunicator> handshake,
                  std::uint64_t bucket_bytes);
  [[nodiscard]] std::byte* slot_data(std::uint64_t index) const noexcept;

  std::shared_ptr<DeviceRuntime> runtime_;
  std::unique_ptr<ShmCommunicator> handshake_;
  std::uint64_t bucket_bytes_;
  StreamView stream_;
  std::vector<Event> packed_;             // a slot each: the source's, on either side
  std::vector<std::vector<Event>> read_;  // source: by reader, then slot; reader: its own in [0]
  std::vector<EventHandle> exported_;     // reader: its events, as the source is told of them
  Event host_order_;                      // where events cannot be shared
  Buffer memory_;                         // source
  Allocation mapped_;                     // reader
  bool is_source_ = false;
  Recovery recovery_ = Recovery::kAbort;
};

}  // namespace fastsync
