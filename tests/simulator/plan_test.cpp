// The plan of a call: made once for forward and backward, before anything is written, and changed by
// nothing that happens within the call.
#include "cuda/plan.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "cuda/arch.h"
#include "simulator/machine/machine.h"
#include "simulator/setting.h"
#include "tilemoe/error.h"
#include "verify/problem.h"
#include "verify/registry.h"

namespace tilemoe {
namespace {

using simulator::Machine;

void simulate(const char* setting_name) {
  const simulator::Setting& setting = simulator::setting_of(setting_name);
  Machine::instance().set_device(setting.device);
  ASSERT_EQ(tilemoe_set_cuda_arch(setting.arch), TILEMOE_SUCCESS) << tilemoe_last_error();
}

verify::Inputs inputs_of(const char* name) {
  return verify::make_inputs(*verify::find_case(name), 1);
}

// A layer of bfloat16 and SwiGLU; nothing in it has data.
struct Layer {
  tilemoe_experts experts{};
  tilemoe_weights weights{};
  Rows rows{.E = 4, .capacity = 64};

  Layer() {
    experts.dtype = TILEMOE_BFLOAT16, experts.activation = TILEMOE_SWIGLU;
    experts.E = 4, experts.d = 128, experts.n = 64;
    for (tilemoe_tensor* W : {&weights.W1, &weights.W2}) W->stride[1] = 128, W->stride[2] = 1;
  }
  KernelPlan plan() const {
    return cuda::plan_for({.experts = experts,
                           .rows = rows,
                           .weights = weights,
                           .Y_columns = experts.d,
                           .dX_columns = experts.d,
                           .dX_columns_over_H = experts.d});
  }
};

uint64_t device_queries_of(const auto& call) {
  const uint64_t before = Machine::instance().device_queries();
  call();
  return Machine::instance().device_queries() - before;
}

TEST(Plan, CallsReadTheirDeviceOnce) {
  simulate("sm90");
  const verify::Inputs inputs = inputs_of("biases/bfloat16");
  verify::Problem problem(inputs, verify::cuda_memory());
  problem.run();  // the first call reads properties
  problem.route();
  const ForwardArgs forward = problem.forward_args();
  EXPECT_EQ(device_queries_of([&] { problem.experts().forward(forward); }), 1u);
  const BackwardArgs backward = problem.backward_args();
  EXPECT_EQ(device_queries_of([&] { problem.experts().backward(backward); }), 1u);
}

TEST(Plan, IsMadeOnceForForwardAndBackward) {
  simulate("sm90");
  Layer layer;
  const KernelPlan made = layer.plan();
  ASSERT_NE(made, nullptr);
  EXPECT_EQ(layer.plan(), made);
  for (const auto& planned : {made->up_projection, made->down_projection, made->activation_gradient,
                              made->input_gradient[0]})
    EXPECT_NE(planned.kernel, nullptr);

  layer.weights.W2.stride[1] = 1, layer.weights.W2.stride[2] = 128;
  EXPECT_NE(layer.plan()->down_projection.kernel, made->down_projection.kernel);
  layer.rows.capacity = 65;
  EXPECT_NE(layer.plan(), made);
}

// A plan has the kernels with adapters of a layer with ranks, and a step with an adapter finds them.
TEST(Plan, HasTheKernelsOfAdapters) {
  for (const char* setting : {"sm80-on-90", "sm90"}) {  // of one device
    simulate(setting);
    Layer layer;
    const KernelPlan without = layer.plan();
    layer.experts.rank_1 = 16;
    const KernelPlan of_W1 = layer.plan();
    layer.experts.rank_1 = 0, layer.experts.rank_2 = 16;
    const KernelPlan of_W2 = layer.plan();

    UpProjection up{};
    up.experts = &layer.experts, up.rows = layer.rows, up.weights.W1 = layer.weights.W1;
    DownProjection down{};
    down.experts = &layer.experts, down.rows = layer.rows, down.W2 = layer.weights.W2;
    down.Y.shape[1] = layer.experts.d;
    ActivationGradient activation{};
    activation.experts = &layer.experts, activation.rows = layer.rows;
    activation.W2 = layer.weights.W2;
    InputGradient input{};
    input.experts = &layer.experts, input.rows = layer.rows, input.weights = up.weights;
    input.dH.shape[1] = 2 * layer.experts.n, input.dX_rows.shape[1] = layer.experts.d;
    const auto expect = [&](auto& step, auto planned, const KernelPlan& with,
                            const KernelPlan& other) {
      EXPECT_EQ(planned(*other), cuda::kernel_of(step));
      EXPECT_NE(planned(*with), cuda::kernel_of(step));
      step.adapter.rows.ndim = 2;
      EXPECT_TRUE(cuda::key_of(step).variant.adapter);
      EXPECT_EQ(planned(*with), cuda::kernel_of(step));
      EXPECT_EQ(planned(*without), planned(*other));
    };
    expect(
        up, [](const auto& plan) { return plan.up_projection.kernel; }, of_W1, of_W2);
    expect(
        down, [](const auto& plan) { return plan.down_projection.kernel; }, of_W2, of_W1);
    expect(
        activation, [](const auto& plan) { return plan.activation_gradient.kernel; }, of_W2, of_W1);
    expect(
        input, [](const auto& plan) { return plan.input_gradient[0].kernel; }, of_W1, of_W2);
  }
}

// Forward and backward each have the kernels of their recipe.
TEST(Plan, HasTheKernelsOfTheRecipe) {
  simulate("sm90");
  Layer layer;
  const auto is_fp8 = [](const cuda::ProjectionPlan& planned) {
    const auto place = static_cast<size_t>(planned.kernel - cuda::instances::kIndex.tile.data());
    const cuda::instances::Row& row = cuda::instances::kRows[cuda::instances::kIndex.row[place]];
    return cuda::is_fp8(row.key.variant.recipe);
  };
  for (const tilemoe_recipe recipe :
       {TILEMOE_RECIPE_BF16, TILEMOE_RECIPE_FP8, TILEMOE_RECIPE_FP8_FORWARD}) {
    layer.experts.recipe = recipe;
    const KernelPlan plan = layer.plan();
    EXPECT_EQ(layer.plan(), plan);
    for (const auto& planned : {plan->up_projection, plan->down_projection})
      EXPECT_EQ(is_fp8(planned), recipe != TILEMOE_RECIPE_BF16);
    for (const auto& planned :
         {plan->activation_gradient, plan->input_gradient[0], plan->input_gradient[1]})
      EXPECT_EQ(is_fp8(planned), recipe == TILEMOE_RECIPE_FP8);
  }
}

// A query that describes a device has the sizes of that device.
TEST(Plan, SizesOfADescribedDevice) {
  simulate("sm90");
  tilemoe_experts experts{};
  experts.struct_size = sizeof experts;
  experts.device = TILEMOE_CUDA, experts.dtype = TILEMOE_BFLOAT16;
  experts.d = 128, experts.n = 64, experts.E = 2;
  tilemoe_routing_spec spec{};
  spec.struct_size = sizeof spec;
  spec.device = TILEMOE_CUDA, spec.T = 1 << 20, spec.E = 2, spec.K = 1;
  const auto bytes_of = [&](int32_t sms, const char* arch) {
    tilemoe_workspace_query query{};
    query.struct_size = sizeof query;
    query.experts = &experts, query.routing = &spec, query.pass = TILEMOE_PASS_BACKWARD;
    // Only the partial sums of long experts, whose number depends on the SMs.
    query.mode = TILEMOE_BACKWARD_REST, query.gradients = TILEMOE_GRADIENT_W1;
    query.cuda_sms = sms, query.cuda_arch = arch;
    size_t bytes = 0;
    EXPECT_EQ(tilemoe_workspace_bytes(&query, &bytes), TILEMOE_SUCCESS) << tilemoe_last_error();
    return bytes;
  };
  const int sms = simulator::setting_of("sm90").device.sms;
  EXPECT_EQ(bytes_of(sms, nullptr), bytes_of(0, nullptr));
  EXPECT_EQ(bytes_of(sms, "sm90"), bytes_of(0, nullptr));
  EXPECT_EQ(device_queries_of([&] { bytes_of(sms, "sm90"); }), 0u);
  EXPECT_LT(bytes_of(1, nullptr), bytes_of(sms, nullptr));
}

TEST(Plan, OfACallKeepsItsArch) {
  simulate("sm90");
  const Layer layer;
  const KernelPlan made = layer.plan();
  EXPECT_EQ(made->arch, cuda::ArchName::kSm90);
  ASSERT_EQ(tilemoe_set_cuda_arch("sm80"), TILEMOE_SUCCESS);
  EXPECT_EQ(made->arch, cuda::ArchName::kSm90);
  EXPECT_EQ(cuda::arch_of(made.get()), cuda::ArchName::kSm90);
  EXPECT_EQ(layer.plan()->arch, cuda::ArchName::kSm80);
  ASSERT_EQ(tilemoe_set_cuda_arch("sm90"), TILEMOE_SUCCESS);
  EXPECT_EQ(layer.plan()->arch, cuda::ArchName::kSm90);
}

#ifdef TILEMOE_WITH_SM100
TEST(Plan, RefusesBeforeACallWrites) {
  setenv("TILEMOE_2CTA", "maybe", 1);
  simulate("sm100");
  const verify::Inputs inputs = inputs_of("smallest/bfloat16");
  verify::Problem problem(inputs, verify::cuda_memory());
  problem.poison();
  problem.route();
  const auto before = problem.fingerprints();
  const ForwardArgs args = problem.forward_args();
  EXPECT_THROW(problem.experts().forward(args), Error);
  EXPECT_TRUE(problem.outputs_other_than(before).empty());
  EXPECT_TRUE(problem.H_is_poisoned());

  // A valid value then holds for the process.
  setenv("TILEMOE_2CTA", "0", 1);
  EXPECT_NO_THROW(problem.experts().forward(args));
  setenv("TILEMOE_2CTA", "maybe", 1);
  EXPECT_NO_THROW(problem.experts().forward(args));
  EXPECT_FALSE(problem.H_is_poisoned());
  unsetenv("TILEMOE_2CTA");
}
#endif

}  // namespace
}  // namespace tilemoe
