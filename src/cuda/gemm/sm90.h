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
// What plugs in (parts.h says what each must have): LoadA, LoadB, Epilogue, Order.
#pragma once

#include <concepts>
#include <cstdint>

#include "cuda/core/fragment.h"
#include "cuda/core/launch.h"
#include "cuda/core/recipe.h"
#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/produce.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/gemm/sm90_epilogue.h"
#include "cuda/gemm/sm90_mma.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/barriers.h"
#include "cuda/ptx/warp.h"
#include "cuda/ptx/wgmma.h"

namespace tilemoe::cuda::sm90 {

// The block's tile and how the two consumer warpgroups share it, with everything that follows from
// them at compile time.

constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
constexpr int kBlockThreads = (1 + kConsumers) * kWarpgroup;  // the producer comes first
static_assert(kWarpgroup == load::kProducerThreads);

// 65536 registers over 384 threads are 168 a thread at launch; what the producer gives back, the
// consumers take: 40 + 2 * 232 = 3 * 168.
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 3 * 168);

constexpr int kSharedBytes = 227 * 1024;  // of a block
constexpr int kSwizzleAtom = 1024;        // 8 rows of 128 bytes: what shared tiles are aligned to

// A cluster's blocks work side by side on tiles of neighbouring rows and share what they read of B.
template <class Recipe_, TileConfiguration kTile>
struct TileShape {
  using Recipe = Recipe_;
  using Element = typename Recipe::A;  // of the operands
  using Out = typename Recipe::Out;    // that is stored
  static constexpr int BLOCK_M = kTile.block_m;
  static constexpr int BLOCK_N = kTile.block_n;
  static constexpr int BLOCK_K = 128 / sizeof(Element);  // a swizzled row of 128 bytes
  static constexpr Schedule kSchedule = kTile.schedule;
  static constexpr int kCluster = kTile.cluster;
  static constexpr bool kSmallM = BLOCK_M < 128;

  // Of one consumer: rows, instructions of 64 rows each, and how many consumers a stage is read by.
  static constexpr int kRows = kSchedule == Schedule::kCooperative ? BLOCK_M / kConsumers : BLOCK_M;
  static constexpr int kFragments = kRows / 64;  // a warp has 16 rows of each instruction's
  static constexpr int kReaders = kSchedule == Schedule::kCooperative ? kConsumers : 1;

  static_assert(sizeof(Element) == sizeof(typename Recipe::B), "one swizzle for both operands");
  static_assert(kCluster == 1 || kCluster == 2, "B is brought in halves");
  static_assert(kRows % 64 == 0, "an instruction multiplies 64 rows");
  static_assert(kFragments * BLOCK_N / 2 <= 192,
                "accumulators leave no registers for the epilogue");

  // First row of this warp's fragment, counted from the consumer's first; its columns are the
  // tile's.
  __device__ static int32_t fragment_row(int index) { return fragment_row(index, threadIdx.x); }
  __device__ static int32_t fragment_row(int index, std::integral auto thread) {
    return index * 64 + static_cast<int32_t>(thread % kWarpgroup / kWarp) * fragment::kRows;
  }
};

// The named barriers of a grouped GEMM's block, one a direction.

enum class NamedBarrier : uint32_t {
  kBlock = 0,      // __syncthreads()
  kPingPong0 = 1,  // ping-pong: consumer 1 tells consumer 0 that the ring is its
  kPingPong1 = 2,
  kStore0 = 3,  // the warps of a consumer that store together
  kStore1 = 4,
};

__device__ constexpr uint32_t number_of(NamedBarrier first, int consumer) {
  return static_cast<uint32_t>(first) + static_cast<uint32_t>(consumer);
}

// The ring of stages between the producer and the consumers. Each stage has two barriers:
//   full   ends a phase when the stage's operands have landed: one arrival of the thread that
//          starts TMA, with the bytes it will deliver, and one of each thread that copies.
//   empty  ends a phase when every warp that reads the stage has finished its products, those of
//          the cluster's other block too: its producer writes here as well.
// A waiter must never be two phases behind, since it knows a phase by its parity alone: the
// producer and the consumers of a tile pass every stage in order; of two consumers in ping-pong the
// one whose turn it is not waits at a named barrier, not here.

// kReadingWarps: of one block.
template <int kStages_, int kFullArrivals, int kReadingWarps, int kCluster>
class Ring {
 public:
  static constexpr int kStages = kStages_;
  static constexpr int kBarrierBytes = 2 * kStages * static_cast<int>(sizeof(uint64_t));
  using Position = RingPosition<kStages>;
  static_assert(kStages >= 3, "fewer stages do not hide the latency of memory");

  __device__ explicit Ring(uint32_t barriers) : barriers_(barriers) {
    if constexpr (kCluster > 1) {
      const uint32_t lane = threadIdx.x % kWarp;
      releasing_ = ptx::cluster_address(barriers, lane < kCluster ? lane : 0);
    }
  }

  __device__ void init() const {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(full(stage), kFullArrivals);
      ptx::mbarrier_init(empty(stage), kReadingWarps * kCluster);
    }
    ptx::fence_mbarrier_init();
  }

  __device__ uint32_t full(int32_t stage) const { return barriers_ + 8u * stage; }
  __device__ uint32_t empty(int32_t stage) const { return barriers_ + 8u * (kStages + stage); }

  // The first round finds every stage empty without an arrival: the phase before the first counts
  // as ended.
  __device__ void wait_empty(const Position& at) const {
    ptx::mbarrier_wait(empty(at.stage), at.parity ^ 1);
  }
  __device__ void wait_full(const Position& at) const {
    ptx::mbarrier_wait(full(at.stage), at.parity);
  }

  // A whole warp is done with the stage: lane i tells block i of the cluster.
  __device__ void release(int32_t stage) const {
    if (threadIdx.x % kWarp >= kCluster) return;
    if constexpr (kCluster > 1)
      ptx::mbarrier_arrive_cluster(empty(stage) - barriers_ + releasing_);
    else
      ptx::mbarrier_arrive(empty(stage));
  }

 private:
  uint32_t barriers_;
  uint32_t releasing_;  // the barriers of the block that this lane tells
};

// The producer's part of a grouped GEMM: brings both operands' k blocks, and what the epilogue
// reads, into the ring.

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
    if constexpr (Gemm::kThreadsCopy) ring.wait_empty(at);
    const uint32_t full = ring.full(at.stage);
    if (threadIdx.x == 0) {
      if constexpr (!Gemm::kThreadsCopy) ring.wait_empty(at);  // (of no kernel yet: all copy rows)
      ptx::mbarrier_arrive_expect_bytes(full, Load::kTmaBytes);
      load.load(shared + at.stage * Gemm::kStageBytes, full, block);
    }
    if constexpr (Gemm::kThreadsCopy) ptx::mbarrier_arrive(full);
  }
}

template <class Gemm>
__device__ __forceinline__ void produce(const typename Gemm::Params& params,
                                        const typename Gemm::Ring& ring, uint32_t shared) {
  load::produce<Gemm>(
      params, ring, shared, [] { return threadIdx.x == 0; },
      [&](typename Gemm::Ring::Position& at, const Tile& tile) {
        if constexpr (ReadsThroughRing<typename Gemm::Epilogue>)
          produce_for_epilogue<Gemm>(params, ring, at, shared, tile);
      });
}

// A consumer's part of a grouped GEMM: multiplies, and hands the accumulators to the epilogue. Two
// consumers either work on a tile together or take tiles in turn.

// D = sum over the tile's k blocks of A B^T, for the consumer's rows from `first_row` on. Calls
// during_mma(k block) when a k block's are under way, and during_last_mma() when all of
// the tile has landed and its last products are.
template <class Gemm, class DuringMma, class DuringLastMma>
__device__ __forceinline__ void multiply(Accumulators<typename Gemm::Shape>& D,
                                         const typename Gemm::Ring& ring,
                                         typename Gemm::Ring::Position& at, uint32_t shared,
                                         int32_t first_row, int32_t k_blocks,
                                         const DuringMma& during_mma,
                                         const DuringLastMma& during_last_mma) {
  using TiledMma = typename Gemm::TiledMma;
  const TiledMma mma(shared, first_row);
  int32_t previous = 0;
  for (int32_t k_block = 0; k_block < k_blocks; ++k_block, at.advance()) {
    ring.wait_full(at);
    // The threads' copies arrive by themselves when they land, so that none waits for its own; what
    // they wrote is handed to the tensor cores by those who waited for it.
    if constexpr (Gemm::kThreadsCopy) ptx::fence_proxy_async();
    mma.multiply(D, at.stage * Gemm::kStageBytes, k_block == 0);
    if (k_block > 0) {
      TiledMma::template wait<1>();
      ring.release(previous);
    }
    during_mma(k_block);
    previous = at.stage;
  }
  during_last_mma();
  TiledMma::finish(D);
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

// Ping-pong: one multiplies while the other stores. The other one's products hide the search for
// the next tile, and the larger accumulators leave it no registers beside its own.
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
        D, ring, at, shared, 0, tile.k_blocks, [](int32_t) {},
        [&] { ptx::barrier_arrive(other_barrier, kBoth); });
    store_at_once(epilogue, D, tile, tile.row_begin);
    more = next_tile(tile);
  }
  epilogue.finish();
}

// Cooperative: each has half of a tile's rows. They store at the same time, so they look for their
// next tile while the last products run; an epilogue may store beside the next tile's products.
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
        D, ring, at, shared, first_row, tile.k_blocks,
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
  static constexpr bool kThreadsCopy =
      load::copies_by_threads<LoadA> || load::copies_by_threads<LoadB>;
  static constexpr int kTmaBytes = LoadA::kTmaBytes + LoadB::kTmaBytes;
  static constexpr int kFullArrivals = 1 + (kThreadsCopy ? kWarpgroup : 0);
  static constexpr bool kWeightsFirst = Shape::kSmallM && rows_in_order<LoadA>;
  static constexpr int kReadingWarps = Shape::kReaders * kWarpgroup / kWarp;

  // Shared memory: stages (A, B), the consumers' epilogues, barriers.
  static constexpr int kStageBytes = LoadA::Operand::kBytes + LoadB::Operand::kBytes;
  static constexpr int kEpilogueBytes = kConsumers * Epilogue::kSharedBytes;
  static constexpr int kBarrierRoom = 256;
  static constexpr int kStages = (kSharedBytes - kEpilogueBytes - kBarrierRoom) / kStageBytes;
  using Ring = sm90::Ring<kStages, kFullArrivals, kReadingWarps, Shape::kCluster>;
  using Blocks = EpilogueBlocks<Ring, kStageBytes>;
  using TiledMma = Mma<Shape, typename LoadA::Operand, typename LoadB::Operand>;
  static_assert(Shape::BLOCK_K % TiledMma::kK == 0);
  static constexpr int kEpilogueAt = kStages * kStageBytes;
  static constexpr int kBarriersAt = kEpilogueAt + kEpilogueBytes;
  static constexpr int kSharedBytesUsed = kBarriersAt + Ring::kBarrierBytes;
  static_assert(Ring::kBarrierBytes <= kBarrierRoom && kSharedBytesUsed <= kSharedBytes);
  static_assert(LoadA::Operand::kBytes % kSwizzleAtom == 0 && kStageBytes % kSwizzleAtom == 0 &&
                Epilogue::kSharedBytes % kSwizzleAtom == 0);
};

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
    if constexpr (Gemm::kWeightsFirst) wait_for_previous();  // (the producer's wait would do)
    ptx::acquire_registers<kConsumerRegisters>();
    if constexpr (Gemm::Shape::kSchedule == Schedule::kPingPong)
      consume_ping_pong<Gemm>(params, ring, shared, warpgroup - 1);
    else
      consume_cooperative<Gemm>(params, ring, shared, warpgroup - 1);
  }
  if constexpr (Gemm::Shape::kCluster > 1) sync();
}

}  // namespace tilemoe::cuda::sm90
