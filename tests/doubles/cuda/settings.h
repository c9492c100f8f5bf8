// What kind of machine the double plays, from the environment. README.md has the table.
//
// Read once, at the first call of the library. Threads: read-only. Errors: a value that cannot be read ends the process
// with status 70 and says so, because a test on another machine than it meant proves nothing.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

namespace fastsync::fake {

using Uuid = std::array<unsigned char, 16>;

struct Settings {
  std::vector<int> visible;  // ordinal in this process -> number on the machine
  std::chrono::microseconds max_delay{100};
  std::uint64_t seed = 0;
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;  // of each device
  int driver_version = 13000;
  int init_code = 0;
  bool refuse_memory_ipc = false;
  bool refuse_event_ipc = false;
};

[[nodiscard]] const Settings& settings();

// Of a device by its number on the machine: the same in every process.
[[nodiscard]] Uuid device_uuid(int number) noexcept;

}  // namespace fastsync::fake
