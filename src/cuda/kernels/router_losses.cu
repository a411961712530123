// The balance loss and the router's z-loss, and their gradient. One warp a token, in the CPU's
// order of summation; sums over tokens in float64, in an order that T alone decides.
#include <algorithm>

#include "core/check.h"
#include "cuda/core/device.h"
#include "cuda/core/launch.h"
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/router.h"
#include "cuda/kernels/warp_choice.h"
#include "routing/order.h"
#include "routing/spec.h"

namespace tilemoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int64_t kMaxBlocks = 1024;

struct LossSums {
  double balance, z;
  int64_t tokens;  // without a NaN

  __device__ void add(const LossSums& other) {
    balance += other.balance;
    z += other.z;
    tokens += other.tokens;
  }
};

struct LossScratch {
  int64_t blocks;
  LossSums* sums;   // (blocks)
  LossSums* total;  // (1)
  float* load;      // (E) E * c_e / sum(c)

  LossScratch(int64_t T, int64_t E, ScratchLayout& layout)
      : blocks(std::min(kMaxBlocks, (T + kWarps - 1) / kWarps)) {
    sums = layout.take<LossSums>(blocks);
    total = layout.take<LossSums>(1);
    load = layout.take<float>(E);
  }
};

struct LossParams {
  const void* logits;  // (T, E)
  int64_t logits_stride;
  int64_t T, E;
  const int32_t* counts;  // (E)
  float balance_coefficient, z_coefficient;
  void* dlogits;  // (T, E)
  int64_t dlogits_stride;
  float* losses;  // (2) or null
  LossScratch scratch;
};

// One token's softmax over all experts.
struct TokenLoss {
  float max, sum;
  float balance;  // sum of load_e p(e)
  __device__ double log_sum_exp() const { return max + log(static_cast<double>(sum)); }
};

// By all lanes of a warp; false for a token with a NaN logit.
template <class Logit>
__device__ bool token_loss(const Logit* row, int64_t E, const float* load, TokenLoss& token) {
  int32_t lowest = INT32_MAX, highest = INT32_MIN;
  for (int64_t e = lane_index(); e < E; e += kWarp) {
    const int32_t key = order::key(to_float(row[e]));
    lowest = min(lowest, key);
    highest = max(highest, key);
  }
  if (__reduce_min_sync(kAllLanes, lowest) == order::kNaNKey) return false;
  token.max = order::from_key(__reduce_max_sync(kAllLanes, highest));
  float weights = 0.f, loads = 0.f;
  for (int64_t e = lane_index(); e < E; e += kWarp) {
    const float weight = order::softmax_weight(to_float(row[e]), token.max);
    weights += weight;
    loads += weight * load[e];
  }
  token.sum = sum_of_lanes(weights);
  token.balance = sum_of_lanes(loads) / token.sum;
  return true;
}

__global__ void __launch_bounds__(kThreads) fill_load(const LossParams params) {
  __shared__ int64_t of_warp[kWarps];
  int64_t sum = 0;
  for (int64_t e = threadIdx.x; e < params.E; e += kThreads) sum += params.counts[e];
  for (int half = kWarp / 2; half > 0; half /= 2) sum += __shfl_xor_sync(kAllLanes, sum, half);
  if (lane_index() == 0) of_warp[threadIdx.x / kWarp] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += of_warp[w];
  const double scale = sum == 0 ? 0 : static_cast<double>(params.E) / static_cast<double>(sum);
  for (int64_t e = threadIdx.x; e < params.E; e += kThreads)
    params.scratch.load[e] = static_cast<float>(params.counts[e] * scale);
}

// Warp w of block b takes tokens b * kWarps + w, and every (blocks * kWarps)-th from there.
template <class Logit>
__global__ void __launch_bounds__(kThreads) sum_tokens(const LossParams params) {
  __shared__ LossSums of_warp[kWarps];
  const auto warp = static_cast<int>(threadIdx.x) / kWarp;
  const auto* logits = static_cast<const Logit*>(params.logits);
  LossSums sums{};
  for (int64_t t = int64_t{blockIdx.x} * kWarps + warp; t < params.T;
       t += params.scratch.blocks * kWarps) {
    TokenLoss token;
    if (!token_loss(logits + t * params.logits_stride, params.E, params.scratch.load, token))
      continue;
    const double log_sum_exp = token.log_sum_exp();
    sums.add({token.balance, log_sum_exp * log_sum_exp, 1});
  }
  if (lane_index() == 0) of_warp[warp] = sums;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) sums.add(of_warp[w]);
  params.scratch.sums[blockIdx.x] = sums;
}

// One block.
__global__ void __launch_bounds__(kThreads) add_blocks(const LossParams params) {
  __shared__ LossSums of_thread[kThreads];
  LossSums sums{};
  for (int64_t b = threadIdx.x; b < params.scratch.blocks; b += kThreads)
    sums.add(params.scratch.sums[b]);
  of_thread[threadIdx.x] = sums;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) of_thread[threadIdx.x].add(of_thread[threadIdx.x + half]);
  }
  if (threadIdx.x != 0) return;
  const LossSums total = of_thread[0];
  *params.scratch.total = total;
  if (params.losses == nullptr) return;
  const auto tokens = static_cast<double>(max(int64_t{1}, total.tokens));
  params.losses[0] = static_cast<float>(total.balance / tokens);
  params.losses[1] = static_cast<float>(total.z / tokens);
}

// dlogits += p_i (balance_scale (load_i - balance) + z_scale 2 log_sum_exp); nothing where p is 0,
// though the log may be infinite.
template <class Logit, class Out>
__global__ void __launch_bounds__(kThreads) add_gradient(const LossParams params) {
  const auto warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t t = int64_t{blockIdx.x} * kWarps + warp;
  if (t >= params.T) return;
  const Logit* row = static_cast<const Logit*>(params.logits) + t * params.logits_stride;
  const float* load = params.scratch.load;
  TokenLoss token;
  if (!token_loss(row, params.E, load, token)) return;
  const auto tokens = static_cast<double>(params.scratch.total->tokens);
  const auto balance_scale = static_cast<float>(params.balance_coefficient / tokens);
  const float z = params.z_coefficient == 0
                      ? 0.f
                      : static_cast<float>(2 * params.z_coefficient / tokens * token.log_sum_exp());
  Out* out = static_cast<Out*>(params.dlogits) + t * params.dlogits_stride;
  for (int64_t e = lane_index(); e < params.E; e += kWarp) {
    const float p = order::softmax_weight(to_float(row[e]), token.max) / token.sum;
    const float slope = balance_scale * (load[e] - token.balance);
    const float gradient = p == 0 ? 0.f : p * (slope + z);
    store(to_float(out[e]) + gradient, out[e]);
  }
}

}  // namespace

size_t router_losses_scratch_bytes(int64_t T, int64_t E) {
  ScratchLayout layout(nullptr);
  LossScratch(T, E, layout);
  return layout.used();
}

void router_losses(const tilemoe_router_losses_args& args) {
  const int64_t T = args.logits.shape[0], E = args.logits.shape[1];
  ScratchLayout layout(args.workspace);
  const bool wants_gradient = present(args.dlogits) && T > 0;
  const LossParams params{
      .logits = args.logits.data,
      .logits_stride = args.logits.stride[0],
      .T = T,
      .E = E,
      .counts = static_cast<const int32_t*>(args.expert_counts.data),
      .balance_coefficient = args.balance_coefficient,
      .z_coefficient = args.z_coefficient,
      .dlogits = args.dlogits.data,
      .dlogits_stride = args.dlogits.stride[0],
      .losses = present(args.losses) ? static_cast<float*>(args.losses.data) : nullptr,
      .scratch = LossScratch(T, E, layout)};
  const auto stream = static_cast<cudaStream_t>(args.stream);
  const auto blocks = static_cast<unsigned>(params.scratch.blocks);
  const auto launch = [&](const char* what, unsigned grid, void (*kernel)(LossParams)) {
    launch_kernel(what, {.blocks = grid, .threads = kThreads, .stream = stream}, kernel, params);
  };
  launch("the experts' load", 1, fill_load);
  if (T > 0)
    with_float(args.logits.dtype,
               [&]<class Logit>() { launch("router losses", blocks, sum_tokens<Logit>); });
  launch("sum of router losses", 1, add_blocks);
  if (wants_gradient)
    with_gradient_types(args.logits.dtype, args.dlogits.dtype, [&]<class Logit, class Out>() {
      const auto all = static_cast<unsigned>((T + kWarps - 1) / kWarps);
      launch("gradient of router losses", all, add_gradient<Logit, Out>);
    });
}

}  // namespace tilemoe::cuda
