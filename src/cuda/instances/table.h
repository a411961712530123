// The table of products.inc as the host sees it: what there is for a step, and what starts it.
#pragma once

#include <array>
#include <cstddef>

#include "backend.h"
#include "cuda/core/kit.h"
#include "cuda/core/tile_configuration.h"
#include "cuda/core/variant.h"
#include "cuda/sm100/tiles.h"
#include "cuda/sm80/tiles.h"
#include "cuda/sm90/tiles.h"
#include "cuda/step/steps.h"

namespace tilemoe::cuda {

enum class ProductName {
  kUpProjection,
  kDownProjection,
  kActivationGradient,
  kInputGradient,
  kWeightGradient,
};

template <class Step>
inline constexpr ProductName kProductOf{};
template <>
inline constexpr ProductName kProductOf<UpProjection> = ProductName::kUpProjection;
template <>
inline constexpr ProductName kProductOf<DownProjection> = ProductName::kDownProjection;
template <>
inline constexpr ProductName kProductOf<ActivationGradient> = ProductName::kActivationGradient;
template <>
inline constexpr ProductName kProductOf<InputGradient> = ProductName::kInputGradient;
template <>
inline constexpr ProductName kProductOf<WeightGradient> = ProductName::kWeightGradient;

// A row without its tile.
struct ProductKey {
  ProductName product;
  KitName kit;
  Variant variant;
  bool operator==(const ProductKey&) const = default;
};

namespace instances {

using enum RecipeName;
using enum Major;
using enum OutputMajor;
using enum Activations;

struct Row {
  ProductKey key;
  TileConfiguration tile;
};

// A kit's rows, where the build has the kit (instances.cmake).
#ifdef TILEMOE_WITHOUT_SM80
#define TILEMOE_ROW_OF_Sm80(...)
#else
#define TILEMOE_ROW_OF_Sm80(...) __VA_ARGS__
#endif
#ifdef TILEMOE_WITHOUT_SM90
#define TILEMOE_ROW_OF_Sm90(...)
#else
#define TILEMOE_ROW_OF_Sm90(...) __VA_ARGS__
#endif
#ifdef TILEMOE_WITHOUT_SM100
#define TILEMOE_ROW_OF_Sm100(...)
#else
#define TILEMOE_ROW_OF_Sm100(...) __VA_ARGS__
#endif

inline constexpr Row kRows[] = {
#define PRODUCT(STEP, UNIT, KIT, TILE, ...) \
  TILEMOE_ROW_OF_##KIT({{ProductName::k##STEP, KitName::k##KIT, Variant{__VA_ARGS__}}, TILE}, )
#include "cuda/instances/products.inc"
#undef PRODUCT
};

}  // namespace instances

// The tiles that a key has kernels for, in the table's order; empty: there is no such kernel.
class Tiles {
 public:
  constexpr explicit Tiles(const ProductKey& key) {
    for (const instances::Row& row : instances::kRows)
      if (row.key == key) tiles_.at(count_++) = row.tile;
  }
  constexpr const TileConfiguration* begin() const { return tiles_.data(); }
  constexpr const TileConfiguration* end() const { return begin() + count_; }
  constexpr const TileConfiguration* data() const { return begin(); }
  constexpr size_t size() const { return count_; }
  constexpr bool empty() const { return count_ == 0; }

 private:
  std::array<TileConfiguration, 8> tiles_{};
  size_t count_ = 0;
};

// Starts the kernel of a row. Throws where the table has none.
template <class Step>
void start(const ProductKey& key, const TileConfiguration& tile, const Step& step);

}  // namespace tilemoe::cuda
