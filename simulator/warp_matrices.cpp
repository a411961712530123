#include "simulator/warp_matrices.h"

#include <stdexcept>
#include <vector>

namespace tilemoe::simulator {
namespace {

// A block's numbers by [row][column].
using Block = std::array<std::array<uint16_t, 8>, 8>;

uint16_t half_of(uint32_t word, int half) {
  return static_cast<uint16_t>(word >> (16 * half));
}

Place transpose(Place place, bool transposed) {
  return transposed ? Place{place.column, place.row} : place;
}

// `get(row, column)` gives a block's number.
template <class Get>
uint32_t register_of_block(int lane, bool transposed, Get get) {
  uint32_t word = 0;
  for (int half = 0; half < 2; ++half) {
    const Place place = transpose(place_in_block(lane, half), transposed);
    word |= static_cast<uint32_t>(
                get(static_cast<size_t>(place.row), static_cast<size_t>(place.column)))
            << (16 * half);
  }
  return word;
}

size_t index_of(Place place, int width) {
  return static_cast<size_t>(place.row) * static_cast<size_t>(width) +
         static_cast<size_t>(place.column);
}

}  // namespace

OfWarp<std::array<uint32_t, 4>> load_matrices(const OfWarp<MatrixRow>& rows, bool transposed) {
  OfWarp<std::array<uint32_t, 4>> registers{};
  for (size_t lane = 0; lane < kLanesOfWarp; ++lane)
    for (size_t block = 0; block < 4; ++block)
      registers[lane][block] = register_of_block(
          static_cast<int>(lane), transposed,
          [&](size_t row, size_t column) { return rows[8 * block + row][column]; });
  return registers;
}

OfWarp<MatrixRow> store_matrices(const OfWarp<std::array<uint32_t, 4>>& registers,
                                 bool transposed) {
  OfWarp<MatrixRow> rows{};
  for (size_t lane = 0; lane < kLanesOfWarp; ++lane)
    for (size_t block = 0; block < 4; ++block)
      for (int half = 0; half < 2; ++half) {
        const Place place = transpose(place_in_block(static_cast<int>(lane), half), transposed);
        rows[8 * block + static_cast<size_t>(place.row)][static_cast<size_t>(place.column)] =
            half_of(registers[lane][block], half);
      }
  return rows;
}

OfWarp<uint32_t> transpose_matrix(const OfWarp<uint32_t>& registers) {
  Block block{};
  for (size_t lane = 0; lane < kLanesOfWarp; ++lane)
    for (int half = 0; half < 2; ++half) {
      const Place place = place_in_block(static_cast<int>(lane), half);
      block[static_cast<size_t>(place.row)][static_cast<size_t>(place.column)] =
          half_of(registers[lane], half);
    }
  OfWarp<uint32_t> transposed{};
  for (size_t lane = 0; lane < kLanesOfWarp; ++lane)
    transposed[lane] =
        register_of_block(static_cast<int>(lane), true,
                          [&](size_t row, size_t column) { return block[row][column]; });
  return transposed;
}

void multiply_warp(const TensorCore& core, OperandType type, const OfWarp<float*>& d,
                   const OfWarp<std::array<uint32_t, 4>>& a,
                   const OfWarp<std::array<uint32_t, 2>>& b) {
  std::array<uint16_t, 16 * kStepsOfSum> A;
  std::array<uint16_t, 8 * kStepsOfSum> B;
  std::array<float, 16 * 8> D;
  for (int lane = 0; lane < kLanesOfWarp; ++lane) {
    const auto l = static_cast<size_t>(lane);
    for (int half = 0; half < 2; ++half) {
      for (int reg = 0; reg < 4; ++reg)
        A[index_of(place_in_a(lane, reg, half), kStepsOfSum)] =
            half_of(a[l][static_cast<size_t>(reg)], half);
      for (int reg = 0; reg < 2; ++reg)
        B[index_of(place_in_b(lane, reg, half), kStepsOfSum)] =
            half_of(b[l][static_cast<size_t>(reg)], half);
    }
    for (int reg = 0; reg < 4; ++reg) D[index_of(place_in_d(lane, reg), 8)] = d[l][reg];
  }
  multiply(core, type, 16, 8, A.data(), B.data(), true, D.data());
  for (int lane = 0; lane < kLanesOfWarp; ++lane)
    for (int reg = 0; reg < 4; ++reg)
      d[static_cast<size_t>(lane)][reg] = D[index_of(place_in_d(lane, reg), 8)];
}

void multiply_warpgroup(const TensorCore& core, OperandType type, int columns,
                        std::span<const uint16_t> A, std::span<const uint16_t> B, bool accumulate,
                        std::span<float* const, 4 * kLanesOfWarp> d) {
  constexpr int kRows = 64;
  if (A.size() != kRows * kStepsOfSum || B.size() != static_cast<size_t>(columns * kStepsOfSum))
    throw std::invalid_argument("operands of another size than wgmma's");
  std::vector<float> D(static_cast<size_t>(kRows * columns));
  // `copy` takes a number of D and a thread's register.
  const auto for_each_number = [&](auto copy) {
    for (int thread = 0; thread < 4 * kLanesOfWarp; ++thread)
      for (int reg = 0; reg < columns / 2; ++reg)
        copy(D[index_of(place_in_wgmma_d(thread / kLanesOfWarp, thread % kLanesOfWarp, reg),
                        columns)],
             d[static_cast<size_t>(thread)][reg]);
  };
  if (accumulate) for_each_number([](float& number, float reg) { number = reg; });
  multiply(core, type, kRows, columns, A.data(), B.data(), accumulate, D.data());
  for_each_number([](float number, float& reg) { reg = number; });
}

}  // namespace tilemoe::simulator
