// What travels: the ordered list of tensors, and a 64-bit fingerprint of it.
//
// A Manifest is append-only: a mapping's is complete before the first bucket, a generator's grows as items are pulled.
// Order is the source's order. Names are exact, unique, valid UTF-8 of at most 64 KiB; "" is a name like any other.
//
// Threads: immutable once shared; append from one thread. Errors: append() throws InvalidArgument for a duplicate or
// malformed entry; append_serialized() throws CommError for any byte sequence that serialize() cannot have produced.
// A call that throws leaves the manifest as it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/slab.h"

namespace fastsync {

inline constexpr std::size_t kMaxNameBytes = 64 * 1024;
inline constexpr std::size_t kMaxDtypeBytes = 64;
inline constexpr std::size_t kMaxDims = 64;
inline constexpr std::uint64_t kMaxManifestBytes = std::uint64_t{1} << 62;
inline constexpr std::uint32_t kMaxItemsize = 256;  // so that a cut at the alignment never halves an element
inline constexpr std::size_t kMaxTensors = std::size_t{1} << 26;

// How a tensor of the source lies in memory that it shares with another tensor of the source (tied weights). Group 0
// means "shares with none". Two names of one group overlap in the same way on both sides iff the difference of their
// byte_offset and both their strides are equal there.
struct Tie {
  std::uint32_t group = 0;
  std::uint64_t byte_offset = 0;  // from the lowest address of the group
  KeptInts strides;               // in elements
  friend bool operator==(const Tie&, const Tie&) = default;
};

struct TensorMeta {
  KeptText name;
  KeptText dtype;            // torch's name without the prefix: "bfloat16"
  KeptInts shape;            // () for a scalar; zeros allowed
  std::uint64_t nbytes = 0;  // product(shape) * itemsize
  std::uint32_t itemsize = 1;
  Tie tie;
  friend bool operator==(const TensorMeta&, const TensorMeta&) = default;
};

class Manifest {
 public:
  // Throws InvalidArgument naming the tensor: duplicate name, name too long or not UTF-8, dtype empty, longer than
  // kMaxDtypeBytes or not UTF-8, itemsize not a power of two up to kMaxItemsize, negative dimension, more than kMaxDims
  // dimensions or tie strides, nbytes that is not product(shape) * itemsize, a total over kMaxManifestBytes, or more
  // than kMaxTensors entries.
  void append(TensorMeta meta);
  // Makes room for that many in all; only a matter of speed.
  void reserve(std::size_t tensors);
  [[nodiscard]] std::size_t size() const noexcept { return tensors_.size(); }
  [[nodiscard]] const TensorMeta& operator[](std::size_t index) const noexcept { return tensors_[index]; }
  [[nodiscard]] const std::vector<TensorMeta>& tensors() const noexcept { return tensors_; }
  [[nodiscard]] std::uint64_t nbytes() const noexcept { return nbytes_; }
  [[nodiscard]] std::optional<std::uint32_t> find(std::string_view name) const;
  // Over names, dtypes, shapes and ties, in order; equal manifests have equal fingerprints in every process and build.
  [[nodiscard]] std::uint64_t fingerprint() const noexcept { return fingerprint_; }

  // Entries [first, last) in a compact form. Appending the pieces in order rebuilds the manifest. Each list of entries
  // has exactly one serialized form. Throws InvalidArgument for a range that is not in the manifest.
  [[nodiscard]] std::vector<std::byte> serialize(std::size_t first, std::size_t last) const;
  // Bounds-checked; allocates at most in proportion to bytes.size().
  void append_serialized(std::span<const std::byte> bytes);

 private:
  // Where `name` is in slots_, or the free place where it would be.
  [[nodiscard]] std::size_t slot_of(std::string_view name) const noexcept;
  void rebuild_index(std::size_t capacity);

  std::vector<TensorMeta> tensors_;
  // Names to positions: a table with free places (0) and position + 1; its size is a power of two, at most half full.
  std::vector<std::uint32_t> slots_;
  std::uint64_t nbytes_ = 0;
  std::uint64_t fingerprint_ = 0;  // rolling: a function of the previous value and the new entry
};

// What append() throws for an entry by itself, whatever the others are.
void validate(const TensorMeta& meta);

// A name as messages show it: cut when long, control characters and invalid UTF-8 escaped, so that it is part of one
// valid line.
[[nodiscard]] std::string shown_name(std::string_view name);
// "'layers.0.weight' float32[4, 8]": how messages show a tensor. Long names and shapes are cut, control characters and
// invalid UTF-8 escaped, so that the text is one valid line whatever the name.
[[nodiscard]] std::string describe(const TensorMeta& meta);
[[nodiscard]] bool is_valid_utf8(std::string_view text) noexcept;

}  // namespace fastsync
