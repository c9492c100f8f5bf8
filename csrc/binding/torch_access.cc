#include "binding/torch_access.h"

#include <algorithm>
#include <utility>

#include "binding/dlpack.h"
#include "bucket/strided.h"
#include "common/error.h"

namespace fastsync::binding {

namespace {

PyObject* interned(const char* text) {
  PyObject* const s = PyUnicode_InternFromString(text);
  if (s == nullptr) throw py::error_already_set();
  return s;
}

PyObject* dtype_name() {
  static PyObject* const name = interned("dtype");
  return name;
}

}  // namespace

TorchAccess& TorchAccess::get() {
  static TorchAccess access;
  return access;
}

void TorchAccess::configure(const py::object& exchange, const py::tuple& plain_types) {
  exchange_ = nullptr;
  dtypes_.clear();
  if (!exchange.is_none()) {
    const auto* api = static_cast<const DlExchange*>(PyCapsule_GetPointer(exchange.ptr(), "dlpack_exchange_api"));
    if (api == nullptr) throw py::error_already_set();
    if (api->header.major == 1) exchange_ = api->tensor_from_object;
  }
  plain_types_.clear();
  for (const auto& type : plain_types) {
    Py_INCREF(type.ptr());
    plain_types_.push_back(type.ptr());
  }
}

namespace {
using ExampleField = std::uint64_t TorchAccess::Example::*;

// The offset of the one word that holds `field` in the object at `base` of every example; 0 if there is no such word.
std::size_t common_offset(const std::vector<TorchAccess::Example>& examples, ExampleField base, ExampleField field,
                          std::size_t size) {
  for (std::size_t offset = sizeof(void*); offset + sizeof(void*) <= size; offset += sizeof(void*)) {
    const auto holds = [&](const TorchAccess::Example& e) {
      return std::memcmp(reinterpret_cast<const std::byte*>(e.*base) + offset, &(e.*field), sizeof(void*)) == 0;
    };
    if (std::all_of(examples.begin(), examples.end(), holds)) return offset;
  }
  return 0;
}
}  // namespace

bool TorchAccess::learn_layout(const std::vector<Example>& examples, std::uint64_t plain_keys) {
  layout_ = {};
  plain_keys_ = plain_keys;
  // Two equal values would let a wrong place pass for the right one.
  const auto varies = [&](ExampleField field) {
    return std::any_of(examples.begin(), examples.end(), [&](const Example& e) {
      return std::any_of(examples.begin(), examples.end(),
                         [&](const Example& other) { return e.*field != other.*field; });
    });
  };
  for (const ExampleField field :
       {&Example::implementation, &Example::storage, &Example::keys, &Example::memory, &Example::nbytes}) {
    if (!varies(field)) return false;
  }
  // No further than these objects reach in every torch: 16 bytes of PyObject and some more, 192 bytes, 64 bytes.
  Layout found;
  std::size_t size = 128;
  for (const Example& e : examples) {
    const auto* const object = reinterpret_cast<const PyObject*>(e.object);
    size = std::min(size, static_cast<std::size_t>(Py_TYPE(object)->tp_basicsize));
  }
  found.implementation = common_offset(examples, &Example::object, &Example::implementation, size);
  found.storage = common_offset(examples, &Example::implementation, &Example::storage, 64);
  found.keys = common_offset(examples, &Example::implementation, &Example::keys, 192);
  found.memory = common_offset(examples, &Example::storage, &Example::memory, 64);
  found.nbytes = common_offset(examples, &Example::storage, &Example::nbytes, 64);
  if (found.implementation != 0 && found.storage != 0 && found.keys != 0 && found.memory != 0 && found.nbytes != 0) {
    layout_ = found;
  }
  return layout_.implementation != 0;
}

void TorchAccess::prefetch(PyObject* const* objects, std::size_t i, std::size_t n) const noexcept {
  // Three steps of a pointer chase, each far enough ahead of the next.
  if (i + 24 < n) __builtin_prefetch(objects[i + 24]);
  if (layout_.implementation == 0) return;
  const auto implementation = [&](std::size_t k) -> const char* {
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(objects[k]));
    if (std::find(plain_types_.begin(), plain_types_.end(), type) == plain_types_.end()) return nullptr;
    return word_at<const char*>(objects[k], layout_.implementation);
  };
  if (i + 16 < n) {
    if (const char* const p = implementation(i + 16)) {
      for (int line = 0; line < 4; ++line) __builtin_prefetch(p + line * 64);
    }
  }
  if (i + 8 < n) {
    if (const char* const p = implementation(i + 8)) {
      const char* const storage = word_at<const char*>(p, layout_.storage);
      __builtin_prefetch(storage);
      __builtin_prefetch(storage + 64);
    }
  }
}

void TorchAccess::learn_dtype(const py::handle& example, const std::string& name, std::uint32_t itemsize) {
  if (exchange_ == nullptr) return;
  DlTensor t{};
  if (exchange_(example.ptr(), &t) != 0) {
    PyErr_Clear();
    return;
  }
  PyObject* const dtype = PyObject_GetAttr(example.ptr(), dtype_name());
  if (dtype == nullptr) throw py::error_already_set();
  const auto [it, inserted] =
      dtypes_.try_emplace(dtype_key(t.dtype), DtypeEntry{KeptText(name), itemsize, dtype, false});
  if (!inserted) {
    it->second.ambiguous = true;
    Py_DECREF(dtype);
  }
}

const TorchAccess::DtypeEntry* TorchAccess::find_dtype(std::uint32_t key, PyObject* object) const {
  const auto it = dtypes_.find(key);
  if (it == dtypes_.end()) return nullptr;
  if (it->second.ambiguous) {
    PyObject* const dtype = PyObject_GetAttr(object, dtype_name());
    if (dtype == nullptr) {
      PyErr_Clear();
      return nullptr;
    }
    Py_DECREF(dtype);
    if (dtype != it->second.object) return nullptr;
  }
  return &it->second;
}

bool TorchAccess::describe(const py::handle& object, TensorMeta& meta, TensorView& view, int& device) const {
  if (!usable()) return false;
  PyObject* const o = object.ptr();
  if (std::find(plain_types_.begin(), plain_types_.end(), reinterpret_cast<PyObject*>(Py_TYPE(o))) ==
      plain_types_.end()) {
    return false;
  }
  DlTensor t{};
  if (exchange_(o, &t) != 0) {
    PyErr_Clear();
    return false;
  }
  if (!knows_device(t.device) || static_cast<std::size_t>(t.ndim) > kMaxDims) return false;
  device = ordinal_of(t.device);
  const DtypeEntry* const dtype = find_dtype(dtype_key(t.dtype), o);
  if (dtype == nullptr) return false;
  const Inside inside = look_inside(o);
  if ((inside.keys & ~plain_keys_) != 0) return false;
  meta.dtype = dtype->name;
  meta.itemsize = dtype->itemsize;
  meta.shape.assign(t.shape, t.shape + t.ndim);
  meta.nbytes = meta.itemsize;
  for (const auto d : meta.shape) meta.nbytes *= static_cast<std::uint64_t>(d);
  view = TensorView{};
  view.data = static_cast<std::byte*>(t.data) + t.byte_offset;
  view.nbytes = meta.nbytes;
  view.itemsize = meta.itemsize;
  if (!row_major(t.shape, t.strides, t.ndim)) {
    view.contiguous = false;
    view.shape.assign(meta.shape.begin(), meta.shape.end());
    view.strides.resize(meta.shape.size());
    for (std::int32_t d = 0; d < t.ndim; ++d) {
      view.strides[static_cast<std::size_t>(d)] = t.strides[d] * static_cast<std::int64_t>(meta.itemsize);
    }
    try {
      normalize(view);
    } catch (const InvalidArgument&) {
      return false;  // Python says of which tensor
    }
  }
  const ByteRange touched = touched_range(view);
  return inside.holds(view.data + touched.low, view.data + touched.high);
}

std::uint64_t dlpack_flags(const py::handle& capsule) {
  constexpr char kName[] = "dltensor_versioned";
  if (PyCapsule_IsValid(capsule.ptr(), kName) == 0) return 0;
  const auto* const managed = static_cast<const DlManagedVersioned*>(PyCapsule_GetPointer(capsule.ptr(), kName));
  return managed->major == 1 ? managed->flags : 0;
}

}  // namespace fastsync::binding
