// Buckets broadcast by NCCL, from device memory to device memory.
//
// Every rank owns `buffers` buckets on its device and one stream for the broadcasts. The source announces each bucket on
// the HeaderChannel and queues its broadcast behind the packing; a receiver queues its own when it sees the announcement,
// behind the unpacking of the slot's last bucket. So packing, transfer and unpacking overlap, and no host waits for a
// device but to keep a bounded number of buckets queued.
//
// NCCL itself has no deadline: a rank that never comes, or orders that differ, hang on the device. Every call is therefore
// non-blocking, and every host wait polls the communicator's asynchronous error beside its own deadline. abort() frees
// this rank; all ranks of a failed sync do it, and the next sync makes a new communicator (recovery(): kReplace). Plan
// and tensors' tables are untouched by that.
//
// Ownership: the communicator, stream and events, and the ring, unless one is given to it: that must outlive it, and
// whoever else reads or writes its slots orders that by stream(). The channel must outlive it, too.
// Threads: as Communicator; the device's context is current on the calling thread during NCCL's calls.
// Errors: as Communicator: CommError with NCCL's own text, or the device's DeviceError where NCCL only passes that on; the
// first one is kept.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "comm/external/external_communicator.h"
#include "comm/nccl/nccl_library.h"
#include "device/buffer.h"

namespace fastsync {

class NcclCommunicator final : public Communicator {
 public:
  enum class Role : std::uint8_t { kSource, kReceiver };
  struct Place {
    int ranks = 0;
    int rank = 0;  // NCCL's number: 0 is the source
  };

  // The source's: names a communicator that is to be made, once.
  [[nodiscard]] static nccl::UniqueId make_id();
  // The version to compare with other ranks'; 0 where NCCL cannot be used.
  [[nodiscard]] static std::uint32_t version() {
    return NcclLibrary::unavailable_reason() ? 0 : static_cast<std::uint32_t>(NcclLibrary::get().version());
  }
  // Whether NCCL was told to let several ranks use one device, and is new enough to do so.
  [[nodiscard]] static bool ranks_may_share_device() {
    return !NcclLibrary::unavailable_reason() && NcclLibrary::get().ranks_may_share_device();
  }
  // Collective: every rank calls it with the source's id. Waits until the communicator stands. `ring`: device memory of
  // `buffers` buckets to work on; empty: it makes its own.
  [[nodiscard]] static std::shared_ptr<NcclCommunicator> create(Role role, std::shared_ptr<DeviceRuntime> runtime,
                                                                std::uint32_t buffers, std::uint64_t bucket_bytes,
                                                                Place place, const nccl::UniqueId& id,
                                                                HeaderChannel& channel, int source_rank, Wait& wait,
                                                                BufferView ring = {});
  ~NcclCommunicator() override;

  [[nodiscard]] std::string_view name() const noexcept override { return "nccl"; }
  [[nodiscard]] std::uint64_t bucket_bytes() const noexcept override { return bucket_bytes_; }
  [[nodiscard]] std::uint32_t buffers() const noexcept override { return buffers_; }
  [[nodiscard]] std::uint64_t staging_bytes() const noexcept override { return memory_.nbytes(); }
  [[nodiscard]] MemoryKind memory_kind() const noexcept override { return MemoryKind::kDevice; }
  void bind_stream(StreamView stream) override { caller_ = stream; }
  // Where the broadcasts run.
  [[nodiscard]] StreamView stream() const noexcept { return stream_.view(); }
  // Throws the communicator's asynchronous error.
  void poll() override;

  [[nodiscard]] BucketSlot acquire(Wait& wait) override;
  void send(const BucketSlot& slot, const BucketHeader& header, Wait& wait) override;
  void flush(Wait& wait) override;
  [[nodiscard]] BucketSlot receive(BucketHeader& header, Wait& wait) override;
  void release(const BucketSlot& slot) override;
  [[nodiscard]] Recovery recovery() const noexcept override { return Recovery::kReplace; }
  void reset(std::uint64_t epoch) override;
  [[nodiscard]] int waiting_for() const noexcept override { return -1; }
  void abort() noexcept override;

 private:
  NcclCommunicator(Role role, std::shared_ptr<DeviceRuntime> runtime, std::uint32_t buffers, std::uint64_t bucket_bytes,
                   HeaderChannel& channel, int source_rank, BufferView ring);
  void init(Place place, const nccl::UniqueId& id, Wait& wait);
  void broadcast(const BucketSlot& slot, std::uint64_t nbytes, Wait& wait);
  void settle_call(nccl::Result result, const char* what, Wait& wait);
  void check(nccl::Result result, const char* what);
  [[nodiscard]] std::byte* slot_data(std::uint64_t index) const noexcept;
  void check_usable(const char* call) const;
  template <typename F>
  auto keep_error(F&& body) -> decltype(body());

  // Buckets that may be queued on the device: enough to hide the host, few enough never to fill a driver's queue.
  [[nodiscard]] std::uint64_t depth() const noexcept { return moved_.size(); }

  const NcclLibrary& library_;
  std::shared_ptr<DeviceRuntime> runtime_;
  Role role_;
  std::uint32_t buffers_;
  std::uint64_t bucket_bytes_;
  HeaderChannel& channel_;
  int source_rank_;
  nccl::Comm comm_ = nullptr;
  Buffer memory_;               // its own ring, if it has one
  std::byte* ring_;             // that, or the one it was given
  Stream stream_;               // the broadcasts
  StreamView caller_;           // who packs or unpacks
  std::vector<Event> touched_;  // a slot each: packed (source), unpacked (receiver)
  std::vector<Event> moved_;    // of the last broadcasts, in a ring: done on this rank
  std::uint64_t epoch_ = 0;
  std::uint64_t next_ = 0;  // source: the bucket to acquire; receiver: to receive
  std::uint64_t released_ = 0;
  bool lent_ = false;
  std::exception_ptr failure_;
  std::atomic<bool> aborted_{false};
};

}  // namespace fastsync
