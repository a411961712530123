// The places of wgmma's operands: as the kernels stage them, as in the PTX ISA's figures, and
// different ones with any field changed.
#include "simulator/matrix_descriptor.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <stdexcept>

namespace tilemoe::simulator {
namespace {

constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kSwizzle64 = uint64_t{2} << 62,
                   kSwizzle32 = uint64_t{3} << 62;

constexpr uint64_t bits_of(uint32_t start, uint32_t leading, uint32_t stride, uint64_t mode) {
  return mode | static_cast<uint64_t>(stride / 16) << 32 |
         static_cast<uint64_t>(leading / 16) << 16 | start / 16;
}

uint32_t address(uint64_t bits, OperandMajor major, int row, int step) {
  return element_address(decode_matrix_descriptor(bits), major, row, step);
}

std::vector<uint32_t> addresses(uint64_t bits, OperandMajor major, int rows) {
  std::vector<uint32_t> result;
  for (const OperandPiece& piece : operand_pieces(decode_matrix_descriptor(bits), major, rows))
    result.push_back(piece.address);
  return result;
}

TEST(MatrixDescriptor, DecodesEachField) {
  const MatrixDescriptor descriptor = decode_matrix_descriptor(0x4000'0040'0200'1234);
  EXPECT_EQ(descriptor.start, 0x12340u);
  EXPECT_EQ(descriptor.leading_offset, 0x2000u);
  EXPECT_EQ(descriptor.stride_offset, 0x400u);
  EXPECT_EQ(descriptor.swizzle, Swizzle::k128);
  EXPECT_EQ(decode_matrix_descriptor(kSwizzle64).swizzle, Swizzle::k64);
  EXPECT_EQ(decode_matrix_descriptor(kSwizzle32).swizzle, Swizzle::k32);
  EXPECT_EQ(decode_matrix_descriptor(0).swizzle, Swizzle::kNone);
  EXPECT_EQ(decode_matrix_descriptor(0x3fff'3fff'3fff).stride_offset, 0x3fff0u);
}

TEST(MatrixDescriptor, RefusesWhatHasNoMeaning) {
  for (const int bit : {14, 15, 30, 31, 46, 48, 52, 61})
    EXPECT_THROW(decode_matrix_descriptor(uint64_t{1} << bit), std::invalid_argument) << bit;
  EXPECT_THROW(decode_matrix_descriptor(kSwizzle128 | uint64_t{1} << 49), std::invalid_argument);
  EXPECT_NO_THROW(decode_matrix_descriptor(uint64_t{1} << 49));  // without a swizzle it is ignored
}

// A stage of (256, 64), K-major: rows of 128 bytes in atoms of eight rows.
TEST(MatrixDescriptor, KMajorStage) {
  constexpr uint32_t kStage = 3 * 1024;
  for (int first_step = 0; first_step < 64; first_step += 16) {
    const uint64_t bits =
        bits_of(kStage + static_cast<uint32_t>(first_step) * 2, 16, 1024, kSwizzle128);
    for (int row = 0; row < 256; ++row)
      for (int step = 0; step < 16; ++step) {
        const int chunk = (first_step + step) / 8, in_chunk = (first_step + step) % 8;
        const int offset = row * 128 + (chunk ^ row % 8) * 16 + in_chunk * 2;
        ASSERT_EQ(address(bits, OperandMajor::kK, row, step),
                  kStage + static_cast<uint32_t>(offset))
            << "row " << row << ", step " << first_step + step;
      }
  }
}

// A stage of 256 rows, MN-major: chunks of 64 rows, each (64 steps of the sum, 64 rows).
TEST(MatrixDescriptor, MNMajorStage) {
  constexpr uint32_t kStage = 5 * 1024, kChunk = 64 * 128;
  for (int first_step = 0; first_step < 64; first_step += 16) {
    const uint64_t bits =
        bits_of(kStage + static_cast<uint32_t>(first_step) * 128, kChunk, 1024, kSwizzle128);
    for (int row = 0; row < 256; ++row)
      for (int step = 0; step < 16; ++step) {
        const int k = first_step + step;
        const int offset = row / 64 * static_cast<int>(kChunk) + k * 128 +
                           (row % 64 / 8 ^ k % 8) * 16 + row % 8 * 2;
        ASSERT_EQ(address(bits, OperandMajor::kMN, row, step),
                  kStage + static_cast<uint32_t>(offset))
            << "row " << row << ", step " << k;
      }
  }
}

// By hand, from the PTX ISA's figures of each mode.
TEST(MatrixDescriptor, OtherModes) {
  const uint64_t none = bits_of(0, 512, 128, 0);
  EXPECT_EQ(address(none, OperandMajor::kK, 3, 2), 3u * 16 + 4);
  EXPECT_EQ(address(none, OperandMajor::kK, 3, 9), 512u + 3 * 16 + 2);
  EXPECT_EQ(address(none, OperandMajor::kK, 17, 0), 2u * 128 + 16);
  EXPECT_EQ(address(none, OperandMajor::kMN, 2, 3), 3u * 16 + 4);
  EXPECT_EQ(address(none, OperandMajor::kMN, 2, 9), 512u + 16 + 4);
  EXPECT_EQ(address(none, OperandMajor::kMN, 17, 0), 2u * 128 + 2);

  const uint64_t of_32 = bits_of(0, 4096, 256, kSwizzle32);  // eight rows of 32 bytes
  EXPECT_EQ(address(of_32, OperandMajor::kK, 3, 9), 3u * 32 + 16 + 2);
  EXPECT_EQ(address(of_32, OperandMajor::kK, 4, 9), 4u * 32 + 2);
  EXPECT_EQ(address(of_32, OperandMajor::kK, 13, 0), 256u + 5 * 32 + 16);
  EXPECT_EQ(address(of_32, OperandMajor::kMN, 9, 4), 4u * 32 + 2);
  EXPECT_EQ(address(of_32, OperandMajor::kMN, 16, 9), 4096u + 256 + 32);

  const uint64_t of_64 = bits_of(0, 4096, 512, kSwizzle64);  // eight rows of 64 bytes
  EXPECT_EQ(address(of_64, OperandMajor::kK, 3, 8), 3u * 64);
  EXPECT_EQ(address(of_64, OperandMajor::kK, 7, 0), 7u * 64 + 3 * 16);
  EXPECT_EQ(address(of_64, OperandMajor::kK, 8, 8), 512u + 16);
  EXPECT_EQ(address(of_64, OperandMajor::kMN, 31, 2), 2u * 64 + 2 * 16 + 7 * 2);
  EXPECT_EQ(address(of_64, OperandMajor::kMN, 32, 8), 4096u + 512);
}

// A tile that is dense in its mode is covered once.
TEST(MatrixDescriptor, PiecesCoverTheTileOnce) {
  for (const auto& [mode, span] : {std::pair{uint64_t{0}, 16u}, {kSwizzle32, 32}}) {
    const uint32_t of_rows = 8 * span, of_steps = span == 16 ? 64 * 16 : 16;
    const std::vector<uint32_t> all =
        addresses(bits_of(0, of_steps, of_rows, mode), OperandMajor::kK, 64);
    const std::set<uint32_t> distinct(all.begin(), all.end());
    EXPECT_EQ(distinct.size(), 128u);
    EXPECT_EQ(*distinct.rbegin(), 127u * 16);
  }
  for (const OperandMajor major : {OperandMajor::kK, OperandMajor::kMN}) {
    const std::vector<uint32_t> all = addresses(bits_of(0, 8192, 1024, kSwizzle128), major, 256);
    EXPECT_EQ(std::set<uint32_t>(all.begin(), all.end()).size(), 512u);
  }
}

TEST(MatrixDescriptor, OtherFieldsGiveOtherAddresses) {
  const auto differs = [](uint64_t right, uint64_t wrong, OperandMajor major) {
    return addresses(right, major, 128) != addresses(wrong, major, 128);
  };
  for (const OperandMajor major : {OperandMajor::kK, OperandMajor::kMN}) {
    const uint64_t right = bits_of(4096, 8192, 1024, kSwizzle128);
    EXPECT_TRUE(differs(right, bits_of(4096 + 16, 8192, 1024, kSwizzle128), major));
    EXPECT_TRUE(differs(right, bits_of(4096, 8192, 2048, kSwizzle128), major));
    EXPECT_EQ(differs(right, bits_of(4096, 16384, 1024, kSwizzle128), major),
              major == OperandMajor::kMN);  // K-major does not use it
    for (const uint64_t mode : {uint64_t{0}, kSwizzle32, kSwizzle64})
      EXPECT_TRUE(differs(right, bits_of(4096, 8192, 1024, mode), major));
  }
  const uint64_t bits = bits_of(4096, 8192, 1024, kSwizzle128);
  EXPECT_NE(addresses(bits, OperandMajor::kK, 64), addresses(bits, OperandMajor::kMN, 64));
}

TEST(MatrixDescriptor, Gathers) {
  std::vector<std::byte> shared(16 * 1024);
  for (const OperandMajor major : {OperandMajor::kK, OperandMajor::kMN}) {
    const uint64_t bits = bits_of(1024, 4096, 1024, kSwizzle128);
    for (int row = 0; row < 64; ++row)
      for (int step = 0; step < 16; ++step) {
        const auto number = static_cast<uint16_t>(row * 100 + step);
        std::memcpy(&shared[address(bits, major, row, step)], &number, sizeof number);
      }
    const std::vector<uint16_t> operand =
        gather_operand(decode_matrix_descriptor(bits), major, 64, shared);
    for (size_t i = 0; i < operand.size(); ++i) ASSERT_EQ(operand[i], i / 16 * 100 + i % 16);
  }
}

TEST(MatrixDescriptor, NamesWhatLiesOutside) {
  const std::vector<std::byte> shared(4 * 1024);
  const MatrixDescriptor descriptor =
      decode_matrix_descriptor(bits_of(1024, 16, 1024, kSwizzle128));
  EXPECT_NO_THROW(gather_operand(descriptor, OperandMajor::kK, 24, shared));
  EXPECT_THROW(gather_operand(descriptor, OperandMajor::kK, 32, shared), std::out_of_range);
  EXPECT_THROW(gather_operand(descriptor, OperandMajor::kK, 24,
                              std::span(shared).first(shared.size() - 120)),
               std::out_of_range);
}

}  // namespace
}  // namespace tilemoe::simulator
