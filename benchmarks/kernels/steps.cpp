#include <map>

#include "modes.h"
#include "timed_layer.h"
#include "timed_weights.h"

namespace tilemoe::app {
namespace {

using verify::Case;
using verify::Load;

// The steps of low-rank adapters, and what an adapter adds to a GEMM: the second term of its sum.
// `read` is the number of experts whose factors are read.
Work work_of_adapters(const std::string& name, const Case& layer, double M, double read) {
  const auto element = static_cast<double>(size_of(layer.dtype)),
             factor = static_cast<double>(size_of(layer.factor_dtype()));
  const auto T = static_cast<double>(layer.T), d = static_cast<double>(layer.d),
             n = static_cast<double>(layer.n), E = static_cast<double>(layer.E),
             h = static_cast<double>(layer.h_width());
  const auto rank_1 = static_cast<double>(layer.lora.rank_1()),
             rank_2 = static_cast<double>(layer.lora.rank_2());
  // M rows, which are `rows` bytes if they are read here, times a factor of the experts; and the
  // gradient of a factor by such rows.
  const auto product = [&](double rows, double columns, double rank) {
    return Work{2 * M * columns * rank, rows + element * rank * (M + read * columns)};
  };
  const auto gradient = [&](double rows, double columns, double rank) {
    return Work{2 * M * columns * rank, rows + rank * (element * M + factor * E * columns)};
  };
  const double tokens = element * T * d, of_n = element * M * n, of_h = element * M * h;
  if (name == step::pack_lora && layer.lora.any()) {
    const double packed = static_cast<double>(layer.experts(Device::kCpu).packed_lora_bytes());
    return {0, factor * E * (rank_1 * (d + h) + rank_2 * (n + d)) + packed};
  }
  if (name == step::lora_P1) return product(tokens, d, rank_1);
  if (name == step::lora_P2) return product(of_n, n, rank_2);
  // dB comes with Q, from the same rows.
  if (name == step::lora_Q1) return product(of_h, h, rank_1) + gradient(0, h, rank_1);
  if (name == step::lora_Q2) return product(tokens, d, rank_2) + gradient(0, d, rank_2);
  if (name == step::lora_gradient_1) return gradient(tokens, d, rank_1);
  if (name == step::lora_gradient_2) return gradient(of_n, n, rank_2);
  if (name == step::up_projection) return product(0, h, rank_1);
  if (name == step::down_projection) return product(0, d, rank_2);
  if (name == step::activation_gradient) return product(0, n, rank_2);
  if (name == step::input_gradient) return product(0, d, rank_1);
  return {};
}

// Of the layer without adapters. M is the number of rows that the routing made. dH_codes: the
// activation gradient writes dH as codes, too.
Work work_of_layer(const std::string& name, const Case& layer, double M, double read,
                   bool dH_codes) {
  const auto element = static_cast<double>(size_of(layer.dtype));
  const auto T = static_cast<double>(layer.T), d = static_cast<double>(layer.d),
             n = static_cast<double>(layer.n), E = static_cast<double>(layer.E),
             K = static_cast<double>(layer.K), h = static_cast<double>(layer.h_width());
  const double logits = element * T * E, chosen = T * K * (sizeof(int32_t) + sizeof(float));
  const double pair = sizeof(int32_t) + sizeof(float) + sizeof(int32_t);  // of the routing object
  const double tokens = element * T * d, W1 = element * h * d, W2 = element * d * n;
  // Bytes of what the GEMMs of forward, and of backward, read: codes in the fp8 recipes.
  const double read_by_forward = layer.recipe == Recipe::kBf16 ? element : 1;
  const double read_by_backward = layer.recipe == Recipe::kFp8 ? 1 : element;
  const double forward = read_by_forward / element, backward = read_by_backward / element;
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
  // Values in, codes out; the scales are few.
  if (name == step::quantize_X || name == step::quantize_dO) return {0, tokens * (1 + 1 / element)};
  if (name == step::quantize_dH) return {0, M * h * (element + 1)};
  if (name == step::up_projection)
    return {2 * M * d * h,
            forward * (tokens + read * W1) + element * M * h + read_by_forward * M * n};
  if (name == step::down_projection)
    return {2 * M * n * d, M * (read_by_forward * n + element * d) + forward * read * W2};
  if (name == step::combine || name == step::combine_dX)
    return {2 * M * d, element * M * d + tokens};
  if (name == step::activation_gradient)
    return {2 * M * d * n,
            backward * (tokens + read * W2) + element * M * (2 * h + n) + (dH_codes ? M * h : 0)};
  if (name == step::weight_gradient_2) return {2 * M * d * n, tokens + element * M * n + E * W2};
  if (name == step::input_gradient)
    return {2 * M * d * h, M * (read_by_backward * h + element * d) + backward * read * W1};
  if (name == step::weight_gradient_1) return {2 * M * d * h, tokens + element * M * h + E * W1};
  if (name == step::router_backward) return {0, chosen + logits};
  if (name == step::bias_gradient) return {M * (h + d), tokens + element * (M * h + E * (h + d))};
  return {};  // the score gradient, which adds up a few numbers a row
}

Work work_of(const std::string& name, const Case& layer, int64_t rows, bool dH_codes) {
  const auto M = static_cast<double>(rows);
  // Experts whose weights are read: one if it has all rows.
  const double read =
      layer.load == Load::kOneExpert && layer.K == 1 ? 1 : static_cast<double>(layer.E);
  return work_of_layer(name, layer, M, read, dH_codes) + work_of_adapters(name, layer, M, read);
}

// Whether a backward begins with this step.
bool begins_backward(const std::string& name, const Case& layer) {
  if (layer.recipe == Recipe::kFp8) return name == step::quantize_dO;
  if (layer.lora.rank_2() > 0) return name == step::lora_Q2;
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
    const bool dH_codes = one.recipe == Recipe::kFp8 && !samples.contains(step::quantize_dH);
    std::vector<Work> forward, backward, *pass = request.forward ? &forward : &backward;
    for (const std::string& step : order) {
      if (begins_backward(step, one)) pass = &backward;
      if (step != kForward && step != kBackward)
        pass->push_back(work_of(step, one, rows, dH_codes));
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
