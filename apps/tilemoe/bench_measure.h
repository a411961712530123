// Rounds of one case: the layer, whole and step by step, in turn with the baseline.
#pragma once

#include <memory>
#include <vector>

#include "bench_dense.h"
#include "bench_layer.h"
#include "bench_memory.h"
#include "bench_statistics.h"
#include "bench_steps.h"
#include "verify/case.h"

namespace tilemoe::app {

struct PassTimes {
  double forward = 0, backward = 0;  // ms
  double whole() const { return forward + backward; }
};

struct Round {
  PassTimes layer;
  std::vector<StepClock::Entry> steps;  // of a second forward and backward
  PassTimes dense;                      // zero without the baseline
};

class Measurement {
 public:
  // Warms everything up. `with_dense` where the baseline is wanted; it is left out where oneDNN has
  // no products of the case's type.
  Measurement(const verify::Case& layer, bool with_dense);

  const Round& run_round();

  const verify::Case& layer() const { return case_; }
  const LayerBytes& bytes() const { return layer_.bytes(); }
  int64_t rows() const { return layer_.rows(); }
  const DenseBaseline* dense() const { return dense_.get(); }
  const std::vector<Round>& rounds() const { return rounds_; }

 private:
  verify::Case case_;
  BenchLayer layer_;
  std::unique_ptr<DenseBaseline> dense_;
  CacheFlush flush_;
  std::vector<Round> rounds_;
};

}  // namespace tilemoe::app
