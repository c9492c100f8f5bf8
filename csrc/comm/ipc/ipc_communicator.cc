#include "comm/ipc/ipc_communicator.h"

#include <poll.h>

#include <cstring>
#include <list>
#include <mutex>
#include <utility>

#include "common/error.h"

namespace fastsync {

namespace {
// The handshake's own buckets carry nothing.
constexpr std::uint64_t kTokenBytes = 256;
constexpr std::uint32_t kMaxBuffers = 1024;
constexpr std::size_t kMaxDeviceIdBytes = 128;
constexpr std::uint64_t kSharedBlockBytes = std::uint64_t{2} << 20;

template <typename T>
void put(std::vector<std::byte>& out, const T& value) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  out.insert(out.end(), bytes, bytes + sizeof(T));
}

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  template <typename T>
  T get() {
    T value{};
    raw(&value, sizeof(T));
    return value;
  }
  void raw(void* out, std::size_t nbytes) {
    if (bytes_.size() < nbytes) throw CommError("the description of a shared device ring is too short");
    std::memcpy(out, bytes_.data(), nbytes);
    bytes_ = bytes_.subspan(nbytes);
  }
  [[nodiscard]] std::size_t left() const noexcept { return bytes_.size(); }

 private:
  std::span<const std::byte> bytes_;
};
}  // namespace

std::vector<std::byte> encode_events(const std::vector<EventHandle>& events) {
  std::vector<std::byte> out;
  for (const EventHandle& event : events) out.insert(out.end(), event.begin(), event.end());
  return out;
}

std::vector<EventHandle> decode_events(std::span<const std::byte> bytes, std::uint32_t buffers) {
  const std::size_t count = bytes.size() / sizeof(EventHandle);
  if (bytes.size() % sizeof(EventHandle) != 0 || (count != 0 && count != buffers)) {
    throw CommError(concat(bytes.size(), " bytes of event handles for ", buffers, " buckets"));
  }
  std::vector<EventHandle> events(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(events[i].data(), bytes.data() + i * sizeof(EventHandle), sizeof(EventHandle));
  }
  return events;
}

std::vector<std::byte> IpcDescriptor::encode() const {
  std::vector<std::byte> out;
  put(out, buffers);
  put(out, bucket_bytes);
  put(out, static_cast<std::uint32_t>(device_id.size()));
  const auto* text = reinterpret_cast<const std::byte*>(device_id.data());
  out.insert(out.end(), text, text + device_id.size());
  put(out, memory.nbytes);
  put(out, static_cast<std::uint32_t>(memory.fd ? 1 : 0));
  out.insert(out.end(), memory.bytes.begin(), memory.bytes.end());
  const auto events = encode_events(packed);
  out.insert(out.end(), events.begin(), events.end());
  return out;
}

IpcDescriptor IpcDescriptor::decode(std::span<const std::byte> bytes) {
  Reader in(bytes);
  IpcDescriptor d;
  d.buffers = in.get<std::uint32_t>();
  d.bucket_bytes = in.get<std::uint64_t>();
  const auto id_bytes = in.get<std::uint32_t>();
  if (d.buffers == 0 || d.buffers > kMaxBuffers || d.bucket_bytes == 0 || d.bucket_bytes % kTokenBytes != 0 ||
      id_bytes > kMaxDeviceIdBytes) {
    throw CommError(concat("a shared device ring of ", d.buffers, " buckets of ", d.bucket_bytes,
                           " bytes is none that a source makes"));
  }
  d.device_id.resize(id_bytes);
  in.raw(d.device_id.data(), id_bytes);
  d.memory.nbytes = in.get<std::uint64_t>();
  (void)in.get<std::uint32_t>();
  in.raw(d.memory.bytes.data(), d.memory.bytes.size());
  if (d.memory.nbytes / d.buffers < d.bucket_bytes) {
    throw CommError(concat("a shared device ring of ", d.memory.nbytes, " bytes does not hold ", d.buffers,
                           " buckets of ", d.bucket_bytes));
  }
  d.packed = decode_events(bytes.last(in.left()), d.buffers);
  return d;
}

namespace {
struct Kept {
  std::shared_ptr<Communicator> ring;
  std::vector<OwnedFd> readers;
};
struct KeptRings {
  std::mutex mutex;
  std::list<Kept> rings;
};
// Never destroyed: at exit the driver takes the memory back, in an order that is not ours.
KeptRings& kept_rings() {
  static auto* const rings = new KeptRings;
  return *rings;
}

bool closed_by_peer(const OwnedFd& fd) {
  if (!fd) return true;
  pollfd entry{fd.get(), POLLRDHUP, 0};
  return ::poll(&entry, 1, 0) > 0 && (entry.revents & (POLLHUP | POLLRDHUP | POLLERR | POLLNVAL)) != 0;
}

void sweep_kept_rings() {
  std::list<Kept> done;  // freed without the lock
  KeptRings& all = kept_rings();
  const std::lock_guard lock(all.mutex);
  for (auto it = all.rings.begin(); it != all.rings.end();) {
    std::erase_if(it->readers, closed_by_peer);
    const auto next = std::next(it);
    if (it->readers.empty()) done.splice(done.end(), all.rings, it);
    it = next;
  }
}
}  // namespace

void IpcCommunicator::keep_for(std::shared_ptr<Communicator> ring, std::span<const OwnedFd> others) noexcept {
  try {
    Kept kept{std::move(ring), {}};
    for (const OwnedFd& other : others) kept.readers.push_back(OwnedFd::duplicate(other.get()));
    {
      const std::lock_guard lock(kept_rings().mutex);
      kept_rings().rings.push_back(std::move(kept));
    }
    sweep_kept_rings();
  } catch (...) {  // no memory for the list: the ring goes now, and readers that still use it see an error
  }
}

IpcCommunicator::IpcCommunicator(std::shared_ptr<DeviceRuntime> runtime, std::unique_ptr<ShmCommunicator> handshake,
                                 std::uint64_t bucket_bytes)
    : runtime_(std::move(runtime)),
      handshake_(std::move(handshake)),
      bucket_bytes_(bucket_bytes),
      host_order_(runtime_) {}

std::unique_ptr<IpcCommunicator> IpcCommunicator::create(const std::shared_ptr<DeviceRuntime>& runtime,
                                                         std::uint32_t buffers, std::uint64_t bucket_bytes,
                                                         const std::vector<int>& reader_ranks, int source_rank) {
  sweep_kept_rings();
  auto handshake = ShmCommunicator::create(buffers, kTokenBytes, reader_ranks, source_rank);
  handshake->announces(bucket_bytes);
  std::unique_ptr<IpcCommunicator> made(new IpcCommunicator(runtime, std::move(handshake), bucket_bytes));
  const std::uint64_t blocks = (buffers * bucket_bytes + kSharedBlockBytes - 1) / kSharedBlockBytes;
  made->memory_ = Buffer::allocate(runtime, MemoryKind::kDevice, blocks * kSharedBlockBytes);
  if (runtime->can_share_events()) {
    for (std::uint32_t i = 0; i < buffers; ++i) {
      made->packed_.emplace_back(runtime, runtime->create_shared_event());
    }
  }
  made->read_.resize(reader_ranks.size());
  made->is_source_ = true;
  return made;
}

std::unique_ptr<IpcCommunicator> IpcCommunicator::attach(const std::shared_ptr<DeviceRuntime>& runtime,
                                                         IpcDescriptor descriptor, int control_fd, int data_fd,
                                                         std::uint32_t reader_index) {
  sweep_kept_rings();
  if (descriptor.device_id != runtime->device_id()) {
    throw CommError(concat("the source's buckets are on device ", descriptor.device_id, ", this rank's tensors on ",
                           runtime->device_id(), "; ranks on different devices need transport 'nccl'"));
  }
  auto handshake = ShmCommunicator::attach(control_fd, data_fd, reader_index);
  if (handshake->buffers() != descriptor.buffers) {
    throw CommError(concat("the source's handshake has ", handshake->buffers(), " slots, its ring ", descriptor.buffers,
                           " buckets"));
  }
  handshake->announces(descriptor.bucket_bytes);
  std::unique_ptr<IpcCommunicator> made(new IpcCommunicator(runtime, std::move(handshake), descriptor.bucket_bytes));
  made->mapped_ = runtime->import_memory(descriptor.memory);
  for (const EventHandle& handle : descriptor.packed) {
    made->packed_.emplace_back(runtime, runtime->import_event(handle));
  }
  made->read_.resize(1);
  if (made->shares_events()) {
    for (std::uint32_t i = 0; i < descriptor.buffers; ++i) {
      made->read_[0].emplace_back(runtime, runtime->create_shared_event());
      made->exported_.push_back(runtime->export_event(made->read_[0].back().handle()));
    }
  }
  return made;
}

IpcCommunicator::~IpcCommunicator() { (void)detach(); }

bool IpcCommunicator::detach() noexcept {
  if (is_source_) {
    for (auto& reader : read_) reader.clear();
  } else {
    packed_.clear();
    if (mapped_.data != nullptr) runtime_->close_memory(std::exchange(mapped_, Allocation{}));
  }
  return !runtime_->broken();
}

IpcDescriptor IpcCommunicator::describe() const {
  IpcDescriptor d;
  d.buffers = buffers();
  d.bucket_bytes = bucket_bytes_;
  d.device_id = runtime_->device_id();
  d.memory = runtime_->export_memory({memory_.data(), memory_.nbytes(), -1});
  for (const Event& event : packed_) d.packed.push_back(runtime_->export_event(event.handle()));
  return d;
}

void IpcCommunicator::add_reader(std::uint32_t index, const std::vector<EventHandle>& events) {
  if (events.size() != packed_.size()) {
    throw CommError(
        concat("reader ", index, " sent ", events.size(), " event handles, ", packed_.size(), " were expected"));
  }
  std::vector<Event>& mine = read_.at(index);
  mine.clear();
  for (const EventHandle& handle : events) mine.emplace_back(runtime_, runtime_->import_event(handle));
}

std::uint64_t IpcCommunicator::staging_bytes() const noexcept {
  return buffers() * bucket_bytes_ + handshake_->staging_bytes();
}

std::byte* IpcCommunicator::slot_data(std::uint64_t index) const noexcept {
  std::byte* const base = mapped_.data != nullptr ? mapped_.data : memory_.data();
  return base + index % buffers() * bucket_bytes_;
}

BucketSlot IpcCommunicator::acquire(Wait& wait) {
  // On return every reader has recorded its "read" event of the slot's last bucket.
  BucketSlot slot = handshake_->acquire(wait);
  if (slot.index >= buffers()) {
    for (auto& reader : read_) {
      if (!reader.empty()) reader[slot.index % buffers()].stream_wait(stream_);
    }
  }
  slot.data = slot_data(slot.index);
  slot.capacity = bucket_bytes_;
  return slot;
}

void IpcCommunicator::send(const BucketSlot& slot, const BucketHeader& header, Wait& wait) {
  if (shares_events()) {
    packed_[slot.index % buffers()].record(stream_);
  } else {
    host_order_.record(stream_);
    host_order_.synchronize(wait);
  }
  handshake_->send(slot, header, wait);
}

void IpcCommunicator::flush(Wait& wait) { handshake_->flush(wait); }

BucketSlot IpcCommunicator::receive(BucketHeader& header, Wait& wait) {
  BucketSlot slot = handshake_->receive(header, wait);
  if (shares_events()) packed_[slot.index % buffers()].stream_wait(stream_);
  slot.data = slot_data(slot.index);
  slot.capacity = bucket_bytes_;
  return slot;
}

void IpcCommunicator::release(const BucketSlot& slot) {
  if (shares_events()) {
    read_[0][slot.index % buffers()].record(stream_);
  } else {
    // Bounded: what the bucket holds was complete before it was handed over, so only our own kernel is waited for.
    Wait wait(std::chrono::seconds(60), nullptr);
    host_order_.record(stream_);
    host_order_.synchronize(wait);
  }
  handshake_->release(slot);
}

void IpcCommunicator::reset(std::uint64_t epoch) { handshake_->reset(epoch); }

}  // namespace fastsync
