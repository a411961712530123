// The router's matrix products on the CPU, which are the application's and not the library's:
// logits = X Wr^T, dX += dlogits Wr, dWr = dlogits^T X. The matrices may be of any floating type;
// sums are float32 and do not depend on the number of threads.
#pragma once

#include "bench_memory.h"
#include "tilemoe/tensor.h"

namespace tilemoe::app {

class Router {
 public:
  Router(int64_t T, int64_t d, int64_t E);

  // X (T, d), Wr (E, d) -> logits (T, E) float32
  void forward(const Tensor& X, const Tensor& Wr, const Tensor& logits);
  // dlogits (T, E) float32; dX is added to, dWr written.
  void backward(const Tensor& dlogits, const Tensor& X, const Tensor& Wr, const Tensor& dX,
                const Tensor& dWr);

  size_t scratch_bytes() const { return scratch_.bytes(); }

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
