#include "control/frame.h"

#include <bit>

namespace fastsync {

static_assert(std::endian::native == std::endian::little, "the wire is little-endian and so must the host be");

namespace {
template <typename T>
void put(std::byte*& out, T v) noexcept {
  std::memcpy(out, &v, sizeof(T));
  out += sizeof(T);
}
template <typename T>
T take(const std::byte*& in) noexcept {
  T v;
  std::memcpy(&v, in, sizeof(T));
  in += sizeof(T);
  return v;
}
constexpr std::size_t kMaxShortText = 1024;
constexpr std::size_t kMaxHeldManifests = 64;
}  // namespace

void encode_frame_header(const FrameHeader& header, std::byte* out) noexcept {
  put(out, kFrameMagic);
  put(out, static_cast<std::uint16_t>(header.type));
  put(out, header.flags);
  put(out, header.payload_bytes);
  put(out, header.descriptor_count);
  put(out, header.sync);
  put(out, header.aux);
  put(out, std::uint64_t{0});
}

FrameHeader decode_frame_header(const std::byte* bytes) {
  if (take<std::uint32_t>(bytes) != kFrameMagic) throw CommError("control frame: not fastsync's (wrong magic number)");
  FrameHeader header;
  const auto type = take<std::uint16_t>(bytes);
  if (type < static_cast<std::uint16_t>(FrameType::kHello) || type > static_cast<std::uint16_t>(FrameType::kSums)) {
    throw CommError(concat("control frame: unknown type ", type));
  }
  header.type = static_cast<FrameType>(type);
  header.flags = take<std::uint16_t>(bytes);
  header.payload_bytes = take<std::uint32_t>(bytes);
  header.descriptor_count = take<std::uint32_t>(bytes);
  header.sync = take<std::uint64_t>(bytes);
  header.aux = take<std::uint64_t>(bytes);
  if (header.payload_bytes > kMaxPayloadBytes) {
    throw CommError(concat("control frame: payload of ", header.payload_bytes, " bytes, at most ", kMaxPayloadBytes));
  }
  if (header.descriptor_count > 4) throw CommError(concat("control frame: ", header.descriptor_count, " descriptors"));
  return header;
}

std::vector<std::byte> encode(const Hello& v) {
  PayloadWriter w;
  w.u32(v.protocol);
  w.u32(v.rank);
  w.u32(v.world);
  w.u32(v.source);
  w.u64(v.pid);
  w.u64(v.calls_owner);
  w.u64(v.last_sync);
  w.u64(v.session);
  w.text(v.library_version);
  w.text(v.token);
  w.text(v.host);
  return w.take();
}
void decode(std::span<const std::byte> bytes, Hello& out) {
  PayloadReader r(bytes);
  out.protocol = r.u32();
  // Only the first field is common to all protocol versions: the rest may differ, and the caller refuses by it.
  if (out.protocol != kProtocolVersion) return;
  out.rank = r.u32();
  out.world = r.u32();
  out.source = r.u32();
  out.pid = r.u64();
  out.calls_owner = r.u64();
  out.last_sync = r.u64();
  out.session = r.u64();
  out.library_version = r.text(kMaxShortText);
  out.token = r.text(kMaxShortText);
  out.host = r.text(kMaxShortText);
  r.end();
}

std::vector<std::byte> encode(const Join& v) {
  PayloadWriter w;
  w.u64(v.call);
  w.u64(v.last_sync);
  w.u64(v.comm_generation);
  w.text(v.transport);
  w.text(v.device_id);
  w.u32(v.nccl_version);
  w.u8(v.flexible);
  w.u8(v.verifies_first);
  w.u8(v.refused);
  w.u32(static_cast<std::uint32_t>(v.manifests.size()));
  for (const auto f : v.manifests) w.u64(f);
  return w.take();
}
void decode(std::span<const std::byte> bytes, Join& out) {
  PayloadReader r(bytes);
  out.call = r.u64();
  out.last_sync = r.u64();
  out.comm_generation = r.u64();
  out.transport = r.text(kMaxShortText);
  out.device_id = r.text(kMaxShortText);
  out.nccl_version = r.u32();
  out.flexible = r.u8();
  out.verifies_first = r.u8();
  out.refused = r.u8();
  const auto n = r.u32();
  if (n > kMaxHeldManifests) throw CommError(concat("control frame: ", n, " manifests held"));
  out.manifests.clear();
  for (std::uint32_t i = 0; i < n; ++i) out.manifests.push_back(r.u64());
  r.end();
}

std::vector<std::byte> encode(const Begin& v) {
  PayloadWriter w;
  w.u64(v.version);
  w.u64(v.fingerprint);
  w.u64(v.tensors);
  w.u64(v.nbytes);
  w.u64(v.bucket_bytes);
  w.u64(v.asked_bytes);
  w.u64(v.comm_generation);
  w.u64(v.set_id);
  w.u64(v.share_bytes);
  w.u32(v.buffers);
  w.u8(v.verify);
  w.u8(v.strict);
  w.u8(v.streaming);
  w.u8(v.manifest_follows);
  w.text(v.transport);
  return w.take();
}
void decode(std::span<const std::byte> bytes, Begin& out) {
  PayloadReader r(bytes);
  out.version = r.u64();
  out.fingerprint = r.u64();
  out.tensors = r.u64();
  out.nbytes = r.u64();
  out.bucket_bytes = r.u64();
  out.asked_bytes = r.u64();
  out.comm_generation = r.u64();
  out.set_id = r.u64();
  out.share_bytes = r.u64();
  out.buffers = r.u32();
  out.verify = r.u8();
  out.strict = r.u8();
  out.streaming = r.u8();
  out.manifest_follows = r.u8();
  out.transport = r.text(kMaxShortText);
  r.end();
  if (out.asked_bytes == 0 || out.bucket_bytes % kAlignment != 0 || out.bucket_bytes > (std::uint64_t{1} << 62)) {
    throw CommError(concat("control frame: bucket_bytes of ", out.bucket_bytes));
  }
}

std::vector<std::byte> encode(const Failure& v) {
  PayloadWriter w;
  w.u16(static_cast<std::uint16_t>(v.kind));
  w.i64(v.rank);
  w.i64(v.reporter);
  w.u64(v.answers);
  w.text(cut_message(v.message));
  return w.take();
}
void decode(std::span<const std::byte> bytes, Failure& out) {
  PayloadReader r(bytes);
  const auto kind = r.u16();
  // A newer peer may know kinds that we do not.
  out.kind = kind < kErrorKindCount ? static_cast<ErrorKind>(kind) : ErrorKind::kPeerFailed;
  out.rank = r.i64();
  out.reporter = r.i64();
  out.answers = r.u64();
  out.message = r.text(kMaxMessageBytes);
  r.end();
}

std::vector<std::byte> encode(const BucketHeader& v) {
  PayloadWriter w;
  w.u64(v.index);
  w.u64(v.used_bytes);
  w.u64(v.tensors_end);
  w.u64(v.checksum.product);
  w.u64(v.checksum.sum);
  w.u32(v.flags);
  return w.take();
}
void decode(std::span<const std::byte> bytes, BucketHeader& out) {
  PayloadReader r(bytes);
  out.index = r.u64();
  out.used_bytes = r.u64();
  out.tensors_end = r.u64();
  out.checksum.product = r.u64();
  out.checksum.sum = r.u64();
  out.flags = r.u32();
  r.end();
}

std::vector<std::byte> encode_sums(std::span<const Checksum> sums) {
  PayloadWriter w;
  for (const Checksum& sum : sums) {
    w.u64(sum.product);
    w.u64(sum.sum);
  }
  return w.take();
}
void decode_sums(std::span<const std::byte> bytes, std::vector<Checksum>& append_to) {
  PayloadReader r(bytes);
  if (bytes.size() / sizeof(Checksum) > kMaxSumsPerFrame) {
    throw CommError(concat("control frame: ", bytes.size() / sizeof(Checksum), " checksums"));
  }
  while (r.left() != 0) {
    Checksum sum;
    sum.product = r.u64();
    sum.sum = r.u64();
    append_to.push_back(sum);
  }
}

std::vector<std::vector<std::byte>> encode_lists(const ReadyLists& lists) {
  std::vector<std::vector<std::byte>> out;
  PayloadWriter w;
  const auto add = [&](std::uint8_t which, const std::vector<std::string>& names) {
    for (const auto& name : names) {
      if (name.size() > kMaxNameBytes) {
        throw InvalidArgument(concat("a tensor name of ", name.size(), " bytes is longer than ", kMaxNameBytes, ": '",
                                     shown_name(name), "'"));
      }
      if (w.size() + name.size() + 5 > kManifestChunkBytes) out.push_back(w.take());
      w.u8(which);
      w.text(name);
    }
  };
  add(0, lists.missing);
  add(1, lists.unexpected);
  out.push_back(w.take());  // the last piece, perhaps empty
  return out;
}
void decode_lists(std::span<const std::byte> bytes, ReadyLists& append_to) {
  PayloadReader r(bytes);
  while (r.left() > 0) {
    const auto which = r.u8();
    if (which > 1) throw CommError("control frame: unknown list");
    (which == 0 ? append_to.missing : append_to.unexpected).push_back(r.text(kMaxNameBytes));
  }
}

std::string cut_message(std::string_view message) {
  if (message.size() <= kMaxMessageBytes) return std::string(message);
  std::size_t end = kMaxMessageBytes - 3;
  while (end > 0 && (static_cast<unsigned char>(message[end]) & 0xC0U) == 0x80U) --end;
  return std::string(message.substr(0, end)) + "...";
}

}  // namespace fastsync
