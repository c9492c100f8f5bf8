// What a double saw: calls per symbol, things that are alive, rules that were broken.
//
// A violation is a use that real hardware punishes sometimes, late or somewhere else: memory used after free, pageable
// memory in an asynchronous copy, an export freed under its importers. A test asserts that there are none. The text
// begins with its kind and a colon ("use-after-free: ..."), so that a test can look for one kind.
//
// With FASTSYNC_FAKE_JOURNAL=<folder> the journal is written to <folder>/<pid>.json (<pid>.<library>.json for another
// double than libcuda's) when the process exits; a process that is killed or calls _exit() writes none:
//   {"pid": 12, "rank": 1, "calls": {"cuInit": 1}, "live": {"stream": 2}, "violations": ["..."]}
//
// Threads: thread-safe. Errors: a journal that cannot be written is a line on stderr.
// Each double has its own copy of this code and keeps its own journal.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace fastsync::fake {

class Journal {
 public:
  // `library` is "cuda", "nccl", ...
  explicit Journal(std::string library) : library_(std::move(library)) {}

  void call(std::string_view symbol);
  void live(std::string_view kind, std::int64_t change);
  void violation(std::string text);

  [[nodiscard]] std::uint64_t calls_of(std::string_view symbol) const;
  [[nodiscard]] std::int64_t live_of(std::string_view kind) const;
  [[nodiscard]] std::vector<std::string> violations() const;
  void clear_violations();

  // One object of calls, live things and violations.
  [[nodiscard]] std::string to_json() const;
  // Does nothing without FASTSYNC_FAKE_JOURNAL.
  void write_if_asked() const;

 private:
  const std::string library_;
  mutable std::mutex mutex_;
  std::map<std::string, std::uint64_t, std::less<>> calls_;
  std::map<std::string, std::int64_t, std::less<>> live_;
  std::vector<std::string> violations_;
  std::uint64_t dropped_ = 0;  // violations beyond the limit of what is kept
};

}  // namespace fastsync::fake
