// Buckets through somebody else's broadcast: torch.distributed, or whatever the callbacks reach.
//
// Every rank owns `buffers` heap buckets. The source announces a bucket's header on a HeaderChannel and starts the
// broadcast; receivers start theirs when they see the announcement and have a bucket free, so that packing, transfer
// and unpacking overlap.
//
// The rule that keeps the group usable: every rank starts exactly the broadcasts that the source announced, in that
// order, whatever else goes wrong. Hence drain(): after a failure it starts and finishes what was announced. A broadcast
// that itself failed leaves the group unusable, and this object with it: make a new group and a new communicator.
//
// The transport would let the source run ahead by its own buckets and the receivers' as well. Receivers therefore report
// what they have released, and the source waits for that as it would with shared memory.
//
// Ownership: the buckets are ours; owned_memory() lets whoever hands their addresses to a library keep them alive for as long
// as the library may write there. The channel must outlive this object.
// Threads: as Communicator; the callbacks are called on the calling thread. They may block only as long as they are told.
// Errors: as Communicator. What the callbacks and the channel throw is kept as the first error. Headers are a peer's
// words, and checked.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "device/buffer.h"

namespace fastsync {

struct ExternalOps {
  // Starts an asynchronous broadcast of [data, data + nbytes) from the source's to every rank's memory; returns a handle.
  std::function<std::uint64_t(std::byte* data, std::uint64_t nbytes)> start;
  // Waits at most that long; true once complete on this rank. Throws CommError if the broadcast failed.
  std::function<bool(std::uint64_t handle, std::chrono::milliseconds timeout)> wait;
  // Forgets a handle: complete, failed, or given up.
  std::function<void(std::uint64_t handle)> drop;
};

// The control connection between the source and its receivers, as far as buckets need it. Messages arrive in order, and
// belong to the sync that runs: what was left over from an older one is not delivered. Implementations throw what their
// Wait throws, TimeoutError naming the rank, PeerLostError and so on.
class HeaderChannel {
 public:
  virtual ~HeaderChannel() = default;
  HeaderChannel(const HeaderChannel&) = delete;
  HeaderChannel& operator=(const HeaderChannel&) = delete;

  // Source: queues the header for every receiver, and never blocks. All or nothing: a header that only some receivers
  // get would leave them in a broadcast that nobody else starts.
  virtual void send(const BucketHeader& header) = 0;
  // Source: waits until every receiver has reported at least `count` released buckets.
  virtual void wait_released(std::uint64_t count, Wait& wait) = 0;
  // Source: the rank of the receiver that has reported the fewest, or -1.
  [[nodiscard]] virtual int slowest_receiver() const noexcept = 0;

  // Receiver: the next header.
  [[nodiscard]] virtual BucketHeader receive(Wait& wait) = 0;
  // Receiver: the same without waiting; false if none has arrived.
  [[nodiscard]] virtual bool try_receive(BucketHeader& header) = 0;
  // Receiver: its first `count` buckets are released. Must not block.
  virtual void report_released(std::uint64_t count) = 0;

 protected:
  HeaderChannel() = default;
};

class ExternalCommunicator final : public Communicator {
 public:
  enum class Role { kSource, kReceiver };

  // `name` is the transport's ("gloo"); `source_rank` is only shown in messages. Throws InvalidArgument for sizes out of
  // range, DeviceError when the memory cannot be had.
  ExternalCommunicator(Role role, std::string_view name, std::uint32_t buffers, std::uint64_t bucket_bytes,
                       ExternalOps ops, HeaderChannel& channel, int source_rank = -1);
  // Drops the handles of broadcasts in flight without waiting.
  ~ExternalCommunicator() override;

  [[nodiscard]] std::shared_ptr<const Buffer> owned_memory() const noexcept { return memory_; }
  [[nodiscard]] BufferView memory() const noexcept override { return memory_->view(); }

  [[nodiscard]] std::string_view name() const noexcept override { return name_; }
  [[nodiscard]] std::uint64_t bucket_bytes() const noexcept override { return bucket_bytes_; }
  [[nodiscard]] std::uint32_t buffers() const noexcept override { return buffers_; }
  [[nodiscard]] std::uint64_t staging_bytes() const noexcept override { return memory_->nbytes(); }

  [[nodiscard]] BucketSlot acquire(Wait& wait) override;
  void send(const BucketSlot& slot, const BucketHeader& header, Wait& wait) override;
  void flush(Wait& wait) override;

  [[nodiscard]] BucketSlot receive(BucketHeader& header, Wait& wait) override;
  void release(const BucketSlot& slot) override;

  // Source: finishes what was sent. Receiver: starts and finishes everything that the channel still delivers. Works
  // after a failure and after abort(); ends by itself if every rank drains. Throws if a broadcast fails.
  void drain(Wait& wait) override;
  [[nodiscard]] Recovery recovery() const noexcept override { return Recovery::kDrain; }
  // Throws StateError while a broadcast is in flight.
  void reset(std::uint64_t epoch) override;
  [[nodiscard]] int waiting_for() const noexcept override;
  void abort() noexcept override;

 private:
  struct Transfer {
    BucketHeader header;
    std::optional<std::uint64_t> handle;  // none: nothing to transfer, or complete
  };

  void check_usable(const char* call) const;
  void require_role(Role role, const char* call) const;
  // Runs `body`; what it throws becomes the kept error.
  template <typename Body>
  decltype(auto) keeping_errors(Body body);
  // For the channel's waits.
  [[nodiscard]] Wait heeding_abort(const Wait& wait, const char* call) const;
  [[nodiscard]] std::byte* slot_data(std::uint64_t index) const noexcept;
  void start(const BucketHeader& header);
  // Waits for the oldest transfer in flight. Between looks it calls meanwhile(), which says whether it wants to be
  // called again soon.
  template <typename Meanwhile>
  void finish_oldest(Wait& wait, bool heed_abort, Meanwhile meanwhile);
  // Receiver: starts what is announced, as far as buckets are free. True if it would start more if more were announced.
  bool start_announced();
  void check_header(const BucketHeader& header) const;

  Role role_;
  std::string_view name_;
  std::uint32_t buffers_;
  std::uint64_t bucket_bytes_;
  ExternalOps ops_;
  HeaderChannel& channel_;
  int source_rank_;
  std::shared_ptr<Buffer> memory_;

  // Buckets of this epoch: released_ <= done_ <= started_. [done_, started_) are `flying_`; a receiver holds
  // [released_, done_).
  std::uint64_t epoch_ = 0;
  std::uint64_t started_ = 0;
  std::uint64_t done_ = 0;
  std::uint64_t released_ = 0;
  bool lent_ = false;  // source: between acquire() and send()
  std::deque<Transfer> flying_;
  std::exception_ptr failure_;
  std::atomic<bool> aborted_{false};
};

}  // namespace fastsync
