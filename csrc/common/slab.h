// Memory for small things that are kept: apart from the heap that everybody else uses.
//
// A generator's items are often large and live for a moment, while what is remembered of each (a name, a shape) is small
// and stays. Put into the heap, it settles right beside the item, in the crumbs that aligning a large block leaves; the
// hole of the item then no longer holds the next one, and the process grows by an item for each, though nothing leaks.
//
// Ownership: blocks go back to the process's one pool, which keeps them for the next. Threads: thread-safe. Errors:
// std::bad_alloc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <string>
#include <string_view>
#include <vector>

namespace fastsync {

// Larger things are not small: they come from the heap.
inline constexpr std::size_t kMaxSlabBytes = 1024;
// Never destroyed: things may be freed while the process ends.
[[nodiscard]] std::pmr::memory_resource& slab_memory();

template <typename T>
struct SlabAllocator {
  using value_type = T;
  SlabAllocator() noexcept = default;
  template <typename U>
  SlabAllocator(const SlabAllocator<U>& /*other*/) noexcept {
  }  // NOLINT(google-explicit-constructor): allocators convert
  [[nodiscard]] T* allocate(std::size_t n) {
    if (n > kMaxSlabBytes / sizeof(T)) return std::allocator<T>().allocate(n);
    return static_cast<T*>(slab_memory().allocate(n * sizeof(T), alignof(T)));
  }
  void deallocate(T* p, std::size_t n) noexcept {
    if (n > kMaxSlabBytes / sizeof(T)) return std::allocator<T>().deallocate(p, n);
    slab_memory().deallocate(p, n * sizeof(T), alignof(T));
  }
  friend bool operator==(const SlabAllocator& /*a*/, const SlabAllocator& /*b*/) noexcept { return true; }
};

// Text and numbers that are kept.
using KeptText = std::basic_string<char, std::char_traits<char>, SlabAllocator<char>>;
using KeptInts = std::vector<std::int64_t, SlabAllocator<std::int64_t>>;

}  // namespace fastsync
