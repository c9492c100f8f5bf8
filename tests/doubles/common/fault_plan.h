// What goes wrong on purpose: a plan read from the environment, asked at every call of a double.
//
//   FASTSYNC_FAKE_RANK=1
//   FASTSYNC_FAKE_FAULTS="rank=1 symbol=cuMemcpyAsync nth=3 action=fail code=2; symbol=ncclBroadcast action=hang"
//
// Faults are separated by ';', the words of one fault by blanks:
//   symbol=S   required: the exported name, exactly
//   rank=R     only in the process of that rank; left out: in every process
//   nth=N      the Nth call of S in this process, from 1 (default 1); nth=N+ is that one and every later one
//   action=A   required:
//     fail code=C      the call returns C and does nothing
//     fail_later code=C  the call succeeds; its work fails when the stream gets there
//     delay ms=M       queued work starts M milliseconds late; a call that queues nothing returns that much later
//     hang             queued work never completes, the call returns; a call that queues nothing never returns
//     corrupt bytes=K  flips K of the bytes that the work wrote
//     kill             SIGKILL for the process, at the call
//
// Threads: all of it is thread-safe. Errors: a plan that cannot be read ends the process with status 70, because a fault
// test without its fault would pass for the wrong reason.
// Each double has its own copy of this code and counts its own symbols.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fastsync::fake {

enum class FaultAction : std::uint8_t { kNone, kFail, kFailLater, kDelay, kHang, kCorrupt, kKill };

struct Fault {
  FaultAction action = FaultAction::kNone;
  int code = 0;                        // kFail, kFailLater
  std::chrono::milliseconds delay{0};  // kDelay
  std::uint64_t bytes = 0;             // kCorrupt
};

class FaultPlan {
 public:
  FaultPlan() = default;
  // Throws std::invalid_argument, naming the word that is wrong.
  FaultPlan(std::string_view text, std::optional<int> rank);

  // The plan of this process, from the environment at the first call.
  [[nodiscard]] static FaultPlan& of_process();

  // Counts one call of `symbol` and says what shall happen to it. Does not return for kKill.
  [[nodiscard]] Fault on_call(std::string_view symbol);

 private:
  struct Entry {
    std::string symbol;
    std::uint64_t nth = 1;
    bool and_later = false;
    Fault fault;
  };
  std::mutex mutex_;
  std::vector<Entry> entries_;  // those of this rank
  std::map<std::string, std::uint64_t, std::less<>> calls_;
};

// FASTSYNC_FAKE_RANK, if it is set. One that is no number ends the process, as a bad plan does.
[[nodiscard]] std::optional<int> fake_rank();

// Inverts `count` bytes (all of them, if there are fewer), spread evenly over the range.
void corrupt_bytes(std::span<std::byte> range, std::uint64_t count) noexcept;

}  // namespace fastsync::fake
