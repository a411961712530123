// The arch of Hopper: the parts that ops.h names. Other archs have parts with the same names and
// Params. The arithmetic of an epilogue is shared (gemm/epilogue); its time is the choice of the
// arch.
#pragma once

#include <type_traits>

#include "cuda/core/recipe.h"
#include "cuda/gemm/epilogue/sm90_activation.h"
#include "cuda/gemm/epilogue/sm90_activation_gradient.h"
#include "cuda/gemm/epilogue/sm90_quantize.h"
#include "cuda/gemm/epilogue/sm90_store.h"
#include "cuda/gemm/epilogue/sm90_weight_gradient.h"
#include "cuda/gemm/epilogue/sm90_whole_gradient.h"
#include "cuda/gemm/epilogue/store_threads.h"
#include "cuda/gemm/launch_gemm.h"
#include "cuda/gemm/load/chained.h"
#include "cuda/gemm/load/dense.h"
#include "cuda/gemm/load/gathered.h"
#include "cuda/gemm/load/two_sources.h"
#include "cuda/gemm/load/weights.h"
#include "cuda/gemm/schedule/expert_tiles.h"
#include "cuda/gemm/schedule/row_tiles.h"
#include "cuda/gemm/sm90_fp8.h"
#include "cuda/gemm/sm90_fp8_adapter.h"
#include "cuda/gemm/sm90_fp8_parts.h"
#include "cuda/gemm/sm90_promoted.h"
#include "cuda/gemm/split_k.h"
#include "cuda/ops/table.h"

namespace tilemoe::cuda {

namespace sm90 {

// The two CTAs of a cluster have the halves of a reference tile.
template <class Shape>
struct HalvesOfReferenceTilesOf {
  static_assert(Shape::BLOCK_M == ReferenceTiles::kRows && Shape::kCluster == 2);
  using type = ExpertTiles<Shape::BLOCK_K>;
};
// A CTA has a whole one.
template <class Shape>
concept WholeReferenceTile = Shape::BLOCK_M == 2 * ReferenceTiles::kRows&& Shape::kCluster == 1;
template <WholeReferenceTile Shape>
struct HalvesOfReferenceTilesOf<Shape> {
  using type = ExpertTiles<Shape::BLOCK_K, 1>;
};
template <class Shape>
using HalvesOfReferenceTiles = typename HalvesOfReferenceTilesOf<Shape>::type;

// How rows are stored, except those of the activation gradient, which are in shared memory already.
template <class Shape, class Element>
using RowStore = RaggedStore<Shape, Element>;

// The fp8 recipe.
template <class Shape>
concept Fp8Shape = sizeof(typename Shape::Element) == 1;

// Wide ping-pong tiles store nothing deferred, and through few slots, so that the ring has five
// stages: a consumer has the time of the other one's MMAs to store.
template <class Shape>
concept HidesStores = Shape::kSchedule == Schedule::kPingPong&& Shape::BLOCK_N == 192;
template <class Shape, class Element>
using NarrowRowStore = RaggedStore<Shape, Element, kNarrowStoreColumns>;
// Ping-pong hides a store that is not deferred.
template <class Shape>
concept StoresAtOnce = Shape::kSmallM || HidesStores<Shape>;
// Small tiles have parts of H or A that are narrower than a box of TMA.
template <class Shape, class Element = typename Shape::Recipe::Out::H>
using StoreOfH =
    std::conditional_t<Shape::kSmallM, StoreByThreads<Shape, Element>,
                       std::conditional_t<HidesStores<Shape>, NarrowRowStore<Shape, Element>,
                                          RowStore<Shape, Element>>>;

template <class Shape, class Out, OutputMajor kMajor>
struct WeightGradientOf {
  using type = WeightGradientEpilogue<Shape, Out, kMajor>;
};
template <WholeReferenceTile Shape, class Out, OutputMajor kMajor>
struct WeightGradientOf<Shape, Out, kMajor> {
  using type = WholeGradientEpilogue<Shape, Out, kMajor>;
};

template <class Shape, Activations kSet, bool kInterleavedColumns>
struct ActivationOf {
  using type = ActivationEpilogue<Shape, kSet, StoreOfH<Shape>>;
};
template <class Shape, Activations kSet>
struct ActivationOf<Shape, kSet, true> {
  using type = InterleavedActivationEpilogue<Shape, kSet, StoreOfH<Shape>>;
};
template <class Shape>
struct ActivationOf<Shape, Activations::kSwiGLU, false> {
  using type = SwiGLUEpilogue<Shape, RowStore<Shape, typename Shape::Recipe::Out::H>>;
};
template <StoresAtOnce Shape>
struct ActivationOf<Shape, Activations::kSwiGLU, false> {
  using type = ActivationEpilogue<Shape, Activations::kSwiGLU, StoreOfH<Shape>>;
};

// One slot of stores per warp: with two, and scales of gathered rows, the ring would have a stage
// less.
template <class Shape, Activations kSet, bool kStoresA = false>
using QuantizingOf = QuantizingEpilogue<
    Shape, kSet, RaggedStore<Shape, typename Shape::Recipe::Out::H, kStoreColumns, 1>, kStoresA>;
template <Fp8Shape Shape>
struct ActivationOf<Shape, Activations::kSwiGLU, false> {
  using type = QuantizingOf<Shape, Activations::kSwiGLU>;
};
template <Fp8Shape Shape>
struct ActivationOf<Shape, Activations::kGated, false> {
  using type = QuantizingOf<Shape, Activations::kGated>;
};

template <class Shape, Activations kSet>
struct ActivationGradientOf {
  using type = ActivationGradientEpilogue<Shape, kSet>;
};
// The other gated activations leave no registers for codes.
template <Fp8Shape Shape>
struct ActivationGradientOf<Shape, Activations::kSwiGLU> {
  using Slice = typename ActivationGradientEpilogue<Shape, Activations::kSwiGLU>::Slice;
  using Codes = GradientCodes<Slice, typename Shape::Recipe::Out::dH>;
  using type = ActivationGradientEpilogue<Shape, Activations::kSwiGLU, Codes>;
};

template <class Shape, class Element>
struct StoreOf {
  using type = StoreEpilogue<Shape, RowStore<Shape, Element>>;
};
template <HidesStores Shape, class Element>
struct StoreOf<Shape, Element> {
  using type = PromptStoreEpilogue<Shape, NarrowRowStore<Shape, Element>>;
};
template <Fp8Shape Shape, class Element>
struct StoreOf<Shape, Element> {
  using type = PromptStoreEpilogue<Shape, RowStore<Shape, Element>>;
};

template <class Shape, bool kGathers>
struct RowsOf {
  using type = std::conditional_t<kGathers, load::GatheredRows<Shape>, load::DenseRows<Shape>>;
};
template <Fp8Shape Shape, bool kGathers>
struct RowsOf<Shape, kGathers> {
  using type =
      std::conditional_t<kGathers, load::ScaledRows<Shape>, load::ScaledRowsInOrder<Shape>>;
};

// Loads of transposed weights take more registers; a producer that also loads for the epilogue has
// more.
template <Major kWeights, class Epilogue>
inline constexpr bool loads_take_registers = kWeights == Major::kMN && !ReadsThroughRing<Epilogue>;

// The first of two sources: as without a second one, but gathered rows may have to keep less in
// registers.
template <class First, bool kKeepsLess>
struct OfTwo {
  using type = First;
};
template <class Shape>
struct OfTwo<load::GatheredRows<Shape>, true> {
  using type = load::GatheredRowsOfTwo<Shape>;
};
template <class Shape, bool kKeepsLess>
struct OfTwo<load::ScaledRows<Shape>, kKeepsLess> {
  using type = load::ScaledRows<Shape, load::GatheredRowsOfTwo<Shape>>;
};

template <class Shape>
struct PartRowsOf {
  using type = load::DensePartRows<Shape>;
};
template <Fp8Shape Shape>
struct PartRowsOf<Shape> {
  using type = load::ScaledPartRows<Shape>;
};
template <class Shape, Major kMajor>
struct WeightsByPartsOf {
  using type = load::WeightsByParts<Shape, kMajor>;
};
template <Fp8Shape Shape>
struct WeightsByPartsOf<Shape, Major::kK> {
  using type = load::ScaledWeightsByParts<Shape>;
};

}  // namespace sm90

struct Sm90 {
  static constexpr ArchName kName = ArchName::kSm90;

  template <Variant kVariant, TileConfiguration kTile>
  using Shape = sm90::TileShape<typename RecipeOf<kVariant.recipe>::type, kTile>;

  // ---- operand A: rows by expert, or summed over
  template <class Shape, bool kGathers>
  using Rows = typename sm90::RowsOf<Shape, kGathers>::type;
  template <class Shape>
  using PartRows = typename sm90::PartRowsOf<Shape>::type;
  template <class Shape>
  using AGathered = load::GatheredRowsAsK<Shape>;

  // ---- operand B
  template <class Shape, Major kMajor, int kParts>
  using Weights = load::Weights<Shape, kMajor, kParts>;
  template <class Shape, int kParts>
  using Codes = load::ScaledWeights<Shape, kParts>;
  template <class Shape, Major kMajor>
  using WeightsByParts = typename sm90::WeightsByPartsOf<Shape, kMajor>::type;
  template <class Shape>
  using BDense = load::DenseRowsAsK<Shape>;

  // ---- an operand with a second source, an adapter's: its rows arrive as the first source's
  template <class Shape>
  using AdapterShape = typename sm90::AdapterShapeOf<Shape>::type;
  template <class Shape, class First>
  using AdapterRows = std::conditional_t<load::ThreadLoader<First>, load::CopiedRows<Shape>,
                                         load::DenseRows<Shape>>;
  template <class First, class Second, Major kWeights, class Epilogue>
  using Chained = load::Chained<
      typename sm90::OfTwo<First, sm90::loads_take_registers<kWeights, Epilogue>>::type, Second>;

  // ---- epilogues
  template <class Shape, Activations kSet, bool kInterleavedColumns>
  using Activation = typename sm90::ActivationOf<Shape, kSet, kInterleavedColumns>::type;
  template <class Shape, Activations kSet>
  using ActivationInBoth = sm90::QuantizingOf<Shape, kSet, true>;
  template <class Shape, class Element>
  using Store = typename sm90::StoreOf<Shape, Element>::type;
  template <class Shape, Activations kSet>
  using ActivationGradient = typename sm90::ActivationGradientOf<Shape, kSet>::type;
  template <class Shape, class Out, OutputMajor kMajor>
  using WeightGradient = typename sm90::WeightGradientOf<Shape, Out, kMajor>::type;

  // ---- the GEMM of these parts, in a tile order
  template <class Shape>
  using RowOrder = RowTiles<Shape::BLOCK_M, Shape::kCluster>;
  template <class Shape>
  using ExpertOrder = sm90::HalvesOfReferenceTiles<Shape>;
  template <class Shape, class A, class B, class Epilogue, class Order>
  using Gemm = sm90::GroupedGemm<Shape, A, B, Epilogue, Order>;
  template <class Gemm>
  static void launch(const typename Gemm::Params& params, int64_t max_tiles, void* stream,
                     const Tuning& tuning) {
    launch_gemm<sm90::grouped_gemm<Gemm>, Gemm>(params, max_tiles, stream, tuning);
  }
  // The reduction of a weight gradient with split-K.
  template <class Gemm>
  static void reduce_splits(const typename Gemm::Params& params, const cuda::WeightGradient& step) {
    if constexpr (sm90::WholeReferenceTile<typename Gemm::Shape>) {
      using Halves = typename Gemm::Epilogue::Halves;
      const typename Halves::Params halves{.order = params.order, .epilogue = params.epilogue};
      launch_reduce_splits<sm90::WeightGradientReduction<Halves>>(halves, step);
    } else {
      launch_reduce_splits<sm90::WeightGradientReduction<Gemm>>(params, step);
    }
  }
};

}  // namespace tilemoe::cuda
