// Buckets through shared memory, between processes of one host: one writer, N readers, nothing copied on the way.
//
// The source makes two memfds and passes their descriptors to the readers: the data (buffers x bucket, which only the
// source can write) and one control region (counters, bucket headers, doorbells). A bucket is handed over by storing a
// counter; a waiting side spins for some tens of microseconds, then sleeps on a futex, at most Wait::slice() at a time.
//
// Ownership: each side owns its mappings; the source also owns the descriptors until close_descriptors(). The memory
// has no name and goes with the last process that maps it.
// Readers map the data privately: what a callee writes there stays in its process, and is dropped when the bucket is
// released (if mark_exposed() was called), so that the next bucket in that slot shows the source's bytes.
// Threads: as Communicator. Work runs on the calling thread.
// Errors: as Communicator. Everything that a peer wrote into the control region is checked before it is used: CommError.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "comm/shm/shm_segment.h"

namespace fastsync {

namespace shm {
struct Control;
}

class ShmCommunicator final : public Communicator {
 public:
  // Why this machine cannot run it, or nothing. Tries what the transport needs on one page.
  [[nodiscard]] static std::optional<std::string> unavailable_reason();

  // The source's side. `bucket_bytes` is a multiple of 256; ranks are global and only shown in messages. Throws
  // InvalidArgument for sizes out of range, DeviceError when the memory cannot be had.
  [[nodiscard]] static std::unique_ptr<ShmCommunicator> create(std::uint32_t buffers, std::uint64_t bucket_bytes,
                                                               const std::vector<int>& reader_ranks,
                                                               int source_rank = -1);
  // A reader's side. `reader_index` is its place in reader_ranks. The descriptors stay the caller's and may be closed
  // afterwards. Throws CommError if they are not what create() made.
  [[nodiscard]] static std::unique_ptr<ShmCommunicator> attach(int control_fd, int data_fd, std::uint32_t reader_index);

  ~ShmCommunicator() override;

  // Source: what to pass to the readers; -1 on a reader and after close_descriptors().
  [[nodiscard]] int control_fd() const noexcept;
  [[nodiscard]] int data_fd() const noexcept;
  // The headers speak of buckets that lie elsewhere and have this size; what is lent here is only a place in the order.
  void announces(std::uint64_t bucket_bytes) noexcept { announced_bytes_ = bucket_bytes; }
  // Empty, or which protection of the data this kernel lacks.
  [[nodiscard]] std::string protection_note() const;

  [[nodiscard]] std::string_view name() const noexcept override { return "shm"; }
  [[nodiscard]] std::uint64_t bucket_bytes() const noexcept override { return bucket_bytes_; }
  [[nodiscard]] std::uint32_t buffers() const noexcept override { return buffers_; }
  // The source's: a reader's mapping is private, and pinning it would cut it off from the source's.
  [[nodiscard]] BufferView memory() const noexcept override {
    return source_ ? BufferView{data_, buffers_ * slot_stride_, MemoryKind::kShared} : BufferView{};
  }
  [[nodiscard]] std::uint64_t staging_bytes() const noexcept override { return buffers_ * slot_stride_; }

  [[nodiscard]] BucketSlot acquire(Wait& wait) override;
  void send(const BucketSlot& slot, const BucketHeader& header, Wait& wait) override;
  void flush(Wait& wait) override;

  [[nodiscard]] BucketSlot receive(BucketHeader& header, Wait& wait) override;
  void mark_exposed(const BucketSlot& slot) override;
  void release(const BucketSlot& slot) override;

  [[nodiscard]] Recovery recovery() const noexcept override { return Recovery::kAbort; }
  void reset(std::uint64_t epoch) override;
  [[nodiscard]] int waiting_for() const noexcept override;
  void abort() noexcept override;

 private:
  // What only one of the two roles has.
  struct Source {
    ShmSegment control;
    ShmSegment data;
    bool lent = false;                      // between acquire() and send()
    std::uint64_t last_epoch_word = 0;      // what was published when the previous epoch ended
    std::vector<std::uint64_t> idle_words;  // per reader: the consumed word with which it is known to hold nothing
  };
  struct Reader {
    ShmMapping control;
    ShmMapping data;
    std::uint32_t index = 0;
    std::uint32_t released = 0;
    std::vector<bool> exposed;  // per slot, for ever: code that kept a pointer may write at any time
    std::optional<PrivatePages> pages;
  };

  ShmCommunicator(shm::Control& control, std::byte* data, std::uint32_t buffers, std::uint32_t readers,
                  std::uint64_t bucket_bytes);
  [[nodiscard]] Source& source(const char* call);
  [[nodiscard]] Reader& reader(const char* call);
  void check_usable(const char* call) const;
  template <typename Failure>
  [[noreturn]] void fail(Failure error);

  [[nodiscard]] std::byte* slot_data(std::uint64_t index) const noexcept;
  // Source: whether reader `index` has released its first `count` buckets of this epoch.
  [[nodiscard]] bool reader_released(std::uint32_t index, std::uint64_t count);
  [[nodiscard]] bool all_released(std::uint64_t count);
  [[nodiscard]] std::string waiting_ranks(std::uint64_t count) const;
  [[nodiscard]] bool published(std::uint64_t index) const noexcept;
  // Spins, then sleeps, until ready(). `describe` makes the timeout's "for what", and only then.
  template <typename Bell, typename Ready, typename Describe>
  void wait_until(const char* call, Bell& bell, Ready ready, Wait& wait, Describe describe);

  shm::Control* control_;
  std::byte* data_;
  // Copies: what lies in the control region a peer can change.
  std::uint32_t buffers_;
  std::uint32_t readers_;
  std::uint64_t bucket_bytes_;
  std::uint64_t announced_bytes_;
  std::uint64_t slot_stride_;
  std::vector<int> reader_ranks_;
  int source_rank_ = -1;

  std::uint32_t epoch_ = 0;
  std::uint32_t moved_ = 0;  // source: buckets sent in this epoch; reader: buckets received
  std::exception_ptr failure_;
  std::atomic<bool> aborted_{false};
  std::chrono::nanoseconds spin_min_;
  std::chrono::nanoseconds spin_max_;
  std::chrono::nanoseconds spin_;

  std::optional<Source> source_;
  std::optional<Reader> reader_;
};

}  // namespace fastsync
