// The layer that `tilemoe bench` times: router product, top-K, routing, experts and combine, and
// all of it backward, on random data of a case's shape, on any machine.
#pragma once

#include <memory>

#include "bench_machine.h"
#include "bench_steps.h"
#include "tilemoe/layer.h"
#include "verify/case.h"

namespace tilemoe::app {

// Bytes by what they are for.
struct LayerBytes {
  size_t weights = 0;    // W1, W2, biases, the router's
  size_t gradients = 0;  // of the weights, in their dtype
  size_t tokens = 0;     // X, O, dO, dX
  size_t saved = 0;      // from forward to backward: X, H, routing, and the logits where needed
  size_t forward_workspace = 0;
  size_t backward_workspace = 0;
  size_t library_peak = 0;  // the library's own: H, the routing and the larger workspace
  size_t peak = 0;          // all that is alive at the worst moment of a forward and a backward
};

class BenchLayer {
 public:
  // Before anything is allocated. Throws std::runtime_error where the case is not one to be timed.
  static LayerBytes measure(const verify::Case& layer, Device device);

  // Without the backward its memory is not taken.
  BenchLayer(const verify::Case& layer, const BenchMachine& machine, bool with_backward);

  void router();  // the dense product alone: the application's part of the forward
  void library_forward(StepClock* clock = nullptr);
  // With a clock, each step is timed on its own.
  void forward(StepClock* clock = nullptr);  // both
  // After a forward; after a new one each time where dH is written over H.
  void backward(StepClock* clock = nullptr);

  const LayerBytes& bytes() const { return bytes_; }
  int64_t rows() const;  // M of the last forward

 private:
  void allocate(bool with_backward);
  void fill(bool with_backward);
  void prepare_skewed_logits();
  void route(StepClock* clock);
  void library_backward(const BackwardArgs& args, StepClock* clock);
  Weights weights() const;
  WeightGradients gradients() const;
  Tensor view(const MachineBuffer& buffer, std::initializer_list<int64_t> shape) const {
    return Tensor(buffer.data(), case_.dtype, shape);
  }

  verify::Case case_;
  const BenchMachine& machine_;
  Experts experts_;
  RoutingSpec spec_;
  LayerBytes bytes_;
  MachineBuffer W1_, W2_, b1_, b2_, Wr_, dW1_, dW2_, db1_, db2_, dWr_;
  MachineBuffer X_, O_, dO_, dX_, H_;
  MachineBuffer logits_, skewed_logits_, ids_, scores_, ds_, dlogits_;
  MachineBuffer routing_memory_, routing_workspace_, workspace_;
  std::unique_ptr<RouterProducts> router_;
  std::unique_ptr<Routing> routing_;
  Saved saved_;
};

}  // namespace tilemoe::app
