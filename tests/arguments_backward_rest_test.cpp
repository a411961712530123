// tilemoe_backward in stages: what mode REST must refuse after either first stage.
#include "arguments_layer_problem.h"

namespace tilemoe::arguments {
namespace {

// After the call that left dH, before one for the rest.
template <tilemoe_backward_mode kFirst>
struct Rest : LayerProblem {
  Rest() {
    require(tilemoe_forward(&experts, &forward));
    all = dweights;
    tilemoe_backward_args first = backward;
    first.mode = kFirst;
    first.dX = first.addend = {};
    dweights.W1 = dweights.b1 = {};
    require(tilemoe_backward(&experts, &first));
    ds = backward.ds;
    backward.mode = TILEMOE_BACKWARD_REST;
    backward.dO = backward.ds = {};
    backward.addend = backward.dX;
    dweights = all;
    dweights.W2 = dweights.b2 = {};
  }
  const char* function() const { return "tilemoe_backward"; }
  tilemoe_status call() { return tilemoe_backward(&experts, &backward); }

  // A whole backward, which leaves no dH.
  void whole_backward() {
    tilemoe_backward_args whole = backward;
    whole.mode = TILEMOE_BACKWARD_WHOLE;
    whole.dO = forward.O;
    require(tilemoe_backward(&experts, &whole));
  }

  tilemoe_tensor ds;
  tilemoe_weights all;
};

constexpr uint32_t kOfW1 = TILEMOE_GRADIENT_W1 | TILEMOE_GRADIENT_B1;

// After either: only dX, dW1 and db1 follow from dH, and forward writes another H.
template <class Problem>
std::vector<BadCase<Problem>> cases_of_both() {
  return {
      {"ds", [](Problem& p) { p.backward.ds = p.ds; }, {"mode is REST", "ds"}},
      {"dW2", [](Problem& p) { p.dweights.W2 = p.all.W2; }, {"mode is REST", "dW2"}},
      {"db2", [](Problem& p) { p.dweights.b2 = p.all.b2; }, {"mode is REST", "db2"}},
      {"addend without dX", [](Problem& p) { p.backward.dX = {}; }, {"addend", "dX"}},
      {"after another forward",
       [](Problem& p) { p.require(tilemoe_forward(&p.experts, &p.forward)); },
       {"mode is REST", "OVER_H or FIRST"}},
      {"no workspace", [](Problem& p) { p.backward.workspace = nullptr; }, {"workspace"}},
  };
}

TEST(BackwardRest, AfterFirst) {
  using Problem = Rest<TILEMOE_BACKWARD_FIRST>;
  auto cases = cases_of_both<Problem>();
  const std::vector<BadCase<Problem>> more = {
      {"no first call",
       [](Problem& p) { p.saved.state = TILEMOE_SAVED_H; },
       {"mode is REST", "OVER_H or FIRST"}},
      {"after a whole backward",
       [](Problem& p) { p.whole_backward(); },
       {"mode is REST", "OVER_H or FIRST"}},
      {"another workspace",
       [](Problem& p) { p.backward.workspace = static_cast<char*>(p.backward.workspace) + 256; },
       {"mode is REST", "the workspace"}},
      {"one byte short of what it asks for",
       [](Problem& p) {
         p.backward.workspace_bytes =
             p.backward_workspace(TILEMOE_BACKWARD_FIRST, TILEMOE_GRADIENT_X | kOfW1) - 1;
       },
       {"workspace", "bytes"}},
      {"the workspace of a call after OVER_H",
       [](Problem& p) {
         p.backward.dX = p.backward.addend = {};
         p.backward.workspace_bytes = p.backward_workspace(TILEMOE_BACKWARD_REST, kOfW1);
       },
       {"workspace", "bytes"}},
  };
  cases.insert(cases.end(), more.begin(), more.end());
  run_cases(cases);
}

TEST(BackwardRest, AfterOverH) {
  using Problem = Rest<TILEMOE_BACKWARD_OVER_H>;
  auto cases = cases_of_both<Problem>();
  for (const tilemoe_backward_mode mode :
       {TILEMOE_BACKWARD_WHOLE, TILEMOE_BACKWARD_OVER_H, TILEMOE_BACKWARD_FIRST})
    cases.push_back({"mode " + std::to_string(mode),
                     [mode](Problem& p) {
                       p.backward.mode = mode;
                       p.backward.dO = p.forward.O;
                     },
                     {"consumed", "forward again"}});
  const std::vector<BadCase<Problem>> more = {
      {"a state that no call leaves",
       [](Problem& p) { p.saved.state = static_cast<tilemoe_saved_state>(4); },
       {"saved.state is 4"}},
      {"dX with the workspace of dW1 and db1 alone",
       [](Problem& p) {
         p.backward.workspace_bytes = p.backward_workspace(TILEMOE_BACKWARD_REST, kOfW1);
       },
       {"workspace", "bytes"}},
  };
  cases.insert(cases.end(), more.begin(), more.end());
  run_cases(cases);
}

// dH that nothing in its own call asks for is there for the next.
TEST(BackwardRest, DHIsComputedThoughNothingAsksForIt) {
  for (const tilemoe_backward_mode mode : {TILEMOE_BACKWARD_FIRST, TILEMOE_BACKWARD_OVER_H}) {
    LayerProblem whole, divided;
    for (LayerProblem* p : {&whole, &divided})
      p->require(tilemoe_forward(&p->experts, &p->forward));
    whole.require(tilemoe_backward(&whole.experts, &whole.backward));
    tilemoe_backward_args first = divided.backward, second = divided.backward;
    first.mode = mode, second.mode = TILEMOE_BACKWARD_REST;
    first.dX = first.addend = first.ds = {};
    first.dweights = nullptr;
    divided.require(tilemoe_backward(&divided.experts, &first));
    const bool over_H = mode == TILEMOE_BACKWARD_OVER_H;
    EXPECT_EQ(divided.saved.state, over_H ? TILEMOE_SAVED_DH_OVER_H : TILEMOE_SAVED_H_AND_DH);
    EXPECT_EQ(divided.saved.dH, over_H ? nullptr : first.workspace);
    second.dO = second.ds = divided.dweights.W2 = divided.dweights.b2 = {};
    divided.require(tilemoe_backward(&divided.experts, &second));
    EXPECT_EQ(std::memcmp(whole.backward.dX.data, second.dX.data, sizeof(float[kT * kD])), 0);
    EXPECT_EQ(std::memcmp(whole.dweights.W1.data, divided.dweights.W1.data,
                          sizeof(float[kE * 2 * kN * kD])),
              0);
  }
}

// What lies where dO is to be, or nothing at all, is not looked at.
TEST(BackwardRest, DOIsNotRead) {
  Rest<TILEMOE_BACKWARD_OVER_H> p;
  p.backward.dO = p.backward.dX;
  EXPECT_EQ(p.call(), TILEMOE_SUCCESS) << tilemoe_last_error();
}

}  // namespace
}  // namespace tilemoe::arguments
