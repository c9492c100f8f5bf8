// The messages of the control plane: a fixed 40-byte header, then a payload, then (on Unix sockets) descriptors.
//
// Little-endian, no pickle, no varints. Everything a peer sends is untrusted: decode functions check every length and
// throw CommError; a header that is not ours ends the connection before anything else is read.
//
// Threads: values. Errors: CommError with what was wrong and which rank sent it (the caller adds the rank).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bucket/bucket_plan.h"
#include "comm/communicator.h"
#include "common/error.h"
#include "common/owned_fd.h"

namespace fastsync {

inline constexpr std::uint32_t kFrameMagic = 0x31595346;  // "FSY1"
// Bumped whenever a frame changes meaning: ranks with different numbers refuse each other by name.
inline constexpr std::uint32_t kProtocolVersion = 4;
inline constexpr std::size_t kMaxPayloadBytes = std::size_t{8} << 20;
inline constexpr std::size_t kManifestChunkBytes = std::size_t{1} << 20;

enum class FrameType : std::uint16_t {
  kHello = 1,         // receiver -> source, once a connection
  kWelcome = 2,       // source -> receiver: its sync number, and aux, the receiver's newest call that has met one
  kReject = 3,        // source -> receiver: kind and text, then the connection ends
  kJoin = 4,          // receiver -> source: I am in a sync call
  kCancel = 5,        // receiver -> source: I left it before it began
  kBegin = 6,         // source -> receiver
  kManifest = 7,      // source -> receiver: serialized entries
  kReady = 8,         // receiver -> source: my destinations fit; what the source needs of the data plane
  kGo = 9,            // source -> receiver: everybody is ready
  kDescriptors = 10,  // source -> receiver: what it needs of a new data plane; memory by SCM_RIGHTS
  kBucket = 11,       // source -> receiver: a BucketHeader, where the data plane carries none
  kDeviate = 12,      // source -> receiver: from entry aux on, the generator left the recorded plan
  kDone = 13,         // receiver -> source: everything arrived and was verified
  kCommit = 14,       // source -> receiver: the version moved
  kFail = 15,         // either way: this sync failed
  kStall = 16,        // source -> receiver: I wait for rank aux
  kBye = 17,          // either way: I close on purpose; payload says why
  kReleased = 18,     // receiver -> source: my first aux buckets are released, where the data plane does not say
  kSums = 19,         // source -> receiver: checksums of buckets aux, aux + 1, ..., which their headers could not hold
};

struct Frame {
  FrameType type{};
  std::uint16_t flags = 0;
  std::uint64_t sync = 0;  // sequence number of the sync at the source; 0 before one is known
  std::uint64_t aux = 0;
  std::vector<std::byte> payload;
  std::vector<OwnedFd> descriptors;
};

inline constexpr std::size_t kFrameHeaderBytes = 40;
struct FrameHeader {
  FrameType type{};
  std::uint16_t flags = 0;
  std::uint32_t payload_bytes = 0;
  std::uint32_t descriptor_count = 0;
  std::uint64_t sync = 0;
  std::uint64_t aux = 0;
};
void encode_frame_header(const FrameHeader& header, std::byte* out) noexcept;
// Throws CommError: not ours, unknown type, oversize payload.
[[nodiscard]] FrameHeader decode_frame_header(const std::byte* bytes);

// Appends to a payload.
class PayloadWriter {
 public:
  void u8(std::uint8_t v) { raw(&v, 1); }
  void u16(std::uint16_t v) { raw(&v, 2); }
  void u32(std::uint32_t v) { raw(&v, 4); }
  void u64(std::uint64_t v) { raw(&v, 8); }
  void i64(std::int64_t v) { raw(&v, 8); }
  void text(std::string_view s) {
    u32(static_cast<std::uint32_t>(s.size()));
    raw(s.data(), s.size());
  }
  void raw(const void* data, std::size_t n) {
    const auto* p = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), p, p + n);
  }
  [[nodiscard]] std::vector<std::byte> take() { return std::exchange(bytes_, {}); }
  [[nodiscard]] std::size_t size() const noexcept { return bytes_.size(); }

 private:
  std::vector<std::byte> bytes_;
};

// Reads a payload; every read is bounds-checked and throws CommError.
class PayloadReader {
 public:
  explicit PayloadReader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  std::uint8_t u8() { return get<std::uint8_t>(); }
  std::uint16_t u16() { return get<std::uint16_t>(); }
  std::uint32_t u32() { return get<std::uint32_t>(); }
  std::uint64_t u64() { return get<std::uint64_t>(); }
  std::int64_t i64() { return get<std::int64_t>(); }
  std::string text(std::size_t max_bytes) {
    const auto n = u32();
    if (n > max_bytes || n > bytes_.size() - at_)
      throw CommError(concat("control frame: text of ", n, " bytes does not fit"));
    std::string s(reinterpret_cast<const char*>(bytes_.data() + at_), n);
    at_ += n;
    return s;
  }
  [[nodiscard]] std::size_t left() const noexcept { return bytes_.size() - at_; }
  // The payload must end here.
  void end() const {
    if (left() != 0) throw CommError(concat("control frame: ", left(), " bytes too many"));
  }

 private:
  template <typename T>
  T get() {
    if (bytes_.size() - at_ < sizeof(T)) throw CommError("control frame: shorter than its fields");
    T v;
    std::memcpy(&v, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return v;
  }
  std::span<const std::byte> bytes_;
  std::size_t at_ = 0;
};

// --- payloads -------------------------------------------------------------------------------------------------------

struct Hello {
  std::uint32_t protocol = kProtocolVersion;
  std::uint32_t rank = 0;    // global
  std::uint32_t world = 0;   // ranks in the group
  std::uint32_t source = 0;  // global rank this receiver takes for the source
  std::uint64_t pid = 0;
  std::uint64_t calls_owner = 0;  // its count of calls, which goes on when it connects again
  std::uint64_t last_sync = 0;    // newest sync number it heard of
  std::uint64_t session = 0;      // counts the sessions that it has opened
  std::string library_version;    // fastsync's
  std::string token;              // from the group's store; proves membership
  std::string host;               // host id
};

struct Join {
  std::uint64_t call = 0;                // counts this receiver's calls, from 1
  std::uint64_t last_sync = 0;           // newest sync number it heard of
  std::uint64_t comm_generation = 0;     // data plane it holds; 0: none
  std::string transport;                 // "auto" or a name
  std::string device_id;                 // of its tensors; empty: they are on the CPU
  std::uint32_t nccl_version = 0;        // 0: it cannot use NCCL
  std::uint8_t flexible = 0;             // a loader: it takes tensors wherever they come
  std::uint8_t verifies_first = 0;       // it needs a bucket's checksum with the bucket, not at the end
  std::uint8_t refused = 0;              // this call has failed already: a Fail that says why follows
  std::vector<std::uint64_t> manifests;  // fingerprints it holds
};

struct Begin {
  std::uint64_t version = 0;
  std::uint64_t fingerprint = 0;  // of the manifest (or of the recorded one, when streaming; 0: none)
  std::uint64_t tensors = 0;
  std::uint64_t nbytes = 0;
  std::uint64_t bucket_bytes = 0;  // of a real bucket
  std::uint64_t asked_bytes = 0;   // what the cuts are computed with
  std::uint64_t comm_generation = 0;
  std::uint64_t set_id = 0;  // names the share sessions whose verdict this session gives; 0: it carries data itself
  std::uint64_t share_bytes = 0;  // with set_id: the bucket size asked for in each of those
  std::uint32_t buffers = 0;
  std::uint8_t verify = 0;
  std::uint8_t strict = 0;
  std::uint8_t streaming = 0;  // a generator: the manifest grows
  std::uint8_t manifest_follows = 0;
  std::string transport;  // resolved
};

struct Failure {
  ErrorKind kind = ErrorKind::kInternal;
  std::int64_t rank = -1;      // about which rank
  std::int64_t reporter = -1;  // who found it
  std::uint64_t answers = 0;   // source -> receiver: the Join it answers, 0 if the receiver had not joined
  std::string message;
};

struct ReadyLists {
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
};

[[nodiscard]] std::vector<std::byte> encode(const Hello& v);
[[nodiscard]] std::vector<std::byte> encode(const Join& v);
[[nodiscard]] std::vector<std::byte> encode(const Begin& v);
[[nodiscard]] std::vector<std::byte> encode(const Failure& v);
[[nodiscard]] std::vector<std::byte> encode(const BucketHeader& v);
void decode(std::span<const std::byte> bytes, Hello& out);
void decode(std::span<const std::byte> bytes, Join& out);
void decode(std::span<const std::byte> bytes, Begin& out);
void decode(std::span<const std::byte> bytes, Failure& out);
void decode(std::span<const std::byte> bytes, BucketHeader& out);

// Checksums of consecutive buckets; at most kMaxSumsPerFrame a frame.
inline constexpr std::size_t kMaxSumsPerFrame = 65536;
[[nodiscard]] std::vector<std::byte> encode_sums(std::span<const Checksum> sums);
void decode_sums(std::span<const std::byte> bytes, std::vector<Checksum>& append_to);

// Lists may be longer than a frame: they travel in pieces, each a full frame payload of (which list, names).
[[nodiscard]] std::vector<std::vector<std::byte>> encode_lists(const ReadyLists& lists);
void decode_lists(std::span<const std::byte> bytes, ReadyLists& append_to);

// Cuts at a character boundary, so that the result is still UTF-8.
[[nodiscard]] std::string cut_message(std::string_view message);

}  // namespace fastsync
