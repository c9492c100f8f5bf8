#include "binding/process_group.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "common/error.h"

namespace fastsync::binding {

namespace py = pybind11;
using fastsync::concat;

namespace {
struct Operation {
  py::object work;
  py::object tensor;
};

bool is_completed(const Operation& operation) { return operation.work.attr("is_completed")().cast<bool>(); }

std::string text_of(const py::error_already_set& error) { return py::str(error.value()).cast<std::string>(); }
}  // namespace

struct ProcessGroupOps::State {
  py::object group;
  py::object options;
  py::object dtype;
  py::object frombuffer;
  py::object retire;
  py::object timedelta;
  std::map<std::uint64_t, Operation> operations;
  std::vector<Operation> given_up;
  std::uint64_t next = 1;

  std::uint64_t start(std::byte* data, std::uint64_t nbytes) {
    Operation operation;
    operation.tensor = frombuffer(py::memoryview::from_memory(data, static_cast<py::ssize_t>(nbytes), false),
                                  py::arg("dtype") = dtype);
    py::list tensors;
    tensors.append(operation.tensor);
    const auto place = operations.emplace(next, Operation{}).first;  // before it runs: nothing may fail afterwards
    try {
      operation.work = group.attr("broadcast")(tensors, options);
    } catch (py::error_already_set& error) {
      operations.erase(place);
      throw CommError(concat("gloo: cannot start a broadcast of ", nbytes, " bytes: ", text_of(error)));
    }
    place->second = std::move(operation);
    return next++;
  }

  bool wait(std::uint64_t handle, std::chrono::milliseconds timeout) {
    const Operation& operation = operations.at(handle);
    try {
      // A timeout of ours: unlike the operation's own it leaves the group as it is.
      operation.work.attr("wait")(timedelta(0, 0, 0, std::max<std::int64_t>(1, timeout.count())));
    } catch (py::error_already_set& first) {
      if (!first.matches(PyExc_RuntimeError)) throw;
      if (!is_completed(operation)) return false;
      // It ended, perhaps between our timeout and the question: what it says now is its own outcome.
      try {
        operation.work.attr("wait")();
      } catch (py::error_already_set& error) {
        throw CommError(concat("gloo: a broadcast failed: ", text_of(error)));
      }
    }
    return true;
  }

  void drop(std::uint64_t handle) {
    auto node = operations.extract(handle);
    if (!node.empty() && !is_completed(node.mapped())) given_up.push_back(std::move(node.mapped()));
  }
};

ProcessGroupOps::ProcessGroupOps(const py::object& driver) : state_(std::make_unique<State>()) {
  state_->group = driver.attr("group");
  state_->options = driver.attr("options");
  state_->dtype = driver.attr("uint8");
  state_->frombuffer = driver.attr("frombuffer");
  state_->retire = driver.attr("retire");
  state_->timedelta = py::module_::import("datetime").attr("timedelta");
}

ProcessGroupOps::~ProcessGroupOps() {
  if (Py_IsInitialized() == 0) {
    (void)state_.release();  // the process ends, and with it whatever still runs
    return;
  }
  const py::gil_scoped_acquire gil;
  try {
    py::list pending;
    for (auto& [handle, operation] : state_->operations) {
      if (operation.work && !is_completed(operation)) pending.append(py::make_tuple(operation.work, operation.tensor));
    }
    for (const Operation& operation : state_->given_up) {
      if (!is_completed(operation)) pending.append(py::make_tuple(operation.work, operation.tensor));
    }
    if (pending.empty()) {
      state_.reset();
      return;
    }
    const auto memory = py::capsule(new std::shared_ptr<const Buffer>(memory_),
                                    [](void* p) { delete static_cast<std::shared_ptr<const Buffer>*>(p); });
    // Whatever happens to the call: an operation that runs keeps its memory.
    pending.inc_ref();
    memory.inc_ref();
    state_->retire(state_->group, pending, memory);
    pending.dec_ref();
    memory.dec_ref();
    state_.reset();
  } catch (...) {  // interrupted, or no thread to be had: they are kept for ever
    (void)state_.release();
  }
}

ExternalOps ProcessGroupOps::make(const std::shared_ptr<ProcessGroupOps>& self) {
  ExternalOps ops;
  ops.start = [self](std::byte* data, std::uint64_t nbytes) {
    const py::gil_scoped_acquire gil;
    return self->state_->start(data, nbytes);
  };
  ops.wait = [self](std::uint64_t handle, std::chrono::milliseconds timeout) {
    const py::gil_scoped_acquire gil;
    return self->state_->wait(handle, timeout);
  };
  ops.drop = [self](std::uint64_t handle) {
    const py::gil_scoped_acquire gil;
    self->state_->drop(handle);
  };
  return ops;
}

}  // namespace fastsync::binding
