#include "cpu/cpu_backend.h"

#include <dnnl.h>

#include "cpu/elementwise.h"
#include "cpu/thread_pool.h"
#include "cpu/tiles.h"

namespace tilemoe::cpu {
namespace {

std::string description() {
  const dnnl_version_t* onednn = dnnl_version();
  const int threads = num_threads();
  Text text;
  text << "cpu: " << threads << (threads == 1 ? " thread, " : " threads, ") << vector_target()
       << ", oneDNN " << onednn->major << "." << onednn->minor << "." << onednn->patch;
  return text.str();
}

// Everything that the interface accepts runs here.
void check_supported(const tilemoe_experts&) {}
void check_limits(const LayerTensors&) {}

size_t projection_scratch_bytes(const tilemoe_experts& experts, const ScratchSizes& sizes) {
  return StepScratch::bytes(experts, sizes.capacity);
}
constexpr auto weight_gradient_1_scratch_bytes = projection_scratch_bytes;
constexpr auto weight_gradient_2_scratch_bytes = projection_scratch_bytes;
constexpr auto bias_gradient_scratch_bytes = no_scratch_bytes;

constexpr Backend kBackend = {
    .description = description,
    .check_supported = check_supported,
    .check_limits = check_limits,
    .plan = nullptr,
    .reads_codes = nullptr,
    .writes_dH_codes = nullptr,
    .plan_without_device = nullptr,
#define STEP(ARGS, NAME, RUN, SCRATCH_BYTES) {#NAME, SCRATCH_BYTES, RUN},
    .steps =
        {
#include "core/backend.inc"
        },
#define FUNCTION(RESULT, NAME, ARGUMENTS) .NAME = NAME,
#include "core/backend.inc"
};

}  // namespace

const Backend& backend() {
  num_threads();
  return kBackend;
}

}  // namespace tilemoe::cpu
