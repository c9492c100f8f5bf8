#include "doubles/common/fault_plan.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace fastsync::fake {
namespace {

constexpr int kBadPlanStatus = 70;  // EX_SOFTWARE
constexpr std::string_view kBlanks = " \t\n";

[[noreturn]] void refuse(std::string_view word, std::string_view why) {
  throw std::invalid_argument("fault plan: '" + std::string(word) + "' " + std::string(why));
}

template <typename Number>
Number number_of(std::string_view word, std::string_view value) {
  Number number{};
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size()) refuse(word, "needs a whole number");
  return number;
}

std::string_view next_word(std::string_view& text) {
  const std::size_t begin = std::min(text.find_first_not_of(kBlanks), text.size());
  text.remove_prefix(begin);
  const std::size_t end = std::min(text.find_first_of(kBlanks), text.size());
  const std::string_view word = text.substr(0, end);
  text.remove_prefix(end);
  return word;
}

FaultAction action_of(std::string_view word, std::string_view value) {
  if (value == "fail") return FaultAction::kFail;
  if (value == "fail_later") return FaultAction::kFailLater;
  if (value == "delay") return FaultAction::kDelay;
  if (value == "hang") return FaultAction::kHang;
  if (value == "corrupt") return FaultAction::kCorrupt;
  if (value == "kill") return FaultAction::kKill;
  refuse(word, "is none of fail, fail_later, delay, hang, corrupt, kill");
}

}  // namespace

std::optional<int> fake_rank() {
  const char* text = std::getenv("FASTSYNC_FAKE_RANK");
  if (text == nullptr || *text == '\0') return std::nullopt;
  int rank = 0;
  const auto [end, error] = std::from_chars(text, text + std::strlen(text), rank);
  if (error != std::errc() || *end != '\0') {
    std::fprintf(stderr, "FASTSYNC_FAKE_RANK=%s: not a whole number\n", text);
    ::_exit(kBadPlanStatus);
  }
  return rank;
}

FaultPlan::FaultPlan(std::string_view text, std::optional<int> rank) {
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(';'), text.size());
    std::string_view words = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const std::string whole(words);

    Entry entry;
    std::optional<int> only_rank;
    bool any = false;
    for (std::string_view word = next_word(words); !word.empty(); word = next_word(words)) {
      any = true;
      const std::size_t equals = word.find('=');
      if (equals == std::string_view::npos) refuse(word, "is not key=value");
      const std::string_view key = word.substr(0, equals);
      std::string_view value = word.substr(equals + 1);
      if (key == "symbol") {
        entry.symbol = value;
      } else if (key == "rank") {
        only_rank = number_of<int>(word, value);
      } else if (key == "nth") {
        entry.and_later = value.ends_with('+');
        if (entry.and_later) value.remove_suffix(1);
        entry.nth = number_of<std::uint64_t>(word, value);
        if (entry.nth == 0) refuse(word, "counts from 1");
      } else if (key == "action") {
        entry.fault.action = action_of(word, value);
      } else if (key == "code") {
        entry.fault.code = number_of<int>(word, value);
      } else if (key == "ms") {
        entry.fault.delay = std::chrono::milliseconds(number_of<std::uint32_t>(word, value));
      } else if (key == "bytes") {
        entry.fault.bytes = number_of<std::uint64_t>(word, value);
      } else {
        refuse(word, "is none of symbol, rank, nth, action, code, ms, bytes");
      }
    }
    if (!any) continue;  // "a; ; b" and a last ';'
    const FaultAction action = entry.fault.action;
    if (entry.symbol.empty()) refuse(whole, "names no symbol");
    if (action == FaultAction::kNone) refuse(whole, "names no action");
    const bool fails = action == FaultAction::kFail || action == FaultAction::kFailLater;
    if (fails && entry.fault.code == 0) refuse(whole, "needs code=C, not 0");
    if (action == FaultAction::kDelay && entry.fault.delay.count() == 0) refuse(whole, "needs ms=M, not 0");
    if (action == FaultAction::kCorrupt && entry.fault.bytes == 0) refuse(whole, "needs bytes=K, not 0");
    if (only_rank && !rank) refuse(whole, "is for one rank, and FASTSYNC_FAKE_RANK is not set");
    if (!only_rank || only_rank == rank) entries_.push_back(std::move(entry));
  }
}

FaultPlan& FaultPlan::of_process() {
  // Never destroyed: streams may still run when static objects go.
  static FaultPlan* const plan = [] {
    const char* text = std::getenv("FASTSYNC_FAKE_FAULTS");
    try {
      return new FaultPlan(text == nullptr ? "" : text, fake_rank());
    } catch (const std::invalid_argument& error) {
      std::fprintf(stderr, "FASTSYNC_FAKE_FAULTS: %s\n", error.what());
      ::_exit(kBadPlanStatus);
    }
  }();
  return *plan;
}

Fault FaultPlan::on_call(std::string_view symbol) {
  const std::lock_guard lock(mutex_);
  if (entries_.empty()) return {};
  auto found = calls_.find(symbol);
  if (found == calls_.end()) found = calls_.emplace(symbol, 0).first;
  const std::uint64_t call = ++found->second;
  for (const Entry& entry : entries_) {
    if (entry.symbol != symbol || call < entry.nth || (call > entry.nth && !entry.and_later)) continue;
    if (entry.fault.action == FaultAction::kKill) {
      ::kill(::getpid(), SIGKILL);
      for (;;) ::pause();
    }
    return entry.fault;
  }
  return {};
}

void corrupt_bytes(std::span<std::byte> range, std::uint64_t count) noexcept {
  const std::uint64_t size = range.size();
  count = std::min(count, size);
  for (std::uint64_t i = 0; i < count; ++i) range[i * (size / count)] ^= std::byte{0xFF};
}

}  // namespace fastsync::fake
