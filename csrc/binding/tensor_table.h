// The caller's tensors, described once and looked at again on every sync.
//
// A TensorTable remembers, per name, where a tensor's bytes are and what they mean. refresh() compares the tensors of a
// new call with what it remembers: through torch's DLPack exchange function (no per-tensor Python), by an object's
// identity where that is enough, and by what the exchange function leaves out: lazy bits, and the end of the memory.
// Only what is new, changed or unusual is handed back to Python to be described there.
//
// Ownership: no reference to a tensor is kept, only weak ones: a caller that drops its weights after a sync frees them.
// Threads: the interpreter lock must be held, except for views(), bind() and finish().
// Errors: InvalidArgument / ManifestMismatch naming rank and tensor.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "bucket/manifest.h"
#include "bucket/packer.h"
#include "sync/weight_receiver.h"

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
  [[nodiscard]] Inside look_inside(PyObject* object) const noexcept;
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

class TensorTable {
 public:
  explicit TensorTable(int rank) : rank_(rank) {}
  ~TensorTable();
  TensorTable(const TensorTable&) = delete;
  TensorTable& operator=(const TensorTable&) = delete;

  // Returns the indices that Python must describe(). After those, check_names().
  py::list refresh(const py::list& names, const py::list& objects);
  void describe(std::size_t index, const std::string& dtype, const std::vector<std::int64_t>& shape,
                const py::object& byte_strides, std::uint32_t itemsize, std::uint64_t address, bool flip_real,
                bool flip_imag, bool is_complex, int device);
  // The CUDA ordinal that all tensors with bytes are on; -1: host memory; kNowhere: none has any. InvalidArgument naming
  // two that differ.
  static constexpr int kNowhere = -2;
  [[nodiscard]] int device();
  // Changes with whatever a table of addresses depends on; no two states of any tables share one.
  [[nodiscard]] std::uint64_t layout_stamp() const noexcept { return layout_stamp_; }
  // Something that goes into the manifest (a name, dtype, shape or tie) changed in the last refresh().
  [[nodiscard]] bool changed() const noexcept { return changed_; }

  // Source: finds names that share memory (and read it alike), and the manifest of it all. Throws InvalidArgument.
  void find_ties();
  [[nodiscard]] Manifest manifest() const;
  [[nodiscard]] std::span<const TensorView> views() const noexcept { return views_; }

  // Destination: refuses tensors that overlap themselves. Throws InvalidArgument naming the first.
  void check_destinations();

  [[nodiscard]] std::size_t size() const noexcept { return metas_.size(); }
  [[nodiscard]] const TensorMeta& meta(std::size_t i) const noexcept { return metas_[i]; }
  [[nodiscard]] const TensorView& view(std::size_t i) const noexcept { return views_[i]; }
  [[nodiscard]] const std::unordered_map<std::string_view, std::uint32_t>& index() const noexcept { return index_; }
  // Which entry a manifest's tensor goes to (-1: none), and the lists of the last whole match; valid for `fingerprint`
  // as long as names, shapes and dtypes here stay what they are.
  struct Match {
    std::uint64_t fingerprint = 0;
    std::uint64_t stamp = 0;  // 0: none
    std::vector<std::int64_t> entries;
    ReadyLists lists;
  };
  [[nodiscard]] const Match* remembered_match(std::uint64_t fingerprint) const noexcept {
    return match_.stamp == stamp_ && match_.fingerprint == fingerprint ? &match_ : nullptr;
  }
  void remember_match(Match match) {
    match_ = std::move(match);
    match_.stamp = stamp_;
  }
  // Pairs of entries that share at least one byte; recomputed when an address changed.
  [[nodiscard]] const std::vector<std::pair<std::uint32_t, std::uint32_t>>& overlaps() const noexcept {
    return overlaps_;
  }
  // Strides in elements, size-1 dimensions set to 0: comparable with Tie::strides.
  [[nodiscard]] KeptInts comparable(std::size_t i) const;
  [[nodiscard]] int rank() const noexcept { return rank_; }
  void clear();

 private:
  static constexpr std::int32_t kShortDims = 4;
  // What refresh() compares, in one place: two cache lines a tensor.
  struct Identity {
    PyObject* object = nullptr;  // borrowed: compared, never followed unless `weak` is alive
    PyObject* weak = nullptr;    // owned weak reference
    const std::byte* data = nullptr;
    const std::byte* end = nullptr;
    std::uint64_t keys = 0;
    std::uint32_t dtype_key = 0;
    std::int32_t ndim = -1;  // -1: has strides or many dimensions; the long comparison decides
    bool ambiguous = false;  // the dtype_key alone does not say
    std::int16_t device = -1;
    std::int64_t shape[kShortDims] = {};
  };
  void set_identity(std::size_t index, PyObject* object);
  void remember_form(std::size_t index, PyObject* object);
  [[nodiscard]] bool unchanged(std::size_t index, PyObject* object);
  void install(std::size_t index, TensorMeta&& meta, TensorView&& view, int device);
  // Throws InvalidArgument naming the rank and, where `why` does not, the tensor.
  [[noreturn]] void refuse(const TensorMeta& meta, const InvalidArgument& why, bool named) const;

  int rank_;
  std::vector<PyObject*> names_;  // owned; compared by identity first
  std::vector<Identity> identities_;
  std::vector<TensorMeta> metas_;
  std::vector<TensorView> views_;
  std::vector<KeptInts> element_strides_;
  std::vector<std::int16_t> devices_;
  std::optional<int> device_;  // of all of them, once looked at
  std::uint64_t layout_stamp_ = 0;
  std::unordered_map<std::string_view, std::uint32_t> index_;  // views of metas_' names, which stay where they are
  std::vector<std::pair<std::uint32_t, std::uint32_t>> overlaps_;
  bool changed_ = true;
  std::uint64_t stamp_ = 1;  // counts what changed
  Match match_;
  bool moved_ = true;     // an address, shape or stride changed since overlaps_ and ties were computed
  bool checked_ = false;  // check_destinations() passed and nothing changed since
};

// Destinations of a table, for WeightReceiver.
class TableBinder final : public DestinationBinder {
 public:
  TableBinder(TensorTable& table, bool strict, bool streaming)
      : table_(table), strict_(strict), streaming_(streaming) {}
  void bind(const Manifest& manifest, std::size_t first, std::size_t last, std::vector<TensorView>& views) override;
  void finish(const Manifest& manifest) override;
  [[nodiscard]] const ReadyLists& lists() const noexcept { return lists_; }
  [[nodiscard]] const TensorTable& table() const noexcept { return table_; }

 private:
  void check_sharing(const Manifest& manifest) const;
  TensorTable& table_;
  bool strict_;
  bool streaming_;
  std::vector<std::int64_t> found_;  // per table entry: manifest index, -1 if none yet
  std::vector<std::string> problems_;
  ReadyLists lists_;
};

// Destinations of a table for one share of a manifest that a TableBinder has bound as a whole: what fits and what is
// missing is settled, only the addresses are looked up. InternalError where the two do not belong together.
class ShareBinder final : public DestinationBinder {
 public:
  explicit ShareBinder(TensorTable& table) : table_(table) {}
  void bind(const Manifest& manifest, std::size_t first, std::size_t last, std::vector<TensorView>& views) override;
  void finish(const Manifest& /*manifest*/) override {}
  [[nodiscard]] const TensorTable& table() const noexcept { return table_; }

 private:
  TensorTable& table_;
};

}  // namespace fastsync::binding
