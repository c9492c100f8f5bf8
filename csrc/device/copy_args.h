// What one launch of the multi-tensor copy does: the structs that the host fills and the kernel reads.
//
// One launch moves every piece of one bucket, in one direction, and adds the bucket's checksum (common/checksum.h) on the
// way. The structs are the ABI between the host code, the compiled kernel and the test double that runs the kernel's body
// on the CPU: plain data, fixed offsets, no padding that matters (static_asserts below).
//
// Ownership: everything that is pointed to is the caller's and is read when the stream gets there, not when the launch is
// queued. Errors: none; whoever fills the structs has validated the views.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/checksum.h"

namespace fastsync {

// A range of one tensor's logical bytes in one bucket. Pieces lie in the order of bucket_offset and do not overlap there.
struct CopyPiece {
  // Contiguous: address of the piece's own first byte. With a layout: address of the view's element [0, 0, ...].
  // 0: no destination (unpack), the bytes are only checked.
  std::uint64_t address = 0;
  std::uint64_t bucket_offset = 0;  // multiple of 256
  std::uint64_t nbytes = 0;         // > 0
  std::uint64_t tensor_offset = 0;  // with a layout: logical byte at which the piece begins, a whole element
  // Where its layout begins in CopyArgs::layouts, plus 1; 0: contiguous and nothing to flip.
  std::uint64_t layout = 0;
};
static_assert(sizeof(CopyPiece) == 40);

// A layout is a run of 64-bit words:
//   [0] number of dimensions, at least 1   [1] itemsize: a power of two, up to 256
//   [2] [3] what is xor-ed into bytes 0..7 and 8..15 of every 16 packed bytes (pack only; lazy conj and neg)
//   then the sizes, outermost first, then the strides in bytes (signed, may be 0).
inline constexpr std::uint64_t kCopyLayoutHeaderWords = 4;

struct CopyArgs {
  const CopyPiece* pieces = nullptr;       // of this bucket only
  const std::uint64_t* layouts = nullptr;  // null when no piece has one
  std::byte* bucket = nullptr;             // 256-byte aligned
  // The checksum is added here, atomically: zero it before. Null: no checksum.
  Checksum* sum = nullptr;
  std::uint64_t used_bytes = 0;  // of the bucket: end of the last piece
  std::uint32_t count = 0;       // pieces
  std::uint32_t reserved = 0;
};
static_assert(sizeof(CopyArgs) == 48);
static_assert(offsetof(CopyArgs, used_bytes) == 32 && offsetof(CopyArgs, count) == 40);
static_assert(sizeof(Checksum) == 16);

enum class CopyDirection : std::uint8_t { kPack, kUnpack };

// What the kernel is called in the compiled image; each takes one CopyArgs by value.
inline constexpr const char* kPackKernelName = "fastsync_pack";
inline constexpr const char* kUnpackKernelName = "fastsync_unpack";

}  // namespace fastsync
