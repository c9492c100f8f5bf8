// What the benchmark asks of the core that the package does not offer: a DevicePacker by itself, in plain C.
//
// One probe is one set of tensors: packed from `sources` into staging memory that holds every bucket, and unpacked from
// there into `destinations`. All buckets are held, so that what is timed moves the model through memory, not through the
// cache that two buckets would stay in.
//
// Ownership: the probe owns its packers and the checksums of its last passes; tensors and staging are the caller's.
// Threads: one at a time. Errors: null or 1, and fastsync_probe_error() has the text until the next call.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "bucket/bucket_plan.h"
#include "bucket/device_packer.h"
#include "common/error.h"
#include "common/wait.h"
#include "device/cuda/cuda_runtime.h"

namespace {

using fastsync::BucketPlan;
using fastsync::BucketPlanner;
using fastsync::Checksum;
using fastsync::CopyDirection;
using fastsync::CudaRuntime;
using fastsync::DevicePacker;
using fastsync::TensorView;

std::string& last_error() {
  static std::string text;
  return text;
}

struct Side {
  Side(const std::shared_ptr<CudaRuntime>& runtime, CopyDirection direction) : packer(runtime, direction) {}
  DevicePacker packer;
  std::vector<TensorView> views;
  std::vector<Checksum> sums;
};

struct Probe {
  explicit Probe(std::shared_ptr<CudaRuntime> on) : runtime(std::move(on)) {}
  std::shared_ptr<CudaRuntime> runtime;
  BucketPlan plan;
  Side pack{runtime, CopyDirection::kPack};
  Side unpack{runtime, CopyDirection::kUnpack};
};

// Runs `body` and turns what it throws into the last error.
template <typename Result, typename F>
Result guarded(Result failed, F&& body) noexcept {
  try {
    last_error().clear();
    return body();
  } catch (const std::exception& error) {
    last_error() = error.what();
  } catch (...) {
    last_error() = "an exception of unknown type";
  }
  return failed;
}

}  // namespace

#define FASTSYNC_PROBE extern "C" __attribute__((visibility("default")))

FASTSYNC_PROBE const char* fastsync_probe_error() { return last_error().c_str(); }

FASTSYNC_PROBE void* fastsync_probe_open(int ordinal, std::size_t tensors, const std::uint64_t* nbytes,
                                         const std::uint64_t* sources, const std::uint64_t* destinations,
                                         std::uint64_t bucket_bytes) {
  return guarded<void*>(nullptr, [&] {
    auto probe = std::make_unique<Probe>(CudaRuntime::get(ordinal));
    BucketPlanner planner(bucket_bytes);
    for (std::size_t i = 0; i < tensors; ++i) {
      planner.add(nbytes[i]);
      for (auto* side : {&probe->pack, &probe->unpack}) {
        TensorView view;
        view.data = reinterpret_cast<std::byte*>(side == &probe->pack ? sources[i] : destinations[i]);
        view.nbytes = nbytes[i];
        side->views.push_back(view);
      }
    }
    planner.finish();
    probe->plan = {planner.bucket_bytes(), planner.fragments(), planner.buckets()};
    return static_cast<void*>(probe.release());
  });
}

FASTSYNC_PROBE void fastsync_probe_close(void* probe) { delete static_cast<Probe*>(probe); }

FASTSYNC_PROBE std::size_t fastsync_probe_buckets(void* probe) {
  return static_cast<Probe*>(probe)->plan.buckets.size();
}

FASTSYNC_PROBE std::uint64_t fastsync_probe_staging_bytes(void* probe) {
  const auto& plan = static_cast<Probe*>(probe)->plan;
  return plan.buckets.size() * plan.bucket_bytes;
}

// `passes` over all buckets, queued one behind the other, and one wait. `seconds`: from the first call to the end of the
// wait; `host_seconds`: of that, the time until everything was queued.
FASTSYNC_PROBE int fastsync_probe_run(void* handle, int unpack, int verify, std::uint64_t staging, std::uint64_t stream,
                                      int passes, double timeout_s, double* seconds, double* host_seconds) {
  return guarded<int>(1, [&] {
    auto& probe = *static_cast<Probe*>(handle);
    Side& side = unpack != 0 ? probe.unpack : probe.pack;
    const auto& plan = probe.plan;
    fastsync::Wait wait(std::chrono::nanoseconds(static_cast<std::int64_t>(timeout_s * 1e9)), nullptr);
    const auto caller = probe.runtime->wrap_stream(reinterpret_cast<void*>(stream));
    const auto start = fastsync::Clock::now();
    for (int pass = 0; pass < passes; ++pass) {
      side.packer.begin(caller, DevicePacker::Place::kOwn, verify != 0);
      side.packer.bind(plan.fragments, plan.buckets, side.views, 1);  // its table goes by the stream that begin() chose
      for (std::size_t i = 0; i < plan.buckets.size(); ++i) {
        side.packer.move(i, reinterpret_cast<std::byte*>(staging + i * plan.bucket_bytes), wait);
      }
    }
    const auto queued = fastsync::Clock::now();
    side.packer.finish(wait);
    const auto end = fastsync::Clock::now();
    *seconds = std::chrono::duration<double>(end - start).count();
    *host_seconds = std::chrono::duration<double>(queued - start).count();
    side.sums.clear();
    if (verify != 0) {
      for (std::size_t i = 0; i < plan.buckets.size(); ++i) side.sums.push_back(side.packer.sum(i));
    }
    return 0;
  });
}

// How many buckets have different checksums after the last verified pack and the last verified unpack.
FASTSYNC_PROBE std::size_t fastsync_probe_unequal_sums(void* handle) {
  const auto& probe = *static_cast<Probe*>(handle);
  if (probe.pack.sums.size() != probe.unpack.sums.size()) return probe.plan.buckets.size();
  std::size_t unequal = 0;
  for (std::size_t i = 0; i < probe.pack.sums.size(); ++i)
    unequal += probe.pack.sums[i] == probe.unpack.sums[i] ? 0 : 1;
  return unequal;
}
