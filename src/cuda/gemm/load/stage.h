// The ring of stages that a producer warpgroup fills (sm90, sm100), and what a loader of it provides.
#pragma once

#include <concepts>
#include <cstdint>

#include "cuda/gemm/load/operand.h"
#include "cuda/gemm/schedule/tile.h"

namespace tilemoe::cuda {

// A stage and how often the ring has gone round, by parity.
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

// What brings a product's operands where a warpgroup does nothing else: the archs of Hopper and of
// Blackwell.

constexpr int kProducerThreads = 128;  // a block's first

// Brings one operand's k blocks into shared memory, as its Operand lays them out. Constructed by
// every thread of the producer that takes part; begin() is told each tile.
template <class L>
concept LoaderBase = requires(L loader, const typename L::Params& params, const Tile& tile,
                              int32_t thread) {
  typename L::Operand;
  { L::kTmaBytes } -> std::convertible_to<int>;
  { L::kThreadArrivals } -> std::convertible_to<int>;
  L(params, thread);
  loader.begin(tile);
  loader.prefetch();
};

// load(shared, full barrier, k block): one thread starts TMA, which delivers
// kTmaBytes.
template <class L>
concept TmaLoader = LoaderBase<L> && L::kThreadArrivals == 0 &&
                    (L::kTmaBytes == L::Operand::kBytes) &&
                    requires(L loader, uint32_t shared, uint32_t full, int32_t k_block) {
  loader.load(shared, full, k_block);
};

// copy(shared, k block): every thread of the producer issues its cp.async; the skeleton
// arrives for them when the copies land.
template <class L>
concept ThreadLoader = LoaderBase<L> &&
                           L::kThreadArrivals == kProducerThreads&& L::kTmaBytes == 0 &&
                       requires(L loader, uint32_t shared, int32_t k_block) {
  loader.copy(shared, k_block);
};

template <class L>
concept Loader = TmaLoader<L> || ThreadLoader<L>;

template <Loader L>
inline constexpr bool copies_by_threads = ThreadLoader<L>;

}  // namespace tilemoe::cuda::load

namespace tilemoe::cuda {

// Which products may bring weights before the kernel before them in the stream has ended.
//
// A kernel that is started early begins when every block of the one before has waited for its own
// predecessor. So what older kernels wrote is there: the offsets of experts' rows, from which a
// block's tiles follow, and the weights. Where operand A's rows are those of the tile itself, they
// alone are the result of the kernel before; a gather's tokens may be too.

template <class LoadA>
inline constexpr bool rows_in_order = requires {
  requires LoadA::kInOrder;
};

}  // namespace tilemoe::cuda
