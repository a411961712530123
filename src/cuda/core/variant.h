// What names a kernel of a GEMM: its arch, its variant and its tile. Host code without CUDA's
// headers includes it.
#pragma once

#include "core/check.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cuda {

enum class ArchName { kSm80, kSm90, kSm100 };

struct Sm80;   // from Ampere on: mma.sync, cp.async
struct Sm90;   // Hopper: wgmma, TMA, clusters
struct Sm100;  // Blackwell 10.x: tcgen05, tensor memory, TMA

// ---- the layout of operands and results in memory

// Which dimension of an operand is contiguous: the one that is summed over, or the other.
enum class Major { kK, kMN };

// The output of a GEMM: row-major has contiguous columns; column-major has contiguous rows.
enum class OutputMajor { kRow, kColumn };

// ---- the tile of a CTA, which a kernel is compiled for and the cost model chooses

enum class Schedule {
  kCooperative,  // all consumers work on one tile
  kPingPong,     // two take tiles alternately: one multiplies while the other stores
};

struct TileConfiguration {
  int block_m, block_n;
  Schedule schedule = Schedule::kCooperative;
  int cluster = 1;  // CTAs that share their loads of B
  bool operator==(const TileConfiguration&) const = default;
};

// A kernel of a GEMM, by its tile in the table of kernels (ops/table.h).
using Kernel = const TileConfiguration*;

// ---- the recipes by name, for the host; core/recipe.h defines each

enum class RecipeName { kBF16, kF16, kFp8BF16, kFp8F16 };

constexpr bool is_fp8(RecipeName recipe) {
  return recipe == RecipeName::kFp8BF16 || recipe == RecipeName::kFp8F16;
}

// The recipe of the experts, with outputs of their dtype. Throws Error(kUnsupported) if there is no
// kernel for it.
inline RecipeName recipe_of(const tilemoe_experts& experts, bool fp8 = false) {
  switch (experts.dtype) {
    case TILEMOE_BFLOAT16: return fp8 ? RecipeName::kFp8BF16 : RecipeName::kBF16;
    case TILEMOE_FLOAT16: return fp8 ? RecipeName::kFp8F16 : RecipeName::kF16;
    default: break;
  }
  TILEMOE_CHECK_SUPPORTED(false, "GEMMs of " << tilemoe_dtype_name(experts.dtype)
                                             << ": the CUDA backend supports bfloat16 and float16");
}

// ---- what a GEMM kernel is compiled for, in addition to its tile

// Which activations a kernel has in it. Each takes instructions in every kernel that has it.
enum class Activations {
  kSwiGLU,         // in the plain form
  kClampedSwiGLU,  // in any form: clamp, alpha and shift come at run time
  kGated,          // any with a gate
  kPlain,          // any without
};

// A field that does not apply to a step keeps its default.
struct Variant {
  RecipeName recipe = RecipeName::kBF16;
  Major weights = Major::kK;                      // of the operand that is weights
  Activations activations = Activations::kPlain;  // of a step that has them
  bool interleaved_columns = false;     // up-projection: interleaved gate/up columns in W1
  bool gathers = true;                  // up-projection: rows may come by a token list
  bool adapter = false;                 // projections: the sum has a second source (Adapter)
  bool codes = false;                   // projections: weights are read as their codes
  bool float_out = false;               // weight gradients: written in float32
  OutputMajor out = OutputMajor::kRow;  // weight gradients
  bool operator==(const Variant&) const = default;
};

}  // namespace tilemoe::cuda
