// The layer that `tilemoe bench` times: router product, top-K, routing, experts and combine, and
// all of it backward, on random data of a case's shape.
#pragma once

#include <memory>
#include <string>

#include "bench_memory.h"
#include "bench_router.h"
#include "bench_steps.h"
#include "tilemoe/layer.h"
#include "verify/case.h"

namespace tilemoe::app {

// Bytes by what they are for.
struct LayerBytes {
  size_t weights = 0;    // W1, W2, the router's
  size_t gradients = 0;  // of the weights, in their dtype
  size_t tokens = 0;     // X, O, dO, dX
  size_t saved = 0;      // from forward to backward: X, H, routing, and the logits where needed
  size_t forward_workspace = 0;
  size_t backward_workspace = 0;
  size_t peak = 0;  // all that is alive at the worst moment of a forward and a backward
};

class BenchLayer {
 public:
  // Before anything is allocated. Throws std::runtime_error where the case is not one to be timed.
  static LayerBytes measure(const verify::Case& layer, Device device);

  BenchLayer(const verify::Case& layer, Device device);

  // With a clock, each step is timed on its own.
  void forward(StepClock* clock = nullptr);
  void backward(StepClock* clock = nullptr);

  const LayerBytes& bytes() const { return bytes_; }
  int64_t rows() const;  // M of the last forward

 private:
  void allocate();
  void fill();
  void route(StepClock* clock);

  verify::Case case_;
  Experts experts_;
  RoutingSpec spec_;
  LayerBytes bytes_;
  Buffer W1_, W2_, Wr_, dW1_, dW2_, dWr_;
  Buffer X_, O_, dO_, dX_, H_;
  Buffer logits_, ids_, scores_, ds_, dlogits_;
  Buffer routing_memory_, routing_workspace_, workspace_;
  std::unique_ptr<Router> router_;
  std::unique_ptr<Routing> routing_;
  Saved saved_;
};

}  // namespace tilemoe::app
