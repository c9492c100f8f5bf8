// Reading ncclConfig_t as NCCL does.
#pragma once

#include <string>

#include "doubles/nccl/nccl_types.h"

namespace fastsync::fake_nccl {

// Copies what both sides know (by size), refuses another magic and values out of range, and ignores fields that are newer
// than the version that the caller claims. Null: all defaults.
[[nodiscard]] ncclResult_t read_config(const ncclConfig_t* config, int version, ncclConfig_t* read, std::string* why);

}  // namespace fastsync::fake_nccl
