// Times of the backward steps on the device: cold L2, medians.
// tilemoe_cuda_backward_steps [config ...]
#include <optional>
#include <utility>

#include "cuda/core/up_columns.h"
#include "step_bench.h"

namespace tilemoe {
namespace {

void bench(const Config& c) {
  const int64_t M = c.T * c.K;
  const auto elements = [](int64_t a, int64_t b) { return static_cast<size_t>(a * b * 2); };
  DeviceBuffer X(elements(c.T, c.d)), dO(elements(c.T, c.d));
  DeviceBuffer W1(elements(c.E * 2 * c.n, c.d)), dW1(elements(c.E * 2 * c.n, c.d));
  DeviceBuffer W2(elements(c.E * c.d, c.n)), dW2(elements(c.E * c.d, c.n));
  DeviceBuffer H(elements(M, 2 * c.n));
  DeviceBuffer dH(elements(M, 2 * c.n)), A_scaled(elements(M, c.n)), dX_rows(elements(M, c.d));
  DeviceBuffer flush(size_t{256} << 20);
  X.fill(0.2), dO.fill(0.02), W1.fill(0.02), dH.fill(0.01), A_scaled.fill(0.01);
  W2.fill(0.02), H.fill(0.15);
  const RandomRouting routing(c);
  DeviceBuffer offsets(routing.offsets.size() * 4), tokens(routing.tokens.size() * 4);
  DeviceBuffer scores(routing.scores.size() * 4);
  offsets.upload(routing.offsets), tokens.upload(routing.tokens), scores.upload(routing.scores);

  tilemoe_experts experts{};
  experts.struct_size = sizeof experts;
  experts.device = TILEMOE_CUDA;
  experts.dtype = TILEMOE_BFLOAT16;
  experts.d = c.d, experts.n = c.n, experts.E = c.E;
  const Rows rows{.E = c.E,
                  .capacity = M,
                  .offsets = static_cast<const int32_t*>(offsets.data()),
                  .token = static_cast<const int32_t*>(tokens.data()),
                  .score = static_cast<const float*>(scores.data())};
  Backend& backend = cuda::backend();
  DeviceBuffer ds_partial(static_cast<size_t>(ds_groups(c.n) * M) * 4);
  ActivationGradient activation{};
  activation.experts = &experts;
  activation.rows = rows;
  activation.dO = tensor(dO, {c.T, c.d});
  activation.W2 = tensor(W2, {c.E, c.d, c.n});
  activation.H = tensor(H, {M, 2 * c.n});
  activation.dH = tensor(dH, {M, 2 * c.n});
  activation.A_scaled = tensor(A_scaled, {M, c.n});
  activation.ds_partial = static_cast<float*>(ds_partial.data());
  WeightGradient2 gradient_2{};
  gradient_2.experts = &experts;
  gradient_2.rows = rows;
  gradient_2.dO = tensor(dO, {c.T, c.d});
  gradient_2.A_scaled = tensor(A_scaled, {M, c.n});
  gradient_2.dW2 = tensor(dW2, {c.E, c.d, c.n});
  InputGradient input{};
  input.experts = &experts;
  input.rows = rows;
  input.dH = tensor(dH, {M, 2 * c.n});
  input.weights.W1 = tensor(W1, {c.E, 2 * c.n, c.d});
  input.dX_rows = tensor(dX_rows, {M, c.d});
  WeightGradient1 gradient_1{};
  gradient_1.experts = &experts;
  gradient_1.rows = rows;
  gradient_1.dH = input.dH;
  gradient_1.X = tensor(X, {c.T, c.d});
  gradient_1.dW1 = tensor(dW1, {c.E, 2 * c.n, c.d});
  DeviceBuffer db2(static_cast<size_t>(c.E * c.d) * 2), db1(static_cast<size_t>(c.E * 2 * c.n) * 2);
  size_t scratch_bytes = 0;
  for (Step step : {Step::kWeightGradient1, Step::kWeightGradient2, Step::kBiasGradient})
    scratch_bytes = std::max(scratch_bytes, backend.scratch_bytes(step, experts, {.capacity = M}));
  const DeviceBuffer scratch_memory(scratch_bytes);
  const Scratch scratch{scratch_memory.data(), scratch_memory.bytes()};
  gradient_1.scratch = gradient_2.scratch = scratch;
  BiasGradient bias_2{};
  bias_2.experts = &experts;
  bias_2.rows = rows;
  bias_2.scratch = scratch;
  BiasGradient bias_1 = bias_2;
  bias_2.dO = tensor(dO, {c.T, c.d});
  bias_2.db2 = tensor(db2, {c.E, c.d});
  bias_1.dH = input.dH;
  bias_1.db1 = tensor(db1, {c.E, 2 * c.n});

  const auto m = static_cast<double>(M), d = static_cast<double>(c.d), n = static_cast<double>(c.n);
  const auto E = static_cast<double>(c.E), T = static_cast<double>(c.T);
  const double dA_ms = median_ms(flush, [&] { backend.activation_gradient(activation); });
  report(c.name, "dA'", "", dA_ms, 2 * m * d * n, 2 * (T * d + E * d * n + 5 * m * n));
  const double dW2_ms = median_ms(flush, [&] { backend.weight_gradient_2(gradient_2); });
  report(c.name, "dW2", "", dW2_ms, 2 * m * d * n, 2 * (T * d + m * n + E * d * n));
  const auto report_input = [&](const char* name, const InputGradient& step) {
    const double dX_ms = median_ms(flush, [&] { backend.input_gradient(step); });
    report(c.name, "dX~", name, dX_ms, 4 * m * d * n, 2 * (2 * m * n + E * 2 * n * d + m * d));
  };
  of_every_tile(input, report_input);
  const double dW1_ms = median_ms(flush, [&] { backend.weight_gradient_1(gradient_1); });
  report(c.name, "dW1", "", dW1_ms, 4 * m * d * n, 2 * (T * d + 2 * m * n + E * 2 * n * d));
  // gpt-oss's layout, with H's columns in W1's order.
  experts.gate_layout = TILEMOE_GATE_INTERLEAVED;
  const tilemoe_tensor adjacent_W1 = transposed(tensor(W1, {c.E, c.d, 2 * c.n}));
  activation.W1 = input.weights.W1 = gradient_1.W1 = adjacent_W1;
  gradient_1.dW1 = transposed(tensor(dW1, {c.E, c.d, 2 * c.n}));
  const double dA_adjacent_ms = median_ms(flush, [&] { backend.activation_gradient(activation); });
  report(c.name, "dA'", "adjacent", dA_adjacent_ms, 2 * m * d * n,
         2 * (T * d + E * d * n + 5 * m * n));
  const double dX_adjacent_ms = median_ms(flush, [&] { backend.input_gradient(input); });
  report(c.name, "dX~", "adjacent", dX_adjacent_ms, 4 * m * d * n,
         2 * (2 * m * n + E * 2 * n * d + m * d));
  const double dW1_adjacent_ms = median_ms(flush, [&] { backend.weight_gradient_1(gradient_1); });
  report(c.name, "dW1", "adjacent", dW1_adjacent_ms, 4 * m * d * n,
         2 * (T * d + 2 * m * n + E * 2 * n * d));
  experts.gate_layout = TILEMOE_GATE_CONCATENATED;
  // Bytes of db2's gathered rows, though L2 has some of them already.
  const double db2_ms = median_ms(flush, [&] { backend.bias_gradient(bias_2); });
  report(c.name, "db2", "", db2_ms, 0, 2 * m * d);
  const double db1_ms = median_ms(flush, [&] { backend.bias_gradient(bias_1); });
  report(c.name, "db1", "", db1_ms, 0, 2 * m * 2 * n);
}

}  // namespace
}  // namespace tilemoe

int main(int argc, char** argv) {
  return tilemoe::bench_configs(argc, argv, tilemoe::bench);
}
