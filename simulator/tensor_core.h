// The arithmetic of tensor cores on 16-bit numbers with float32 sums, bit for bit as far as it is
// known: that of mma.sync.m16n8k16 and of wgmma with 16 steps of the sum.
//
// NVIDIA does not document it. This is what P. Xie et al., "MMA-Sim: Bit-Accurate Reference Model
// of Tensor Cores and Matrix Cores" (arXiv:2511.10909), found by experiment:
//   1. Products are exact. The exponent of one is the sum of its factors' exponents, so its
//      significand is in [1, 4). Zeros and subnormal numbers have the smallest exponent, for which
//      float16's zero takes bfloat16's.
//   2. All products of a group and the sum so far are aligned to the largest exponent among them
//      and cut off (towards zero) to `fraction_bits` bits below it.
//   3. They are added exactly. The sum is cut off to float32; past its range it is an infinity. A
//      sum of zero is +0.
//   4. NaN and infinities follow IEEE 754, but every NaN is 0x7fffffff.
#pragma once

#include <cstdint>

namespace tilemoe::simulator {

enum class OperandType { kBFloat16, kFloat16, kE4M3 };

struct TensorCore {
  int fraction_bits;  // at most 25
  int group;          // products that are summed at once: 8 or 16
};
inline constexpr TensorCore kAmpereCore{.fraction_bits = 24, .group = 8};
// For wgmma and mma.sync alike.
inline constexpr TensorCore kHopperCore{.fraction_bits = 25, .group = 16};

inline constexpr int kStepsOfSum = 16;  // of an instruction

// D (rows, columns) = A (rows, 16) B (columns, 16)^T + D, or without D where `accumulate` is false;
// all dense, operands as their bits. `columns` is a multiple of 8.
void multiply(const TensorCore& core, OperandType type, int rows, int columns, const uint16_t* A,
              const uint16_t* B, bool accumulate, float* D);

// The same for e4m3: D (rows, columns) = A (rows, 32) B (columns, 32)^T + D, operands as their
// codes, a zero with the exponent of a subnormal number. Hopper aligns all 32 products and the sum
// so far to the largest exponent, keeps 13 bits below it, and cuts the sum off to 13 fraction bits.
inline constexpr int kE4m3Steps = 32, kE4m3FractionBits = 13;
void multiply_e4m3(int rows, int columns, const uint8_t* A, const uint8_t* B, bool accumulate,
                   float* D);

}  // namespace tilemoe::simulator
