#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/core/operand.h"
#include "cuda/core/part_of_sum.h"
#include "cuda/core/tensor_map.h"
#include "cuda/core/tile.h"
#include "cuda/core/up_columns.h"
#include "cuda/load/cluster_boxes.h"
#include "cuda/load/weight_box.h"
#include "cuda/ptx/tma.h"

namespace tilemoe::cuda::load {

// Operand B from one expert's weights.
template <class Shape, Major kMajor>
class SummedWeights {
 public:
  using Operand = StagedOperand<kMajor, Shape::BLOCK_N>;
  static constexpr int kTmaBytes = Operand::kBytes;
  static constexpr int kThreadArrivals = 0;
  // What lies in chunks of rows comes chunk by chunk: three of them have no halves.
  static constexpr int kBoxRows = kMajor == Major::kMN ? 64 : Shape::BLOCK_N / Shape::kCluster;
  static constexpr int kBoxes = Shape::BLOCK_N / kBoxRows;
  using Box = WeightBox<kMajor, kBoxRows>;

  struct Params {
    CUtensorMap part[2];
    int32_t blocks_a_part;
  };

  // Of W1's parts (E, columns, d), which are summed over; the product has d columns.
  static Params params(const UpParts& W1) {
    Params params{};
    params.blocks_a_part = k_blocks_of_a_part<Shape>(W1.columns);
    for (int p = 0; p < W1.count; ++p)
      params.part[p] = Box::template map<Shape>(transposed(W1.part[p]));
    if (W1.count == 1) params.part[1] = params.part[0];
    return params;
  }

  __device__ SummedWeights(const Params& params, int32_t /*thread*/) : params_(params) {}

  __device__ void prefetch() const {
    for (const CUtensorMap& map : params_.part) ptx::tma_prefetch_map(&map);
  }
  __device__ void begin(const Tile& tile) {
    expert_ = tile.expert;
    first_row_ = tile.n_block * Shape::BLOCK_N;
    shared_by_cluster_ = tile.shares_b;
  }
  __device__ void load(uint32_t shared, uint32_t full, int32_t k_block) const {
    const auto sum = PartOfSum::of<Shape::BLOCK_K>(k_block, params_.blocks_a_part);
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
