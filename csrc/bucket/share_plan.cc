#include "bucket/share_plan.h"

#include <algorithm>
#include <functional>
#include <map>
#include <queue>
#include <utility>

#include "common/error.h"

namespace fastsync {

namespace {

struct Piece {
  std::uint64_t nbytes = 0;
  std::vector<std::uint32_t> tensors;
};

// In the order of their first tensors.
std::vector<Piece> pieces_of(const Manifest& manifest) {
  std::vector<Piece> pieces;
  pieces.reserve(manifest.size());
  std::map<std::uint32_t, std::size_t> of_group;
  for (std::uint32_t i = 0; i < manifest.size(); ++i) {
    const TensorMeta& tensor = manifest[i];
    std::size_t at = pieces.size();
    if (tensor.tie.group != 0) at = of_group.emplace(tensor.tie.group, at).first->second;
    if (at == pieces.size()) pieces.emplace_back();
    pieces[at].nbytes += tensor.nbytes;
    pieces[at].tensors.push_back(i);
  }
  return pieces;
}

}  // namespace

SharePlan SharePlan::make(const Manifest& manifest, std::size_t trainers) {
  if (trainers == 0) throw InvalidArgument("weights cannot be shared out among no trainers");
  SharePlan plan;
  plan.shares.resize(trainers);
  plan.nbytes.resize(trainers);
  std::vector<Piece> pieces = pieces_of(manifest);
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.nbytes > b.nbytes; });
  using Load = std::pair<std::uint64_t, std::size_t>;  // bytes, trainer
  std::priority_queue<Load, std::vector<Load>, std::greater<>> least;
  for (std::size_t k = 0; k < trainers; ++k) least.emplace(0, k);
  for (const Piece& piece : pieces) {
    const auto [load, k] = least.top();
    least.pop();
    plan.shares[k].insert(plan.shares[k].end(), piece.tensors.begin(), piece.tensors.end());
    plan.nbytes[k] = load + piece.nbytes;
    least.emplace(plan.nbytes[k], k);
  }
  for (auto& share : plan.shares) std::sort(share.begin(), share.end());
  return plan;
}

double SharePlan::imbalance() const noexcept {
  double total = 0;
  std::uint64_t largest = 0;
  for (const std::uint64_t n : nbytes) {
    total += static_cast<double>(n);
    largest = std::max(largest, n);
  }
  return total > 0 ? static_cast<double>(largest) * static_cast<double>(nbytes.size()) / total : 1.0;
}

Manifest SharePlan::manifest_of(const Manifest& whole, std::size_t share) const {
  if (share >= shares.size()) throw InternalError(concat("no share number ", share));
  Manifest out;
  out.reserve(shares[share].size());
  for (const std::uint32_t i : shares[share]) {
    if (i >= whole.size()) throw InternalError(concat("no tensor number ", i));
    out.append(whole[i]);
  }
  return out;
}

std::string first_difference(const Manifest& here, const Manifest& there) {
  const std::size_t both = std::min(here.size(), there.size());
  for (std::size_t i = 0; i < both; ++i) {
    const TensorMeta& mine = here[i];
    const TensorMeta& other = there[i];
    if (mine == other) continue;
    if (mine.name == other.name && mine.dtype == other.dtype && mine.shape == other.shape) {
      return concat("tensor ", describe(mine), " does not share its memory with the same tensors in the same way");
    }
    return concat("tensor number ", i, " is ", describe(mine), " here, ", describe(other), " there");
  }
  if (here.size() == there.size()) return {};
  const bool more_here = here.size() > there.size();
  return concat("tensor number ", both, ", ", describe(more_here ? here[both] : there[both]), ", is only ",
                more_here ? "here" : "there", " (", here.size(), " tensors here, ", there.size(), " there)");
}

}  // namespace fastsync
