#include "cpu/gemm.h"

#include <dnnl.h>

#include <algorithm>

#include "core/check.h"
#include "cpu/elementwise.h"
#include "cpu/tiles.h"

namespace tilemoe::cpu {
namespace {

struct Operand {
  const float* data;
  int64_t row_stride;
  char transposed;  // 'T' if columns are the contiguous dimension

  Operand from_row(int64_t i) const {
    return {data + (transposed == 'T' ? i : i * row_stride), row_stride, transposed};
  }
};

// Whether a GEMM can read the matrix in place.
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

// On AVX2 oneDNN (measured with 2.6.3) sums a row in an order that depends on where the row lies:
// it cuts a call into blocks of 48 or 96 rows and one or two blocks of the remaining rows, takes a
// block by groups of 6, and a last group of 1, 2 or 3 rows gets other bits than one of 4, 5 or 6.
// Its kernels for AVX and SSE4.1 do this with a single row. Therefore a call gets whole blocks, or
// the remaining rows in groups of 4 to 6; fewer rows are padded to 4. On AVX-512 no row's bits
// depend on the others, but on some CPUs (such as family 6, model 167) fewer than 16 rows by rows
// go to other kernels than 16: they are padded to 16.
constexpr int64_t kBlockRows = 48;
constexpr int64_t kGroupRows = 6;
constexpr int64_t kMaxPaddedRows = 16;

bool has_avx512() {
  static const bool has =
      (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core) == dnnl_cpu_isa_avx512_core;
  return has;
}

int64_t padded_rows() {
  return has_avx512() ? kMaxPaddedRows : 4;
}

struct RowCuts {
  int64_t blocks, groups, padded;  // rows of the calls, in this order
};

RowCuts cut_rows(int64_t rows) {
  if (has_avx512()) {
    const int64_t padded = rows < padded_rows() ? rows : 0;
    return {rows - padded, 0, padded};
  }
  const int64_t rest = rows % kBlockRows;
  const int64_t last = rest % kGroupRows;
  const int64_t padded = last < padded_rows() ? last : 0;
  return {rows - rest, rest - padded, padded};
}

void sgemm(int64_t rows, int64_t columns, int64_t terms, const Operand& A, const Operand& B,
           bool add, float* C, int64_t row_stride) {
  const dnnl_status_t status =
      dnnl_sgemm(A.transposed, B.transposed, rows, columns, terms, 1.0f, A.data, A.row_stride,
                 B.data, B.row_stride, add ? 1.0f : 0.0f, C, row_stride);
  TILEMOE_ASSERT(status == dnnl_success, "dnnl_sgemm (" << rows << ", " << columns << ", " << terms
                                                        << ") returned "
                                                        << static_cast<int>(status));
}

// A GEMM of fewer than padded_rows() rows: A and C pass through `panel`, where the other rows are
// zero. A keeps its layout, which chooses oneDNN's kernel.
void sgemm_padded(int64_t rows, int64_t columns, int64_t terms, const Operand& A, const Operand& B,
                  bool add, float* C, int64_t row_stride, float* panel) {
  const int64_t all = padded_rows();
  float* const result = panel + all * terms;  // (all, columns)
  std::fill_n(panel, all * (terms + columns), 0.0f);
  const bool by_terms = A.transposed == 'T';
  const int64_t lines = by_terms ? terms : rows;
  const int64_t length = by_terms ? rows : terms;
  const int64_t stride = by_terms ? all : terms;
  for (int64_t i = 0; i < lines; ++i)
    std::copy_n(A.data + i * A.row_stride, length, panel + i * stride);
  if (add)
    for (int64_t i = 0; i < rows; ++i)
      std::copy_n(C + i * row_stride, columns, result + i * columns);
  sgemm(all, columns, terms, {panel, stride, A.transposed}, B, add, result, columns);
  for (int64_t i = 0; i < rows; ++i) std::copy_n(result + i * columns, columns, C + i * row_stride);
}

// The terms of one call: all for plain operands. But on those CPUs, with B by columns, a row of
// more terms than this gets bits that depend on the number of rows.
constexpr int64_t kMaxTermsByColumns = 768;

int64_t depth_of_call(const Matrix& A, const Matrix& B, int64_t depth) {
  if (!is_plain(A) || !is_plain(B)) return std::min(depth, kDepth);
  return B.rows_are_contiguous() || !has_avx512() ? depth : std::min(depth, kMaxTermsByColumns);
}

// Floats of the operands that are gathered or converted.
int64_t operand_floats(int64_t rows, int64_t columns, int64_t depth) {
  return (rows + columns) * std::min(depth, kDepth);
}

}  // namespace

bool transposing_keeps_bits() {
  return has_avx512();
}

// Rows of a plain operand are padded over the whole depth at once.
int64_t panel_floats(int64_t rows, int64_t columns, int64_t depth) {
  return operand_floats(rows, columns, depth) + kMaxPaddedRows * (depth + columns);
}

// oneDNN keeps packing buffers of its own; nothing else is allocated.
void multiply(int64_t rows, int64_t columns, int64_t depth, const Matrix& A, const Matrix& B,
              bool add, float* C, int64_t row_stride, float* panels) {
  const int64_t part = depth_of_call(A, B, depth);
  const RowCuts cuts = cut_rows(rows);
  const int64_t whole = rows - cuts.padded;
  float* const padding = panels + operand_floats(rows, columns, depth);
  for (int64_t k = 0; k < depth; k += part) {
    const int64_t terms = std::min(part, depth - k);
    const Operand a = operand(A.at(0, k), rows, terms, panels);
    const Operand b = operand(B.at(k, 0), terms, columns, panels + rows * part);
    const bool adds = add || k > 0;
    if (cuts.blocks > 0) sgemm(cuts.blocks, columns, terms, a, b, adds, C, row_stride);
    if (cuts.groups > 0)
      sgemm(cuts.groups, columns, terms, a.from_row(cuts.blocks), b, adds,
            C + cuts.blocks * row_stride, row_stride);
    if (cuts.padded > 0)
      sgemm_padded(cuts.padded, columns, terms, a.from_row(whole), b, adds, C + whole * row_stride,
                   row_stride, padding);
  }
}

void add_adapter(const Adapter& adapter, int64_t expert, int64_t first_row, int64_t rows,
                 int64_t first_column, int64_t columns, float* C, int64_t row_stride,
                 float* panels) {
  if (!present(adapter.rows)) return;
  const Matrix P = row_matrix(adapter.rows).at(first_row, 0);
  const Matrix factor = expert_matrix(adapter.factor, expert).at(first_column, 0);
  multiply(rows, columns, adapter.rows.shape[1], P, factor.transposed(), /*add=*/true, C,
           row_stride, panels);
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
