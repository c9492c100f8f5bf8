#include "doubles/cuda/settings.h"

#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "doubles/common/fault_plan.h"

namespace fastsync::fake {
namespace {

constexpr int kBadSettingStatus = 70;  // EX_SOFTWARE
constexpr std::uint64_t kMaxDevices = 16;

std::optional<std::string_view> text_of(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return std::nullopt;
  return text;
}

[[noreturn]] void refuse(const char* name, std::string_view value, const char* why) {
  std::fprintf(stderr, "%s=%.*s: %s\n", name, static_cast<int>(value.size()), value.data(), why);
  ::_exit(kBadSettingStatus);
}

std::uint64_t number_of(const char* name, std::uint64_t otherwise,
                        std::uint64_t most = std::numeric_limits<std::uint64_t>::max()) {
  const auto text = text_of(name);
  if (!text) return otherwise;
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), number);
  if (error != std::errc() || end != text->data() + text->size() || number > most) {
    refuse(name, *text, "not a whole number in the range that makes sense");
  }
  return number;
}

// "GPU-66616b65-..." as nvidia-smi prints it.
std::string uuid_text(int number) {
  const Uuid uuid = device_uuid(number);
  std::string text = "GPU-";
  for (std::size_t i = 0; i < uuid.size(); ++i) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", uuid[i]);
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += digits;
  }
  return text;
}

// CUDA_VISIBLE_DEVICES as the driver reads it: numbers or UUID prefixes; the first that names no device ends the list.
std::vector<int> visible_devices(int count) {
  std::vector<int> visible;
  const char* list = std::getenv("CUDA_VISIBLE_DEVICES");
  if (list == nullptr) {
    for (int i = 0; i < count; ++i) visible.push_back(i);
    return visible;
  }
  std::string_view rest = list;
  while (!rest.empty()) {
    const std::size_t comma = std::min(rest.find(','), rest.size());
    std::string_view item = rest.substr(0, comma);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
    while (item.starts_with(' ')) item.remove_prefix(1);
    while (item.ends_with(' ')) item.remove_suffix(1);
    int number = -1;
    if (item.starts_with("GPU-")) {
      for (int i = 0; i < count && number < 0; ++i) {
        if (uuid_text(i).starts_with(item)) number = i;
      }
    } else {
      const auto [end, error] = std::from_chars(item.data(), item.data() + item.size(), number);
      if (error != std::errc() || end != item.data() + item.size()) number = -1;
    }
    if (number < 0 || number >= count) break;
    visible.push_back(number);
  }
  return visible;
}

Settings read_settings() {
  Settings result;
  const auto devices = static_cast<int>(number_of("FASTSYNC_FAKE_DEVICES", 2, kMaxDevices));
  result.visible = visible_devices(devices);
  result.max_delay = std::chrono::microseconds(number_of("FASTSYNC_FAKE_DELAY_US", 100, 60'000'000));
  // Two ranks with one seed do not shuffle alike.
  result.seed = number_of("FASTSYNC_FAKE_SEED", 0) * 1'000'003 + static_cast<std::uint64_t>(fake_rank().value_or(0));
  result.memory_bytes = number_of("FASTSYNC_FAKE_MEMORY_MB", 1024, 1 << 20) << 20;
  result.driver_version = static_cast<int>(number_of("FASTSYNC_FAKE_DRIVER", 13000, 99990));
  result.init_code = static_cast<int>(number_of("FASTSYNC_FAKE_CUDA_INIT", 0, 999));
  if (const auto refused = text_of("FASTSYNC_FAKE_NO_IPC")) {
    result.refuse_memory_ipc = *refused == "mem" || *refused == "all";
    result.refuse_event_ipc = *refused == "event" || *refused == "all";
    if (!result.refuse_memory_ipc && !result.refuse_event_ipc) {
      refuse("FASTSYNC_FAKE_NO_IPC", *refused, "is none of mem, event, all");
    }
  }
  return result;
}

}  // namespace

const Settings& settings() {
  static const Settings* const read = new Settings(read_settings());
  return *read;
}

Uuid device_uuid(int number) noexcept {
  Uuid uuid{};
  std::memcpy(uuid.data(), "fake-device-", 12);
  uuid[15] = static_cast<unsigned char>(number);
  return uuid;
}

}  // namespace fastsync::fake
