#include "sync/transport_choice.h"

#include <algorithm>
#include <array>
#include <map>
#include <string_view>

#include "common/error.h"

namespace fastsync {

namespace {

[[nodiscard]] std::string other_host(const RankPlace& source, std::span<const RankPlace> receivers) {
  for (const RankPlace& r : receivers) {
    if (r.host != source.host) return concat("rank ", r.rank, " is on another host than rank ", source.rank);
  }
  return {};
}

[[nodiscard]] std::string needs_device(const RankPlace& place) {
  if (!place.device_id.empty()) return {};
  return place.flexible ? concat("rank ", place.rank, " has no CUDA device")
                        : concat("rank ", place.rank, "'s tensors are on the CPU");
}

[[nodiscard]] bool anyone_follows(const std::vector<DeviceGroup>& groups) {
  return std::any_of(groups.begin(), groups.end(), [](const DeviceGroup& group) { return !group.followers.empty(); });
}

// Some share a device, others do not.
[[nodiscard]] bool is_mixed(const std::vector<DeviceGroup>& groups) {
  return groups.size() > 1 && anyone_follows(groups);
}

// What is against NCCL between these ranks, all of which have a device.
[[nodiscard]] std::string against_nccl(const RankPlace& source, std::span<const RankPlace> receivers,
                                       bool may_fan_out) {
  const std::vector<DeviceGroup> groups = group_by_device(source, receivers);
  const bool fans_out = may_fan_out && is_mixed(groups);
  if (source.nccl_version == 0) return concat("rank ", source.rank, " cannot load NCCL");
  const auto takes_part = [&](int rank) {
    return !fans_out || std::any_of(groups.begin(), groups.end(), [&](const auto& g) { return g.leader == rank; });
  };
  for (const RankPlace& r : receivers) {
    if (!takes_part(r.rank)) continue;
    if (r.nccl_version == 0) return concat("rank ", r.rank, " cannot load NCCL");
    if (r.nccl_version != source.nccl_version) {
      return concat("rank ", r.rank, " has NCCL ", r.nccl_version, ", rank ", source.rank, " has ", source.nccl_version,
                    ": all ranks must load one version (FASTSYNC_NCCL_PATH names a file)");
    }
  }
  if (fans_out || source.shares_device) return {};
  for (const DeviceGroup& group : groups) {
    if (group.followers.empty()) continue;
    return concat("ranks ", group.leader, " and ", group.followers.front(),
                  " share a device, which NCCL refuses (from 2.30.3 on NCCL_MULTI_RANK_GPU_ENABLE=1 allows it)",
                  groups.size() == 1 ? "; 'ipc' is for ranks that are all on one device" : "");
  }
  return {};
}

// "rank 0 leads rank 1, rank 2 leads ranks 3 and 5": who passes on to whom.
[[nodiscard]] std::string describe_leaders(const std::vector<DeviceGroup>& groups) {
  std::string text;
  for (const DeviceGroup& group : groups) {
    const auto& followers = group.followers;
    if (followers.empty()) continue;
    text += concat(text.empty() ? "" : ", ", "rank ", group.leader, " leads rank", followers.size() > 1 ? "s " : " ");
    for (std::size_t i = 0; i < followers.size(); ++i) {
      text += concat(i == 0 ? "" : i + 1 == followers.size() ? " and " : ", ", followers[i]);
    }
  }
  return concat("one rank of each device takes part in NCCL: ", text);
}

// The choice of `name`, which fits.
[[nodiscard]] TransportChoice chosen(std::string_view name, std::string why, const RankPlace& source,
                                     std::span<const RankPlace> receivers, bool may_fan_out) {
  TransportChoice choice;
  choice.transport = name;
  if (name == "nccl" && may_fan_out) {
    if (auto groups = group_by_device(source, receivers); is_mixed(groups)) {
      choice.transport = kFanOut;
      why += concat(why.empty() ? "" : "; ", describe_leaders(groups));
      choice.groups = std::move(groups);
    }
  }
  choice.reason = why.empty() ? choice.transport : concat(choice.transport, " (", why, ")");
  return choice;
}

// Why the transport cannot serve these ranks; empty: it can. `may_fan_out`: the source can share device memory.
[[nodiscard]] std::string against(std::string_view transport, const RankPlace& source,
                                  std::span<const RankPlace> receivers, bool may_fan_out) {
  if (transport == "shm") {
    if (auto why = other_host(source, receivers); !why.empty()) return why;
    for (const RankPlace& r : receivers) {
      if (!r.device_id.empty() && !r.flexible) return concat("rank ", r.rank, "'s tensors are on a device");
    }
    return {};
  }
  if (transport == "gloo") return {};
  if (auto why = needs_device(source); !why.empty()) return why;
  for (const RankPlace& r : receivers) {
    if (auto why = needs_device(r); !why.empty()) return why;
  }
  if (transport == "ipc") {
    if (auto why = other_host(source, receivers); !why.empty()) return why;
    for (const RankPlace& r : receivers) {
      if (r.device_id != source.device_id) {
        return concat("rank ", r.rank, "'s device is another than rank ", source.rank, "'s");
      }
    }
    return {};
  }
  if (transport == "nccl") return against_nccl(source, receivers, may_fan_out);
  return concat("'", transport, "' is not a transport of this version");
}

}  // namespace

std::vector<DeviceGroup> group_by_device(const RankPlace& source, std::span<const RankPlace> receivers) {
  const auto key = [](const RankPlace& place) { return concat(place.host, "/", place.device_id); };
  std::vector<const RankPlace*> by_rank;
  for (const RankPlace& r : receivers) by_rank.push_back(&r);
  std::sort(by_rank.begin(), by_rank.end(), [](const auto* a, const auto* b) { return a->rank < b->rank; });
  std::vector<DeviceGroup> groups{{source.rank, {}}};
  std::map<std::string, std::size_t> at{{key(source), 0}};
  for (const RankPlace* place : by_rank) {
    const auto [found, fresh] = at.emplace(key(*place), groups.size());
    if (fresh) {
      groups.push_back({place->rank, {}});
    } else {
      groups[found->second].followers.push_back(place->rank);
    }
  }
  return groups;
}

TransportChoice choose_transport(const RankPlace& source, std::span<const RankPlace> receivers,
                                 std::span<const std::string> candidates) {
  // Everyone must mean the same one; "auto" leaves it to the others.
  std::string named = source.asked;
  int named_by = source.rank;
  for (const RankPlace& r : receivers) {
    if (r.asked == "auto" || r.asked == named) continue;
    if (named != "auto") {
      throw InvalidArgument(concat("rank ", named_by, " asks for transport '", named, "', rank ", r.rank, " for '",
                                   r.asked, "'; name one transport on every rank (or 'auto')"),
                            r.rank);
    }
    named = r.asked;
    named_by = r.rank;
  }
  const auto has = [&](std::string_view name) {
    return std::find(candidates.begin(), candidates.end(), name) != candidates.end();
  };
  const bool may_fan_out = has("ipc");
  if (named != "auto") {
    const std::string why = against(named, source, receivers, may_fan_out);
    // A source without device tensors offers no device transports: what speaks against them is that.
    if (!has(named) && (!source.device_id.empty() || why.empty())) {
      throw CommError(concat("transport '", named, "', asked for by rank ", named_by, ", is unavailable on rank ",
                             source.rank, "; fastsync.transports() says why"));
    }
    if (!why.empty()) {
      throw CommError(concat("transport '", named, "', asked for by rank ", named_by, ", does not fit: ", why,
                             "; fastsync.transports() says when to use which ('auto' chooses)"));
    }
    return chosen(named, concat("asked for by rank ", named_by), source, receivers, may_fan_out);
  }
  constexpr std::array<std::string_view, 4> kOnDevice{"ipc", "nccl", "shm", "gloo"};
  constexpr std::array<std::string_view, 2> kOnHost{"shm", "gloo"};
  const std::span<const std::string_view> names = source.device_id.empty()
                                                      ? std::span<const std::string_view>(kOnHost)
                                                      : std::span<const std::string_view>(kOnDevice);
  std::string reasons;
  for (const auto name : names) {
    const std::string why =
        has(name) ? against(name, source, receivers, may_fan_out) : concat("unavailable on rank ", source.rank);
    if (why.empty()) return chosen(name, reasons, source, receivers, may_fan_out);
    reasons += concat(reasons.empty() ? "" : "; ", "not ", name, ": ", why);
  }
  throw CommError(
      concat("no transport reaches every rank (", reasons, "); fastsync.transports() says what this rank can use"));
}

}  // namespace fastsync
