// ExternalOps over a torch.distributed process group.
//
// Every call is made from here and not from Python code, because an exception of a signal handler (Ctrl-C) can come
// between any two instructions of Python code: a broadcast would be in flight of which nobody knows, writing to memory
// that is then freed. What is called here is torch's own compiled code, which runs no handlers; signals are looked at by
// the hook of the wait, where nothing is half done.
//
// Ownership: the group and the operations in flight. Operations that are given up are handed to `retire` with the memory
// they write to, when the ops go. Threads: the interpreter lock is taken for each call; the last reference may be let
// go of without it. Errors: CommError where a broadcast cannot be started or failed.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "comm/external/external_communicator.h"

namespace fastsync::binding {

class ProcessGroupOps {
 public:
  // `driver`: group, options, uint8 (torch's dtype), frombuffer (torch's function), retire(group, works, memory).
  explicit ProcessGroupOps(const pybind11::object& driver);
  ~ProcessGroupOps();
  ProcessGroupOps(const ProcessGroupOps&) = delete;
  ProcessGroupOps& operator=(const ProcessGroupOps&) = delete;

  [[nodiscard]] static ExternalOps make(const std::shared_ptr<ProcessGroupOps>& self);
  // Keeps the buckets for as long as an operation may write to them.
  void keep(std::shared_ptr<const Buffer> memory) { memory_ = std::move(memory); }

 private:
  struct State;
  std::unique_ptr<State> state_;
  std::shared_ptr<const Buffer> memory_;
};

}  // namespace fastsync::binding
