// Loaders of the fp8 recipe's input gradient on Hopper: the sum has the gate part of dH and of W1
// transposed, and then the up part, each in whole k blocks.
#pragma once

#include <cstdint>

#include "core/check.h"
#include "core/fp8.h"
#include "core/step_arguments.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/core/tensor_map.h"
#include "cuda/gemm/load/dense.h"
#include "cuda/gemm/load/weights.h"
#include "cuda/gemm/sm90_fp8.h"

namespace tilemoe::cuda::load {

// Operand A: codes of dH by TMA. Consumers read the scales from memory, as ScaledRowsInOrder's do.
template <class Shape>
class ScaledPartRows : public DensePartRows<Shape> {
 public:
  using Base = DensePartRows<Shape>;
  static constexpr bool kWaitsAhead = true;  // sm90::Promoted

  struct Params : Base::Params {
    const float* scales;  // (parts, count, blocks_a_part)
    int64_t up_scales;    // from a row's scales of the gate part past their end to those of up
    int32_t last_row, last_block;
  };

  // Codes (parts, count, columns). TMA reads two as one number of 16 bits.
  static Params params(const Fp8Rows& rows, int64_t parts, int64_t count, int64_t columns) {
    TILEMOE_ASSERT(rows.given() && columns % 16 == 0,
                   parts << " parts of " << count << " rows of " << columns << " codes");
    const int64_t blocks = blocks_of(columns, kFp8Tile);
    Params params{};
    params.rows = make_tensor_map({.dtype = TILEMOE_BFLOAT16,
                                   .data = rows.codes,
                                   .size = {columns / 2, parts, count},
                                   .stride = {count * columns / 2, columns / 2},
                                   .box = {Base::kBlockColumns, 1, Shape::BLOCK_M}});
    params.blocks_a_part = static_cast<int32_t>(blocks);
    params.scales = rows.scales;
    params.up_scales = (count - 1) * blocks;
    params.last_row = static_cast<int32_t>(count - 1);
    params.last_block = static_cast<int32_t>(parts * blocks - 1);
    return params;
  }

  __device__ ScaledPartRows(const Params& params, int32_t thread) : Base(params, thread) {}

  class Scales {
   public:
    __device__ Scales(const Params& params, const Tile& tile, uint32_t /*shared*/, int32_t row)
        : params_(params),
          ahead_(params.scales, params.blocks_a_part, params.last_row, params.last_block, tile,
                 row) {}
    __device__ void read(uint32_t /*stage*/, int32_t k_block, float (&scale)[2]) {
      ahead_.read(
          k_block,
          [&](int32_t next) -> int64_t {
            return next + (next >= params_.blocks_a_part ? params_.up_scales : 0);
          },
          scale);
    }

   private:
    const Params& params_;
    ScalesAhead ahead_;
  };
};

// Operand B: codes of W1 transposed, gate and up as parts of its columns or as two weights.
template <class Shape_>
class ScaledWeightsByParts : public WeightsByParts<Shape_, Major::kK> {
 public:
  using Shape = Shape_;
  using Base = WeightsByParts<Shape, Major::kK>;
  static_assert(Shape::BLOCK_N == 2 * kFp8Tile && Shape::BLOCK_K == kFp8Tile);

  struct Params : Base::Params {
    const float* scales[2];        // of a part: of expert 0, the first block of rows
    int64_t expert_scales;         // from one expert's scales to the next one's
    int32_t blocks, scale_stride;  // blocks of rows; k blocks from one block of rows to the next
    int32_t last_block;            // k block
  };

  // `rows`: the block of columns of dX~.
  static Params params(const WeightCodes& codes, const tilemoe_experts& experts,
                       const CodeRows& rows) {
    const int64_t n = experts.n, blocks = blocks_of(n, kFp8Tile), first = rows.first[0];
    const bool is_split = experts.gate_layout == TILEMOE_GATE_SPLIT;
    const int64_t columns = is_split ? n : 2 * n, stride = is_split ? blocks : 2 * blocks;
    TILEMOE_ASSERT(codes.weight.format == TILEMOE_FORMAT_FP8 && n % 16 == 0 &&
                       (is_split || n % kFp8Tile == 0) && first % kFp8Tile == 0,
                   "codes of " << n << " columns a part, from row " << first);
    Params params{};
    params.blocks_a_part = static_cast<int32_t>(blocks);
    for (int p = 0; p < 2; ++p) {
      const tilemoe_quantized& from = p == 1 && is_split ? codes.up : codes.weight;
      const int64_t part = is_split ? 0 : p;  // of the weight
      // TMA reads two codes as one number of 16 bits.
      params.part[p] = make_tensor_map(
          {.dtype = TILEMOE_BFLOAT16,
           .data = static_cast<const char*>(from.codes) + first * columns + part * n,
           .size = {n / 2, rows.count, experts.E},
           .stride = {columns / 2, rows.R * columns / 2},
           .box = {Base::kBlockColumns, Base::kBoxRows, 1}});
      params.scales[p] =
          static_cast<const float*>(from.scales) + first / kFp8Tile * stride + part * blocks;
    }
    params.expert_scales = blocks_of(rows.R, kFp8Tile) * stride;
    params.blocks = static_cast<int32_t>(blocks_of(rows.count, kFp8Tile));
    params.scale_stride = static_cast<int32_t>(stride);
    params.last_block = static_cast<int32_t>(2 * blocks - 1);
    return params;
  }

  __device__ ScaledWeightsByParts(const Params& params, int32_t thread) : Base(params, thread) {}

  // The scales of a tile's two blocks.
  class Scales {
   public:
    __device__ Scales(const Params& params, const Tile& tile) : params_(params) {
      const int64_t expert = tile.expert * params.expert_scales;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t block = min(2 * tile.n_block + i, params.blocks - 1);
        block_[i] = expert + int64_t{block} * params.scale_stride;
      }
      has_second_ = 2 * tile.n_block + 1 < params.blocks;
    }
    // Whether the tile's second block exists.
    __device__ bool has_second() const {
      return has_second_;
    }
    __device__ void read(int32_t k_block, float (&scale)[2]) {
      const auto address = [&](int i, int32_t of_k) {
        const auto sum = PartOfSum::of<1>(of_k, params_.blocks_a_part);
        return params_.scales[sum.part] + block_[i] + sum.begin;
      };
      lanes_.read(k_block, params_.last_block, address, scale);
    }

   private:
    const Params& params_;
    int64_t block_[2];
    ScalesOfLanes lanes_;
    bool has_second_;
  };
};

}  // namespace tilemoe::cuda::load
