#include "cpu/gemm.h"

#include <dnnl.h>

#include <algorithm>

#include "check.h"
#include "cpu/elementwise.h"
#include "cpu/tiles.h"

namespace tilemoe::cpu {
namespace {

struct Operand {
  const float* data;
  int64_t row_stride;
  char transposed;  // 'T' where columns are the contiguous dimension
};

// Whether a product can read the matrix where it lies.
bool is_plain(const Matrix& matrix) {
  const bool unit =
      matrix.rows_are_contiguous() ? matrix.column_stride == 1 : matrix.row_stride == 1;
  return matrix.dtype == TILEMOE_FLOAT32 && !matrix.row_index && !matrix.column_index && unit;
}

Operand operand(const Matrix& matrix, int64_t rows, int64_t columns, float* panel) {
  const bool by_rows = matrix.rows_are_contiguous();
  const Matrix source = by_rows ? matrix : matrix.transposed();
  const char transposed = by_rows ? 'N' : 'T';
  if (is_plain(matrix))
    return {reinterpret_cast<const float*>(source.data), source.row_stride, transposed};
  const int64_t lines = by_rows ? rows : columns;
  const int64_t length = by_rows ? columns : rows;
  for (int64_t i = 0; i < lines; ++i)
    to_float(source.row(i), source.dtype, source.column_stride, panel + i * length, length);
  return {panel, length, transposed};
}

}  // namespace

int64_t panel_floats(int64_t rows, int64_t columns, int64_t depth) {
  return (rows + columns) * std::min(depth, kDepth);
}

// oneDNN keeps packing buffers of its own; nothing else is allocated.
void multiply(int64_t rows, int64_t columns, int64_t depth, const Matrix& A, const Matrix& B,
              bool add, float* C, int64_t row_stride, float* panels) {
  const int64_t part = is_plain(A) && is_plain(B) ? depth : std::min(depth, kDepth);
  for (int64_t k = 0; k < depth; k += part) {
    const int64_t terms = std::min(part, depth - k);
    const Operand a = operand(A.at(0, k), rows, terms, panels);
    const Operand b = operand(B.at(k, 0), terms, columns, panels + rows * part);
    const dnnl_status_t status =
        dnnl_sgemm(a.transposed, b.transposed, rows, columns, terms, 1.0f, a.data, a.row_stride,
                   b.data, b.row_stride, add || k > 0 ? 1.0f : 0.0f, C, row_stride);
    TILEMOE_ASSERT(status == dnnl_success, "dnnl_sgemm (" << rows << ", " << columns << ", "
                                                          << terms << ") returned " << status);
  }
}

OutputTile::OutputTile(const Matrix& out, int64_t rows, int64_t columns, float* scratch)
    : out_(out),
      rows_(rows),
      columns_(columns),
      in_place_(is_plain(out) && out.rows_are_contiguous()),
      data_(in_place_ ? reinterpret_cast<float*>(out.data) : scratch),
      row_stride_(in_place_ ? out.row_stride : columns) {}

void OutputTile::store(bool add) const {
  if (in_place_) return;
  for (int64_t i = 0; i < rows_; ++i)
    from_float(row(i), out_.row(i), out_.dtype, out_.column_stride, columns_, add);
}

}  // namespace tilemoe::cpu
