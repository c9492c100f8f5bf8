// How long tests wait, and where sanitizers make everything slower.
#pragma once

#include <chrono>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FASTSYNC_SANITIZED 1
#else
#define FASTSYNC_SANITIZED 0
#endif

namespace fastsync::testing {

// Long enough for a loaded machine under a sanitizer, short enough to end a broken test.
inline constexpr std::chrono::seconds kLongTimeout{30};
// How long anything that should happen at once may take.
inline constexpr std::chrono::milliseconds kAtOnce{FASTSYNC_SANITIZED != 0 ? 1000 : 200};

}  // namespace fastsync::testing
