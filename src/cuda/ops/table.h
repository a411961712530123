// The GEMM kernels of the steps, as kernels.inc lists them: an arch, a variant and a tile each; and
// the tiles by name.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>

#include "core/step_arguments.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/core/variant.h"

namespace tilemoe::cuda {

// Tiles of the mma.sync kernels: as wide as the registers of a warp allow, and shorter ones for
// experts with small M.
inline constexpr TileConfiguration kWarps256{128, 256};
inline constexpr TileConfiguration kWarps192{128, 192};
inline constexpr TileConfiguration kWarps128{128, 128};
inline constexpr TileConfiguration kSmallM64{64, 128};
inline constexpr TileConfiguration kSmallM16{16, 64};
inline constexpr TileConfiguration kWarps64{128, 64};  // for the ranks of adapters

// Tiles of the Hopper kernels.
inline constexpr TileConfiguration kCooperative256{128, 256, Schedule::kCooperative};
inline constexpr TileConfiguration kCluster256{128, 256, Schedule::kCooperative, 2};
inline constexpr TileConfiguration kCluster192{128, 192, Schedule::kCooperative, 2};
inline constexpr TileConfiguration kWhole192{256, 192};  // a reference tile of weight gradients
inline constexpr TileConfiguration kPingPong128{128, 128, Schedule::kPingPong};
// One consumer multiplies while the other stores; the CTAs of a pair share B.
inline constexpr TileConfiguration kPingPongCluster192{128, 192, Schedule::kPingPong, 2};
inline constexpr TileConfiguration kPingPong64{64, 64, Schedule::kPingPong};  // for small M
// For the ranks of adapters, in projections and in gradients.
inline constexpr TileConfiguration kCooperative64{128, 64};
inline constexpr TileConfiguration kCluster64{128, 64, Schedule::kCooperative, 2};

// Tiles of the Blackwell kernels: the widest of an instruction, the other width that the reference
// tiles of weight gradients have, and the widest of a CTA pair.
inline constexpr TileConfiguration kTensorMemory256{128, 256};
inline constexpr TileConfiguration kTensorMemory192{128, 192};
inline constexpr TileConfiguration kTensorMemory2Cta{128, 256, Schedule::kCooperative, 2};
inline constexpr TileConfiguration kTensorMemory64{128, 64};  // for the ranks of adapters

// Starts a kernel: defined in the step's header, instantiated by the table.
template <class Arch, Variant kVariant, TileConfiguration kTile>
void run(const UpProjection& step);
template <class Arch, Variant kVariant, TileConfiguration kTile>
void run(const DownProjection& step);
template <class Arch, Variant kVariant, TileConfiguration kTile>
void run(const ActivationGradient& step);
template <class Arch, Variant kVariant, TileConfiguration kTile>
void run(const InputGradient& step);
template <class Arch, Variant kVariant, TileConfiguration kTile>
void run(const WeightGradient& step);
template <class Arch, Variant kVariant, TileConfiguration kTile>
void run(const LoraProjection& step);

// ---- the table of kernels.inc for the host: the kernels of a step, and how each is started

enum class GemmName {
  kUpProjection,
  kDownProjection,
  kActivationGradient,
  kInputGradient,
  kWeightGradient,
  kLoraProjection,
};

template <class Step>
inline constexpr GemmName kGemmOf{};
template <>
inline constexpr GemmName kGemmOf<UpProjection> = GemmName::kUpProjection;
template <>
inline constexpr GemmName kGemmOf<DownProjection> = GemmName::kDownProjection;
template <>
inline constexpr GemmName kGemmOf<ActivationGradient> = GemmName::kActivationGradient;
template <>
inline constexpr GemmName kGemmOf<InputGradient> = GemmName::kInputGradient;
template <>
inline constexpr GemmName kGemmOf<WeightGradient> = GemmName::kWeightGradient;
template <>
inline constexpr GemmName kGemmOf<LoraProjection> = GemmName::kLoraProjection;

// A row without its tile.
struct KernelKey {
  GemmName gemm;
  ArchName arch;
  Variant variant;
  bool operator==(const KernelKey&) const = default;
};

namespace instances {

using enum RecipeName;
using enum Major;
using enum OutputMajor;
using enum Activations;

struct Row {
  KernelKey key;
  TileConfiguration tile;
};

// The rows of an arch, if the build has the arch (kernels.cmake).
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
#define KERNEL(STEP, UNIT, ARCH, TILE, ...) \
  TILEMOE_ROW_OF_##ARCH({{GemmName::k##STEP, ArchName::k##ARCH, Variant{__VA_ARGS__}}, TILE}, )
#include "cuda/ops/kernels.inc"
#undef KERNEL
};

inline constexpr size_t kRowCount = std::size(kRows);

// A number that differs for keys that differ.
constexpr uint32_t number_of(const KernelKey& key) {
  uint32_t number = 0;
  const auto append = [&](auto field, uint32_t values) {
    number = number * values + static_cast<uint32_t>(field);
  };
  append(key.gemm, 6), append(key.arch, 3);
  append(key.variant.recipe, 4), append(key.variant.weights, 2);
  append(key.variant.activations, 4), append(key.variant.interleaved_columns, 2);
  append(key.variant.gathers, 2), append(key.variant.adapter, 2);
  append(key.variant.codes, 2), append(key.variant.float_out, 2), append(key.variant.out, 2);
  return number;
}

// The rows sorted by key, those of a key in the order of the table. Sorted at compile time: a key is
// found by bisection.
struct Index {
  std::array<uint32_t, kRowCount> key{};  // number_of() each row's
  std::array<TileConfiguration, kRowCount> tile{};
  std::array<size_t, kRowCount> row{};  // of kRows
};
inline constexpr Index kIndex = [] {
  Index index;
  for (size_t i = 0; i < kRowCount; ++i) index.row[i] = i;
  std::sort(index.row.begin(), index.row.end(), [](size_t a, size_t b) {
    const uint32_t key_a = number_of(kRows[a].key), key_b = number_of(kRows[b].key);
    return key_a != key_b ? key_a < key_b : a < b;
  });
  for (size_t i = 0; i < kRowCount; ++i) {
    index.key[i] = number_of(kRows[index.row[i]].key);
    index.tile[i] = kRows[index.row[i]].tile;
  }
  return index;
}();

}  // namespace instances

// The tiles that a key has kernels for, in the order of the table; empty: no such kernel exists.
constexpr std::span<const TileConfiguration> tiles_of(const KernelKey& key) {
  const auto& keys = instances::kIndex.key;
  const auto [first, last] = std::equal_range(keys.begin(), keys.end(), instances::number_of(key));
  return {instances::kIndex.tile.data() + (first - keys.begin()),
          static_cast<size_t>(last - first)};
}

// Starts a kernel, which is an element of tiles_of() its key.
template <class Step>
void start(Kernel kernel, const Step& step);

}  // namespace tilemoe::cuda
