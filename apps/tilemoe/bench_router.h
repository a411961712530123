// The router's matrix products on the CPU: logits = X Wr^T, dX = dlogits Wr, dWr = dlogits^T X.
// The matrices may be of any floating type; sums are float32 and do not depend on the number of
// threads.
#pragma once

#include "bench_machine.h"
#include "bench_memory.h"

namespace tilemoe::app {

class CpuRouter final : public RouterProducts {
 public:
  CpuRouter(int64_t T, int64_t d, int64_t E);

  void forward(const Tensor& X, const Tensor& Wr, const Tensor& logits) override;
  void backward(const Tensor& dlogits, const Tensor& X, const Tensor& Wr, const Tensor& dX,
                const Tensor& dWr) override;

 private:
  struct Scratch {
    float* tile;
    float* panels;
  };
  Scratch scratch(int worker) const;

  int64_t T_, d_, E_;
  int64_t tile_floats_, worker_floats_;
  Buffer scratch_;
};

}  // namespace tilemoe::app
