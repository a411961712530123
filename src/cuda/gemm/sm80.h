// The chapter of mma.sync (sm80): a persistent grouped GEMM for every GPU from compute capability
// 8.0 on, of any loaders, epilogue and tile order.
//
// Roles: every warp copies (cp.async), multiplies (ldmatrix, mma.sync) and stores its part of the
// tile. A warp specialized for copies would be the third warp of its scheduler: registers are
// divided evenly among warps, so each thread would have 168, and the MMAs of 64 by 64 per warp use
// 192.
//
// Timeline of one warp. A stage that every warp has read is refilled between the MMAs of the next k
// block, across the borders of tiles: the next tile's operands land while this tile is stored.
//
//   copies       | . 3 . .       | . 4 . .       | . 5 ...
//   MMAs         | 0 0 0 0       | 1 1 1 1       | 2 2 2 2 ...        (steps of 16 along K)
//   ldmatrix     | 0 0 0   1       1 1   2         2 2   3
//
// The fragments of a step are read during the MMAs of the step before it. Warps wait only for
// stages, never for each other: while one copies, stores or waits, the other warp of its scheduler
// multiplies.
//
// In this order: the sizes of a tile; the ring of stages; the queue of tiles; the loads ahead of
// the MMAs; what plugs in; the kernel.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <new>

#include "cuda/core/device.h"
#include "cuda/core/fragment.h"
#include "cuda/core/launch.h"
#include "cuda/core/recipe.h"
#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/gemm/sm80_mma.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/barriers.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/warp.h"

namespace tilemoe::cuda::sm80 {

// ---- sizes

// A CTA's tile and its division among warps. A warp has up to 64 rows by 64 columns: as many MMAs
// for each byte read from shared memory as registers allow, and exactly one group of columns of ds.
// If B is codes, it has fewer columns: their conversion needs registers.
template <class Recipe_, TileConfiguration kTile, bool kCodes = false>
struct TileShape {
  using Recipe = Recipe_;
  using Element = typename Recipe::A;  // of the operands
  static constexpr int BLOCK_M = kTile.block_m;
  static constexpr int BLOCK_N = kTile.block_n;
  static constexpr int BLOCK_K = 128 / sizeof(Element);  // one swizzled row of 128 bytes
  static constexpr int kCluster = 1;
  static constexpr bool kSmallM = BLOCK_M < 64;

  static constexpr int kWarpRows = BLOCK_M < 64 ? BLOCK_M : 64;
  // 192 columns: eight warps with 48 each, since six with 64 would leave two schedulers only one
  // warp. Small M is bound by latency instead of by MMAs: as many warps as have a use.
  static constexpr int kWarpColumns = kCodes                                ? 32
                                      : BLOCK_M <= 16                       ? 16
                                      : BLOCK_N % 64 != 0 || BLOCK_N == 192 ? 48
                                                                            : 64;
  static constexpr int kWarpsAcross = BLOCK_N / kWarpColumns;
  static constexpr int kThreads = BLOCK_M / kWarpRows * kWarpsAcross * kWarp;
  static constexpr int kFragments = kWarpRows / fragment::kRows;

  static_assert(sizeof(Element) == 2 && sizeof(typename Recipe::B) == 2, "16-bit operands");
  static_assert(kTile.schedule == Schedule::kCooperative && kTile.cluster == 1);
  static_assert(BLOCK_M % kWarpRows == 0 && kWarpRows % fragment::kRows == 0 &&
                BLOCK_N % kWarpColumns == 0);

  // First row and column of this warp's fragment `index`, relative to the tile.
  __device__ static int32_t fragment_row(int index) { return fragment_row(index, threadIdx.x); }
  __device__ static int32_t fragment_row(int index, std::integral auto thread) {
    return static_cast<int32_t>(thread) / kWarp / kWarpsAcross * kWarpRows +
           index * fragment::kRows;
  }
  __device__ static int32_t fragment_column() { return warp_across() * kWarpColumns; }

  // Position of this warp along the tile's columns. A scheduler has every fourth warp. The order
  // gives each scheduler one warp of the same rows and one of each half of the columns, so that all
  // schedulers have work even if half of the tile's rows or columns do not exist.
  __device__ static int32_t warp_across() {
    const auto warp = static_cast<int32_t>(threadIdx.x) / kWarp;
    if constexpr (kWarpsAcross == 4)
      return warp % 4 ^ warp / 4 % 2 * 2;
    else
      return warp % kWarpsAcross;
  }
};

// ---- the ring of stages

// A stage, and the parity of the rounds of the ring. (load/stage.h's position is for a number of
// stages that is known at compile time.)
struct RingPosition {
  int32_t stage = 0;
  uint32_t parity = 0;
};

// Every warp copies to the stages and reads from them. Each stage has two mbarriers:
//   full   completes a phase when the copies of all threads to the stage have landed
//   empty  completes a phase when every thread has read the stage
// Warps synchronize only by them, and may be k blocks apart. No warp can be two phases ahead of
// another: it would have to fill a stage that the other has not read.
template <int kStageBytes, int kWarps, int kMaxStages>
class Ring {
 public:
  static constexpr int kBarrierBytes = 2 * kMaxStages * static_cast<int>(sizeof(uint64_t));

  // `stages` stages, 2 to kMaxStages, begin at `shared`; the barriers lie before them.
  __device__ Ring(uint32_t shared, int32_t stages)
      : barriers_(shared - kBarrierBytes), stages_(stages) {
    // Keep it in a register instead of recomputing it for each access. It is the address of the
    // first barrier, not of the first stage: racecheck does not track barriers at negative offsets.
    ptx::pin(barriers_);
  }

  // Called by one thread.
  __device__ void init() const {
    for (int32_t stage = 0; stage < stages_; ++stage) {
      const RingPosition at{stage};
      ptx::mbarrier_init(full(at), kWarps * kWarp);
      ptx::mbarrier_init(empty(at), kWarps * kWarp);
    }
  }

  __device__ uint32_t address(const RingPosition& at) const {
    return barriers_ + kBarrierBytes + at.stage * kStageBytes;
  }
  __device__ void advance(RingPosition& at) const {
    if (++at.stage == stages_) at.stage = 0, at.parity ^= 1;
  }

  // In the first round every stage is empty without arrivals: the phase before the first one counts
  // as complete.
  __device__ void wait_empty(const RingPosition& at) const {
    ptx::mbarrier_wait(empty(at), at.parity ^ 1);
  }
  // Arrives at `full` when this thread's copies have landed.
  __device__ void fill(const RingPosition& at) const { ptx::cp_async_arrive(full(at)); }
  __device__ void wait_full(const RingPosition& at) const {
    ptx::mbarrier_wait(full(at), at.parity);
  }
  // This thread has read the stage. (One arrival per warp after __syncwarp() would suffice. But
  // that compiles to nothing in a converged warp, and racecheck would see the reads of one lane.)
  __device__ void release(const RingPosition& at) const { ptx::mbarrier_arrive(empty(at)); }

 private:
  __device__ uint32_t full(const RingPosition& at) const {
    return barriers_ + 2 * sizeof(uint64_t) * at.stage;
  }
  __device__ uint32_t empty(const RingPosition& at) const { return full(at) + sizeof(uint64_t); }

  uint32_t barriers_;
  int32_t stages_;
};

// ---- the queue of tiles

constexpr int32_t kNoTile = 0;  // k blocks of the entry behind the last tile

// A slot of the queue, and the parity of the rounds, in one register.
class LinePosition {
 public:
  __device__ uint32_t slot() const { return place_ / 2; }
  __device__ uint32_t parity() const { return place_ % 2; }
  __device__ void advance(uint32_t slots) {
    place_ += 2;
    if (slot() == slots) place_ = parity() ^ 1;
  }

 private:
  uint32_t place_ = 0;
};

// The first warp finds the CTA's tiles and passes them to all warps. The queue has a slot for every
// tile that may be in flight if each has only one k block. The state of the order is in shared
// memory too, since the MMAs need the registers.
template <class Order, int kMaxStages>
class TileLine {
 public:
  // Called by one thread.
  __device__ void init() {
    for (uint64_t& found : found_) ptx::mbarrier_init(ptx::shared_address(&found), 1);
  }
  // Called by the first warp.
  __device__ void begin(const typename Order::Params& params) {
    new (lanes_[threadIdx.x].order) Order(params);
  }
  __device__ void find_next(const LinePosition& at) {
    auto& lane = *reinterpret_cast<Order*>(lanes_[threadIdx.x].order);
    Order order = lane;
    Tile tile{};
    if (!order.next(tile)) tile.k_blocks = kNoTile;
    new (&lane) Order(order);
    if (threadIdx.x > 0) return;
    tiles_[at.slot()] = tile;
    ptx::mbarrier_arrive(ptx::shared_address(&found_[at.slot()]));
  }

  // Called by every warp: waits for the tile.
  __device__ const Tile& wait(const LinePosition& at) const {
    ptx::mbarrier_wait(ptx::shared_address(&found_[at.slot()]), at.parity());
    return tiles_[at.slot()];
  }
  // The tile after wait().
  __device__ const Tile& tile(const LinePosition& at) const { return tiles_[at.slot()]; }

  __device__ static void advance(LinePosition& at) { at.advance(kSlots); }

 private:
  // While one warp stores a tile, others copy tiles up to a whole ring ahead, and the first warp
  // finds the one after those.
  static constexpr int kSlots = kMaxStages + 3;

  struct alignas(Order) Lane {
    std::byte order[sizeof(Order)];
  };

  uint64_t found_[kSlots];
  Tile tiles_[kSlots];
  Lane lanes_[kWarp];
};

// ---- loads ahead of the MMAs

// A warp's part of the copies: the k blocks of all tiles in the order of their MMAs, some stages
// ahead of them.
template <class Gemm>
class LoadAhead {
 public:
  using Line = typename Gemm::Line;
  using Ring = typename Gemm::Ring;

  __device__ LoadAhead(const typename Gemm::Params& params, Line& line)
      : line_(line),
        load_a_(params.a, static_cast<int32_t>(threadIdx.x)),
        load_b_(params.b, static_cast<int32_t>(threadIdx.x)) {
    if (is_first_warp()) {
      line_.begin(params.order);
      line_.find_next(next_);
    }
    begin_tile();
  }

  // Copies the next k block, if there is one, to the next stage.
  __device__ __forceinline__ void copy_next(const Ring& ring) { copy_of<true, true>(ring); }

  // The same in three parts, which are placed between MMAs. First, the copies into the empty stage;
  // A's copies, which come last if the two are separate, fill the stage.
  template <bool kA = true, bool kB = true>
  __device__ __forceinline__ void copy(const Ring& ring) const {
    if (left_ <= 0) return;
    ring.wait_empty(at_);
    const uint32_t stage = ring.address(at_);
    if constexpr (kA) load_a_.copy(stage, left_);
    if constexpr (kB) load_b_.copy(stage + Gemm::LoadA::Operand::kBytes, left_);
    if constexpr (kA) ring.fill(at_);
  }
  // Second, advances to the next k block.
  __device__ __forceinline__ void advance(const Ring& ring) {
    load_a_.advance(left_);
    load_b_.advance(left_);
    ring.advance(at_);
    --left_;
  }
  // Third, after a tile's last k block, begins the next tile at once, so that its first addresses
  // are known when they are needed.
  template <bool kLooks = true>
  __device__ __forceinline__ void find_tile() {
    if (left_ != 0) return;
    if constexpr (kLooks)
      if (is_first_warp()) line_.find_next(next_);
    begin_tile();
  }

  // The first `count` k blocks under PDL: their weights while the previous kernel runs, then their
  // rows, which that kernel writes. The copies of B find the tiles.
  __device__ __forceinline__ void copy_weights_first(const Ring& ring, int32_t count) {
    LoadAhead rows = *this;  // repeats the same k blocks
    for (int32_t i = 0; i < count; ++i) copy_of<false, true>(ring);
    wait_for_previous();
    for (int32_t i = 0; i < count; ++i) rows.template copy_of<true, false>(ring);
  }

 private:
  template <bool kA, bool kB>
  __device__ __forceinline__ void copy_of(const Ring& ring) {
    if (left_ <= 0) return;  // without a tile, the loaders have not begun
    copy<kA, kB>(ring);
    advance(ring);
    find_tile<kB>();
  }

  __device__ static bool is_first_warp() { return threadIdx.x < kWarp; }

  __device__ __forceinline__ void begin_tile() {
    const Tile tile = line_.wait(next_);
    line_.advance(next_);
    left_ = tile.k_blocks;
    if (left_ == kNoTile) return;
    load_a_.begin(tile);
    load_b_.begin(tile);
  }

  Line& line_;
  LinePosition next_;  // slot of the tile after the one being copied
  RingPosition at_;
  typename Gemm::LoadA load_a_;
  typename Gemm::LoadB load_b_;
  int32_t left_;  // k blocks left of the tile; 0 or less without a tile
};

// ---- what plugs in

// Copies the k blocks of one operand to shared memory, in the layout of its Operand. Every thread
// constructs it. begin() receives each tile; copy(shared, blocks left) starts this thread's copies
// of the tile's first k block, and after each advance(blocks left) of the next one. `blocks left`
// includes the k block that is copied, or passed. Both are placed between MMAs and therefore have
// few instructions: addresses advance from k block to k block, and each copy has one condition.
template <class L>
concept Loader = requires(L loader, const typename L::Params& params, const Tile& tile,
                          int32_t thread, uint32_t shared, int32_t blocks_left) {
  { L::Operand::kBytes } -> std::convertible_to<int>;
  L(params, thread);
  loader.begin(tile);
  loader.copy(shared, blocks_left);
  loader.advance(blocks_left);
};

// Finishes a tile: every warp calls store() with its own accumulators, which store() may change.
// Warps do not wait for each other in it. If a warp's whole part of the tile lies past the last row
// or column, wants() is false and the accumulators are zeros.
template <class E, class Shape>
concept EpilogueOf = requires(E epilogue, const typename E::Params& params, Accumulators<Shape>& D,
                              const Tile& tile) {
  E(params);
  { epilogue.wants(tile) } -> std::convertible_to<bool>;
  epilogue.store(D, tile);
};

// ---- the kernel

constexpr int kSwizzleAtom = 1024;  // 8 rows of 128 bytes: the alignment of operands in stages

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
    int32_t stages = 0;  // 2 to kMaxStages: as many as the device's shared memory holds
  };

  static_assert(LoadA::Operand::kRows == Shape::BLOCK_M && LoadB::Operand::kRows == Shape::BLOCK_N);
  using TiledMma = typename MmaOf<Shape, LoadA, LoadB>::type;

  // Small M is bound by memory latency. A CTA that is alone on its SM must keep as many bytes in
  // flight as memory delivers within that latency: about 70 KiB.
  static constexpr int kMaxStages = Shape::kSmallM ? 12 : 4;
  // CTAs per SM: as many as its registers hold, or with small M as many as keep enough in flight.
  static constexpr int kBlocksAtOnce = Shape::kThreads == 128 ? 2 : Shape::kThreads < 128 ? 4 : 1;
  static constexpr bool kWeightsFirst = Shape::kSmallM && load::rows_in_order<LoadA>;

  // Shared memory: queue of tiles, barriers, stages (A, B).
  static constexpr int kStageBytes = LoadA::Operand::kBytes + LoadB::Operand::kBytes;
  using Ring = sm80::Ring<kStageBytes, Shape::kThreads / kWarp, kMaxStages>;
  using Line = TileLine<Order, kMaxStages>;
  static constexpr int kOtherBytes =
      (Ring::kBarrierBytes + static_cast<int>(sizeof(Line)) + kSwizzleAtom - 1) / kSwizzleAtom *
      kSwizzleAtom;
  static constexpr int shared_bytes(int stages) { return kOtherBytes + stages * kStageBytes; }
  static_assert(LoadA::Operand::kBytes % kSwizzleAtom == 0 && kStageBytes % kSwizzleAtom == 0);

  // For launch_gemm(): the CTAs of an SM, and the stages of each that its shared memory holds.
  static constexpr int kThreads = Shape::kThreads;
  static BlockRoom room_on(const DeviceInfo& device) {
    return block_room(shared_bytes_of_block(device), kStageBytes, kOtherBytes,
                      {.blocks = kBlocksAtOnce, .stages = kMaxStages});
  }
};

template <class Gemm>
__global__ void __launch_bounds__(Gemm::Shape::kThreads, Gemm::kBlocksAtOnce)
    grouped_gemm(const __grid_constant__ typename Gemm::Params params) {
  using Shape = typename Gemm::Shape;
  using TiledMma = typename Gemm::TiledMma;
  TILEMOE_DYNAMIC_SHARED(uint8_t, memory, kSwizzleAtom);
  auto& line = *reinterpret_cast<typename Gemm::Line*>(memory);
  const typename Gemm::Ring ring(ptx::shared_address(memory + Gemm::kOtherBytes), params.stages);
  if (threadIdx.x == 0) {
    ring.init();
    line.init();
  }
  if constexpr (!Gemm::kWeightsFirst) wait_for_previous();
  __syncthreads();

  TiledMma mma(params.b);
  const typename Gemm::Epilogue epilogue(params.epilogue);
  LoadAhead<Gemm> ahead(params, line);
  // One stage stays free, or two of more than three: then a warp can be two k blocks ahead of
  // another before it waits for that warp's reads.
  const int32_t first = params.stages > 3 ? 2 : 1;
  if constexpr (Gemm::kWeightsFirst)
    ahead.copy_weights_first(ring, params.stages - first);
  else
    for (int32_t i = first; i < params.stages; ++i) ahead.copy_next(ring);

  RingPosition at;
  Accumulators<Shape> D;
  typename TiledMma::Fragments fragments[2];
  static_assert(TiledMma::kSteps == 4);
  for (LinePosition now;; line.advance(now)) {
    const int32_t k_blocks = line.tile(now).k_blocks;
    if (k_blocks == kNoTile) break;
    clear<Shape>(D);
    if (ptx::uniform(epilogue.wants(line.tile(now)))) {
      mma.begin(line.tile(now));
      ring.wait_full(at);
      mma.load(fragments[0], ring.address(at), 0);
      for (int32_t k_block = 0; k_block < k_blocks; ++k_block) {
        const uint32_t stage = ring.address(at);
        mma.load(fragments[1], stage, 1);
        TiledMma::multiply(D, fragments[0]);
        ahead.copy(ring);
        mma.load(fragments[0], stage, 2);
        TiledMma::multiply(D, fragments[1]);
        mma.load(fragments[1], stage, 3);
        ring.release(at);
        ring.advance(at);
        // The next tile's first fragments are read after this tile is stored: registers are free.
        const bool ends = k_block + 1 == k_blocks;
        ahead.advance(ring);
        TiledMma::multiply(D, fragments[0]);
        if (!ends) {
          mma.next_block();
          ring.wait_full(at);
          mma.load(fragments[0], ring.address(at), 0);
        }
        TiledMma::multiply(D, fragments[1]);
        ahead.find_tile();
      }
    } else {
      for (int32_t k_block = 0; k_block < k_blocks; ++k_block) {
        ring.wait_full(at);
        ring.release(at);
        ahead.copy_next(ring);
        ring.advance(at);
      }
    }
    epilogue.store(D, line.tile(now));
  }
}

}  // namespace tilemoe::cuda::sm80
