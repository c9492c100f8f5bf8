#include "device/host/host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <optional>
#include <string_view>

#include "common/error.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U  // Linux 6.3; older headers lack it
#endif

namespace fastsync {
namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t kHugePage = std::uint64_t{2} << 20;
constexpr std::uint64_t kPage = 4096;
// A signal that arrives during fallocate() on tmpfs undoes the call. Pieces keep what was reserved before.
constexpr std::uint64_t kReservePiece = std::uint64_t{64} << 20;

std::optional<std::string> read_line(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  if (!in || !std::getline(in, line)) return std::nullopt;
  return line;
}

std::optional<std::uint64_t> parse_number(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  std::uint64_t value = 0;
  std::size_t digits = 0;
  for (; digits < text.size() && text[digits] >= '0' && text[digits] <= '9'; ++digits) {
    const auto digit = static_cast<std::uint64_t>(text[digits] - '0');
    if (value > (kUnlimited - digit) / 10) return kUnlimited;
    value = value * 10 + digit;
  }
  if (digits == 0) return std::nullopt;
  return value;
}

// "max" is no limit; so is v1's 0x7ffffffffffff000.
std::optional<std::uint64_t> read_limit(const std::string& path) {
  const auto line = read_line(path);
  if (!line || *line == "max") return std::nullopt;
  const auto value = parse_number(*line);
  if (!value || *value >= (std::uint64_t{1} << 62)) return std::nullopt;
  return value;
}

// The value of "key value" or "key: value kB" lines.
std::optional<std::uint64_t> read_field(const std::string& path, std::string_view key) {
  std::ifstream in(path);
  std::string line;
  while (std::getline(in, line)) {
    const std::string_view view = line;
    if (view.substr(0, key.size()) != key) continue;
    std::string_view rest = view.substr(key.size());
    if (rest.empty() || (rest.front() != ':' && rest.front() != ' ')) continue;
    rest.remove_prefix(1);
    return parse_number(rest);
  }
  return std::nullopt;
}

// Page cache that the kernel drops before it fails an allocation does not count as used.
std::optional<std::uint64_t> cgroup_free(const std::string& folder, const char* limit_file, const char* usage_file,
                                         const char* cache_key) {
  const auto limit = read_limit(folder + "/" + limit_file);
  if (!limit) return std::nullopt;
  const auto usage = read_line(folder + "/" + usage_file);
  std::uint64_t used = usage ? parse_number(*usage).value_or(0) : 0;
  used -= std::min(used, read_field(folder + "/memory.stat", cache_key).value_or(0));
  return *limit - std::min(*limit, used);
}

// The least that any group from `path` up to the root leaves. In a container the path may be the host's and not exist
// under our mount; the root then is our own group.
std::uint64_t hierarchy_free(const std::string& root, std::string path, bool v2) {
  std::uint64_t least = kUnlimited;
  for (;;) {
    const std::string folder = root + path;
    const auto free = v2 ? cgroup_free(folder, "memory.max", "memory.current", "inactive_file")
                         : cgroup_free(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file");
    if (free) least = std::min(least, *free);
    const auto cut = path.rfind('/');
    if (cut == std::string::npos) return least;
    path.resize(cut);
  }
}

std::uint64_t read_cgroups(const std::string& proc_root, const std::string& cgroup_root) {
  std::uint64_t least = kUnlimited;
  std::ifstream in(proc_root + "/self/cgroup");
  std::string line;
  while (std::getline(in, line)) {  // "0::/path" (v2) or "9:memory:/path" (v1)
    const auto first = line.find(':');
    const auto second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string path = line.substr(second + 1);
    if (path == "/") path.clear();
    if (controllers == ",,") {
      least = std::min(least, hierarchy_free(cgroup_root, path, true));
      least = std::min(least, hierarchy_free(cgroup_root + "/unified", path, true));
    } else if (controllers.find(",memory,") != std::string::npos) {
      least = std::min(least, hierarchy_free(cgroup_root + "/memory", path, false));
    }
  }
  return least;
}

[[noreturn]] void throw_no_memory(std::uint64_t nbytes, const std::string& what, const std::string& why) {
  const AvailableMemory available = available_memory();
  throw DeviceError(concat("cannot allocate ", nbytes, " bytes for ", what, ": ", why, "; ", available.bytes,
                           " bytes are free (", available.limited_by,
                           "); lower bucket_bytes or buffers, or free memory"));
}

}  // namespace

std::string_view memory_kind_name(MemoryKind kind) noexcept {
  switch (kind) {
    case MemoryKind::kHost: return "host memory";
    case MemoryKind::kPinnedHost: return "pinned host memory";
    case MemoryKind::kShared: return "shared memory";
    case MemoryKind::kDevice: return "device memory";
  }
  return "memory";
}

AvailableMemory available_memory(const std::string& proc_root, const std::string& cgroup_root) {
  AvailableMemory result{kUnlimited, "unknown"};
  const std::string meminfo = proc_root + "/meminfo";
  if (const auto available_kb = read_field(meminfo, "MemAvailable")) {
    result = {(*available_kb + read_field(meminfo, "SwapFree").value_or(0)) * 1024, "MemAvailable"};
  }
  const std::uint64_t cgroup = read_cgroups(proc_root, cgroup_root);
  if (cgroup < result.bytes) result = {cgroup, "the cgroup limit"};
  return result;
}

void require_memory(std::uint64_t nbytes, const std::string& what) {
  const AvailableMemory available = available_memory();
  if (nbytes <= available.bytes) return;
  throw DeviceError(concat("cannot allocate ", nbytes, " bytes for ", what, ": only ", available.bytes,
                           " bytes are free (", available.limited_by,
                           "); lower bucket_bytes or buffers, or free memory"));
}

OwnedFd create_memfd(const std::string& name, std::uint64_t nbytes) {
  require_memory(nbytes, concat("shared memory '", name, "'"));
  // A system with vm.memfd_noexec=2 refuses a memfd that could hold a program; a kernel before 6.3 refuses the flag.
  int fd =
      static_cast<int>(::syscall(SYS_memfd_create, name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL));
  if (fd < 0 && errno == EINVAL) {
    fd = static_cast<int>(::syscall(SYS_memfd_create, name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  }
  if (fd < 0) {
    throw DeviceError(
        concat("memfd_create('", name, "') failed: ", errno_text(errno),
               "; the shm transport needs Linux 3.17 with memfd allowed, use transport='gloo' otherwise"));
  }
  OwnedFd owner(fd);
  if (::ftruncate(fd, static_cast<off_t>(nbytes)) != 0) {
    throw_no_memory(nbytes, concat("shared memory '", name, "'"), "ftruncate: " + errno_text(errno));
  }
  for (std::uint64_t done = 0; done < nbytes;) {
    const std::uint64_t piece = std::min(kReservePiece, nbytes - done);
    if (::fallocate(fd, 0, static_cast<off_t>(done), static_cast<off_t>(piece)) == 0) {
      done += piece;
    } else if (errno != EINTR) {
      throw_no_memory(nbytes, concat("shared memory '", name, "'"), "fallocate: " + errno_text(errno));
    }
  }
  if (::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    throw DeviceError(concat("cannot seal the size of shared memory '", name, "': ", errno_text(errno)));
  }
  return owner;
}

Allocation allocate_host(MemoryKind kind, std::uint64_t nbytes, const std::string& name) {
  if (nbytes == 0) return {};
  if (kind == MemoryKind::kShared) {
    OwnedFd fd = create_memfd(name, nbytes);
    // The pages exist already; MAP_POPULATE saves a fault for each on the first pass.
    void* data = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd.get(), 0);
    if (data == MAP_FAILED) throw_no_memory(nbytes, concat("shared memory '", name, "'"), "mmap: " + errno_text(errno));
    return {static_cast<std::byte*>(data), nbytes, fd.release()};
  }
  const std::string what = concat(memory_kind_name(kind), " '", name, "'");
  require_memory(nbytes, what);
  void* data = nullptr;
  const bool huge = nbytes >= 2 * kHugePage;
  if (const int error = ::posix_memalign(&data, huge ? kHugePage : kPage, nbytes); error != 0) {
    throw_no_memory(nbytes, what, "posix_memalign: " + errno_text(error));
  }
  // Whole huge pages only, so that the tail does not hold more memory than was asked for. Advice: failing is fine.
  if (huge) (void)::madvise(data, nbytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  return {static_cast<std::byte*>(data), nbytes, -1};
}

void deallocate_host(MemoryKind kind, const Allocation& allocation) noexcept {
  if (allocation.data == nullptr) return;
  if (kind == MemoryKind::kShared) {
    ::munmap(allocation.data, allocation.nbytes);
    if (allocation.fd >= 0) ::close(allocation.fd);
  } else {
    std::free(allocation.data);
  }
}

}  // namespace fastsync
