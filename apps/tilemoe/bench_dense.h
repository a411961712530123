// The baseline `onednn-dense`: what oneDNN takes for the six matrix products of the layer's forward
// and backward, with dense operands of M/E rows an expert. Nothing else of a layer is in it: no
// router, no gather, no activation, no combine; so a layer that takes as long wastes nothing.
//
// Each product may be asked of oneDNN in several ways (a primitive or sgemm; all threads on one
// expert's product, a batch over the experts, or an expert a thread). All are tried beforehand: the
// baseline is the fastest of those that use OpenMP's threads, or of those that take an expert a
// thread, whichever sum is smaller.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bench_memory.h"
#include "bench_steps.h"
#include "verify/case.h"

namespace tilemoe::app {

// Waits until no thread of OpenMP's spins any more, which after its work it does for about 5 ms.
void let_threads_rest();

class DenseBaseline {
 public:
  enum class Way {
    kMatmul,
    kMatmulBatched,
    kMatmulExpertAThread,
    kSgemm,
    kSgemmExpertAThread,
  };

  // False where oneDNN has no product of the type on this machine.
  static bool available(DType dtype);

  // Before anything is allocated.
  static size_t bytes(const verify::Case& layer);

  explicit DenseBaseline(const verify::Case& layer);
  ~DenseBaseline();

  // Milliseconds of the forward's and of the backward's products.
  double forward();
  double backward();

  struct Chosen {
    std::string step;
    std::string way;
    double gflop_per_second;  // in the trial
  };
  const std::vector<Chosen>& chosen() const { return chosen_; }

 private:
  class Runner;
  struct Trial {
    double ms = 0;
    std::vector<std::unique_ptr<Runner>> runners;
    std::vector<Chosen> chosen;
  };
  // Each product in the fastest way of a family.
  Trial try_out(const verify::Case& layer, const std::vector<DenseProduct>& products,
                const std::vector<Way>& family) const;
  double run(bool backward);

  Buffer A_, B_, C_;
  std::vector<std::unique_ptr<Runner>> runners_;
  std::vector<Chosen> chosen_;
};

}  // namespace tilemoe::app
