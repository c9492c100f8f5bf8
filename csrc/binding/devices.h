// Devices as Python sees them: whether there are any, whose memory an address is, and copies for what is lent.
#pragma once

#include <pybind11/pybind11.h>

namespace fastsync::binding {

void bind_devices(pybind11::module_& m);

}  // namespace fastsync::binding
