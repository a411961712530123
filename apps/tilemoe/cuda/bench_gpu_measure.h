// One case on a GPU: rounds of the layer's passes as one sequence each, as a model has them; and
// rounds of their steps one by one, in turn with the dense products of the same sizes. Apart, since
// what ran before sets a GPU's temperature and so its clock.
#pragma once

#include <memory>
#include <vector>

#include "bench_layer.h"
#include "bench_statistics.h"
#include "cuda/bench_gpu.h"
#include "cuda/cublaslt.h"
#include "cuda/device.h"

namespace tilemoe::app {

// What a process pays once, in ms, and 0 after its first measurement: the driver's context, and the
// library's first forward beyond it (its kernels' loading included, the router's product not).
struct FirstCall {
  double context = 0;
  double forward = 0;
};

// ms of each whole pass, back to back, cold at its start; 0 where it is not timed.
struct GpuRound {
  double forward = 0, backward = 0;
};

// All in ms.
struct StepRound {
  struct Pass {
    double host = 0;                      // until the pass's calls have returned
    std::vector<StepClock::Entry> steps;  // of a further pass, each cold
  };
  Pass forward, backward;
  std::vector<double> dense;  // one product of M rows, cold, in the order of products()
};

class GpuMeasurement {
 public:
  // Warms everything up. Throws std::runtime_error where the case does not fit.
  GpuMeasurement(const verify::Case& layer, GpuPasses passes, bool with_dense);
  ~GpuMeasurement();

  const GpuRound& run_round();
  void run_step_round();

  const verify::Case& layer() const { return case_; }
  GpuPasses passes() const { return passes_; }
  const LayerBytes& bytes() const { return layer_.bytes(); }
  int64_t rows() const { return rows_; }
  // The dense products that take turns with the layer; none without the baseline.
  const std::vector<DenseProduct>& products() const { return products_; }
  const FirstCall& first_call() const { return first_; }
  const std::vector<GpuRound>& rounds() const { return rounds_; }
  const std::vector<StepRound>& step_rounds() const { return step_rounds_; }

 private:
  // One dense product of the layer's rows for each step that is one, on operands of their own.
  class Dense;

  double context_ms_;
  verify::Case case_;
  GpuPasses passes_;
  BenchLayer layer_;
  FirstCall first_;
  int64_t rows_;
  std::vector<DenseProduct> products_;
  DeviceCacheFlush flush_;
  std::vector<std::unique_ptr<Dense>> dense_;
  MachineBuffer A_, B_, C_;  // the dense products' operands
  std::vector<GpuRound> rounds_;
  std::vector<StepRound> step_rounds_;
};

}  // namespace tilemoe::app
