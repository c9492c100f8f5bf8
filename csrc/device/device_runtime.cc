#include "device/device_runtime.h"

#include "common/error.h"

namespace fastsync {
namespace {

[[noreturn]] void refuse(const DeviceRuntime& runtime, std::string_view what) {
  throw DeviceError(concat("the ", runtime.name(), " runtime cannot share ", what,
                           " with other processes; the ipc transport needs tensors on a device that can"));
}

}  // namespace

MemoryHandle DeviceRuntime::export_memory(const Allocation&) { refuse(*this, "memory"); }
Allocation DeviceRuntime::import_memory(const MemoryHandle&) { refuse(*this, "memory"); }
void DeviceRuntime::close_memory(const Allocation&) noexcept {}  // nothing can have been imported
void* DeviceRuntime::create_shared_event() { refuse(*this, "events"); }
EventHandle DeviceRuntime::export_event(void*) { refuse(*this, "events"); }
void* DeviceRuntime::import_event(const EventHandle&) { refuse(*this, "events"); }

}  // namespace fastsync
