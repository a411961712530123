// The contract of sm90's epilogues, as concepts, and the operand that an epilogue reads through the
// ring.
#pragma once

#include <concepts>
#include <cstdint>

#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/gemm/sm90_mma.h"

namespace tilemoe::cuda::sm90 {

// Finishes one consumer's accumulators. Its 128 threads call store() with the global number of the
// consumer's first row, and finish() once at the end. Each consumer has kSharedBytes of its own.
template <class E>
concept EpilogueBase = requires(E epilogue, const typename E::Params& params, int32_t thread,
                                uint32_t shared) {
  { E::kSharedBytes } -> std::convertible_to<int>;
  E(params, shared, thread);
  epilogue.finish();
};

template <class E, class Shape>
concept StoringEpilogue = EpilogueBase<E> &&
    requires(E epilogue, Accumulators<Shape>& D, const Tile& tile, int32_t row) {
  epilogue.store(D, tile, row);
};

// An epilogue with an operand of its own names its loader: kBlocks blocks per tile follow the k
// blocks through the ring, each kTmaBytes by TMA, in a stage of which the epilogue uses
// kBlockBytes. store() receives them as EpilogueBlocks; wait_for_stores() waits until the
// epilogue's stores have read them.
template <class E>
concept ReadsThroughRing = EpilogueBase<E> &&
    requires(E epilogue, typename E::Load load, const typename E::Params& params, const Tile& tile,
             uint32_t shared, uint32_t full, int32_t block) {
  { E::Load::kBlocks } -> std::convertible_to<int>;
  { E::Load::kTmaBytes } -> std::convertible_to<int>;
  { E::Load::kBlockBytes } -> std::convertible_to<int>;
  requires std::constructible_from<typename E::Load, decltype(params)>;
  load.prefetch();
  load.begin(tile);
  load.load(shared, full, block);
  epilogue.wait_for_stores();
};

// An epilogue that stores during the next tile's MMAs: defer() finishes the accumulators and keeps
// the result in the epilogue's registers, store_deferred(batch) stores one of kBatches batches of
// it. All batches are stored, in order, before the next defer().
template <class E, class Shape>
concept DeferredEpilogue = EpilogueBase<E> &&
    requires(E epilogue, Accumulators<Shape>& D, const Tile& tile, int32_t row, int32_t batch) {
  { E::kBatches } -> std::convertible_to<int>;
  epilogue.defer(D, tile, row);
  epilogue.store_deferred(batch);
};

template <class E, class Shape>
concept EpilogueOf = StoringEpilogue<E, Shape> || DeferredEpilogue<E, Shape> || ReadsThroughRing<E>;

// Stores at once, by either of the first two kinds.
template <class E, class Accumulators>
__device__ __forceinline__ void store_at_once(E& epilogue, Accumulators& D, const Tile& tile,
                                              int32_t row) {
  if constexpr (requires { epilogue.defer(D, tile, row); }) {
    epilogue.defer(D, tile, row);
#pragma unroll
    for (int batch = 0; batch < E::kBatches; ++batch) epilogue.store_deferred(batch);
  } else {
    epilogue.store(D, tile, row);
  }
}

// An epilogue that reads a few numbers per row: begin() is called before the tile's MMAs.
template <class E>
concept BeginsEarly = requires(E epilogue, const Tile& tile, int32_t row) {
  epilogue.begin(tile, row);
};

// A consumer's view of the operand that its epilogue reads through the ring: the blocks follow a
// tile's k blocks, so they are loaded while the last MMAs run, and the next tile's operands follow
// them. The epilogue owns a block's stage, and may write its outputs there, until every warp
// releases it: one block later, and for the last block during the next tile's MMAs.
template <class Ring, int kStageBytes>
class EpilogueBlocks {
 public:
  __device__ EpilogueBlocks(const Ring& ring, typename Ring::Position& at, uint32_t shared)
      : ring_(ring), at_(at), shared_(shared) {}

  // Waits for the block and returns its address.
  __device__ uint32_t wait() const {
    ring_.wait_full(at_);
    return shared_ + at_.stage * kStageBytes;
  }
  // The address of the block before it.
  __device__ uint32_t previous() const { return shared_ + at_.before() * kStageBytes; }
  __device__ void release_previous() const { ring_.release(at_.before()); }
  __device__ void advance() { at_.advance(); }

 private:
  const Ring& ring_;
  typename Ring::Position& at_;
  uint32_t shared_;
};

}  // namespace tilemoe::cuda::sm90
