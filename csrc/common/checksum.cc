#include "common/checksum.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "common/checksum_kernel.h"
#include "common/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace fastsync {
namespace detail {
namespace {

static_assert(std::endian::native == std::endian::little, "words and lanes are read in memory order");

constexpr std::size_t kWord = sizeof(std::uint64_t);
constexpr std::size_t kCacheLine = 64;
// A piece that stays in the first-level cache between being copied and being checked. A multiple of kCacheLine.
constexpr std::size_t kSkewedBlock = 4096;
// How far ahead to read. The hardware prefetcher keeps up with a plain copy; with the multiplies in between, asking
// for lines this far ahead was worth 15 to 20 % on Zen 3, which makes the checksum free; half or double is no better.
[[maybe_unused]] constexpr std::size_t kPrefetchDistance = 1024;

constexpr std::uint64_t key_at(std::uint64_t bucket_offset) noexcept {
  return kChecksumSeed + bucket_offset / kWord * kChecksumStep;
}

// The keys of a register's words, relative to the first.
template <std::size_t kWords>
constexpr std::array<std::uint64_t, kWords> key_steps() noexcept {
  std::array<std::uint64_t, kWords> steps{};
  for (std::size_t k = 0; k < kWords; ++k) steps[k] = k * kChecksumStep;
  return steps;
}

inline std::uint64_t load_word(const std::byte* src) noexcept {
  std::uint64_t word;
  std::memcpy(&word, src, kWord);
  return word;
}

inline std::uint64_t load_partial_word(const std::byte* src, std::size_t nbytes) noexcept {
  std::uint64_t word = 0;
  std::memcpy(&word, src, nbytes);
  return word;
}

// Adds one word and moves the key to the next.
inline void check_word(Checksum& result, std::uint64_t& key, std::uint64_t word) noexcept {
  const std::uint64_t mixed = word ^ key;
  result.product += (mixed & 0xFFFFFFFFU) * (mixed >> 32);
  result.sum += word;
  key += kChecksumStep;
}

inline void copy_word(Checksum& result, std::uint64_t& key, std::byte* dst, const std::byte* src) noexcept {
  const std::uint64_t word = load_word(src);
  std::memcpy(dst, &word, kWord);
  check_word(result, key, word);
}

inline bool is_aligned(const void* address, std::size_t alignment) noexcept {
  return reinterpret_cast<std::uintptr_t>(address) % alignment == 0;
}

[[maybe_unused]] inline std::size_t bytes_to_line(const void* address) noexcept {
  return (kCacheLine - reinterpret_cast<std::uintptr_t>(address) % kCacheLine) % kCacheLine;
}

[[maybe_unused]] inline void prefetch(const void* address) noexcept { __builtin_prefetch(address, 0, 0); }

namespace portable {

template <bool kCopy>
Checksum run(std::byte* dst, const std::byte* src, std::size_t nbytes, std::uint64_t bucket_offset) noexcept {
  Checksum result;
  std::uint64_t key = key_at(bucket_offset);
  std::size_t i = 0;
  for (; nbytes - i >= kWord; i += kWord) {
    if constexpr (kCopy) {
      copy_word(result, key, dst + i, src + i);
    } else {
      check_word(result, key, load_word(src + i));
    }
  }
  if (i < nbytes) {
    if constexpr (kCopy) std::memcpy(dst + i, src + i, nbytes - i);
    check_word(result, key, load_partial_word(src + i, nbytes - i));
  }
  return result;
}

Checksum checksum(const std::byte* src, std::size_t nbytes, std::uint64_t bucket_offset) noexcept {
  return run<false>(nullptr, src, nbytes, bucket_offset);
}

void copy_streaming(std::byte* dst, const std::byte* src, std::size_t nbytes) noexcept {
  std::memcpy(dst, src, nbytes);
}

Checksum copy_checksum(std::byte* dst, const std::byte* src, std::size_t nbytes, std::uint64_t bucket_offset) noexcept {
  return run<true>(dst, src, nbytes, bucket_offset);
}

}  // namespace portable

#if defined(__clang__)
#define FASTSYNC_UNROLL _Pragma("unroll")
#else
#define FASTSYNC_UNROLL _Pragma("GCC unroll 8")
#endif

#if defined(__x86_64__)

namespace avx2 {

#define FASTSYNC_TARGET __attribute__((target("avx2")))
struct Vec {
  using Reg = __m256i;
  static constexpr std::size_t kBytes = sizeof(Reg);
  FASTSYNC_TARGET static Reg load(const std::byte* p) { return _mm256_loadu_si256(reinterpret_cast<const Reg*>(p)); }
  FASTSYNC_TARGET static void store(std::byte* p, Reg v) { _mm256_storeu_si256(reinterpret_cast<Reg*>(p), v); }
  FASTSYNC_TARGET static void stream(std::byte* p, Reg v) { _mm256_stream_si256(reinterpret_cast<Reg*>(p), v); }
  FASTSYNC_TARGET static Reg splat(std::uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }
  FASTSYNC_TARGET static Reg lanes(std::uint64_t key) {
    alignas(kBytes) static constexpr auto kSteps = key_steps<kBytes / kWord>();
    return _mm256_add_epi64(splat(key), _mm256_load_si256(reinterpret_cast<const Reg*>(kSteps.data())));
  }
  FASTSYNC_TARGET static Reg add(Reg a, Reg b) { return _mm256_add_epi64(a, b); }
  FASTSYNC_TARGET static Reg product(Reg words, Reg keys) {
    const Reg mixed = _mm256_xor_si256(words, keys);
    return _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
  }
  FASTSYNC_TARGET static std::uint64_t reduce(Reg v) {
    const __m128i pair = _mm_add_epi64(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    return static_cast<std::uint64_t>(_mm_cvtsi128_si64(pair)) + static_cast<std::uint64_t>(_mm_extract_epi64(pair, 1));
  }
};
#include "common/checksum_loop.inc"
#undef FASTSYNC_TARGET

}  // namespace avx2

namespace avx512 {

#define FASTSYNC_TARGET __attribute__((target("avx512f")))
struct Vec {
  using Reg = __m512i;
  static constexpr std::size_t kBytes = sizeof(Reg);
  FASTSYNC_TARGET static Reg load(const std::byte* p) { return _mm512_loadu_si512(p); }
  FASTSYNC_TARGET static void store(std::byte* p, Reg v) { _mm512_storeu_si512(p, v); }
  FASTSYNC_TARGET static void stream(std::byte* p, Reg v) { _mm512_stream_si512(reinterpret_cast<Reg*>(p), v); }
  FASTSYNC_TARGET static Reg splat(std::uint64_t x) { return _mm512_set1_epi64(static_cast<long long>(x)); }
  FASTSYNC_TARGET static Reg lanes(std::uint64_t key) {
    alignas(kBytes) static constexpr auto kSteps = key_steps<kBytes / kWord>();
    return _mm512_add_epi64(splat(key), _mm512_load_si512(kSteps.data()));
  }
  FASTSYNC_TARGET static Reg add(Reg a, Reg b) { return _mm512_add_epi64(a, b); }
  FASTSYNC_TARGET static Reg product(Reg words, Reg keys) {
    // The masked forms with every lane on: GCC 12 warns about an uninitialised register inside the plain ones.
    constexpr __mmask8 kAll = 0xFF;
    const Reg mixed = _mm512_xor_si512(words, keys);
    return _mm512_maskz_mul_epu32(kAll, mixed, _mm512_maskz_srli_epi64(kAll, mixed, 32));
  }
  FASTSYNC_TARGET static std::uint64_t reduce(Reg v) {
    alignas(kBytes) std::uint64_t lane[kBytes / kWord];
    _mm512_store_si512(lane, v);
    return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
  }
};
#include "common/checksum_loop.inc"
#undef FASTSYNC_TARGET

}  // namespace avx512

#elif defined(__aarch64__)

namespace neon {

#define FASTSYNC_TARGET
struct Vec {
  using Reg = uint64x2_t;
  static constexpr std::size_t kBytes = sizeof(Reg);
  static Reg load(const std::byte* p) {
    return vreinterpretq_u64_u8(vld1q_u8(reinterpret_cast<const std::uint8_t*>(p)));
  }
  static void store(std::byte* p, Reg v) { vst1q_u8(reinterpret_cast<std::uint8_t*>(p), vreinterpretq_u8_u64(v)); }
  // Arm cores notice a run of full-line writes by themselves and stop allocating lines for it.
  static void stream(std::byte* p, Reg v) { store(p, v); }
  static Reg splat(std::uint64_t x) { return vdupq_n_u64(x); }
  static Reg lanes(std::uint64_t key) { return vcombine_u64(vcreate_u64(key), vcreate_u64(key + kChecksumStep)); }
  static Reg add(Reg a, Reg b) { return vaddq_u64(a, b); }
  static Reg product(Reg words, Reg keys) {
    const Reg mixed = veorq_u64(words, keys);
    return vmull_u32(vmovn_u64(mixed), vshrn_n_u64(mixed, 32));
  }
  static std::uint64_t reduce(Reg v) { return vgetq_lane_u64(v, 0) + vgetq_lane_u64(v, 1); }
};
#include "common/checksum_loop.inc"
#undef FASTSYNC_TARGET

}  // namespace neon

#endif

#undef FASTSYNC_UNROLL

}  // namespace

std::span<const ChecksumKernel> checksum_kernels() noexcept {
  static const std::array kernels = {
#if defined(__x86_64__)
      ChecksumKernel{"avx512", cpu_features().avx512f, avx512::checksum, avx512::copy_streaming,
                     avx512::copy_checksum_cached, avx512::copy_checksum_streaming},
      ChecksumKernel{"avx2", cpu_features().avx2, avx2::checksum, avx2::copy_streaming, avx2::copy_checksum_cached,
                     avx2::copy_checksum_streaming},
#elif defined(__aarch64__)
      ChecksumKernel{"neon", cpu_features().neon, neon::checksum, neon::copy_streaming, neon::copy_checksum_cached,
                     neon::copy_checksum_streaming},
#endif
      ChecksumKernel{"portable", true, portable::checksum, portable::copy_streaming, portable::copy_checksum,
                     portable::copy_checksum},
  };
  return kernels;
}

bool passes_self_test(const ChecksumKernel& kernel) noexcept {
  constexpr std::size_t kLengths[] = {0,   1,   7,   8,   9,   31,   32,   33,   63,   64,   65,   127,  128,  129,
                                      191, 255, 257, 511, 513, 1023, 1024, 1025, 1151, 1279, 1537, 2303, 4096, 9001};
  constexpr std::size_t kMaxLength = 9001;
  constexpr std::size_t kSkews[][2] = {{0, 0}, {1, 0}, {0, 8}, {8, 56}, {5, 3}, {0, 63}};  // of src and dst
  constexpr std::uint64_t kOffsets[] = {0, 256, (std::uint64_t{1} << 40) + 8};
  constexpr std::size_t kMargin = 2 * kCacheLine;
  constexpr std::byte kGuard{0xA5};

  alignas(kCacheLine) std::array<std::byte, kMaxLength + kMargin> source;
  alignas(kCacheLine) std::array<std::byte, kMaxLength + 2 * kMargin> target;
  std::uint64_t state = kChecksumSeed;
  for (std::byte& b : source) {
    state = state * kChecksumStep + 1;
    b = static_cast<std::byte>(state >> 56);
  }

  for (const std::size_t length : kLengths) {
    for (const auto& [src_skew, dst_skew] : kSkews) {
      const std::byte* src = source.data() + src_skew;
      std::byte* dst = target.data() + kCacheLine + dst_skew;
      // True where exactly [dst, dst + length) was written, with the source's bytes.
      const auto copied = [&]() {
        const auto is_guard = [](std::byte b) { return b == kGuard; };
        return std::memcmp(dst, src, length) == 0 && std::all_of(target.data(), dst, is_guard) &&
               std::all_of(dst + length, dst + length + kCacheLine, is_guard);
      };
      const auto clear = [&]() { std::fill(target.data(), dst + length + kCacheLine, kGuard); };
      for (const std::uint64_t offset : kOffsets) {
        const Checksum expected = portable::checksum(src, length, offset);
        if (kernel.checksum(src, length, offset) != expected) return false;
        clear();
        if (kernel.copy_checksum_cached(dst, src, length, offset) != expected || !copied()) return false;
        clear();
        if (kernel.copy_checksum_streaming(dst, src, length, offset) != expected || !copied()) return false;
      }
      clear();
      kernel.copy_streaming(dst, src, length);
      if (!copied()) return false;
    }
  }
  return true;
}

const ChecksumKernel& choose_kernel(std::span<const ChecksumKernel> kernels, std::string_view wanted) noexcept {
  const auto complain = [](std::string_view name, const char* why) {
    std::fprintf(stderr, "fastsync: CPU kernel '%.*s' %s\n", static_cast<int>(std::min<std::size_t>(name.size(), 64)),
                 name.data(), why);
  };
  auto first = kernels.begin();
  if (!wanted.empty()) {
    const auto named = std::find_if(kernels.begin(), kernels.end(), [&](const auto& k) { return k.name == wanted; });
    if (named != kernels.end() && named->supported) {
      first = named;
    } else {
      complain(wanted, "(FASTSYNC_CPU_KERNEL) does not run here; the best one that does is used");
    }
  }
  for (; first != kernels.end() - 1; ++first) {
    if (!first->supported) continue;
    if (passes_self_test(*first)) return *first;
    complain(first->name, "fails its self-test and is not used; please report this with the CPU's model");
  }
  return kernels.back();
}

namespace {

const ChecksumKernel& kernel() noexcept {
  static const ChecksumKernel& chosen = []() noexcept -> const ChecksumKernel& {
    const char* wanted = std::getenv("FASTSYNC_CPU_KERNEL");
    return choose_kernel(checksum_kernels(), wanted != nullptr ? wanted : "");
  }();
  return chosen;
}

}  // namespace
}  // namespace detail

void fence_streaming_stores() noexcept {
#if defined(__x86_64__)
  _mm_sfence();
#endif  // elsewhere the streaming kernels use ordinary stores, which every release orders
}

Checksum checksum_bytes(const void* src, std::size_t nbytes, std::uint64_t bucket_offset) noexcept {
  return detail::kernel().checksum(static_cast<const std::byte*>(src), nbytes, bucket_offset);
}

void copy_bytes(void* dst, const void* src, std::size_t nbytes, StoreMode mode) noexcept {
  if (nbytes == 0) return;  // the addresses may be null then
  if (mode == StoreMode::kCached) {
    std::memcpy(dst, src, nbytes);  // the C library knows best: rep movsb, vectors, by size and CPU
    return;
  }
  detail::kernel().copy_streaming(static_cast<std::byte*>(dst), static_cast<const std::byte*>(src), nbytes);
  if (mode == StoreMode::kStreaming) fence_streaming_stores();
}

Checksum copy_and_checksum(void* dst, const void* src, std::size_t nbytes, std::uint64_t bucket_offset,
                           StoreMode mode) noexcept {
  auto* to = static_cast<std::byte*>(dst);
  const auto* from = static_cast<const std::byte*>(src);
  if (mode == StoreMode::kCached) return detail::kernel().copy_checksum_cached(to, from, nbytes, bucket_offset);
  const Checksum result = detail::kernel().copy_checksum_streaming(to, from, nbytes, bucket_offset);
  if (mode == StoreMode::kStreaming) fence_streaming_stores();
  return result;
}

std::string_view copy_kernel_name() noexcept { return detail::kernel().name; }

}  // namespace fastsync
