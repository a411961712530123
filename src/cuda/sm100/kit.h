// Blackwell's kit (compute capability 10.x): tcgen05, tensor memory, TMA. Its parts have the names by
// which steps ask for them, as sm90/kit.h's.
#pragma once

#include <type_traits>

#include "cuda/core/kit.h"
#include "cuda/core/recipe.h"
#include "cuda/core/variant.h"
#include "cuda/epilogue/store_threads.h"
#include "cuda/load/dense_rows.h"
#include "cuda/load/gathered_rows.h"
#include "cuda/load/summed_parts.h"
#include "cuda/load/summed_rows.h"
#include "cuda/load/weights.h"
#include "cuda/schedule/expert_tiles.h"
#include "cuda/schedule/row_tiles.h"
#include "cuda/sm100/epilogue_activation.h"
#include "cuda/sm100/epilogue_activation_gradient.h"
#include "cuda/sm100/epilogue_store.h"
#include "cuda/sm100/epilogue_weight_gradient.h"
#include "cuda/sm100/half_of_weights.h"
#include "cuda/sm100/launch.h"
#include "cuda/sm100/shared_sums.h"
#include "cuda/sm100/tiles.h"

namespace tilemoe::cuda {

namespace sm100 {

// Two blocks work side by side on the halves of a reference tile, as they come.
template <class Shape>
struct HalvesOfReferenceTilesOf {
  static_assert(Shape::BLOCK_M == ReferenceTiles::kRows);
  using type = ExpertTiles<Shape::BLOCK_K>;
};
template <class Shape>
using HalvesOfReferenceTiles = typename HalvesOfReferenceTilesOf<Shape>::type;

template <class Shape, Major kMajor, int kParts>
struct WeightsOf {
  using type = load::Weights<Shape, kMajor, kParts>;
};
template <class Shape, Major kMajor, int kParts>
requires(Shape::kBlocks == 2) struct WeightsOf<Shape, kMajor, kParts> {
  using type = HalfOfWeights<load::Weights<typename Shape::OwnColumns, kMajor, 1>, kParts>;
};
template <class Shape, Major kMajor>
struct SummedWeightsOf {
  using type = load::SummedWeights<Shape, kMajor>;
};
template <class Shape, Major kMajor>
requires(Shape::kBlocks == 2) struct SummedWeightsOf<Shape, kMajor> {
  using type = HalfOfWeights<load::SummedWeights<typename Shape::OwnColumns, kMajor>, 1>;
};

}  // namespace sm100

struct Sm100 {
  static constexpr KitName kName = KitName::kSm100;

  template <Variant kVariant, TileConfiguration kTile>
  using Shape = sm100::TileShape<typename RecipeOf<kVariant.recipe>::type, kTile>;

  // ---- operand A: rows by expert, or summed over
  template <class Shape, bool kGathers>
  using Rows = std::conditional_t<kGathers, load::GatheredRows<Shape>, load::DenseRows<Shape>>;
  template <class Shape>
  using PartRows = load::DensePartRows<Shape>;
  template <class Shape>
  using SummedGathered = load::GatheredSummedRows<Shape>;

  // ---- operand B
  template <class Shape, Major kMajor, int kParts>
  using Weights = typename sm100::WeightsOf<Shape, kMajor, kParts>::type;
  template <class Shape, Major kMajor>
  using SummedWeights = typename sm100::SummedWeightsOf<Shape, kMajor>::type;
  template <class Shape>
  using SummedDense = load::DenseSummedRows<Shape>;

  // ---- epilogues; rows leave 32 columns at a time, from registers
  template <class Shape>
  using RowStore = StoreByThreads<Shape, 32>;
  template <class Shape, Activations kSet, bool kAdjacent>
  using Activation = sm100::ActivationEpilogue<Shape, kSet, kAdjacent, RowStore<Shape>>;
  template <class Shape>
  using Store = sm100::StoreEpilogue<Shape, RowStore<Shape>>;
  template <class Shape, Activations kSet>
  using ActivationGradient = sm100::ActivationGradientEpilogue<Shape, kSet>;
  template <class Shape, class Out, OutputMajor kMajor>
  using WeightGradient = sm100::WeightGradientEpilogue<Shape, Out, kMajor>;

  // ---- the product of them, in a tile order: a pair of blocks always has the same columns
  template <class Shape>
  using RowOrder = RowTiles<Shape::BLOCK_M, Shape::kBlocks, Shape::kBlocks == 2>;
  template <class Shape>
  using ExpertOrder = sm100::HalvesOfReferenceTiles<Shape>;
  template <class Shape, class A, class B, class Epilogue, class Order>
  using Product = sm100::GroupedGemm<Shape, A, B, Epilogue, Order>;
  // `tiles_at_most` is known on the host: idle blocks are not started for tiny problems.
  template <class Product>
  static void launch(const typename Product::Params& params, int64_t tiles_at_most, void* stream,
                     const Tuning& tuning) {
    sm100::launch<Product>(params, tiles_at_most, stream, tuning);
  }
  // The last part of a weight gradient that was cut.
  template <class Product>
  static void add_shared_sums(const typename Product::Params& params,
                              const cuda::WeightGradient& step) {
    sm100::launch_shared_sums<Product>(params, step);
  }
};

}  // namespace tilemoe::cuda
