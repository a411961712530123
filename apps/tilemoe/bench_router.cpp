#include "bench_router.h"

#include <algorithm>

#include "cpu/gemm.h"
#include "cpu/thread_pool.h"

namespace tilemoe::app {
namespace {

constexpr int64_t kTokens = 256;   // a task's rows of X
constexpr int64_t kColumns = 128;  // a task's columns of dWr

int64_t tiles(int64_t size, int64_t tile) {
  return (size + tile - 1) / tile;
}

}  // namespace

CpuRouter::CpuRouter(int64_t T, int64_t d, int64_t E)
    : T_(T),
      d_(d),
      E_(E),
      tile_floats_(std::max({kTokens * E, kTokens * d, E * kColumns})),
      worker_floats_(tile_floats_ +
                     std::max({cpu::panel_floats(kTokens, E, d), cpu::panel_floats(kTokens, d, E),
                               cpu::panel_floats(E, kColumns, T)})),
      scratch_(DType::kFloat32, worker_floats_ * cpu::num_threads()) {}

CpuRouter::Scratch CpuRouter::scratch(int worker) const {
  float* base = scratch_.as<float>() + worker * worker_floats_;
  return {base, base + tile_floats_};
}

void CpuRouter::forward(const Tensor& X, const Tensor& Wr, const Tensor& logits) {
  const cpu::Matrix router = cpu::row_matrix(Wr).transposed();  // (d, E)
  cpu::parallel_for(tiles(T_, kTokens), [&](int64_t task, int worker) {
    const int64_t first = task * kTokens, rows = std::min(kTokens, T_ - first);
    const cpu::OutputTile out(cpu::row_matrix(logits).at(first, 0), rows, E_, scratch(worker).tile);
    cpu::multiply(rows, E_, d_, cpu::row_matrix(X).at(first, 0), router, false, out.data(),
                  out.row_stride(), scratch(worker).panels);
    out.store(false);
  });
}

void CpuRouter::backward(const Tensor& dlogits, const Tensor& X, const Tensor& Wr, const Tensor& dX,
                         const Tensor& dWr) {
  cpu::parallel_for(tiles(T_, kTokens), [&](int64_t task, int worker) {
    const int64_t first = task * kTokens, rows = std::min(kTokens, T_ - first);
    const cpu::OutputTile out(cpu::row_matrix(dX).at(first, 0), rows, d_, scratch(worker).tile);
    cpu::multiply(rows, d_, E_, cpu::row_matrix(dlogits).at(first, 0), cpu::row_matrix(Wr), false,
                  out.data(), out.row_stride(), scratch(worker).panels);
    out.store(false);
  });
  const cpu::Matrix dlogits_by_expert = cpu::row_matrix(dlogits).transposed();  // (E, T)
  cpu::parallel_for(tiles(d_, kColumns), [&](int64_t task, int worker) {
    const int64_t first = task * kColumns, columns = std::min(kColumns, d_ - first);
    const cpu::OutputTile out(cpu::row_matrix(dWr).at(0, first), E_, columns, scratch(worker).tile);
    cpu::multiply(E_, columns, T_, dlogits_by_expert, cpu::row_matrix(X).at(0, first), false,
                  out.data(), out.row_stride(), scratch(worker).panels);
    out.store(false);
  });
}

}  // namespace tilemoe::app
