// Where the rows that a backward computes lie: in its workspace, or over memory that is free until
// they end.
#pragma once

#include "core/backend.h"
#include "layer/call.h"
#include "layer/steps.h"

namespace tilemoe {

inline tilemoe_tensor place_of_dH(const BackwardCall& call) {
  if (present(call.dH)) return call.dH;
  if (call.work.dH_over_H) return call.saved.H;
  return region(call.experts, call.routing.spec, call.args.workspace, call.plan.dH,
                h_width(call.experts));
}

inline tilemoe_tensor place_of_A_scaled(const BackwardCall& call) {
  tilemoe_tensor A_scaled = region(call.experts, call.routing.spec, call.args.workspace,
                                   call.plan.A_scaled, call.experts.n);
  if (A_scaled_over_codes(call.experts, call.work)) A_scaled.data = call.saved.H_codes;
  return A_scaled;
}

inline Fp8Rows place_of_dO_codes(const BackwardCall& call) {
  if (!call.plan.writes_dH_codes) return codes_at(call.args.workspace, call.plan.dO_codes);
  const tilemoe_tensor& dX = call.args.dX;
  const auto rows = static_cast<size_t>(dX.shape[0]), width = static_cast<size_t>(dX.shape[1]);
  return codes_at(dX.data, {.codes = 0, .scales = rows * width});
}

inline Scratch scratch_of_dW2(const BackwardCall& call) {
  const bool in_dX = call.plan.dW2_scratch_in_dX;
  return scratch_at(in_dX ? call.args.dX.data : call.args.workspace, call.plan.dW2_scratch);
}

inline Fp8Rows place_of_dH_codes(const BackwardCall& call) {
  if (consumes_codes(call.experts, call.work)) return {call.saved.H_codes, call.saved.H_scales};
  return codes_at(call.args.workspace, call.plan.dH_codes);
}

}  // namespace tilemoe
