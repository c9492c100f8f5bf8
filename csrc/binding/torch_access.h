// Looking at torch's tensors without Python: through its DLPack exchange function, and, for what that leaves out, into the
// objects themselves, at places that are learned from examples and are not used where the examples do not agree.
//
// Ownership: torch's classes and dtypes are kept alive for ever, as torch does; no tensor is.
// Threads: the interpreter lock must be held.
// Errors: what cannot be told is left to Python (describe() says false); it never throws InvalidArgument.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "bucket/manifest.h"
#include "bucket/packer.h"

namespace fastsync::binding {

namespace py = pybind11;

// What refresh() and push() need to know of torch; set once by the Python package.
class TorchAccess {
 public:
  static TorchAccess& get();
  // `exchange`: the capsule torch.Tensor.__dlpack_c_exchange_api__, or None when this torch has none.
  void configure(const py::object& exchange, const py::tuple& plain_types);
  // A tensor, and what torch itself says about it.
  struct Example {
    std::uint64_t object;          // address
    std::uint64_t implementation;  // address
    std::uint64_t storage;         // address
    std::uint64_t keys;            // dispatch keys: lazy conjugation, functional wrappers and the like show there
    std::uint64_t memory;          // first address of the storage's memory
    std::uint64_t nbytes;          // of the storage
  };
  // Learns from examples where a tensor object keeps those; a tensor whose keys are not all among `plain_keys` is left
  // to Python. False: no such places (in a future torch, say), and everything is left to Python.
  bool learn_layout(const std::vector<Example>& examples, std::uint64_t plain_keys);
  // Asks for the memory behind objects[i + ...], which lies scattered over the heap, before it is needed.
  void prefetch(PyObject* const* objects, std::size_t i, std::size_t n) const noexcept;
  // Learns which DLPack dtype stands for torch's `name`, from an example. Several of torch's dtypes may look the same
  // there (uint8 and uint1...7): the first one learned is recognised by its dtype object, the others are left to Python.
  void learn_dtype(const py::handle& example, const std::string& name, std::uint32_t itemsize);
  // Fills meta (all but the name), view and device (a CUDA ordinal, -1: host) for a plain torch tensor; false: let
  // Python describe it.
  [[nodiscard]] bool describe(const py::handle& object, TensorMeta& meta, TensorView& view, int& device) const;

 private:
  struct DtypeEntry {
    KeptText name;
    std::uint32_t itemsize = 0;
    PyObject* object = nullptr;  // torch's dtype; kept alive for ever, as torch does
    bool ambiguous = false;      // then ask the tensor for its dtype
  };
  // Byte offsets inside torch's objects.
  struct Layout {
    std::size_t implementation = 0;  // in the Python object; 0: the layout is not known
    std::size_t storage = 0;         // in the implementation
    std::size_t keys = 0;            // in the implementation
    std::size_t memory = 0;          // in the storage
    std::size_t nbytes = 0;          // in the storage
  };
  // What the exchange function leaves out, for an object of a plain type.
  struct Inside {
    std::uint64_t keys;
    const std::byte* memory;
    std::int64_t nbytes;  // negative or absurd where torch does not know
    // A storage may have been shrunk or emptied since the tensor was made.
    [[nodiscard]] bool holds(const std::byte* low, const std::byte* high) const noexcept {
      return low == high || (memory != nullptr && memory <= low && high - memory <= nbytes);
    }
  };
  [[nodiscard]] bool usable() const noexcept { return exchange_ != nullptr && layout_.implementation != 0; }
  [[nodiscard]] Inside look_inside(PyObject* object) const noexcept {
    const void* const implementation = word_at<const void*>(object, layout_.implementation);
    const void* const storage = word_at<const void*>(implementation, layout_.storage);
    return {word_at<std::uint64_t>(implementation, layout_.keys), word_at<const std::byte*>(storage, layout_.memory),
            word_at<std::int64_t>(storage, layout_.nbytes)};
  }
  template <typename T>
  [[nodiscard]] static T word_at(const void* object, std::size_t offset) noexcept {
    T value;
    static_assert(sizeof(T) == sizeof(void*));
    std::memcpy(&value, static_cast<const std::byte*>(object) + offset, sizeof(T));
    return value;
  }
  [[nodiscard]] const DtypeEntry* find_dtype(std::uint32_t key, PyObject* object) const;
  int (*exchange_)(void*, void*) = nullptr;
  std::vector<PyObject*> plain_types_;  // kept alive for ever: they are torch's classes
  std::unordered_map<std::uint32_t, DtypeEntry> dtypes_;
  Layout layout_;
  std::uint64_t plain_keys_ = 0;
  friend class TensorTable;
};

// The flags of a fresh DLPack capsule; none where it is of the kind that has none.
inline constexpr std::uint64_t kDlpackReadOnly = 1;
inline constexpr std::uint64_t kDlpackCopied = 2;
[[nodiscard]] std::uint64_t dlpack_flags(const py::handle& capsule);

}  // namespace fastsync::binding
