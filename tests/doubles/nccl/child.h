// Splitting and shrinking: the ranks of a communicator agree, through its window, on who makes up the new one.
//
// Threads: runs on the child's service thread. Errors: results with a text; ncclInProgress when it was told to stop.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "doubles/nccl/rendezvous.h"

namespace fastsync::fake_nccl {

struct ChildPlace {
  int rank = -1;  // -1: the color was "none"
  int nranks = 0;
  ncclUniqueId id{};
};

// Every rank of `taking_part` (ranks of the parent) calls it with the same number. Ranks of one color make up one child,
// ordered by key, then by their old rank; its rank 0 makes the id.
[[nodiscard]] ncclResult_t agree_on_child(const Mesh& parent, std::uint64_t number, int color, int key,
                                          const std::vector<int>& taking_part, const std::function<bool()>& must_stop,
                                          ChildPlace* place, std::string* why);

}  // namespace fastsync::fake_nccl
