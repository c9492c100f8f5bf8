#include "common/slab.h"

#include <new>

namespace fastsync {

namespace {
// Whole pieces of at least this size, so that the pool's own growth leaves no crumbs either.
constexpr std::size_t kPieceBytes = 256 << 10;

class Pieces final : public std::pmr::memory_resource {
  void* do_allocate(std::size_t nbytes, std::size_t alignment) override {
    return ::operator new(nbytes, std::align_val_t(alignment));
  }
  void do_deallocate(void* p, std::size_t nbytes, std::size_t alignment) override {
    ::operator delete(p, nbytes, std::align_val_t(alignment));
  }
  [[nodiscard]] bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
};
}  // namespace

std::pmr::memory_resource& slab_memory() {
  static auto* const pool = [] {
    static Pieces pieces;
    // The monotonic layer hands the pool's growth out of large pieces; the pool keeps what is freed.
    static auto* const arena = new std::pmr::monotonic_buffer_resource(kPieceBytes, &pieces);
    std::pmr::pool_options options;
    options.largest_required_pool_block = kMaxSlabBytes;
    return new std::pmr::synchronized_pool_resource(options, arena);
  }();
  return *pool;
}

}  // namespace fastsync
