// Q of an adapter and the gradient of its B by one read of dOut, which is dO or dH:
// Q = dOut (scale B), dB_e = dOut_e^T P'_e with P' = scale [s] P, rounded. For small ranks, with
// which both products are bound by the bytes of dOut.
//
// A first kernel has a CTA for each chunk of an expert's rows and slice of columns; others then add
// the slices of Q and the chunks of dB in order.
#include <algorithm>
#include <cstdint>

#include "core/check.h"
#include "cuda/core/launch.h"
#include "cuda/core/recipe.h"
#include "cuda/core/row_chunks.h"
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/lora_output_chunk.h"
#include "cuda/kernels/lora_output_sums.h"
#include "cuda/ptx/warp.h"

namespace tilemoe::cuda {
namespace {

using lora_output::Chunk;
using lora_output::kMaxChunk;
using lora_output::kMaxStages;
using lora_output::Params;
using lora_output::Sizes;

constexpr int kMaxRank = 32;

template <class Element, int kRank>
__global__ void __launch_bounds__(Sizes<kRank>::kThreads, Sizes<kRank>::kCtasPerSm)
    sum_chunk(const __grid_constant__ Params params) {
  TILEMOE_DYNAMIC_SHARED(char, shared, 128);
  wait_for_previous();
  const RowChunk chunk = find_chunk(params.sums.offsets, params.sums.E, params.sums.chunk_rows,
                                    static_cast<int32_t>(blockIdx.x));
  if (chunk.rows <= 0) return;
  Chunk<Element, kRank>(params, chunk, shared).run();
}

constexpr int64_t kElementBytes = 2;

// Calls body.template operator()<kRank>() for the rank rounded up to 16 or 32.
template <class Body>
auto with_rank(int64_t rank, const Body& body) {
  return rank <= 16 ? body.template operator()<16>() : body.template operator()<32>();
}

int64_t slices_of(int64_t width, int64_t rank) {
  return with_rank(rank, [&]<int kRank>() { return lora_output::slices_of<kRank>(width); });
}

// Short enough that each SM has a few CTAs, and long enough that their sums are few bytes compared
// with the rows.
int32_t rows_of_chunk(int64_t capacity, int64_t slices, int sms) {
  constexpr int64_t kMinChunk = 512, kCtas = 4;
  const int64_t rows = capacity * slices / (kCtas * std::max(sms, 1));
  return static_cast<int32_t>(rows <= kMinChunk ? kMinChunk : kMaxChunk);
}

// The memory of a call: the slices of Q, then the chunks of dB.
struct Memory {
  int32_t chunk_rows;
  int64_t slices, chunks;
  size_t Q_bytes, total;

  Memory(int64_t capacity, int64_t E, int64_t width, int64_t rank, int sms) {
    slices = slices_of(width, rank);
    chunk_rows = rows_of_chunk(capacity, slices, sms);
    chunks = max_chunks(capacity, E, chunk_rows);
    const auto numbers = [&](int64_t count) {
      return static_cast<size_t>(count * rank) * sizeof(float);
    };
    Q_bytes = slices > 1 ? numbers(slices * capacity) : 0;
    total = Q_bytes + numbers(chunks * width);
  }
};

template <class Element, int kRank>
void start_chunks(const PdlLaunch& plain, Params params, const DeviceInfo& device) {
  using S = Sizes<kRank>;
  constexpr int kReserved = 1024;  // by the system, of each CTA's shared memory
  const auto stages_of = [&](int ctas) {
    const int bytes = (device.shared_bytes + kReserved) / ctas - kReserved;
    return std::min((bytes - S::kOtherBytes) / S::kStageBytes, kMaxStages);
  };
  constexpr int kEnough = 3;  // stages: with fewer, the only CTA of an SM gets all of its memory
  params.stages = stages_of(S::kCtasPerSm);
  if (params.stages < kEnough) params.stages = stages_of(1);
  TILEMOE_ASSERT(params.stages >= 2, device.shared_bytes << " bytes of shared memory");
  constexpr auto kKernel = sum_chunk<Element, kRank>;
  const int bytes = params.stages * S::kStageBytes + S::kOtherBytes;
  static OncePerDevice<bool> known;
  known.get(device.index, [&] {
    TILEMOE_CHECK_CUDA(
        cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        bytes << " bytes of shared memory for a low-rank adapter's Q");
    return true;
  });
  PdlLaunch where = plain;
  where.threads = S::kThreads, where.shared_bytes = bytes;
  launch_pdl<kKernel>(where, params);
}

bool all_float32(const OutputParts& parts) {
  return std::all_of(parts.part, parts.part + parts.count,
                     [](const OutputPart& part) { return part.dtype == TILEMOE_FLOAT32; });
}

}  // namespace

bool has_output_gradient(int64_t capacity, int64_t E, int64_t rank) {
  constexpr int64_t kSmallM = 32;  // rows of an expert, on average
  return rank <= kMaxRank && capacity > kSmallM * E;
}

size_t lora_output_gradient_scratch_bytes(int64_t capacity, int64_t E, int64_t width, int64_t rank,
                                          const DeviceInfo& device) {
  return rank == 0 ? 0 : Memory(capacity, E, width, rank, device.sms).total;
}

void lora_output_gradient(const LoraProjection& step, const DeviceInfo& device) {
  const LoraGradient& gradient = step.gradient;
  const Rows& rows = step.rows;
  const int64_t width = step.source.shape[1], rank = step.out.shape[1];
  const Memory memory(rows.capacity, rows.E, width, rank, device.sms);
  TILEMOE_ASSERT(step.scratch.bytes >= memory.total && rows.ends == nullptr && rank <= kMaxRank,
                 step.scratch.bytes << " bytes of scratch for rank " << rank);
  auto* const scratch = static_cast<char*>(step.scratch.data);
  const OutputParts parts = parts_of(gradient);
  const OutputSums sums{.offsets = rows.offsets,
                        .Q = step.out.data,
                        .Q_row = step.out.stride[0],
                        .Q_slices = memory.slices > 1 ? reinterpret_cast<float*>(scratch) : nullptr,
                        .dB_chunks = reinterpret_cast<float*>(scratch + memory.Q_bytes),
                        .capacity = rows.capacity,
                        .E = static_cast<int32_t>(rows.E),
                        .width = static_cast<int32_t>(width),
                        .rank = static_cast<int32_t>(rank),
                        .slices = static_cast<int32_t>(memory.slices),
                        .chunk_rows = memory.chunk_rows,
                        .stores_dB = all_float32(parts)};
  const Params params{.token = rows.token,
                      .score = gradient.gathers_input ? nullptr : gradient.rows.score,
                      .dOut = static_cast<const char*>(step.source.data),
                      .dOut_bytes = step.source.stride[0] * kElementBytes,
                      .P = static_cast<const char*>(gradient.P.data),
                      .P_bytes = gradient.P.stride[0] * kElementBytes,
                      .factor = step.factor.data,
                      .factor_expert = step.factor.stride[0],
                      .factor_rank = step.factor.stride[1],
                      .factor_column = step.factor.stride[2],
                      .scale = gradient.scale,
                      .stages = 0,
                      .sums = sums,
                      .dB = parts};
  const PdlLaunch where{
      .device = device,
      .blocks = dim3(static_cast<unsigned>(memory.chunks), static_cast<unsigned>(memory.slices)),
      .threads = 0,
      .stream = static_cast<cudaStream_t>(step.stream)};
  with_element(step.source.dtype, [&]<class Element>() {
    with_rank(rank, [&]<int kRank>() { start_chunks<Element, kRank>(where, params, device); });
  });
  if (memory.slices > 1) add_slices_of_Q(sums, step.out.dtype, device, where.stream);
  add_chunks_of_dB(sums, parts, device, where.stream);
}

}  // namespace tilemoe::cuda
