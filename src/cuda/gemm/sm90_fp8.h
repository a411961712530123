// The fp8 recipe on Hopper (core/fp8.h): loaders of e4m3 with block scales.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/check.h"
#include "core/fp8.h"
#include "core/step_arguments.h"
#include "cuda/core/fragment.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/core/tensor_map.h"
#include "cuda/gemm/load/dense.h"
#include "cuda/gemm/load/gathered.h"
#include "cuda/gemm/load/weights.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/warp.h"

namespace tilemoe::cuda::load {

struct ScaledSource {
  GatherSource codes;
  const float* scales;   // (count, scale_stride)
  int32_t scale_stride;  // k blocks
};

// Operand A: codes, gathered as in GatheredRows, and a scale per row and k block.
template <class Shape, class Codes_ = GatheredRows<Shape>>
class ScaledRows {
 public:
  using Codes = Codes_;
  struct Operand : Codes::Operand {
    static constexpr int kScalesAt = Codes::Operand::kBytes;
    static constexpr int kBytes = kScalesAt + 1024;  // B begins at a swizzled atom
    static_assert(Shape::BLOCK_M * sizeof(float) <= 1024 && Shape::BLOCK_M <= kProducerThreads);
  };
  static constexpr int kTmaBytes = 0;
  static constexpr bool kWaitsAhead = true;  // sm90::Promoted

  using Params = ScaledSource;

  // Codes (count, columns); row r of the GEMM is row token[r], or row r if the list is null.
  static Params params(const Fp8Rows& rows, int64_t count, int64_t columns, const int32_t* token) {
    TILEMOE_ASSERT(rows.given() && columns % 16 == 0 && columns <= INT32_MAX,
                   count << " rows of " << columns << " codes");
    return {.codes = {.source = rows.codes,
                      .row_bytes = static_cast<uint32_t>(columns),
                      .width_bytes = static_cast<int32_t>(columns),
                      .token = token},
            .scales = rows.scales,
            .scale_stride = static_cast<int32_t>(blocks_of(columns, kFp8Tile))};
  }

  __device__ ScaledRows(const Params& params, int32_t thread)
      : params_(params), codes_(params.codes, thread), thread_(thread) {}

  __device__ void prefetch() const {}
  __device__ void begin(const Tile& tile) {
    codes_.begin(tile);
    const int32_t row = tile.row_begin + thread_;
    has_row_ = thread_ < Shape::BLOCK_M && row < tile.row_end;
    const int32_t source = !has_row_ ? 0 : params_.codes.token ? params_.codes.token[row] : row;
    scales_ = params_.scales + int64_t{source} * params_.scale_stride;
  }
  __device__ int32_t whole_blocks() const { return codes_.whole_blocks(); }
  __device__ void copy_whole(uint32_t shared, int32_t k_block) {
    codes_.copy_whole(shared, k_block);
    copy_scale(shared, k_block);
  }
  __device__ void copy(uint32_t shared, int32_t k_block) {
    codes_.copy(shared, k_block);
    copy_scale(shared, k_block);
  }
  __device__ void advance(int32_t k_block) { codes_.advance(k_block); }

  // The scales of a lane's two rows of the tile, `row` and row + 8.
  class Scales {
   public:
    __device__ Scales(const Params& /*params*/, const Tile& /*tile*/, uint32_t shared, int32_t row)
        : first_(shared + Operand::kScalesAt + row * 4) {}
    __device__ void read(uint32_t stage, int32_t /*k_block*/, float (&scale)[2]) const {
      scale[0] = __uint_as_float(ptx::load_shared_4(first_ + stage));
      scale[1] = __uint_as_float(ptx::load_shared_4(first_ + stage + 8 * 4));
    }

   private:
    uint32_t first_;  // in the first stage
  };

 private:
  __device__ __forceinline__ void copy_scale(uint32_t shared, int32_t k_block) const {
    if (thread_ < Shape::BLOCK_M)
      ptx::cp_async_4(shared + Operand::kScalesAt + thread_ * 4, scales_ + k_block,
                      has_row_ ? 4 : 0);
  }

  const Params& params_;
  Codes codes_;
  int32_t thread_;
  const float* scales_;
  bool has_row_;
};

// The scales of a lane's two rows of A in memory, `row` and row + 8 of the tile, read one k block
// ahead.
class ScalesAhead {
 public:
  // (rows, stride), the last row and the last k block.
  __device__ ScalesAhead(const float* scales, int32_t stride, int32_t last_row, int32_t last_block,
                         const Tile& tile, int32_t row)
      : last_block_(last_block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t own = min(tile.row_begin + row + 8 * i, last_row);
      of_row_[i] = scales + int64_t{own} * stride;
      next_[i] = __ldg(of_row_[i]);
    }
  }
  // place(k block) of a row's scale, after its first one.
  template <class Place>
  __device__ void read(int32_t k_block, const Place& place, float (&scale)[2]) {
    const auto at = place(min(k_block + 1, last_block_));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale[i] = next_[i];
      next_[i] = __ldg(of_row_[i] + at);
    }
  }

 private:
  const float* of_row_[2];
  float next_[2];
  int32_t last_block_;
};

// Operand A, in order: codes of the tile's own rows by TMA. Consumers read the scales from memory,
// one k block ahead.
template <class Shape>
class ScaledRowsInOrder {
 public:
  using Codes = DenseRows<Shape>;
  using Operand = typename Codes::Operand;
  static constexpr int kTmaBytes = Operand::kBytes;
  static constexpr bool kWaitsAhead = false;  // down-projection: 1 to 2 % slower with it

  struct Params {
    CUtensorMap codes;
    const float* scales;             // (count, scale_stride)
    int32_t scale_stride, last_row;  // scale_stride: k blocks
  };

  // Codes (count, columns). TMA reads two as one number of 16 bits.
  static Params params(const Fp8Rows& rows, int64_t count, int64_t columns,
                       const int32_t* /*token*/) {
    TILEMOE_ASSERT(rows.given() && columns % 16 == 0, count << " rows of " << columns << " codes");
    return {.codes = make_tensor_map({.dtype = TILEMOE_BFLOAT16,
                                      .data = rows.codes,
                                      .size = {columns / 2, count, 1},
                                      .stride = {columns / 2, 0},
                                      .box = {kBoxColumns, Shape::BLOCK_M, 1}}),
            .scales = rows.scales,
            .scale_stride = static_cast<int32_t>(blocks_of(columns, kFp8Tile)),
            .last_row = static_cast<int32_t>(count - 1)};
  }

  __device__ ScaledRowsInOrder(const Params& params, int32_t /*thread*/) : params_(params) {}

  __device__ void prefetch() const { ptx::tma_prefetch_map(&params_.codes); }
  __device__ void begin(const Tile& tile) { row_begin_ = tile.row_begin; }
  __device__ void load(uint32_t shared, uint32_t full, int32_t k_block) const {
    ptx::tma_load(shared, &params_.codes, full, k_block * kBoxColumns, row_begin_, 0);
  }

  class Scales {
   public:
    __device__ Scales(const Params& params, const Tile& tile, uint32_t /*shared*/, int32_t row)
        : ahead_(params.scales, params.scale_stride, params.last_row, params.scale_stride - 1, tile,
                 row) {}
    __device__ void read(uint32_t /*stage*/, int32_t k_block, float (&scale)[2]) {
      ahead_.read(
          k_block, [](int32_t next) { return next; }, scale);
    }

   private:
    ScalesAhead ahead_;
  };

 private:
  static constexpr int kBoxColumns = Shape::BLOCK_K / 2;

  const Params& params_;
  int32_t row_begin_;
};

// The scales of a tile's two blocks of B. A lane reads those of every 32nd k block: with a read per k
// block the promotion would wait for memory.
class ScalesOfLanes {
 public:
  // address(block, k block). All lanes of a warp call it for every k block, in order.
  template <class Address>
  __device__ void read(int32_t k_block, int32_t last, const Address& address, float (&scale)[2]) {
    if (k_block % kWarp == 0) {
      const int32_t own = min(k_block + fragment::lane(), last);
#pragma unroll
      for (int i = 0; i < 2; ++i) of_lane_[i] = __ldg(address(i, own));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) scale[i] = __shfl_sync(kAllLanes, of_lane_[i], k_block % kWarp);
  }

 private:
  float of_lane_[2];
};

// Operand B: the codes of an expert's weights by TMA. A tile has two blocks of 128 of their rows,
// each with a scale per k block: neighbours, or gate and up.
template <class Shape_, int kParts>
class ScaledWeights : public Weights<Shape_, Major::kK, kParts> {
 public:
  using Shape = Shape_;
  using Base = Weights<Shape, Major::kK, kParts>;
  static_assert(Shape::BLOCK_N == 2 * kFp8Tile && Shape::BLOCK_K == kFp8Tile);

  struct Params : Base::Params {
    const float* scales[kParts];   // of expert 0 and the part's first block
    int64_t expert_scales;         // from one expert's scales to the next one's
    int32_t blocks, scale_stride;  // blocks of rows of a part; k blocks
  };

  static Params params(const WeightCodes& codes, const tilemoe_experts& experts,
                       const CodeRows& rows, int64_t columns) {
    TILEMOE_ASSERT(codes.weight.format == TILEMOE_FORMAT_FP8 && rows.step == 1 && columns % 16 == 0,
                   "codes of " << columns << " columns, rows " << rows.step << " apart");
    const int64_t k_blocks = blocks_of(columns, kFp8Tile);
    Params params{};
    for (int p = 0; p < kParts; ++p) {
      const bool is_up = p == 1 && experts.gate_layout == TILEMOE_GATE_SPLIT;
      const tilemoe_quantized& from = is_up ? codes.up : codes.weight;
      TILEMOE_ASSERT(rows.first[p] % kFp8Tile == 0, "codes from row " << rows.first[p]);
      // TMA reads two codes as one number of 16 bits.
      params.part[p] =
          make_tensor_map({.dtype = TILEMOE_BFLOAT16,
                           .data = static_cast<const char*>(from.codes) + rows.first[p] * columns,
                           .size = {columns / 2, rows.count, experts.E},
                           .stride = {columns / 2, rows.R * columns / 2},
                           .box = {Base::kBlockColumns, Base::kBoxRows, 1}});
      params.scales[p] =
          static_cast<const float*>(from.scales) + rows.first[p] / kFp8Tile * k_blocks;
    }
    params.expert_scales = blocks_of(rows.R, kFp8Tile) * k_blocks;
    params.blocks = static_cast<int32_t>(blocks_of(rows.count, kFp8Tile));
    params.scale_stride = static_cast<int32_t>(k_blocks);
    return params;
  }

  __device__ ScaledWeights(const Params& params, int32_t thread) : Base(params, thread) {}

  // The scales of a tile's two blocks.
  class Scales {
   public:
    __device__ Scales(const Params& params, const Tile& tile) {
      const int64_t expert = tile.expert * params.expert_scales;
      const auto of_block = [&](int part, int32_t block) {
        return params.scales[part] + expert +
               int64_t{min(block, params.blocks - 1)} * params.scale_stride;
      };
      block_[0] = of_block(0, kParts == 2 ? tile.n_block : 2 * tile.n_block);
      block_[1] = kParts == 2 ? of_block(1, tile.n_block) : of_block(0, 2 * tile.n_block + 1);
      has_second_ = kParts == 2 || 2 * tile.n_block + 1 < params.blocks;
      last_ = params.scale_stride - 1;
    }
    // Whether the tile's second block exists.
    __device__ bool has_second() const { return kParts == 2 || has_second_; }
    __device__ void read(int32_t k_block, float (&scale)[2]) {
      lanes_.read(
          k_block, last_, [&](int i, int32_t of_k) { return block_[i] + of_k; }, scale);
    }

   private:
    const float* block_[2];
    ScalesOfLanes lanes_;
    int32_t last_;
    bool has_second_;
  };
};

}  // namespace tilemoe::cuda::load
