// Rounds of one case on a GPU: the layer's forward as one sequence, its steps one by one, and the
// dense products of the same sizes, in turn.
#pragma once

#include <vector>

#include "bench_statistics.h"
#include "cuda/bench_gpu_layer.h"

namespace tilemoe::app {

// What a process pays once, in ms, and 0 after its first measurement: the driver's context, and the
// library's first forward beyond it (its kernels' loading included, the router's product not).
struct FirstCall {
  double context = 0;
  double forward = 0;
};

struct GpuRound {
  double forward = 0;                   // ms of the whole forward, back to back, cold at its start
  double host = 0;                      // ms until the calls of a forward have returned
  std::vector<StepClock::Entry> steps;  // of a second forward, each cold
  double dense_up = 0, dense_down = 0;  // ms of one product of M rows, cold
};

class GpuMeasurement {
 public:
  // Warms everything up.
  GpuMeasurement(const verify::Case& layer, bool with_dense);

  const GpuRound& run_round();

  const verify::Case& layer() const { return case_; }
  const GpuLayer& device_layer() const { return layer_; }
  int64_t rows() const { return rows_; }
  bool has_dense() const { return dense_ != nullptr; }
  const FirstCall& first_call() const { return first_; }
  const std::vector<GpuRound>& rounds() const { return rounds_; }

 private:
  // One dense product of the layer's rows for each projection, on operands of its own.
  struct Dense {
    Dense(const verify::Case& layer, int64_t rows, const DeviceCacheFlush& flush);
    DeviceBuffer rows_in, rows_out, up_weight, down_weight;
    LtProduct up, down;
  };
  static FirstCall measure_first_call(GpuLayer& layer, double context_ms);

  double context_ms_;
  verify::Case case_;
  GpuLayer layer_;
  FirstCall first_;
  int64_t rows_;
  DeviceCacheFlush flush_;
  std::unique_ptr<Dense> dense_;
  std::vector<GpuRound> rounds_;
};

}  // namespace tilemoe::app
