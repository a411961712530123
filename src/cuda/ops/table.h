// The GEMM kernels of the steps, as kernels.inc lists them: an arch, a variant and a tile each; and
// the tiles by name.
#pragma once

#include <array>
#include <cstddef>

#include "core/backend.h"
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

// Tiles of the Hopper kernels.
inline constexpr TileConfiguration kCooperative256{128, 256, Schedule::kCooperative};
inline constexpr TileConfiguration kCluster256{128, 256, Schedule::kCooperative, 2};
inline constexpr TileConfiguration kCluster192{128, 192, Schedule::kCooperative, 2};
inline constexpr TileConfiguration kPingPong128{128, 128, Schedule::kPingPong};
inline constexpr TileConfiguration kPingPong64{64, 64, Schedule::kPingPong};  // for small M

// Tiles of the Blackwell kernels: the widest of an instruction, the other width that the reference
// tiles of weight gradients have, and the widest of a CTA pair.
inline constexpr TileConfiguration kTensorMemory256{128, 256};
inline constexpr TileConfiguration kTensorMemory192{128, 192};
inline constexpr TileConfiguration kTensorMemory2Cta{128, 256, Schedule::kCooperative, 2};

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

// ---- the table of kernels.inc for the host: the kernels of a step, and how each is started

enum class GemmName {
  kUpProjection,
  kDownProjection,
  kActivationGradient,
  kInputGradient,
  kWeightGradient,
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

}  // namespace instances

// The tiles that a key has kernels for, in the order of the table; empty: no such kernel exists.
class Tiles {
 public:
  constexpr explicit Tiles(const KernelKey& key) {
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

// Starts the kernel of a row. Throws if the table has no such row.
template <class Step>
void start(const KernelKey& key, const TileConfiguration& tile, const Step& step);

}  // namespace tilemoe::cuda
