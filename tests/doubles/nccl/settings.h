// What the environment asks of the double. README.md lists the variables.
//
// Threads: values. Errors: a variable that cannot be read ends the process with status 70, as a fault plan does: a test
// that runs without what it asked for would pass for the wrong reason.
#pragma once

#include <chrono>
#include <cstdint>

namespace fastsync::fake_nccl {

// FASTSYNC_FAKE_NCCL_VERSION: what ncclGetVersion says, and which functions exist. Calls nothing but getenv(), because
// the dynamic linker asks it while it resolves a symbol.
[[nodiscard]] int version() noexcept;

enum class Defer : std::uint8_t { kNever, kFirst, kAlways };

struct Settings {
  bool diagnose = false;                     // FASTSYNC_FAKE_NCCL_DIAGNOSE: a mismatch is an error instead of a hang
  bool peer_loss_is_error = true;            // FASTSYNC_FAKE_NCCL_PEER_LOSS=error|hang
  bool destroy_waits = true;                 // FASTSYNC_FAKE_NCCL_DESTROY_BARRIER: as the ranks of one host do
  Defer defer = Defer::kFirst;               // FASTSYNC_FAKE_NCCL_DEFER=never|first|always
  std::chrono::microseconds chunk_delay{0};  // FASTSYNC_FAKE_NCCL_CHUNK_DELAY_US: at most this long before a chunk
  bool ranks_may_share_device = false;       // NCCL_MULTI_RANK_GPU_ENABLE, from 2.30.3 on
  int blocking = -1;                         // NCCL_COMM_BLOCKING; -1: the configuration decides

  [[nodiscard]] static Settings from_environment();
};

}  // namespace fastsync::fake_nccl
