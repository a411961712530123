// Grouped GEMM for Blackwell 10.x (tcgen05, tensor memory, TMA): persistent and warp-specialized,
// for any loaders, epilogue and tile order.
//
//   producer   warps 0 to 3: load the k blocks of A and B into a ring of stages, by TMA (one
//              thread) or cp.async (all threads)
//   storing    warps 4 to 7: run the epilogue on one of two accumulators in tensor memory, each warp
//              on 32 rows
//   MMA        warp 8: one lane issues the MMAs of every k block into the other accumulator
//
// 2-CTA MMA (Shape::kCtas 2): the two CTAs of a cluster walk the same tile order, each with its own
// rows and half of B's columns; the MMA warp of the first CTA issues the MMAs of both.
//
// Every role walks the same tile order on its own and continues with the next tile at once:
//
//   producer   | load 6      | load 7      | load 8 ...
//   MMA        | 4 -> even   | 5 -> even   | 6 -> odd    | 7 -> odd ...       (k blocks)
//   storing    | previous tile, odd        | this tile, even ...
//
//   arrives            by                               at
//   producer           TMA bytes, cp.async              full of a stage
//   MMA                tcgen05.commit                   empty of a stage, full of an accumulator
//   storing            one arrival per warp             empty of an accumulator
//   MMA, second CTA    an arrival at the first CTA      full of a stage
//
// Template parameters: LoadA and LoadB (load/stage.h), Epilogue (below), Order (schedule/tile.h).
// launch_gemm.h launches the kernel.
#pragma once

#include <concepts>
#include <cstdint>

#include "cuda/core/fragment.h"
#include "cuda/core/launch.h"
#include "cuda/core/recipe.h"
#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/gemm/sm100_mma.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/barriers.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/tcgen05.h"
#include "cuda/ptx/warp.h"

namespace tilemoe::cuda::sm100 {

// ---- Sizes.

// The warps of a CTA: producer, storing, MMA. A warp can access the lanes of tensor memory given by
// its index modulo 4, so the first storing warp has such an index.
constexpr int kStoringWarps = 4;
constexpr int kFirstStoringWarp = load::kProducerThreads / kWarp;
constexpr int kMmaWarp = kFirstStoringWarp + kStoringWarps;
constexpr int kBlockThreads = (kMmaWarp + 1) * kWarp;
static_assert(kFirstStoringWarp % 4 == 0);

constexpr int kRegisters = 65536 / kBlockThreads / 8 * 8;  // upper bound per thread
static_assert(kRegisters >= 224, "an epilogue has 64 numbers, their words and their addresses");

constexpr int kSharedBytes = 227 * 1024;  // of a CTA
constexpr int kSwizzleAtom = 1024;  // 8 rows of 128 bytes: the alignment of tiles in shared memory

constexpr int kTensorMemoryColumns = 512;  // of an SM, which runs one CTA
constexpr int kAccumulators = 2;           // MMAs write one while the other is stored
constexpr int kAccumulatorColumns = kTensorMemoryColumns / kAccumulators;

// A CTA's tile. With 2-CTA MMA the CTAs have neighbouring rows of the same columns, and each loads
// half of B.
template <class Recipe_, TileConfiguration kTile>
struct TileShape {
  using Recipe = Recipe_;
  using Element = typename Recipe::A;  // of the operands
  static constexpr int BLOCK_M = kTile.block_m;
  static constexpr int BLOCK_N = kTile.block_n;
  static constexpr int BLOCK_K = 128 / sizeof(Element);  // a swizzled row of 128 bytes
  static constexpr int kCluster = kTile.cluster;
  static constexpr int kCtas = kCluster;            // of an MMA
  static constexpr int kRowsOfB = BLOCK_N / kCtas;  // that each CTA loads
  using OwnColumns = TileShape<Recipe, TileConfiguration{BLOCK_M, kRowsOfB}>;

  static constexpr int kWarpRows = BLOCK_M / kStoringWarps;  // one per lane
  static constexpr int kFragments = kWarpRows / fragment::kRows;

  static_assert(sizeof(Element) == 2 && sizeof(typename Recipe::B) == 2, "16-bit MMAs");
  static_assert(kTile.schedule == Schedule::kCooperative && (kCtas == 1 || kCtas == 2));
  static_assert(BLOCK_M == 128, "row i of a tile is lane i of tensor memory");
  static_assert(BLOCK_N % kBatchColumns == 0 && BLOCK_N <= kAccumulatorColumns);

  // First row of this warp's fragment, counted from the tile's first row; a fragment has all
  // columns of the tile.
  __device__ static int32_t fragment_row(int index) { return fragment_row(index, threadIdx.x); }
  __device__ static int32_t fragment_row(int index, std::integral auto thread) {
    return static_cast<int32_t>(thread) / kWarp % kStoringWarps * kWarpRows +
           index * fragment::kRows;
  }
};

// ---- Rings.

// A ring between two roles: of stages of operands, or of accumulators. Each place has two
// mbarriers:
//   full   completes a phase when the place may be read
//   empty  completes a phase when all readers are done
// Both roles pass every place in order, so that neither is two phases behind the other.
//
// Each CTA of a pair has its own rings. A stage of the first CTA is full only when that of the
// second CTA is full too, whose MMA warp arrives here; an accumulator of the first CTA is empty
// when the warps of both CTAs have read theirs: all of them arrive here. The template's arrivals
// are those of one CTA.
template <int kPlaces_, int kFullArrivals, int kEmptyArrivals, int kCtas>
class Ring {
 public:
  static constexpr int kPlaces = kPlaces_;
  static constexpr int kBarrierBytes = 2 * kPlaces * static_cast<int>(sizeof(uint64_t));
  using Position = RingPosition<kPlaces>;

  __device__ explicit Ring(uint32_t barriers) : barriers_(barriers) {}

  // Called by one thread; ptx::fence_mbarrier_init() must follow. The remote arrivals are those of
  // the other CTA of a pair.
  __device__ void init(int32_t remote_full_arrivals, int32_t remote_empty_arrivals) const {
    for (int place = 0; place < kPlaces; ++place) {
      ptx::mbarrier_init(full(place), kFullArrivals + remote_full_arrivals);
      ptx::mbarrier_init(empty(place), kEmptyArrivals + remote_empty_arrivals);
    }
  }

  __device__ uint32_t full(int32_t place) const { return barriers_ + 8u * place; }
  __device__ uint32_t empty(int32_t place) const { return barriers_ + 8u * (kPlaces + place); }

  // In the first round every place is empty without an arrival: the phase before the first counts
  // as ended.
  __device__ void wait_empty(const Position& at) const {
    ptx::mbarrier_wait(empty(at.stage), at.parity ^ 1);
  }
  __device__ void wait_full(const Position& at) const {
    ptx::mbarrier_wait(full(at.stage), at.parity);
  }

  // The same in the first CTA of a pair, for arrivals of both CTAs.
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

  // Arrives at the CTA that issues the MMAs: the first of a pair.
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

// ---- The GEMM: its parts and its shared memory.

// Finishes a tile: every storing warp calls store() with its own rows and reads from tensor memory
// the columns that it needs. Warps never wait for each other in it.
template <class E>
concept Epilogue = requires(const E epilogue, const typename E::Params& params,
                            const WarpAccumulators& D, const Tile& tile) {
  E(params);
  epilogue.store(D, tile);
};

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
  static constexpr int kThreads = kBlockThreads;
  using TiledMma = Mma<Shape, typename LoadA::Operand, typename LoadB::Operand>;

  // Shared memory: stages, barriers, the address of tensor memory.
  using Stage = load::Stage<LoadA, LoadB>;
  static constexpr int kOtherRoom = 256;
  static constexpr int kStages = (kSharedBytes - kOtherRoom) / Stage::kBytes;
  using Ring = sm100::Ring<kStages, Stage::kFullArrivals, 1, Shape::kCtas>;
  using Accumulators = sm100::Ring<kAccumulators, 1, kStoringWarps, Shape::kCtas>;
  static constexpr int kRingAt = kStages * Stage::kBytes;
  static constexpr int kAccumulatorsAt = kRingAt + Ring::kBarrierBytes;
  static constexpr int kTensorMemoryAt = kAccumulatorsAt + Accumulators::kBarrierBytes;
  static constexpr int kSharedBytesUsed = kTensorMemoryAt + static_cast<int>(sizeof(uint32_t));
  static_assert(kStages >= 3, "fewer stages do not hide the latency of memory");
  static_assert(kSharedBytesUsed <= kSharedBytes);
  static_assert(LoadA::Operand::kBytes % kSwizzleAtom == 0 && Stage::kBytes % kSwizzleAtom == 0);
};

// ---- Producer: warps 0 to 3.

// `shared` is the first stage. A thread waits for an empty stage only if the stage cannot become
// full again without this thread's arrival; any other thread could be two phases late.
template <class Gemm>
__device__ __forceinline__ void produce(const typename Gemm::Params& params,
                                        const typename Gemm::Ring& ring, uint32_t shared,
                                        int32_t warp) {
  using LoadA = typename Gemm::LoadA;
  using LoadB = typename Gemm::LoadB;
  using Stage = typename Gemm::Stage;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (!Stage::kThreadsCopy && thread >= kWarp) return;  // one thread starts TMA

  LoadA load_a(params.a, thread);
  LoadB load_b(params.b, thread);
  // (A lambda: written in the condition below, the same expression is scheduled differently.)
  const auto starts_tma = [warp] { return warp == 0 && ptx::elect_one(); };
  typename Gemm::Order order(params.order);
  typename Gemm::Ring::Position at;
  for (Tile tile; order.next(tile);) {
    load_a.begin(tile);
    load_b.begin(tile);
    for (int32_t k_block = 0; k_block < tile.k_blocks; ++k_block, at.advance()) {
      if constexpr (Stage::kThreadsCopy) ring.wait_empty(at);
      const uint32_t stage_a = shared + at.stage * Stage::kBytes;
      const uint32_t stage_b = stage_a + Stage::kBAt;
      if (starts_tma()) {
        if constexpr (!Stage::kThreadsCopy) ring.wait_empty(at);
        const uint32_t full = ring.full(at.stage);
        ptx::mbarrier_arrive_expect_bytes(full, Stage::kTmaBytes);
        if constexpr (load::TmaLoader<LoadA>) load_a.load(stage_a, full, k_block);
        if constexpr (load::TmaLoader<LoadB>) load_b.load(stage_b, full, k_block);
      }
      if constexpr (load::ThreadLoader<LoadA>) {
        load_a.copy(stage_a, k_block);
        ptx::cp_async_arrive(ring.full(at.stage));
        load_a.advance(k_block);
      }
    }
  }
}

// ---- MMA: warp 8. It never waits for its own MMAs; tcgen05.commit arrives when they are done.

// Makes the MMAs that this thread has issued arrive at `barrier`, in both CTAs of a pair.
template <int kCtas>
__device__ __forceinline__ void commit_to(uint32_t barrier) {
  if constexpr (kCtas == 2)
    ptx::tcgen05_commit_2cta(barrier, 0b11);
  else
    ptx::tcgen05_commit(barrier);
}

// Waits for the last commits: they arrive in this CTA's shared memory.
template <class Ring>
__device__ __forceinline__ void wait_for_last(const Ring& ring, typename Ring::Position at) {
  for (int i = 0; i < Ring::kPlaces; ++i, at.advance()) ring.wait_empty(at);
}

// `tensor_memory` is the address of the first accumulator.
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
      __syncwarp();  // (orders nothing: the elected lane has waited, too)
      if (ptx::elect_one()) {
        // cp.async arrives when a copy lands; the thread that waited makes the copied bytes visible
        // to the async proxy, which tcgen05.mma reads through.
        if constexpr (Gemm::Stage::kThreadsCopy) ptx::fence_proxy_async();
        ptx::tcgen05_fence_after_sync();
        mma.multiply(D, at.stage * Gemm::Stage::kBytes, k_block == 0);
        commit_to<kCtas>(ring.empty(at.stage));
        if (k_block + 1 == k_blocks) commit_to<kCtas>(accumulators.full(to.stage));
      }
    }
  }
  wait_for_last(ring, at);
}

// The MMA warp of a pair's second CTA. cp.async can arrive in its own CTA only, so this warp waits
// for the full stages and arrives at the first CTA.
template <class Gemm>
__device__ __forceinline__ void signal_full_stages(const typename Gemm::Params& params,
                                                   const typename Gemm::Ring& ring) {
  typename Gemm::Order order(params.order);
  typename Gemm::Ring::Position at;
  for (Tile tile; order.next(tile);) {
    const int32_t k_blocks = ptx::uniform(tile.k_blocks);
    for (int32_t k_block = 0; k_block < k_blocks; ++k_block, at.advance()) {
      ring.wait_full(at);
      __syncwarp();  // (orders nothing: the elected lane has waited, too)
      if (ptx::elect_one()) {
        if constexpr (Gemm::Stage::kThreadsCopy) ptx::fence_proxy_async();
        ring.arrive_full(at.stage);
      }
    }
  }
  wait_for_last(ring, at);
}

// ---- Storing warps: they finish their rows of a tile while the MMAs of the next tile run.

// `tensor_memory` is the address of the warp's first lane in the first accumulator.
template <class Gemm>
__device__ __forceinline__ void store_tiles(const typename Gemm::Params& params,
                                            const typename Gemm::Accumulators& accumulators,
                                            uint32_t tensor_memory) {
  const typename Gemm::Epilogue epilogue(params.epilogue);
  typename Gemm::Order order(params.order);
  typename Gemm::Accumulators::Position from;
  for (Tile tile; order.next(tile); from.advance()) {
    accumulators.wait_full(from);
    // (Neither this __syncwarp() nor the one below orders anything: the whole warp executes loads
    // from tensor memory and the wait for them.)
    __syncwarp();
    ptx::tcgen05_fence_after_sync();
    epilogue.store(WarpAccumulators(tensor_memory + from.stage * kAccumulatorColumns), tile);
    ptx::tcgen05_fence_before_sync();
    __syncwarp();
    if (threadIdx.x % kWarp == 0) accumulators.arrive_empty(from.stage);
  }
}

// ---- Kernel.

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
  if constexpr (kCtas > 1) sync();  // a CTA pair allocates together: both must run
  if (warp == kMmaWarp) {
    ptx::tensor_memory_allocate<kTensorMemoryColumns, kCtas>(shared + Gemm::kTensorMemoryAt);
    ptx::tensor_memory_relinquish<kCtas>();
    ptx::tcgen05_fence_before_sync();  // (not needed: an allocation is not asynchronous)
  }
  wait_for_previous();
  __syncthreads();
  ptx::tcgen05_fence_after_sync();  // (not needed: nothing asynchronous came before)
  const auto tensor_memory = *reinterpret_cast<const uint32_t*>(memory + Gemm::kTensorMemoryAt);

  if (warp < kFirstStoringWarp) {
    produce<Gemm>(params, ring, shared, warp);
  } else if (warp < kMmaWarp) {
    store_tiles<Gemm>(params, accumulators,
                      tensor_memory + (warp - kFirstStoringWarp) * kWarp * kLane);
    ptx::tcgen05_fence_before_sync();  // (not needed: every tile's store ends with one)
  } else if (is_first) {
    multiply_tiles<Gemm>(params, ring, accumulators, shared, tensor_memory);
  } else {
    if constexpr (kCtas > 1) signal_full_stages<Gemm>(params, ring);
  }

  // Every accumulator has been read, so every MMA is done. No further arrival at the other CTA
  // follows.
  sync();
  if (warp == kMmaWarp) {
    ptx::tcgen05_fence_after_sync();
    ptx::tensor_memory_free<kTensorMemoryColumns, kCtas>(tensor_memory);
  }
}

}  // namespace tilemoe::cuda::sm100
