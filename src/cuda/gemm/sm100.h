// The block's tile, its warps and what they share of registers, shared and tensor memory, with
// everything that follows from them at compile time.
#pragma once

#include <concepts>
#include <cstdint>

#include "cuda/core/fragment.h"
#include "cuda/core/launch.h"
#include "cuda/core/recipe.h"
#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/produce.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/gemm/sm100_mma.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/barriers.h"
#include "cuda/ptx/tcgen05.h"
#include "cuda/ptx/warp.h"

namespace tilemoe::cuda::sm100 {

// Warps in this order: those that load, those that store, the one that multiplies. A warp reaches
// the lanes of tensor memory that its number modulo 4 names, so the storing ones begin at such a
// number.
constexpr int kStoringWarps = 4;
constexpr int kFirstStoringWarp = load::kProducerThreads / kWarp;
constexpr int kMultiplyingWarp = kFirstStoringWarp + kStoringWarps;
constexpr int kBlockThreads = (kMultiplyingWarp + 1) * kWarp;
static_assert(kFirstStoringWarp % 4 == 0);

constexpr int kRegisters = 65536 / kBlockThreads / 8 * 8;  // of a thread at most
static_assert(kRegisters >= 224, "an epilogue has 64 numbers, their words and their addresses");

constexpr int kSharedBytes = 227 * 1024;  // of a block
constexpr int kSwizzleAtom = 1024;        // 8 rows of 128 bytes: what shared tiles are aligned to

constexpr int kTensorMemoryColumns = 512;  // of an SM, and so of its one block
constexpr int kAccumulators = 2;           // one is multiplied into while the other is stored
constexpr int kAccumulatorColumns = kTensorMemoryColumns / kAccumulators;

// Two blocks of a cluster multiply together, as a pair: they have neighbouring rows of the same
// columns, and each brings half of B.
template <class Recipe_, TileConfiguration kTile>
struct TileShape {
  using Recipe = Recipe_;
  using Element = typename Recipe::A;  // of the operands
  using Out = typename Recipe::Out;    // that is stored
  static constexpr int BLOCK_M = kTile.block_m;
  static constexpr int BLOCK_N = kTile.block_n;
  static constexpr int BLOCK_K = 128 / sizeof(Element);  // a swizzled row of 128 bytes
  static constexpr int kCluster = kTile.cluster;
  static constexpr int kCtas = kCluster;  // of a product
  // Of B, which each brings its part of.
  static constexpr int kRowsOfB = BLOCK_N / kCtas;
  using OwnColumns = TileShape<Recipe, TileConfiguration{BLOCK_M, kRowsOfB}>;

  static constexpr int kWarpRows = BLOCK_M / kStoringWarps;  // one of each lane
  static constexpr int kFragments = kWarpRows / fragment::kRows;

  static_assert(sizeof(Element) == 2 && sizeof(typename Recipe::B) == 2, "products of 16 bits");
  static_assert(kTile.schedule == Schedule::kCooperative && (kCtas == 1 || kCtas == 2));
  static_assert(BLOCK_M == 128, "row i of a product is lane i of tensor memory");
  static_assert(BLOCK_N % kBatchColumns == 0 && BLOCK_N <= kAccumulatorColumns);

  // First row of this warp's fragment, counted from the tile's first; its columns are the tile's.
  __device__ static int32_t fragment_row(int index) { return fragment_row(index, threadIdx.x); }
  __device__ static int32_t fragment_row(int index, std::integral auto thread) {
    return static_cast<int32_t>(thread) / kWarp % kStoringWarps * kWarpRows +
           index * fragment::kRows;
  }
};

// Rings between roles, of stages of operands and of accumulators. Each place has two barriers:
//   full   ends a phase when what is in it may be read
//   empty  ends a phase when nobody reads it any more
// Both of its sides pass every place in order, so that none is two phases behind the other.
//
// Blocks of a pair have a ring each. In the first one's a place is full when the other's is as
// well, which arrives for it; and empty, of accumulators, when both blocks' warps have read theirs:
// all of them arrive there.

// Arrivals are those of one block.
template <int kPlaces_, int kFullArrivals, int kEmptyArrivals, int kCtas>
class Ring {
 public:
  static constexpr int kPlaces = kPlaces_;
  static constexpr int kBarrierBytes = 2 * kPlaces * static_cast<int>(sizeof(uint64_t));
  using Position = RingPosition<kPlaces>;

  __device__ explicit Ring(uint32_t barriers) : barriers_(barriers) {}

  // By one thread; ptx::fence_mbarrier_init() follows. `remote_full_arrivals` and
  // `remote_empty_arrivals`: how often the other block of a pair arrives here.
  __device__ void init(int32_t remote_full_arrivals, int32_t remote_empty_arrivals) const {
    for (int place = 0; place < kPlaces; ++place) {
      ptx::mbarrier_init(full(place), kFullArrivals + remote_full_arrivals);
      ptx::mbarrier_init(empty(place), kEmptyArrivals + remote_empty_arrivals);
    }
  }

  __device__ uint32_t full(int32_t place) const { return barriers_ + 8u * place; }
  __device__ uint32_t empty(int32_t place) const { return barriers_ + 8u * (kPlaces + place); }

  // The first round finds every place empty without an arrival: the phase before the first counts as
  // ended.
  __device__ void wait_empty(const Position& at) const {
    ptx::mbarrier_wait(empty(at.stage), at.parity ^ 1);
  }
  __device__ void wait_full(const Position& at) const {
    ptx::mbarrier_wait(full(at.stage), at.parity);
  }

  // The same in a pair's first block, for what both have done.
  __device__ void wait_empty_2cta(const Position& at) const {
    if constexpr (kCtas > 1)
      ptx::mbarrier_wait_acquire_cluster(empty(at.stage), at.parity ^ 1);
    else
      wait_empty(at);
  }
  __device__ void wait_full_2cta(const Position& at) const {
    if constexpr (kCtas > 1)
      ptx::mbarrier_wait_acquire_cluster(full(at.stage), at.parity);
    else
      wait_full(at);
  }

  // Tells the block that multiplies: of a pair, its first.
  __device__ void arrive_full(int32_t place) const { arrive(full(place)); }
  __device__ void arrive_empty(int32_t place) const { arrive(empty(place)); }

 private:
  __device__ static void arrive(uint32_t barrier) {
    if constexpr (kCtas > 1)
      ptx::mbarrier_arrive_release_cluster(ptx::cluster_address(barrier, 0));
    else
      ptx::mbarrier_arrive(barrier);
  }

  uint32_t barriers_;
};

// What plugs into the skeleton beside loaders (load/loader.h), and what a part lacks when it does
// not.

// Finishes a tile: store() is called by every storing warp with its own rows, of which it pulls what
// it needs. Warps never wait for each other in it.
template <class E>
concept Epilogue = requires(const E epilogue, const typename E::Params& params,
                            const WarpAccumulators& D, const Tile& tile) {
  E(params);
  epilogue.store(D, tile);
};

// The multiplying warp's part of a grouped GEMM: one of its lanes starts the products of every tile
// and tells by tcgen05.commit when they are done: a stage, to the producer, and a tile, to the
// storing warps. It never waits for its own products.
//
// Of a pair of blocks the first one's starts both blocks' products, and tells both. The other's
// tells the first one of its stages: copies by threads, when they land, can arrive in their own
// block alone.

// Of products that this thread has started, when they are done.
template <int kCtas>
__device__ __forceinline__ void commit_to(uint32_t barrier) {
  if constexpr (kCtas == 2)
    ptx::tcgen05_commit_2cta(barrier, 0b11);
  else
    ptx::tcgen05_commit(barrier);
}

// The last commits arrive in this block's memory.
template <class Ring>
__device__ __forceinline__ void wait_for_last(const Ring& ring, typename Ring::Position at) {
  for (int i = 0; i < Ring::kPlaces; ++i, at.advance()) ring.wait_empty(at);
}

// The accumulators begin at `tensor_memory`.
template <class Gemm>
__device__ __forceinline__ void multiply_tiles(const typename Gemm::Params& params,
                                               const typename Gemm::Ring& ring,
                                               const typename Gemm::Accumulators& accumulators,
                                               uint32_t shared, uint32_t tensor_memory) {
  constexpr int kCtas = Gemm::Shape::kCtas;
  const typename Gemm::TiledMma mma(shared);
  typename Gemm::Order order(params.order);
  typename Gemm::Ring::Position at;
  typename Gemm::Accumulators::Position to;
  for (Tile tile; order.next(tile); to.advance()) {
    const int32_t k_blocks = ptx::uniform(tile.k_blocks);
    const uint32_t D = tensor_memory + to.stage * kAccumulatorColumns;
    accumulators.wait_empty_2cta(to);
    for (int32_t k_block = 0; k_block < k_blocks; ++k_block, at.advance()) {
      ring.wait_full_2cta(at);
      __syncwarp();  // (orders nothing: the lane that is elected has waited by itself)
      if (ptx::elect_one()) {
        // The threads' copies arrive by themselves when they land, so that none waits for its own;
        // what they wrote is handed to the tensor cores by the one who waited for it.
        if constexpr (Gemm::kThreadsCopy) ptx::fence_proxy_async();
        ptx::tcgen05_fence_after_sync();
        mma.multiply(D, at.stage * Gemm::kStageBytes, k_block == 0);
        commit_to<kCtas>(ring.empty(at.stage));
        if (k_block + 1 == k_blocks) commit_to<kCtas>(accumulators.full(to.stage));
      }
    }
  }
  wait_for_last(ring, at);
}

// By a pair's second block.
template <class Gemm>
__device__ __forceinline__ void signal_full_stages(const typename Gemm::Params& params,
                                                   const typename Gemm::Ring& ring) {
  typename Gemm::Order order(params.order);
  typename Gemm::Ring::Position at;
  for (Tile tile; order.next(tile);) {
    const int32_t k_blocks = ptx::uniform(tile.k_blocks);
    for (int32_t k_block = 0; k_block < k_blocks; ++k_block, at.advance()) {
      ring.wait_full(at);
      __syncwarp();  // (orders nothing: the elected lane has waited by itself)
      if (ptx::elect_one()) {
        if constexpr (Gemm::kThreadsCopy) ptx::fence_proxy_async();
        ring.arrive_full(at.stage);
      }
    }
  }
  wait_for_last(ring, at);
}

// A storing warp's part of a grouped GEMM: finishes its rows of every tile while the next one's
// products run.

// `tensor_memory` is the warp's first lane of the first accumulator.
template <class Gemm>
__device__ __forceinline__ void store_tiles(const typename Gemm::Params& params,
                                            const typename Gemm::Accumulators& accumulators,
                                            uint32_t tensor_memory) {
  const typename Gemm::Epilogue epilogue(params.epilogue);
  typename Gemm::Order order(params.order);
  typename Gemm::Accumulators::Position from;
  for (Tile tile; order.next(tile); from.advance()) {
    accumulators.wait_full(from);
    // (Neither this nor the one below orders anything: loads from tensor memory and the wait for
    // them are the whole warp's.)
    __syncwarp();
    ptx::tcgen05_fence_after_sync();
    epilogue.store(WarpAccumulators(tensor_memory + from.stage * kAccumulatorColumns), tile);
    ptx::tcgen05_fence_before_sync();
    __syncwarp();
    if (threadIdx.x % kWarp == 0) accumulators.arrive_empty(from.stage);
  }
}

// The grouped-GEMM skeleton for tcgen05: persistent, warp-specialised, for any loaders, epilogue and
// tile order.
//
//   producer     four warps: bring k block after k block of both operands into the ring
//   multiplying  one warp: multiplies them into one of two accumulators in tensor memory
//   storing      four warps: finish a tile from the other, each 32 of its rows
//
// Two blocks may be a pair (Shape::kCtas): they walk the same order side by side, each with its
// rows and its half of B's columns, and the first one's multiplying warp multiplies for both.
//
// All roles walk the same tile order on their own, and go on to the next tile at once:
//
//   producer     | load 6      | load 7      | load 8 ...
//   multiplying  | 4 -> even   | 5 -> even   | 6 -> odd    | 7 -> odd ...       (k blocks)
//   storing      | the tile before, odd      | this tile, even ...
//
//   who tells whom     by                        that
//   producer           bytes and copies landed   a stage is full
//   multiplying        tcgen05.commit            a stage is empty, an accumulator is full
//   storing            an arrival of each warp   an accumulator is empty
//   multiplying, of a pair's second block:
//                      an arrival in the first   a stage is full
//
// What plugs in (load/loader.h and parts.h say what each must have): LoadA, LoadB, Epilogue, Order.

template <class Shape_, load::Loader LoadA_, load::Loader LoadB_, Epilogue Epilogue_,
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

  static_assert(LoadA::Operand::kRows == Shape::BLOCK_M &&
                LoadB::Operand::kRows == Shape::kRowsOfB);
  static constexpr bool kWeightsFirst = false;
  static constexpr bool kThreadsCopy =
      load::copies_by_threads<LoadA> || load::copies_by_threads<LoadB>;
  static constexpr int kTmaBytes = LoadA::kTmaBytes + LoadB::kTmaBytes;
  static constexpr int kFullArrivals = 1 + (kThreadsCopy ? load::kProducerThreads : 0);
  using TiledMma = Mma<Shape, typename LoadA::Operand, typename LoadB::Operand>;

  // Shared memory: stages (A, B), barriers, the address of tensor memory.
  static constexpr int kStageBytes = LoadA::Operand::kBytes + LoadB::Operand::kBytes;
  static constexpr int kOtherRoom = 256;
  static constexpr int kStages = (kSharedBytes - kOtherRoom) / kStageBytes;
  using Ring = sm100::Ring<kStages, kFullArrivals, 1, Shape::kCtas>;
  using Accumulators = sm100::Ring<kAccumulators, 1, kStoringWarps, Shape::kCtas>;
  static constexpr int kRingAt = kStages * kStageBytes;
  static constexpr int kAccumulatorsAt = kRingAt + Ring::kBarrierBytes;
  static constexpr int kTensorMemoryAt = kAccumulatorsAt + Accumulators::kBarrierBytes;
  static constexpr int kSharedBytesUsed = kTensorMemoryAt + static_cast<int>(sizeof(uint32_t));
  static_assert(kStages >= 3, "fewer stages do not hide the latency of memory");
  static_assert(kSharedBytesUsed <= kSharedBytes);
  static_assert(LoadA::Operand::kBytes % kSwizzleAtom == 0 && kStageBytes % kSwizzleAtom == 0);
};

template <class Gemm>
__global__ void __launch_bounds__(kBlockThreads, 1)
    grouped_gemm(const __grid_constant__ typename Gemm::Params params) {
  TILEMOE_DYNAMIC_SHARED(uint8_t, memory, kSwizzleAtom);
  const uint32_t shared = ptx::shared_address(memory);
  const typename Gemm::Ring ring(shared + Gemm::kRingAt);
  const typename Gemm::Accumulators accumulators(shared + Gemm::kAccumulatorsAt);
  const int32_t warp = ptx::uniform(static_cast<int32_t>(threadIdx.x) / kWarp);
  constexpr int kCtas = Gemm::Shape::kCtas;
  const bool is_first = blockIdx.x % kCtas == 0;
  const auto sync = [] {
    if constexpr (kCtas > 1)
      ptx::cluster_sync();
    else
      __syncthreads();
  };
  if (threadIdx.x == 0) {
    constexpr int kOthers = kCtas - 1;
    ring.init(is_first ? kOthers : 0, 0);
    accumulators.init(0, is_first ? kOthers * kStoringWarps : 0);
    ptx::fence_mbarrier_init();
    typename Gemm::LoadA(params.a, 0).prefetch();
    typename Gemm::LoadB(params.b, 0).prefetch();
  }
  if constexpr (kCtas > 1) sync();  // a pair allocates together: both must run
  if (warp == kMultiplyingWarp) {
    ptx::tensor_memory_allocate<kTensorMemoryColumns, kCtas>(shared + Gemm::kTensorMemoryAt);
    ptx::tensor_memory_relinquish<kCtas>();
    ptx::tcgen05_fence_before_sync();  // (not needed: to allocate is no asynchronous access)
  }
  wait_for_previous();
  __syncthreads();
  ptx::tcgen05_fence_after_sync();  // (not needed: nothing asynchronous came before)
  const auto tensor_memory = *reinterpret_cast<const uint32_t*>(memory + Gemm::kTensorMemoryAt);

  if (warp < kFirstStoringWarp) {
    load::produce<Gemm>(
        params, ring, shared, [warp] { return warp == 0 && ptx::elect_one(); },
        [](const auto& /*at*/, const Tile& /*tile*/) {});
  } else if (warp < kMultiplyingWarp) {
    store_tiles<Gemm>(params, accumulators,
                      tensor_memory + (warp - kFirstStoringWarp) * kWarp * kLane);
    ptx::tcgen05_fence_before_sync();  // (not needed: every tile's store ends with one)
  } else if (is_first) {
    multiply_tiles<Gemm>(params, ring, accumulators, shared, tensor_memory);
  } else {
    if constexpr (kCtas > 1) signal_full_stages<Gemm>(params, ring);
  }

  // Every accumulator has been read, and every product before that was done. Nobody arrives in the
  // other block any more.
  sync();
  if (warp == kMultiplyingWarp) {
    ptx::tcgen05_fence_after_sync();
    ptx::tensor_memory_free<kTensorMemoryColumns, kCtas>(tensor_memory);
  }
}

}  // namespace tilemoe::cuda::sm100
