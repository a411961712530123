// What plugs into the skeleton, and what a part lacks when it does not.
#pragma once

#include <concepts>
#include <cstdint>

#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/gemm/sm90_mma.h"

namespace tilemoe::cuda::sm90 {

// Finishes one consumer's accumulators: store() is called by its 128 threads with the global number
// of the consumer's first row, finish() once at the end. kSharedBytes are each consumer's own.
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

// An epilogue with an operand of its own names what brings it: kBlocks blocks a tile that follow
// the k blocks through the ring, each kTmaBytes by TMA, in a stage of which the
// epilogue uses kBlockBytes. store() gets them as EpilogueBlocks; wait_for_stores() waits until its
// stores have read them.
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

// An epilogue that stores beside the next tile's products: hold() brings the accumulators, or what
// is made of them, to registers of its own, store_deferred(batch) stores one of kBatches batches of
// them. All batches are stored, in order, before the next hold().
template <class E, class Shape>
concept DeferredEpilogue = EpilogueBase<E> &&
    requires(E epilogue, Accumulators<Shape>& D, const Tile& tile, int32_t row, int32_t batch) {
  { E::kBatches } -> std::convertible_to<int>;
  epilogue.defer(D, tile, row);
  epilogue.store_deferred(batch);
};

template <class E, class Shape>
concept EpilogueOf = StoringEpilogue<E, Shape> || DeferredEpilogue<E, Shape> || ReadsThroughRing<E>;

// Whichever of the first two it is.
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

// An epilogue that reads a few numbers a row has begin() called before the tile's products.
template <class E>
concept BeginsEarly = requires(E epilogue, const Tile& tile, int32_t row) {
  epilogue.begin(tile, row);
};

// What an epilogue reads beside the accumulators, from a consumer's side: blocks that follow a
// tile's k blocks through the ring, so that they are under way while the last products run and the
// next tile's operands follow them. A block's stage is the epilogue's, to write what it stores too,
// until it is released: by every warp, one block later, or by the next tile's products the last.

template <class Ring, int kStageBytes>
class EpilogueBlocks {
 public:
  __device__ EpilogueBlocks(const Ring& ring, typename Ring::Position& at, uint32_t shared)
      : ring_(ring), at_(at), shared_(shared) {}

  // Where the block lies, which has landed.
  __device__ uint32_t wait() const {
    ring_.wait_full(at_);
    return shared_ + at_.stage * kStageBytes;
  }
  __device__ void release_previous() const { ring_.release(at_.before()); }
  __device__ void advance() { at_.advance(); }

 private:
  const Ring& ring_;
  typename Ring::Position& at_;
  uint32_t shared_;
};

}  // namespace tilemoe::cuda::sm90
