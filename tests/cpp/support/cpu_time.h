// What work costs, whatever else the machine does: for tests of cost, which compare, and never of a clock on the wall.
#pragma once

#include <time.h>

namespace fastsync::testing {

// Of the calling thread.
inline double thread_cpu_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace fastsync::testing
