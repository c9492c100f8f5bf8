// Where the tensors of a manifest go: a table's entries, matched by name, shape, dtype and shared memory.
//
// Ownership: a binder borrows its table, which must outlive it.
// Threads: bind() and finish() run without the interpreter lock, on the thread of the receiving call.
// Errors: ManifestMismatch naming rank, tensor and what differs; nothing has been written then.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "binding/tensor_table.h"
#include "sync/weight_receiver.h"

namespace fastsync::binding {

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
