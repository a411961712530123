#include <map>

#include "modes.h"
#include "timed_layer.h"
#include "timed_weights.h"

namespace tilemoe::app {
namespace {

using verify::Case;
using verify::Load;

// `rows` is M, the rows that the routing made.
Work work_of(const std::string& name, const Case& layer, int64_t rows) {
  const auto element = static_cast<double>(size_of(layer.dtype));
  const auto T = static_cast<double>(layer.T), d = static_cast<double>(layer.d),
             n = static_cast<double>(layer.n), E = static_cast<double>(layer.E),
             K = static_cast<double>(layer.K), M = static_cast<double>(rows),
             h = static_cast<double>(layer.h_width());
  // Weights that are read: one expert's if it has all rows.
  const double read = layer.load == Load::kOneExpert && layer.K == 1 ? 1 : E;
  const double logits = element * T * E, chosen = T * K * (sizeof(int32_t) + sizeof(float));
  const double pair = sizeof(int32_t) + sizeof(float) + sizeof(int32_t);  // of the routing object
  const double tokens = element * T * d, W1 = element * h * d, W2 = element * d * n;
  const bool rounded = layer.routing == verify::RoutingKind::kRounded;
  if (name == step::top_k) return {0, logits + chosen};
  if (name == step::route) return {0, (rounded ? logits : chosen) + M * pair};
  // Codes and scales in, values out.
  const auto dequantized = [&](Format format, double W) {
    return Work{0, read * W * (1 + bytes_per_value(format) / element)};
  };
  if (name == step::dequantize_W1 || name == step::dequantize_W1_again)
    return dequantized(layer.format_1, W1);
  if (name == step::dequantize_W2 || name == step::dequantize_W2_again)
    return dequantized(layer.format_2, W2);
  if (name == step::up_projection)
    return {2 * M * d * h, tokens + read * W1 + element * M * (h + n)};
  if (name == step::down_projection) return {2 * M * n * d, element * M * (n + d) + read * W2};
  if (name == step::combine || name == step::combine_dX)
    return {2 * M * d, element * M * d + tokens};
  if (name == step::activation_gradient)
    return {2 * M * d * n, tokens + read * W2 + element * M * (2 * h + n)};
  if (name == step::weight_gradient_2) return {2 * M * d * n, tokens + element * M * n + E * W2};
  if (name == step::input_gradient) return {2 * M * d * h, element * M * (h + d) + read * W1};
  if (name == step::weight_gradient_1) return {2 * M * d * h, tokens + element * M * h + E * W1};
  if (name == step::router_backward) return {0, chosen + logits};
  if (name == step::bias_gradient) return {M * (h + d), tokens + element * (M * h + E * (h + d))};
  return {};  // the score gradient, which adds up a few numbers a row
}

// Whether a backward begins with this step.
bool begins_backward(const std::string& name, const Case& layer) {
  return name ==
         (layer.format_2 == Format::kNone ? step::activation_gradient : step::dequantize_W2_again);
}

// The whole passes, cold at their start alone.
constexpr const char *kForward = "forward", *kBackward = "backward";

}  // namespace

void time_steps(const Request& request, Report& report) {
  constexpr int kWarmUp = 2;
  const std::unique_ptr<Clock> clock = make_clock(request.device);
  for (const Case& one : request.layers) {
    TimedLayer layer(one, request.device);
    std::vector<std::string> order;
    std::map<std::string, Samples> samples;
    const auto keep = [&](const std::string& step, double ms) {
      if (samples[step].empty()) order.push_back(step);
      samples[step].push_back(ms);
    };
    for (int round = -kWarmUp; round < request.rounds; ++round) {
      // Whole passes first: what ran before sets a GPU's temperature and so its clock.
      const double forward = clock->ms([&] { layer.forward(); });
      const double backward = request.backward ? clock->ms([&] { layer.backward(); }) : 0;
      layer.forward(request.forward ? clock.get() : nullptr);
      if (request.backward) layer.backward(clock.get());
      const std::vector<StepTime> steps = clock->collect();
      if (round < 0) continue;
      for (const StepTime& step : steps) keep(step.step, step.ms);
      if (request.forward) keep(kForward, forward);
      if (request.backward) keep(kBackward, backward);
    }
    const int64_t rows = layer.rows();
    std::vector<Work> forward, backward, *pass = request.forward ? &forward : &backward;
    for (const std::string& step : order) {
      if (begins_backward(step, one)) pass = &backward;
      if (step != kForward && step != kBackward) pass->push_back(work_of(step, one, rows));
      const std::vector<Work> work = step == kForward    ? forward
                                     : step == kBackward ? backward
                                                         : std::vector{pass->back()};
      report.add_times("kernels/" + one.name + "/" + step, samples[step], work, {{"rows", rows}});
    }
    report.print(one.name + ": " + shape_text(one) + ", " + std::to_string(rows) + " rows, " +
                 std::to_string(request.rounds) + " rounds, " + report.device());
  }
}

}  // namespace tilemoe::app
