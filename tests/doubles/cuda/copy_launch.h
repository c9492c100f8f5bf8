// The copy kernel on the CPU: checks every range that a launch would touch, then runs the kernel's own body.
//
// Threads: runs on the stream's worker. Errors: CUDA_ERROR_ILLEGAL_ADDRESS for a range that is out of the rules, with the
// violation recorded, as a GPU would fault; CUDA_ERROR_MISALIGNED_ADDRESS for an access that a GPU would trap.
#pragma once

#include <cuda.h>

#include "device/copy_args.h"
#include "doubles/cuda/stream.h"

namespace fastsync::fake {

[[nodiscard]] CUresult run_copy(fastsync_fake_op& op, CopyDirection direction, const CopyArgs& args);

}  // namespace fastsync::fake
