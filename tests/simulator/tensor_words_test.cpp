// The descriptors of tcgen05.mma: the kernels' own, and others with any field changed.
#include "simulator/tensor_words.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "cuda/ptx/descriptors.h"

namespace tilemoe::simulator {
namespace {

using cuda::Major;
using cuda::ptx::MmaFormat;
using cuda::ptx::tcgen05_descriptor;
using cuda::ptx::tcgen05_instruction;

TEST(TensorWords, SayWhatTheKernelsMean) {
  for (const MmaFormat format : {MmaFormat::kF16, MmaFormat::kBF16})
    for (const uint32_t columns : {16u, 192u, 256u})
      for (const Major a : {Major::kK, Major::kMN})
        for (const Major b : {Major::kK, Major::kMN}) {
          const TensorInstruction word =
              decode_tensor_instruction(tcgen05_instruction(format, 128, columns, a, b), 1);
          EXPECT_EQ(word.type == OperandType::kBFloat16, format == MmaFormat::kBF16);
          EXPECT_EQ(word.rows, 128);
          EXPECT_EQ(word.columns, static_cast<int>(columns));
          EXPECT_EQ(word.a_major == OperandMajor::kMN, a == Major::kMN);
          EXPECT_EQ(word.b_major == OperandMajor::kMN, b == Major::kMN);
        }
  const MatrixDescriptor operand = decode_tensor_descriptor(tcgen05_descriptor(0x4420, 1024, 8192));
  EXPECT_EQ(operand.start, 0x4420u);
  EXPECT_EQ(operand.leading_offset, 8192u);
  EXPECT_EQ(operand.stride_offset, 1024u);
  EXPECT_EQ(operand.swizzle, Swizzle::k128);
}

// 256 columns are the most, and 0 are none.
TEST(TensorWords, OfInstructionsAreRefusedWithABitChanged) {
  const uint32_t right = tcgen05_instruction(MmaFormat::kBF16, 128, 256, Major::kK, Major::kK);
  for (int bit = 0; bit < 32; ++bit) {
    const uint32_t changed = right ^ uint32_t { 1 } << bit;
    if (bit == 15 || bit == 16) {  // another major
      EXPECT_NO_THROW(decode_tensor_instruction(changed, 1)) << bit;
    } else {
      EXPECT_THROW(decode_tensor_instruction(changed, 1), std::invalid_argument) << bit;
    }
  }
  // An operand of the other type than the other.
  EXPECT_THROW(decode_tensor_instruction(right & ~(uint32_t{1} << 7), 1), std::invalid_argument);
  EXPECT_NO_THROW(decode_tensor_instruction(right & ~(uint32_t{9} << 7), 1));
}

TEST(TensorWords, Of2CtasHaveTwiceTheRowsAndColumnsInHalves) {
  const auto word = [](uint32_t rows, uint32_t columns) {
    return tcgen05_instruction(MmaFormat::kBF16, rows, columns, Major::kK, Major::kMN);
  };
  EXPECT_EQ(decode_tensor_instruction(word(256, 96), 2).rows, 256);
  EXPECT_EQ(decode_tensor_instruction(word(256, 96), 2).columns, 96);
  EXPECT_THROW(decode_tensor_instruction(word(128, 96), 2), std::invalid_argument);
  EXPECT_THROW(decode_tensor_instruction(word(256, 96), 1), std::invalid_argument);
  EXPECT_THROW(decode_tensor_instruction(word(256, 80), 2), std::invalid_argument);
  EXPECT_NO_THROW(decode_tensor_instruction(word(128, 80), 1));
}

TEST(TensorWords, OfOperandsAreRefusedWithAReservedBitChanged) {
  const uint64_t right = tcgen05_descriptor(1024, 1024, 16);
  for (const int bit : {14, 15, 30, 31, 46, 47, 48, 49, 50, 51, 52, 53, 60, 61})
    EXPECT_THROW(decode_tensor_descriptor(right ^ uint64_t{1} << bit), std::invalid_argument)
        << bit;
  const auto swizzle = [&](uint64_t mode) {
    return decode_tensor_descriptor((right & ~(uint64_t{7} << 61)) | mode << 61).swizzle;
  };
  EXPECT_EQ(swizzle(0), Swizzle::kNone);
  EXPECT_EQ(swizzle(4), Swizzle::k64);
  EXPECT_EQ(swizzle(6), Swizzle::k32);
  EXPECT_THROW(swizzle(1), std::invalid_argument);
}

}  // namespace
}  // namespace tilemoe::simulator
