// Scores at ids that were chosen elsewhere, with top_k.cu's bits for its own: a warp a token, lane l
// having those of its K whose index mod 32 is l.
#include <algorithm>

#include "core/check.h"
#include "core/dtype.h"
#include "cuda/core/device.h"
#include "cuda/core/launch.h"
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/warp_choice.h"
#include "routing/order.h"

namespace tilemoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocksAtOnce = 5;

struct ScoreParams {
  LogitRows logits;  // (T, E)
  IntegerArray ids;  // (T, K)
  float* scores;     // (T, K)
  int32_t* counts;   // (E); null: not wanted
  int64_t T, K;
  int32_t E;
  tilemoe_scoring scoring;
  float factor;  // of every score
};

// The terms of a token's scores, in every lane.
template <class Logit>
class TokenScores {
 public:
  __device__ TokenScores(const ScoreParams& params, int64_t t)
      : params_(params),
        row_(static_cast<const Logit*>(params.logits.row(t).data)),
        ids_(params.ids.from(t * params.K)) {
    const bool over_all = params.scoring == TILEMOE_SOFTMAX_OVER_ALL;
    int32_t best = order::kNaNKey;
    bool nan = false;
    for (int32_t e = lane_index(); e < params.E; e += kWarp) {
      const int32_t key = order::key(to_float(row_[e]));
      nan |= key == order::kNaNKey;
      best = max(best, over_all ? key : order::kNaNKey);
    }
    nan_ = __any_sync(kAllLanes, nan);
    int32_t present = 0;
    each([&](int64_t, int32_t id) {
      ++present;
      best = max(best, over_all ? best : order::key(logit(id)));
    });
    max_ = order::from_key(__reduce_max_sync(kAllLanes, best));
    present_ = __reduce_add_sync(kAllLanes, present);
    if (params.scoring == TILEMOE_SIGMOID) return;
    float sum = 0.f;
    if (over_all)
      for (int32_t e = lane_index(); e < params.E; e += kWarp)
        sum += order::softmax_weight(to_float(row_[e]), max_);
    else
      each([&](int64_t, int32_t id) { sum += weight(id); });
    sum_ = sum_of_lanes(sum);
  }

  // visit(k, id) for this lane's ids that are there.
  template <class Visit>
  __device__ void each(const Visit& visit) const {
    for (int64_t k = lane_index(); k < params_.K; k += kWarp)
      if (const int64_t id = ids_.at(k); id >= 0 && id < params_.E)
        visit(k, static_cast<int32_t>(id));
  }

  __device__ float score(int32_t id) const {
    if (nan_) return order::from_key(order::kNaNKey);
    float score = weight(id);
    if (params_.scoring != TILEMOE_SIGMOID) score = share_of(score, sum_, present_);
    return score * params_.factor;
  }

 private:
  __device__ float logit(int32_t id) const { return to_float(row_[id]); }
  __device__ float weight(int32_t id) const {
    return ranks_by_sigmoid(params_.scoring) ? order::sigmoid(logit(id))
                                             : order::softmax_weight(logit(id), max_);
  }

  const ScoreParams& params_;
  const Logit* row_;
  IntegerArray ids_;
  bool nan_;
  float max_, sum_ = 0.f;
  int32_t present_;
};

template <class Logit>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce) score_tokens(const ScoreParams params) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t t = blockIdx.x * kWarps + threadIdx.x / kWarp; t < params.T; t += stride) {
    float* const scores = params.scores + t * params.K;
    for (int64_t k = lane_index(); k < params.K; k += kWarp) scores[k] = 0.f;
    const TokenScores<Logit> token(params, t);
    token.each([&](int64_t k, int32_t id) {
      scores[k] = token.score(id);
      if (params.counts != nullptr) atomicAdd(&params.counts[id], 1);
    });
  }
}

}  // namespace

void top_k_scores(const tilemoe_top_k_scores_args& args) {
  const int64_t T = args.logits.shape[0], E = args.logits.shape[1];
  const auto stream = static_cast<cudaStream_t>(args.stream);
  const ScoreParams params{.logits = logit_rows(args.logits),
                           .ids = integer_array(args.ids),
                           .scores = static_cast<float*>(args.scores.data),
                           .counts = static_cast<int32_t*>(args.expert_counts.data),
                           .T = T,
                           .K = args.ids.shape[1],
                           .E = static_cast<int32_t>(E),
                           .scoring = args.scoring,
                           .factor = args.routed_scaling_factor};
  if (params.counts != nullptr)
    TILEMOE_CHECK_CUDA(
        cudaMemsetAsync(params.counts, 0, static_cast<size_t>(E) * sizeof(int32_t), stream),
        "scores of chosen experts: " << E << " counts");
  if (T == 0) return;
  const int64_t limit = int64_t{current_device().sms} * kBlocksAtOnce;
  const auto blocks = static_cast<unsigned>(std::min((T + kWarps - 1) / kWarps, limit));
  with_float(args.logits.dtype, [&]<class Logit>() {
    launch_kernel("scores of chosen experts",
                  {.blocks = blocks, .threads = kThreads, .stream = stream}, score_tokens<Logit>,
                  params);
  });
}

}  // namespace tilemoe::cuda
