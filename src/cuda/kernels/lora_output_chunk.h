// A CTA of lora_output_gradient.cu has a slice of the columns of dOut, which is dO or dH, for some
// rows of one expert (row_chunks.h).
//
// 16 rows at a time are copied to shared memory, some steps ahead of the MMAs. Each warp multiplies
// its own columns of them twice: by B for the slice's part of Q, and as the sum over rows for dB,
// which stays in registers.
#pragma once

#include <cstdint>

#include "cuda/core/fragment.h"
#include "cuda/core/row_chunks.h"
#include "cuda/kernels/lora_output_sums.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/barriers.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/mma_sync.h"

namespace tilemoe::cuda::lora_output {

constexpr int kRows = 16;        // of a step: K of the MMAs for dB, M of those for Q
constexpr int kMaxChunk = 1024;  // rows
constexpr int kMaxStages = 8;
constexpr int kVector = 8;  // columns of 16 bytes

// kRank is the rank rounded up to 16 or 32. A thread has 64 sums of dB. With 16, an SM has two CTAs:
// one begins while the other copies.
template <int kRank>
struct Sizes {
  static constexpr int kCtasPerSm = kRank == 16 ? 2 : 1;
  static constexpr int kWarps = kRank / 4;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kColumns = kThreads * 64 / kRank;  // of a slice
  static constexpr int kWarpColumns = kColumns / kWarps;
  static constexpr int kRowBytes = kColumns * 2;
  static constexpr int kRankBytes = kRank * 2;  // of a row of P
  static constexpr int kStageBytes = kRows * (kRowBytes + kRankBytes);
  static constexpr int kSums = kRows * kRank;  // of a warp, for Q
  // What follows the stages: sums for Q twice, sources and scales of rows, barriers.
  static constexpr int kOtherBytes =
      2 * kWarps * kSums * 4 + kMaxChunk * (sizeof(int32_t) + sizeof(float)) + kMaxStages * 8;
};

template <int kRank>
int64_t slices_of(int64_t width) {
  return (width + Sizes<kRank>::kColumns - 1) / Sizes<kRank>::kColumns;
}

struct Params {
  const int32_t* token;  // (capacity) row of dOut; null: row r is row r
  const float* score;    // (capacity); null: 1
  const char* dOut;
  int64_t dOut_bytes;  // of a row
  const char* P;
  int64_t P_bytes;                                    // of a row
  const void* factor;                                 // scale B^T (E, rank, width)
  int64_t factor_expert, factor_rank, factor_column;  // strides, elements
  float scale;
  int32_t stages;
  OutputSums sums;
  OutputParts dB;
};

// The fragments of B^T (rank, columns of a warp), which an MMA takes as its operand B.
template <class Element, int kRank>
struct Factor {
  static constexpr int kSteps = Sizes<kRank>::kWarpColumns / 16;
  uint32_t word[kSteps][kRank / 8][2];

  __device__ __forceinline__ void load(const Params& params, int32_t expert, int32_t first) {
    const auto* const factor =
        static_cast<const uint16_t*>(params.factor) + expert * params.factor_expert;
    const auto at = [&](int32_t rank, int32_t column) -> uint32_t {
      if (rank >= params.sums.rank || column >= params.sums.width) return 0;
      return factor[rank * params.factor_rank + column * params.factor_column];
    };
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int j = 0; j < kRank / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int32_t rank = 8 * j + fragment::lane() / 4;
          const int32_t column = first + 16 * k + fragment::column(half);
          word[k][j][half] = at(rank, column) | at(rank, column + 1) << 16;
        }
  }
};

template <class Element, int kRank>
class Chunk {
 public:
  using S = Sizes<kRank>;

  __device__ Chunk(const Params& params, const RowChunk& chunk, char* shared)
      : params_(params), chunk_(chunk), first_column_(blockIdx.y * S::kColumns) {
    char* at = shared + params.stages * S::kStageBytes;
    sums_ = reinterpret_cast<float*>(at), at += 2 * S::kWarps * S::kSums * 4;
    source_ = reinterpret_cast<int32_t*>(at), at += kMaxChunk * sizeof(int32_t);
    row_scale_ = reinterpret_cast<float*>(at), at += kMaxChunk * sizeof(float);
    barriers_ = ptx::shared_address(at);
    stages_ = ptx::shared_address(shared);
    for (int32_t r = thread(); r < round_up_rows(chunk.rows); r += S::kThreads) {
      const bool exists = r < chunk.rows;
      const int64_t row = exists ? chunk.begin + r : chunk.begin;
      source_[r] = params.token != nullptr ? params.token[row] : static_cast<int32_t>(row);
      row_scale_[r] = params.score != nullptr ? params.scale * params.score[row] : params.scale;
    }
    if (thread() == 0)
      for (int32_t s = 0; s < params.stages; ++s)
        ptx::mbarrier_init(barriers_ + 8 * s, S::kThreads);
    __syncthreads();
  }

  __device__ void run() {
    const int32_t steps = (chunk_.rows + kRows - 1) / kRows, ahead = params_.stages - 1;
    const int32_t warp = thread() / kWarp;
    for (int32_t i = 0; i < min(ahead, steps); ++i) copy(i, i);
    factor_.load(params_, chunk_.expert, first_column_ + warp * S::kWarpColumns);
    int32_t slot = 0, empty = ahead;
    uint32_t parity = 0;
    for (int32_t i = 0; i < steps; ++i) {
      // Every warp has left this stage, which it read in the step before.
      if (i + ahead < steps) copy(i + ahead, empty);
      ptx::mbarrier_wait(barriers_ + 8 * slot, parity);
      float* const sums = sums_ + i % 2 * (S::kWarps * S::kSums);
      multiply(i, stages_ + slot * S::kStageBytes, sums + warp * S::kSums);
      __syncthreads();
      store_Q(i, sums);
      empty = slot;
      if (++slot == params_.stages) slot = 0, parity ^= 1;
    }
    store_dB();
  }

 private:
  __device__ static int32_t thread() { return static_cast<int32_t>(threadIdx.x); }
  __device__ static int32_t round_up_rows(int32_t rows) {
    return (rows + kRows - 1) / kRows * kRows;
  }

  // 16 rows of dOut, then those of P. Rows past the last, columns and ranks past the last are zeros.
  __device__ void copy(int32_t step, int32_t slot) const {
    constexpr int kChunks = S::kColumns / kVector, kAtOnce = S::kThreads / kChunks;
    const uint32_t stage = stages_ + slot * S::kStageBytes;
    const int32_t first = step * kRows, chunk = thread() % kChunks;
    const int32_t column = first_column_ + chunk * kVector;
#pragma unroll
    for (int pass = 0; pass < kRows / kAtOnce; ++pass) {
      const int32_t row = pass * kAtOnce + thread() / kChunks;
      const bool exists = first + row < chunk_.rows && column < params_.sums.width;
      const char* const from =
          params_.dOut + source_[first + row] * params_.dOut_bytes + column * 2;
      ptx::cp_async_16(stage + row * S::kRowBytes + ((chunk ^ (row & 7)) * 16),
                       exists ? from : params_.dOut, exists ? 16 : 0);
    }
    constexpr int kRankChunks = kRank / kVector;
    if (thread() < kRows * kRankChunks) {
      const int32_t row = thread() / kRankChunks, rank = thread() % kRankChunks * kVector;
      const bool exists = first + row < chunk_.rows && rank < params_.sums.rank;
      const char* const from =
          params_.P + (chunk_.begin + first + row) * params_.P_bytes + rank * 2;
      ptx::cp_async_16(stage + kRows * S::kRowBytes + row * S::kRankBytes + rank * 2,
                       exists ? from : params_.P, exists ? 16 : 0);
    }
    ptx::cp_async_arrive(barriers_ + 8 * slot);
  }

  // P'^T of 16 rows, as an MMA's operand A: ranks by rows.
  __device__ __forceinline__ void load_P(int32_t step, uint32_t stage,
                                         uint32_t (&a)[kRank / 16][4]) const {
    const uint32_t lane = fragment::lane();
    const uint32_t row = lane % 8 + lane / 16 * 8, eight = lane / 8 % 2;
    const float* const scale = row_scale_ + step * kRows + fragment::column();
    const float scales[2][2] = {{scale[0], scale[1]}, {scale[8], scale[9]}};
#pragma unroll
    for (int m = 0; m < kRank / 16; ++m) {
      ptx::ldmatrix_x4_transposed(
          a[m], stage + kRows * S::kRowBytes + row * S::kRankBytes + (2 * m + eight) * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 P = unpack(a[m][i], Element());
        a[m][i] = pack(P.x * scales[i / 2][0], P.y * scales[i / 2][1], Element());
      }
    }
  }

  // This warp's part of a step: its sums for Q to shared memory, those of dB in registers.
  __device__ __forceinline__ void multiply(int32_t step, uint32_t stage, float* sums) {
    const uint32_t lane = fragment::lane(), row = lane % 16;
    const uint32_t line = stage + row * S::kRowBytes;
    const uint32_t first = thread() / kWarp * (S::kWarpColumns / kVector) + lane / 16;
    uint32_t P[kRank / 16][4];
    load_P(step, stage, P);
    float Q[kRank / 8][4] = {};
#pragma unroll
    for (int k = 0; k < Factor<Element, kRank>::kSteps; ++k) {
      // 16 columns: as A for Q, rows by columns; transposed as two operands B for dB.
      const uint32_t at = line + (((first + 2 * k) ^ (row & 7)) * 16);
      uint32_t rows[4], columns[4];
      ptx::ldmatrix_x4(rows, at);
      ptx::ldmatrix_x4_transposed(columns, at);
#pragma unroll
      for (int j = 0; j < kRank / 8; ++j)
        ptx::mma_m16n8k16(Q[j], rows, factor_.word[k][j], Element());
#pragma unroll
      for (int m = 0; m < kRank / 16; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t b[2] = {columns[2 * half], columns[2 * half + 1]};
          ptx::mma_m16n8k16(dB_[m][2 * k + half], P[m], b, Element());
        }
    }
#pragma unroll
    for (int j = 0; j < kRank / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<float2*>(sums + fragment::row(half) * kRank + fragment::column(j)) = {
            Q[j][2 * half], Q[j][2 * half + 1]};
  }

  // The sum over the warps, in order.
  __device__ __forceinline__ void store_Q(int32_t step, const float* sums) const {
#pragma unroll
    for (int32_t first = 0; first < S::kSums; first += S::kThreads) {
      const int32_t i = first + thread(), rank = i % kRank, row = step * kRows + i / kRank;
      if (row >= chunk_.rows || rank >= params_.sums.rank) continue;
      float sum = 0;
#pragma unroll
      for (int warp = 0; warp < S::kWarps; ++warp) sum += sums[warp * S::kSums + i];
      const int64_t at = chunk_.begin + row;
      if (params_.sums.Q_slices != nullptr)
        params_.sums
            .Q_slices[(blockIdx.y * params_.sums.capacity + at) * params_.sums.rank + rank] = sum;
      else
        static_cast<Element*>(params_.sums.Q)[at * params_.sums.Q_row + rank] = Element(sum);
    }
  }

  // Calls store(rank, column, sums of this column and the next) for all sums of this thread.
  template <class Store>
  __device__ __forceinline__ void for_each_dB(const Store& store) const {
    const int32_t first = first_column_ + thread() / kWarp * S::kWarpColumns + fragment::column();
#pragma unroll
    for (int m = 0; m < kRank / 16; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t rank = 16 * m + fragment::row(half);
        if (rank >= params_.sums.rank) continue;
#pragma unroll
        for (int j = 0; j < S::kWarpColumns / 8; ++j)
          if (first + 8 * j < params_.sums.width)
            store(rank, first + 8 * j, float2{dB_[m][j][2 * half], dB_[m][j][2 * half + 1]});
      }
  }

  __device__ __forceinline__ void store_dB() const {
    const OutputSums& sums = params_.sums;
    const int32_t rows = sums.offsets[chunk_.expert + 1] - sums.offsets[chunk_.expert];
    if (sums.stores_dB && count_chunks(rows, sums.chunk_rows) == 1) {
      for (int32_t p = 0; p < params_.dB.count; ++p) store_part(params_.dB.part[p]);
      return;
    }
    float* const out = sums.dB_chunks + int64_t{blockIdx.x} * sums.rank * sums.width;
    for_each_dB([&](int32_t rank, int32_t column, float2 two) {
      *reinterpret_cast<float2*>(out + int64_t{rank} * sums.width + column) = two;
    });
  }
  // In float32. A part begins and ends at a multiple of 8 columns.
  __device__ __forceinline__ void store_part(const OutputPart& part) const {
    float* const out = static_cast<float*>(part.dB) + chunk_.expert * part.expert;
    for_each_dB([&](int32_t rank, int32_t column, float2 two) {
      const int32_t in_part = column - part.first;
      if (in_part < 0 || in_part >= part.count) return;
      float* const at = out + in_part * part.column + rank * part.rank;
      if (part.accumulate) two.x += at[0], two.y += at[part.column];
      at[0] = two.x, at[part.column] = two.y;
    });
  }

  const Params& params_;
  const RowChunk chunk_;
  const int32_t first_column_;
  float* sums_;       // (2, warps, rows, rank): of two steps
  int32_t* source_;   // of each row of the chunk, its row of dOut
  float* row_scale_;  // scale [s]
  uint32_t barriers_, stages_;
  Factor<Element, kRank> factor_;
  float dB_[kRank / 16][S::kWarpColumns / 8][4] = {};  // (rank, columns)
};

}  // namespace tilemoe::cuda::lora_output
