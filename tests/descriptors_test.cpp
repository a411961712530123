// The descriptors of wgmma and tcgen05.mma for every operand and tile of the archs, compared with
// those of CUTLASS's own constructors (cutlass_words/words.inc).
#include "cuda/ptx/descriptors.h"

#include <gtest/gtest.h>

#include <set>
#include <string_view>
#include <tuple>

#include "cuda/ops/table.h"
// The host needs of this header the layout of an operand.
#define __device__
#include "cuda/gemm/load/stage.h"
#undef __device__

namespace tilemoe::cuda {
namespace instances {
namespace {

// Includes the archs that this build lacks.
constexpr Row kRowsOfAllArchs[] = {
#define KERNEL(STEP, UNIT, ARCH, TILE, ...) \
  {{GemmName::k##STEP, ArchName::k##ARCH, Variant{__VA_ARGS__}}, TILE},
#include "cuda/ops/kernels.inc"
#undef KERNEL
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
  ArchName arch;
  std::string_view name;
  Major major;
  int rows, fragment;
  uint32_t start;
  uint64_t cutlass[4];
};

#define INSTRUCTION(...)
#define OPERAND(ARCH, NAME, MAJOR, ROWS, FRAGMENT, START, ...) \
  {ArchName::k##ARCH, #NAME, Major::k##MAJOR, ROWS, FRAGMENT, START, {__VA_ARGS__}},
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

// The MMA of a kernel.
struct Mma {
  MmaFormat format;
  Major a, b;
};
Mma mma_of(const instances::Row& row) {
  const bool rows_are_k = row.key.gemm == GemmName::kWeightGradient;
  return {row.key.variant.recipe == RecipeName::kBF16 ? MmaFormat::kBF16 : MmaFormat::kF16,
          rows_are_k ? Major::kMN : Major::kK, rows_are_k ? Major::kMN : row.key.variant.weights};
}

TEST(Descriptors, InstructionsAreCutlass) {
  for (const Instruction& word : kInstructions)
    EXPECT_EQ(ptx::tcgen05_instruction(word.format, word.m, word.n, word.a, word.b), word.cutlass)
        << std::hex << word.cutlass;
}

// A descriptor as an arch's Mma makes it from a staged operand.
template <class Staged>
uint64_t word_of(const Operand& operand, uint32_t step) {
  const uint32_t shared =
      operand.start + static_cast<uint32_t>(operand.fragment) * 64 * Staged::kRowBytes;
  const uint32_t chunk = Staged::kMajor == Major::kK ? 16 : Staged::kChunkBytes;
  const uint64_t first = operand.arch == ArchName::kSm100
                             ? ptx::tcgen05_descriptor(shared, Staged::kAtomBytes, chunk)
                             : ptx::wgmma_descriptor(shared, Staged::kAtomBytes, chunk);
  return first + step * Staged::step_bytes(16, 2) / 16;
}

TEST(Descriptors, OperandsAreCutlass) {
  constexpr uint64_t kChunkStride = uint64_t{0x3fff} << 16;
  for (const Operand& operand : kOperands) {
    const bool mn = operand.major == Major::kMN;
    const int rows = operand.arch == ArchName::kSm90 && operand.name == "A" ? 64 : operand.rows;
    // If an instruction's rows are one chunk, no next one exists: CUTLASS has the distance 0.
    const uint64_t unused = mn && rows == 64 ? kChunkStride : 0;
    for (uint32_t step = 0; step < 4; ++step) {
      const uint64_t word = mn ? word_of<StagedOperand<Major::kMN, 64>>(operand, step)
                               : word_of<StagedOperand<Major::kK, 64>>(operand, step);
      EXPECT_EQ(word & ~unused, operand.cutlass[step])
          << std::hex << operand.cutlass[step] << " at 0x" << operand.start;
    }
  }
}

TEST(Descriptors, TheTableHasWhatTheArchsUse) {
  std::set<std::tuple<MmaFormat, int, int, Major, Major>> instructions;
  for (const Instruction& word : kInstructions)
    instructions.emplace(word.format, word.m, word.n, word.a, word.b);
  std::set<std::tuple<ArchName, std::string_view, Major, int>> operands;
  for (const Operand& operand : kOperands)
    operands.emplace(operand.arch, operand.name, operand.major, operand.rows);
  for (const instances::Row& row : instances::kRowsOfAllArchs) {
    const ArchName arch = row.key.arch;
    if (arch == ArchName::kSm80) continue;
    const auto [format, a, b] = mma_of(row);
    const auto [m, n] = std::tuple{row.tile.block_m, row.tile.block_n};
    const int ctas = arch == ArchName::kSm100 ? row.tile.cluster : 1;  // of an MMA
    if (arch == ArchName::kSm100) {
      EXPECT_TRUE(instructions.contains({format, ctas * m, n, a, b})) << m << " x " << n;
    }
    EXPECT_TRUE(operands.contains({arch, ctas == 1 ? "A" : "TwoCtaA", a, m})) << m;
    EXPECT_TRUE(operands.contains({arch, ctas == 1 ? "B" : "TwoCtaB", b, n / ctas})) << n;
  }
}

}  // namespace
}  // namespace tilemoe::cuda
