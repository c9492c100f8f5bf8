#include "common/cpu.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>

namespace fastsync {
namespace {

constexpr std::size_t kMinCacheBytes = 4 * 1024;
constexpr std::size_t kMaxCacheBytes = std::size_t{8} << 30;

bool is_sane(std::size_t bytes) { return bytes >= kMinCacheBytes && bytes <= kMaxCacheBytes; }

std::string read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "512K", "32768K", "32M", "4096".
std::optional<std::size_t> parse_size(const std::string& text) {
  std::size_t number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc{}) return std::nullopt;
  int shift = 0;
  if (rest != end) {
    switch (*rest) {
      case 'K': shift = 10; break;
      case 'M': shift = 20; break;
      case 'G': shift = 30; break;
      default: return std::nullopt;
    }
  }
  if (number > (kMaxCacheBytes >> shift)) return std::nullopt;
  return number << shift;
}

CacheSizes sizes_from_libc() {
  CacheSizes sizes;
#if defined(_SC_LEVEL1_DCACHE_SIZE)
  const auto ask = [](int name) {
    const long bytes = ::sysconf(name);
    return bytes > 0 ? static_cast<std::size_t>(bytes) : std::size_t{0};
  };
  const std::size_t l1d = ask(_SC_LEVEL1_DCACHE_SIZE);
  const std::size_t l2 = ask(_SC_LEVEL2_CACHE_SIZE);
  const std::size_t l3 = ask(_SC_LEVEL3_CACHE_SIZE);
  if (is_sane(l1d)) sizes.l1d = l1d;
  if (is_sane(l2)) sizes.l2 = l2;
  if (is_sane(l3)) {
    sizes.last_level = l3;
  } else if (is_sane(l2)) {
    sizes.last_level = l2;
  }
#endif
  return sizes;
}

CpuFeatures detect_features() noexcept {
  CpuFeatures features;
#if defined(__x86_64__)
  __builtin_cpu_init();
  features.avx2 = __builtin_cpu_supports("avx2") != 0;
  features.avx512f = __builtin_cpu_supports("avx512f") != 0;
#elif defined(__aarch64__)
  features.neon = true;  // part of the base architecture
#endif
  return features;
}

}  // namespace

CacheSizes read_cache_sizes(const std::string& directory, const CacheSizes& fallback) {
  CacheSizes found{0, 0, 0};
  int deepest = 0;
  // The kernel numbers the entries without gaps; eight is more than any CPU has.
  for (int index = 0; index < 8; ++index) {
    const std::string entry = directory + "/index" + std::to_string(index);
    const auto level = parse_size(read_line(entry + "/level"));
    const auto bytes = parse_size(read_line(entry + "/size"));
    if (!level || !bytes || !is_sane(*bytes) || *level > 8) continue;
    const std::string type = read_line(entry + "/type");
    if (type != "Data" && type != "Unified") continue;
    if (*level == 1) found.l1d = *bytes;
    if (*level == 2) found.l2 = *bytes;
    if (*level >= 2 && static_cast<int>(*level) > deepest) {
      deepest = static_cast<int>(*level);
      found.last_level = *bytes;
    }
  }
  CacheSizes sizes;
  sizes.l1d = found.l1d != 0 ? found.l1d : fallback.l1d;
  sizes.l2 = found.l2 != 0 ? found.l2 : fallback.l2;
  sizes.last_level = found.last_level != 0 ? found.last_level : std::max(fallback.last_level, sizes.l2);
  return sizes;
}

const CpuFeatures& cpu_features() noexcept {
  static const CpuFeatures features = detect_features();
  return features;
}

const CacheSizes& cache_sizes() noexcept {
  static const CacheSizes sizes = []() noexcept {
    try {
      return read_cache_sizes("/sys/devices/system/cpu/cpu0/cache", sizes_from_libc());
    } catch (...) {  // out of memory while reading a few short lines: the defaults will do
      return CacheSizes{};
    }
  }();
  return sizes;
}

}  // namespace fastsync
