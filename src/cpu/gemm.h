// Float32 GEMMs of matrices of any type and layout.
#pragma once

#include <cstdint>

#include "cpu/matrix.h"

namespace tilemoe::cpu {

// Floats of panel memory that GEMMs up to (rows, depth) x (depth, columns) need, plain
// operands too.
int64_t panel_floats(int64_t rows, int64_t columns, int64_t depth);

// C (rows, columns) = A (rows, depth) B (depth, columns), or C += if `add` is set, on the
// calling thread. An operand that is not plain float32 is gathered or converted into `panels` by
// parts of kDepth. Nothing outside the given sizes is read. In a task of parallel_for, and up to
// kTileRows rows, a row's bits depend on neither its place nor the number of rows.
void multiply(int64_t rows, int64_t columns, int64_t depth, const Matrix& A, const Matrix& B,
              bool add, float* C, int64_t row_stride, float* panels);

// Whether C^T = B^T A^T has the bits of C = A B. On AVX2 oneDNN sums the columns that fill no vector
// of 16 in an order of their own.
bool transposing_keeps_bits();

// C += rows factor^T, for the rows of `adapter` from `first_row` and the rows of its factor from
// `first_column`. Nothing without an adapter.
void add_adapter(const Adapter& adapter, int64_t expert, int64_t first_row, int64_t rows,
                 int64_t first_column, int64_t columns, float* C, int64_t row_stride,
                 float* panels);

// The destination of the float32 result of a GEMM: the output itself if it is float32 with
// contiguous rows, else scratch, from which store() converts it.
class OutputTile {
 public:
  OutputTile(const Matrix& out, int64_t rows, int64_t columns, float* scratch);

  float* data() const { return data_; }
  float* row(int64_t i) const { return data_ + i * row_stride_; }
  int64_t row_stride() const { return row_stride_; }
  bool in_place() const { return in_place_; }
  // Rounds the tile to the output's type, or adds it to the output. In place it does nothing: the
  // GEMM itself has added.
  void store(bool add) const;

 private:
  Matrix out_;
  int64_t rows_, columns_;
  bool in_place_;
  float* data_;
  int64_t row_stride_;
};

}  // namespace tilemoe::cpu
