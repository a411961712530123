// A consumer's part of a grouped GEMM: multiplies, and hands the accumulators to the epilogue. Two
// consumers either work on a tile together or take tiles in turn.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/ptx/named_barrier.h"
#include "cuda/ptx/proxy_fence.h"
#include "cuda/sm90/mma.h"
#include "cuda/sm90/named_barriers.h"
#include "cuda/sm90/parts.h"
#include "cuda/sm90/ring.h"

namespace tilemoe::cuda::sm90 {

// D = sum over the tile's k blocks of A B^T, for the consumer's rows from `first_row` on. Calls
// beside_products(k block) when a k block's are under way, and beside_last_products() when all of
// the tile has landed and its last products are.
template <class Gemm, class BesideProducts, class BesideLastProducts>
__device__ __forceinline__ void multiply(Accumulators<typename Gemm::Shape>& D,
                                         const typename Gemm::Ring& ring,
                                         typename Gemm::Ring::Position& at, uint32_t shared,
                                         int32_t first_row, int32_t k_blocks,
                                         const BesideProducts& beside_products,
                                         const BesideLastProducts& beside_last_products) {
  using Products = typename Gemm::Products;
  const Products products(shared, first_row);
  int32_t previous = 0;
  for (int32_t k_block = 0; k_block < k_blocks; ++k_block, at.advance()) {
    ring.wait_full(at);
    // The threads' copies arrive by themselves when they land, so that none waits for its own; what
    // they wrote is handed to the tensor cores by those who waited for it.
    if constexpr (Gemm::kThreadsCopy) ptx::fence_proxy_async();
    products.multiply(D, at.stage * Gemm::kStageBytes, k_block == 0);
    if (k_block > 0) {
      Products::template wait<1>();
      ring.release(previous);
    }
    beside_products(k_block);
    previous = at.stage;
  }
  beside_last_products();
  Products::finish(D);
  ring.release(previous);
}

template <class Gemm>
__device__ __forceinline__ typename Gemm::Epilogue consumers_epilogue(
    const typename Gemm::Params& params, uint32_t shared, int32_t consumer) {
  using Epilogue = typename Gemm::Epilogue;
  return Epilogue(params.epilogue, shared + Gemm::kEpilogueAt + consumer * Epilogue::kSharedBytes,
                  static_cast<int32_t>(threadIdx.x % kWarpgroup));
}

// Finds the next tile of one consumer: in ping-pong passes over every other one, and moves the ring's
// position on past it.
template <class Gemm>
__device__ __forceinline__ auto find_tiles(typename Gemm::Order& order,
                                           typename Gemm::Ring::Position& at, int32_t consumer) {
  constexpr bool kTurns = Gemm::Shape::kSchedule == Schedule::kPingPong;
  return [&, consumer, whose = 0](Tile& tile) mutable {
    while (order.next(tile)) {
      const bool mine = !kTurns || whose == consumer;
      whose = 1 - whose;
      if (mine) return true;
      at.advance(tile.k_blocks);
    }
    return false;
  };
}

// Ping-pong: one multiplies while the other stores. The other one's products hide the search for
// the next tile, and the larger accumulators leave it no registers beside its own.
template <class Gemm>
__device__ __forceinline__ void consume_in_turns(const typename Gemm::Params& params,
                                                 const typename Gemm::Ring& ring, uint32_t shared,
                                                 int32_t consumer) {
  static_assert(!ReadsThroughRing<typename Gemm::Epilogue>);
  constexpr uint32_t kBoth = kConsumers * kWarpgroup;
  const uint32_t my_turn = number_of(NamedBarrier::kTurn0, consumer);
  const uint32_t other_turn = number_of(NamedBarrier::kTurn0, 1 - consumer);
  auto epilogue = consumers_epilogue<Gemm>(params, shared, consumer);
  typename Gemm::Order order(params.order);
  typename Gemm::Ring::Position at;
  Accumulators<typename Gemm::Shape> D;
  if (consumer == 1) ptx::barrier_arrive(other_turn, kBoth);
  auto next_tile = find_tiles<Gemm>(order, at, consumer);
  Tile tile;
  for (bool more = next_tile(tile); more;) {
    if constexpr (BeginsEarly<typename Gemm::Epilogue>) epilogue.begin(tile, tile.row_begin);
    ptx::barrier_sync(my_turn, kBoth);
    multiply<Gemm>(
        D, ring, at, shared, 0, tile.k_blocks, [](int32_t) {},
        [&] { ptx::barrier_arrive(other_turn, kBoth); });
    store_at_once(epilogue, D, tile, tile.row_begin);
    more = next_tile(tile);
  }
  epilogue.finish();
}

// Cooperative: each has half of a tile's rows. They store at the same time, so they look for their
// next tile while the last products run; an epilogue may store beside the next tile's products.
template <class Gemm>
__device__ __forceinline__ void consume_together(const typename Gemm::Params& params,
                                                 const typename Gemm::Ring& ring, uint32_t shared,
                                                 int32_t consumer) {
  using Shape = typename Gemm::Shape;
  using Epilogue = typename Gemm::Epilogue;
  constexpr bool kStoresLater = StoresLater<Epilogue, Shape>;
  const int32_t first_row = consumer * Shape::kRows;
  auto epilogue = consumers_epilogue<Gemm>(params, shared, consumer);
  typename Gemm::Order order(params.order);
  typename Gemm::Ring::Position at;
  Accumulators<Shape> D;

  // The last of the epilogue's blocks of the tile before.
  bool first_tile = true;
  const auto release_block = [&] {
    if constexpr (ReadsThroughRing<Epilogue>)
      if (!first_tile) {
        epilogue.wait_for_stores();
        ring.release(at.before());
      }
    first_tile = false;
  };
  // Of the tile that the epilogue holds, the batches from `batch` on.
  const auto store_held_from = [&](int32_t batch) {
    if constexpr (kStoresLater)
      for (; batch < Epilogue::kBatches; ++batch) epilogue.store_held(batch);
  };

  auto next_tile = find_tiles<Gemm>(order, at, consumer);
  Tile tile;
  for (bool more = next_tile(tile); more;) {
    if constexpr (BeginsEarly<Epilogue>) epilogue.begin(tile, tile.row_begin + first_row);
    Tile next;
    multiply<Gemm>(
        D, ring, at, shared, first_row, tile.k_blocks,
        [&](int32_t k_block) {
          if (k_block == 0) release_block();
          if constexpr (kStoresLater) epilogue.store_held(k_block);
        },
        [&] { more = next_tile(next); });
    const int32_t row = tile.row_begin + first_row;
    if constexpr (ReadsThroughRing<Epilogue>) {
      epilogue.store(D, tile, row, typename Gemm::Blocks(ring, at, shared));
    } else if constexpr (kStoresLater) {
      store_held_from(tile.k_blocks);
      epilogue.hold(D, tile, row);
    } else {
      epilogue.store(D, tile, row);
    }
    tile = next;
  }
  store_held_from(0);
  epilogue.finish();
}

}  // namespace tilemoe::cuda::sm90
