// How long tests wait, and where sanitizers make everything slower.
#pragma once

#include <chrono>

#include "support/sanitizers.h"

namespace fastsync::testing {

// Long enough for a loaded machine under a sanitizer, short enough to end a broken test.
inline constexpr std::chrono::seconds kLongTimeout{30};
// How long anything that should happen at once may take.
inline constexpr std::chrono::milliseconds kAtOnce{FASTSYNC_SANITIZED != 0 ? 1000 : 200};

}  // namespace fastsync::testing
