// The block's tile and how its warps share it, with everything that follows from them at compile
// time.
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

// Each warp has up to 64 rows by 64 columns of the tile: as many products for each byte it reads of
// shared memory as registers allow, and of ds's groups exactly one.
template <class Recipe_, TileConfiguration kTile>
struct TileShape {
  using Recipe = Recipe_;
  using Element = typename Recipe::A;  // of the operands
  static constexpr int BLOCK_M = kTile.block_m;
  static constexpr int BLOCK_N = kTile.block_n;
  static constexpr int BLOCK_K = 128 / sizeof(Element);  // a swizzled row of 128 bytes
  static constexpr int kCluster = 1;
  static constexpr bool kSmallM = BLOCK_M < 64;

  static constexpr int kWarpRows = BLOCK_M < 64 ? BLOCK_M : 64;
  // Of 192 columns eight warps have 48 each: six of 64 would leave two schedulers one warp. Few rows
  // are waited for rather than multiplied, by as many warps as are of use.
  static constexpr int kWarpColumns = BLOCK_M <= 16                         ? 16
                                      : BLOCK_N % 64 != 0 || BLOCK_N == 192 ? 48
                                                                            : 64;
  static constexpr int kWarpsAcross = BLOCK_N / kWarpColumns;
  static constexpr int kThreads = BLOCK_M / kWarpRows * kWarpsAcross * kWarp;
  static constexpr int kFragments = kWarpRows / fragment::kRows;

  static_assert(sizeof(Element) == 2 && sizeof(typename Recipe::B) == 2, "products of 16 bits");
  static_assert(kTile.schedule == Schedule::kCooperative && kTile.cluster == 1);
  static_assert(BLOCK_M % kWarpRows == 0 && kWarpRows % fragment::kRows == 0 &&
                BLOCK_N % kWarpColumns == 0);

  // First row and column of this warp's fragment, counted from the tile's first.
  __device__ static int32_t fragment_row(int index) { return fragment_row(index, threadIdx.x); }
  __device__ static int32_t fragment_row(int index, std::integral auto thread) {
    return static_cast<int32_t>(thread) / kWarp / kWarpsAcross * kWarpRows +
           index * fragment::kRows;
  }
  __device__ static int32_t fragment_column() { return warp_across() * kWarpColumns; }

  // Which of the warps across the tile this one is. A scheduler has every fourth warp: those of the
  // same rows have one each, and so have those of one half of the columns, so that all schedulers
  // have work in a tile of which half the rows or columns are not there.
  __device__ static int32_t warp_across() {
    const auto warp = static_cast<int32_t>(threadIdx.x) / kWarp;
    if constexpr (kWarpsAcross == 4)
      return warp % 4 ^ warp / 4 % 2 * 2;
    else
      return warp % kWarpsAcross;
  }
};

// The ring of stages that every warp copies to and reads from. Each stage has two barriers:
//   full   ends a phase when all threads' copies to the stage have landed
//   empty  ends a phase when every thread has read it
// So warps never wait for each other but through a stage, and may be k blocks apart. None can be two
// phases ahead of another: it would have to fill a stage that the other has not read.

// A stage and how often the ring has gone round, by parity.
struct RingPosition {
  int32_t stage = 0;
  uint32_t parity = 0;
};

template <int kStageBytes, int kWarps, int kMaxStages>
class Ring {
 public:
  static constexpr int kBarrierBytes = 2 * kMaxStages * static_cast<int>(sizeof(uint64_t));

  // `stages` of them, which is 2 to kMaxStages, begin at `shared`, behind kBarrierBytes of
  // barriers.
  __device__ Ring(uint32_t shared, int32_t stages)
      : barriers_(shared - kBarrierBytes), stages_(stages) {
    // A register: it would be worked out anew for each access. And the first barrier's, not the first
    // stage's: of a barrier that an instruction names by a negative offset, racecheck knows nothing.
    ptx::pin(barriers_);
  }

  // By one thread.
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

  // The first round finds every stage empty without an arrival: the phase before the first counts
  // as ended.
  __device__ void wait_empty(const RingPosition& at) const {
    ptx::mbarrier_wait(empty(at), at.parity ^ 1);
  }
  // The stage is full when this thread's copies have landed, and all others'.
  __device__ void fill(const RingPosition& at) const { ptx::cp_async_arrive(full(at)); }
  __device__ void wait_full(const RingPosition& at) const {
    ptx::mbarrier_wait(full(at), at.parity);
  }
  // This thread has read the stage. (One arrival of a warp would do, after __syncwarp(); that leaves
  // no instruction where the warp is together, and racecheck then knows of one lane's reads.)
  __device__ void release(const RingPosition& at) const { ptx::mbarrier_arrive(empty(at)); }

 private:
  __device__ uint32_t full(const RingPosition& at) const {
    return barriers_ + 2 * sizeof(uint64_t) * at.stage;
  }
  __device__ uint32_t empty(const RingPosition& at) const { return full(at) + sizeof(uint64_t); }

  uint32_t barriers_;
  int32_t stages_;
};

// The tiles of a block, from the first warp, which looks for them, to all: as many as may be under
// way when each has one k block. Where it has come to in their order lies in shared memory too: it
// would take registers that the products need.

constexpr int32_t kNoTile = 0;  // k blocks: the order has come to its end

// A place in the line, and how often it has gone round, by parity: both in one register.
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

template <class Order, int kMaxStages>
class TileLine {
 public:
  // By one thread.
  __device__ void init() {
    for (uint64_t& found : found_) ptx::mbarrier_init(ptx::shared_address(&found), 1);
  }
  // By the first warp.
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

  // By every warp: the tile, once it is there.
  __device__ const Tile& wait(const LinePosition& at) const {
    ptx::mbarrier_wait(ptx::shared_address(&found_[at.slot()]), at.parity());
    return tiles_[at.slot()];
  }
  // Of what has been waited for.
  __device__ const Tile& tile(const LinePosition& at) const { return tiles_[at.slot()]; }

  __device__ static void advance(LinePosition& at) { at.advance(kSlots); }

 private:
  // A warp stores a tile while others copy what lies a whole ring ahead of it, and the tile after
  // that is looked for.
  static constexpr int kSlots = kMaxStages + 3;

  struct alignas(Order) Lane {
    std::byte order[sizeof(Order)];
  };

  uint64_t found_[kSlots];
  Tile tiles_[kSlots];
  Lane lanes_[kWarp];
};

// The loading side of a warp: copies its part of the tiles' k blocks in the order in which they are
// multiplied, some stages ahead, across the borders of tiles. So the next tile's operands land while
// this one's results are stored.

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

  // The next k block's, if there is one, to the stage after the last.
  __device__ __forceinline__ void copy_next(const Ring& ring) { copy_of<true, true>(ring); }

  // The same in parts, to stand among products. First the copies, once the stage has been read. Who
  // copies A fills the stages.
  template <bool kA = true, bool kB = true>
  __device__ __forceinline__ void copy(const Ring& ring) const {
    if (left_ <= 0) return;
    ring.wait_empty(at_);
    const uint32_t stage = ring.address(at_);
    if constexpr (kA) load_a_.copy(stage, left_);
    if constexpr (kB) load_b_.copy(stage + Gemm::LoadA::Operand::kBytes, left_);
    if constexpr (kA) ring.fill(at_);
  }
  // On to the next k block,
  __device__ __forceinline__ void advance(const Ring& ring) {
    load_a_.advance(left_);
    load_b_.advance(left_);
    ring.advance(at_);
    --left_;
  }
  // and where there is none left, to the next tile's. That one is looked up at once, so that its
  // first addresses are there when they are needed.
  template <bool kLooks = true>
  __device__ __forceinline__ void find_tile() {
    if (left_ != 0) return;
    if constexpr (kLooks)
      if (is_first_warp()) line_.find_next(next_);
    begin_tile();
  }

  // The first `count` k blocks: their weights while the kernel before still runs, then their rows,
  // which it writes. Who copies B looks for the tiles.
  __device__ __forceinline__ void copy_weights_first(const Ring& ring, int32_t count) {
    LoadAhead rows = *this;  // goes the same way again
    for (int32_t i = 0; i < count; ++i) copy_of<false, true>(ring);
    wait_for_previous();
    for (int32_t i = 0; i < count; ++i) rows.template copy_of<true, false>(ring);
  }

 private:
  template <bool kA, bool kB>
  __device__ __forceinline__ void copy_of(const Ring& ring) {
    if (left_ <= 0) return;  // of a block that has no tile, loaders have not begun
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
  LinePosition next_;  // the tile's place that is asked for next
  RingPosition at_;
  typename Gemm::LoadA load_a_;
  typename Gemm::LoadB load_b_;
  int32_t left_;  // k blocks of the tile; none, or fewer, where there is no tile
};

// What plugs into the skeleton, and what a part lacks when it does not.

// Copies one operand's k blocks to shared memory, as its Operand lays them out. Constructed by every
// thread; begin() is told each tile, copy(shared, blocks left) starts the thread's own copies of the
// tile's first k block, and after each advance(blocks left) of the next. The k blocks that are left
// of the tile include the one that is copied, or left behind. They stand among the products, so they
// are as few instructions as can be: addresses move on from k block to k block, and each copy has
// one condition.
template <class L>
concept Loader = requires(L loader, const typename L::Params& params, const Tile& tile,
                          int32_t thread, uint32_t shared, int32_t blocks_left) {
  { L::Operand::kBytes } -> std::convertible_to<int>;
  L(params, thread);
  loader.begin(tile);
  loader.copy(shared, blocks_left);
  loader.advance(blocks_left);
};

// Finishes a tile: store() is called by every warp with its own accumulators, which it may change.
// Warps never wait for each other in it. Where all of a warp's part of the tile lies past the last
// row or column, wants() is false, and its accumulators are zeros.
template <class E, class Shape>
concept EpilogueOf = requires(E epilogue, const typename E::Params& params, Accumulators<Shape>& D,
                              const Tile& tile) {
  E(params);
  { epilogue.wants(tile) } -> std::convertible_to<bool>;
  epilogue.store(D, tile);
};

// The grouped-GEMM skeleton for mma.sync: persistent; every warp copies, multiplies and stores, for
// any loaders, epilogue and tile order.
//
// (A warp that only copies would be the third of its scheduler. Registers are shared out by
// scheduler, so all warps would have 168, and a warp's 64 by 64 products take 192.)
//
// A stage that every warp has read is filled again beside the next k block's products, across the
// borders of tiles: the next tile's operands land while this one's results are stored.
//
//   copies       | . 3 . .       | . 4 . .       | . 5 ...
//   products     | 0 0 0 0       | 1 1 1 1       | 2 2 2 2 ...        (steps of 16 of the sum)
//   fragments    | 0 0 0   1       1 1   2         2 2   3
//
// A step's fragments are read while the step before it is multiplied. Warps wait for stages alone,
// never for each other: while one copies, stores or waits, the other of its scheduler multiplies.
//
// What plugs in (parts.h says what each must have): LoadA, LoadB, Epilogue, Order.

constexpr int kSwizzleAtom = 1024;  // 8 rows of 128 bytes: what shared tiles are aligned to

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
    int32_t stages = 0;  // 2 to kMaxStages, as the device's shared memory allows
  };

  static_assert(LoadA::Operand::kRows == Shape::BLOCK_M && LoadB::Operand::kRows == Shape::BLOCK_N);
  using TiledMma = Mma<Shape, typename LoadA::Operand, typename LoadB::Operand>;

  // Where rows are few, tiles are waited for rather than multiplied. A block that has its
  // SM to itself has to keep as much under way as memory brings meanwhile: some 70 KiB.
  static constexpr int kMaxStages = Shape::kSmallM ? 12 : 4;
  // Blocks that an SM's registers hold at a time, or of few rows, whose stages are enough.
  static constexpr int kBlocksAtOnce = Shape::kThreads == 128 ? 2 : Shape::kThreads < 128 ? 4 : 1;
  static constexpr bool kWeightsFirst = Shape::kSmallM && load::rows_in_order<LoadA>;

  // Shared memory: the tiles under way, barriers, stages (A, B).
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

  const TiledMma mma;
  const typename Gemm::Epilogue epilogue(params.epilogue);
  LoadAhead<Gemm> ahead(params, line);
  // With stages to spare, warps are two k blocks apart before one waits for another to have read.
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
        // The next tile's are read when this one is stored, and registers free.
        const bool ends = k_block + 1 == k_blocks;
        ahead.advance(ring);
        TiledMma::multiply(D, fragments[0]);
        if (!ends) {
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
