// Buckets for several devices, and on each of them for several processes: one rank of a device takes part in a wire
// between the devices (NCCL), and hands every bucket on to the other ranks of its device, which read it where it lies.
//
// So a bucket crosses the wire once a device, and a device holds it once. The leader of a device composes two
// communicators that work on one ring of slots: the wire fills them (or, at the source, sends them), an IpcCommunicator
// shows them to the followers, each of which has an ordinary reader's end of it. A slot is used again when all of these are
// done with it, and the device keeps that order:
//   source:  the packing runs behind the followers' reads and the wire's send of the slot's last bucket
//   leader:  the wire's stream runs behind the followers' reads and this rank's own, and the followers' behind the wire
// The hosts run ahead of that by a bounded number of buckets. The source waits for every rank of the sync, wherever it
// is, to have released a bucket before it lends the slot again, as the HeaderChannel reports.
//
// A leader passes a bucket on when it takes it: one that does not call receive() holds up its followers, as they hold up
// it. Errors and abort() are those of both parts; neither survives a failed sync (recovery(): kReplace).
//
// Ownership: shares the ring with whoever keeps it for its followers after this is gone; owns the wire. The channel must
// outlive it. Threads: as Communicator. Streams: as Communicator, for device memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "comm/communicator.h"
#include "comm/external/external_communicator.h"
#include "comm/ipc/ipc_communicator.h"

namespace fastsync {

class FanoutCommunicator final : public Communicator {
 public:
  enum class Role : std::uint8_t { kSource, kLeader };
  // `wire`: moves buckets of device memory between the leaders, on ring->buckets() where there is a ring, and fills them
  // on `wire_stream`. `ring`: its source's end, with every follower added; null: nobody follows this rank.
  // Throws InvalidArgument where the two differ in size.
  FanoutCommunicator(Role role, std::shared_ptr<Communicator> wire, StreamView wire_stream,
                     std::shared_ptr<IpcCommunicator> ring, HeaderChannel& channel);

  [[nodiscard]] std::string_view name() const noexcept override { return "nccl+ipc"; }
  [[nodiscard]] std::uint64_t bucket_bytes() const noexcept override { return wire_->bucket_bytes(); }
  [[nodiscard]] std::uint32_t buffers() const noexcept override { return wire_->buffers(); }
  [[nodiscard]] MemoryKind memory_kind() const noexcept override { return MemoryKind::kDevice; }
  [[nodiscard]] std::uint64_t staging_bytes() const noexcept override;
  void bind_stream(StreamView stream) override;
  void poll() override { wire_->poll(); }

  [[nodiscard]] BucketSlot acquire(Wait& wait) override;
  void send(const BucketSlot& slot, const BucketHeader& header, Wait& wait) override;
  void flush(Wait& wait) override;
  [[nodiscard]] BucketSlot receive(BucketHeader& header, Wait& wait) override;
  void release(const BucketSlot& slot) override { wire_->release(slot); }

  [[nodiscard]] Recovery recovery() const noexcept override { return Recovery::kReplace; }
  void reset(std::uint64_t epoch) override;
  // The source's: any rank that is behind. A leader's: a follower of its own.
  [[nodiscard]] int waiting_for() const noexcept override;
  void abort() noexcept override;

 private:
  template <typename F>
  void wait_for_ranks(F&& body);

  Role role_;
  std::shared_ptr<IpcCommunicator> ring_;  // before the wire, which works on it
  std::shared_ptr<Communicator> wire_;
  StreamView wire_stream_;
  HeaderChannel& channel_;
  BucketSlot shown_;  // the ring's own slot of the bucket that is lent
  std::uint64_t next_ = 0;
  bool waits_for_ranks_ = false;  // and not for the device, or for a bucket
};

}  // namespace fastsync
