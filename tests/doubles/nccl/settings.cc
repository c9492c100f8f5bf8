#include "doubles/nccl/settings.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace fastsync::fake_nccl {
namespace {

constexpr int kDefaultVersion = 22809;
constexpr int kExitBadSetting = 70;

[[noreturn]] void refuse(const char* name, const char* value, const char* expected) {
  std::fprintf(stderr, "fake nccl: %s is '%s'; use %s\n", name, value, expected);
  ::_exit(kExitBadSetting);
}

bool read_flag(const char* name, bool fallback) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return fallback;
  if (std::string_view(value) == "1") return true;
  if (std::string_view(value) == "0") return false;
  refuse(name, value, "0 or 1");
}

long read_number(const char* name, long fallback, long most) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return fallback;
  char* end = nullptr;
  const long number = std::strtol(value, &end, 10);
  if (*end != '\0' || number < 0 || number > most) refuse(name, value, "a number that is not negative and not absurd");
  return number;
}

std::string_view read_word(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : std::string_view(value);
}

}  // namespace

// No sanitizer, no static: the linker calls this in the middle of dlsym().
__attribute__((no_sanitize("address", "thread", "undefined"))) int version() noexcept {
  const char* value = std::getenv("FASTSYNC_FAKE_NCCL_VERSION");
  if (value == nullptr || *value == '\0') return kDefaultVersion;
  int number = 0;
  for (; *value >= '0' && *value <= '9' && number < 1000000; ++value) number = number * 10 + (*value - '0');
  return *value == '\0' && number > 0 ? number : kDefaultVersion;
}

Settings Settings::from_environment() {
  // The version is read leniently where it must be; here is where a mistake in it is found.
  (void)read_number("FASTSYNC_FAKE_NCCL_VERSION", kDefaultVersion, 999999);
  Settings settings;
  settings.diagnose = read_flag("FASTSYNC_FAKE_NCCL_DIAGNOSE", false);
  settings.destroy_waits = read_flag("FASTSYNC_FAKE_NCCL_DESTROY_BARRIER", true);
  settings.chunk_delay = std::chrono::microseconds(read_number("FASTSYNC_FAKE_NCCL_CHUNK_DELAY_US", 0, 10'000'000));
  settings.ranks_may_share_device = version() >= 23003 && read_flag("NCCL_MULTI_RANK_GPU_ENABLE", false);
  const std::string_view loss = read_word("FASTSYNC_FAKE_NCCL_PEER_LOSS");
  if (loss == "hang") {
    settings.peer_loss_is_error = false;
  } else if (!loss.empty() && loss != "error") {
    refuse("FASTSYNC_FAKE_NCCL_PEER_LOSS", loss.data(), "'error' or 'hang'");
  }
  const std::string_view defer = read_word("FASTSYNC_FAKE_NCCL_DEFER");
  if (defer == "never") {
    settings.defer = Defer::kNever;
  } else if (defer == "always") {
    settings.defer = Defer::kAlways;
  } else if (!defer.empty() && defer != "first") {
    refuse("FASTSYNC_FAKE_NCCL_DEFER", defer.data(), "'never', 'first' or 'always'");
  }
  const std::string_view blocking = read_word("NCCL_COMM_BLOCKING");
  if (blocking == "0" || blocking == "1") settings.blocking = blocking == "1" ? 1 : 0;
  return settings;
}

}  // namespace fastsync::fake_nccl
