// Copying bytes and checking them, in one pass.
//
// The checksum of a bucket is a sum over its 8-byte little-endian words, so that fragments may be packed in any order
// and by any number of threads (or GPU blocks), and both sides get the same number whatever they copied at once:
//
//   key(i)   = kChecksumSeed + i * kChecksumStep                      (mod 2^64; i = byte offset in the bucket / 8)
//   product += low32(w ^ key(i)) * high32(w ^ key(i))                 (mod 2^64)
//   sum     += w                                                      (mod 2^64)
//
// `sum` alone catches every change confined to one word; `product` depends on the position, so it catches swaps and
// shifts. A last partial word counts as if zero-extended; bytes that no fragment covers do not count.
//
// Not cryptographic: it finds faults, not forgeries. Pure functions, thread-safe, no errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace fastsync {

inline constexpr std::uint64_t kChecksumSeed = 0x9E3779B97F4A7C15ULL;
inline constexpr std::uint64_t kChecksumStep = 0xD1B54A32D192ED03ULL;

struct Checksum {
  std::uint64_t product = 0;
  std::uint64_t sum = 0;
  Checksum& operator+=(const Checksum& other) noexcept {
    product += other.product;
    sum += other.sum;
    return *this;
  }
  friend bool operator==(const Checksum&, const Checksum&) = default;
};

// kCached leaves the destination in cache (a reader is near); kStreaming writes around the cache (non-temporal),
// which wins for destinations larger than the last-level cache. After kStreaming the function has fenced its stores:
// whatever the thread publishes next is seen behind them. kStreamingUnfenced leaves that to the caller, who calls
// fence_streaming_stores() once after many pieces; a fence waits for memory, which costs more than a small piece does.
enum class StoreMode { kCached, kStreaming, kStreamingUnfenced };
void fence_streaming_stores() noexcept;
// Shorter pieces go through the cache in every mode: their partial first and last lines would cost more than is saved.
inline constexpr std::size_t kMinStreamingBytes = 1024;

// `bucket_offset` is where the bytes lie in the bucket; a multiple of 8. No alignment is needed of `src` and `dst`.
[[nodiscard]] Checksum checksum_bytes(const void* src, std::size_t nbytes, std::uint64_t bucket_offset) noexcept;
void copy_bytes(void* dst, const void* src, std::size_t nbytes, StoreMode mode) noexcept;
[[nodiscard]] Checksum copy_and_checksum(void* dst, const void* src, std::size_t nbytes, std::uint64_t bucket_offset,
                                         StoreMode mode) noexcept;

// "avx512", "avx2", "neon" or "portable": chosen once, by what the CPU has and what passed a self-test against the
// portable path (a kernel that fails it is passed over, with a line on stderr); FASTSYNC_CPU_KERNEL names a lower one.
[[nodiscard]] std::string_view copy_kernel_name() noexcept;

}  // namespace fastsync
