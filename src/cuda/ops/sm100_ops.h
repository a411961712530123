// The arch of Blackwell (compute capability 10.x), and its operand B of a CTA pair.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/step_arguments.h"
#include "cuda/core/recipe.h"
#include "cuda/gemm/epilogue/sm100_epilogues.h"
#include "cuda/gemm/epilogue/store_threads.h"
#include "cuda/gemm/launch_gemm.h"
#include "cuda/gemm/load/chained.h"
#include "cuda/gemm/load/dense.h"
#include "cuda/gemm/load/gathered.h"
#include "cuda/gemm/load/weights.h"
#include "cuda/gemm/schedule/expert_tiles.h"
#include "cuda/gemm/schedule/row_tiles.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/gemm/split_k.h"
#include "cuda/ops/table.h"

namespace tilemoe::cuda::sm100 {

// Operand B of a CTA pair: each CTA loads half of the columns of the tile, and an MMA reads the
// stages of both. The first CTA has the first half: the gate part, if the tile has gate columns,
// then up columns. `Load_` loads the columns of one CTA and one part.
template <class Load_, int kParts>
class HalfOfWeights {
 public:
  using Load = Load_;
  using Operand = typename Load::Operand;
  static constexpr int kTmaBytes = Load::kTmaBytes;

  struct Params {
    typename Load::Params part[kParts];
  };

  // From kParts weights (E, columns of the GEMM, sum).
  static Params params(const tilemoe_tensor* weights) {
    Params params{};
    for (int p = 0; p < kParts; ++p) params.part[p] = Load::params(weights + p);
    return params;
  }
  // The parts of W1 (E, columns, d); their columns are the k of the GEMM.
  static Params params(const UpParts& W1) {
    static_assert(kParts == 1);
    return {{Load::params(W1)}};
  }

  __device__ HalfOfWeights(const Params& params, int32_t thread)
      : load_(params.part[kParts == 2 ? rank() : 0], thread) {}

  __device__ void prefetch() const { load_.prefetch(); }
  __device__ void begin(Tile tile) {
    if constexpr (kParts == 1) tile.n_block = 2 * tile.n_block + rank();
    load_.begin(tile);
  }
  __device__ void load(uint32_t shared, uint32_t full, int32_t k_block) const {
    load_.load(shared, full, k_block);
  }

 private:
  __device__ static int32_t rank() { return static_cast<int32_t>(blockIdx.x % 2); }

  Load load_;
};

}  // namespace tilemoe::cuda::sm100

namespace tilemoe::cuda {

// The arch: tcgen05, tensor memory, TMA. Its parts have the names that ops.h uses, as in
// sm90_ops.h.

namespace sm100 {

// Two CTAs work on the halves of a reference tile, without a cluster.
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
requires(Shape::kCtas == 2) struct WeightsOf<Shape, kMajor, kParts> {
  using type = HalfOfWeights<load::Weights<typename Shape::OwnColumns, kMajor, 1>, kParts>;
};
template <class Shape, Major kMajor>
struct WeightsByPartsOf {
  using type = load::WeightsByParts<Shape, kMajor>;
};
template <class Shape, Major kMajor>
requires(Shape::kCtas == 2) struct WeightsByPartsOf<Shape, kMajor> {
  using type = HalfOfWeights<load::WeightsByParts<typename Shape::OwnColumns, kMajor>, 1>;
};

}  // namespace sm100

struct Sm100 {
  static constexpr ArchName kName = ArchName::kSm100;

  template <Variant kVariant, TileConfiguration kTile>
  using Shape = sm100::TileShape<typename RecipeOf<kVariant.recipe>::type, kTile>;

  // ---- operand A: rows grouped by expert, or rows as the k of the GEMM
  template <class Shape, bool kGathers>
  using Rows = std::conditional_t<kGathers, load::GatheredRows<Shape>, load::DenseRows<Shape>>;
  template <class Shape>
  using PartRows = load::DensePartRows<Shape>;
  template <class Shape>
  using AGathered = load::GatheredRowsAsK<Shape>;

  // ---- operand B
  template <class Shape, Major kMajor, int kParts>
  using Weights = typename sm100::WeightsOf<Shape, kMajor, kParts>::type;
  template <class Shape, Major kMajor>
  using WeightsByParts = typename sm100::WeightsByPartsOf<Shape, kMajor>::type;
  template <class Shape>
  using BDense = load::DenseRowsAsK<Shape>;

  // ---- an operand with a second source, an adapter's: its rows arrive as the first source's
  template <class Shape>
  using AdapterShape = Shape;
  template <class Shape, class First>
  using AdapterRows = std::conditional_t<load::ThreadLoader<First>, load::GatheredRows<Shape>,
                                         load::DenseRows<Shape>>;
  template <class First, class Second, Major, class>
  using Chained = load::Chained<First, Second>;

  // ---- epilogues; rows are stored 32 columns at a time, from registers
  template <class Shape, class Element>
  using RowStore = StoreByThreads<Shape, Element, 32>;
  template <class Shape, Activations kSet, bool kInterleavedColumns>
  using Activation = sm100::ActivationEpilogue<Shape, kSet, kInterleavedColumns,
                                               RowStore<Shape, typename Shape::Recipe::Out::H>>;
  template <class Shape, class Element>
  using Store = sm100::StoreEpilogue<Shape, RowStore<Shape, Element>>;
  template <class Shape, Activations kSet>
  using ActivationGradient = sm100::ActivationGradientEpilogue<Shape, kSet>;
  template <class Shape, class Out, OutputMajor kMajor>
  using WeightGradient = sm100::WeightGradientEpilogue<Shape, Out, kMajor>;

  // ---- the GEMM of these parts, in a tile order: a CTA pair always has the same columns
  template <class Shape>
  using RowOrder = RowTiles<Shape::BLOCK_M, Shape::kCtas, Shape::kCtas == 2>;
  template <class Shape>
  using ExpertOrder = sm100::HalvesOfReferenceTiles<Shape>;
  template <class Shape, class A, class B, class Epilogue, class Order>
  using Gemm = sm100::GroupedGemm<Shape, A, B, Epilogue, Order>;
  template <class Gemm>
  static void launch(const typename Gemm::Params& params, int64_t max_tiles, void* stream,
                     const Tuning& tuning) {
    launch_gemm<sm100::grouped_gemm<Gemm>, Gemm>(params, max_tiles, stream, tuning);
  }
  // The reduction of a weight gradient with split-K.
  template <class Gemm>
  static void reduce_splits(const typename Gemm::Params& params, const cuda::WeightGradient& step) {
    launch_reduce_splits<sm100::WeightGradientReduction<Gemm>>(params, step);
  }
};

}  // namespace tilemoe::cuda
