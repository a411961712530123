// Time and work of single steps. The library has no timing hook: its layer takes a Backend to run
// the steps with, and TimedBackend is a decorator of the real one that looks at the clock.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "backend.h"
#include "verify/case.h"

namespace tilemoe::app {

inline double milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

// Milliseconds by step, in the order in which the steps first ran.
class StepClock {
 public:
  virtual ~StepClock() = default;
  template <class Body>
  void time(const char* step, Body&& body) {
    begin(step);
    body();
    end(step);
  }

  struct Entry {
    std::string step;
    double ms;
  };
  const std::vector<Entry>& entries() const { return entries_; }

 protected:
  virtual void begin(const char* step) = 0;
  virtual void end(const char* step) = 0;
  void add(const char* step, double ms);

 private:
  std::vector<Entry> entries_;
};

// The host's clock: for steps that are done when they return.
class HostClock final : public StepClock {
 private:
  void begin(const char*) override { start_ = std::chrono::steady_clock::now(); }
  void end(const char* step) override { add(step, milliseconds_since(start_)); }
  std::chrono::steady_clock::time_point start_;
};

// Runs the layer's steps on `inner` and reports each to `clock`. Routing is asked of the backend by
// functions of the public interface, which a caller times from outside.
class TimedBackend final : public Backend {
 public:
  TimedBackend(Backend& inner, StepClock& clock) : inner_(inner), clock_(clock) {}

  std::string description() const override { return inner_.description(); }
  void check_supported(const tilemoe_experts& experts) const override {
    inner_.check_supported(experts);
  }
  void check_gradients(const tilemoe_experts& experts, const tilemoe_weights& weights,
                       const tilemoe_weights& gradients) const override {
    inner_.check_gradients(experts, weights, gradients);
  }
  size_t scratch_bytes(Step step, const tilemoe_experts& experts,
                       const ScratchSizes& sizes) const override {
    return inner_.scratch_bytes(step, experts, sizes);
  }

  void up_projection(const UpProjection& step) override;
  void down_projection(const DownProjection& step) override;
  void combine(const Combine& step) override;
  void activation_gradient(const ActivationGradient& step) override;
  void score_gradient(const ScoreGradient& step) override;
  void weight_gradient_2(const WeightGradient2& step) override;
  void input_gradient(const InputGradient& step) override;
  void weight_gradient_1(const WeightGradient1& step) override;
  void bias_gradient(const BiasGradient& step) override;

  size_t routing_scratch_bytes(const tilemoe_routing_spec& spec) const override;
  size_t router_losses_scratch_bytes(int64_t T, int64_t E) const override;
  void top_k(const tilemoe_top_k_args& args) override;
  void top_k_scores(const tilemoe_top_k_scores_args& args) override;
  void route_top_k(tilemoe_routing& routing, const tilemoe_route_top_k_args& args) override;
  void route_general(tilemoe_routing& routing, const tilemoe_route_general_args& args) override;
  void route_rounded(tilemoe_routing& routing, const tilemoe_route_rounded_args& args) override;
  void route_grouped(tilemoe_routing& routing, const tilemoe_route_grouped_args& args) override;
  void router_backward(const tilemoe_router_backward_args& args) override;
  void router_losses(const tilemoe_router_losses_args& args) override;

 private:
  Backend& inner_;
  StepClock& clock_;
};

// Names of the steps, as they stand in tables and in JSON.
namespace step {
inline constexpr const char* kRouter = "router";
inline constexpr const char* kTopK = "top_k";
inline constexpr const char* kRoute = "route";
inline constexpr const char* kUpProjection = "up_projection";
inline constexpr const char* kDownProjection = "down_projection";
inline constexpr const char* kCombine = "combine";
inline constexpr const char* kActivationGradient = "activation_gradient";
inline constexpr const char* kScoreGradient = "score_gradient";
inline constexpr const char* kWeightGradient2 = "weight_gradient_2";
inline constexpr const char* kInputGradient = "input_gradient";
inline constexpr const char* kCombineGradient = "combine_dX";
inline constexpr const char* kWeightGradient1 = "weight_gradient_1";
inline constexpr const char* kBiasGradient = "bias_gradient";
inline constexpr const char* kRouterBackward = "router_backward";
inline constexpr const char* kRouterGradient = "router_gradient";
}  // namespace step

// A step's matrix product for `rows` rows of one expert: C (rows, columns) = A (rows, depth) B
// (depth, columns), all row-major; a transposed operand is stored the other way round.
struct DenseProduct {
  const char* step;
  bool backward;
  int64_t rows, columns, depth;
  bool A_transposed, B_transposed;
};
// The six of a layer's forward and backward.
std::vector<DenseProduct> dense_products(const verify::Case& layer, int64_t rows);

// What a step has to do at least: multiplications and additions, and bytes with every tensor
// counted once.
struct Work {
  double flop = 0;
  double bytes = 0;

  Work& operator+=(const Work& other) {
    flop += other.flop, bytes += other.bytes;
    return *this;
  }
};
// `rows` is M, the rows that the routing made.
Work work_of(const std::string& step, const verify::Case& layer, int64_t rows);

}  // namespace tilemoe::app
