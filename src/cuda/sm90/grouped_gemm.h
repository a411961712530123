// The grouped-GEMM skeleton: persistent, warp-specialised, for any loaders, epilogue and tile
// order.
//
//   producer     one warpgroup: brings k block after k block of both operands into the ring
//   consumers    two warpgroups: multiply, then hand float32 accumulators to the epilogue
//
// All roles walk the same tile order on their own. In the steady state the ring is full, a stage is
// refilled as soon as its readers are done with it, across the borders of tiles, and one group of
// products is always under way while the next stage is waited for:
//
//   producer     | load 4        | load 5        | load 6 ...
//   consumer     | mma 0 | mma 1, release 0 | mma 2, release 1 | ... | epilogue | mma ...
//
// An epilogue may hold what it stores in registers, and store it beside the next tile's first
// products.
//
// What plugs in (gemm/parts.h says what each must have): LoadA, LoadB, Epilogue, Order.
#pragma once

#include <cstdint>

#include "cuda/core/early_launch.h"
#include "cuda/core/tile.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/named_barrier.h"
#include "cuda/ptx/pin.h"
#include "cuda/ptx/proxy_fence.h"
#include "cuda/ptx/registers.h"
#include "cuda/ptx/shared_address.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/epilogue_blocks.h"
#include "cuda/sm90/named_barriers.h"
#include "cuda/sm90/parts.h"
#include "cuda/sm90/ring.h"
#include "cuda/sm90/shape.h"

namespace tilemoe::cuda {

template <class Shape_, Loader LoadA_, Loader LoadB_, EpilogueOf<Shape_> Epilogue_,
          TileOrder Order_>
struct GroupedGemm {
  using Shape = Shape_;
  using LoadA = LoadA_;
  using LoadB = LoadB_;
  using Epilogue = Epilogue_;
  using Order = Order_;

  struct Params {
    typename LoadA::Params a;
    typename LoadB::Params b;
    typename Epilogue::Params epilogue;
    typename Order::Params order;
  };

  static_assert(LoadA::Operand::kRows == Shape::BLOCK_M && LoadB::Operand::kRows == Shape::BLOCK_N);
  static constexpr bool kThreadsCopy = copies_by_threads<LoadA> || copies_by_threads<LoadB>;
  static constexpr int kTmaBytes = LoadA::kTmaBytes + LoadB::kTmaBytes;
  static constexpr int kFullArrivals = 1 + (kThreadsCopy ? kWarpgroup : 0);
  static constexpr int kReadingWarps = Shape::kReaders * kWarpgroup / kWarp;

  // Shared memory: stages (A, B), the consumers' epilogues, barriers.
  static constexpr int kStageBytes = LoadA::Operand::kBytes + LoadB::Operand::kBytes;
  static constexpr int kEpilogueBytes = kConsumers * Epilogue::kSharedBytes;
  static constexpr int kBarrierRoom = 256;
  static constexpr int kStages = (kSharedBytes - kEpilogueBytes - kBarrierRoom) / kStageBytes;
  using Ring = cuda::Ring<kStages, kFullArrivals, kReadingWarps, Shape::kCluster>;
  using Blocks = EpilogueBlocks<Ring, kStageBytes>;
  static constexpr int kEpilogueAt = kStages * kStageBytes;
  static constexpr int kBarriersAt = kEpilogueAt + kEpilogueBytes;
  static constexpr int kSharedBytesUsed = kBarriersAt + Ring::kBarrierBytes;
  static_assert(Ring::kBarrierBytes <= kBarrierRoom && kSharedBytesUsed <= kSharedBytes);
  static_assert(LoadA::Operand::kBytes % kSwizzleAtom == 0 && kStageBytes % kSwizzleAtom == 0 &&
                Epilogue::kSharedBytes % kSwizzleAtom == 0);
};

// Brings what the tile's epilogue reads; the threads that copy k blocks arrive with empty hands.
template <class Gemm>
__device__ __forceinline__ void produce_for_epilogue(const typename Gemm::Params& params,
                                                     const typename Gemm::Ring& ring,
                                                     typename Gemm::Ring::Position& at,
                                                     uint32_t shared, const Tile& tile) {
  using Load = typename Gemm::Epilogue::Load;
  static_assert(Gemm::Shape::kSchedule == Schedule::kCooperative, "consumers pass every block");
  static_assert(Load::kBlockBytes <= Gemm::kStageBytes);
  Load load(params.epilogue);
  load.begin(tile);
  for (int32_t block = 0; block < Load::kBlocks; ++block, at.advance()) {
    ring.wait_empty(at);
    const uint32_t full = ring.full(at.stage);
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_bytes(full, Load::kTmaBytes);
      load.load(shared + at.stage * Gemm::kStageBytes, full, block);
    }
    if constexpr (Gemm::kThreadsCopy) ptx::mbarrier_arrive(full);
  }
}

template <class Gemm>
__device__ __forceinline__ void produce(const typename Gemm::Params& params,
                                        const typename Gemm::Ring& ring, uint32_t shared) {
  using LoadA = typename Gemm::LoadA;
  using LoadB = typename Gemm::LoadB;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (!Gemm::kThreadsCopy && thread >= kWarp) return;  // one thread starts TMA

  LoadA load_a(params.a, thread);
  LoadB load_b(params.b, thread);
  typename Gemm::Order order(params.order);
  typename Gemm::Ring::Position at;
  for (Tile tile; order.next(tile);) {
    load_a.begin(tile);
    load_b.begin(tile);
    for (int32_t k_block = 0; k_block < tile.k_blocks; ++k_block, at.advance()) {
      ring.wait_empty(at);
      const uint32_t stage_a = shared + at.stage * Gemm::kStageBytes;
      const uint32_t stage_b = stage_a + LoadA::Operand::kBytes;
      if (thread == 0) {
        const uint32_t full = ring.full(at.stage);
        ptx::mbarrier_arrive_expect_bytes(full, Gemm::kTmaBytes);
        if constexpr (!copies_by_threads<LoadA>) load_a.load(stage_a, full, k_block);
        if constexpr (!copies_by_threads<LoadB>) load_b.load(stage_b, full, k_block);
      }
      if constexpr (copies_by_threads<LoadA>) load_a.copy(stage_a, k_block);
      if constexpr (copies_by_threads<LoadB>) load_b.copy(stage_b, k_block);
      if constexpr (Gemm::kThreadsCopy) ptx::cp_async_arrive(ring.full(at.stage));
    }
    if constexpr (ReadsThroughRing<typename Gemm::Epilogue>)
      produce_for_epilogue<Gemm>(params, ring, at, shared, tile);
  }
}

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
  using Shape = typename Gemm::Shape;
  using A = typename Gemm::LoadA::Operand;
  using B = typename Gemm::LoadB::Operand;
  constexpr int kSteps = Shape::BLOCK_K / 16;
  // 64 rows of A are 8 KiB either way: 64 rows of 128 bytes, or one chunk.
  constexpr int kSubtileBytes = 64 * A::kRowBytes;

  const uint64_t a_first = A::descriptor(shared + first_row * A::kRowBytes);
  const uint64_t b_first = B::descriptor(shared + A::kBytes);
  int32_t previous = 0;
  for (int32_t k_block = 0; k_block < k_blocks; ++k_block, at.advance()) {
    ring.wait_full(at);
    // The threads' copies arrive by themselves when they land, so that none waits for its own; what
    // they wrote is handed to the tensor cores by those who waited for it.
    if constexpr (Gemm::kThreadsCopy) ptx::fence_proxy_async();
    const uint32_t stage = at.stage * Gemm::kStageBytes;
#pragma unroll
    for (int m = 0; m < Shape::kSubtiles; ++m)
      for (float& accumulator : D[m]) ptx::pin(accumulator);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int m = 0; m < Shape::kSubtiles; ++m)
        ptx::wgmma<typename Shape::Element, Shape::BLOCK_N, A::kMajor, B::kMajor>(
            D[m], A::advance(a_first, stage + m * kSubtileBytes + step * A::kStepBytes),
            B::advance(b_first, stage + step * B::kStepBytes), k_block != 0 || step != 0);
    ptx::wgmma_commit();
    if (k_block > 0) {
      ptx::wgmma_wait<1>();
      ring.release(previous);
    }
    beside_products(k_block);
    previous = at.stage;
  }
  beside_last_products();
  ptx::wgmma_wait<0>();
#pragma unroll
  for (int m = 0; m < Shape::kSubtiles; ++m)
    for (float& accumulator : D[m]) ptx::pin(accumulator);
  ring.release(previous);
}

template <class Gemm>
__device__ __forceinline__ void consume(const typename Gemm::Params& params,
                                        const typename Gemm::Ring& ring, uint32_t shared,
                                        int32_t consumer) {
  using Shape = typename Gemm::Shape;
  using Epilogue = typename Gemm::Epilogue;
  constexpr bool kTurns = Shape::kSchedule == Schedule::kPingPong;
  constexpr bool kStoresLater = !kTurns && StoresLater<Epilogue, Shape>;
  constexpr uint32_t kBoth = kConsumers * kWarpgroup;
  const auto thread = static_cast<int32_t>(threadIdx.x % kWarpgroup);
  const int32_t first_row = kTurns ? 0 : consumer * Shape::kRows;
  const uint32_t my_turn = number_of(NamedBarrier::kTurn0, consumer);
  const uint32_t other_turn = number_of(NamedBarrier::kTurn0, 1 - consumer);

  Epilogue epilogue(params.epilogue, shared + Gemm::kEpilogueAt + consumer * Epilogue::kSharedBytes,
                    thread);
  typename Gemm::Order order(params.order);
  typename Gemm::Ring::Position at;
  Accumulators<Shape> D;
  if (kTurns && consumer == 1) ptx::barrier_arrive(other_turn, kBoth);
  // The consumer's next tile; in ping-pong, passes over the other one's.
  auto next_of_mine = [&, whose = 0](Tile& mine_next) mutable {
    while (order.next(mine_next)) {
      const bool mine = !kTurns || whose == consumer;
      whose = 1 - whose;
      if (mine) return true;
      at.advance(mine_next.k_blocks);
    }
    return false;
  };

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
  const auto store = [&](const Tile& tile) {
    const int32_t row = tile.row_begin + first_row;
    if constexpr (ReadsThroughRing<Epilogue>) {
      epilogue.store(D, tile, row, typename Gemm::Blocks(ring, at, shared));
    } else if constexpr (kStoresLater) {
      store_held_from(tile.k_blocks);
      epilogue.hold(D, tile, row);
    } else {
      store_at_once(epilogue, D, tile, row);
    }
  };

  // Consumers that store at the same time look for their next tile while the last products run. In
  // ping-pong the other one's products hide it, and the larger accumulators leave no registers.
  Tile tile;
  for (bool more = next_of_mine(tile); more;) {
    if constexpr (BeginsEarly<Epilogue>) epilogue.begin(tile, tile.row_begin + first_row);
    if constexpr (kTurns) {
      ptx::barrier_sync(my_turn, kBoth);
      multiply<Gemm>(
          D, ring, at, shared, first_row, tile.k_blocks, [](int32_t) {},
          [&] { ptx::barrier_arrive(other_turn, kBoth); });
      store(tile);
      more = next_of_mine(tile);
    } else {
      Tile next;
      multiply<Gemm>(
          D, ring, at, shared, first_row, tile.k_blocks,
          [&](int32_t k_block) {
            if (k_block == 0) release_block();
            if constexpr (kStoresLater) epilogue.store_held(k_block);
          },
          [&] { more = next_of_mine(next); });
      store(tile);
      tile = next;
    }
  }
  store_held_from(0);
  epilogue.finish();
}

template <class Gemm>
__global__ void __launch_bounds__(kBlockThreads, 1)
    grouped_gemm(const __grid_constant__ typename Gemm::Params params) {
  extern __shared__ __align__(kSwizzleAtom) uint8_t memory[];
  const uint32_t shared = ptx::shared_address(memory);
  const typename Gemm::Ring ring(shared + Gemm::kBarriersAt);
  if (threadIdx.x == 0) {
    ring.init();
    typename Gemm::LoadA(params.a, 0).prefetch();
    typename Gemm::LoadB(params.b, 0).prefetch();
    if constexpr (ReadsThroughRing<typename Gemm::Epilogue>)
      typename Gemm::Epilogue::Load(params.epilogue).prefetch();
  }
  wait_for_previous();
  // The other block of the cluster copies into this one's memory and arrives at its barriers.
  const auto sync = [] {
    if constexpr (Gemm::Shape::kCluster > 1)
      ptx::cluster_sync();
    else
      __syncthreads();
  };
  sync();

  // Uniform over the warp, and known to be so.
  const int32_t warpgroup =
      __shfl_sync(0xffffffff, static_cast<int32_t>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    ptx::release_registers<kProducerRegisters>();
    produce<Gemm>(params, ring, shared);
  } else {
    ptx::acquire_registers<kConsumerRegisters>();
    consume<Gemm>(params, ring, shared, warpgroup - 1);
  }
  if constexpr (Gemm::Shape::kCluster > 1) sync();
}

}  // namespace tilemoe::cuda
