#include "doubles/nccl/child.h"

#include <algorithm>
#include <utility>

#include "doubles/nccl/exchange.h"

namespace fastsync::fake_nccl {
namespace {

// False: told to stop.
bool wait_for(const Mesh& mesh, const std::function<bool()>& ready, const std::function<bool()>& must_stop) {
  for (;;) {
    const std::uint32_t seen = mesh.window->doorbell(mesh.rank);
    if (ready()) return true;
    if (must_stop()) return false;
    mesh.window->wait(mesh.rank, seen, kLook);
  }
}

}  // namespace

ncclResult_t agree_on_child(const Mesh& parent, std::uint64_t number, int color, int key,
                            const std::vector<int>& taking_part, const std::function<bool()>& must_stop,
                            ChildPlace* place, std::string* why) {
  const Window& window = *parent.window;
  const auto child_of = [&](int rank) -> RankBlock::Child& { return window.rank(rank).child[number % 2]; };
  RankBlock::Child& mine = child_of(parent.rank);
  mine.color = color;
  mine.key = key;
  mine.number.store(number, std::memory_order_release);
  window.ring_all();
  const auto all_there = [&] {
    return std::ranges::all_of(
        taking_part, [&](int rank) { return child_of(rank).number.load(std::memory_order_acquire) == number; });
  };
  if (!wait_for(parent, all_there, must_stop)) return ncclInProgress;
  if (color == kNcclSplitNoColor) return ncclSuccess;

  std::vector<std::pair<int, int>> members;  // key, rank in the parent
  for (const int rank : taking_part) {
    if (child_of(rank).color == color) members.emplace_back(child_of(rank).key, rank);
  }
  std::ranges::sort(members);
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (members[i].second == parent.rank) place->rank = static_cast<int>(i);
  }
  place->nranks = static_cast<int>(members.size());

  RankBlock::Child& first = child_of(members.front().second);
  if (place->rank == 0) {
    const ncclResult_t result = open_rendezvous(&first.id, why);
    if (result != ncclSuccess) return result;
    first.id_number.store(number, std::memory_order_release);
    window.ring_all();
  }
  const auto id_there = [&] { return first.id_number.load(std::memory_order_acquire) == number; };
  if (!wait_for(parent, id_there, must_stop)) return ncclInProgress;
  place->id = first.id;
  return ncclSuccess;
}

}  // namespace fastsync::fake_nccl
