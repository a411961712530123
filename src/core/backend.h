// The contract between the layer and the backends: the names of the steps (core/step_arguments.h has their
// arguments), and the functions of a backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/step_arguments.h"

namespace tilemoe {

// The names of the steps as tables and JSON have them.
namespace step {
#define STEP(ARGS, NAME, RUN, SCRATCH_BYTES) inline constexpr const char* NAME = #NAME;
#include "core/backend.inc"
}  // namespace step

// The observer of a call, for example the clock of a benchmark.
class StepObserver {
 public:
  virtual ~StepObserver() = default;
  virtual void begin(const char* step) = 0;
  virtual void end(const char* step) = 0;
};

// The kernels that Backend::plan() found for a call; null on a backend that has none to choose
// from.
using KernelPlan = std::shared_ptr<const cuda::ExpertsPlan>;

inline size_t no_scratch_bytes(const tilemoe_experts&, const ScratchSizes&) {
  return 0;
}

template <class Args>
struct StepRow {
  const char* name;
  size_t (*scratch_bytes)(const tilemoe_experts& experts, const ScratchSizes& sizes);
  void (*run)(const Args& args);
};

// The steps of a backend: the rows of core/backend.inc with the functions of its namespace.
struct Steps {
#define STEP(ARGS, NAME, RUN, SCRATCH_BYTES) StepRow<ARGS> NAME;
#include "core/backend.inc"
};

// The tensors of one call of the layer, checked; dO and gradients are absent in forward.
struct LayerTensors {
  const tilemoe_experts& experts;
  const tilemoe_routing_spec& routing;
  const tilemoe_weights& weights;
  tilemoe_tensor X, dO;
  const tilemoe_weights& gradients;
};

// A call, as far as the choice of its kernels depends on it: the sizes and strides of tensors and rows,
// and which of them are present.
struct PlanRequest {
  const tilemoe_experts& experts;
  const Rows& rows;
  const tilemoe_weights& weights;
  // Columns of a block of Y, of dX~, and of dX~ if dH lies over H.
  int64_t Y_columns, dX_columns, dX_columns_over_H;
};

// What decides whether forward reads quantised weights as their codes: the weights have the shapes
// and strides of their values. Of both of the experts' GEMMs.
struct CodesRequest {
  const tilemoe_experts& experts;
  const tilemoe_weights& weights;
  int64_t capacity;
  const cuda::ExpertsPlan* plan;
};
struct CodesRead {
  bool W1 = false, W2 = false;
};

// The functions of a device's backend.
struct Backend {
  // One line for `tilemoe info`.
  std::string (*description)();
  // Throws Error(kUnsupported) with the reason if this backend cannot run these experts.
  void (*check_supported)(const tilemoe_experts& experts);
  // The same if a call of the layer exceeds a limit of this backend's kernels.
  void (*check_limits)(const LayerTensors& tensors);
  // The kernels of a call, or an error if they cannot run: nothing is written or launched.
  KernelPlan (*plan)(const PlanRequest& request);
  // Which quantised weights the up- and the down-projection read as their codes: these need not be
  // dequantised. Null: none.
  CodesRead (*reads_codes)(const CodesRequest& request);
  // Whether the activation gradient of these experts can write dH as codes, too. Null: of none.
  bool (*writes_dH_codes)(const tilemoe_experts& experts);
  // A plan without kernels, for the sizes of calls on a device with this number of SMs and this arch
  // (null or "auto": any of this build), which need not exist here. Null on a backend whose sizes
  // depend on no device.
  KernelPlan (*plan_without_device)(const tilemoe_experts& experts, int sms, const char* arch);

  Steps steps;

#define FUNCTION(RESULT, NAME, ARGUMENTS) RESULT(*NAME) ARGUMENTS;
#include "core/backend.inc"
};

// The backend of a device. Throws Error(kUnsupported) with the reason if this build or machine has
// none.
const Backend& backend_for(tilemoe_device device);
// The same without a device to run on: for sizes. Throws if this build has none.
const Backend& backend_of_build(tilemoe_device device);
const Backend& cpu_backend();

// Threads of the CPU backend (cpu/thread_pool.h); 0: one per core.
void set_num_threads(int threads);
int num_threads() noexcept;

}  // namespace tilemoe
