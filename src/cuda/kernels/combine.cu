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

constexpr int kThreads = 256;

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
  int32_t chunks;       // of 16 bytes, a row
  int32_t part_chunks;  // of them, in each of the parts that a row is cut into
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

// One thread for 16 bytes of each part of one output row. It has kAtOnce rows of a token in flight
// together; with a small T, more parts keep as many bytes in flight.
template <class Element, Pairs kPairs, int kParts, int kAtOnce>
__global__ void __launch_bounds__(kThreads) combine_rows(const CombineParams params) {
  wait_for_previous();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t t = index / params.part_chunks;
  if (t >= params.outputs) return;
  const auto first_chunk = static_cast<int32_t>(index - t * params.part_chunks);
  const auto chunk_of = [&](int part) { return first_chunk + part * params.part_chunks; };
  const auto is_there = [&](int part) { return kParts == 1 || chunk_of(part) < params.chunks; };
  const auto load = [&](const char* row, int part) {
    return ptx::load_global_once_16(row + int64_t{16} * chunk_of(part));
  };

  Sums<Element> sums[kParts];
  int64_t first = 0;
  int32_t count = 1;
  if constexpr (kPairs == Pairs::kFixed) {
    first = t * params.K, count = params.K;
  } else if constexpr (kPairs == Pairs::kOffsets) {
    first = params.token_offsets[t];
    count = params.token_offsets[t + 1] - params.token_offsets[t];
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
    float scale[kAtOnce];
    bool exists[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int32_t row = -1;
      if (begin + i < count)
        row = kPairs == Pairs::kGrouped ? static_cast<int32_t>(t)
                                        : params.pair_row[first + begin + i];
      exists[i] = row >= 0;
      if (!exists[i]) continue;
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        if (is_there(part)) value[i][part] = load(params.rows + row * params.row_bytes, part);
      scale[i] = params.score ? params.score[row] : 1.f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        if (exists[i] && is_there(part)) sums[part].add(value[i][part], scale[i]);
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part)
    if (is_there(part))
      *reinterpret_cast<uint4*>(params.out + t * params.out_bytes + int64_t{16} * chunk_of(part)) =
          sums[part].rounded();
}

template <class Element, Pairs kPairs, int kParts, int kAtOnce>
void launch_parts(CombineParams params, const Combine& step) {
  params.part_chunks = (params.chunks + kParts - 1) / kParts;
  const int64_t blocks = (params.outputs * params.part_chunks + kThreads - 1) / kThreads;
  TILEMOE_ASSERT(blocks <= INT32_MAX, "combine of " << params.outputs << " rows");
  launch_pdl<combine_rows<Element, kPairs, kParts, kAtOnce>>(
      {.device = device_of(step.tuning.plan),
       .blocks = static_cast<unsigned>(blocks),
       .threads = kThreads,
       .stream = static_cast<cudaStream_t>(step.stream),
       .pdl = step.tuning.pdl},
      params);
}

// With token rounding a token has K pairs on average, often some more.
template <class Element>
void run(const CombineParams& params, const Combine& step) {
  const tilemoe_routing_kind kind = step.routing->spec.kind;
  const bool offsets = step.routing->token_offsets != nullptr;
  if (kind == TILEMOE_ROUTING_GROUPED)
    launch_parts<Element, Pairs::kGrouped, 4, 1>(params, step);
  else if (offsets && params.K <= 2)
    launch_parts<Element, Pairs::kOffsets, 2, 3>(params, step);
  else if (offsets && params.K <= 4)
    launch_parts<Element, Pairs::kOffsets, 1, 6>(params, step);
  else if (offsets)
    launch_parts<Element, Pairs::kOffsets, 1, 8>(params, step);
  else if (params.K <= 2)
    launch_parts<Element, Pairs::kFixed, 2, 2>(params, step);
  else if (params.K <= 4)
    launch_parts<Element, Pairs::kFixed, 2, 4>(params, step);
  else
    launch_parts<Element, Pairs::kFixed, 1, 8>(params, step);
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
      .chunks = static_cast<int32_t>(step.row_values.shape[1] * kElementBytes / 16),
      .part_chunks = 0};
  if (params.outputs == 0) return;
  with_element(step.experts->dtype, [&]<class Element>() { run<Element>(params, step); });
}

}  // namespace tilemoe::cuda
