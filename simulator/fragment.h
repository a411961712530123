// Which number of a matrix a lane's register holds (PTX ISA, "Matrix Fragments for mma.m16n8k16",
// "ldmatrix", "movmatrix", "Register Fragments and Shared Memory Matrix Layouts" of wgmma).
// A register has two 16-bit numbers, `half` 0 in its low bits, or one of float32.
#pragma once

namespace tilemoe::simulator {

inline constexpr int kLanesOfWarp = 32;

struct Place {
  int row, column;
  bool operator==(const Place&) const = default;
};

// An 8x8 block of 16-bit numbers: ldmatrix, stmatrix, movmatrix.
constexpr Place place_in_block(int lane, int half) {
  return {lane / 4, lane % 4 * 2 + half};
}

// A (16, 16), four registers: rows by steps of the sum. Registers 0 and 1 are the upper and the
// lower eight rows of the first eight steps, 2 and 3 those of the others. wgmma with A in registers
// has in warp w the rows from 16 w on.
constexpr Place place_in_a(int lane, int reg, int half) {
  const Place in_block = place_in_block(lane, half);
  return {in_block.row + reg % 2 * 8, in_block.column + reg / 2 * 8};
}

// B (8, 16), two registers: columns of D by steps of the sum.
constexpr Place place_in_b(int lane, int reg, int half) {
  const Place in_block = place_in_block(lane, half);
  return {in_block.row, in_block.column + reg * 8};
}

// D (16, 8), four registers of float32.
constexpr Place place_in_d(int lane, int reg) {
  return {lane / 4 + reg / 2 * 8, lane % 4 * 2 + reg % 2};
}

// wgmma's D (64, N), N / 2 registers, in warp `warp` of the warpgroup.
constexpr Place place_in_wgmma_d(int warp, int lane, int reg) {
  const Place in_block = place_in_d(lane, reg % 4);
  return {warp * 16 + in_block.row, reg / 4 * 8 + in_block.column};
}

}  // namespace tilemoe::simulator
