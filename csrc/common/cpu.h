// What the CPU offers: vector units and cache sizes.
//
// Both are read once and never change. Threads: any. Errors: none; where the system does not say, a fallback holds.
#pragma once

#include <cstddef>
#include <string>

namespace fastsync {

struct CpuFeatures {
  bool avx2 = false;
  bool avx512f = false;  // includes that the operating system saves the registers
  bool neon = false;
};

// In bytes, as seen by CPU 0. `last_level` is the whole last-level cache, which other cores (and, on a virtual machine,
// other machines) share.
struct CacheSizes {
  std::size_t l1d = 32 * 1024;
  std::size_t l2 = 512 * 1024;
  std::size_t last_level = 8 * 1024 * 1024;
  friend bool operator==(const CacheSizes&, const CacheSizes&) = default;
};

[[nodiscard]] const CpuFeatures& cpu_features() noexcept;
[[nodiscard]] const CacheSizes& cache_sizes() noexcept;

// Reads a directory laid out like /sys/devices/system/cpu/cpu0/cache. Whatever is missing, unreadable or absurd there
// is taken from `fallback`; a cache hierarchy without an L3 has its L2 as last level.
[[nodiscard]] CacheSizes read_cache_sizes(const std::string& directory, const CacheSizes& fallback);

}  // namespace fastsync
