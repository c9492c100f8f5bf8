// The two entries of the multi-tensor copy. The body is device/copy_kernel.h; here is only what a CPU has no equal of:
// who a thread is, and how a block adds up its checksum.
//
// Not part of any build. tools/make_ptx.sh compiles it into copy_kernel_ptx.h, which is checked in.
#include "device/copy_kernel.h"

namespace fastsync {
namespace {

__device__ __forceinline__ void add_warp(detail::LaneChecksum& sum) {
  constexpr unsigned kAllLanes = 0xFFFFFFFFU;
  for (unsigned distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    sum.product += __shfl_down_sync(kAllLanes, sum.product, distance);
    sum.sum += __shfl_down_sync(kAllLanes, sum.sum, distance);
  }
}

template <CopyDirection kDirection>
__device__ __forceinline__ void run(const CopyArgs& args) {
  const unsigned warp = threadIdx.x / kWarpLanes;
  const unsigned lane = threadIdx.x % kWarpLanes;
  detail::LaneChecksum sum = detail::copy_lane<kDirection>(args, std::uint64_t{blockIdx.x} * kCopyBlockWarps + warp,
                                                           std::uint64_t{gridDim.x} * kCopyBlockWarps, lane);
  if (args.sum == nullptr) return;

  __shared__ std::uint64_t products[kCopyBlockWarps];
  __shared__ std::uint64_t sums[kCopyBlockWarps];
  __syncwarp();
  add_warp(sum);
  if (lane == 0) {
    products[warp] = sum.product;
    sums[warp] = sum.sum;
  }
  __syncthreads();
  if (warp != 0) return;
  sum.product = lane < kCopyBlockWarps ? products[lane] : 0;
  sum.sum = lane < kCopyBlockWarps ? sums[lane] : 0;
  add_warp(sum);
  // Where another launch filled most of the bucket, most blocks of this one have nothing to add.
  if (lane != 0 || (sum.product | sum.sum) == 0) return;
  static_assert(sizeof(unsigned long long) == sizeof(std::uint64_t));
  atomicAdd(reinterpret_cast<unsigned long long*>(&args.sum->product), sum.product);
  atomicAdd(reinterpret_cast<unsigned long long*>(&args.sum->sum), sum.sum);
}

}  // namespace

// Names as in kPackKernelName and kUnpackKernelName.
extern "C" __global__ void __launch_bounds__(kCopyBlockThreads, kCopyBlocksResident)
    fastsync_pack(const __grid_constant__ CopyArgs args) {
  run<CopyDirection::kPack>(args);
}

extern "C" __global__ void __launch_bounds__(kCopyBlockThreads, kCopyBlocksResident)
    fastsync_unpack(const __grid_constant__ CopyArgs args) {
  run<CopyDirection::kUnpack>(args);
}

}  // namespace fastsync
