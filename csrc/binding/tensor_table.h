// The caller's tensors, described once and looked at again on every sync.
//
// A TensorTable remembers, per name, where a tensor's bytes are and what they mean. refresh() compares the tensors of a
// new call with what it remembers: through torch's DLPack exchange function (no per-tensor Python), by an object's
// identity where that is enough, and by what the exchange function leaves out: lazy bits, and the end of the memory.
// Only what is new, changed or unusual is handed back to Python to be described there.
//
// Ownership: no reference to a tensor is kept, only weak ones: a caller that drops its weights after a sync frees them.
// Threads: the interpreter lock must be held, except for views().
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

}  // namespace fastsync::binding
