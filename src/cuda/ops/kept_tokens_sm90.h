// router_logits on Hopper for more than 128 experts: two tiles of logits of the same tokens, by one
// CTA. The tokens of a chunk stay in shared memory until both tiles have read them, so that they
// come from L2 half as often; the running sums of both tiles are in registers.
//
//   warp 0     loads tokens: eight places, one for each k block of a chunk
//   warp 1     loads the weight; of a pair, each CTA half of each stage for both
//   consumers  multiply a chunk with 128 experts, then with the other 128, and add its sums
#pragma once

#include <cstdint>

#include "cuda/core/launch.h"
#include "cuda/gemm/epilogue/store_threads.h"
#include "cuda/gemm/sm90.h"
#include "cuda/ops/logit_chunks.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/barriers.h"
#include "cuda/ptx/warp.h"
#include "cuda/ptx/wgmma.h"

namespace tilemoe::cuda::logits {

// Tokens, Weight: loaders of a k block of both operands (ChunkBoxes).
template <class Shape_, class Tokens_, class Weight_>
struct KeptTokensGemm {
  using Shape = Shape_;
  using Tokens = Tokens_;
  using Weight = Weight_;
  using Order = ChunkTiles<Shape::BLOCK_M, Shape::kCluster>;  // Tile::n_block: of two tiles
  static constexpr int kThreads = sm90::kBlockThreads;
  static constexpr int kSmsPerCluster = Shape::kCluster;
  static constexpr int kTiles = 2;  // of a CTA, at a time
  using Store = StoreByThreads<Shape, typename Shape::Element, 32>;

  struct Params {
    typename Tokens::Params tokens;
    typename Weight::Params weight;
    typename Order::Params order;
    Output output;
    typename Store::Output rows;  // the logits, if `output` need not store them
    int32_t tiles;                // across the experts
    int32_t terms;                // k blocks of the weight for each of the tokens' k_blocks
  };

  static constexpr int kReadingWarps = sm90::kConsumers * sm90::kWarpgroup / kWarp;
  static constexpr int kStages = 6;  // of the weight
  using TokenRing = sm90::Ring<static_cast<int>(kChunkBlocks), 1, kReadingWarps, 1>;
  using WeightRing = sm90::Ring<kStages, 1, kReadingWarps, Shape::kCluster>;
  using TokenBlock = typename Tokens::Operand;
  using WeightBlock = typename Weight::Operand;
  static constexpr int kWeightAt = static_cast<int>(kChunkBlocks) * TokenBlock::kBytes;
  static constexpr int kBarriersAt = kWeightAt + kStages * WeightBlock::kBytes;
  static constexpr int kSharedBytesUsed =
      kBarriersAt + TokenRing::kBarrierBytes + WeightRing::kBarrierBytes;
  static_assert(kSharedBytesUsed <= sm90::kSharedBytes);
  static_assert(Shape::kFragments == 1);
};

// The tile of 128 experts number `which` of a CTA's two.
__device__ __forceinline__ Tile one_of_two(Tile tile, int32_t which) {
  tile.n_block = 2 * tile.n_block + which;
  return tile;
}

// Whether a CTA multiplies the second of its two tiles first: every other cluster, so that at a time
// half of the clusters read other experts from L2 than the rest.
template <class Gemm>
__device__ __forceinline__ bool begins_with_second(const typename Gemm::Params& params,
                                                   const Tile& two) {
  return two.m_block / params.order.n_blocks % 2 == 1 && one_of_two(two, 1).n_block < params.tiles;
}

template <class Gemm>
__device__ __forceinline__ void load_tokens(const typename Gemm::Params& params,
                                            const typename Gemm::TokenRing& ring, uint32_t shared) {
  typename Gemm::Tokens tokens(params.tokens, 0);
  typename Gemm::Order order(params.order);
  typename Gemm::TokenRing::Position at;
  for (Tile tile; order.next(tile);) {
    tokens.begin(tile);
    for (int32_t block = 0; block < tile.k_blocks; ++block, at.advance()) {
      ring.wait_empty(at);
      ptx::mbarrier_arrive_expect_bytes(ring.full(at.stage), Gemm::Tokens::kTmaBytes);
      tokens.load(shared + at.stage * Gemm::TokenBlock::kBytes, ring.full(at.stage), block);
    }
  }
}

template <class Gemm>
__device__ __forceinline__ void load_weight(const typename Gemm::Params& params,
                                            const typename Gemm::WeightRing& ring,
                                            uint32_t shared) {
  typename Gemm::Weight weight(params.weight, 0);
  typename Gemm::Order order(params.order);
  typename Gemm::WeightRing::Position at;
  for (Tile two; order.next(two);) {
    const int32_t first = begins_with_second<Gemm>(params, two) ? 1 : 0;
    for (int32_t which = 0; which < Gemm::kTiles; ++which) {
      const Tile tile = one_of_two(two, which ^ first);
      if (tile.n_block >= params.tiles) break;
      weight.begin(tile);
      for (int32_t block = 0; block < tile.k_blocks * params.terms; ++block, at.advance()) {
        ring.wait_empty(at);
        ptx::mbarrier_arrive_expect_bytes(ring.full(at.stage), Gemm::Weight::kTmaBytes);
        weight.load(shared + at.stage * Gemm::WeightBlock::kBytes, ring.full(at.stage), block);
      }
    }
  }
}

// One consumer: 64 tokens.
template <class Gemm>
class KeptTokensConsumer {
 public:
  using Shape = typename Gemm::Shape;
  using Params = typename Gemm::Params;
  using A = typename Gemm::TokenBlock;
  using B = typename Gemm::WeightBlock;
  static constexpr int kNumbers = Shape::BLOCK_N / 2;  // of a thread, of a tile
  static constexpr int kK = Shape::Recipe::kMmaK;      // of an instruction
  static constexpr int kStep = A::step_bytes(kK, sizeof(typename Shape::Element));

  __device__ KeptTokensConsumer(const Params& params, const typename Gemm::TokenRing& tokens,
                                const typename Gemm::WeightRing& weight, uint32_t shared,
                                int32_t consumer)
      : params_(params),
        tokens_(tokens),
        weight_(weight),
        first_row_(consumer * Shape::kRows),
        a_(static_cast<uint32_t>(sm90::descriptor<A>(shared + first_row_ * A::kRowBytes))),
        b_(static_cast<uint32_t>(sm90::descriptor<B>(shared + Gemm::kWeightAt))) {
    ptx::pin(a_);
    ptx::pin(b_);
  }

  __device__ __forceinline__ void run() {
    typename Gemm::Order order(params_.order);
    for (Tile tile; order.next(tile);) {
      const bool has_second = one_of_two(tile, 1).n_block < params_.tiles;
      const auto begin = at_tokens_;
      add_chunk_of<0>(tile, !has_second);
      if (has_second) {
        at_tokens_ = begin;
        add_chunk_of<1>(tile, true);
      }
      if (tile.expert + 1 == params_.order.chunks) store(tile, has_second);
    }
  }

 private:
  // `is_last`: no other tile reads these tokens.
  template <int kWhich>
  __device__ __forceinline__ void add_chunk_of(const Tile& tile, bool is_last) {
    float D[kNumbers];
    int32_t previous = 0, previous_tokens = 0;
    bool is_first = true;
    for (int32_t block = 0; block < tile.k_blocks; ++block, at_tokens_.advance()) {
      if constexpr (kWhich == 0) tokens_.wait_full(at_tokens_);
      for (int32_t term = 0; term < params_.terms; ++term, at_weight_.advance()) {
        weight_.wait_full(at_weight_);
        multiply(D, is_first);
        if (!is_first) {
          ptx::wgmma_wait<1>();
          weight_.release(previous);
          if (is_last && term == 0) tokens_.release(previous_tokens);
        }
        previous = at_weight_.stage;
        is_first = false;
      }
      previous_tokens = at_tokens_.stage;
    }
    ptx::wgmma_wait<0>();
    for (float& number : D) ptx::pin(number);
    weight_.release(previous);
    if (is_last) tokens_.release(previous_tokens);
    add_chunk(reinterpret_cast<float(&)[kNumbers]>(sum_[kWhich * kNumbers]), D, tile.expert == 0);
  }

  // The positions are not in uniform registers: sums of 64 bits in other registers would be 24
  // instructions between two MMAs, which take 64 cycles.
  template <class Operand>
  __device__ __forceinline__ static uint64_t advance(uint32_t low, uint32_t bytes) {
    const uint64_t high = sm90::descriptor<Operand>(0) >> 32 << 32;
    return high | (low + (bytes >> 4));
  }

  __device__ __forceinline__ void multiply(float (&D)[kNumbers], bool overwrites) const {
    for (float& number : D) ptx::pin(number);
    ptx::wgmma_fence();
    const uint32_t a = ptx::uniform(a_ + at_tokens_.stage * (A::kBytes >> 4));
    const uint32_t b = ptx::uniform(b_ + at_weight_.stage * (B::kBytes >> 4));
#pragma unroll
    for (int step = 0; step < Shape::BLOCK_K / kK; ++step)
      ptx::wgmma<typename Shape::Element, Shape::BLOCK_N, A::kMajor, B::kMajor>(
          D, advance<A>(a, step * kStep), advance<B>(b, step * kStep), !overwrites || step != 0);
    ptx::wgmma_commit();
  }

  // The sums are in the order of the MMAs.
  __device__ __forceinline__ void store(const Tile& tile, bool has_second) {
    const int32_t first = begins_with_second<Gemm>(params_, tile) ? 1 : 0;
    const int32_t row = tile.row_begin + first_row_, column = column_of(tile, first);
    if (params_.rows.columns == 0) return store_batches(row, column, has_second);
    store_rows<0>(row, column);
    if (has_second) store_rows<1>(row, column_of(tile, first ^ 1));
  }
  __device__ static int32_t column_of(const Tile& tile, int32_t which) {
    return one_of_two(tile, which).n_block * Shape::BLOCK_N;
  }

  template <int kWhich>
  __device__ __forceinline__ void store_rows(int32_t row, int32_t column) const {
    store_fragment<Shape::BLOCK_N>(typename Gemm::Store(0, 0), params_.rows, 0, row,
                                   params_.output.T, 0, column,
                                   [&](int i) { return sum_[kWhich * kNumbers + i]; });
  }

  // Registers have constant numbers, so the other columns move down after each batch: unrolled, the
  // stores are 140 KiB of instructions.
  __device__ __forceinline__ void store_batches(int32_t row, int32_t column, bool has_second) {
    constexpr int kBatchColumns = 32, kBatch = kBatchColumns / 2;
    const int32_t batches = (has_second ? 2 : 1) * Shape::BLOCK_N / kBatchColumns;
    row += Shape::fragment_row(0);
    if (row >= params_.output.T) return;
#pragma unroll 1
    for (int32_t batch = 0; batch < batches; ++batch) {
      params_.output.store(reinterpret_cast<float(&)[kBatch]>(sum_[0]), row,
                           column ^ batch * kBatchColumns);
#pragma unroll
      for (int later = kBatch; later < Gemm::kTiles * kNumbers; ++later)
        sum_[later - kBatch] = sum_[later];
    }
  }

  const Params& params_;
  const typename Gemm::TokenRing& tokens_;
  const typename Gemm::WeightRing& weight_;
  typename Gemm::TokenRing::Position at_tokens_;
  typename Gemm::WeightRing::Position at_weight_;
  const int32_t first_row_;
  uint32_t a_, b_;  // lower words of the descriptors of the first places
  float sum_[Gemm::kTiles * kNumbers];
};

template <class Gemm>
__global__ void __launch_bounds__(sm90::kBlockThreads, 1)
    kept_tokens_gemm(const __grid_constant__ typename Gemm::Params params) {
  TILEMOE_DYNAMIC_SHARED(uint8_t, memory, sm90::kSwizzleAtom);
  const uint32_t shared = ptx::shared_address(memory);
  const typename Gemm::TokenRing tokens(shared + Gemm::kBarriersAt);
  const typename Gemm::WeightRing weight(shared + Gemm::kBarriersAt +
                                         Gemm::TokenRing::kBarrierBytes);
  if (threadIdx.x == 0) {
    tokens.init();
    weight.init();
    typename Gemm::Tokens(params.tokens, 0).prefetch();
    typename Gemm::Weight(params.weight, 0).prefetch();
  }
  wait_for_previous();
  ptx::cluster_sync();  // the other CTA copies into this CTA's memory and arrives at its barriers

  const int32_t warpgroup =
      __shfl_sync(kAllLanes, static_cast<int32_t>(threadIdx.x) / sm90::kWarpgroup, 0);
  constexpr sm90::Registers kRegisters{24, 240};
  if (warpgroup == 0) {
    ptx::release_registers<kRegisters.producer>();
    const int32_t warp = ptx::uniform(static_cast<int32_t>(threadIdx.x) / kWarp);
    if (warp == 0 && ptx::elect_one()) load_tokens<Gemm>(params, tokens, shared);
    if (warp == 1 && ptx::elect_one()) load_weight<Gemm>(params, weight, shared + Gemm::kWeightAt);
  } else {
    ptx::acquire_registers<kRegisters.consumer>();
    KeptTokensConsumer<Gemm>(params, tokens, weight, shared, warpgroup - 1).run();
  }
  __syncwarp();
  ptx::cluster_sync();
}

}  // namespace tilemoe::cuda::logits
