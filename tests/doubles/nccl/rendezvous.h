// How ranks find each other: a unique id is the name of an abstract Unix socket, served by a thread of the process that
// made the id. Nothing has a name on disk, in /dev/shm or on a port, and nothing outlives the processes.
//
// Every rank connects and says who it is. When all have come, the server compares them, and answers each with what it
// needs from there on: the window, and a socket to every other rank, whose end is that rank's death notice. Or it refuses
// all of them with one reason. A rank that never comes keeps the others waiting for ever, as with NCCL.
//
// Threads: thread-safe. Errors: results with a text, as NCCL has them; nothing is thrown.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/owned_fd.h"
#include "doubles/nccl/device.h"
#include "doubles/nccl/nccl_types.h"
#include "doubles/nccl/window.h"

namespace fastsync::fake_nccl {

struct Member {
  int rank = 0;
  int nranks = 0;
  int version = 0;
  DeviceUuid uuid{};
  bool may_share_device = false;
};

// What a rank holds of its communicator.
struct Mesh {
  int rank = 0;
  int nranks = 0;
  std::unique_ptr<Window> window;
  std::vector<OwnedFd> peers;  // by rank; none for the rank itself
};

// Makes an id and starts its server.
[[nodiscard]] ncclResult_t open_rendezvous(ncclUniqueId* id, std::string* why);

// This process has no more use for `id`: its server, if it is here, ends when no rank waits there any more (ranks of other
// processes go on waiting for those that never come, as with NCCL). May be called for any id, at any time.
void close_rendezvous(const ncclUniqueId& id) noexcept;

[[nodiscard]] bool is_unique_id(const ncclUniqueId& id) noexcept;

// Waits until all ranks are there, or until `wake_fd` is readable (ncclInProgress then).
[[nodiscard]] ncclResult_t join_rendezvous(const ncclUniqueId& id, const Member& member, int wake_fd, Mesh* mesh,
                                           std::string* why);

}  // namespace fastsync::fake_nccl
