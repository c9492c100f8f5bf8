#include "comm/shm/shm_communicator.h"

#include <sched.h>

#include <algorithm>
#include <limits>
#include <new>
#include <thread>
#include <type_traits>
#include <utility>

#include "comm/shm/futex.h"
#include "common/error.h"

namespace fastsync {
namespace shm {

// The control region. One cache line for each thing that one process writes and another one polls.
//
// A counter travels with its epoch in one word, (epoch << 32 | count), so that a side which is late in an older epoch
// can neither be taken for one of this epoch nor disturb it. `published` is written by the source, `consumed` by its
// reader. Both are seq_cst: the doorbells need it, and so does reset() (see there).
inline constexpr std::uint64_t kMagic = 0x31'6D'68'73'63'6E'79'73ULL;  // "syncshm1", little-endian
inline constexpr std::size_t kLine = 64;
inline constexpr std::uint32_t kMaxBuffers = 1024;
inline constexpr std::uint32_t kMaxReaders = 4096;
inline constexpr std::uint64_t kMaxDataBytes = std::uint64_t{1} << 56;

struct Geometry {
  std::uint64_t magic = kMagic;
  std::uint64_t bucket_bytes = 0;
  std::uint32_t buffers = 0;
  std::uint32_t readers = 0;
  std::int32_t source_rank = -1;
};

struct alignas(kLine) ReaderLine {
  std::atomic<std::uint64_t> consumed{0};
  std::int32_t rank = -1;
};

// Atomics, so that a peer which breaks the rules makes wrong values and not undefined behaviour. Ordered by `published`.
struct alignas(kLine) SlotLine {
  std::atomic<std::uint64_t> index{0};
  std::atomic<std::uint64_t> used_bytes{0};
  std::atomic<std::uint64_t> tensors_end{0};
  std::atomic<std::uint64_t> checksum_product{0};
  std::atomic<std::uint64_t> checksum_sum{0};
  std::atomic<std::uint32_t> flags{0};
};

struct Control {
  alignas(kLine) Geometry geometry;
  alignas(kLine) std::atomic<std::uint64_t> published{0};
  alignas(kLine) Doorbell readers_bell;
  alignas(kLine) Doorbell source_bell;
  // Behind it: ReaderLine[readers], SlotLine[buffers].

  [[nodiscard]] ReaderLine& reader(std::uint32_t index) noexcept {
    return reinterpret_cast<ReaderLine*>(reinterpret_cast<std::byte*>(this) + sizeof(Control))[index];
  }
  [[nodiscard]] SlotLine& slot(std::uint32_t readers, std::uint32_t index) noexcept {
    return reinterpret_cast<SlotLine*>(&reader(readers))[index];
  }
  [[nodiscard]] static std::uint64_t nbytes(std::uint32_t buffers, std::uint32_t readers) noexcept {
    return sizeof(Control) + readers * sizeof(ReaderLine) + buffers * sizeof(SlotLine);
  }
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "shared between processes");
static_assert(std::is_standard_layout_v<Control> && sizeof(ReaderLine) == kLine && sizeof(SlotLine) == kLine);

}  // namespace shm

namespace {

using namespace std::chrono_literals;

// How long to spin before sleeping. A hand-off is due every some tens of microseconds; waking a sleeper costs about as
// much (an idle virtual CPU has to be kicked by its host). Where there are fewer cores than ranks, a spinner only keeps
// the rank from running that it waits for.
constexpr std::chrono::nanoseconds kSpinMax = 100us;
constexpr std::chrono::nanoseconds kSpinMin = 5us;
constexpr std::chrono::nanoseconds kSpinCrowded = 2us;
constexpr int kSpinsPerClockLook = 16;

constexpr std::uint64_t word(std::uint32_t epoch, std::uint32_t count) noexcept {
  return (std::uint64_t{epoch} << 32) | count;
}
constexpr std::uint32_t epoch_of(std::uint64_t word) noexcept { return static_cast<std::uint32_t>(word >> 32); }
constexpr std::uint32_t count_of(std::uint64_t word) noexcept { return static_cast<std::uint32_t>(word); }

std::uint64_t round_to_page(std::uint64_t nbytes) noexcept {
  return (nbytes + page_bytes() - 1) / page_bytes() * page_bytes();
}

std::uint32_t usable_cores() noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  // Fails on machines with more processors than the set holds.
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return std::thread::hardware_concurrency();
  return static_cast<std::uint32_t>(std::max(1, CPU_COUNT(&set)));
}

// What is wrong with these sizes, or nothing.
std::optional<std::string> bad_geometry(std::uint32_t buffers, std::uint64_t bucket_bytes, std::uint64_t readers) {
  if (buffers < 1 || buffers > shm::kMaxBuffers) {
    return concat("buffers is ", buffers, ", must be in [1, ", shm::kMaxBuffers, "]");
  }
  if (readers > shm::kMaxReaders) return concat(readers, " readers, at most ", shm::kMaxReaders, " are possible");
  if (bucket_bytes == 0 || bucket_bytes % 256 != 0) {
    return concat("bucket_bytes is ", bucket_bytes, ", must be a positive multiple of 256");
  }
  if (bucket_bytes > shm::kMaxDataBytes / buffers) {
    return concat(buffers, " buckets of ", bucket_bytes, " bytes are more than any machine has; lower bucket_bytes");
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> ShmCommunicator::unavailable_reason() {
  try {
    const auto source = create(1, 256, {0});
    (void)attach(source->control_fd(), source->data_fd(), 0);
  } catch (const Error& error) {
    return error.what();
  }
  return std::nullopt;
}

std::unique_ptr<ShmCommunicator> ShmCommunicator::create(std::uint32_t buffers, std::uint64_t bucket_bytes,
                                                         const std::vector<int>& reader_ranks, int source_rank) {
  if (const auto why = bad_geometry(buffers, bucket_bytes, reader_ranks.size())) {
    throw InvalidArgument(concat("shm transport: ", *why));
  }
  const auto readers = static_cast<std::uint32_t>(reader_ranks.size());
  Source source;
  // Data first: it is what may be too large.
  source.data = ShmSegment::written_here("fastsync-data", buffers * round_to_page(bucket_bytes));
  source.control = ShmSegment::shared("fastsync-control", round_to_page(shm::Control::nbytes(buffers, readers)));
  source.idle_words.assign(readers, word(0, 0));

  auto* control = new (source.control.data()) shm::Control;
  control->geometry.bucket_bytes = bucket_bytes;
  control->geometry.buffers = buffers;
  control->geometry.readers = readers;
  control->geometry.source_rank = source_rank;
  for (std::uint32_t i = 0; i < readers; ++i) {
    (new (&control->reader(i)) shm::ReaderLine)->rank = reader_ranks[i];
  }
  for (std::uint32_t i = 0; i < buffers; ++i) new (&control->slot(readers, i)) shm::SlotLine;

  std::unique_ptr<ShmCommunicator> made(
      new ShmCommunicator(*control, source.data.data(), buffers, readers, bucket_bytes));
  made->reader_ranks_ = reader_ranks;
  made->source_rank_ = source_rank;
  made->source_.emplace(std::move(source));
  return made;
}

std::unique_ptr<ShmCommunicator> ShmCommunicator::attach(int control_fd, int data_fd, std::uint32_t reader_index) {
  const std::uint64_t control_bytes = ShmMapping::checked_size(control_fd, "shm control region");
  if (control_bytes < sizeof(shm::Control)) {
    throw CommError(concat("the shm control region is ", control_bytes, " bytes, at least ", sizeof(shm::Control),
                           " are needed; the source runs another version of fastsync"));
  }
  Reader reader;
  reader.control = ShmMapping::attach(control_fd, control_bytes, ShmMapping::Mode::kShared, "shm control region");
  auto* control = std::launder(reinterpret_cast<shm::Control*>(reader.control.data()));
  const shm::Geometry geometry = control->geometry;  // one copy: what is checked is what is used
  if (geometry.magic != shm::kMagic) {
    throw CommError("the shm control region has no fastsync header; the source runs another version of fastsync");
  }
  if (const auto why = bad_geometry(geometry.buffers, geometry.bucket_bytes, geometry.readers)) {
    throw CommError(concat("the shm control region is damaged: ", *why));
  }
  if (round_to_page(shm::Control::nbytes(geometry.buffers, geometry.readers)) != control_bytes) {
    throw CommError(concat("the shm control region is ", control_bytes, " bytes, which does not fit ", geometry.buffers,
                           " buffers and ", geometry.readers, " readers"));
  }
  if (reader_index >= geometry.readers) {
    throw CommError(concat("reader ", reader_index, " does not exist, the source made room for ", geometry.readers));
  }
  reader.data = ShmMapping::attach(data_fd, geometry.buffers * round_to_page(geometry.bucket_bytes),
                                   ShmMapping::Mode::kPrivate, "shm bucket memory");
  reader.index = reader_index;
  reader.exposed.assign(geometry.buffers, false);

  std::unique_ptr<ShmCommunicator> made(
      new ShmCommunicator(*control, reader.data.data(), geometry.buffers, geometry.readers, geometry.bucket_bytes));
  made->source_rank_ = geometry.source_rank;
  made->reader_.emplace(std::move(reader));
  return made;
}

ShmCommunicator::ShmCommunicator(shm::Control& control, std::byte* data, std::uint32_t buffers, std::uint32_t readers,
                                 std::uint64_t bucket_bytes)
    : control_(&control),
      data_(data),
      buffers_(buffers),
      readers_(readers),
      bucket_bytes_(bucket_bytes),
      announced_bytes_(bucket_bytes),
      slot_stride_(round_to_page(bucket_bytes)) {
  const bool crowded = usable_cores() < readers + 1;
  spin_min_ = crowded ? kSpinCrowded : kSpinMin;
  spin_max_ = crowded ? kSpinCrowded : kSpinMax;
  spin_ = spin_max_;
}

ShmCommunicator::~ShmCommunicator() = default;

int ShmCommunicator::control_fd() const noexcept { return source_ ? source_->control.peer_fd() : -1; }
int ShmCommunicator::data_fd() const noexcept { return source_ ? source_->data.peer_fd() : -1; }
std::string ShmCommunicator::protection_note() const { return source_ ? source_->data.note() : std::string(); }

ShmCommunicator::Source& ShmCommunicator::source(const char* call) {
  if (!source_) throw StateError(concat(call, "() is a call of the source; this rank receives"));
  check_usable(call);
  return *source_;
}

ShmCommunicator::Reader& ShmCommunicator::reader(const char* call) {
  if (!reader_) throw StateError(concat(call, "() is a call of a receiver; this rank is the source"));
  check_usable(call);
  return *reader_;
}

void ShmCommunicator::check_usable(const char* call) const {
  if (failure_) std::rethrow_exception(failure_);
  if (aborted_.load(std::memory_order_acquire)) {
    throw StateError(concat("shm ", call, "(): the communicator was aborted; the next sync starts with reset()"));
  }
}

template <typename Failure>
void ShmCommunicator::fail(Failure error) {
  failure_ = std::make_exception_ptr(error);
  throw error;
}

std::byte* ShmCommunicator::slot_data(std::uint64_t index) const noexcept {
  return data_ + (index % buffers_) * slot_stride_;
}

template <typename Bell, typename Ready, typename Describe>
void ShmCommunicator::wait_until(const char* call, Bell& bell, Ready ready, Wait& wait, Describe describe) {
  if (ready()) return wait.progress();
  const auto spin_end = Clock::now() + spin_;
  do {
    for (int i = 0; i < kSpinsPerClockLook; ++i) {
      cpu_relax();
      if (ready()) {
        // Spinning pays: take the whole span next time.
        spin_ = spin_max_;
        return wait.progress();
      }
    }
  } while (Clock::now() < spin_end);
  // It did not: give less of a core to the next attempt.
  spin_ = std::max(spin_min_, spin_ / 2);

  const auto ready_or_aborted = [&] {
    check_usable(call);  // abort() rings after it has set its flag
    return ready();
  };
  for (;;) {
    bell.sleep(ready_or_aborted, wait.slice());
    if (ready_or_aborted()) return wait.progress();
    wait.check();
    if (wait.expired()) {
      const auto [what, rank] = describe();
      fail(TimeoutError(concat("no progress for ", std::chrono::duration<double>(wait.timeout()).count(),
                               " s waiting for ", what, "; find out what holds that rank up, or raise timeout_s"),
                        rank));
    }
  }
}

bool ShmCommunicator::reader_released(std::uint32_t index, std::uint64_t count) {
  const std::uint64_t consumed = control_->reader(index).consumed.load(std::memory_order_seq_cst);
  if (epoch_of(consumed) == epoch_) {
    if (count_of(consumed) > moved_) {
      fail(CommError(concat("rank ", reader_ranks_[index], " says that it is done with ", count_of(consumed),
                            " buckets, only ", moved_, " were sent; its shared memory is damaged"),
                     reader_ranks_[index]));
    }
    return count_of(consumed) >= count;
  }
  // The reader is ahead: it has left this epoch, and looks at nothing until the source follows.
  if (epoch_of(consumed) > epoch_) return true;
  // The reader is late. A fresh slot may be filled all the same if it cannot be looking at one.
  return count == 0 && (consumed == source_->idle_words[index] || consumed == source_->last_epoch_word);
}

bool ShmCommunicator::all_released(std::uint64_t count) {
  for (std::uint32_t i = 0; i < readers_; ++i) {
    if (!reader_released(i, count)) return false;
  }
  return true;
}

std::string ShmCommunicator::waiting_ranks(std::uint64_t count) const {
  constexpr std::uint32_t kShown = 8;
  std::string text;
  std::uint32_t late = 0;
  for (std::uint32_t i = 0; i < readers_; ++i) {
    const std::uint64_t consumed = control_->reader(i).consumed.load(std::memory_order_seq_cst);
    if (consumed >= word(epoch_, static_cast<std::uint32_t>(count))) continue;
    if (++late <= kShown) text += concat(late == 1 ? "" : ", ", reader_ranks_[i]);
  }
  if (late > kShown) text += concat(" and ", late - kShown, " more");
  return concat(late == 1 ? "rank " : "ranks ", text);
}

int ShmCommunicator::waiting_for() const noexcept {
  if (!source_) return -1;
  int rank = -1;
  std::uint64_t least = word(epoch_, moved_);
  for (std::uint32_t i = 0; i < readers_; ++i) {
    const std::uint64_t consumed = control_->reader(i).consumed.load(std::memory_order_seq_cst);
    if (consumed < least) {
      least = consumed;
      rank = reader_ranks_[i];
    }
  }
  return rank;
}

BucketSlot ShmCommunicator::acquire(Wait& wait) {
  Source& self = source("acquire");
  if (self.lent) throw StateError("shm acquire(): the previous bucket was not sent");
  if (moved_ == std::numeric_limits<std::uint32_t>::max()) {
    fail(CommError("more than 2^32 buckets in one sync; raise bucket_bytes"));
  }
  const std::uint64_t index = moved_;
  const std::uint64_t needed = index < buffers_ ? 0 : index - buffers_ + 1;
  wait_until(
      "acquire", control_->source_bell, [&] { return all_released(needed); }, wait,
      [&] {
        return std::pair(needed == 0 ? concat(waiting_ranks(needed), " to join the sync")
                                     : concat(waiting_ranks(needed), " to release bucket ", needed - 1),
                         waiting_for());
      });
  self.lent = true;
  return {slot_data(index), bucket_bytes_, index, epoch_};
}

void ShmCommunicator::send(const BucketSlot& slot, const BucketHeader& header, Wait& /*wait*/) {
  Source& self = source("send");
  if (!self.lent || slot.epoch != epoch_ || slot.index != moved_ || header.index != slot.index) {
    throw StateError(concat("shm send(): bucket ", header.index, " was not acquired for this sync"));
  }
  if (header.used_bytes > announced_bytes_) {
    throw InvalidArgument(
        concat("bucket ", header.index, " uses ", header.used_bytes, " bytes, it holds ", announced_bytes_));
  }
  shm::SlotLine& line = control_->slot(readers_, static_cast<std::uint32_t>(slot.index % buffers_));
  line.index.store(header.index, std::memory_order_relaxed);
  line.used_bytes.store(header.used_bytes, std::memory_order_relaxed);
  line.tensors_end.store(header.tensors_end, std::memory_order_relaxed);
  line.checksum_product.store(header.checksum.product, std::memory_order_relaxed);
  line.checksum_sum.store(header.checksum.sum, std::memory_order_relaxed);
  line.flags.store(header.flags, std::memory_order_relaxed);
  self.lent = false;
  ++moved_;
  control_->published.store(word(epoch_, moved_), std::memory_order_seq_cst);
  control_->readers_bell.ring();
}

void ShmCommunicator::flush(Wait& wait) {
  (void)source("flush");
  // Bucket by bucket, so that each one counts as progress.
  for (std::uint64_t count = moved_ < buffers_ ? 1 : moved_ - buffers_ + 1; count <= moved_; ++count) {
    wait_until(
        "flush", control_->source_bell, [&] { return all_released(count); }, wait,
        [&] { return std::pair(concat(waiting_ranks(count), " to release bucket ", count - 1), waiting_for()); });
  }
}

bool ShmCommunicator::published(std::uint64_t index) const noexcept {
  const std::uint64_t value = control_->published.load(std::memory_order_seq_cst);
  return epoch_of(value) == epoch_ && count_of(value) > index;
}

BucketSlot ShmCommunicator::receive(BucketHeader& header, Wait& wait) {
  Reader& self = reader("receive");
  if (moved_ - self.released == buffers_) {
    throw StateError(concat("shm receive(): all ", buffers_, " buckets are held; release one first"));
  }
  const std::uint64_t index = moved_;
  wait_until(
      "receive", control_->readers_bell, [&] { return published(index); }, wait,
      [&] {
        const std::string who = source_rank_ < 0 ? std::string("the source") : concat("rank ", source_rank_);
        return std::pair(concat(who, " to send bucket ", index), source_rank_);
      });
  const auto slot_index = static_cast<std::uint32_t>(index % buffers_);
  shm::SlotLine& line = control_->slot(readers_, slot_index);
  BucketHeader read;
  read.index = line.index.load(std::memory_order_relaxed);
  read.used_bytes = line.used_bytes.load(std::memory_order_relaxed);
  read.tensors_end = line.tensors_end.load(std::memory_order_relaxed);
  read.checksum.product = line.checksum_product.load(std::memory_order_relaxed);
  read.checksum.sum = line.checksum_sum.load(std::memory_order_relaxed);
  read.flags = line.flags.load(std::memory_order_relaxed);
  if (read.index != index || read.used_bytes > announced_bytes_) {
    fail(CommError(concat("bucket ", index, " of ", announced_bytes_, " bytes was announced as bucket ", read.index,
                          " of ", read.used_bytes, " bytes; the shared memory of rank ", source_rank_, " is damaged"),
                   source_rank_));
  }
  // A callee that kept a pointer may have written after release(): its pages would hide the new bucket.
  if (self.exposed[slot_index]) self.pages->drop_written(slot_data(index), slot_stride_);
  ++moved_;
  header = read;
  return {slot_data(index), bucket_bytes_, index, epoch_};
}

void ShmCommunicator::mark_exposed(const BucketSlot& slot) {
  Reader& self = reader("mark_exposed");
  if (slot.epoch != epoch_) return;
  // The first slot's page is on trial before any other code has seen it.
  if (!self.pages) self.pages.emplace(slot.data);
  self.exposed[slot.index % buffers_] = true;
}

void ShmCommunicator::release(const BucketSlot& slot) {
  if (!reader_) throw StateError("release() is a call of a receiver; this rank is the source");
  Reader& self = *reader_;  // also after a failure: handing back is clean-up
  if (slot.epoch != epoch_) return;
  if (slot.index != self.released || self.released == moved_) {
    throw StateError(concat("shm release(): bucket ", slot.index, " is not the oldest one held"));
  }
  if (self.exposed[slot.index % buffers_]) self.pages->drop_written(slot.data, slot_stride_);
  ++self.released;
  control_->reader(self.index).consumed.store(word(epoch_, self.released), std::memory_order_seq_cst);
  control_->source_bell.ring();
}

// Why a late side is harmless. A reader shows what it may be looking at by its `consumed` word; it looks at bucket k of
// epoch E only if it has stored (E, <= k) there and then loaded a `published` of (E, > k). The source stores the new
// epoch to `published` and then loads `consumed`. All four are seq_cst, so either the source sees that the reader had
// joined E (and waits in acquire() until it has left), or the reader sees the new epoch (and does not look).
void ShmCommunicator::reset(std::uint64_t epoch) {
  if (epoch <= epoch_ || epoch > std::numeric_limits<std::uint32_t>::max()) {
    throw InvalidArgument(concat("shm reset(): epoch ", epoch, " does not follow epoch ", epoch_));
  }
  if (source_) {
    Source& self = *source_;
    self.last_epoch_word = word(epoch_, moved_);
    control_->published.store(word(static_cast<std::uint32_t>(epoch), 0), std::memory_order_seq_cst);
    for (std::uint32_t i = 0; i < readers_; ++i) {
      const std::uint64_t consumed = control_->reader(i).consumed.load(std::memory_order_seq_cst);
      if (consumed == self.last_epoch_word) self.idle_words[i] = consumed;
    }
    self.lent = false;
  } else {
    Reader& self = *reader_;
    control_->reader(self.index).consumed.store(word(static_cast<std::uint32_t>(epoch), 0), std::memory_order_seq_cst);
    control_->source_bell.ring();
    self.released = 0;
  }
  epoch_ = static_cast<std::uint32_t>(epoch);
  moved_ = 0;
  failure_ = nullptr;
  aborted_.store(false, std::memory_order_release);
}

void ShmCommunicator::abort() noexcept {
  aborted_.store(true, std::memory_order_release);
  control_->readers_bell.ring_always();
  control_->source_bell.ring_always();
}

}  // namespace fastsync
