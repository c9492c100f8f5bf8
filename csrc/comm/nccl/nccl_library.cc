#include "comm/nccl/nccl_library.h"

#include <cstdlib>
#include <mutex>
#include <string_view>
#include <utility>

#include "common/error.h"

namespace fastsync {
namespace {

constexpr const char* kLibraryName = "libnccl.so.2";

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

std::string_view name_of(nccl::Result result) {
  switch (result) {
    case nccl::kSuccess: return "ncclSuccess";
    case nccl::kUnhandledCudaError: return "ncclUnhandledCudaError";
    case nccl::kSystemError: return "ncclSystemError";
    case nccl::kInternalError: return "ncclInternalError";
    case nccl::kInvalidArgument: return "ncclInvalidArgument";
    case nccl::kInvalidUsage: return "ncclInvalidUsage";
    case nccl::kRemoteError: return "ncclRemoteError";
    case nccl::kInProgress: return "ncclInProgress";
    case nccl::kTimeout: return "ncclTimeout";
    default: return "unknown NCCL error";
  }
}

std::string_view remedy_of(nccl::Result result) {
  switch (result) {
    case nccl::kUnhandledCudaError: return "; NCCL_DEBUG=INFO shows the CUDA call, and an earlier CUDA error may be it";
    case nccl::kSystemError:
      return "; NCCL_DEBUG=INFO shows the system call: usually the network interface (NCCL_SOCKET_IFNAME, "
             "NCCL_IB_HCA), "
             "a firewall, or a container's limits (/dev/shm, locked memory)";
    case nccl::kInvalidUsage:
      return "; every rank needs a device of its own and the same NCCL version; NCCL_DEBUG=WARN says which rule it was";
    case nccl::kRemoteError: return "; another rank failed or its process ended: look at that rank's own error";
    case nccl::kInternalError:
    case nccl::kInvalidArgument: return "; NCCL_DEBUG=INFO shows where";
    default: return {};
  }
}

}  // namespace

std::string NcclLibrary::version_text(int version) {
  return concat(version / 10000, '.', version / 100 % 100, '.', version % 100);
}

std::unique_ptr<const NcclLibrary> NcclLibrary::open(const std::string& file, DynamicLibrary::Mode mode,
                                                     std::string& reason) {
  std::unique_ptr<NcclLibrary> opened(new NcclLibrary);
  opened->library_ = DynamicLibrary::open(file, mode, reason);
  if (!opened->library_ || !opened->initialize(reason)) return nullptr;
  return opened;
}

bool NcclLibrary::initialize(std::string& reason) {
  is_fake_ = library_.symbol<char>("fastsync_fake_nccl") != nullptr;
  if (is_fake_ && environment("FASTSYNC_ALLOW_FAKE") != "1") {
    reason =
        concat(path(), " is a test double of NCCL; unset FASTSYNC_NCCL_PATH, or set FASTSYNC_ALLOW_FAKE=1 in a test");
    return false;
  }

  std::vector<std::string> missing;
  {
    using namespace nccl;
#define FASTSYNC_LOAD_REQUIRED(name, ...) api_.name = library_.symbol<__VA_ARGS__>(#name, missing);
#define FASTSYNC_LOAD_OPTIONAL(name, ...) api_.name = library_.symbol<__VA_ARGS__>(#name);
    FASTSYNC_NCCL_REQUIRED(FASTSYNC_LOAD_REQUIRED)
    FASTSYNC_NCCL_OPTIONAL(FASTSYNC_LOAD_OPTIONAL)
#undef FASTSYNC_LOAD_REQUIRED
#undef FASTSYNC_LOAD_OPTIONAL
  }
  // Before what is missing is judged: an old NCCL lacks functions because it is old, and that is what to say.
  if (api_.ncclGetVersion != nullptr && api_.ncclGetVersion(&version_) == nccl::kSuccess && version_ < kMinVersion) {
    // Until 2.8 the number was written with three digits a part less: 2.8.3 is 2803.
    reason = concat(path(), " is NCCL ", version_ < 10000 ? concat("before 2.9 (", version_, ')') : version_text(),
                    ", fastsync needs ", version_text(kMinVersion),
                    " or later; install nvidia-nccl-cu12 or nvidia-nccl-cu13, or a torch that brings a later one");
    return false;
  }
  if (!missing.empty()) {
    reason = concat(path(), " lacks ", missing.size(), " of the functions of NCCL ", version_text(kMinVersion), " (",
                    missing.front(), missing.size() > 1 ? ", ..." : "", "); it is not NCCL, or not a whole one");
    return false;
  }
  features_.memory = api_.ncclMemAlloc != nullptr && api_.ncclMemFree != nullptr;
  features_.registration = api_.ncclCommRegister != nullptr && api_.ncclCommDeregister != nullptr;
  features_.shrink = api_.ncclCommShrink != nullptr;
  features_.revoke = api_.ncclCommRevoke != nullptr;
  features_.shared_device = version_ >= 23003;
  return true;
}

bool NcclLibrary::ranks_may_share_device() const noexcept {
  const char* told = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return features_.shared_device && told != nullptr && std::strtoll(told, nullptr, 0) != 0;
}

namespace {

struct ProcessLibrary {
  std::mutex mutex;
  std::unique_ptr<const NcclLibrary> library;
};

ProcessLibrary& process_library() {
  static auto* const instance = new ProcessLibrary;  // leaked: its threads may run until the process ends
  return *instance;
}

// With the reasons why the earlier ones were passed over, in order.
std::unique_ptr<const NcclLibrary> open_first(const std::vector<std::string>& candidates, std::string& reasons) {
  using Mode = DynamicLibrary::Mode;
  const auto attempt = [&](const std::string& file, Mode mode) {
    std::string reason;
    auto opened = NcclLibrary::open(file, mode, reason);
    if (opened == nullptr) reasons += (reasons.empty() ? "" : "; ") + reason;
    return opened;
  };
  if (const std::string named = environment("FASTSYNC_NCCL_PATH"); !named.empty()) return attempt(named, Mode::kLoad);
  if (auto loaded = attempt(kLibraryName, Mode::kLoadedOnly)) return loaded;
  for (const std::string& candidate : candidates) {
    if (auto opened = attempt(candidate, Mode::kLoad)) return opened;
  }
  return attempt(kLibraryName, Mode::kLoad);
}

}  // namespace

std::optional<std::string> NcclLibrary::unavailable_reason(const std::vector<std::string>& candidates) {
  ProcessLibrary& process = process_library();
  const std::lock_guard lock(process.mutex);
  if (process.library != nullptr) return std::nullopt;
  std::string reasons;
  process.library = open_first(candidates, reasons);
  if (process.library != nullptr) return std::nullopt;
  return concat("no NCCL: ", reasons,
                "; install fastsync[nccl-cu12] or fastsync[nccl-cu13], or name the file in FASTSYNC_NCCL_PATH");
}

const NcclLibrary& NcclLibrary::get(const std::vector<std::string>& candidates) {
  if (auto reason = unavailable_reason(candidates)) throw CommError(*reason);
  return *loaded();
}

const NcclLibrary* NcclLibrary::loaded() {
  ProcessLibrary& process = process_library();
  const std::lock_guard lock(process.mutex);
  return process.library.get();
}

nccl::UniqueId NcclLibrary::unique_id() const {
  nccl::UniqueId id{};
  check(api_.ncclGetUniqueId(&id), "ncclGetUniqueId");
  return id;
}

std::string NcclLibrary::describe(nccl::Result result, nccl::Comm comm) const {
  const char* text = api_.ncclGetErrorString(result);
  const char* last = api_.ncclGetLastError(comm);
  std::string described = concat(name_of(result), " (", result, ')');
  if (text != nullptr && *text != '\0') described += concat(": ", text);
  // Of this thread's latest failure, which need not be this one; NCCL keeps no other.
  if (last != nullptr && *last != '\0') described += concat("; NCCL's last error: ", last);
  return described;
}

void NcclLibrary::check(nccl::Result result, const char* what, nccl::Comm comm) const {
  if (result == nccl::kSuccess || result == nccl::kInProgress) return;
  throw CommError(concat(what, " failed (NCCL ", version_text(), "): ", describe(result, comm), remedy_of(result)));
}

}  // namespace fastsync
