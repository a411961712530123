// O or dX from the rows of Y or dX~: each token gathers its rows and sums them in float32, in the
// order of its pairs. No atomics, so the same bits on every run.
#include "core/check.h"
#include "cuda/core/experts_plan.h"
#include "cuda/core/fragment.h"
#include "cuda/core/launch.h"
#include "cuda/core/recipe.h"
#include "cuda/kernels/kernels.h"
#include "cuda/ptx/copy.h"

namespace tilemoe::cuda {
namespace {

constexpr int kMaxThreads = 512;

// Where a token's rows are.
enum class Pairs {
  kFixed,    // pair_row[t * K + k]
  kOffsets,  // pair_row[token_offsets[t]] ...
  kGrouped,  // row t itself
};

struct CombineParams {
  const char* rows;  // (capacity, d)
  int64_t row_bytes;
  const char* addend;  // (T, d), `out` too; null: none
  int64_t addend_bytes;
  char* out;  // (T, d)
  int64_t out_bytes;
  const int32_t* pair_row;
  const int32_t* token_offsets;  // (T + 1)
  const float* score;            // (capacity); null: 1
  const int32_t* M;              // grouped: rows past it are zero
  int64_t outputs;               // T, or the capacity when grouped
  int32_t K;
  int32_t chunks;  // of 16 bytes, a row
};

// Eight sums of a thread's 16 bytes.
template <class Element>
struct Sums {
  float sum[8] = {};

  __device__ void add(const uint4& bytes, float scale) {
    float x[8];
    unpack_eight<Element>(bytes, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = fmaf(scale, x[i], sum[i]);
  }
  __device__ uint4 rounded() const {
    return pack_eight<Element>(sum);
  }
};

// Where rows are many times the L2, loads through L1 are 1 to 4 % faster; where they are not, up to
// 10 % slower (H100).
enum class Through { kL1, kL2 };

// A CTA for each row of the output, or several for a long row, so that its loads are whole rows and
// the rows of neighbouring tokens are loaded at the same time. A thread has kParts times 16 bytes,
// and kAtOnce rows of the token in flight together.
template <class Element, Pairs kPairs, int kParts, int kAtOnce, Through kThrough>
__global__ void __launch_bounds__(kMaxThreads) combine_rows(const CombineParams params) {
  wait_for_previous();
  const int64_t t = blockIdx.x;
  const auto chunk_of = [&](int part) {
    return static_cast<int32_t>(threadIdx.x + (blockIdx.y * kParts + part) * blockDim.x);
  };
  const auto is_there = [&](int part) { return chunk_of(part) < params.chunks; };
  const auto load = [&](const char* row, int part) {
    const char* const from = row + int64_t{16} * chunk_of(part);
    if constexpr (kThrough == Through::kL1) return __ldg(reinterpret_cast<const uint4*>(from));
    return ptx::load_global_once_16(from);
  };

  Sums<Element> sums[kParts];
  const int32_t* pairs = params.pair_row;
  int32_t count = 1;
  if constexpr (kPairs == Pairs::kFixed) {
    pairs += t * params.K, count = params.K;
  } else if constexpr (kPairs == Pairs::kOffsets) {
    const int32_t first = params.token_offsets[t];
    pairs += first, count = params.token_offsets[t + 1] - first;
  } else {
    count = t < *params.M ? 1 : 0;
  }
  if (params.addend != nullptr && (kPairs != Pairs::kGrouped || count > 0))
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      if (is_there(part))  // may be `out`
        sums[part].add(ptx::load_global_16(params.addend + t * params.addend_bytes +
                                           int64_t{16} * chunk_of(part)),
                       1.f);

  for (int32_t begin = 0; begin < count; begin += kAtOnce) {
    uint4 value[kAtOnce][kParts];
    int32_t row[kAtOnce];
    float scale[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      row[i] = begin + i >= count          ? -1
               : kPairs == Pairs::kGrouped ? static_cast<int32_t>(t)
                                           : pairs[begin + i];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        if (row[i] >= 0 && is_there(part))
          value[i][part] = load(params.rows + row[i] * params.row_bytes, part);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      scale[i] = row[i] >= 0 && params.score != nullptr ? params.score[row[i]] : 1.f;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        if (row[i] >= 0 && is_there(part)) sums[part].add(value[i][part], scale[i]);
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part)
    if (is_there(part))
      *reinterpret_cast<uint4*>(params.out + t * params.out_bytes + int64_t{16} * chunk_of(part)) =
          sums[part].rounded();
}

template <class Element, Pairs kPairs, int kParts, int kAtOnce, Through kThrough>
void launch(const CombineParams& params, const Combine& step) {
  constexpr int kMaxChunks = kMaxThreads * kParts;
  const int32_t row_blocks = (params.chunks + kMaxChunks - 1) / kMaxChunks;
  const int32_t warp_chunks = row_blocks * kParts * kWarp;
  const int32_t warps = (params.chunks + warp_chunks - 1) / warp_chunks;
  TILEMOE_ASSERT(params.outputs <= INT32_MAX, "combine of " << params.outputs << " rows");
  launch_pdl<combine_rows<Element, kPairs, kParts, kAtOnce, kThrough>>(
      {.device = device_of(step.tuning.plan),
       .blocks = dim3(static_cast<unsigned>(params.outputs), static_cast<unsigned>(row_blocks)),
       .threads = warps * kWarp,
       .stream = static_cast<cudaStream_t>(step.stream),
       .pdl = step.tuning.pdl},
      params);
}

// The same numbers for every K. Eight rows at once are as fast where K >= 8, and up to 10 % slower
// where it is 2.
template <class Element, Pairs kPairs>
void launch_pairs(const CombineParams& params, const Combine& step) {
  constexpr int64_t kManyBytes = int64_t{128} << 20;
  if (step.routing->spec.capacity * params.row_bytes >= kManyBytes)
    launch<Element, kPairs, 2, 4, Through::kL1>(params, step);
  else
    launch<Element, kPairs, 2, 4, Through::kL2>(params, step);
}

template <class Element>
void run(const CombineParams& params, const Combine& step) {
  if (step.routing->spec.kind == TILEMOE_ROUTING_GROUPED)
    launch<Element, Pairs::kGrouped, 4, 1, Through::kL2>(params, step);
  else if (step.routing->token_offsets != nullptr)
    launch_pairs<Element, Pairs::kOffsets>(params, step);
  else
    launch_pairs<Element, Pairs::kFixed>(params, step);
}

}  // namespace

void combine(const Combine& step) {
  constexpr int64_t kElementBytes = 2;
  const tilemoe_routing& routing = *step.routing;
  const tilemoe_routing_spec& spec = routing.spec;
  const bool grouped = spec.kind == TILEMOE_ROUTING_GROUPED;
  const CombineParams params{
      .rows = static_cast<const char*>(step.row_values.data),
      .row_bytes = step.row_values.stride[0] * kElementBytes,
      .addend = present(step.addend) ? static_cast<const char*>(step.addend.data) : nullptr,
      .addend_bytes = present(step.addend) ? step.addend.stride[0] * kElementBytes : 0,
      .out = static_cast<char*>(step.out.data),
      .out_bytes = step.out.stride[0] * kElementBytes,
      .pair_row = routing.pair_row,
      .token_offsets = routing.token_offsets,
      .score = step.scale_by_score ? routing.row_score : nullptr,
      .M = routing.offsets + spec.E,
      .outputs = grouped ? spec.capacity : spec.T,
      .K = static_cast<int32_t>(spec.K),
      .chunks = static_cast<int32_t>(step.row_values.shape[1] * kElementBytes / 16)};
  if (params.outputs == 0) return;
  with_element(step.experts->dtype, [&]<class Element>() { run<Element>(params, step); });
}

}  // namespace tilemoe::cuda
