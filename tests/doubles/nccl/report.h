// What the double remembers about itself: its journal, and the text of the last error.
//
// Threads: thread-safe.
#pragma once

#include <string>

#include "doubles/common/journal.h"
#include "doubles/nccl/nccl_types.h"

namespace fastsync::fake_nccl {

// Of this process; written at its exit if that was asked for.
[[nodiscard]] fake::Journal& journal();

// Keeps `text` for ncclGetLastError(), as NCCL does: one text a process, the newest one. Returns `result`.
ncclResult_t failed(ncclResult_t result, std::string text);
// Stays valid until the calling thread asks again.
[[nodiscard]] const char* last_error();

}  // namespace fastsync::fake_nccl
