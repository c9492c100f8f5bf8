// How the bytes of one communicator's operations move, once a stream has got to them.
//
// An operation first agrees with the ranks that take part (who sends what to whom, how much), then moves chunks through
// the window. Where the ranks disagree nothing moves, and nobody finishes. All waits end at once when the communicator is
// aborted, and notice within kLook that the stream has to stop.
//
// Threads: one operation at a time, on whatever thread its stream has; the communicator sees to that. Errors: outcomes.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "doubles/nccl/rendezvous.h"
#include "doubles/nccl/settings.h"
#include "doubles/nccl/window.h"

namespace fastsync::fake_nccl {

inline constexpr std::chrono::milliseconds kLook{50};

enum class Outcome : std::uint8_t { kDone, kStopped, kMismatch };

// One send or receive; memory is host-readable.
struct PointToPoint {
  bool is_send = false;
  int peer = 0;
  std::byte* memory = nullptr;
  std::uint64_t nbytes = 0;
};

class Exchange {
 public:
  // `must_stop` is asked on every wake.
  Exchange(const Mesh& mesh, const Settings& settings);

  // `mismatch` gets the text of kMismatch. The caller decides whether that is an error or a hang (wait_for_stop()).
  using StopTest = std::function<bool()>;
  // Every rank calls it with the same header. The root reads `source`, all write `target` (of the same size); they may be
  // the same memory.
  [[nodiscard]] Outcome broadcast(const CollectiveHeader& header, const std::byte* source, std::byte* target,
                                  std::uint64_t nbytes, const StopTest& must_stop, std::string* mismatch);
  // Every rank gives `nbytes` and gets nranks times as many.
  [[nodiscard]] Outcome all_gather(const CollectiveHeader& header, const std::byte* source, std::byte* target,
                                   std::uint64_t nbytes, const StopTest& must_stop, std::string* mismatch);
  // All of them together: one never waits for another.
  [[nodiscard]] Outcome send_and_receive(std::span<const PointToPoint> operations, const StopTest& must_stop,
                                         std::string* mismatch);
  // Until `must_stop`.
  void wait_for_stop(const StopTest& must_stop) const;

 private:
  struct Transfer;
  [[nodiscard]] static Transfer agreed(bool is_send, int peer, std::byte* memory, std::uint64_t nbytes);
  [[nodiscard]] Outcome agree(const CollectiveHeader& header, const StopTest& must_stop, std::string* mismatch);
  [[nodiscard]] Outcome drive(std::vector<Transfer>& transfers, const StopTest& must_stop, std::string* mismatch);
  bool step(Transfer& transfer, std::string* mismatch);
  bool step_offer(Transfer& transfer, std::string* mismatch);
  void delay_chunk();

  const Mesh& mesh_;
  const Window& window_;
  const std::chrono::microseconds chunk_delay_;
  std::uint64_t random_;
  std::uint64_t collectives_ = 0;
  std::vector<std::uint64_t> sends_;  // by peer: numbers given out so far
  std::vector<std::uint64_t> receives_;
};

}  // namespace fastsync::fake_nccl
