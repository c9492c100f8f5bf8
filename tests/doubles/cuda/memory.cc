#include "doubles/cuda/memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "doubles/cuda/context.h"
#include "doubles/cuda/driver.h"

namespace fastsync::fake {
namespace {

// Of addresses: they cost nothing. Less where something, such as a sanitizer, has left no such hole.
constexpr std::uint64_t kMostRangeBytes = std::uint64_t{4} << 40;
constexpr std::uint64_t kLeastRangeBytes = std::uint64_t{64} << 30;
constexpr std::uint64_t kGuardBytes = kGranularity;  // between two allocations
constexpr std::uint64_t kMaxRegistration = std::uint64_t{512} << 30;

std::uint32_t mask_of(int device) noexcept { return std::uint32_t{1} << static_cast<unsigned>(device); }

std::string range_text(std::uint64_t address, std::uint64_t nbytes) {
  char text[64];
  std::snprintf(text, sizeof text, "[0x%llx, +%llu)", static_cast<unsigned long long>(address),
                static_cast<unsigned long long>(nbytes));
  return text;
}

const char* kind_text(RegionKind kind) noexcept {
  switch (kind) {
    case RegionKind::kDevice: return "device memory";
    case RegionKind::kImported: return "imported memory";
    case RegionKind::kReservation: return "a reserved range";
    case RegionKind::kPinned: return "pinned memory";
    case RegionKind::kRegistered: return "registered memory";
  }
  return "memory";
}

const char* journal_kind(RegionKind kind) noexcept {
  switch (kind) {
    case RegionKind::kDevice: return "device_memory";
    case RegionKind::kImported: return "memory_import";
    case RegionKind::kReservation: return "vmm_reservation";
    case RegionKind::kPinned: return "pinned";
    case RegionKind::kRegistered: return "registration";
  }
  return "memory";
}

void* map_no_access(std::uint64_t nbytes) {
  // Not through a sanitizer's mmap(), which would prepare shadow memory for terabytes that nobody touches.
  const long at = ::syscall(SYS_mmap, nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == -1 ? nullptr : host_pointer(static_cast<std::uint64_t>(at));
}

// Over a mapping that exists, so it cannot fail for want of addresses.
void close_range_fixed(void* at, std::uint64_t nbytes) {
  (void)::mmap(at, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

}  // namespace

bool is_mapped(const void* base, std::uint64_t nbytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(base) / kPageBytes * kPageBytes;
  const std::uint64_t length = round_up(reinterpret_cast<std::uintptr_t>(base) + nbytes, kPageBytes) - begin;
  constexpr std::uint64_t kStep = std::uint64_t{1} << 30;
  std::vector<unsigned char> pages(std::min(length, kStep) / kPageBytes);
  for (std::uint64_t at = 0; at < length; at += kStep) {
    if (::mincore(host_pointer(begin + at), std::min(kStep, length - at), pages.data()) != 0) return false;
  }
  return true;
}

Physical::~Physical() {
  if (!imported) driver().memory.give_bytes(device, memory->nbytes());
}

Region::~Region() {
  if (host == nullptr) return;
  // Pinned memory that was freed stays behind as a range without access: a stale pointer to it crashes, and no other
  // allocation takes its place.
  if (kind == RegionKind::kPinned) close_range_fixed(host, round_up(nbytes, kPageBytes));
  if (kind == RegionKind::kReservation) ::munmap(host, nbytes);
}

Memory::Memory() {
  std::uint64_t nbytes = kMostRangeBytes;
  void* range = map_no_access(nbytes);
  while (range == nullptr && nbytes > kLeastRangeBytes) range = map_no_access(nbytes /= 2);
  if (range == nullptr) {
    std::fprintf(stderr, "fake_cuda: cannot reserve %llu bytes of addresses\n",
                 static_cast<unsigned long long>(kLeastRangeBytes));
    std::abort();
  }
  range_begin_ = reinterpret_cast<std::uint64_t>(range);
  range_end_ = range_begin_ + nbytes;
  next_ = round_up(range_begin_, kGranularity);
}

bool Memory::is_device_address(std::uint64_t address) const noexcept {
  return address >= range_begin_ && address < range_end_;
}

std::uint64_t Memory::take_range_locked(std::uint64_t nbytes, std::uint64_t alignment) {
  const std::uint64_t base = round_up(next_, std::max(alignment, kGranularity));
  if (nbytes > kMostRangeBytes || base + nbytes + kGuardBytes > range_end_) return 0;
  next_ = round_up(base + nbytes + kGuardBytes, kGranularity);
  return base;
}

bool Memory::take_bytes(int device, std::uint64_t nbytes) {
  const std::lock_guard lock(used_mutex_);
  std::uint64_t& used = used_[device];
  if (nbytes > settings().memory_bytes - used) return false;
  used += nbytes;
  driver().journal.live("device_bytes", static_cast<std::int64_t>(nbytes));
  return true;
}

void Memory::give_bytes(int device, std::uint64_t nbytes) {
  const std::lock_guard lock(used_mutex_);
  used_[device] -= nbytes;
  driver().journal.live("device_bytes", -static_cast<std::int64_t>(nbytes));
}

std::uint64_t Memory::used_bytes(int device) const {
  const std::lock_guard lock(used_mutex_);
  const auto found = used_.find(device);
  return found == used_.end() ? 0 : found->second;
}

std::shared_ptr<Region> Memory::find_locked(std::uint64_t address) const {
  auto after = live_.upper_bound(address);
  if (after == live_.begin()) return nullptr;
  const auto& region = std::prev(after)->second;
  return address - region->base < region->nbytes ? region : nullptr;
}

std::shared_ptr<Region> Memory::find(std::uint64_t address) const {
  const std::lock_guard lock(mutex_);
  return find_locked(address);
}

Memory::DeadRanges::const_iterator Memory::find_dead_locked(std::uint64_t address) const {
  const auto after = dead_.upper_bound(address);
  if (after == dead_.begin()) return dead_.end();
  const auto before = std::prev(after);
  return address - before->first < before->second.first ? before : dead_.end();
}

bool Memory::was_freed(std::uint64_t address) const {
  const std::lock_guard lock(mutex_);
  return find_dead_locked(address) != dead_.end();
}

bool Memory::overlaps_locked(std::uint64_t base, std::uint64_t nbytes) const {
  const auto after = live_.lower_bound(base + nbytes);
  return after != live_.begin() && std::prev(after)->second->base + std::prev(after)->second->nbytes > base;
}

// Ends a region's life: running work keeps its bytes until it is done, and is reported.
void Memory::retire_locked(Regions::iterator position) {
  const std::shared_ptr<Region> region = position->second;
  region->live = false;
  if (is_device_address(region->base) || region->kind == RegionKind::kPinned)
    dead_.emplace(region->base, std::pair(region->nbytes, region->kind));
  driver().journal.live(journal_kind(region->kind), -1);
  live_.erase(position);
}

Translation Memory::translate(std::uint64_t address, std::uint64_t nbytes, int device, bool writes) const {
  Translation result;
  const std::string range = range_text(address, nbytes);
  const std::lock_guard lock(mutex_);
  const auto region = find_locked(address);
  if (region == nullptr) {
    if (const auto dead = find_dead_locked(address); dead != dead_.end()) {
      result.problem = "use-after-free: " + range + " lies in " + kind_text(dead->second.second) + " that was freed";
    } else if (is_device_address(address)) {
      result.problem = "wild-pointer: " + range + " is a device address that was never allocated";
    } else {
      result.problem = "not-accessible: " + range + " is no device memory, nor pinned or registered host memory";
    }
    return result;
  }
  if (nbytes > region->base + region->nbytes - address) {
    result.problem = "out-of-bounds: " + range + " runs past the end of " + kind_text(region->kind) + " " +
                     range_text(region->base, region->nbytes);
    return result;
  }
  if (device != kAnyDevice && (region->devices & mask_of(device)) == 0) {
    result.problem = "wrong-device: " + range + " belongs to device " + std::to_string(region->device) +
                     " and is used on device " + std::to_string(device);
    return result;
  }
  if (region->kind == RegionKind::kReservation &&
      !pieces_cover(*region, address, nbytes, device, writes, result.problem)) {
    return result;
  }
  if (region->kind == RegionKind::kImported && region->shared->control().freed.load() != 0) {
    result.problem = "use-after-free: " + range + " lies in imported memory that its exporter has freed";
    return result;
  }
  result.host = region->host + (address - region->base);
  result.pin.emplace_back(region);
  return result;
}

bool Memory::pieces_cover(const Region& region, std::uint64_t address, std::uint64_t nbytes, int device, bool writes,
                          std::string& problem) {
  const std::uint64_t end = address + std::max<std::uint64_t>(nbytes, 1);
  for (std::uint64_t at = address; at < end;) {
    auto after = region.pieces.upper_bound(at);
    if (after == region.pieces.begin() || at - std::prev(after)->first >= std::prev(after)->second.nbytes) {
      problem = "not-mapped: " + range_text(address, nbytes) + " is reserved, with nothing mapped at " +
                range_text(at, end - at);
      return false;
    }
    const Region::Piece& piece = std::prev(after)->second;
    const std::uint32_t allowed = writes ? piece.writers : piece.readers;
    if (device == kAnyDevice ? allowed == 0 : (allowed & mask_of(device)) == 0) {
      problem = "no-access: " + range_text(address, nbytes) + " is mapped, without " + (writes ? "write" : "read") +
                " access" + (device == kAnyDevice ? "" : " for device " + std::to_string(device));
      return false;
    }
    at = std::prev(after)->first + piece.nbytes;
  }
  return true;
}

// --- cuMemAlloc and legacy IPC ----------------------------------------------------------------------------------------

CUdeviceptr Memory::allocate(const std::shared_ptr<Context>& context, std::uint64_t nbytes) {
  if (!take_bytes(context->device(), nbytes)) return 0;
  auto region = std::make_shared<Region>();
  try {
    region->shared = SharedMemory::create(nbytes, device_uuid(settings().visible[context->device()]));
  } catch (const std::bad_alloc&) {
    give_bytes(context->device(), nbytes);
    return 0;
  }
  region->host = region->shared->data();
  std::memset(region->host, kFreshPoison, nbytes);
  region->nbytes = nbytes;
  region->device = context->device();
  region->devices = mask_of(context->device());
  region->context = context;
  const std::lock_guard lock(mutex_);
  region->base = take_range_locked(nbytes, 0);
  if (region->base == 0) {
    give_bytes(context->device(), nbytes);
    return 0;
  }
  live_.emplace(region->base, region);
  driver().journal.live(journal_kind(region->kind), 1);
  return region->base;
}

CUresult Memory::free_device(CUdeviceptr base) {
  std::shared_ptr<Region> region;
  {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(base);
    if (found == live_.end() || found->second->kind != RegionKind::kDevice) return CUDA_ERROR_INVALID_VALUE;
    region = found->second;
    retire_locked(found);
  }
  give_bytes(region->device, region->nbytes);
  ControlPage& control = region->shared->control();
  if (const pid_t pid = control.importers.any_alive(); pid != 0) {
    driver().journal.violation("free-while-imported: " + range_text(region->base, region->nbytes) +
                               " is freed and process " + std::to_string(pid) + " has it open");
  }
  control.freed = 1;
  std::memset(region->host, kFreedPoison, region->nbytes);
  return CUDA_SUCCESS;
}

CUdeviceptr Memory::reopen(const IpcTicket& ticket, int device) {
  const std::lock_guard lock(mutex_);
  for (const auto& [base, region] : live_) {
    if (region->kind != RegionKind::kImported || (region->devices & mask_of(device)) == 0) continue;
    if (std::memcmp(&region->ticket, &ticket, sizeof ticket) != 0) continue;
    ++region->opens;
    return base;
  }
  return 0;
}

CUdeviceptr Memory::import(const std::shared_ptr<Context>& context, const IpcTicket& ticket, int owner,
                           std::shared_ptr<SharedMemory> opened) {
  auto region = std::make_shared<Region>();
  region->kind = RegionKind::kImported;
  region->nbytes = opened->nbytes();
  region->host = opened->data();
  region->device = owner;
  region->devices = mask_of(owner) | mask_of(context->device());
  region->context = context;
  region->ticket = ticket;
  region->shared = std::move(opened);
  const std::lock_guard lock(mutex_);
  region->base = take_range_locked(region->nbytes, 0);
  if (region->base == 0) return 0;
  region->shared->control().importers.add(::getpid());
  live_.emplace(region->base, region);
  driver().journal.live(journal_kind(region->kind), 1);
  return region->base;
}

CUresult Memory::close_import(CUdeviceptr base) {
  const std::lock_guard lock(mutex_);
  const auto found = live_.find(base);
  if (found == live_.end() || found->second->kind != RegionKind::kImported) return CUDA_ERROR_INVALID_VALUE;
  if (--found->second->opens != 0) return CUDA_SUCCESS;
  found->second->shared->control().importers.remove(::getpid());
  retire_locked(found);
  return CUDA_SUCCESS;
}

// --- Host memory ------------------------------------------------------------------------------------------------------

void* Memory::allocate_pinned(const std::shared_ptr<Context>& context, std::uint64_t nbytes, unsigned flags) {
  void* memory =
      ::mmap(nullptr, round_up(nbytes, kPageBytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  std::memset(memory, kFreshPoison, nbytes);
  auto region = std::make_shared<Region>();
  region->kind = RegionKind::kPinned;
  region->base = reinterpret_cast<std::uint64_t>(memory);
  region->nbytes = nbytes;
  region->host = static_cast<std::byte*>(memory);
  region->flags = flags;
  region->context = context;
  const std::lock_guard lock(mutex_);
  live_.emplace(region->base, region);
  driver().journal.live(journal_kind(region->kind), 1);
  return memory;
}

CUresult Memory::free_pinned(void* base) {
  std::shared_ptr<Region> region;  // outlives the lock
  const std::lock_guard lock(mutex_);
  const auto found = live_.find(reinterpret_cast<std::uint64_t>(base));
  if (found == live_.end() || found->second->kind != RegionKind::kPinned) return CUDA_ERROR_INVALID_VALUE;
  region = found->second;
  retire_locked(found);
  return CUDA_SUCCESS;
}

CUresult Memory::register_host(const std::shared_ptr<Context>& context, void* base, std::uint64_t nbytes,
                               unsigned flags) {
  if (nbytes >= kMaxRegistration) return CUDA_ERROR_OUT_OF_MEMORY;  // what the driver says, however much is free
  if (!is_mapped(base, nbytes)) return CUDA_ERROR_INVALID_VALUE;
  auto region = std::make_shared<Region>();
  region->kind = RegionKind::kRegistered;
  region->base = reinterpret_cast<std::uint64_t>(base);
  region->nbytes = nbytes;
  region->host = static_cast<std::byte*>(base);
  region->flags = flags;
  region->context = context;
  const std::lock_guard lock(mutex_);
  if (overlaps_locked(region->base, nbytes)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  live_.emplace(region->base, region);
  driver().journal.live(journal_kind(region->kind), 1);
  return CUDA_SUCCESS;
}

CUresult Memory::unregister_host(void* base) {
  const std::lock_guard lock(mutex_);
  const auto found = live_.find(reinterpret_cast<std::uint64_t>(base));
  if (found == live_.end() || found->second->kind != RegionKind::kRegistered) {
    return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  }
  const std::shared_ptr<Region> region = found->second;
  if (!is_mapped(base, region->nbytes)) {
    driver().journal.violation("unmapped-while-registered: " + range_text(region->base, region->nbytes) +
                               " was unmapped before it was unregistered");
  }
  if (region->users != 0) {
    driver().journal.violation("use-after-free: " + range_text(region->base, region->nbytes) +
                               " is unregistered and work that uses it is running");
  }
  retire_locked(found);
  return CUDA_SUCCESS;
}

// --- VMM --------------------------------------------------------------------------------------------------------------

std::shared_ptr<Physical> Memory::make_physical(int device, std::uint64_t nbytes, unsigned handle_types) {
  if (!take_bytes(device, nbytes)) return nullptr;
  std::shared_ptr<SharedMemory> memory;
  try {
    memory = SharedMemory::create(nbytes, device_uuid(settings().visible[device]));
  } catch (const std::bad_alloc&) {
    give_bytes(device, nbytes);
    return nullptr;
  }
  std::memset(memory->data(), kFreshPoison, nbytes);
  return std::make_shared<Physical>(std::move(memory), device, false, handle_types);
}

CUdeviceptr Memory::reserve(std::uint64_t nbytes, std::uint64_t alignment) {
  void* host = map_no_access(nbytes);
  if (host == nullptr) return 0;
  auto region = std::make_shared<Region>();
  region->kind = RegionKind::kReservation;
  region->nbytes = nbytes;
  region->host = static_cast<std::byte*>(host);
  region->device = kAnyDevice;
  const std::lock_guard lock(mutex_);
  region->base = take_range_locked(nbytes, alignment);
  if (region->base == 0) return 0;
  live_.emplace(region->base, region);
  driver().journal.live(journal_kind(region->kind), 1);
  return region->base;
}

CUresult Memory::free_reservation(CUdeviceptr base, std::uint64_t nbytes) {
  std::shared_ptr<Region> region;  // outlives the lock
  const std::lock_guard lock(mutex_);
  const auto found = live_.find(base);
  if (found == live_.end() || found->second->kind != RegionKind::kReservation) return CUDA_ERROR_INVALID_VALUE;
  if (found->second->nbytes != nbytes || !found->second->pieces.empty()) return CUDA_ERROR_INVALID_VALUE;
  region = found->second;
  retire_locked(found);
  return CUDA_SUCCESS;
}

CUresult Memory::map(CUdeviceptr address, std::uint64_t nbytes, std::shared_ptr<Physical> physical,
                     std::uint64_t offset) {
  const std::lock_guard lock(mutex_);
  const auto region = find_locked(address);
  if (region == nullptr || region->kind != RegionKind::kReservation) return CUDA_ERROR_INVALID_VALUE;
  if (nbytes > region->base + region->nbytes - address) return CUDA_ERROR_INVALID_VALUE;
  if (offset > physical->memory->nbytes() || nbytes > physical->memory->nbytes() - offset) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto after = region->pieces.lower_bound(address + nbytes);
  if (after != region->pieces.begin() && std::prev(after)->first + std::prev(after)->second.nbytes > address) {
    return CUDA_ERROR_INVALID_VALUE;  // something is mapped there
  }
  void* at = region->host + (address - region->base);
  if (::mmap(at, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, physical->memory->fd(),
             static_cast<off_t>(offset)) == MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  Region::Piece piece;
  piece.nbytes = nbytes;
  piece.physical = std::move(physical);
  piece.offset = offset;
  region->pieces.emplace(address, std::move(piece));
  driver().journal.live("vmm_mapping", 1);
  return CUDA_SUCCESS;
}

CUresult Memory::unmap(CUdeviceptr address, std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  const auto region = find_locked(address);
  if (region == nullptr || region->kind != RegionKind::kReservation) return CUDA_ERROR_INVALID_VALUE;
  // Whole mappings only.
  const auto first = region->pieces.find(address);
  auto last = first;
  std::uint64_t end = address;
  while (last != region->pieces.end() && last->first == end && end < address + nbytes) end += (last++)->second.nbytes;
  if (first == region->pieces.end() || end != address + nbytes) return CUDA_ERROR_INVALID_VALUE;
  if (region->users != 0) {
    driver().journal.violation("use-after-free: " + range_text(address, nbytes) +
                               " is unmapped and work that uses it is running");
  } else {
    close_range_fixed(region->host + (address - region->base), nbytes);
  }
  driver().journal.live("vmm_mapping", -static_cast<std::int64_t>(std::distance(first, last)));
  region->pieces.erase(first, last);
  return CUDA_SUCCESS;
}

CUresult Memory::set_access(CUdeviceptr address, std::uint64_t nbytes, int device, bool reads, bool writes) {
  const std::lock_guard lock(mutex_);
  const auto region = find_locked(address);
  if (region == nullptr || region->kind != RegionKind::kReservation) return CUDA_ERROR_INVALID_VALUE;
  auto piece = region->pieces.find(address);
  std::uint64_t end = address;
  for (auto it = piece; it != region->pieces.end() && it->first == end && end < address + nbytes; ++it) {
    end += it->second.nbytes;
  }
  if (piece == region->pieces.end() || end != address + nbytes) return CUDA_ERROR_INVALID_VALUE;
  const auto set = [&](std::uint32_t& mask, bool on) { mask = on ? mask | mask_of(device) : mask & ~mask_of(device); };
  for (; piece != region->pieces.end() && piece->first < end; ++piece) {
    set(piece->second.readers, reads);
    set(piece->second.writers, writes);
  }
  return CUDA_SUCCESS;
}

std::shared_ptr<Physical> Memory::physical_at(CUdeviceptr address) const {
  const std::lock_guard lock(mutex_);
  const auto region = find_locked(address);
  if (region == nullptr || region->kind != RegionKind::kReservation) return nullptr;
  auto after = region->pieces.upper_bound(address);
  if (after == region->pieces.begin()) return nullptr;
  const auto& [base, piece] = *std::prev(after);
  return address - base < piece.nbytes ? piece.physical : nullptr;
}

void Memory::drop_context(const Context& context) {
  std::vector<CUdeviceptr> device_memory;
  std::vector<CUdeviceptr> imports;
  std::vector<std::shared_ptr<Region>> host_memory;  // outlives the lock
  {
    const std::lock_guard lock(mutex_);
    for (auto it = live_.begin(); it != live_.end();) {
      const auto at = it++;
      const std::shared_ptr<Region> region = at->second;
      if (region->context.lock().get() != &context) continue;
      if (region->kind == RegionKind::kDevice) {
        device_memory.push_back(region->base);
      } else if (region->kind == RegionKind::kImported) {
        region->opens = 1;
        imports.push_back(region->base);
      } else {
        host_memory.push_back(region);
        retire_locked(at);
      }
    }
  }
  for (const CUdeviceptr base : device_memory) static_cast<void>(free_device(base));
  for (const CUdeviceptr base : imports) static_cast<void>(close_import(base));
}

}  // namespace fastsync::fake
