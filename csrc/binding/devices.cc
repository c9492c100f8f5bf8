#include "binding/devices.h"

#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "comm/nccl/nccl_library.h"
#include "common/wait.h"
#include "device/buffer.h"
#include "device/cuda/cuda_runtime.h"

namespace fastsync::binding {

namespace py = pybind11;

namespace {
// Device memory of our own, for tensors that are handed to somebody who has no allocator for them.
// Filled by work on `stream`, behind which it is given back: an owner that lets go of a tensor does not know of the copy
// that is still queued. Where that does not end in time, the memory is left alone.
class DeviceMemory {
 public:
  DeviceMemory(std::shared_ptr<DeviceRuntime> runtime, std::uint64_t nbytes, std::uintptr_t stream)
      : runtime_(runtime),
        stream_(reinterpret_cast<void*>(stream)),
        buffer_(std::make_unique<Buffer>(Buffer::allocate(std::move(runtime), MemoryKind::kDevice, nbytes))) {}
  ~DeviceMemory() {
    const py::gil_scoped_release release;
    try {
      Wait wait(kPatience, nullptr);
      runtime_->synchronize_stream(runtime_->wrap_stream(stream_), wait);
    } catch (const Error&) {
      static_cast<void>(buffer_.release());
    }
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  [[nodiscard]] std::uintptr_t address() const noexcept { return reinterpret_cast<std::uintptr_t>(buffer_->data()); }

 private:
  static constexpr std::chrono::seconds kPatience{5};
  std::shared_ptr<DeviceRuntime> runtime_;
  void* stream_;
  std::unique_ptr<Buffer> buffer_;
};
}  // namespace

void bind_devices(py::module_& m) {
  m.def("cuda_unavailable_reason", &CudaRuntime::unavailable_reason, py::call_guard<py::gil_scoped_release>());
  m.def(
      "cuda_device_of",
      [](std::uintptr_t address) { return CudaRuntime::device_of(reinterpret_cast<const void*>(address)); },
      py::arg("address"));
  m.def("cuda_current_device", &CudaRuntime::current_device);
  m.def("cuda_is_fake", [] { return CudaDriver::get().is_fake(); });
  m.def(
      "nccl_unavailable_reason",
      [](const std::vector<std::string>& candidates) { return NcclLibrary::unavailable_reason(candidates); },
      py::arg("candidates"), py::call_guard<py::gil_scoped_release>());
  m.def("nccl_version", [] { return NcclLibrary::get().version_text(); });
  m.def("nccl_is_fake", [] { return NcclLibrary::get().is_fake(); });

  py::class_<DeviceRuntime, std::shared_ptr<DeviceRuntime>>(m, "DeviceRuntime")
      .def_property_readonly("name", [](const DeviceRuntime& r) { return std::string(r.name()); })
      .def_property_readonly("device_id", &DeviceRuntime::device_id)
      .def(
          "copy",
          [](DeviceRuntime& r, std::uintptr_t dst, std::uintptr_t src, std::uint64_t nbytes, std::uintptr_t stream) {
            r.copy(reinterpret_cast<std::byte*>(dst), reinterpret_cast<const std::byte*>(src), nbytes,
                   r.wrap_stream(reinterpret_cast<void*>(stream)));
          },
          py::arg("dst"), py::arg("src"), py::arg("nbytes"), py::arg("stream"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "synchronize",
          [](DeviceRuntime& r, std::uintptr_t stream, double timeout_s) {
            Wait wait(std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(timeout_s, 3.0e9) * 1e9)), nullptr);
            r.synchronize_stream(r.wrap_stream(reinterpret_cast<void*>(stream)), wait);
          },
          py::arg("stream"), py::arg("timeout_s"), py::call_guard<py::gil_scoped_release>());
  py::class_<CudaRuntime, DeviceRuntime, std::shared_ptr<CudaRuntime>>(m, "CudaRuntime")
      .def_property_readonly("ordinal", &CudaRuntime::ordinal)
      .def_property_readonly("counters", [](const CudaRuntime& r) {
        const auto c = r.counters();
        py::dict d;
        d["allocations"] = c.allocations;
        d["allocated_bytes"] = c.allocated_bytes;
        d["imports"] = c.imports;
        d["registrations"] = c.registrations;
        d["streams"] = c.streams;
        d["events"] = c.events;
        return d;
      });
  m.def("cuda_runtime", &CudaRuntime::get, py::arg("ordinal"), py::call_guard<py::gil_scoped_release>());
  py::class_<DeviceMemory>(m, "DeviceMemory")
      .def(py::init<std::shared_ptr<DeviceRuntime>, std::uint64_t, std::uintptr_t>(), py::arg("runtime"),
           py::arg("nbytes"), py::arg("stream"))
      .def_property_readonly("address", &DeviceMemory::address);
}

}  // namespace fastsync::binding
