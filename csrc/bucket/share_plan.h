// Which trainer sends which tensors, where several trainers hold the same manifest and each sends a share of it.
//
// A pure function of the manifest and the number of trainers, so ranks that hold equal manifests agree on it without a
// word. Rules: the largest piece first (of equal ones the first in the manifest), each to the trainer with the fewest
// bytes so far (of equal ones the first). A piece is a tensor, or all tensors of one tie group: names that share memory
// come from one trainer, so that what one destination is written with never comes from two. A tensor is not cut. So no
// share is larger than the mean by more than the largest piece.
//
// Threads: values. Streams: none. Errors: InvalidArgument for no trainers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "bucket/manifest.h"

namespace fastsync {

struct SharePlan {
  std::vector<std::vector<std::uint32_t>> shares;  // per trainer: positions in the manifest, ascending; may be empty
  std::vector<std::uint64_t> nbytes;               // per trainer

  [[nodiscard]] static SharePlan make(const Manifest& manifest, std::size_t trainers);

  // The largest share over the mean one: 1 is perfect, and what one trainer would take of the time of all. 1 where
  // there are no bytes. Well above 1 it says that one piece is larger than a mean share.
  [[nodiscard]] double imbalance() const noexcept;
  // The entries of one share, in the order of the manifest that the plan was made of. Ties are kept.
  [[nodiscard]] Manifest manifest_of(const Manifest& whole, std::size_t share) const;
};

// The first thing in which two manifests differ, for a message: "tensor number 3 is 'a' float32[2] here, 'b' ... there".
// Empty where they are equal.
[[nodiscard]] std::string first_difference(const Manifest& here, const Manifest& there);

}  // namespace fastsync
