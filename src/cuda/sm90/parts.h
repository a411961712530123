// What plugs into the skeleton, and what a part lacks when it does not.
#pragma once

#include <concepts>
#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/load/loader.h"
#include "cuda/sm90/mma.h"

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
// is made of them, to registers of its own, store_held(batch) stores one of kBatches batches of
// them. All batches are stored, in order, before the next hold().
template <class E, class Shape>
concept StoresLater = EpilogueBase<E> &&
    requires(E epilogue, Accumulators<Shape>& D, const Tile& tile, int32_t row, int32_t batch) {
  { E::kBatches } -> std::convertible_to<int>;
  epilogue.hold(D, tile, row);
  epilogue.store_held(batch);
};

template <class E, class Shape>
concept EpilogueOf = StoringEpilogue<E, Shape> || StoresLater<E, Shape> || ReadsThroughRing<E>;

// Whichever of the first two it is.
template <class E, class Accumulators>
__device__ __forceinline__ void store_at_once(E& epilogue, Accumulators& D, const Tile& tile,
                                              int32_t row) {
  if constexpr (requires { epilogue.hold(D, tile, row); }) {
    epilogue.hold(D, tile, row);
#pragma unroll
    for (int batch = 0; batch < E::kBatches; ++batch) epilogue.store_held(batch);
  } else {
    epilogue.store(D, tile, row);
  }
}

// An epilogue that reads a few numbers a row has begin() called before the tile's products.
template <class E>
concept BeginsEarly = requires(E epilogue, const Tile& tile, int32_t row) {
  epilogue.begin(tile, row);
};

}  // namespace tilemoe::cuda::sm90
