// How operands and products lie in memory.
#pragma once

namespace tilemoe::cuda {

// Which dimension of an operand is contiguous: the one that is summed over, or the other.
enum class Major { kK, kMN };

// Of a product: row-major, its columns are contiguous; column-major, its rows are.
enum class OutputMajor { kRow, kColumn };

}  // namespace tilemoe::cuda
