#include "layer/lora.h"

#include <cmath>

#include "core/check.h"
#include "layer/arguments.h"
#include "layer/steps.h"

namespace tilemoe {

bool interleaves_H(const tilemoe_experts& experts, const tilemoe_tensor& W1) {
  return experts.device == TILEMOE_CUDA && experts.gate_layout == TILEMOE_GATE_INTERLEAVED &&
         !contiguous_along_d(W1);
}

UpParts columns_of_H(const tilemoe_experts& experts, const tilemoe_tensor& W1,
                     const tilemoe_tensor& B1) {
  if (interleaves_H(experts, W1)) return {{B1, {}}, 1, 2 * experts.n};
  return up_parts(experts, B1, {});
}

void check_scale(const char* name, float scale) {
  TILEMOE_CHECK(std::isfinite(scale), name << " is " << scale << ", expected a finite number");
}

namespace {

// The gradient of a factor that is given.
void check_gradient(const char* name, const tilemoe_tensor& gradient,
                    const tilemoe_experts& experts, int64_t rows, int64_t columns) {
  TILEMOE_CHECK(
      !present(gradient) || (rows > 0 && columns > 0),
      name << " is " << describe(gradient) << ", expected none: the experts have no such adapter");
  check_optional(
      name, gradient,
      {{experts.E, rows, columns}, {experts.dtype, TILEMOE_FLOAT32}, Strides::kMatrixEitherMajor});
}

}  // namespace

tilemoe_packed_lora read_lora(const tilemoe_packed_lora* given, const tilemoe_experts& experts,
                              const tilemoe_weights& weights) {
  const bool any = experts.rank_1 > 0 || experts.rank_2 > 0;
  TILEMOE_CHECK(
      any == (given != nullptr),
      (any ? "lora is null, but experts.rank_1 is " : "lora is given, but experts.rank_1 is ")
          << experts.rank_1 << " and rank_2 is " << experts.rank_2);
  if (given == nullptr) return {};
  const tilemoe_packed_lora lora = read_struct("lora", given);
  check_reserved("lora", lora.reserved);
  const tilemoe_packed_lora expected = packed_at(nullptr, experts, weights);
  const auto check = [&](const char* name, const tilemoe_tensor& factor,
                         const tilemoe_tensor& rule) {
    if (!present(rule)) return check_absent(name, factor, "the experts have rank 0 for it");
    check_tensor(name, factor,
                 {{rule.shape[0], rule.shape[1], rule.shape[2]},
                  {experts.dtype},
                  Strides::kMatrixEitherMajor});
    TILEMOE_CHECK((factor.stride[2] == 1) == (rule.stride[2] == 1),
                  name << " was packed for weights of other strides; pack it again");
  };
  check("lora.A1", lora.A1, expected.A1);
  check("lora.B1", lora.B1, expected.B1);
  check("lora.A2", lora.A2, expected.A2);
  check("lora.B2", lora.B2, expected.B2);
  // The ranks of gate and up.
  const int32_t gate = lora.rank_gate, up = experts.rank_1 - gate;
  TILEMOE_CHECK(split(experts) ? gate >= 0 && gate <= TILEMOE_MAX_RANK && up >= 0 &&
                                     up <= TILEMOE_MAX_RANK && gate % limits::kWidthMultiple == 0
                               : gate == 0,
                "lora.rank_gate is "
                    << gate << " of " << experts.rank_1
                    << ", expected the rank of a split gate's own adapter, else 0");
  check_scale("lora.scale_1", lora.scale_1);
  check_scale("lora.scale_2", lora.scale_2);
  return lora;
}

tilemoe_lora read_lora_gradients(const tilemoe_lora* given, const tilemoe_experts& experts,
                                 const tilemoe_weights& weights, const tilemoe_packed_lora& lora) {
  if (given == nullptr) return {};
  const tilemoe_lora gradients = read_struct("dlora", given);
  const int64_t gate = split(experts) ? lora.rank_gate : experts.rank_1;
  const int64_t up = experts.rank_1 - gate;
  check_gradient("dlora.A1", gradients.A1, experts, gate, experts.d);
  check_gradient("dlora.B1", gradients.B1, experts, w1_rows(experts), gate);
  check_gradient("dlora.A1_up", gradients.A1_up, experts, up, experts.d);
  check_gradient("dlora.B1_up", gradients.B1_up, experts, experts.n, up);
  check_gradient("dlora.A2", gradients.A2, experts, experts.rank_2, experts.n);
  check_gradient("dlora.B2", gradients.B2, experts, experts.d, experts.rank_2);
  // H has all gate columns before all up columns, and every other row of B1 is one of them.
  if (experts.gate_layout == TILEMOE_GATE_INTERLEAVED && present(gradients.B1))
    TILEMOE_CHECK(gradients.B1.stride[2] == 1 || interleaves_H(experts, weights.W1),
                  "dlora.B1 is interleaved: expected it to be contiguous along the rank");
  return gradients;
}

void check_P(const tilemoe_experts& experts, const tilemoe_routing_spec& spec,
             const tilemoe_saved& saved) {
  const auto check = [&](const char* name, const tilemoe_tensor& P, int64_t rank) {
    if (rank == 0) return check_absent(name, P, "the experts have rank 0 for it");
    check_tensor(name, P, {{spec.capacity, rank}, {experts.dtype}});
  };
  check("saved.P1", saved.P1, experts.rank_1);
  check("saved.P2", saved.P2, experts.rank_2);
}

void read_lora_memory(MemoryUse& memory, const tilemoe_packed_lora& lora) {
  memory.reads("lora.A1", lora.A1);
  memory.reads("lora.B1", lora.B1);
  memory.reads("lora.A2", lora.A2);
  memory.reads("lora.B2", lora.B2);
}

void write_lora_memory(MemoryUse& memory, const tilemoe_lora& gradients) {
  memory.writes("dlora.A1", gradients.A1);
  memory.writes("dlora.B1", gradients.B1);
  memory.writes("dlora.A1_up", gradients.A1_up);
  memory.writes("dlora.B1_up", gradients.B1_up);
  memory.writes("dlora.A2", gradients.A2);
  memory.writes("dlora.B2", gradients.B2);
}

int lora_gradients_1(const tilemoe_experts& experts, const tilemoe_weights& weights,
                     const tilemoe_packed_lora& lora, const tilemoe_lora& gradients,
                     const tilemoe_tensor& P1, const tilemoe_tensor& Q1, LoraGradient* steps) {
  int count = 0;
  const auto add = [&](const tilemoe_tensor& dA, const UpParts& dB, int64_t first_column,
                       int64_t first, int64_t rank) {
    if (!present(dA) && !present(dB.part[0])) return;
    LoraGradient& step = steps[count++];
    step = {.gathers_input = true,
            .P = slice(P1, 1, first, rank),
            .Q = slice(Q1, 1, first, rank),
            .scale = lora.scale_1,
            .dA = dA};
    if (!present(dB.part[0])) return;
    for (int p = 0; p < dB.count; ++p)
      step.part[step.parts++] = {dB.part[p], first_column + p * dB.columns};
  };
  if (!split(experts)) {
    add(gradients.A1, columns_of_H(experts, weights.W1, gradients.B1), 0, 0, experts.rank_1);
    return count;
  }
  const int64_t gate = lora.rank_gate;
  add(gradients.A1, {{gradients.B1, {}}, 1, experts.n}, 0, 0, gate);
  add(gradients.A1_up, {{gradients.B1_up, {}}, 1, experts.n}, experts.n, gate,
      experts.rank_1 - gate);
  return count;
}

LoraGradient lora_gradient_2(const tilemoe_packed_lora& lora, const tilemoe_lora& gradients) {
  LoraGradient step{.gathers_input = false, .scale = lora.scale_2, .dA = gradients.A2};
  if (present(gradients.B2)) step.part[step.parts++] = {gradients.B2, 0};
  return step;
}

}  // namespace tilemoe
