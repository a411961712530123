// The words that tcgen05.mma is given, of every operand and tile that the sm100 kit has, against
// constants. These were put together by hand from the tables of the PTX ISA (the instruction
// descriptor of .kind::f16 and the shared memory descriptor of tcgen05), and are what CUTLASS 4.2
// makes of the same shapes (cute/arch/mma_sm100_desc.hpp: make_instr_desc() and make_umma_desc()).
//
// Instruction, 32 bits:
//   [0, 4)   sparsity, saturation: 0       [15]      A is MN-major
//   [4, 6)   D: 1, float32                 [16]      B is MN-major
//   [7, 10)  A: 0 float16, 1 bfloat16      [17, 23)  N / 8: 32 of 256, 24 of 192
//   [10, 13) B: the same                   [24, 29)  M / 16: 8 of 128
//   [13, 15) negate: 0                     [30, 32)  shift: 0
// so bfloat16 128x256, both K-major: 1 << 4 | 1 << 7 | 1 << 10 | 32 << 17 | 8 << 24 = 0x08400490.
//
// Operand, 64 bits, lengths in units of 16 bytes:
//   [0, 14)  address                       [46, 48)  version: 1
//   [16, 30) MN-major: between chunks of 64 rows, 8 KiB: 0x200; K-major and swizzled: unused, 1
//   [32, 46) between groups of 8 rows or steps, 1 KiB: 0x40
//   [49, 53) base offset and mode: 0       [61, 64)  swizzle of 128 bytes: 2
#include "cuda/ptx/tcgen05_descriptors.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "cuda/instances/table.h"

namespace tilemoe::cuda {
namespace instances {
namespace {

// Those of kits that this build does not have, too.
constexpr Row kRowsOfAllKits[] = {
#define PRODUCT(STEP, UNIT, KIT, TILE, ...) \
  {{ProductName::k##STEP, KitName::k##KIT, Variant{__VA_ARGS__}}, TILE},
#include "cuda/instances/products.inc"
#undef PRODUCT
};

}  // namespace
}  // namespace instances

namespace {

using ptx::MmaFormat;

constexpr Major kK = Major::kK, kMN = Major::kMN;

struct Word {
  MmaFormat format;
  int n;
  Major a, b;
  uint32_t expected;
};

constexpr Word kWords[] = {
    {MmaFormat::kBF16, 256, kK, kK, 0x08400490},    // projections, dX~
    {MmaFormat::kBF16, 256, kK, kMN, 0x08410490},   // the same with the weights' other major
    {MmaFormat::kBF16, 256, kMN, kMN, 0x08418490},  // weight gradients
    {MmaFormat::kBF16, 192, kMN, kMN, 0x08318490}, {MmaFormat::kF16, 256, kK, kK, 0x08400010},
    {MmaFormat::kF16, 256, kK, kMN, 0x08410010},   {MmaFormat::kF16, 256, kMN, kMN, 0x08418010},
    {MmaFormat::kF16, 192, kMN, kMN, 0x08318010},
};

TEST(Tcgen05, InstructionsAreThoseOfTheTable) {
  for (const Word& word : kWords)
    EXPECT_EQ(
        ptx::tcgen05_instruction(word.format, 128, static_cast<uint32_t>(word.n), word.a, word.b),
        word.expected)
        << std::hex << word.expected;
}

// A row of the table of kernels for each word, and a word for each row.
TEST(Tcgen05, TheTableHasWhatTheKitUses) {
  using Key = std::tuple<MmaFormat, int, Major, Major>;
  std::set<Key> used, listed;
  for (const instances::Row& row : instances::kRowsOfAllKits) {
    if (row.key.kit != KitName::kSm100) continue;
    ASSERT_EQ(row.tile.block_m, 128);
    const bool summed_rows = row.key.product == ProductName::kWeightGradient;
    const MmaFormat format =
        row.key.variant.recipe == RecipeName::kBF16 ? MmaFormat::kBF16 : MmaFormat::kF16;
    used.emplace(format, row.tile.block_n, summed_rows ? kMN : kK,
                 summed_rows ? kMN : row.key.variant.weights);
  }
  for (const Word& word : kWords) listed.emplace(word.format, word.n, word.a, word.b);
  EXPECT_EQ(used, listed);
}

TEST(Tcgen05, OperandsAreThoseOfTheTable) {
  constexpr uint32_t kGroup = 1024, kChunk = 8192, kUnused = 16;
  struct {
    uint32_t shared, chunk;
    uint64_t expected;
  } const operands[] = {
      {0, kUnused, 0x4000404000010000},        // K-major
      {1024, kUnused, 0x4000404000010040},     // A of a block whose memory begins there
      {0x4400, kUnused, 0x4000404000010440},   // and its B
      {1056, kUnused, 0x4000404000010042},     // 16 steps of the sum on, inside an atom
      {0x38bf0, kUnused, 0x40004040000138bf},  // the last there can be
      {1024, kChunk, 0x4000404002000040},      // MN-major
      {3072, kChunk, 0x40004040020000c0},      // 16 steps on: two groups
  };
  for (const auto& one : operands)
    EXPECT_EQ(ptx::tcgen05_descriptor(one.shared, kGroup, one.chunk), one.expected)
        << std::hex << one.shared;
}

}  // namespace
}  // namespace tilemoe::cuda
