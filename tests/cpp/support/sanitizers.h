// What a build with a sanitizer changes for tests.
#pragma once

#include <gtest/gtest.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FASTSYNC_SANITIZED 1
#else
#define FASTSYNC_SANITIZED 0
#endif

// First in a test that leaves out on purpose what orders two threads, to show that wrong bytes come of it. A race detector
// ends the process at the race, before there are any. Nothing else is skipped under a sanitizer.
#if defined(__SANITIZE_THREAD__)
#define SKIP_PLANTED_RACE() GTEST_SKIP() << "plants a race on purpose, and this build stops at every race"
#else
#define SKIP_PLANTED_RACE() static_cast<void>(0)
#endif

namespace fastsync::testing {

// Of a test that repeats much work in one thread: less of it where a race detector watches each access for nothing.
constexpr int rounds_of_one_thread(int plain) {
#if defined(__SANITIZE_THREAD__)
  return (plain + 4) / 5;
#else
  return plain;
#endif
}

}  // namespace fastsync::testing
