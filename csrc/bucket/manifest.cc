#include "bucket/manifest.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "common/error.h"

namespace fastsync {
namespace {
constexpr std::size_t kFirstSlots = 64;

static_assert(std::endian::native == std::endian::little, "fingerprints read words in memory order");

constexpr std::size_t kShownNameBytes = 200;
constexpr std::size_t kShownDims = 16;

// ---- UTF-8 ----------------------------------------------------------------------------------------------------------

// Length of the valid sequence at the start of `text` (not empty); 0 if there is none. Table 3-7 of the Unicode
// Standard: no overlong forms, no surrogates, nothing above U+10FFFF.
std::size_t utf8_sequence_length(std::string_view text) noexcept {
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const auto continues = [&](std::size_t i) { return i < text.size() && (at(i) & 0xC0) == 0x80; };
  const unsigned char lead = at(0);
  if (lead < 0x80) return 1;
  if (lead < 0xC2) return 0;
  if (lead < 0xE0) return continues(1) ? 2 : 0;
  if (lead < 0xF0) {
    if (!continues(1) || !continues(2)) return 0;
    if (lead == 0xE0 && at(1) < 0xA0) return 0;
    if (lead == 0xED && at(1) >= 0xA0) return 0;
    return 3;
  }
  if (lead < 0xF5) {
    if (!continues(1) || !continues(2) || !continues(3)) return 0;
    if (lead == 0xF0 && at(1) < 0x90) return 0;
    if (lead == 0xF4 && at(1) >= 0x90) return 0;
    return 4;
  }
  return 0;
}

bool is_ascii_block(const char* text) noexcept {
  std::uint64_t word;
  std::memcpy(&word, text, sizeof(word));
  return (word & 0x8080808080808080ULL) == 0;
}

// ---- Fingerprint ----------------------------------------------------------------------------------------------------

// The finaliser of MurmurHash3: every bit of the input changes every bit of the output with probability 1/2.
constexpr std::uint64_t mix(std::uint64_t h) noexcept {
  h ^= h >> 33;
  h *= 0xFF51AFD7ED558CCDULL;
  h ^= h >> 33;
  h *= 0xC4CEB9FE1A85EC53ULL;
  h ^= h >> 33;
  return h;
}

// The added constant keeps a run of zero words from being a fixed point.
constexpr std::uint64_t mix_word(std::uint64_t state, std::uint64_t word) noexcept {
  return mix((state + 0x9E3779B97F4A7C15ULL) ^ word);
}

// The length goes first, so that no two lists of texts have the same words.
std::uint64_t mix_text(std::uint64_t state, std::string_view text) noexcept {
  state = mix_word(state, text.size());
  while (!text.empty()) {
    std::uint64_t word = 0;
    const std::size_t n = std::min(text.size(), sizeof(word));
    std::memcpy(&word, text.data(), n);
    state = mix_word(state, word);
    text.remove_prefix(n);
  }
  return state;
}

std::uint64_t mix_numbers(std::uint64_t state, const KeptInts& numbers) noexcept {
  state = mix_word(state, numbers.size());
  for (const std::int64_t number : numbers) state = mix_word(state, static_cast<std::uint64_t>(number));
  return state;
}

std::uint64_t mix_entry(std::uint64_t state, const TensorMeta& meta) noexcept {
  state = mix_text(state, meta.name);
  state = mix_text(state, meta.dtype);
  state = mix_word(state, meta.itemsize);
  state = mix_numbers(state, meta.shape);
  state = mix_word(state, meta.tie.group);
  state = mix_word(state, meta.tie.byte_offset);
  return mix_numbers(state, meta.tie.strides);
}

// ---- Validation -----------------------------------------------------------------------------------------------------

// product(shape) * itemsize, or nothing where that is above `limit`. A zero dimension makes it 0 whatever the others
// are. No dimension may be negative.
std::optional<std::uint64_t> logical_bytes(const TensorMeta& meta, std::uint64_t limit) noexcept {
  if (std::find(meta.shape.begin(), meta.shape.end(), 0) != meta.shape.end()) return 0;
  std::uint64_t bytes = meta.itemsize;
  for (const std::int64_t dim : meta.shape) {
    if (bytes > limit / static_cast<std::uint64_t>(dim)) return std::nullopt;
    bytes *= static_cast<std::uint64_t>(dim);
  }
  if (bytes > limit) return std::nullopt;
  return bytes;
}

// ---- Serialized form ------------------------------------------------------------------------------------------------
//
//   piece  := format:1 count:varint entry*count
//   entry  := name:text dtype:text itemsize_log2|tied<<7:1 dims:1 dim:varint*dims [tie]
//   tie    := group:varint byte_offset:varint count:1 stride:zigzag*count      (only where tied; never the empty tie)
//   text   := length:varint byte*length
//   varint := LEB128 of at most 64 bits, in its shortest form
//
// nbytes is not sent: it follows from the shape.

constexpr std::uint8_t kFormat = 1;
constexpr std::uint8_t kTiedFlag = 0x80;
constexpr std::size_t kMinEntryBytes = 5;  // "" has 1 byte, the shortest dtype 2

constexpr std::uint64_t zigzag(std::int64_t x) noexcept {
  return (static_cast<std::uint64_t>(x) << 1) ^ static_cast<std::uint64_t>(x >> 63);
}
constexpr std::int64_t unzigzag(std::uint64_t x) noexcept {
  return static_cast<std::int64_t>((x >> 1) ^ (0 - (x & 1)));
}

class Writer {
 public:
  void byte(std::uint8_t value) { bytes_.push_back(static_cast<std::byte>(value)); }
  void varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) byte(static_cast<std::uint8_t>(value | 0x80));
    byte(static_cast<std::uint8_t>(value));
  }
  void text(std::string_view value) {
    varint(value.size());
    const auto* data = reinterpret_cast<const std::byte*>(value.data());
    bytes_.insert(bytes_.end(), data, data + value.size());
  }
  void entry(const TensorMeta& meta) {
    const bool tied = meta.tie != Tie{};
    text(meta.name);
    text(meta.dtype);
    byte(static_cast<std::uint8_t>(std::countr_zero(meta.itemsize) | (tied ? kTiedFlag : 0)));
    byte(static_cast<std::uint8_t>(meta.shape.size()));
    for (const std::int64_t dim : meta.shape) varint(static_cast<std::uint64_t>(dim));
    if (!tied) return;
    varint(meta.tie.group);
    varint(meta.tie.byte_offset);
    byte(static_cast<std::uint8_t>(meta.tie.strides.size()));
    for (const std::int64_t stride : meta.tie.strides) varint(zigzag(stride));
  }
  [[nodiscard]] std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  [[nodiscard]] std::size_t left() const noexcept { return bytes_.size() - at_; }
  [[noreturn]] void fail(std::string_view what) const {
    throw CommError(concat("malformed manifest: ", what, " at byte ", at_, " of ", bytes_.size(),
                           "; both sides must run the same fastsync"));
  }
  std::uint8_t byte() {
    if (left() == 0) fail("the message ends too early");
    return std::to_integer<std::uint8_t>(bytes_[at_++]);
  }
  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const std::uint8_t next = byte();
      if (shift == 63 && next > 1) fail("a number has more than 64 bits");
      value |= std::uint64_t{next & 0x7FU} << shift;
      if ((next & 0x80) == 0) {
        if (next == 0 && shift > 0) fail("a number is not in its shortest form");
        return value;
      }
    }
    fail("a number has more than 64 bits");
  }
  std::string text(std::size_t max_bytes, std::string_view what) {
    const std::uint64_t length = varint();
    if (length > max_bytes || length > left()) fail(concat(what, " of ", length, " bytes is too long"));
    const auto* data = reinterpret_cast<const char*>(bytes_.data()) + at_;
    at_ += length;
    return std::string(data, length);
  }
  std::size_t count(std::string_view what) {
    const std::uint8_t value = byte();
    if (value > kMaxDims || value > left()) fail(concat(static_cast<unsigned>(value), " ", what, " are too many"));
    return value;
  }
  TensorMeta entry() {
    TensorMeta meta;
    meta.name = text(kMaxNameBytes, "a name");
    meta.dtype = text(kMaxDtypeBytes, "a dtype");
    const std::uint8_t kind = byte();
    const std::uint8_t log2 = kind & ~kTiedFlag;
    if ((1U << std::min<unsigned>(log2, 31)) > kMaxItemsize) fail("an itemsize is out of range");
    meta.itemsize = 1U << log2;
    meta.shape.resize(count("dimensions"));
    for (std::int64_t& dim : meta.shape) {
      const std::uint64_t value = varint();
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) fail("a dimension is negative");
      dim = static_cast<std::int64_t>(value);
    }
    const auto bytes = logical_bytes(meta, kMaxManifestBytes);
    if (!bytes) fail("a tensor is too large");
    meta.nbytes = *bytes;
    if ((kind & kTiedFlag) == 0) return meta;
    const std::uint64_t group = varint();
    if (group > std::numeric_limits<std::uint32_t>::max()) fail("a tie group is out of range");
    meta.tie.group = static_cast<std::uint32_t>(group);
    meta.tie.byte_offset = varint();
    meta.tie.strides.resize(count("tie strides"));
    for (std::int64_t& stride : meta.tie.strides) stride = unzigzag(varint());
    if (meta.tie == Tie{}) fail("an empty tie is spelled out");
    return meta;
  }

 private:
  std::span<const std::byte> bytes_;
  std::size_t at_ = 0;
};

}  // namespace

bool is_valid_utf8(std::string_view text) noexcept {
  while (!text.empty()) {
    if (text.size() >= 8 && is_ascii_block(text.data())) {
      text.remove_prefix(8);
      continue;
    }
    const std::size_t length = utf8_sequence_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string shown_name(std::string_view name) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string result;
  std::size_t i = 0;
  while (i < name.size() && result.size() < kShownNameBytes) {
    const auto byte = static_cast<unsigned char>(name[i]);
    const std::size_t length = utf8_sequence_length(name.substr(i));
    if (length == 0 || byte < 0x20 || byte == 0x7F) {
      result += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
      i += 1;
    } else {
      result += name.substr(i, length);
      i += length;
    }
  }
  if (i < name.size()) result += concat("... (", name.size(), " bytes)");
  return result;
}

std::string describe(const TensorMeta& meta) {
  std::string text = concat("'", shown_name(meta.name), "' ", shown_name(meta.dtype), "[");
  for (std::size_t k = 0; k < meta.shape.size(); ++k) {
    if (k == kShownDims) {
      text += concat(", ... (", meta.shape.size(), " dimensions)");
      break;
    }
    text += concat(k == 0 ? "" : ", ", meta.shape[k]);
  }
  return text + "]";
}

void validate(const TensorMeta& meta) {
  if (meta.name.size() > kMaxNameBytes) {
    throw InvalidArgument(concat("a tensor name of ", meta.name.size(), " bytes is longer than ", kMaxNameBytes, ": '",
                                 shown_name(meta.name), "'"));
  }
  if (!is_valid_utf8(meta.name))
    throw InvalidArgument(concat("tensor name '", shown_name(meta.name), "' is not valid UTF-8"));
  const auto fail = [&](auto&&... what) { throw InvalidArgument(concat("tensor ", describe(meta), ": ", what...)); };
  if (meta.dtype.empty() || meta.dtype.size() > kMaxDtypeBytes || !is_valid_utf8(meta.dtype)) {
    fail("its dtype must be UTF-8 of 1 to ", kMaxDtypeBytes, " bytes");
  }
  if (!std::has_single_bit(meta.itemsize) || meta.itemsize > kMaxItemsize) {
    fail("its itemsize is ", meta.itemsize, "; powers of two up to ", kMaxItemsize, " are supported");
  }
  if (meta.shape.size() > kMaxDims)
    fail("it has ", meta.shape.size(), " dimensions; at most ", kMaxDims, " are supported");
  if (meta.tie.strides.size() > kMaxDims) fail("its tie has ", meta.tie.strides.size(), " strides; at most ", kMaxDims);
  for (const std::int64_t dim : meta.shape) {
    if (dim < 0) fail("dimension ", dim, " is negative");
  }
  const auto bytes = logical_bytes(meta, kMaxManifestBytes);
  if (!bytes) fail("it is larger than ", kMaxManifestBytes, " bytes");
  if (*bytes != meta.nbytes) fail("its shape needs ", *bytes, " bytes, but nbytes is ", meta.nbytes);
}

void Manifest::append(TensorMeta meta) {
  validate(meta);
  if (tensors_.size() >= kMaxTensors) {
    throw InvalidArgument(concat("tensor ", describe(meta), ": a manifest holds at most ", kMaxTensors, " tensors"));
  }
  if (meta.nbytes > kMaxManifestBytes - nbytes_) {
    throw InvalidArgument(
        concat("tensor ", describe(meta), ": with it the manifest is larger than ", kMaxManifestBytes, " bytes"));
  }
  const auto position = static_cast<std::uint32_t>(tensors_.size());
  if (slots_.size() < 2 * (tensors_.size() + 1)) rebuild_index(2 * tensors_.size() + kFirstSlots);
  const std::size_t slot = slot_of(meta.name);
  if (slots_[slot] != 0) {
    throw InvalidArgument(concat("tensor ", describe(meta), " is at positions ", slots_[slot] - 1, " and ", position,
                                 " of the parameters; names must be unique"));
  }
  tensors_.push_back(std::move(meta));
  slots_[slot] = position + 1;
  const TensorMeta& added = tensors_.back();
  nbytes_ += added.nbytes;
  fingerprint_ = mix_entry(fingerprint_, added);
}

void Manifest::reserve(std::size_t tensors) {
  // Never a little more at a time: pieces of a manifest that each reserve their own would copy it for each.
  if (tensors <= tensors_.capacity()) return;
  tensors_.reserve(std::max(tensors, 2 * tensors_.capacity()));
  rebuild_index(tensors_.capacity());
}

std::size_t Manifest::slot_of(std::string_view name) const noexcept {
  const std::size_t mask = slots_.size() - 1;
  for (std::size_t at = std::hash<std::string_view>{}(name)&mask;; at = (at + 1) & mask) {
    if (slots_[at] == 0 || std::string_view(tensors_[slots_[at] - 1].name) == name) return at;
  }
}

void Manifest::rebuild_index(std::size_t capacity) {
  slots_.assign(std::bit_ceil(2 * std::max(capacity, tensors_.size() + 1)), 0);
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    slots_[slot_of(tensors_[i].name)] = static_cast<std::uint32_t>(i + 1);
  }
}

std::optional<std::uint32_t> Manifest::find(std::string_view name) const {
  if (slots_.empty()) return std::nullopt;
  const std::uint32_t found = slots_[slot_of(name)];
  if (found == 0) return std::nullopt;
  return found - 1;
}

std::vector<std::byte> Manifest::serialize(std::size_t first, std::size_t last) const {
  if (first > last || last > tensors_.size()) {
    throw InvalidArgument(concat("manifest entries [", first, ", ", last, ") do not exist; it has ", tensors_.size()));
  }
  Writer writer;
  writer.byte(kFormat);
  writer.varint(last - first);
  for (std::size_t i = first; i < last; ++i) writer.entry(tensors_[i]);
  return writer.take();
}

void Manifest::append_serialized(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  if (reader.byte() != kFormat) reader.fail("unknown format");
  const std::uint64_t count = reader.varint();
  if (count > reader.left() / kMinEntryBytes) reader.fail(concat(count, " entries do not fit"));

  reserve(tensors_.size() + count);

  const std::size_t old_size = tensors_.size();
  const std::uint64_t old_nbytes = nbytes_;
  const std::uint64_t old_fingerprint = fingerprint_;
  try {
    for (std::uint64_t i = 0; i < count; ++i) append(reader.entry());
    if (reader.left() != 0) reader.fail("bytes are left over");
  } catch (const std::exception& error) {
    tensors_.resize(old_size);
    rebuild_index(old_size);
    nbytes_ = old_nbytes;
    fingerprint_ = old_fingerprint;
    if (dynamic_cast<const InvalidArgument*>(&error) == nullptr) throw;
    throw CommError(concat("the peer's manifest is not one: ", error.what()));
  }
}

}  // namespace fastsync
