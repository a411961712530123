// tilemoe_backward without dO, which goes on from the dH of an earlier call: what it must refuse.
#include "arguments_layer_problem.h"

namespace tilemoe::arguments {
namespace {

// After the call that kept dH, before one for the rest.
template <bool kOverH>
struct GoingOn : LayerProblem {
  GoingOn() {
    require(tilemoe_forward(&experts, &forward));
    dO = backward.dO, ds = backward.ds, dweights = backward.dweights;
    backward.overwrite_H = kOverH;
    tilemoe_backward_args first = backward;
    first.keep_dH = 1;
    first.dX = first.addend = {};
    first.dweights.W1 = first.dweights.b1 = {};
    require(tilemoe_backward(&experts, &first));
    backward.dO = backward.ds = backward.dweights.W2 = backward.dweights.b2 = {};
    backward.addend = backward.dX;
  }
  const char* function() const { return "tilemoe_backward"; }
  tilemoe_status call() { return tilemoe_backward(&experts, &backward); }

  // A whole backward that keeps no dH.
  void backward_that_keeps_nothing() {
    tilemoe_backward_args whole = backward;
    whole.dO = dO, whole.ds = ds;
    require(tilemoe_backward(&experts, &whole));
  }

  tilemoe_tensor dO, ds;
  tilemoe_weights dweights;
};

// Of either kind: only dX, dW1 and db1 follow from dH, and forward writes another H.
template <class Problem>
std::vector<BadCase<Problem>> cases_of_both() {
  return {
      {"ds", [](Problem& p) { p.backward.ds = p.ds; }, {"dO is absent", "ds"}},
      {"dW2", [](Problem& p) { p.backward.dweights.W2 = p.dweights.W2; }, {"dO is absent", "dW2"}},
      {"db2", [](Problem& p) { p.backward.dweights.b2 = p.dweights.b2; }, {"dO is absent", "db2"}},
      {"addend without dX", [](Problem& p) { p.backward.dX = {}; }, {"addend", "dX"}},
      {"after another forward",
       [](Problem& p) { p.require(tilemoe_forward(&p.experts, &p.forward)); },
       {"dO"}},
      {"no workspace", [](Problem& p) { p.backward.workspace = nullptr; }, {"workspace"}},
  };
}

TEST(KeptDH, InTheWorkspace) {
  using Problem = GoingOn<false>;
  auto cases = cases_of_both<Problem>();
  const std::vector<BadCase<Problem>> more = {
      {"never kept",
       [](Problem& p) { p.saved.dH_workspace = nullptr; },
       {"dO is absent", "keep_dH"}},
      {"after a backward that kept none",
       [](Problem& p) { p.backward_that_keeps_nothing(); },
       {"dO is absent", "keep_dH"}},
      {"another workspace",
       [](Problem& p) { p.backward.workspace = static_cast<char*>(p.backward.workspace) + 256; },
       {"dO is absent", "the workspace"}},
      {"over an H that is whole", [](Problem& p) { p.backward.overwrite_H = 1; }, {"dO"}},
      {"consumed", [](Problem& p) { p.saved.consumed = 1; }, {"consumed", "forward again"}},
      {"one byte short of the whole backward's workspace",
       [](Problem& p) {
         p.backward.workspace_bytes = p.workspace_bytes(TILEMOE_PASS_BACKWARD) - 1;
       },
       {"workspace", "bytes"}},
      {"the rest's workspace",
       [](Problem& p) {
         p.backward.dX = p.backward.addend = {};
         p.backward.workspace_bytes = p.workspace_bytes(TILEMOE_PASS_BACKWARD_REST);
       },
       {"workspace", "bytes"}},
  };
  cases.insert(cases.end(), more.begin(), more.end());
  run_cases(cases);
}

TEST(KeptDH, OverH) {
  using Problem = GoingOn<true>;
  auto cases = cases_of_both<Problem>();
  const std::vector<BadCase<Problem>> more = {
      {"not over H", [](Problem& p) { p.backward.overwrite_H = 0; }, {"consumed", "forward again"}},
      {"a state that no call leaves",
       [](Problem& p) { p.saved.consumed = 2; },
       {"consumed", "forward again"}},
      {"dX with the workspace of dW1 and db1 alone",
       [](Problem& p) {
         p.backward.workspace_bytes = p.workspace_bytes(TILEMOE_PASS_BACKWARD_REST);
       },
       {"workspace", "bytes"}},
  };
  cases.insert(cases.end(), more.begin(), more.end());
  run_cases(cases);
}

// dH that nothing in its own call asks for is there for the next.
TEST(KeptDH, IsComputedThoughNothingAsksForIt) {
  for (const int32_t over_h : {0, 1}) {
    LayerProblem whole, divided;
    for (LayerProblem* p : {&whole, &divided}) {
      p->backward.overwrite_H = over_h;
      p->require(tilemoe_forward(&p->experts, &p->forward));
    }
    whole.require(tilemoe_backward(&whole.experts, &whole.backward));
    tilemoe_backward_args first = divided.backward, second = divided.backward;
    first.keep_dH = 1;
    first.dX = first.addend = first.ds = {};
    first.dweights = {};
    second.dO = second.ds = second.dweights.W2 = second.dweights.b2 = {};
    divided.require(tilemoe_backward(&divided.experts, &first));
    EXPECT_EQ(divided.saved.consumed, over_h);
    EXPECT_EQ(divided.saved.dH_workspace, over_h ? nullptr : first.workspace);
    divided.require(tilemoe_backward(&divided.experts, &second));
    EXPECT_EQ(std::memcmp(whole.backward.dX.data, second.dX.data, sizeof(float[kT * kD])), 0);
    EXPECT_EQ(std::memcmp(whole.backward.dweights.W1.data, second.dweights.W1.data,
                          sizeof(float[kE * 2 * kN * kD])),
              0);
  }
}

}  // namespace
}  // namespace tilemoe::arguments
