// What a thread has called since ncclGroupStart(). A call outside of a group is a group of one.
//
// Nothing happens before the outermost ncclGroupEnd(): then communicators join together, and the operations of one
// communicator are queued as one. An error inside a group cancels all of it, and is what ncclGroupEnd() returns.
//
// Threads: one group a thread.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "doubles/nccl/communicator.h"

namespace fastsync::fake_nccl {

class Group {
 public:
  [[nodiscard]] static Group& of_thread();

  void start() noexcept { ++depth_; }
  [[nodiscard]] ncclResult_t end();

  // Between start() and end().
  void add(std::shared_ptr<Communicator> communicator, const Operation& operation);
  // Has been started; `out` gets null if it fails.
  void add_joining(std::shared_ptr<Communicator> communicator, ncclComm_t* out);
  // Keeps an error for end(). Returns `result`.
  ncclResult_t note(ncclResult_t result) noexcept;

 private:
  struct Member {
    std::shared_ptr<Communicator> communicator;
    std::vector<Operation> operations;
  };
  struct Joining {
    std::shared_ptr<Communicator> communicator;
    ncclComm_t* out;
  };
  [[nodiscard]] static ncclResult_t check(const std::vector<Member>& members, const std::vector<Joining>& joining);
  [[nodiscard]] static ncclResult_t wait_for(const std::vector<Joining>& joining);
  static void give_up(const std::vector<Joining>& joining);

  int depth_ = 0;
  ncclResult_t error_ = ncclSuccess;
  std::vector<Member> members_;
  std::vector<Joining> joining_;
};

// The group of a call that may stand outside of one. Ends with the scope, also where something was thrown.
class GroupOfOne {
 public:
  GroupOfOne() noexcept { Group::of_thread().start(); }
  ~GroupOfOne() {
    if (open_) (void)end(ncclSystemError);
  }
  GroupOfOne(const GroupOfOne&) = delete;
  GroupOfOne& operator=(const GroupOfOne&) = delete;
  // With how the call went so far. Returns how it went with the group, if the group ended here.
  ncclResult_t end(ncclResult_t result);

 private:
  bool open_ = true;
};

}  // namespace fastsync::fake_nccl
