// Packs the factors of adapters: rounds them to the experts' dtype, times a scale, and changes their
// layout. A task is one expert's matrix of one factor.
#include <algorithm>

#include "core/dtype.h"
#include "cpu/cpu_backend.h"
#include "cpu/elementwise.h"
#include "cpu/matrix.h"
#include "cpu/thread_pool.h"

namespace tilemoe::cpu {
namespace {

constexpr int64_t kColumns = 512;  // at a time; a multiple of 8

void read_row(const Matrix& from, int64_t row, int64_t first, int64_t count, float* to) {
  with_float(from.dtype, [&]<class Element>() {
    const auto* source = reinterpret_cast<const Element*>(from.at(row, first).data);
    for (int64_t j = 0; j < count; ++j) to[j] = tilemoe::to_float(source[j * from.column_stride]);
  });
}

void pack(const LoraPacking::Copy& copy, int64_t expert) {
  const int64_t rows = copy.to.shape[1], columns = copy.to.shape[2];
  const Matrix to = expert_matrix(copy.to, expert);
  const Matrix from = present(copy.from) ? expert_matrix(copy.from, expert) : Matrix{};
  alignas(64) float buffer[kColumns] = {};
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; j += kColumns) {
      const int64_t count = std::min(kColumns, columns - j);
      if (from.data != nullptr) {
        read_row(from, i, j, count, buffer);
        for (int64_t k = 0; k < count; ++k) buffer[k] *= copy.scale;
      }
      from_float(buffer, to.at(i, j).data, to.dtype, to.column_stride, count, /*add=*/false);
    }
}

}  // namespace

void pack_lora(const tilemoe_experts& experts, const LoraPacking& packing, void* /*stream*/) {
  parallel_for(packing.count * experts.E, [&](int64_t task, int /*worker*/) {
    pack(packing.copy[task / experts.E], task % experts.E);
  });
}

}  // namespace tilemoe::cpu
