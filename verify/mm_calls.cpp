#include "mm_calls.h"

#include <cmath>
#include <limits>

namespace tilemoe::verify {
namespace {

bool present(const Tensor& tensor) {
  return tilemoe_tensor(tensor).ndim != 0;
}
uint32_t bit_of(const Tensor& gradient, uint32_t bit) {
  return present(gradient) ? bit : 0;
}

}  // namespace

MmCalls::MmCalls(const Experts& experts, const RoutingSpec& spec, Memory& memory)
    : experts_(experts),
      spec_(spec),
      memory_(memory),
      A_(memory, experts.dtype, {spec.bound(), experts.n}),
      dA_(memory, experts.dtype, {spec.bound(), experts.n}) {}

template <class Call>
void MmCalls::run(tilemoe_mm mm, uint32_t gradients, Call&& call) {
  GuardedBuffer workspace(memory_, mm_workspace_bytes(experts_, spec_, mm, gradients));
  workspace.poison();
  call(MmMemory{.workspace = workspace.data(), .workspace_bytes = workspace.bytes()});
  if (!workspace.guards_intact())
    damage_.emplace_back("bytes outside the workspace of one of the GEMMs were written");
}

void MmCalls::spoil_rest(const char* name, const tilemoe_routing& routing,
                         const GuardedTensor& from, GuardedTensor& to) {
  std::vector<float> values = from.read();
  int32_t M = 0;
  memory_.copy_out(&M, routing.offsets + experts_.E, sizeof M);
  for (auto i = static_cast<size_t>(M * experts_.n); i < values.size(); ++i) {
    if (values[i] != 0 || std::signbit(values[i])) {
      damage_.push_back(std::string(name) + " is not zero in a row without a token");
      break;
    }
    values[i] = std::numeric_limits<float>::quiet_NaN();
  }
  to.write(values);
}

void MmCalls::forward(const ForwardArgs& args, const GuardedTensor& H) {
  run(TILEMOE_GATHERED_MM, 0, [&](const MmMemory& memory) {
    gathered_mm(experts_, {.routing = args.routing,
                           .X = args.X,
                           .W = args.weights.W1,
                           .b = args.weights.b1,
                           .H = H.view(),
                           .memory = memory});
  });
  spoil_rest("H", *args.routing, H, A_);
  run(TILEMOE_COMBINE_MM, 0, [&](const MmMemory& memory) {
    combine_mm(experts_, {.routing = args.routing,
                          .A = A_.view(),
                          .W = args.weights.W2,
                          .b = args.weights.b2,
                          .O = args.O,
                          .addend = args.addend,
                          .memory = memory});
  });
}

void MmCalls::backward(const BackwardArgs& args) {
  const WeightGradients& d = args.dweights;
  const uint32_t first = bit_of(args.dX, TILEMOE_GRADIENT_X) | bit_of(d.W1, TILEMOE_GRADIENT_W1) |
                         bit_of(d.b1, TILEMOE_GRADIENT_B1);
  const uint32_t second = bit_of(args.ds, TILEMOE_GRADIENT_S) | bit_of(d.W2, TILEMOE_GRADIENT_W2) |
                          bit_of(d.b2, TILEMOE_GRADIENT_B2) |
                          (first ? uint32_t{TILEMOE_GRADIENT_A} : 0);
  dA_.poison();
  run(TILEMOE_COMBINE_MM_BACKWARD, second, [&](const MmMemory& memory) {
    combine_mm_backward(experts_, {.routing = args.routing,
                                   .A = A_.view(),
                                   .W = args.weights.W2,
                                   .b = args.weights.b2,
                                   .dO = args.dO,
                                   .dA = first ? dA_.view() : Tensor(),
                                   .ds = args.ds,
                                   .dW = d.W2,
                                   .db = d.b2,
                                   .accumulate = args.accumulate,
                                   .memory = memory});
  });
  if (!first) return;
  spoil_rest("dA", *args.routing, dA_, dA_);
  run(TILEMOE_GATHERED_MM_BACKWARD, first, [&](const MmMemory& memory) {
    gathered_mm_backward(experts_, {.routing = args.routing,
                                    .X = args.X,
                                    .W = args.weights.W1,
                                    .dH = dA_.view(),
                                    .dX = args.dX,
                                    .addend = args.addend,
                                    .dW = d.W1,
                                    .db = d.b1,
                                    .accumulate = args.accumulate,
                                    .memory = memory});
  });
}

}  // namespace tilemoe::verify
