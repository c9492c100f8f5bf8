#include "binding/tensor_table.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <tuple>

#include "binding/dlpack.h"
#include "binding/torch_access.h"
#include "common/error.h"

namespace fastsync::binding {

namespace {
std::uint64_t next_layout_stamp() {
  static std::uint64_t last = 0;  // guarded by the interpreter lock
  return ++last;
}
}  // namespace

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

}  // namespace fastsync::binding
