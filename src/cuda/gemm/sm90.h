// Grouped GEMM for Hopper (wgmma, TMA): persistent and warp-specialized, for any loaders, epilogue
// and tile order.
//
//   producer   warpgroup 0: loads the k blocks of A and B into a ring of stages, by TMA (one thread)
//              or cp.async (all threads)
//   consumers  warpgroups 1 and 2: MMAs, then the epilogue on float32 accumulators. Cooperative:
//              each has half of a tile's rows. Ping-pong: each has every other tile; one runs MMAs
//              while the other runs its epilogue.
//
// Every role walks the same tile order on its own. In the steady state the ring is full, a stage is
// refilled as soon as its readers have released it, also across tiles, and a group of MMAs is in
// flight while the next stage is waited for:
//
//   producer   | load 4        | load 5        | load 6 ...
//   consumer   | mma 0 | mma 1, release 0 | mma 2, release 1 | ... | epilogue | mma ...
//
//   barrier    arrivals                                                     waits
//   full       the thread that starts TMA, with its bytes; each copying      consumers
//              thread's cp.async
//   empty      each reading warp of every CTA of the cluster                 producer
//   ping-pong  all threads of the other consumer                             consumer
//
// An epilogue may defer its stores: it keeps the finished tile in registers and stores it during
// the MMAs of the next tile. It may also read its own operand through the ring, after a tile's.
//
// Parts: LoadA, LoadB (load/stage.h), Epilogue (sm90_epilogue.h), Order (schedule/tile.h).
#pragma once

#include <concepts>
#include <cstdint>

#include "cuda/core/fragment.h"
#include "cuda/core/launch.h"
#include "cuda/core/recipe.h"
#include "cuda/gemm/load/chained.h"
#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/gemm/sm90_epilogue.h"
#include "cuda/gemm/sm90_mma.h"
#include "cuda/gemm/sm90_ring.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/barriers.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/warp.h"
#include "cuda/ptx/wgmma.h"

namespace tilemoe::cuda::sm90 {

// ---- Sizes.

constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
constexpr int kBlockThreads = (1 + kConsumers) * kWarpgroup;  // the producer is first
static_assert(kWarpgroup == load::kProducerThreads);

constexpr int kSharedBytes = 227 * 1024;  // of a CTA
constexpr int kSwizzleAtom = 1024;  // 8 rows of 128 bytes: the alignment of tiles in shared memory

// A CTA's tile and its division among the consumers. The CTAs of a cluster have tiles of
// neighbouring rows and share operand B.
template <class Recipe_, TileConfiguration kTile>
struct TileShape {
  using Recipe = Recipe_;
  using Element = typename Recipe::A;  // of the operands
  static constexpr int BLOCK_M = kTile.block_m;
  static constexpr int BLOCK_N = kTile.block_n;
  static constexpr int BLOCK_K = 128 / sizeof(Element);  // a swizzled row of 128 bytes
  static constexpr Schedule kSchedule = kTile.schedule;
  static constexpr int kCluster = kTile.cluster;
  static constexpr bool kSmallM = BLOCK_M < 128;

  // Rows of one consumer, its instructions of 64 rows each, and the number of consumers that read a
  // stage.
  static constexpr int kRows = kSchedule == Schedule::kCooperative ? BLOCK_M / kConsumers : BLOCK_M;
  static constexpr int kFragments = kRows / 64;  // a warp has 16 rows of each
  static constexpr int kReaders = kSchedule == Schedule::kCooperative ? kConsumers : 1;

  static_assert(sizeof(Element) == sizeof(typename Recipe::B), "one swizzle for both operands");
  static_assert(kCluster == 1 || kCluster == 2, "each CTA loads half of B");
  static_assert(kRows % 64 == 0, "an instruction multiplies 64 rows");
  static_assert(kFragments * BLOCK_N / 2 <= 192,
                "accumulators leave no registers for the epilogue");

  // First row of this warp's fragment, counted from the consumer's first row; a fragment has all
  // columns of the tile.
  __device__ static int32_t fragment_row(int index) { return fragment_row(index, threadIdx.x); }
  __device__ static int32_t fragment_row(int index, std::integral auto thread) {
    return index * 64 + static_cast<int32_t>(thread % kWarpgroup / kWarp) * fragment::kRows;
  }
};

// ---- The GEMM: its parts and its shared memory.

template <class Shape_, load::Loader LoadA_, load::Loader LoadB_, EpilogueOf<Shape_> Epilogue_,
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
  static constexpr bool kWeightsFirst = Shape::kSmallM && load::rows_in_order<LoadA>;
  static constexpr int kThreads = kBlockThreads;
  static constexpr Registers kRegisters =
      registers_of(load::has_two_sources<LoadA>, ReadsThroughRing<Epilogue>);
  static_assert(kRegisters.producer + kConsumers * kRegisters.consumer <= 3 * 168);
  // Two SMs share a TPC, so a grid of whole clusters of two leaves no SM idle.
  static constexpr int kSmsPerCluster = Shape::kCluster;
  static constexpr int kReadingWarps = Shape::kReaders * kWarpgroup / kWarp;

  // Shared memory: stages, the consumers' epilogues, barriers.
  using Stage = load::Stage<LoadA, LoadB>;
  static constexpr int kEpilogueBytes = kConsumers * Epilogue::kSharedBytes;
  static constexpr int kBarrierRoom = 256;
  static constexpr int kStages = (kSharedBytes - kEpilogueBytes - kBarrierRoom) / Stage::kBytes;
  using Ring = sm90::Ring<kStages, Stage::kFullArrivals, kReadingWarps, Shape::kCluster>;
  using Blocks = EpilogueBlocks<Ring, Stage::kBytes>;
  using TiledMma = Mma<Shape, typename LoadA::Operand, typename LoadB::Operand>;
  using Accumulate = typename AccumulateOf<LoadA, LoadB>::type;
  static constexpr int kEpilogueAt = kStages * Stage::kBytes;
  static constexpr int kBarriersAt = kEpilogueAt + kEpilogueBytes;
  static constexpr int kSharedBytesUsed = kBarriersAt + Ring::kBarrierBytes;
  static_assert(Ring::kBarrierBytes <= kBarrierRoom && kSharedBytesUsed <= kSharedBytes);
  static_assert(LoadA::Operand::kBytes % kSwizzleAtom == 0 && Stage::kBytes % kSwizzleAtom == 0 &&
                Epilogue::kSharedBytes % kSwizzleAtom == 0);
};

// ---- Producer.

// Starts TMA for the weights of the first stages, at most one round of the ring, without waiting
// for the previous kernel. Returns the number of k blocks.
template <class Gemm>
__device__ __forceinline__ int32_t load_weights_first(const typename Gemm::Params& params,
                                                      const typename Gemm::Ring& ring,
                                                      uint32_t shared, bool leads) {
  using Stage = typename Gemm::Stage;
  static_assert(!Stage::kThreadsCopy);
  typename Gemm::LoadB load(params.b, 0);
  typename Gemm::Order order(params.order);
  int32_t stage = 0;
  for (Tile tile; stage < Gemm::Ring::kStages && order.next(tile);) {
    load.begin(tile);
    for (int32_t k_block = 0; k_block < tile.k_blocks && stage < Gemm::Ring::kStages;
         ++k_block, ++stage) {
      if (!(leads && ptx::elect_one())) continue;
      const uint32_t full = ring.full(stage);
      ptx::mbarrier_arrive_expect_bytes(full, Stage::kTmaBytes);
      load.load(shared + stage * Stage::kBytes + Stage::kBAt, full, k_block);
    }
  }
  return stage;
}

// Loads the blocks of the epilogue's own operand, which follow a tile's k blocks. The threads that
// copy k blocks only arrive.
template <class Gemm>
__device__ __forceinline__ void load_for_epilogue(const typename Gemm::Params& params,
                                                  const typename Gemm::Ring& ring,
                                                  typename Gemm::Ring::Position& at,
                                                  uint32_t shared, const Tile& tile, bool leads) {
  using Load = typename Gemm::Epilogue::Load;
  using Stage = typename Gemm::Stage;
  static_assert(Gemm::Shape::kSchedule == Schedule::kCooperative, "consumers pass every block");
  static_assert(Load::kBlockBytes <= Stage::kBytes);
  Load load(params.epilogue);
  load.begin(tile);
  for (int32_t block = 0; block < Load::kBlocks; ++block, at.advance()) {
    if constexpr (Stage::kThreadsCopy) ring.wait_empty(at);
    const uint32_t full = ring.full(at.stage);
    if (leads && ptx::elect_one()) {
      if constexpr (!Stage::kThreadsCopy) ring.wait_empty(at);  // (no kernel yet: all copy rows)
      ptx::mbarrier_arrive_expect_bytes(full, load.tma_bytes());
      load.load(shared + at.stage * Stage::kBytes, full, block);
    }
    if constexpr (Stage::kThreadsCopy) ptx::mbarrier_arrive(full);
  }
}

// `shared` is the first stage. A thread waits for an empty stage only if the stage cannot become
// full again without this thread's arrival; any other thread could be two phases late.
template <class Gemm>
__device__ __forceinline__ void produce(const typename Gemm::Params& params,
                                        const typename Gemm::Ring& ring, uint32_t shared) {
  using LoadA = typename Gemm::LoadA;
  using Stage = typename Gemm::Stage;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (!Stage::kThreadsCopy && thread >= kWarp) return;  // one thread starts TMA

  LoadA load_a(params.a, thread);
  typename Gemm::LoadB load_b(params.b, thread);
  // TMA takes uniform registers. The compiler knows that an elected thread is alone, if the
  // election is part of a condition; otherwise each load is a loop over threads.
  const bool leads = ptx::uniform(thread / kWarp) == 0;
  int32_t have_weights = 0;  // k blocks
  if constexpr (Gemm::kWeightsFirst) {
    have_weights = load_weights_first<Gemm>(params, ring, shared, leads);
    pdl_wait();
  }
  typename Gemm::Order order(params.order);
  typename Gemm::Ring::Position at;
  const auto load = [&](int32_t k_block, const auto& copy_a) {
    if constexpr (Stage::kThreadsCopy) ring.wait_empty(at);
    const uint32_t stage_a = shared + at.stage * Stage::kBytes;
    const uint32_t full = ring.full(at.stage);
    if (leads && ptx::elect_one()) {
      if constexpr (!Stage::kThreadsCopy) ring.wait_empty(at);
      const bool has_weights = Gemm::kWeightsFirst && have_weights > 0;
      if (!has_weights) ptx::mbarrier_arrive_expect_bytes(full, Stage::kTmaBytes);
      if constexpr (load::TmaLoader<LoadA>) load_a.load(stage_a, full, k_block);
      if (!has_weights) load_b.load(stage_a + Stage::kBAt, full, k_block);
    }
    --have_weights;
    if constexpr (load::ThreadLoader<LoadA>) {
      copy_a(stage_a, k_block);
      ptx::cp_async_arrive(full);
      load_a.advance(k_block);
    }
    at.advance();
  };
  for (Tile tile; order.next(tile);) {
    load_a.begin(tile);
    load_b.begin(tile);
    int32_t k_block = 0;
    if constexpr (load::ThreadLoader<LoadA>) {
      // A loop of its own is short: it has neither predicates nor the code of the edges.
      const int32_t whole = min(load_a.whole_blocks(), tile.k_blocks);
#pragma unroll 1
      for (; k_block < whole; ++k_block)
        load(k_block, [&](uint32_t shared_a, int32_t k) { load_a.copy_whole(shared_a, k); });
    }
#pragma unroll 1
    for (; k_block < tile.k_blocks; ++k_block)
      load(k_block, [&](uint32_t shared_a, int32_t k) {
        if constexpr (load::ThreadLoader<LoadA>) load_a.copy(shared_a, k);
      });
    if constexpr (ReadsThroughRing<typename Gemm::Epilogue>)
      load_for_epilogue<Gemm>(params, ring, at, shared, tile, leads);
  }
}

// ---- Consumers.

// Returns a function that finds the next tile of one consumer. In ping-pong a consumer skips every
// other tile and advances the ring's position past it.
template <class Gemm>
__device__ __forceinline__ auto find_tiles(typename Gemm::Order& order,
                                           typename Gemm::Ring::Position& at, int32_t consumer) {
  constexpr bool kIsPingPong = Gemm::Shape::kSchedule == Schedule::kPingPong;
  return [&, consumer, whose = 0](Tile& tile) mutable {
    while (order.next(tile)) {
      const bool mine = !kIsPingPong || whose == consumer;
      whose = 1 - whose;
      if (mine) return true;
      at.advance(tile.k_blocks);
    }
    return false;
  };
}

// D = A B^T over the tile's k blocks, for the consumer's rows from `first_row`. Calls during_mma(k
// block) while the MMAs of a k block are in flight, and during_last_mma() when the tile's last MMAs
// are in flight.
template <class Gemm, class DuringMma, class DuringLastMma>
__device__ __forceinline__ void multiply(Accumulators<typename Gemm::Shape>& D,
                                         const typename Gemm::Ring& ring,
                                         typename Gemm::Ring::Position& at, uint32_t shared,
                                         int32_t first_row, const Tile& tile,
                                         const typename Gemm::Params& params,
                                         const DuringMma& during_mma,
                                         const DuringLastMma& during_last_mma) {
  using TiledMma = typename Gemm::TiledMma;
  using Accumulate = typename Gemm::Accumulate;
  using Stage = typename Gemm::Stage;
  const TiledMma mma(shared, first_row);
  Accumulate accumulate(D, params, tile, shared, first_row);
  const int32_t k_blocks = tile.k_blocks, last_steps = load::last_steps<Gemm>(params);
  int32_t previous = 0;
  const auto wait_for = [&](const typename Gemm::Ring::Position& full) {
    ring.wait_full(full);
    // cp.async arrives when a copy lands; the threads that waited make the copied bytes visible to
    // the async proxy, which wgmma reads through.
    if constexpr (Stage::kThreadsCopy) ptx::fence_proxy_async();
  };
  if constexpr (Accumulate::kWaitsAhead) wait_for(at);
  for (int32_t k_block = 0; k_block < k_blocks; ++k_block, at.advance()) {
    if constexpr (!Accumulate::kWaitsAhead) wait_for(at);
    // Waits for the tile's next k block, if it has one, and returns its stage.
    const auto wait_ahead = [&](uint32_t& stage) {
      if (k_block + 1 == k_blocks) return false;
      typename Gemm::Ring::Position next = at;
      next.advance();
      wait_for(next);
      stage = next.stage * Stage::kBytes;
      return true;
    };
    const int32_t steps = k_block + 1 == k_blocks ? last_steps : TiledMma::kSteps;
    accumulate.add(D, mma, at.stage * Stage::kBytes, k_block, steps, wait_ahead);
    if (k_block >= Accumulate::kLag) {
      Accumulate::template wait_for_previous<TiledMma>();
      ring.release(Accumulate::kLag > 0 ? previous : at.stage);
    }
    during_mma(k_block);
    previous = at.stage;
  }
  during_last_mma();
  Accumulate::template finish<TiledMma>(D);
  if constexpr (Accumulate::kLag > 0) ring.release(previous);
}

template <class Gemm>
__device__ __forceinline__ typename Gemm::Epilogue consumers_epilogue(
    const typename Gemm::Params& params, uint32_t shared, int32_t consumer) {
  using Epilogue = typename Gemm::Epilogue;
  return Epilogue(params.epilogue, shared + Gemm::kEpilogueAt + consumer * Epilogue::kSharedBytes,
                  static_cast<int32_t>(threadIdx.x % kWarpgroup));
}

// Ping-pong. The search for the next tile overlaps with the other consumer's MMAs; the accumulators
// leave no registers for a second tile next to the current one.
template <class Gemm>
__device__ __forceinline__ void consume_ping_pong(const typename Gemm::Params& params,
                                                  const typename Gemm::Ring& ring, uint32_t shared,
                                                  int32_t consumer) {
  static_assert(!ReadsThroughRing<typename Gemm::Epilogue>);
  constexpr uint32_t kBoth = kConsumers * kWarpgroup;
  const uint32_t own_barrier = number_of(NamedBarrier::kPingPong0, consumer);
  const uint32_t other_barrier = number_of(NamedBarrier::kPingPong0, 1 - consumer);
  auto epilogue = consumers_epilogue<Gemm>(params, shared, consumer);
  typename Gemm::Order order(params.order);
  typename Gemm::Ring::Position at;
  Accumulators<typename Gemm::Shape> D;
  if (consumer == 1) ptx::barrier_arrive(other_barrier, kBoth);
  auto next_tile = find_tiles<Gemm>(order, at, consumer);
  Tile tile;
  for (bool more = next_tile(tile); more;) {
    if constexpr (BeginsEarly<typename Gemm::Epilogue>) epilogue.begin(tile, tile.row_begin);
    ptx::barrier_sync(own_barrier, kBoth);
    multiply<Gemm>(
        D, ring, at, shared, 0, tile, params, [](int32_t) {},
        [&] { ptx::barrier_arrive(other_barrier, kBoth); });
    store_at_once(epilogue, D, tile, tile.row_begin);
    more = next_tile(tile);
  }
  epilogue.finish();
}

// Cooperative. Both consumers store at the same time, so they search for the next tile during the
// last MMAs. An epilogue may defer its stores.
template <class Gemm>
__device__ __forceinline__ void consume_cooperative(const typename Gemm::Params& params,
                                                    const typename Gemm::Ring& ring,
                                                    uint32_t shared, int32_t consumer) {
  using Shape = typename Gemm::Shape;
  using Epilogue = typename Gemm::Epilogue;
  constexpr bool kDeferred = DeferredEpilogue<Epilogue, Shape>;
  const int32_t first_row = consumer * Shape::kRows;
  auto epilogue = consumers_epilogue<Gemm>(params, shared, consumer);
  typename Gemm::Order order(params.order);
  typename Gemm::Ring::Position at;
  Accumulators<Shape> D;

  // Releases the last of the epilogue's blocks of the previous tile.
  bool first_tile = true;
  const auto release_block = [&] {
    if constexpr (ReadsThroughRing<Epilogue>)
      if (!first_tile) {
        epilogue.wait_for_stores();
        ring.release(at.before());
      }
    first_tile = false;
  };
  // Stores the batches of the deferred tile from `batch` on.
  const auto store_deferred_from = [&](int32_t batch) {
    if constexpr (kDeferred)
      for (; batch < Epilogue::kBatches; ++batch) epilogue.store_deferred(batch);
  };

  auto next_tile = find_tiles<Gemm>(order, at, consumer);
  Tile tile;
  for (bool more = next_tile(tile); more;) {
    if constexpr (BeginsEarly<Epilogue>) epilogue.begin(tile, tile.row_begin + first_row);
    Tile next;
    multiply<Gemm>(
        D, ring, at, shared, first_row, tile, params,
        [&](int32_t k_block) {
          if (k_block == 0) release_block();
          if constexpr (kDeferred) epilogue.store_deferred(k_block);
        },
        [&] { more = next_tile(next); });
    const int32_t row = tile.row_begin + first_row;
    if constexpr (ReadsThroughRing<Epilogue>) {
      epilogue.store(D, tile, row, typename Gemm::Blocks(ring, at, shared));
    } else if constexpr (kDeferred) {
      store_deferred_from(tile.k_blocks);
      epilogue.defer(D, tile, row);
    } else {
      epilogue.store(D, tile, row);
    }
    tile = next;
  }
  store_deferred_from(0);
  epilogue.finish();
}

// ---- Kernel.

template <class Gemm>
__global__ void __launch_bounds__(kBlockThreads, 1)
    grouped_gemm(const __grid_constant__ typename Gemm::Params params) {
  TILEMOE_DYNAMIC_SHARED(uint8_t, memory, kSwizzleAtom);
  const uint32_t shared = ptx::shared_address(memory);
  const typename Gemm::Ring ring(shared + Gemm::kBarriersAt);
  if (threadIdx.x == 0) {
    ring.init();
    typename Gemm::LoadA(params.a, 0).prefetch();
    typename Gemm::LoadB(params.b, 0).prefetch();
    if constexpr (ReadsThroughRing<typename Gemm::Epilogue>)
      typename Gemm::Epilogue::Load(params.epilogue).prefetch();
  }
  if constexpr (!Gemm::kWeightsFirst) wait_for_previous();
  // The other CTA of the cluster copies into this CTA's memory and arrives at its barriers.
  const auto sync = [] {
    if constexpr (Gemm::Shape::kCluster > 1)
      ptx::cluster_sync();
    else
      __syncthreads();
  };
  sync();

  // The compiler knows that a shuffled value is uniform over the warp.
  const int32_t warpgroup =
      __shfl_sync(kAllLanes, static_cast<int32_t>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    ptx::release_registers<Gemm::kRegisters.producer>();
    produce<Gemm>(params, ring, shared);
  } else {
    if constexpr (Gemm::kWeightsFirst) wait_for_previous();  // (the producer's wait would suffice)
    ptx::acquire_registers<Gemm::kRegisters.consumer>();
    if constexpr (Gemm::Shape::kSchedule == Schedule::kPingPong)
      consume_ping_pong<Gemm>(params, ring, shared, warpgroup - 1);
    else
      consume_cooperative<Gemm>(params, ring, shared, warpgroup - 1);
  }
  if constexpr (Gemm::Shape::kCluster > 1) sync();
}

}  // namespace tilemoe::cuda::sm90
