// Host memory that fails as an exception: never by SIGBUS, the OOM killer or an unbounded zeroing of pages.
//
// Threads: pure functions of the machine's state. Errors: DeviceError with the size, what is free and what to do.
#pragma once

#include <cstdint>
#include <string>

#include "common/owned_fd.h"
#include "device/device_runtime.h"

namespace fastsync {

struct AvailableMemory {
  std::uint64_t bytes = 0;
  std::string limited_by;  // "MemAvailable", "the cgroup limit"
};
// What this process can still allocate: the least of MemAvailable plus free swap, and what every cgroup above it (v1 or
// v2) leaves. The maximum of uint64 where nothing can be read. The roots are parameters for tests.
[[nodiscard]] AvailableMemory available_memory(const std::string& proc_root = "/proc",
                                               const std::string& cgroup_root = "/sys/fs/cgroup");

// Throws DeviceError if `nbytes` cannot be had. Touches no memory, so an absurd request fails at once.
void require_memory(std::uint64_t nbytes, const std::string& what);

// A memfd of exactly `nbytes`, with its pages reserved (so that a write cannot raise SIGBUS later) and its size sealed.
[[nodiscard]] OwnedFd create_memfd(const std::string& name, std::uint64_t nbytes);

// kShared maps a new memfd; every other kind is page-aligned heap, on huge pages where that helps.
[[nodiscard]] Allocation allocate_host(MemoryKind kind, std::uint64_t nbytes, const std::string& name);
void deallocate_host(MemoryKind kind, const Allocation& allocation) noexcept;

}  // namespace fastsync
