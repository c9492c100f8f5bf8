// How a lane of the copy kernel (copy_kernel.h) loads and stores, for nvcc and for every other compiler: one access of
// 1 to 16 bytes, and words and vectors made of several.
//
// On the device an address that is not a multiple of the access's width is a trap. On the host it is an InternalError,
// so that the tests find what a GPU would.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define FASTSYNC_HOST_DEVICE __device__ __forceinline__
#define FASTSYNC_UNROLL _Pragma("unroll")
#define FASTSYNC_NO_UNROLL _Pragma("unroll 1")
#else
#include <cstring>

#include "common/error.h"
#define FASTSYNC_HOST_DEVICE inline
#define FASTSYNC_UNROLL
#define FASTSYNC_NO_UNROLL
#endif

namespace fastsync::detail {

struct CopyVector {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
};
inline constexpr std::uint32_t kVectorBytes = 16;
inline constexpr std::uint32_t kWordBytes = 8;

FASTSYNC_HOST_DEVICE std::byte* pointer_to(std::uint64_t address) noexcept {
  return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr): tables hold addresses as integers
}

#if defined(__CUDACC__)

// Streaming: each byte is used once, and should not drive the piece table out of the caches.
template <std::uint32_t kBytes>
__device__ __forceinline__ std::uint64_t load(const std::byte* at) {
  if constexpr (kBytes == 8) return __ldcs(reinterpret_cast<const unsigned long long*>(at));
  if constexpr (kBytes == 4) return __ldcs(reinterpret_cast<const unsigned int*>(at));
  if constexpr (kBytes == 2) return __ldcs(reinterpret_cast<const unsigned short*>(at));
  if constexpr (kBytes == 1) return __ldcs(reinterpret_cast<const unsigned char*>(at));
}

template <std::uint32_t kBytes>
__device__ __forceinline__ void store(std::byte* at, std::uint64_t value) {
  if constexpr (kBytes == 8) __stcs(reinterpret_cast<unsigned long long*>(at), value);
  if constexpr (kBytes == 4) __stcs(reinterpret_cast<unsigned int*>(at), static_cast<unsigned int>(value));
  if constexpr (kBytes == 2) __stcs(reinterpret_cast<unsigned short*>(at), static_cast<unsigned short>(value));
  if constexpr (kBytes == 1) __stcs(reinterpret_cast<unsigned char*>(at), static_cast<unsigned char>(value));
}

__device__ __forceinline__ CopyVector load_16(const std::byte* at) {
  const ulonglong2 value = __ldcs(reinterpret_cast<const ulonglong2*>(at));
  return {value.x, value.y};
}

__device__ __forceinline__ void store_16(std::byte* at, const CopyVector& value) {
  __stcs(reinterpret_cast<ulonglong2*>(at), make_ulonglong2(value.low, value.high));
}

#else

inline void check_alignment(const std::byte* at, std::uint32_t width) {
  const auto address = reinterpret_cast<std::uintptr_t>(at);
  if (address % width == 0) return;
  throw InternalError(concat("the copy kernel accesses ", width, " bytes at address ", address,
                             ", which is not a multiple of that; a GPU would trap"));
}

template <std::uint32_t kBytes>
std::uint64_t load(const std::byte* at) {
  check_alignment(at, kBytes);
  std::uint64_t value = 0;
  std::memcpy(&value, at, kBytes);
  return value;
}

template <std::uint32_t kBytes>
void store(std::byte* at, std::uint64_t value) {
  check_alignment(at, kBytes);
  std::memcpy(at, &value, kBytes);
}

inline CopyVector load_16(const std::byte* at) {
  check_alignment(at, kVectorBytes);
  CopyVector value;
  std::memcpy(&value, at, kVectorBytes);
  return value;
}

inline void store_16(std::byte* at, const CopyVector& value) {
  check_alignment(at, kVectorBytes);
  std::memcpy(at, &value, kVectorBytes);
}

#endif

// A word in accesses of kAccess bytes, all of them under way before the first is used.
template <std::uint32_t kAccess>
FASTSYNC_HOST_DEVICE std::uint64_t load_word(const std::byte* at) {
  std::uint64_t word = 0;
  FASTSYNC_UNROLL
  for (std::uint32_t i = 0; i < kWordBytes; i += kAccess) word |= load<kAccess>(at + i) << (8 * i);
  return word;
}

template <std::uint32_t kAccess>
FASTSYNC_HOST_DEVICE void store_word(std::byte* at, std::uint64_t word) {
  FASTSYNC_UNROLL
  for (std::uint32_t i = 0; i < kWordBytes; i += kAccess) store<kAccess>(at + i, word >> (8 * i));
}

template <std::uint32_t kAccess>
FASTSYNC_HOST_DEVICE CopyVector load_vector(const std::byte* at) {
  if constexpr (kAccess == kVectorBytes) {
    return load_16(at);
  } else {
    return {load_word<kAccess>(at), load_word<kAccess>(at + kWordBytes)};
  }
}

template <std::uint32_t kAccess>
FASTSYNC_HOST_DEVICE void store_vector(std::byte* at, const CopyVector& value) {
  if constexpr (kAccess == kVectorBytes) {
    store_16(at, value);
  } else {
    store_word<kAccess>(at, value.low);
    store_word<kAccess>(at + kWordBytes, value.high);
  }
}

// The first `nbytes` (up to 8) of a word, in single bytes. The rest of the word is zero, or is not written.
FASTSYNC_HOST_DEVICE std::uint64_t load_bytes(const std::byte* at, std::uint32_t nbytes) {
  std::uint64_t word = 0;
  FASTSYNC_UNROLL
  for (std::uint32_t i = 0; i < kWordBytes; ++i) {
    if (i < nbytes) word |= load<1>(at + i) << (8 * i);
  }
  return word;
}

FASTSYNC_HOST_DEVICE void store_bytes(std::byte* at, std::uint64_t word, std::uint32_t nbytes) {
  FASTSYNC_UNROLL
  for (std::uint32_t i = 0; i < kWordBytes; ++i) {
    if (i < nbytes) store<1>(at + i, word >> (8 * i));
  }
}

// The largest power of two, up to `most` (one itself), that divides `bits`.
FASTSYNC_HOST_DEVICE std::uint32_t alignment_of(std::uint64_t bits, std::uint32_t most) noexcept {
  const std::uint64_t lowest = (bits | most) & (~(bits | most) + 1);
  return static_cast<std::uint32_t>(lowest);
}

}  // namespace fastsync::detail
