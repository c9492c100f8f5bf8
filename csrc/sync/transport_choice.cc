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

// Why the transport cannot serve these ranks; empty: it can.
[[nodiscard]] std::string against(std::string_view transport, const RankPlace& source,
                                  std::span<const RankPlace> receivers) {
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
  if (transport == "nccl") {
    if (source.nccl_version == 0) return concat("rank ", source.rank, " cannot load NCCL");
    std::map<std::string, int> seen{{source.host + "/" + source.device_id, source.rank}};
    for (const RankPlace& r : receivers) {
      if (r.nccl_version == 0) return concat("rank ", r.rank, " cannot load NCCL");
      if (r.nccl_version != source.nccl_version) {
        return concat("rank ", r.rank, " has NCCL ", r.nccl_version, ", rank ", source.rank, " has ",
                      source.nccl_version, ": all ranks must load one version (FASTSYNC_NCCL_PATH names a file)");
      }
      const auto [at, fresh] = seen.emplace(r.host + "/" + r.device_id, r.rank);
      if (!fresh && !source.shares_device) {
        return concat("ranks ", at->second, " and ", r.rank,
                      " share a device, which NCCL refuses (from 2.30.3 on NCCL_MULTI_RANK_GPU_ENABLE=1 allows it)");
      }
    }
    return {};
  }
  return concat("'", transport, "' is not a transport of this version");
}

}  // namespace

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
  if (named != "auto") {
    // A source without device tensors offers no device transports: what speaks against them is that.
    if (!has(named) && (!source.device_id.empty() || against(named, source, receivers).empty())) {
      throw CommError(concat("transport '", named, "', asked for by rank ", named_by, ", is unavailable on rank ",
                             source.rank, "; fastsync.transports() says why"));
    }
    if (const auto why = against(named, source, receivers); !why.empty()) {
      throw CommError(concat("transport '", named, "', asked for by rank ", named_by, ", does not fit: ", why,
                             "; fastsync.transports() says when to use which ('auto' chooses)"));
    }
    return {named, concat(named, ": asked for by rank ", named_by)};
  }
  constexpr std::array<std::string_view, 4> kOnDevice{"ipc", "nccl", "shm", "gloo"};
  constexpr std::array<std::string_view, 2> kOnHost{"shm", "gloo"};
  const bool device = !source.device_id.empty();
  std::string reasons;
  const auto consider = [&](std::string_view name) {
    const std::string why = has(name) ? against(name, source, receivers) : concat("unavailable on rank ", source.rank);
    if (why.empty()) return true;
    reasons += concat(reasons.empty() ? "" : "; ", "not ", name, ": ", why);
    return false;
  };
  if (device) {
    for (const auto name : kOnDevice) {
      if (consider(name))
        return {std::string(name), concat(name, reasons.empty() ? "" : " (", reasons, reasons.empty() ? "" : ")")};
    }
  } else {
    for (const auto name : kOnHost) {
      if (consider(name))
        return {std::string(name), concat(name, reasons.empty() ? "" : " (", reasons, reasons.empty() ? "" : ")")};
    }
  }
  throw CommError(
      concat("no transport reaches every rank (", reasons, "); fastsync.transports() says what this rank can use"));
}

}  // namespace fastsync
