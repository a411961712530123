// The stages that a producer warpgroup fills (sm90, sm100): the loaders' contract, the layout of a
// stage and positions in the ring.
#pragma once

#include <concepts>
#include <cstdint>

#include "core/numbers.h"
#include "cuda/core/variant.h"
#include "cuda/gemm/schedule/tile.h"

namespace tilemoe::cuda {

// An operand's tile of one k block in shared memory, as loaders write it and MMAs read it: rows of
// 128 bytes in swizzled atoms of 1024 bytes. TMA writes this layout and wgmma reads it; threads
// copy to it, and ldmatrix reads it, without bank conflicts.
//
// K-major: (kRows, 64). MN-major: chunks of 64 rows, each (64 steps of the sum, 64 rows).
template <Major kMajor_, int kRows_>
struct StagedOperand {
  static constexpr Major kMajor = kMajor_;
  static constexpr int kRows = kRows_;
  static constexpr int kRowBytes = 128;
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kChunkBytes = 64 * kRowBytes;
  static constexpr int kAtomBytes = 8 * kRowBytes;
  static_assert(kRows % (kMajor == Major::kK ? 8 : 64) == 0, "parts begin at whole atoms");

  // Bytes from the operand of one MMA, `mma_k` elements of K, to that of the next.
  static constexpr int step_bytes(int mma_k, int element_bytes) {
    return mma_k * (kMajor == Major::kK ? element_bytes : kRowBytes);
  }
};

// Where the 16-byte chunk `chunk` of row `row` lies in its atom.
TILEMOE_HOST_DEVICE uint32_t swizzled_chunk(uint32_t row, uint32_t chunk) {
  return (chunk ^ (row & 7)) * 16;
}

// A stage, and the parity of the number of completed rounds of the ring.
template <int kStages>
struct RingPosition {
  int32_t stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  // The stage before this one.
  __device__ int32_t before() const { return stage == 0 ? kStages - 1 : stage - 1; }
  __device__ void advance(int32_t stages) {
    const int32_t end = stage + stages;
    stage = end % kStages;
    parity ^= static_cast<uint32_t>(end / kStages) & 1;
  }
};

}  // namespace tilemoe::cuda

namespace tilemoe::cuda::load {

constexpr int kProducerThreads = 128;  // the first threads of a CTA

// A loader writes one operand's k blocks to shared memory in the layout of its Operand. Every
// thread of the producer that takes part constructs it and calls begin() for each tile.
template <class L>
concept LoaderBase = requires(L loader, const typename L::Params& params, const Tile& tile,
                              int32_t thread) {
  typename L::Operand;
  { L::kTmaBytes } -> std::convertible_to<int>;  // that TMA delivers per stage; 0: threads copy
  L(params, thread);
  loader.begin(tile);
  loader.prefetch();
};

// load(shared, full barrier, k block): one thread starts TMA, which delivers kTmaBytes.
template <class L>
concept TmaLoader = LoaderBase<L> &&(L::kTmaBytes == L::Operand::kBytes) &&
                    requires(L loader, uint32_t shared, uint32_t full, int32_t k_block) {
  loader.load(shared, full, k_block);
};

// copy(shared, k block): every thread of the producer issues its cp.async; the GEMM makes the
// full barrier count them when they land. k blocks are copied in order, and advance(k block) follows
// each: what it computes for the next k block is ready when that one's stage is empty, because all
// instructions between an empty stage and its copies delay the MMAs. copy_whole() replaces copy() in
// the first whole_blocks() k blocks of a tile, which have all rows and columns: no predicates.
template <class L>
concept ThreadLoader = LoaderBase<L> && L::kTmaBytes == 0 &&
                       requires(L loader, uint32_t shared, int32_t k_block) {
  { loader.whole_blocks() } -> std::same_as<int32_t>;
  loader.copy_whole(shared, k_block);
  loader.copy(shared, k_block);
  loader.advance(k_block);
};

template <class L>
concept Loader = TmaLoader<L> || ThreadLoader<L>;

// A stage of the ring: A, then B.
template <Loader LoadA, Loader LoadB>
struct Stage {
  using A = typename LoadA::Operand;
  using B = typename LoadB::Operand;
  static constexpr int kBAt = A::kBytes;  // offset of B
  static constexpr int kBytes = A::kBytes + B::kBytes;
  static constexpr int kTmaBytes = LoadA::kTmaBytes + LoadB::kTmaBytes;
  static_assert(TmaLoader<LoadB>);
  static constexpr bool kThreadsCopy = ThreadLoader<LoadA>;
  // Arrivals at a full barrier per phase: the thread that starts TMA, and each copying thread.
  static constexpr int kFullArrivals = 1 + (kThreadsCopy ? kProducerThreads : 0);
};

// Whether a GEMM may load weights before the previous kernel of the stream has ended. With PDL a
// kernel starts when every CTA of the previous kernel has waited for its own predecessor. So the
// results of older kernels are complete: the offsets of the experts' rows, which determine a CTA's
// tiles, and the weights. If the rows of operand A are the tile's own rows, they are the only
// result of the previous kernel that the GEMM reads; a gather also reads the token list.
template <class LoadA>
inline constexpr bool rows_in_order = requires {
  requires LoadA::kInOrder;
};

}  // namespace tilemoe::cuda::load
