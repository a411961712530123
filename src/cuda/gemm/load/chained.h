// An operand from two sources of k blocks: all k blocks of the first loader, then those of the
// second one. The GEMM's sum then has two terms, [A, P] [W, B]^T.
#pragma once

#include <cstdint>

#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/schedule/tile.h"

namespace tilemoe::cuda::load {

// Of two loaders that a producer runs (sm90, sm100). Both load by TMA or both copy by threads. Rows
// of the second source may come from the previous kernel, so that no operand is in order.
template <class First_, class Second_>
class Chained {
 public:
  using First = First_;
  using Second = Second_;
  using Operand = typename First::Operand;
  static constexpr int kTmaBytes = First::kTmaBytes;
  // With codes, the first source's stage also has their scales.
  static_assert(Operand::kMajor == Second::Operand::kMajor &&
                Operand::kRows == Second::Operand::kRows &&
                Operand::kBytes >= Second::Operand::kBytes && kTmaBytes == Second::kTmaBytes);

  struct Params {
    typename First::Params first;
    typename Second::Params second;
    int32_t first_blocks;
    int32_t last_columns;  // of the second source, in its last k block
  };

  // The first source has `first_blocks` k blocks, the second one `second_columns` columns, in k
  // blocks of `block_k`.
  static Params params(const typename First::Params& first, int64_t first_blocks,
                       const typename Second::Params& second, int64_t second_columns, int block_k) {
    return {first, second, static_cast<int32_t>(first_blocks),
            static_cast<int32_t>((second_columns - 1) % block_k + 1)};
  }

  __device__ Chained(const Params& params, int32_t thread)
      : params_(params), first_(params.first, thread), second_(params.second, thread) {}

  __device__ void prefetch() const {
    first_.prefetch();
    second_.prefetch();
  }
  __device__ void begin(const Tile& tile) {
    first_.begin(tile);
    second_.begin(tile);
  }
  __device__ void load(uint32_t shared, uint32_t full, int32_t k_block) const
      requires(TmaLoader<First>) {
    if (k_block < params_.first_blocks)
      first_.load(shared, full, k_block);
    else
      second_.load(shared, full, k_block - params_.first_blocks);
  }
  __device__ int32_t whole_blocks() const requires(ThreadLoader<First>) {
    return first_.whole_blocks();
  }
  __device__ void copy_whole(uint32_t shared, int32_t k_block) requires(ThreadLoader<First>) {
    first_.copy_whole(shared, k_block);
  }
  __device__ void copy(uint32_t shared, int32_t k_block) requires(ThreadLoader<First>) {
    if (k_block < params_.first_blocks)
      first_.copy(shared, k_block);
    else
      second_.copy(shared, k_block - params_.first_blocks);
  }
  __device__ void advance(int32_t k_block) requires(ThreadLoader<First>) {
    if (k_block < params_.first_blocks)
      first_.advance(k_block);
    else
      second_.advance(k_block - params_.first_blocks);
  }

 private:
  const Params& params_;
  First first_;
  Second second_;
};

template <class Load>
inline constexpr bool has_two_sources = false;
template <class First, class Second>
inline constexpr bool has_two_sources<Chained<First, Second>> = true;

// The MMAs along K of a tile's last k block: fewer than of the others if a second source has not
// enough columns for all of them.
template <class Gemm>
__device__ __forceinline__ int32_t last_steps(const typename Gemm::Params& params) {
  using Mma = typename Gemm::TiledMma;
  if constexpr (has_two_sources<typename Gemm::LoadA>)
    return (params.a.last_columns + Mma::kK - 1) / Mma::kK;
  else
    return Mma::kSteps;
}

}  // namespace tilemoe::cuda::load

namespace tilemoe::cuda::sm80 {

// Of two loaders that every warp runs (sm80), which count the k blocks that are left.
template <class First_, class Second_>
class Chained {
 public:
  using First = First_;
  using Second = Second_;
  // Codes take fewer bytes than the second source's values, in a stage that holds either.
  using Operand = typename Second::Operand;
  static_assert(First::Operand::kRows == Operand::kRows &&
                First::Operand::kBytes <= Operand::kBytes);

  struct Params {
    typename First::Params first;
    typename Second::Params second;
    int32_t second_blocks;
  };

  static Params params(const typename First::Params& first, int64_t /*first_blocks*/,
                       const typename Second::Params& second, int64_t second_columns, int block_k) {
    return {first, second, static_cast<int32_t>((second_columns - 1) / block_k + 1)};
  }

  __device__ Chained(const Params& params, int32_t thread)
      : params_(params), first_(params.first, thread), second_(params.second, thread) {}

  __device__ __forceinline__ void begin(const Tile& tile) {
    first_.begin(tile);
    second_.begin(tile);
  }
  __device__ __forceinline__ void copy(uint32_t shared, int32_t blocks_left) const {
    if (blocks_left > params_.second_blocks)
      first_.copy(shared, blocks_left - params_.second_blocks);
    else
      second_.copy(shared, blocks_left);
  }
  __device__ __forceinline__ void advance(int32_t blocks_left) {
    if (blocks_left > params_.second_blocks)
      first_.advance(blocks_left - params_.second_blocks);
    else
      second_.advance(blocks_left);
  }

 private:
  const Params& params_;
  First first_;
  Second second_;
};

}  // namespace tilemoe::cuda::sm80
