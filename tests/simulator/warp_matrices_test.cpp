// Fragments against the formulas of the PTX ISA, and the instructions against whole-number products.
#include "simulator/warp_matrices.h"

#include <gtest/gtest.h>

#include <bit>
#include <random>
#include <vector>

namespace tilemoe::simulator {
namespace {

// "Matrix Fragments for mma.m16n8k16 with floating point type": elements a0 to a7, b0 to b3, c0 to
// c3 of a lane, its group being lane >> 2.
TEST(Fragment, OfMma) {
  for (int lane = 0; lane < 32; ++lane) {
    const int group = lane >> 2, in_group = lane % 4;
    for (int i = 0; i < 8; ++i) {
      const bool upper = (0 <= i && i < 2) || (4 <= i && i < 6);
      const Place expected{upper ? group : group + 8, in_group * 2 + (i & 1) + (i < 4 ? 0 : 8)};
      EXPECT_EQ(place_in_a(lane, i / 2, i % 2), expected) << lane << " a" << i;
    }
    for (int i = 0; i < 4; ++i) {
      const Place of_b{group, in_group * 2 + (i & 1) + (i < 2 ? 0 : 8)};
      EXPECT_EQ(place_in_b(lane, i / 2, i % 2), of_b) << lane << " b" << i;
      const Place of_c{i < 2 ? group : group + 8, in_group * 2 + (i & 1)};
      EXPECT_EQ(place_in_d(lane, i), of_c) << lane << " c" << i;
    }
  }
}

// By hand, from the figure of wgmma's accumulators: the corners of each warp's part.
TEST(Fragment, OfWgmma) {
  EXPECT_EQ(place_in_wgmma_d(0, 0, 0), (Place{0, 0}));
  EXPECT_EQ(place_in_wgmma_d(0, 0, 1), (Place{0, 1}));
  EXPECT_EQ(place_in_wgmma_d(0, 0, 2), (Place{8, 0}));
  EXPECT_EQ(place_in_wgmma_d(0, 0, 3), (Place{8, 1}));
  EXPECT_EQ(place_in_wgmma_d(0, 0, 4), (Place{0, 8}));
  EXPECT_EQ(place_in_wgmma_d(0, 1, 0), (Place{0, 2}));
  EXPECT_EQ(place_in_wgmma_d(0, 4, 0), (Place{1, 0}));
  EXPECT_EQ(place_in_wgmma_d(2, 0, 0), (Place{32, 0}));
  EXPECT_EQ(place_in_wgmma_d(3, 31, 127), (Place{63, 255}));
}

// Number 64 i + 8 r + c is in row r and column c of block i.
OfWarp<MatrixRow> numbered_rows() {
  OfWarp<MatrixRow> rows;
  for (size_t lane = 0; lane < 32; ++lane)
    for (size_t column = 0; column < 8; ++column)
      rows[lane][column] = static_cast<uint16_t>(lane * 8 + column);
  return rows;
}

uint32_t word(uint32_t low, uint32_t high) {
  return high << 16 | low;
}

TEST(WarpMatrices, Load) {
  const auto plain = load_matrices(numbered_rows(), false);
  const auto transposed = load_matrices(numbered_rows(), true);
  for (uint32_t lane = 0; lane < 32; ++lane)
    for (uint32_t block = 0; block < 4; ++block) {
      const uint32_t first = block * 64, row = lane / 4, column = lane % 4 * 2;
      EXPECT_EQ(plain[lane][block], word(first + row * 8 + column, first + row * 8 + column + 1));
      EXPECT_EQ(transposed[lane][block],
                word(first + column * 8 + row, first + (column + 1) * 8 + row));
    }
}

TEST(WarpMatrices, StoreIsTheInverse) {
  for (const bool transposed : {false, true})
    EXPECT_EQ(store_matrices(load_matrices(numbered_rows(), transposed), transposed),
              numbered_rows());
}

TEST(WarpMatrices, Transpose) {
  const auto plain = load_matrices(numbered_rows(), false);
  const auto transposed = load_matrices(numbered_rows(), true);
  OfWarp<uint32_t> registers, expected;
  for (size_t lane = 0; lane < 32; ++lane)
    registers[lane] = plain[lane][2], expected[lane] = transposed[lane][2];
  EXPECT_EQ(transpose_matrix(registers), expected);
}

// Small whole numbers, as bfloat16.
struct Matrix {
  int rows;
  std::vector<int> numbers;  // (rows, 16)

  Matrix(int of_rows, uint32_t seed) : rows(of_rows) {
    std::mt19937 random(seed);
    for (int i = 0; i < rows * 16; ++i)
      numbers.push_back(std::uniform_int_distribution<int>(-9, 9)(random));
  }
  uint16_t bits(int row, int step) const {
    const auto number = static_cast<float>(numbers[static_cast<size_t>(row * 16 + step)]);
    return static_cast<uint16_t>(std::bit_cast<uint32_t>(number) >> 16);
  }
  std::vector<uint16_t> all_bits() const {
    std::vector<uint16_t> result;
    for (int row = 0; row < rows; ++row)
      for (int step = 0; step < 16; ++step) result.push_back(bits(row, step));
    return result;
  }
};

int dot(const Matrix& A, const Matrix& B, Place place) {
  int sum = 0;
  for (int step = 0; step < 16; ++step)
    sum += A.numbers[static_cast<size_t>(place.row * 16 + step)] *
           B.numbers[static_cast<size_t>(place.column * 16 + step)];
  return sum;
}

// By way of ldmatrix, as kernels bring them: blocks 0 and 1 of A are its upper and lower rows in
// the first eight steps; of B, blocks 0 and 1 are the first and the last steps of eight rows.
TEST(WarpMatrices, Multiply) {
  const Matrix A(16, 1), B(8, 2);
  OfWarp<MatrixRow> rows_of_A{}, rows_of_B{};
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 8; ++i) {
      const auto l = static_cast<size_t>(lane), c = static_cast<size_t>(i);
      rows_of_A[l][c] = A.bits(lane / 8 % 2 * 8 + lane % 8, lane / 16 * 8 + i);
      rows_of_B[l][c] = B.bits(lane % 8, lane / 8 % 2 * 8 + i);
    }
  const auto a = load_matrices(rows_of_A, false), two_of_b = load_matrices(rows_of_B, false);
  OfWarp<std::array<uint32_t, 2>> b;
  OfWarp<std::array<float, 4>> numbers;
  OfWarp<float*> d;
  for (size_t lane = 0; lane < 32; ++lane) {
    b[lane] = {two_of_b[lane][0], two_of_b[lane][1]};
    for (size_t i = 0; i < 4; ++i) numbers[lane][i] = static_cast<float>(lane * 4 + i);
    d[lane] = numbers[lane].data();
  }
  multiply_warp(kAmpereCore, OperandType::kBFloat16, d, a, b);
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const Place place{lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2};
      EXPECT_EQ(numbers[static_cast<size_t>(lane)][static_cast<size_t>(i)],
                static_cast<float>(lane * 4 + i + dot(A, B, place)));
    }
}

TEST(WarpMatrices, MultiplyByAWarpgroup) {
  constexpr int kColumns = 24;
  const Matrix A(64, 3), B(kColumns, 4);
  for (const bool accumulate : {false, true}) {
    std::vector<std::vector<float>> numbers(128, std::vector<float>(kColumns / 2, 1000));
    std::array<float*, 128> d;
    for (size_t thread = 0; thread < 128; ++thread) d[thread] = numbers[thread].data();
    multiply_warpgroup(kHopperCore, OperandType::kBFloat16, kColumns, A.all_bits(), B.all_bits(),
                       accumulate, d);
    for (int thread = 0; thread < 128; ++thread)
      for (int i = 0; i < kColumns / 2; ++i) {
        const int lane = thread % 32;
        const Place place{thread / 32 * 16 + lane / 4 + 8 * (i / 2 % 2),
                          8 * (i / 4) + 2 * (lane % 4) + i % 2};
        EXPECT_EQ(numbers[static_cast<size_t>(thread)][static_cast<size_t>(i)],
                  static_cast<float>((accumulate ? 1000 : 0) + dot(A, B, place)))
            << thread << " " << i;
      }
  }
  std::array<float*, 128> none{};
  EXPECT_THROW(multiply_warpgroup(kHopperCore, OperandType::kBFloat16, 8, A.all_bits(),
                                  B.all_bits(), true, none),
               std::invalid_argument);
}

}  // namespace
}  // namespace tilemoe::simulator
