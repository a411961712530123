// The arch of every GPU from compute capability 8.0 on: mma.sync, cp.async, and no instruction of a
// later generation. Its parts have the names that ops.h uses, as in sm90_ops.h.
#pragma once

#include <type_traits>

#include "cuda/core/recipe.h"
#include "cuda/gemm/epilogue/sm80_epilogues.h"
#include "cuda/gemm/epilogue/store_threads.h"
#include "cuda/gemm/launch_gemm.h"
#include "cuda/gemm/load/chained.h"
#include "cuda/gemm/load/sm80_codes.h"
#include "cuda/gemm/load/sm80_rows.h"
#include "cuda/gemm/load/sm80_weights.h"
#include "cuda/gemm/schedule/expert_tiles.h"
#include "cuda/gemm/schedule/row_tiles.h"
#include "cuda/gemm/sm80_codes_mma.h"
#include "cuda/gemm/sm80_split_k.h"
#include "cuda/ops/table.h"

namespace tilemoe::cuda {

namespace sm80 {

// Two CTAs work on the halves of a reference tile, without a cluster.
template <class Shape>
struct HalvesOfReferenceTilesOf {
  static_assert(Shape::BLOCK_M == ReferenceTiles::kRows);
  using type = ExpertTiles<Shape::BLOCK_K>;
};
template <class Shape>
using HalvesOfReferenceTiles = typename HalvesOfReferenceTilesOf<Shape>::type;

}  // namespace sm80

struct Sm80 {
  static constexpr ArchName kName = ArchName::kSm80;

  template <Variant kVariant, TileConfiguration kTile>
  using Shape = sm80::TileShape<typename RecipeOf<kVariant.recipe>::type, kTile, kVariant.codes>;

  // ---- operand A: rows by expert, or summed over
  template <class Shape, bool kGathers>
  using Rows = sm80::SourceRows<Shape, kGathers>;
  template <class Shape>
  using PartRows = sm80::PartRows<Shape>;
  template <class Shape>
  using AGathered = sm80::GatheredRowsAsK<Shape>;

  // ---- operand B
  template <class Shape, Major kMajor, int kParts>
  using Weights = sm80::Weights<Shape, kMajor, kParts>;
  template <class Shape, int kParts>
  using Codes = sm80::Codes<Shape, kParts>;
  template <class Shape, Major kMajor>
  using WeightsByParts = sm80::WeightsByParts<Shape, kMajor>;
  template <class Shape>
  using BDense = sm80::DenseRowsAsK<Shape>;

  // ---- an operand with a second source, an adapter's
  template <class Shape>
  using AdapterShape = Shape;
  template <class Shape, class First>
  using AdapterRows = sm80::SourceRows<Shape, false>;
  template <class First, class Second, Major, class>
  using Chained = sm80::Chained<First, Second>;

  // ---- epilogues; rows are stored 32 columns at a time if the parts of a warp have as many
  template <class Shape, class Element>
  using RowStore = std::conditional_t<Shape::kWarpColumns == 64, StoreByThreads<Shape, Element, 32>,
                                      StoreByWords<Shape, Element>>;
  template <class Shape, Activations kSet, bool kInterleavedColumns>
  using Activation = sm80::ActivationEpilogue<Shape, kSet, kInterleavedColumns,
                                              RowStore<Shape, typename Shape::Recipe::Out::H>>;
  template <class Shape, class Element>
  using Store = sm80::StoreEpilogue<Shape, RowStore<Shape, Element>>;
  template <class Shape, Activations kSet>
  using ActivationGradient = sm80::ActivationGradientEpilogue<Shape, kSet>;
  template <class Shape, class Out, OutputMajor kMajor>
  using WeightGradient = sm80::WeightGradientEpilogue<Shape, Out, kMajor>;

  // ---- the GEMM of these parts, in a tile order
  template <class Shape>
  using RowOrder = RowTiles<Shape::BLOCK_M, Shape::kCluster>;
  template <class Shape>
  using ExpertOrder = sm80::HalvesOfReferenceTiles<Shape>;
  template <class Shape, class A, class B, class Epilogue, class Order>
  using Gemm = sm80::GroupedGemm<Shape, A, B, Epilogue, Order>;
  template <class Gemm>
  static void launch(const typename Gemm::Params& params, int64_t max_tiles, void* stream,
                     const Tuning& tuning) {
    launch_gemm<sm80::grouped_gemm<Gemm>, Gemm>(params, max_tiles, stream, tuning);
  }
  // The reduction of a weight gradient with split-K.
  template <class Gemm>
  static void reduce_splits(const typename Gemm::Params& params, const cuda::WeightGradient& step) {
    sm80::launch_reduce_splits<Gemm>(params, step);
  }
};

}  // namespace tilemoe::cuda
