#include "doubles/nccl/group.h"

#include <algorithm>

#include "doubles/nccl/report.h"

namespace fastsync::fake_nccl {

Group& Group::of_thread() {
  static thread_local Group group;
  return group;
}

void Group::add(std::shared_ptr<Communicator> communicator, const Operation& operation) {
  const auto found = std::ranges::find(members_, communicator, &Member::communicator);
  if (found != members_.end()) {
    found->operations.push_back(operation);
  } else {
    members_.push_back({std::move(communicator), {operation}});
  }
}

void Group::add_joining(std::shared_ptr<Communicator> communicator, ncclComm_t* out) {
  joining_.push_back({std::move(communicator), out});
}

ncclResult_t Group::note(ncclResult_t result) noexcept {
  if (error_ == ncclSuccess && result != ncclInProgress) error_ = result;
  return result;
}

ncclResult_t Group::check(const std::vector<Member>& members, const std::vector<Joining>& joining) {
  const Communicator& first = *(members.empty() ? joining.front().communicator : members.front().communicator);
  const auto differs = [&](const auto& member) { return member.communicator->blocking() != first.blocking(); };
  if (std::ranges::any_of(members, differs) || std::ranges::any_of(joining, differs)) {
    return failed(ncclInvalidArgument, "blocking and nonblocking communicators in one group");
  }
  for (const Member& member : members) {
    const std::shared_ptr<const Mesh> mesh = member.communicator->mesh();
    if (mesh == nullptr) return failed(ncclInvalidArgument, "a communicator of the group was closed meanwhile");
    const int rank = mesh->rank;
    const auto to_itself = [&](Kind kind) {
      return std::ranges::count_if(member.operations, [&](const Operation& operation) {
        return operation.kind == kind && operation.peer == rank;
      });
    };
    if (to_itself(Kind::kSend) != to_itself(Kind::kReceive)) {
      return failed(ncclInvalidUsage, "a rank sends to itself without a matching receive in the same group");
    }
  }
  return ncclSuccess;
}

void Group::give_up(const std::vector<Joining>& joining) {
  for (const Joining& one : joining) {
    one.communicator->close(true);
    withdraw(*one.out);
    __atomic_store_n(one.out, nullptr, __ATOMIC_RELEASE);
  }
}

ncclResult_t Group::wait_for(const std::vector<Joining>& joining) {
  ncclResult_t result = ncclSuccess;
  for (const Joining& one : joining) {
    if (!one.communicator->blocking()) {
      if (result == ncclSuccess) result = ncclInProgress;
      continue;
    }
    const ncclResult_t joined = one.communicator->wait_joined();
    if (joined != ncclSuccess && (result == ncclSuccess || result == ncclInProgress)) result = joined;
  }
  return result;
}

ncclResult_t Group::end() {
  if (depth_ == 0) return failed(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--depth_ > 0) return ncclSuccess;
  const std::vector<Member> members = std::exchange(members_, {});
  const std::vector<Joining> joining = std::exchange(joining_, {});
  ncclResult_t result = std::exchange(error_, ncclSuccess);
  if (members.empty() && joining.empty()) return result;
  if (result == ncclSuccess) result = check(members, joining);
  if (result == ncclSuccess) result = wait_for(joining);
  if (result != ncclSuccess && result != ncclInProgress) {
    give_up(joining);
    return result;
  }
  for (const Member& member : members) {
    const ncclResult_t launched = member.communicator->launch(member.operations);
    if (launched == ncclSuccess) continue;
    if (launched != ncclInProgress) return launched;
    result = ncclInProgress;
  }
  return result;
}

ncclResult_t GroupOfOne::end(ncclResult_t result) {
  open_ = false;
  (void)Group::of_thread().note(result);
  const ncclResult_t ended = Group::of_thread().end();
  return result == ncclSuccess ? ended : result;
}

}  // namespace fastsync::fake_nccl
