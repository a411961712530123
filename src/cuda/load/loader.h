// What brings a product's operands where a warpgroup does nothing else: the kits of Hopper and of
// Blackwell.
#pragma once

#include <concepts>
#include <cstdint>

#include "cuda/core/tile.h"

namespace tilemoe::cuda::load {

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
