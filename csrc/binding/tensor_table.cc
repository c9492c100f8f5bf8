#include "binding/tensor_table.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <tuple>

namespace fastsync::binding {

namespace {

// DLPack's structures, declared from its specification (version 1.3; layout fixed within major version 1).
struct DlDevice {
  std::int32_t type;
  std::int32_t id;
};
struct DlDataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct DlTensor {
  void* data;
  DlDevice device;
  std::int32_t ndim;
  DlDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
struct DlExchangeHeader {
  std::uint32_t major;
  std::uint32_t minor;
  DlExchangeHeader* previous;
};
struct DlExchange {
  DlExchangeHeader header;
  void* allocate;
  void* managed_from_object;
  void* object_from_managed;
  int (*tensor_from_object)(void* object, void* tensor_out);
  void* current_stream;
};
struct DlManagedVersioned {
  std::uint32_t major;
  std::uint32_t minor;
  void* context;
  void (*deleter)(DlManagedVersioned*);
  std::uint64_t flags;
  DlTensor tensor;
};
constexpr std::int32_t kDlCpu = 1;
constexpr std::int32_t kDlCuda = 2;
constexpr std::int32_t kDlPinned = 3;

std::uint32_t dtype_key(const DlDataType& t) noexcept {
  return (std::uint32_t{t.code} << 24U) | (std::uint32_t{t.bits} << 16U) | t.lanes;
}

PyObject* interned(const char* text) {
  PyObject* const s = PyUnicode_InternFromString(text);
  if (s == nullptr) throw py::error_already_set();
  return s;
}

PyObject* dtype_name() {
  static PyObject* const name = interned("dtype");
  return name;
}
bool row_major(const std::int64_t* shape, const std::int64_t* strides, std::int32_t ndim) noexcept {
  if (strides == nullptr) return true;
  std::int64_t expected = 1;
  for (std::int32_t d = ndim - 1; d >= 0; --d) {
    if (shape[d] == 0) return true;
    if (shape[d] != 1 && strides[d] != expected) return false;
    expected *= shape[d];
  }
  return true;
}

std::string quoted_list(const std::vector<std::string>& names) {
  std::string out;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i == 8) return out + concat(", ... (", names.size(), " in all)");
    out += concat(i == 0 ? "'" : ", '", shown_name(names[i]), "'");
  }
  return out;
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

template <typename T>
T word_at(const void* object, std::size_t offset) noexcept {
  T value;
  static_assert(sizeof(T) == sizeof(void*));
  std::memcpy(&value, static_cast<const std::byte*>(object) + offset, sizeof(T));
  return value;
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

TorchAccess::Inside TorchAccess::look_inside(PyObject* object) const noexcept {
  const void* const implementation = word_at<const void*>(object, layout_.implementation);
  const void* const storage = word_at<const void*>(implementation, layout_.storage);
  return {word_at<std::uint64_t>(implementation, layout_.keys), word_at<const std::byte*>(storage, layout_.memory),
          word_at<std::int64_t>(storage, layout_.nbytes)};
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

namespace {
bool knows_device(const DlDevice& device) {
  return device.type == kDlCpu || device.type == kDlPinned || device.type == kDlCuda;
}
int ordinal_of(const DlDevice& device) { return device.type == kDlCuda ? device.id : -1; }
std::uint64_t next_layout_stamp() {
  static std::uint64_t last = 0;  // guarded by the interpreter lock
  return ++last;
}
}  // namespace

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

TensorTable::~TensorTable() { clear(); }

void TensorTable::clear() {
  for (PyObject* name : names_) Py_DECREF(name);
  for (auto& id : identities_) Py_XDECREF(id.weak);
  names_.clear();
  identities_.clear();
  metas_.clear();
  views_.clear();
  element_strides_.clear();
  devices_.clear();
  device_.reset();
  layout_stamp_ = next_layout_stamp();
  index_.clear();
  overlaps_.clear();
  changed_ = moved_ = true;
  ++stamp_;
  checked_ = false;
}

void TensorTable::set_identity(std::size_t index, PyObject* object) {
  Identity& id = identities_[index];
  Py_XDECREF(id.weak);
  id.object = object;
  id.weak = PyWeakref_NewRef(object, nullptr);
  if (id.weak == nullptr) {
    PyErr_Clear();
    id.object = nullptr;
  }
}

void TensorTable::remember_form(std::size_t index, PyObject* object) {
  Identity& id = identities_[index];
  const TensorView& view = views_[index];
  DlTensor t{};
  id.ndim = -1;
  id.keys = TorchAccess::get().look_inside(object).keys;
  if (!view.contiguous || view.nbytes == 0 || TorchAccess::get().exchange_(object, &t) != 0 || t.ndim > kShortDims)
    return;
  id.data = view.data;
  id.end = view.data + view.nbytes;
  id.device = devices_[index];
  id.dtype_key = dtype_key(t.dtype);
  const auto entry = TorchAccess::get().dtypes_.find(id.dtype_key);
  id.ambiguous = entry == TorchAccess::get().dtypes_.end() || entry->second.ambiguous;
  std::copy(t.shape, t.shape + t.ndim, id.shape);
  id.ndim = t.ndim;
}

// The same object as last time, alive ever since, describing the same memory.
bool TensorTable::unchanged(std::size_t index, PyObject* object) {
  const TorchAccess& torch = TorchAccess::get();
  Identity& id = identities_[index];
  if (!torch.usable() || id.object != object || PyWeakref_GetObject(id.weak) != object) return false;
  DlTensor t{};
  if (torch.exchange_(object, &t) != 0) {
    PyErr_Clear();
    return false;
  }
  // Lazy conjugation and its like change no address, and a storage may shrink in place.
  const TorchAccess::Inside inside = torch.look_inside(object);
  if (inside.keys != id.keys) return false;
  if (id.ndim >= 0) {  // the common case: contiguous, few dimensions
    if (t.ndim != id.ndim || static_cast<std::byte*>(t.data) + t.byte_offset != id.data ||
        dtype_key(t.dtype) != id.dtype_key || !std::equal(id.shape, id.shape + id.ndim, t.shape) ||
        !row_major(t.shape, t.strides, t.ndim) || !knows_device(t.device) || ordinal_of(t.device) != id.device) {
      return false;
    }
    if (id.ambiguous && torch.find_dtype(id.dtype_key, object) == nullptr) return false;
    return inside.holds(id.data, id.end);
  }
  const TensorMeta& meta = metas_[index];
  const TensorView& view = views_[index];
  if (static_cast<std::size_t>(t.ndim) != meta.shape.size() || !knows_device(t.device) ||
      ordinal_of(t.device) != devices_[index]) {
    return false;
  }
  if (!std::equal(meta.shape.begin(), meta.shape.end(), t.shape)) return false;
  const auto* const dtype = torch.find_dtype(dtype_key(t.dtype), object);
  if (dtype == nullptr || dtype->name != meta.dtype) return false;
  const auto& strides = element_strides_[index];
  if (strides.empty() ? !row_major(t.shape, t.strides, t.ndim)
                      : t.strides == nullptr || !std::equal(strides.begin(), strides.end(), t.strides)) {
    return false;
  }
  auto* const data = static_cast<std::byte*>(t.data) + t.byte_offset;
  // Other memory under the same object (x.data = y): everything about it is looked at anew.
  if (data != view.data) return false;
  const ByteRange touched = touched_range(view);
  return inside.holds(data + touched.low, data + touched.high);
}

void TensorTable::install(std::size_t index, TensorMeta&& meta, TensorView&& view, int device) {
  TensorMeta& old = metas_[index];
  const bool another =
      old.dtype != meta.dtype || old.shape != meta.shape || old.itemsize != meta.itemsize || old.nbytes != meta.nbytes;
  if (another) {
    changed_ = true;
    ++stamp_;
    meta.name = std::move(old.name);
    meta.tie = Tie{};
    old = std::move(meta);
    try {
      validate(old);
    } catch (const InvalidArgument& why) {
      refuse(old, why, true);
    }
  }
  auto& strides = element_strides_[index];
  strides.clear();
  // Looked at anew, and found where it was: what was made for its address still holds.
  if (!another && views_[index] == view && devices_[index] == device) return;
  views_[index] = std::move(view);
  devices_[index] = static_cast<std::int16_t>(device);
  device_.reset();
  layout_stamp_ = next_layout_stamp();
  moved_ = true;
  checked_ = false;
}

void TensorTable::refuse(const TensorMeta& meta, const InvalidArgument& why, bool named) const {
  const std::string tensor = named ? std::string() : concat("tensor '", shown_name(meta.name), "': ");
  throw InvalidArgument(concat("rank ", rank_, ": ", tensor, why.message()), rank_);
}

py::list TensorTable::refresh(const py::list& names, const py::list& objects) {
  const std::size_t n = names.size();
  changed_ = false;
  bool same_names = n == names_.size();
  for (std::size_t i = 0; same_names && i < n; ++i) {
    PyObject* const name = PyList_GET_ITEM(names.ptr(), static_cast<Py_ssize_t>(i));
    if (name == names_[i]) continue;
    // The text itself: a subclass of str may compare as it likes.
    same_names = PyUnicode_Check(name) && PyUnicode_Compare(name, names_[i]) == 0;
  }
  if (!same_names) {
    clear();
    names_.reserve(n);
    identities_.resize(n);
    metas_.resize(n);
    views_.resize(n);
    element_strides_.resize(n);
    devices_.resize(n, -1);
    for (std::size_t i = 0; i < n; ++i) {
      PyObject* const name = PyList_GET_ITEM(names.ptr(), static_cast<Py_ssize_t>(i));
      Py_ssize_t length = 0;
      const char* const text = PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, &length) : nullptr;
      if (text == nullptr) {
        PyErr_Clear();
        clear();
        throw InvalidArgument(
            concat("rank ", rank_, ": the name of tensor number ", i, " is ", py::repr(name).cast<std::string>(),
                   ", not a valid str (UTF-8 without lone surrogates)"),
            rank_);
      }
      if (static_cast<std::size_t>(length) > kMaxNameBytes) {
        const std::string shown = shown_name({text, static_cast<std::size_t>(length)});
        clear();
        throw InvalidArgument(concat("rank ", rank_, ": the name of tensor number ", i, " is longer than ",
                                     kMaxNameBytes, " bytes: '", shown, "'"),
                              rank_);
      }
      metas_[i].name.assign(text, static_cast<std::size_t>(length));
      Py_INCREF(name);
      names_.push_back(name);
    }
    for (std::size_t i = 0; i < n; ++i) {
      if (!index_.try_emplace(metas_[i].name, static_cast<std::uint32_t>(i)).second) {
        const std::string duplicate = shown_name(metas_[i].name);
        clear();
        throw InvalidArgument(
            concat("rank ", rank_, ": tensor name '", duplicate, "' comes twice; names must be unique"), rank_);
      }
    }
    changed_ = true;
    ++stamp_;
  }
  py::list slow;
  const TorchAccess& torch = TorchAccess::get();
  PyObject* const* const items = reinterpret_cast<PyListObject*>(objects.ptr())->ob_item;
  for (std::size_t i = 0; i < n; ++i) {
    PyObject* const object = PyList_GET_ITEM(objects.ptr(), static_cast<Py_ssize_t>(i));
    torch.prefetch(items, i, n);
    if (i + 16 < n) __builtin_prefetch(identities_[i + 16].weak);
    if (same_names && unchanged(i, object)) continue;
    TensorMeta meta;
    TensorView view;
    int device = -1;
    if (torch.describe(object, meta, view, device)) {
      install(i, std::move(meta), std::move(view), device);
      if (!views_[i].contiguous || views_[i].nbytes == 0) {
        DlTensor t{};
        if (torch.exchange_(object, &t) == 0 && t.strides != nullptr) {
          element_strides_[i].assign(t.strides, t.strides + t.ndim);
        }
      }
      set_identity(i, object);
      remember_form(i, object);
    } else {
      identities_[i].object = nullptr;
      slow.append(i);
    }
  }
  return slow;
}

void TensorTable::describe(std::size_t index, const std::string& dtype, const std::vector<std::int64_t>& shape,
                           const py::object& byte_strides, std::uint32_t itemsize, std::uint64_t address,
                           bool flip_real, bool flip_imag, bool is_complex, int device) {
  if (index >= metas_.size()) throw InternalError(concat("no tensor number ", index));
  TensorMeta meta;
  meta.dtype = dtype;
  meta.shape.assign(shape.begin(), shape.end());
  meta.itemsize = itemsize;
  meta.nbytes = itemsize;
  for (const auto d : shape) meta.nbytes *= static_cast<std::uint64_t>(d);
  TensorView view;
  view.data = reinterpret_cast<std::byte*>(address);
  view.nbytes = meta.nbytes;
  view.itemsize = itemsize;
  view.flip_real = flip_real ? 1 : 0;
  view.flip_imag = flip_imag ? 1 : 0;
  view.complex = is_complex;
  KeptInts strides;
  if (!byte_strides.is_none()) {
    view.contiguous = false;
    view.shape = shape;
    view.strides = byte_strides.cast<std::vector<std::int64_t>>();
    if (view.strides.size() != shape.size()) throw InternalError("strides and shape differ in length");
    for (const auto s : view.strides) strides.push_back(s / static_cast<std::int64_t>(itemsize));
    try {
      normalize(view);
    } catch (const InvalidArgument& why) {
      refuse(metas_[index], why, false);
    }
  }
  install(index, std::move(meta), std::move(view), device);
  element_strides_[index] = std::move(strides);
}

int TensorTable::device() {
  if (device_) return *device_;
  std::optional<std::size_t> first;
  const auto place = [](int ordinal) { return ordinal < 0 ? std::string("the CPU") : concat("cuda:", ordinal); };
  for (std::size_t i = 0; i < views_.size(); ++i) {
    if (views_[i].nbytes == 0) continue;  // no bytes, no place
    if (!first) first = i;
    if (devices_[i] == devices_[*first]) continue;
    throw InvalidArgument(
        concat("rank ", rank_, ": tensor '", shown_name(metas_[i].name), "' is on ", place(devices_[i]), ", tensor '",
               shown_name(metas_[*first].name), "' on ", place(devices_[*first]),
               "; the tensors of one sync must be on one device: move them, or sync them apart"),
        rank_);
  }
  device_ = first ? devices_[*first] : kNowhere;
  return *device_;
}

namespace {
struct Range {
  std::uint64_t low;
  std::uint64_t high;
  std::uint32_t index;
};
std::vector<Range> sorted_ranges(std::span<const TensorView> views) {
  std::vector<Range> ranges;
  ranges.reserve(views.size());
  for (std::size_t i = 0; i < views.size(); ++i) {
    if (views[i].nbytes == 0) continue;
    const ByteRange r = touched_range(views[i]);
    const auto base = reinterpret_cast<std::uint64_t>(views[i].data);
    ranges.push_back({base + static_cast<std::uint64_t>(r.low), base + static_cast<std::uint64_t>(r.high),
                      static_cast<std::uint32_t>(i)});
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.low != b.low ? a.low < b.low : a.index < b.index; });
  return ranges;
}

KeptInts row_major_strides(const KeptInts& shape) {
  KeptInts strides(shape.size());
  std::int64_t step = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    strides[d] = step;
    step *= std::max<std::int64_t>(shape[d], 1);
  }
  return strides;
}

// Strides of size-1 dimensions mean nothing, and torch fills them in differently.
KeptInts comparable_strides(const KeptInts& strides, const KeptInts& shape) {
  KeptInts out = strides.empty() ? row_major_strides(shape) : strides;
  for (std::size_t d = 0; d < out.size(); ++d) {
    if (shape[d] == 1) out[d] = 0;
  }
  return out;
}
}  // namespace

void TensorTable::find_ties() {
  if (!moved_) return;
  std::vector<Tie> ties(metas_.size());
  const auto ranges = sorted_ranges(views_);
  // Names that share memory but read it differently (one of them flips its sign bits) send different bytes for it: they
  // are in groups of their own, as destinations that share memory could not hold both.
  using Reading = std::tuple<std::uint8_t, std::uint8_t, std::string_view, std::uint64_t>;
  const auto reading = [&](std::uint32_t t) -> Reading {
    const TensorView& view = views_[t];
    if (view.flip_real == 0 && view.flip_imag == 0) return {};
    return {view.flip_real, view.flip_imag, metas_[t].dtype,
            reinterpret_cast<std::uint64_t>(view.data) % view.itemsize};
  };
  std::uint32_t groups = 0;
  for (std::size_t i = 0; i < ranges.size();) {
    std::uint64_t high = ranges[i].high;
    std::size_t end = i + 1;
    while (end < ranges.size() && ranges[end].low < high) high = std::max(high, ranges[end++].high);
    if (end - i > 1) {
      std::map<Reading, std::uint32_t> group_of;
      for (std::size_t k = i; k < end; ++k) {
        const std::uint32_t t = ranges[k].index;
        const auto [group, inserted] = group_of.try_emplace(reading(t), groups + 1);
        if (inserted) ++groups;
        ties[t].group = group->second;
        ties[t].byte_offset = reinterpret_cast<std::uint64_t>(views_[t].data) - ranges[i].low;
        ties[t].strides = comparable_strides(element_strides_[t], metas_[t].shape);
      }
    }
    i = end;
  }
  // Group numbers follow addresses, which differ from call to call: number them by first name instead.
  std::vector<std::uint32_t> renumber(groups + 1, 0);
  std::uint32_t next = 0;
  for (auto& tie : ties) {
    if (tie.group == 0) continue;
    if (renumber[tie.group] == 0) renumber[tie.group] = ++next;
    tie.group = renumber[tie.group];
  }
  for (std::size_t i = 0; i < ties.size(); ++i) {
    if (metas_[i].tie == ties[i]) continue;
    metas_[i].tie = std::move(ties[i]);
    changed_ = true;
    ++stamp_;
  }
  moved_ = false;
}

Manifest TensorTable::manifest() const {
  Manifest out;
  out.reserve(metas_.size());
  for (const TensorMeta& meta : metas_) {
    try {
      out.append(meta);
    } catch (const InvalidArgument& why) {
      refuse(meta, why, true);
    }
  }
  return out;
}

KeptInts TensorTable::comparable(std::size_t i) const {
  return comparable_strides(element_strides_[i], metas_[i].shape);
}

void TensorTable::check_destinations() {
  if (checked_) return;
  for (std::size_t i = 0; i < views_.size(); ++i) {
    if (!views_[i].contiguous && overlaps_itself(views_[i])) {
      throw InvalidArgument(
          concat("rank ", rank_, ": destination ", fastsync::describe(metas_[i]),
                 " overlaps itself (an expanded or overlapping view); give a tensor whose elements each "
                 "have their own memory, e.g. .clone()"),
          rank_);
    }
  }
  overlaps_.clear();
  const auto ranges = sorted_ranges(views_);
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    for (std::size_t k = i + 1; k < ranges.size() && ranges[k].low < ranges[i].high; ++k) {
      if (share_bytes(views_[ranges[i].index], views_[ranges[k].index])) {
        overlaps_.emplace_back(ranges[i].index, ranges[k].index);
      }
    }
  }
  checked_ = true;
}

// --- destinations ---------------------------------------------------------------------------------------------------

void TableBinder::bind(const Manifest& manifest, std::size_t first, std::size_t last, std::vector<TensorView>& views) {
  found_.resize(table_.size(), -1);
  views.reserve(last);
  if (!streaming_) {
    if (const TensorTable::Match* known = table_.remembered_match(manifest.fingerprint())) {
      for (std::size_t i = first; i < last; ++i) {
        const std::int64_t entry = known->entries[i];
        if (entry < 0) {
          views.emplace_back();
        } else {
          views.push_back(table_.view(static_cast<std::size_t>(entry)));
          found_[static_cast<std::size_t>(entry)] = static_cast<std::int64_t>(i);
        }
      }
      lists_.unexpected = known->lists.unexpected;
      return;
    }
  }
  for (std::size_t i = first; i < last; ++i) {
    const TensorMeta& sent = manifest[i];
    const auto it = table_.index().find(sent.name);
    if (it == table_.index().end()) {
      lists_.unexpected.emplace_back(sent.name);
      views.emplace_back();
      if (strict_ && streaming_) {
        throw ManifestMismatch(concat("rank ", table_.rank(), ": the source sends ", describe(sent),
                                      ", which has no destination here (strict=False skips such tensors)"),
                               table_.rank());
      }
      continue;
    }
    const TensorMeta& mine = table_.meta(it->second);
    if (mine.dtype != sent.dtype || mine.shape != sent.shape) {
      throw ManifestMismatch(
          concat("rank ", table_.rank(), ": tensor '", shown_name(sent.name), "': the source sends ", describe(sent),
                 ", the destination is ", describe(mine), "; ", mine.dtype != sent.dtype ? "dtypes" : "shapes",
                 " must be equal (nothing is cast or reshaped)"),
          table_.rank());
    }
    found_[it->second] = static_cast<std::int64_t>(i);
    views.push_back(table_.view(it->second));
    // An empty tensor has no fragment; a view without bytes is "no destination", which is the same thing here.
  }
  if (streaming_ && !table_.overlaps().empty()) {
    const auto [a, b] = table_.overlaps().front();
    throw InvalidArgument(
        concat("rank ", table_.rank(), ": destinations '", shown_name(table_.meta(a).name), "' and '",
               shown_name(table_.meta(b).name),
               "' share memory; with a generator as the source nothing says that they may: pass a mapping "
               "at the source, or separate tensors here"),
        table_.rank());
  }
}

void TableBinder::finish(const Manifest& manifest) {
  found_.resize(table_.size(), -1);
  for (std::size_t k = 0; k < found_.size(); ++k) {
    if (found_[k] < 0) lists_.missing.emplace_back(table_.meta(k).name);
  }
  if (strict_ && (!lists_.missing.empty() || !lists_.unexpected.empty())) {
    std::string text = concat("rank ", table_.rank(), ": ");
    if (!lists_.unexpected.empty()) {
      text += concat(lists_.unexpected.size(),
                     " tensor(s) of the source have no destination here (unexpected: ", quoted_list(lists_.unexpected),
                     ")");
    }
    if (!lists_.missing.empty()) {
      text += concat(lists_.unexpected.empty() ? "" : "; ", lists_.missing.size(),
                     " destination(s) are not sent by the source (missing: ", quoted_list(lists_.missing), ")");
    }
    throw ManifestMismatch(text + "; names are compared exactly, strict=False syncs what both have", table_.rank());
  }
  if (streaming_) return;
  check_sharing(manifest);
  if (table_.remembered_match(manifest.fingerprint()) != nullptr) return;
  TensorTable::Match match;
  match.fingerprint = manifest.fingerprint();
  match.entries.assign(manifest.size(), -1);
  for (std::size_t k = 0; k < found_.size(); ++k) {
    if (found_[k] >= 0) match.entries[static_cast<std::size_t>(found_[k])] = static_cast<std::int64_t>(k);
  }
  match.lists = lists_;
  table_.remember_match(std::move(match));
}

void TableBinder::check_sharing(const Manifest& manifest) const {
  for (const auto& [a, b] : table_.overlaps()) {
    if (found_[a] < 0 || found_[b] < 0) {
      // One of the two is not written, but the other write would change it.
      if (found_[a] < 0 && found_[b] < 0) continue;
    } else {
      const Tie& sa = manifest[static_cast<std::size_t>(found_[a])].tie;
      const Tie& sb = manifest[static_cast<std::size_t>(found_[b])].tie;
      const auto here =
          reinterpret_cast<std::uint64_t>(table_.view(b).data) - reinterpret_cast<std::uint64_t>(table_.view(a).data);
      const auto there = sb.byte_offset - sa.byte_offset;
      if (sa.group != 0 && sa.group == sb.group && here == there && table_.comparable(a) == sa.strides &&
          table_.comparable(b) == sb.strides) {
        continue;
      }
    }
    throw InvalidArgument(
        concat("rank ", table_.rank(), ": destinations '", shown_name(table_.meta(a).name), "' and '",
               shown_name(table_.meta(b).name),
               "' share memory, but the source's tensors of these names do not share it in the same way; "
               "one would overwrite the other: give them separate memory, or tie them on both sides"),
        table_.rank());
  }
}

void ShareBinder::bind(const Manifest& manifest, std::size_t first, std::size_t last, std::vector<TensorView>& views) {
  views.reserve(last);
  for (std::size_t i = first; i < last; ++i) {
    const auto it = table_.index().find(manifest[i].name);
    if (it == table_.index().end()) {
      views.emplace_back();
      continue;
    }
    const TensorView& view = table_.view(it->second);
    if (view.nbytes != manifest[i].nbytes) {
      throw InternalError(concat("share entry ", describe(manifest[i]), " was bound to ", view.nbytes, " bytes"));
    }
    views.push_back(view);
  }
}

}  // namespace fastsync::binding
