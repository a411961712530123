// Loaders of operand B by TMA: the weights of one expert, with gate and up as parts of the columns
// (projections) or as parts of K (input gradient).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/core/gemm_steps.h"
#include "cuda/core/tensor_map.h"
#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/tma.h"

namespace tilemoe::cuda {

// K is the gate part and then the up part, each padded with zeros to whole k blocks. Maps a k
// block, counted over both parts, to its part and the position in it.
struct PartOfSum {
  int32_t part, begin;

  template <int BLOCK_K>
  __device__ static PartOfSum of(int32_t k_block, int32_t blocks_a_part) {
    const int32_t part = k_block >= blocks_a_part ? 1 : 0;
    return {part, (k_block - part * blocks_a_part) * BLOCK_K};
  }
};

// The part in which the last `blocks_left` k blocks begin.
__device__ __forceinline__ int32_t blocks_left_of_part(int32_t blocks_left, int32_t blocks_a_part) {
  return blocks_left > blocks_a_part ? blocks_left - blocks_a_part : blocks_left;
}

template <class Shape>
int32_t k_blocks_of_a_part(int64_t columns) {
  return static_cast<int32_t>((columns + Shape::BLOCK_K - 1) / Shape::BLOCK_K);
}

}  // namespace tilemoe::cuda

namespace tilemoe::cuda::load {

// A stage of operand B as TMA boxes. The CTAs of a cluster that share the operand load the boxes
// alternately, each box by multicast to all CTAs.

// Copies to this CTA, or to the same address in every CTA of its cluster.
template <int kCtas>
struct BoxCopy {
  template <class... Place>
  __device__ static void load(uint32_t shared, const CUtensorMap* map, uint32_t full,
                              Place... place) {
    if constexpr (kCtas > 1)
      ptx::tma_load_multicast(shared, map, full, (1 << kCtas) - 1, place...);
    else
      ptx::tma_load(shared, map, full, place...);
  }
};

// Loads the boxes of this CTA, each by loader.load_box(copy, number, stage...).
template <int kBoxes, int kCluster, class Loader, class... Stage>
__device__ void load_boxes(const Loader& loader, bool shared_by_cluster, Stage... stage) {
  if (kCluster > 1 && shared_by_cluster) {
    const auto rank = static_cast<int32_t>(blockIdx.x % kCluster);
#pragma unroll
    for (int box = 0; box < kBoxes; box += kCluster)
      if (box + rank < kBoxes) loader.load_box(BoxCopy<kCluster>{}, box + rank, stage...);
  } else {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) loader.load_box(BoxCopy<1>{}, box, stage...);
  }
}

// A TMA box of neighbouring rows of one expert's weights.

template <Major kMajor, int kRows_>
struct WeightBox {
  static constexpr int kRows = kRows_;
  using Operand = StagedOperand<kMajor, kRows>;

  // W: (E, rows, K). K-major: a map (E, rows, K), boxes of (1, kRows, BLOCK_K); MN-major: a map
  // (E, K, rows), boxes of (1, BLOCK_K, 64).
  template <class Shape>
  static CUtensorMap map(const tilemoe_tensor& W) {
    const int64_t E = W.shape[0], rows = W.shape[1], sum = W.shape[2];
    const tilemoe_dtype dtype = kDTypeOf<typename Shape::Recipe::B>;
    if constexpr (kMajor == Major::kK)
      return make_tensor_map({.dtype = dtype,
                              .data = W.data,
                              .size = {sum, rows, E},
                              .stride = {W.stride[1], W.stride[0]},
                              .box = {Shape::BLOCK_K, kRows, 1}});
    else
      return make_tensor_map({.dtype = dtype,
                              .data = W.data,
                              .size = {rows, sum, E},
                              .stride = {W.stride[2], W.stride[0]},
                              .box = {64, Shape::BLOCK_K, 1}});
  }

  template <class Copy>
  __device__ static void load(Copy copy, uint32_t shared, const CUtensorMap* map, uint32_t full,
                              int32_t first_row, int32_t sum, int32_t expert) {
    if constexpr (kMajor == Major::kK) {
      copy.load(shared, map, full, sum, first_row, expert);
    } else {
#pragma unroll
      for (int chunk = 0; chunk < kRows / 64; ++chunk)
        copy.load(shared + chunk * Operand::kChunkBytes, map, full, first_row + chunk * 64, sum,
                  expert);
    }
  }
};

// Operand B of a projection: BLOCK_N columns of the GEMM, which are rows of one expert's weights.
// With a gated activation the tile has two parts of equal size, gate rows and up rows, each with
// its own map. So gate and up of a column are in the accumulators of one thread, whether they are
// concatenated, interleaved or in two tensors.

template <class Shape, Major kMajor, int kParts>
class Weights {
 public:
  using Operand = StagedOperand<kMajor, Shape::BLOCK_N>;
  static constexpr int kTmaBytes = Operand::kBytes;
  // Each CTA of a cluster loads half of B if the chunks can be halved: three chunks cannot.
  static constexpr bool kHasHalves = kMajor == Major::kK || Shape::BLOCK_N % 128 == 0;
  static constexpr int kBoxes = Shape::kCluster == 1 ? kParts
                                : kHasHalves         ? 2
                                                     : Shape::BLOCK_N / 64;
  static_assert(kHasHalves || kParts == 1);
  static constexpr int kBoxRows = Shape::BLOCK_N / kBoxes;
  static constexpr int kBlockColumns = Operand::kRowBytes / 2;  // of 16 bits, in a k block
  using Box = WeightBox<kMajor, kBoxRows>;

  struct Params {
    CUtensorMap part[kParts];
  };

  // kParts weights: (E, columns of the GEMM, K)
  static Params params(const tilemoe_tensor* weights) {
    Params params{};
    for (int p = 0; p < kParts; ++p) params.part[p] = Box::template map<Shape>(weights[p]);
    return params;
  }

  __device__ Weights(const Params& params, int32_t /*thread*/) : params_(params) {}

  __device__ void prefetch() const {
    for (const CUtensorMap& map : params_.part) ptx::tma_prefetch_map(&map);
  }
  __device__ void begin(const Tile& tile) {
    expert_ = ptx::uniform(tile.expert);
    first_row_ = ptx::uniform(tile.n_block) * (Shape::BLOCK_N / kParts);
    shared_by_cluster_ = tile.multicast_b;
  }
  __device__ void load(uint32_t shared, uint32_t full, int32_t k_block) const {
    load_boxes<kBoxes, Shape::kCluster>(*this, shared_by_cluster_, shared, full, k_block);
  }
  template <class Copy>
  __device__ void load_box(Copy copy, int32_t number, uint32_t shared, uint32_t full,
                           int32_t k_block) const {
    const CUtensorMap* map = &params_.part[kParts == 2 ? number : 0];
    const int32_t first_row = first_row_ + (kParts == 2 ? 0 : number * kBoxRows);
    Box::load(copy, shared + number * Box::Operand::kBytes, map, full, first_row,
              k_block * kBlockColumns, expert_);
  }

 private:
  const Params& params_;
  int32_t expert_, first_row_;
  bool shared_by_cluster_;
};

// Operand B of the input gradient: one expert's W1, whose K is the gate part and then the up part.
template <class Shape, Major kMajor>
class WeightsByParts {
 public:
  using Operand = StagedOperand<kMajor, Shape::BLOCK_N>;
  static constexpr int kTmaBytes = Operand::kBytes;
  // MN-major weights are loaded chunk by chunk: three chunks cannot be halved.
  static constexpr int kBoxRows = kMajor == Major::kMN ? 64 : Shape::BLOCK_N / Shape::kCluster;
  static constexpr int kBoxes = Shape::BLOCK_N / kBoxRows;
  static constexpr int kBlockColumns = Operand::kRowBytes / 2;  // of 16 bits, in a k block
  using Box = WeightBox<kMajor, kBoxRows>;

  struct Params {
    CUtensorMap part[2];
    int32_t blocks_a_part;
  };

  // W1's parts: (E, columns, d). The columns are K; the GEMM has d columns.
  static Params params(const UpParts& W1) {
    Params params{};
    params.blocks_a_part = k_blocks_of_a_part<Shape>(W1.columns);
    for (int p = 0; p < W1.count; ++p)
      params.part[p] = Box::template map<Shape>(transposed(W1.part[p]));
    if (W1.count == 1) params.part[1] = params.part[0];
    return params;
  }

  __device__ WeightsByParts(const Params& params, int32_t /*thread*/) : params_(params) {}

  __device__ void prefetch() const {
    for (const CUtensorMap& map : params_.part) ptx::tma_prefetch_map(&map);
  }
  __device__ void begin(const Tile& tile) {
    expert_ = tile.expert;
    first_row_ = tile.n_block * Shape::BLOCK_N;
    shared_by_cluster_ = tile.multicast_b;
  }
  __device__ void load(uint32_t shared, uint32_t full, int32_t k_block) const {
    const auto sum = PartOfSum::of<kBlockColumns>(k_block, params_.blocks_a_part);
    load_boxes<kBoxes, Shape::kCluster>(*this, shared_by_cluster_, shared, full, sum);
  }
  template <class Copy>
  __device__ void load_box(Copy copy, int32_t number, uint32_t shared, uint32_t full,
                           PartOfSum sum) const {
    Box::load(copy, shared + number * Box::Operand::kBytes, &params_.part[sum.part], full,
              first_row_ + number * kBoxRows, sum.begin, expert_);
  }

 private:
  const Params& params_;
  int32_t expert_, first_row_;
  bool shared_by_cluster_;
};

}  // namespace tilemoe::cuda::load
