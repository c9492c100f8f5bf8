// What stands behind the exported functions: the frame of every call, and the calls that need more than a line.
//
// Threads: thread-safe. Errors: results with a text in last_error(); nothing is thrown out of guarded().
#pragma once

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "doubles/common/fault_plan.h"
#include "doubles/nccl/communicator.h"
#include "doubles/nccl/nccl_types.h"
#include "doubles/nccl/report.h"

namespace fastsync::fake_nccl {

// Counts the call and asks the fault plan. True: the call ends here, with `*result`. `queued` gets the fault of what the
// call queues; null for a call that queues nothing: its fault happens here.
[[nodiscard]] bool ends_here(const char* symbol, ncclResult_t* result, fake::Fault* queued);

// Every exported function runs in this. No exception may leave a C function.
template <typename Body>
[[nodiscard]] ncclResult_t guarded(const char* symbol, fake::Fault* queued, const Body& body) {
  ncclResult_t result = ncclSuccess;
  try {
    return ends_here(symbol, &result, queued) ? result : body();
  } catch (const std::exception& error) {
    return failed(ncclSystemError, std::string(symbol) + ": " + error.what());
  }
}

// The answer to a handle that is no communicator.
[[nodiscard]] ncclResult_t unknown(const char* symbol);

[[nodiscard]] ncclResult_t init_rank(ncclComm_t* out, int nranks, const ncclUniqueId& id, int rank,
                                     const ncclConfig_t* config, const fake::Fault& fault);

// A split or a shrink: `taking_part` are the ranks of the parent that call it. Without blocking, `out` is written later,
// before the parent's state becomes ncclSuccess.
[[nodiscard]] ncclResult_t make_child(const std::shared_ptr<Communicator>& parent, std::vector<int> taking_part,
                                      int color, int key, ncclComm_t* out, const ncclConfig_t* config,
                                      const fake::Fault& fault);

// One collective, send or receive as it was called.
struct Call {
  const char* symbol;
  Kind kind;
  const void* source;
  void* target;
  std::size_t count;
  unsigned dtype;
  int peer;  // or root
  CUstream stream;
  fake::Fault fault;
};
[[nodiscard]] ncclResult_t enqueue(const Call& call, ncclComm_t handle);

}  // namespace fastsync::fake_nccl
