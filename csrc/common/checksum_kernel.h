// The inner loops behind checksum.h, one set per instruction set, and how one is chosen. Private to common/ and its
// tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "common/checksum.h"

namespace fastsync::detail {

// `streaming` writes around the cache where the instruction set can, and never fences.
struct ChecksumKernel {
  std::string_view name;
  bool supported = false;  // by this CPU; calling a kernel that is not is an illegal instruction
  Checksum (*checksum)(const std::byte* src, std::size_t nbytes, std::uint64_t bucket_offset) noexcept = nullptr;
  void (*copy_streaming)(std::byte* dst, const std::byte* src, std::size_t nbytes) noexcept = nullptr;
  Checksum (*copy_checksum_cached)(std::byte* dst, const std::byte* src, std::size_t nbytes,
                                   std::uint64_t bucket_offset) noexcept = nullptr;
  Checksum (*copy_checksum_streaming)(std::byte* dst, const std::byte* src, std::size_t nbytes,
                                      std::uint64_t bucket_offset) noexcept = nullptr;
};

// Every kernel of this build, best first; the last is "portable" and runs everywhere.
[[nodiscard]] std::span<const ChecksumKernel> checksum_kernels() noexcept;

// Compares a kernel with the portable one over odd lengths, misaligned addresses and offsets; looks at the bytes around
// the destination as well.
[[nodiscard]] bool passes_self_test(const ChecksumKernel& kernel) noexcept;

// The first of `kernels` that is supported and passes the self-test; from `wanted` on, where that names one of them.
// Says on stderr why a kernel was passed over and when `wanted` (may be empty) names none that runs here.
[[nodiscard]] const ChecksumKernel& choose_kernel(std::span<const ChecksumKernel> kernels,
                                                  std::string_view wanted) noexcept;

}  // namespace fastsync::detail
