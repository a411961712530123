// The matrix instructions of a warp and of a warpgroup, as functions of what its lanes hold.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "simulator/fragment.h"
#include "simulator/tensor_core.h"

namespace tilemoe::simulator {

template <class T>
using OfWarp = std::array<T, kLanesOfWarp>;  // one a lane

// The 16 bytes at a lane's address.
using MatrixRow = std::array<uint16_t, 8>;

// ldmatrix.m8n8.x4: lane 8 i + r has row r of block i; register i of the result is of block i.
OfWarp<std::array<uint32_t, 4>> load_matrices(const OfWarp<MatrixRow>& rows, bool transposed);
// stmatrix.m8n8.x4: what is written to each lane's address.
OfWarp<MatrixRow> store_matrices(const OfWarp<std::array<uint32_t, 4>>& registers, bool transposed);
// movmatrix.m8n8.trans
OfWarp<uint32_t> transpose_matrix(const OfWarp<uint32_t>& registers);

// mma.m16n8k16: D += A B^T. `d` points to each lane's four registers.
void multiply_warp(const TensorCore& core, OperandType type, const OfWarp<float*>& d,
                   const OfWarp<std::array<uint32_t, 4>>& a,
                   const OfWarp<std::array<uint32_t, 2>>& b);

// wgmma.m64nNk16: D (64, columns) of A (64, 16) and B (columns, 16), as gather_operand() gives
// them. `d` points to the columns / 2 registers of each thread of the warpgroup.
void multiply_warpgroup(const TensorCore& core, OperandType type, int columns,
                        std::span<const uint16_t> A, std::span<const uint16_t> B, bool accumulate,
                        std::span<float* const, 4 * kLanesOfWarp> d);

}  // namespace tilemoe::simulator
