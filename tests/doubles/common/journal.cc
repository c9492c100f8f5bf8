#include "doubles/common/journal.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "doubles/common/fault_plan.h"

namespace fastsync::fake {
namespace {

constexpr std::size_t kMaxViolations = 1000;

template <typename Map>
auto& entry_of(Map& map, std::string_view key) {
  const auto found = map.find(key);
  return found != map.end() ? found->second : map.emplace(std::string(key), 0).first->second;
}

template <typename Map>
auto value_of(const Map& map, std::string_view key) {
  const auto found = map.find(key);
  return found == map.end() ? typename Map::mapped_type{} : found->second;
}

void append_string(std::string& out, std::string_view text) {
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
      out += escaped;
    } else {
      out += c;
    }
  }
  out += '"';
}

template <typename Map>
void append_object(std::string& out, const Map& map) {
  out += '{';
  bool first = true;
  for (const auto& [key, value] : map) {
    if (!std::exchange(first, false)) out += ", ";
    append_string(out, key);
    out += ": " + std::to_string(value);
  }
  out += '}';
}

}  // namespace

void Journal::call(std::string_view symbol) {
  const std::lock_guard lock(mutex_);
  ++entry_of(calls_, symbol);
}

void Journal::live(std::string_view kind, std::int64_t change) {
  const std::lock_guard lock(mutex_);
  entry_of(live_, kind) += change;
}

void Journal::violation(std::string text) {
  const std::lock_guard lock(mutex_);
  if (violations_.size() < kMaxViolations) {
    violations_.push_back(std::move(text));
  } else {
    ++dropped_;
  }
}

std::uint64_t Journal::calls_of(std::string_view symbol) const {
  const std::lock_guard lock(mutex_);
  return value_of(calls_, symbol);
}

std::int64_t Journal::live_of(std::string_view kind) const {
  const std::lock_guard lock(mutex_);
  return value_of(live_, kind);
}

std::vector<std::string> Journal::violations() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> all = violations_;
  if (dropped_ != 0) all.push_back("more: " + std::to_string(dropped_) + " violations were not kept");
  return all;
}

void Journal::clear_violations() {
  const std::lock_guard lock(mutex_);
  violations_.clear();
  dropped_ = 0;
}

std::string Journal::to_json() const {
  const std::vector<std::string> broken = violations();
  std::string out = "{\"pid\": " + std::to_string(::getpid());
  if (const auto rank = fake_rank()) out += ", \"rank\": " + std::to_string(*rank);
  const std::lock_guard lock(mutex_);
  out += ", \"calls\": ";
  append_object(out, calls_);
  out += ", \"live\": ";
  append_object(out, live_);
  out += ", \"violations\": [";
  bool first = true;
  for (const std::string& text : broken) {
    if (!std::exchange(first, false)) out += ", ";
    append_string(out, text);
  }
  out += "]}\n";
  return out;
}

void Journal::write_if_asked() const {
  const char* folder = std::getenv("FASTSYNC_FAKE_JOURNAL");
  if (folder == nullptr || *folder == '\0') return;
  std::string path = std::string(folder) + "/" + std::to_string(::getpid());
  if (library_ != "cuda") path += "." + library_;
  path += ".json";
  // Whoever sees the file sees all of it.
  const std::string unfinished = path + ".part";
  const std::string text = to_json();
  std::FILE* file = std::fopen(unfinished.c_str(), "we");
  const bool written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if ((file != nullptr && std::fclose(file) != 0) || !written || std::rename(unfinished.c_str(), path.c_str()) != 0) {
    std::fprintf(stderr, "FASTSYNC_FAKE_JOURNAL: cannot write %s\n", path.c_str());
  }
}

}  // namespace fastsync::fake
