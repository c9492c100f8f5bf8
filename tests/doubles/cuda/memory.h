// Every range of memory that the device may touch, and the check that it may.
//
// Device addresses lie in one large reserved range without access, so that a host that dereferences one crashes. What
// they stand for is a memfd mapped elsewhere. An address is never handed out twice: whoever uses one after it was freed
// is found out, however long after. Memory is filled with kFreshPoison when it is made and kFreedPoison when it is freed.
//
// Host memory is device-accessible once it is pinned or registered, at its own address.
//
// Ownership: a region is shared by the table and by the work that is using it (Pin), so that freeing memory under running
// work is reported rather than a crash. Threads: thread-safe. Errors: results, in the words of the driver API.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "doubles/cuda/shared_memory.h"

namespace fastsync::fake {

class Context;

inline constexpr unsigned char kFreshPoison = 0xCD;
inline constexpr unsigned char kFreedPoison = 0xDD;
inline constexpr std::uint64_t kGranularity = std::uint64_t{2} << 20;  // of VMM
inline constexpr int kAnyDevice = -1;
inline constexpr int kHostDevice = -2;

// The memory that a checked number is the address of.
[[nodiscard]] inline std::byte* host_pointer(std::uint64_t address) noexcept {
  return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr): CUdeviceptr is a number
}

// Whether the kernel has all of [base, base + nbytes) mapped.
[[nodiscard]] bool is_mapped(const void* base, std::uint64_t nbytes);

enum class RegionKind : std::uint8_t { kDevice, kImported, kReservation, kPinned, kRegistered };

// Physical memory of the VMM functions: what a CUmemGenericAllocationHandle stands for. It counts against its device
// for as long as a handle or a mapping refers to it.
struct Physical {
  Physical(std::shared_ptr<SharedMemory> its_memory, int its_device, bool is_import, unsigned its_handle_types) noexcept
      : memory(std::move(its_memory)), device(its_device), imported(is_import), handle_types(its_handle_types) {}
  ~Physical();
  Physical(const Physical&) = delete;
  Physical& operator=(const Physical&) = delete;

  const std::shared_ptr<SharedMemory> memory;
  const int device;
  const bool imported;
  const unsigned handle_types;
};

struct Region {
  // A mapping inside a reservation. `readers` and `writers` are masks of devices.
  struct Piece {
    std::uint64_t nbytes = 0;
    std::shared_ptr<Physical> physical;
    std::uint64_t offset = 0;  // in the physical memory
    std::uint32_t readers = 0;
    std::uint32_t writers = 0;
  };

  Region() = default;
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  RegionKind kind = RegionKind::kDevice;
  std::uint64_t base = 0;
  std::uint64_t nbytes = 0;
  std::byte* host = nullptr;
  int device = kHostDevice;
  std::uint32_t devices = ~std::uint32_t{0};  // mask of those that may use it
  unsigned flags = 0;                         // of cuMemHostAlloc and cuMemHostRegister
  std::weak_ptr<Context> context;
  std::shared_ptr<SharedMemory> shared;   // kDevice, kImported
  IpcTicket ticket;                       // kImported: what it was opened by
  int opens = 1;                          // kImported
  std::map<std::uint64_t, Piece> pieces;  // kReservation: by address

  std::atomic<bool> live{true};
  std::atomic<int> users{0};
};

// A region in use by work that runs.
class Pin {
 public:
  explicit Pin(std::shared_ptr<Region> region) noexcept : region_(std::move(region)) { ++region_->users; }
  ~Pin() {
    if (region_ != nullptr) --region_->users;
  }
  Pin(Pin&& other) noexcept = default;
  Pin& operator=(Pin&&) = delete;
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;
  [[nodiscard]] const Region& region() const noexcept { return *region_; }

 private:
  std::shared_ptr<Region> region_;
};

struct Translation {
  std::byte* host = nullptr;  // null: see `problem`
  std::string problem;        // "use-after-free: ...", a violation's text without who did it
  std::vector<Pin> pin;       // one, if host is set
};

class Memory {
 public:
  Memory();

  // Device memory of cuMemAlloc. 0: the device is full.
  [[nodiscard]] CUdeviceptr allocate(const std::shared_ptr<Context>& context, std::uint64_t nbytes);
  [[nodiscard]] CUresult free_device(CUdeviceptr base);
  [[nodiscard]] std::uint64_t used_bytes(int device) const;
  // What cuMemGetAddressRange and the pointer attributes need; null for an address that nothing live holds.
  [[nodiscard]] std::shared_ptr<Region> find(std::uint64_t address) const;
  // Whether an address is in the range that device addresses come from, dead or alive.
  [[nodiscard]] bool is_device_address(std::uint64_t address) const noexcept;
  // Whether it lies in device or pinned memory that was freed.
  [[nodiscard]] bool was_freed(std::uint64_t address) const;

  // Whether `device` (or kAnyDevice: a copy engine reaches all) may use [address, + nbytes), and where it is.
  [[nodiscard]] Translation translate(std::uint64_t address, std::uint64_t nbytes, int device, bool writes) const;

  // Host memory.
  [[nodiscard]] void* allocate_pinned(const std::shared_ptr<Context>& context, std::uint64_t nbytes, unsigned flags);
  [[nodiscard]] CUresult free_pinned(void* base);
  [[nodiscard]] CUresult register_host(const std::shared_ptr<Context>& context, void* base, std::uint64_t nbytes,
                                       unsigned flags);
  [[nodiscard]] CUresult unregister_host(void* base);

  // Imports of legacy IPC. `opened` is what the ticket led to; an import that is open already is given again.
  [[nodiscard]] CUdeviceptr import(const std::shared_ptr<Context>& context, const IpcTicket& ticket, int owner,
                                   std::shared_ptr<SharedMemory> opened);
  [[nodiscard]] CUdeviceptr reopen(const IpcTicket& ticket, int device);
  [[nodiscard]] CUresult close_import(CUdeviceptr base);

  // VMM. Null and 0: the device is full, the range is used up.
  [[nodiscard]] std::shared_ptr<Physical> make_physical(int device, std::uint64_t nbytes, unsigned handle_types);
  [[nodiscard]] CUdeviceptr reserve(std::uint64_t nbytes, std::uint64_t alignment);
  [[nodiscard]] CUresult free_reservation(CUdeviceptr base, std::uint64_t nbytes);
  [[nodiscard]] CUresult map(CUdeviceptr address, std::uint64_t nbytes, std::shared_ptr<Physical> physical,
                             std::uint64_t offset);
  [[nodiscard]] CUresult unmap(CUdeviceptr address, std::uint64_t nbytes);
  [[nodiscard]] CUresult set_access(CUdeviceptr address, std::uint64_t nbytes, int device, bool reads, bool writes);
  [[nodiscard]] std::shared_ptr<Physical> physical_at(CUdeviceptr address) const;

  // Frees whatever belongs to a context that was destroyed.
  void drop_context(const Context& context);

 private:
  using Regions = std::map<std::uint64_t, std::shared_ptr<Region>>;
  using DeadRanges = std::map<std::uint64_t, std::pair<std::uint64_t, RegionKind>>;  // base -> size
  [[nodiscard]] std::shared_ptr<Region> find_locked(std::uint64_t address) const;
  [[nodiscard]] DeadRanges::const_iterator find_dead_locked(std::uint64_t address) const;  // end() if none
  [[nodiscard]] std::uint64_t take_range_locked(std::uint64_t nbytes, std::uint64_t alignment);
  [[nodiscard]] bool overlaps_locked(std::uint64_t base, std::uint64_t nbytes) const;
  [[nodiscard]] bool take_bytes(int device, std::uint64_t nbytes);
  void give_bytes(int device, std::uint64_t nbytes);
  [[nodiscard]] static bool pieces_cover(const Region& region, std::uint64_t address, std::uint64_t nbytes, int device,
                                         bool writes, std::string& problem);
  void retire_locked(Regions::iterator position);
  friend struct Physical;

  mutable std::mutex mutex_;
  Regions live_;
  DeadRanges dead_;  // of addresses that are never given out again
  std::uint64_t range_begin_ = 0;
  std::uint64_t range_end_ = 0;
  std::uint64_t next_ = 0;
  mutable std::mutex used_mutex_;
  std::map<int, std::uint64_t> used_;
};

}  // namespace fastsync::fake
