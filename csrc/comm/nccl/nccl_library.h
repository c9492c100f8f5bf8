// NCCL, opened at run time: libnccl.so.2 of version 2.18 or later. Only the library; communicators are made with it
// elsewhere.
//
// Which file matters. The loader goes by the name inside the library, so whoever loads a libnccl.so.2 first decides for
// everybody: torch, given an older one by us, fails to start. All ranks of a communicator must have the same version, too,
// so the one that torch has loaded is the best choice. open() therefore takes the first of
//   1. the file that FASTSYNC_NCCL_PATH names, and then no other;
//   2. the libnccl.so.2 that this process has loaded already;
//   3. the caller's candidates, in order: Python knows where the packages nvidia-nccl-cu12 and -cu13 put theirs;
//   4. libnccl.so.2, as the loader finds it.
// Ask only after torch has been imported, if it is going to be.
//
// A library that calls itself a double (it exports `fastsync_fake_nccl`) is refused unless FASTSYNC_ALLOW_FAKE=1.
//
// Ownership: a library once opened stays open, and is the process's from then on: it has threads of its own.
// Threads: all calls are thread-safe. Errors: that there is no NCCL is a reason, not an exception; get() throws it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "common/dynamic_library.h"
#include "nccl_abi.h"

namespace fastsync {

namespace nccl {

// Named as the library's symbols are. What is optional (nccl_abi.h) may be null: ask NcclLibrary::features().
struct Api {
#define FASTSYNC_DECLARE(symbol, ...) std::add_pointer_t<__VA_ARGS__> symbol = nullptr;
  FASTSYNC_NCCL_REQUIRED(FASTSYNC_DECLARE)
  FASTSYNC_NCCL_OPTIONAL(FASTSYNC_DECLARE)
#undef FASTSYNC_DECLARE
};

}  // namespace nccl

class NcclLibrary {
 public:
  static constexpr int kMinVersion = 21800;

  struct Features {
    bool memory = false;         // ncclMemAlloc, ncclMemFree (2.19)
    bool registration = false;   // ncclCommRegister, ncclCommDeregister (2.19)
    bool shrink = false;         // ncclCommShrink (2.27)
    bool revoke = false;         // ncclCommRevoke (2.28.9)
    bool shared_device = false;  // several ranks on one device, with NCCL_MULTI_RANK_GPU_ENABLE=1 (2.30.3)
  };

  // Why there is no NCCL here; empty when there is, and then it is loaded. Asks again after a failure, as torch may have
  // brought one in the meantime; after a success the candidates no longer matter.
  [[nodiscard]] static std::optional<std::string> unavailable_reason(const std::vector<std::string>& candidates = {});
  // Throws CommError with that reason.
  [[nodiscard]] static const NcclLibrary& get(const std::vector<std::string>& candidates = {});

  // The library, if one of these has opened it.
  [[nodiscard]] static const NcclLibrary* loaded();

  // One file, without any state of the process; null with a reason. For get(), and for tests of the reasons.
  [[nodiscard]] static std::unique_ptr<const NcclLibrary> open(const std::string& file, DynamicLibrary::Mode mode,
                                                               std::string& reason);

  [[nodiscard]] const nccl::Api& api() const noexcept { return api_; }
  [[nodiscard]] const Features& features() const noexcept { return features_; }
  // features().shared_device, and NCCL_MULTI_RANK_GPU_ENABLE is set to a number that is not 0, as NCCL reads it.
  [[nodiscard]] bool ranks_may_share_device() const noexcept;
  [[nodiscard]] const std::string& path() const noexcept { return library_.path(); }
  // As ncclGetVersion writes it (22809), and as people do ("2.28.9"). Equal in all ranks of a communicator.
  [[nodiscard]] int version() const noexcept { return version_; }
  [[nodiscard]] std::string version_text() const { return version_text(version_); }
  [[nodiscard]] static std::string version_text(int version);
  [[nodiscard]] bool is_fake() const noexcept { return is_fake_; }

  // For one communicator: the rank that makes it hands it to the others. Starts a thread that they will meet at.
  [[nodiscard]] nccl::UniqueId unique_id() const;

  // Throws CommError: `what` failed, the error, what NCCL remembers of it, and a remedy. kInProgress is no error here: it
  // is what a communicator that does not block answers until it is done.
  void check(nccl::Result result, const char* what, nccl::Comm comm = nullptr) const;
  // "ncclInvalidUsage (5): invalid usage; Duplicate GPU detected ...".
  [[nodiscard]] std::string describe(nccl::Result result, nccl::Comm comm = nullptr) const;

 private:
  NcclLibrary() = default;
  [[nodiscard]] bool initialize(std::string& reason);

  DynamicLibrary library_;
  nccl::Api api_;
  Features features_;
  int version_ = 0;
  bool is_fake_ = false;
};

}  // namespace fastsync
