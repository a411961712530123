// The words that wgmma and tcgen05.mma are given, of every operand and tile that the kits have,
// against those that CUTLASS's own constructors make (cutlass_words/words.inc).
#include "cuda/ptx/descriptors.h"

#include <gtest/gtest.h>

#include <set>
#include <string_view>
#include <tuple>

#include "cuda/gemm/load/operand.h"
#include "cuda/ops/table.h"

namespace tilemoe::cuda {
namespace instances {
namespace {

// Those of kits that this build does not have, too.
constexpr Row kRowsOfAllKits[] = {
#define PRODUCT(STEP, UNIT, KIT, TILE, ...) \
  {{ProductName::k##STEP, KitName::k##KIT, Variant{__VA_ARGS__}}, TILE},
#include "cuda/ops/kernels.inc"
#undef PRODUCT
};

}  // namespace
}  // namespace instances

namespace {

using ptx::MmaFormat;

struct Instruction {
  MmaFormat format;
  uint32_t m, n;
  Major a, b;
  uint32_t cutlass;
};

struct Operand {
  KitName kit;
  std::string_view name;
  Major major;
  int rows, slab;
  uint32_t start;
  uint64_t cutlass[4];
};

#define INSTRUCTION(...)
#define OPERAND(KIT, NAME, MAJOR, ROWS, SLAB, START, ...) \
  {KitName::k##KIT, #NAME, Major::k##MAJOR, ROWS, SLAB, START, {__VA_ARGS__}},
constexpr Operand kOperands[] = {
#include "cutlass_words/words.inc"
};
#undef INSTRUCTION
#undef OPERAND
#define OPERAND(...)
#define INSTRUCTION(FORMAT, M, N, A, B, WORD) \
  {MmaFormat::k##FORMAT, M, N, Major::k##A, Major::k##B, WORD},
constexpr Instruction kInstructions[] = {
#include "cutlass_words/words.inc"
};
#undef INSTRUCTION
#undef OPERAND

// What a kernel multiplies.
struct Product {
  MmaFormat format;
  Major a, b;
};
Product product_of(const instances::Row& row) {
  const bool summed_rows = row.key.product == ProductName::kWeightGradient;
  return {row.key.variant.recipe == RecipeName::kBF16 ? MmaFormat::kBF16 : MmaFormat::kF16,
          summed_rows ? Major::kMN : Major::kK, summed_rows ? Major::kMN : row.key.variant.weights};
}

TEST(Descriptors, InstructionsAreCutlass) {
  for (const Instruction& word : kInstructions)
    EXPECT_EQ(ptx::tcgen05_instruction(word.format, word.m, word.n, word.a, word.b), word.cutlass)
        << std::hex << word.cutlass;
}

// As a kit's Mma makes them of a staged operand.
template <class Staged>
uint64_t word_of(const Operand& operand, uint32_t step) {
  const uint32_t shared =
      operand.start + static_cast<uint32_t>(operand.slab) * 64 * Staged::kRowBytes;
  const uint32_t chunk = Staged::kMajor == Major::kK ? 16 : Staged::kChunkBytes;
  const uint64_t first = operand.kit == KitName::kSm100
                             ? ptx::tcgen05_descriptor(shared, Staged::kAtomBytes, chunk)
                             : ptx::wgmma_descriptor(shared, Staged::kAtomBytes, chunk);
  return first + step * Staged::kStepBytes / 16;
}

TEST(Descriptors, OperandsAreCutlass) {
  constexpr uint64_t kChunkStride = uint64_t{0x3fff} << 16;
  for (const Operand& operand : kOperands) {
    const bool mn = operand.major == Major::kMN;
    const int rows = operand.kit == KitName::kSm90 && operand.name == "A" ? 64 : operand.rows;
    // Where an instruction's rows are one chunk there is no next one: CUTLASS has the distance 0.
    const uint64_t unused = mn && rows == 64 ? kChunkStride : 0;
    for (uint32_t step = 0; step < 4; ++step) {
      const uint64_t word = mn ? word_of<StagedOperand<Major::kMN, 64>>(operand, step)
                               : word_of<StagedOperand<Major::kK, 64>>(operand, step);
      EXPECT_EQ(word & ~unused, operand.cutlass[step])
          << std::hex << operand.cutlass[step] << " at 0x" << operand.start;
    }
  }
}

TEST(Descriptors, TheTableHasWhatTheKitsUse) {
  std::set<std::tuple<MmaFormat, int, int, Major, Major>> instructions;
  for (const Instruction& word : kInstructions)
    instructions.emplace(word.format, word.m, word.n, word.a, word.b);
  std::set<std::tuple<KitName, std::string_view, Major, int>> operands;
  for (const Operand& operand : kOperands)
    operands.emplace(operand.kit, operand.name, operand.major, operand.rows);
  for (const instances::Row& row : instances::kRowsOfAllKits) {
    const KitName kit = row.key.kit;
    if (kit == KitName::kSm80) continue;
    const auto [format, a, b] = product_of(row);
    const auto [m, n] = std::tuple{row.tile.block_m, row.tile.block_n};
    const int blocks = kit == KitName::kSm100 ? row.tile.cluster : 1;  // of a product
    if (kit == KitName::kSm100) {
      EXPECT_TRUE(instructions.contains({format, blocks * m, n, a, b})) << m << " x " << n;
    }
    EXPECT_TRUE(operands.contains({kit, blocks == 1 ? "A" : "PairA", a, m})) << m;
    EXPECT_TRUE(operands.contains({kit, blocks == 1 ? "B" : "PairB", b, n / blocks})) << n;
  }
}

}  // namespace
}  // namespace tilemoe::cuda
