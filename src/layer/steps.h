// What forward and backward run steps with: views of the workspace and of the rows, and the runner.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "core/backend.h"
#include "core/check.h"
#include "core/formats.h"
#include "layer/workspace.h"
#include "routing/spec.h"

namespace tilemoe {

inline Scratch scratch_at(void* workspace, const ScratchRegion& region) {
  return {static_cast<char*>(workspace) + region.place, region.size};
}

// A contiguous (capacity, width) matrix in the workspace.
inline tilemoe_tensor region(const tilemoe_experts& experts, const tilemoe_routing_spec& spec,
                             void* workspace, size_t place, int64_t width) {
  tilemoe_tensor tensor{};
  tensor.data = static_cast<char*>(workspace) + place;
  tensor.dtype = experts.dtype;
  tensor.ndim = 2;
  tensor.shape[0] = spec.capacity, tensor.shape[1] = width;
  tensor.stride[0] = width, tensor.stride[1] = 1;
  return tensor;
}

// Indices [first, first + count) of a dimension. An absent tensor stays absent, and one without data,
// of which only the shape counts, without it.
inline tilemoe_tensor slice(tilemoe_tensor tensor, int dimension, int64_t first, int64_t count) {
  if (!present(tensor)) return tensor;
  const auto element = static_cast<int64_t>(tilemoe_dtype_size(tensor.dtype));
  if (tensor.data != nullptr)
    tensor.data = static_cast<char*>(tensor.data) + first * tensor.stride[dimension] * element;
  tensor.shape[dimension] = count;
  return tensor;
}

// Calls body(first, columns) for each block of `columns` of the d columns.
template <class Body>
void for_each_block(int64_t d, int64_t columns, const Body& body) {
  for (int64_t first = 0; first < d; first += columns) body(first, std::min(columns, d - first));
}

inline Rows rows_of(const tilemoe_routing& routing) {
  return {.E = routing.spec.E,
          .capacity = routing.spec.capacity,
          .of_an_expert = rows_of_an_expert(routing.spec),
          .offsets = routing.offsets,
          .token = routing.row_token,
          .score = routing.row_score};
}

// The rows of a part, for the steps with one row of output per row.
inline Rows rows_of(const tilemoe_routing& routing, const std::optional<tilemoe_part>& part) {
  Rows rows = rows_of(routing);
  if (part) rows.offsets = part->begins, rows.ends = part->ends;
  return rows;
}

// The tokens of a part in (T, d), or in a block of its columns.
inline tilemoe_tensor tokens_of(const tilemoe_tensor& tensor,
                                const std::optional<tilemoe_part>& part) {
  return part ? slice(tensor, 0, part->first_token, part->tokens) : tensor;
}

inline Fp8Rows codes_at(void* workspace, const Fp8Region& region) {
  char* const begin = static_cast<char*>(workspace);
  return {reinterpret_cast<uint8_t*>(begin + region.codes),
          reinterpret_cast<float*>(begin + region.scales)};
}

// Rows whose row r is row r.
inline Rows without_tokens(Rows rows) {
  rows.token = nullptr;
  return rows;
}

inline Tuning tuning_of(int32_t block_turns, const KernelPlan& kernels) {
  return {.ctas_per_sm = std::max<int>(block_turns, 1), .plan = kernels.get()};
}

// Runs the steps of a call. The observer, unless null, sees each begin and end.
class StepRunner {
 public:
  StepRunner(const Backend& backend, StepObserver* observer)
      : steps_(backend.steps), observer_(observer) {}

  // run(&Steps::combine, {...})
  template <class Args>
  void operator()(StepRow<Args> Steps::*row, const std::type_identity_t<Args>& args) const {
    const StepRow<Args>& step = steps_.*row;
    if (observer_) observer_->begin(step.name);
    step.run(args);
    if (observer_) observer_->end(step.name);
  }

 private:
  const Steps& steps_;
  StepObserver* observer_;
};

// Quantises the rows of the call's tokens in X or dO to their places in `all`. Of grouped rows only
// those that have an expert.
template <class Call>
void quantize_tokens(const StepRunner& run, StepRow<QuantizeRows> Steps::*step, const Call& call,
                     const tilemoe_tensor& X, const Fp8Rows& all) {
  const tilemoe_experts& experts = call.experts;
  const int64_t first = call.part ? call.part->first_token : 0;
  const tilemoe_tensor rows = tokens_of(X, call.part);
  if (rows.shape[0] == 0) return;
  run(step,
      {.values = rows,
       .out = {all.codes + first * experts.d, all.scales + first * blocks_of(experts.d, kFp8Tile)},
       .float_scales = experts.float_scales != 0,
       .stream = call.args.stream,
       .end = call.routing.spec.kind == TILEMOE_ROUTING_GROUPED ? call.routing.offsets + experts.E
                                                                : nullptr});
}

}  // namespace tilemoe
