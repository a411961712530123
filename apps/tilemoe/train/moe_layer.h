// A Mixture-of-Experts layer with its router, on the library's public interface.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tilemoe/layer.h"
#include "train/model_config.h"
#include "train/parameters.h"
#include "train/workspace.h"

namespace tilemoe::train {

enum class Phase {
  kTrain,
  kEvaluate,  // top-K, whatever the routing of training
};

// The report of the router of one layer in a training step.
struct RouterReport {
  std::vector<int32_t> load;  // (E) tokens each expert got
  int64_t dropped = 0;        // pairs that rounding took from the top-K
  int64_t added = 0;          // pairs that it added
  float balance_loss = 0;     // before their coefficients
  float z_loss = 0;
};

class MoeLayer {
 public:
  MoeLayer(const ModelConfig& config, const std::string& name, int64_t max_tokens, uint64_t seed,
           ParameterStore& parameters, Workspace& workspace);

  // y = x + experts(v); all (T, d). `step` is the training step, which stochastic rounding reads.
  void forward(Phase phase, int64_t step, ConstFloats v, ConstFloats x, Floats y);
  // dv from dy, the router's losses included, and the parameters' gradients; v as in the last
  // forward, whose phase was kTrain.
  void backward(ConstFloats v, ConstFloats dy, Floats dv);

  // Moves the selection bias against the load of the last training step; nothing without one.
  void balance_selection();
  RouterReport report() const;
  // State that no gradient moves: the selection bias (E), empty without one.
  FloatArray& selection_bias() { return selection_bias_; }

 private:
  RoutingSpec spec(Phase phase, int64_t tokens) const;
  void route(Phase phase, int64_t step, ConstFloats v);
  Scoring scoring() const;
  // `values` as the experts take them: rounded into `copy` if they compute in 16 bits.
  ConstTensor operand(ConstFloats values, const Array<uint16_t>& copy,
                      std::initializer_list<int64_t> shape) const;
  // The tensor that the experts write to: `values`, or result_copy_, to be widened into them.
  Tensor result(Floats values, std::initializer_list<int64_t> shape) const;
  Saved saved() const;

  const ModelConfig& config_;
  const Workspace& workspace_;
  Operators& operators_;
  int64_t seed_;
  Experts experts_;
  int64_t top_k_;                 // K; 1 when dense
  Parameter& w1_;                 // (E, 2n, d)
  Parameter& w2_;                 // (E, d, n)
  Parameter* router_ = nullptr;   // (E, d); none when dense
  FloatArray selection_bias_;     // (E)
  FloatArray logits_, dlogits_;   // (T, E)
  FloatArray scores_;             // (T, K)
  FloatArray ds_;                 // (pairs)
  Array<std::byte> H_;            // (capacity, 2n) in the experts' type
  FloatArray losses_;             // (2) balance, z
  Array<int32_t> ids_;            // (T, K)
  Array<int32_t> counts_;         // (E) choices before rounding
  Array<int64_t> seed_and_step_;  // (2)
  Array<std::byte> routing_memory_;
  std::optional<Routing> routing_;  // the last forward's, in routing_memory_
  Weights weights_;                 // the last forward's
  ConstTensor X_;
  // If the experts compute in 16 bits: X, W1 and W2 of the last forward, dO, and O or dX.
  Array<uint16_t> X_copy_, w1_copy_, w2_copy_, dO_copy_, result_copy_;
};

}  // namespace tilemoe::train
