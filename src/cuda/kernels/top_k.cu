// Top-K: each token's best experts and their scores. Usual sizes take a warp a token and stay in
// its registers; many experts take a warp that looks at its row piece by piece; any other size, and
// many experts in groups, take a block a token.
#include <algorithm>
#include <type_traits>

#include "core/dtype.h"
#include "cuda/core/device.h"
#include "cuda/core/launch.h"
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/top_k.h"
#include "cuda/kernels/wide_choice.h"
#include "routing/order.h"

namespace tilemoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMaxWarpExperts = 512;    // of a warp's choice: 16 registers a lane
constexpr int kMaxWideExperts = 16384;  // past it a small T would leave the GPU idle

// CTAs per SM, by the registers that a row and its groups take.
template <int kSlots, bool kGroups>
constexpr int kBlocksAtOnce = kSlots <= 4   ? (kGroups ? 6 : 8)
                              : kSlots <= 8 ? (kGroups ? 4 : 5)
                                            : (kGroups ? 2 : 3);
// For 8.0 ptxas spills with so few registers, and gets those of fewer CTAs; on 12.0 an SM has 1536
// threads.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
template <int kSlots, bool kGroups>
constexpr int kBlocksCompiledFor = kBlocksAtOnce<kSlots, kGroups>;
#else
template <int kSlots, bool kGroups>
constexpr int kBlocksCompiledFor = std::min(kBlocksAtOnce<kSlots, kGroups>, kSlots <= 4 ? 6 : 4);
#endif

template <int kSlots, bool kGroups>
__global__ void __launch_bounds__(kThreads, kBlocksCompiledFor<kSlots, kGroups>)
    top_k_by_warps(const TopKParams params) {
  using Groups = std::conditional_t<kGroups, WarpGroups<kSlots>, NoGroups>;
  __shared__ int32_t counts[kSlots * kWarp];
  for (int e = static_cast<int>(threadIdx.x); e < params.E; e += kThreads) counts[e] = 0;
  __syncthreads();
  const auto groups = [&] {
    if constexpr (kGroups) {
      __shared__ __align__(16) float rows[kWarps][WarpGroups<kSlots>::kSharedFloats];
      return Groups(params.groups, rows[threadIdx.x / kWarp]);
    } else {
      return Groups();
    }
  }();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t t = blockIdx.x * kWarps + threadIdx.x / kWarp; t < params.T; t += stride) {
    int32_t id;
    float score;
    choose_by_warp<kSlots>(params, groups, params.logits.row(t), id, score);
    if (lane_index() >= params.K) continue;
    store_by_warp(params, t, id, score);
    if (params.counts != nullptr) atomicAdd(&counts[id], 1);
  }
  if (params.counts == nullptr) return;
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < params.E; e += kThreads)
    if (counts[e] != 0) atomicAdd(&params.counts[e], counts[e]);
}

// CTAs of wide warps that an SM has registers for. ptxas 13.0 spills 8 bytes with those
// of three where it compiles for 10.0 and 12.0, and none for 8.0 and 9.0.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kWideBlocks = 2;
#else
constexpr int kWideBlocks = 3;
#endif

// The row's type is known, so that a cell's loads are under way together.
template <class Logit>
__global__ void __launch_bounds__(kThreads, kWideBlocks)
    top_k_by_wide_warps(const TopKParams params) {
  __shared__ WideChoice::Shared shared[kWarps];
  WideChoice::Shared& mine = shared[threadIdx.x / kWarp];
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t t = blockIdx.x * kWarps + threadIdx.x / kWarp; t < params.T; t += stride) {
    const FloatArray logits = params.logits.row(t);
    const auto logit = [row = static_cast<const Logit*>(logits.data)](int32_t e) {
      return to_float(row[e]);
    };
    bool nan;
    const auto choose = [&](const auto& value) {
      return WideChoice::choose(mine, logit, value, params.E, params.K, nan);
    };
    const Chosen best =
        ranks_by_sigmoid(params.scoring)
            ? choose([&](float x, int32_t e) { return biased_sigmoid(params, x, e); })
            : choose([](float x, int32_t) { return x; });
    const float score = score_by_warp(params, logits, best, nan, [&](float max) {
      float sum = 0.f;
      for (int32_t e = lane_index(); e < params.E; e += kWarp)
        sum += order::softmax_weight(logit(e), max);
      return sum_of_lanes(sum);
    });
    if (lane_index() >= params.K) continue;
    store_by_warp(params, t, best.id, score);
    if (params.counts != nullptr) atomicAdd(&params.counts[best.id], 1);
  }
}

// As many CTAs as the tokens need, or as the GPU holds at once with `each` CTAs per SM.
unsigned warp_blocks(const DeviceInfo& device, const TopKParams& params, int64_t each) {
  return static_cast<unsigned>(
      std::min<int64_t>((params.T + kWarps - 1) / kWarps, device.sms * each));
}

template <int kSlots, bool kGroups>
void launch_warps(const DeviceInfo& device, const TopKParams& params, cudaStream_t stream) {
  launch_kernel("top-K",
                {.blocks = warp_blocks(device, params, kBlocksAtOnce<kSlots, kGroups>),
                 .threads = kThreads,
                 .stream = stream},
                top_k_by_warps<kSlots, kGroups>, params);
}

template <int kSlots>
void launch_warps(const DeviceInfo& device, const TopKParams& params, cudaStream_t stream) {
  if (params.groups.limits())
    launch_warps<kSlots, true>(device, params, stream);
  else
    launch_warps<kSlots, false>(device, params, stream);
}

void launch_wide_warps(const DeviceInfo& device, const TopKParams& params, cudaStream_t stream) {
  with_float(params.logits.dtype, [&]<class Logit>() {
    launch_kernel("top-K",
                  {.blocks = warp_blocks(device, params, 3), .threads = kThreads, .stream = stream},
                  top_k_by_wide_warps<Logit>, params);
  });
}

}  // namespace

void top_k(const tilemoe_top_k_args& args) {
  top_k(current_device(), args);
}

void top_k(const DeviceInfo& device, const tilemoe_top_k_args& args) {
  const int64_t T = args.logits.shape[0], E = args.logits.shape[1];
  const auto stream = static_cast<cudaStream_t>(args.stream);
  const TopKParams params{.logits = logit_rows(args.logits),
                          .bias = static_cast<const float*>(args.selection_bias.data),
                          .ids = integer_array(args.ids),
                          .scores = static_cast<float*>(args.scores.data),
                          .counts = static_cast<int32_t*>(args.expert_counts.data),
                          .T = T,
                          .E = static_cast<int32_t>(E),
                          .K = static_cast<int32_t>(args.K),
                          .scoring = args.scoring,
                          .factor = args.routed_scaling_factor,
                          .groups = GroupLimit(args, static_cast<int32_t>(E))};
  if (params.counts != nullptr)
    TILEMOE_CHECK_CUDA(
        cudaMemsetAsync(params.counts, 0, static_cast<size_t>(E) * sizeof(int32_t), stream),
        "top-K: " << E << " counts");
  if (T == 0) return;
  const bool many_in_groups = E > kMaxWarpExperts && params.groups.limits();
  if (E > kMaxWideExperts || args.K > kWarp || many_in_groups)
    launch_top_k_by_blocks<kThreads>(device, params, stream);
  else if (E > kMaxWarpExperts)
    launch_wide_warps(device, params, stream);
  else if (E <= 32)
    launch_warps<1>(device, params, stream);
  else if (E <= 64)
    launch_warps<2>(device, params, stream);
  else if (E <= 128)
    launch_warps<4>(device, params, stream);
  else if (E <= 256)
    launch_warps<8>(device, params, stream);
  else
    launch_warps<16>(device, params, stream);
}

}  // namespace tilemoe::cuda
