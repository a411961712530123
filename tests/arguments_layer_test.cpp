// tilemoe_forward and tilemoe_backward: each argument wrong in every way, outputs over other
// arrays, and the second stage of a backward after either first one.
#include <limits>

#include "arguments_layer_problem.h"
#include "core/activation_kinds.h"

namespace tilemoe::arguments {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Arguments of both passes.
template <class P>
Cases<P> shared_cases(bool split) {
  Cases<P> cases = {
    BAD(p.experts_pointer = nullptr, "experts is null"),
    BAD(p.args_pointer = nullptr, "args is null"),
    BAD(p.experts.struct_size = 8, "struct_size"),
    BAD(p.args().struct_size = 0, "struct_size is 0"),
    BAD(p.args().weights = nullptr, "weights is null"),
    BAD(p.weights.struct_size = 0, "weights.struct_size"),
    BAD(p.args().dry_run = 2, "dry_run is 2"),
    BAD(p.use_part().struct_size = 8, "part.struct_size"),
    BAD(p.use_part().reserved = 1, "reserved is 1"),
    BAD(p.use_part().last = 2, "part.last is 2"),
    BAD(p.use_part().begins = nullptr, "part"),
    BAD(p.use_part().ends = nullptr, "part"),
    BAD(p.use_part().first_token = -1, "part"),
    BAD(p.use_part().tokens = p.spec.T + 1, "part"),
    BAD(p.use_part().tokens = INT64_MIN, "part"),
    BAD(p.use_part().first_token = INT64_MAX, "part"),
    BAD(p.args().routing = nullptr, "routing is null"),
    BAD(p.routing.struct_size = 1, "routing.struct"),
    BAD(p.unbind(), "routing", "bind"),
    BAD(p.routing.offsets = nullptr, "routing"),
    BAD(p.routing.counters = nullptr, "routing"),
    BAD(p.routing.row_score = nullptr, "routing"),
    BAD(p.routing.spec.capacity += 16, "routing"),
    BAD(p.routing.spec.capacity = -1, "capacity is -1"),
    BAD(p.routing.spec.kind = tilemoe_routing_kind(4), "kind"),
    BAD(p.routing.spec.kind = TILEMOE_ROUTING_GENERAL, "routing"),
    BAD(p.routing.spec.E = 4),
    BAD(p.experts.E = 6, "E is 6", "5"),
    BAD(p.routing.spec.device = TILEMOE_CUDA, "device"),
    BAD(p.set_device(tilemoe_device(9)), "device is 9"),
    BAD(p.experts.device = TILEMOE_CUDA, "device"),
    UNSUPPORTED(p.set_device(TILEMOE_CUDA), "CUDA"),
    BAD(p.experts.dtype = TILEMOE_INT32, "dtype is int32"),
    BAD(p.experts.dtype = tilemoe_dtype(77), "dtype"),
    BAD(p.experts.activation = TILEMOE_RELU;
        p.experts.gate_layout = TILEMOE_GATE_INTERLEAVED, "relu", "gate_layout"),
    BAD(p.experts.activation = TILEMOE_GEGLU; p.experts.clamp = 7, "clamp", "geglu"),
    BAD(p.experts.clamp = -1, "clamp is -1"),
    BAD(p.experts.clamp = kNan, "clamp"),
    BAD(p.experts.alpha = kInfinity, "alpha is inf"),
    BAD(p.experts.up_shift = kNan, "up_shift"),
    BAD(p.args().workspace_bytes = p.needed() - 1, "workspace", "bytes"),
    BAD(p.args().workspace_bytes = 0, "0 bytes"),
    BAD(p.args().workspace = nullptr, "workspace is null"),
    BAD(p.args().workspace = static_cast<char*>(p.args().workspace) + 8, "workspace", "16 bytes"),
  };
  BAD_VALUES(cases, "block_turns", p.args().block_turns = int32_t(v), -1, 17);
  BAD_VALUES(cases, "column_blocks", p.experts.column_blocks = int32_t(v), -1);
  BAD_VALUES(cases, "activation", p.experts.activation = tilemoe_activation(v), kActivationCount,
             -1);
  BAD_VALUES(cases, "gate_layout", p.experts.gate_layout = tilemoe_gate_layout(v), 3);
  BAD_VALUES(cases, "E", p.experts.E = v, 0, -5, INT64_MAX);
  BAD_VALUES(cases, "d", p.experts.d = v, 0, -8, 12, 7, int64_t{1} << 40, INT64_MAX, INT64_MIN);
  BAD_VALUES(cases, "n", p.experts.n = v, 0, -8, 12, 7, int64_t{1} << 40, INT64_MAX, INT64_MIN);
  BAD_TENSOR(cases, weights.W1, .layout = Layout::kMatrix, .aligned = true);
  BAD_TENSOR(cases, weights.W2, .layout = Layout::kMatrix, .aligned = true);
  BAD_TENSOR(cases, weights.b1, .layout = Layout::kRows, .optional = true, .aligned = true);
  BAD_TENSOR(cases, weights.b2, .layout = Layout::kRows, .optional = true, .aligned = true);
  if (split) {
    BAD_TENSOR(cases, weights.W1_up, .layout = Layout::kMatrix, .aligned = true);
    BAD_TENSOR(cases, weights.b1_up, .layout = Layout::kRows, .aligned = true);
    cases.push_back(BAD(p.weights.b1 = {}, "weights.b1", "b1_up"));
  } else {
    cases.push_back(BAD(p.weights.W1_up = p.weights.W2, "weights.W1_up", "(5, 24, 16)"));
    cases.push_back(BAD(p.weights.b1_up = p.weights.b2, "weights.b1_up", "(5, 24)"));
  }
  BAD_TENSOR(cases, saved.H, .aligned = true);
  return cases;
}

// A call that only checks its arguments. Its workspace is none of them.
template <bool kBackward>
struct DryRun : Pass<kBackward> {
  DryRun() {
    this->args().dry_run = 1;
    this->args().workspace = nullptr, this->args().workspace_bytes = 0;
  }
};
template <class P>
constexpr bool kIsDryRun = std::is_same_v<P, DryRun<false>> || std::is_same_v<P, DryRun<true>>;

template <class P>
void run_cases_of(Cases<P> cases) {
  EXPECT_GT(cases.size(), 250u);  // or the table was not built
  if (kIsDryRun<P>)
    std::erase_if(cases,
                  [](const auto& bad) { return bad.name.find("workspace") != bad.name.npos; });
  run_cases(cases);
}

template <class P = Pass<false>>
void run_forward_cases(bool split = false) {
  auto cases = shared_cases<P>(split);
  BAD_TENSOR(cases, forward.X, .layout = Layout::kRows, .aligned = true);
  BAD_TENSOR(cases, forward.O, .layout = Layout::kRows, .aligned = true);
  BAD_TENSOR(cases, forward.addend, .layout = Layout::kRows, .optional = true, .aligned = true);
  run_cases_of(cases);
}

template <class P = Pass<true>>
void run_backward_cases(bool split = false) {
  auto cases = shared_cases<P>(split);
  const Argument optional_rows{.layout = Layout::kRows, .optional = true, .aligned = true};
  const Argument optional_matrix{.layout = Layout::kMatrix, .optional = true, .aligned = true};
  BAD_TENSOR(cases, backward.X, .layout = Layout::kRows, .aligned = true);
  BAD_TENSOR(cases, backward.dO, .layout = Layout::kRows, .aligned = true);
  BAD_TENSOR(cases, backward.dX, optional_rows);
  BAD_TENSOR(cases, backward.addend, optional_rows);
  BAD_TENSOR(cases, backward.ds, .optional = true);
  BAD_TENSOR(cases, dweights.W1, optional_matrix);
  BAD_TENSOR(cases, dweights.W2, optional_matrix);
  BAD_TENSOR(cases, dweights.b1, optional_rows);
  BAD_TENSOR(cases, dweights.b2, optional_rows);
  if (split) {
    BAD_TENSOR(cases, dweights.W1_up, optional_matrix);
    BAD_TENSOR(cases, dweights.b1_up, optional_rows);
  }
  BAD_VALUES(cases, "accumulate", p.backward.accumulate = int32_t(v), -1, 2, INT32_MAX);
  BAD_VALUES(cases, "mode", p.backward.mode = tilemoe_backward_mode(v), -1, 4, 1 << 20);
  BAD_VALUES(cases, "dweights.struct_size", p.dweights.struct_size = uint64_t(v), 0, 8, 4096 + 8);
  BAD_VALUES(cases, "saved.state", p.saved.state = tilemoe_saved_state(v), -1, 4);
  append<P>(cases, {BAD(p.backward.saved = nullptr, "saved is null"),
                    BAD(p.saved.state = TILEMOE_SAVED_DH_OVER_H, "consumed", "forward again"),
                    BAD(p.saved.struct_size = 80, "saved.struct_size"),
                    BAD(p.backward.dX = {}, "addend", "dX")});
  run_cases_of(cases);
}

TEST(ForwardArguments, Routed) {
  run_forward_cases();
}
TEST(ForwardArguments, Split) {
  run_forward_cases<Pass<false, true>>(true);
}
TEST(ForwardArguments, Grouped) {
  run_forward_cases<Pass<false, false, true>>();
}
TEST(BackwardArguments, Routed) {
  run_backward_cases();
}
TEST(BackwardArguments, Split) {
  run_backward_cases<Pass<true, true>>(true);
}
TEST(BackwardArguments, Grouped) {
  run_backward_cases<Pass<true, false, true>>();
}

TEST(ForwardArguments, DryRun) {
  run_forward_cases<DryRun<false>>();
}
TEST(BackwardArguments, DryRun) {
  run_backward_cases<DryRun<true>>();
}

template <bool kBackward>
void expect_nothing_is_written() {
  DryRun<kBackward> p;
  p.saved.state = TILEMOE_SAVED_H;
  if (kBackward) p.backward.mode = TILEMOE_BACKWARD_OVER_H;
  const auto before = p.arena.bytes();
  const auto host_before = p.host_outputs();
  expect_taken(p);
  EXPECT_TRUE(p.arena.bytes() == before);
  EXPECT_TRUE(p.host_outputs() == host_before);
}

TEST(ForwardArguments, DryRunWritesNothing) {
  expect_nothing_is_written<false>();
}
TEST(BackwardArguments, DryRunWritesNothing) {
  expect_nothing_is_written<true>();
}

// The addresses of a dry run may belong to no memory.
TEST(ForwardArguments, DryRunReadsNothing) {
  DryRun<false> p;
  constexpr uintptr_t kNowhere = uintptr_t{1} << 44;
  uintptr_t next = kNowhere;
  const auto nowhere = [&] { return reinterpret_cast<void*>(next += 1 << 20); };
  for (tilemoe_tensor* one : {&p.forward.X, &p.forward.O, &p.forward.addend, &p.saved.H,
                              &p.weights.W1, &p.weights.W2, &p.weights.b1, &p.weights.b2})
    one->data = nowhere();
  const tilemoe_routing_spec spec = p.routing.spec;
  require(tilemoe_routing_bind(&spec, nowhere(), 1 << 20, &p.routing));
  expect_taken(p);
  p.saved.H.data = p.forward.O.data;
  expect_refused(p.call(), "saved.H");
}

// Optional arguments may be left out, alone and together.
TEST(ForwardArguments, OptionalOnesMayBeAbsent) {
  Pass<false> p;
  p.forward.addend = p.weights.b1 = p.weights.b2 = {};
  p.forward.saved = nullptr;
  expect_taken(p);
}

TEST(BackwardArguments, NothingWantedWritesNothing) {
  Pass<true> p;
  p.backward.dX = p.backward.addend = p.backward.ds = {};
  p.backward.dweights = nullptr;
  const auto before = p.arena.bytes();
  expect_taken(p);
  EXPECT_TRUE(p.arena.bytes() == before);
}

TEST(BackwardArguments, TopKMayHaveDsOfEitherShape) {
  Pass<true> p;
  p.backward.ds = tensor(p.backward.ds.data, TILEMOE_FLOAT32, {kT, kK});
  expect_taken(p);
  p.backward.ds = tensor(p.backward.ds.data, TILEMOE_FLOAT32, {kK, kT});
  EXPECT_EQ(p.call(), TILEMOE_INVALID_ARGUMENT);
}

// dH over H consumes the saved state: the second backward is an error, and forward renews it.
TEST(BackwardArguments, ConsumedStateIsRenewedByForward) {
  Pass<true> p;
  require(tilemoe_forward(&p.experts, &p.forward));
  p.backward.mode = TILEMOE_BACKWARD_OVER_H;
  expect_taken(p);
  EXPECT_EQ(p.saved.state, TILEMOE_SAVED_DH_OVER_H);
  const auto before = p.arena.bytes();
  EXPECT_EQ(p.call(), TILEMOE_INVALID_ARGUMENT);
  EXPECT_TRUE(p.arena.bytes() == before);
  require(tilemoe_forward(&p.experts, &p.forward));
  EXPECT_EQ(p.saved.state, TILEMOE_SAVED_H);
  expect_taken(p);
}

// A backward in stages: after the call that left dH, before one of mode REST.
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
template <class P>
Cases<P> cases_of_both() {
  return {BAD(p.backward.ds = p.ds, "mode is REST", "ds"),
          BAD(p.dweights.W2 = p.all.W2, "mode is REST", "dW2"),
          BAD(p.dweights.b2 = p.all.b2, "mode is REST", "db2"),
          BAD(p.backward.dX = {}, "addend", "dX"),
          BAD(require(tilemoe_forward(&p.experts, &p.forward)), "mode is REST", "OVER_H or FIRST"),
          BAD(p.backward.workspace = nullptr, "workspace")};
}

TEST(BackwardRest, AfterFirst) {
  using P = Rest<TILEMOE_BACKWARD_FIRST>;
  auto cases = cases_of_both<P>();
  append<P>(cases, {
    BAD(p.saved.state = TILEMOE_SAVED_H, "mode is REST", "OVER_H or FIRST"),
        BAD(p.whole_backward(), "mode is REST", "OVER_H or FIRST"),
        BAD(p.backward.workspace = static_cast<char*>(p.backward.workspace) + 256, "mode is REST",
            "the workspace"),
        BAD(const auto all = TILEMOE_GRADIENT_X | kOfW1;
            const size_t needed = p.backward_workspace(TILEMOE_BACKWARD_FIRST, all);
            p.backward.workspace_bytes = needed - 1, "workspace", "bytes"),
        BAD(p.backward.dX = p.backward.addend = {};
            const size_t needed = p.backward_workspace(TILEMOE_BACKWARD_REST, kOfW1);
            p.backward.workspace_bytes = needed, "workspace", "bytes")
  });
  run_cases(cases);
}

TEST(BackwardRest, AfterOverH) {
  using P = Rest<TILEMOE_BACKWARD_OVER_H>;
  auto cases = cases_of_both<P>();
  for (const auto mode : {TILEMOE_BACKWARD_WHOLE, TILEMOE_BACKWARD_OVER_H, TILEMOE_BACKWARD_FIRST})
    cases.push_back({"mode " + std::to_string(mode),
                     [mode](P& p) { p.backward.mode = mode, p.backward.dO = p.forward.O; },
                     {"consumed", "forward again"}});
  append<P>(cases, {
    BAD(p.saved.state = tilemoe_saved_state(4), "saved.state is 4"),
        BAD(const size_t needed = p.backward_workspace(TILEMOE_BACKWARD_REST, kOfW1);
            p.backward.workspace_bytes = needed, "workspace", "bytes")
  });
  run_cases(cases);
}

// dH that no output of its own call uses is computed for the next call.
TEST(BackwardRest, DHIsComputedThoughNothingUsesIt) {
  for (const tilemoe_backward_mode mode : {TILEMOE_BACKWARD_FIRST, TILEMOE_BACKWARD_OVER_H}) {
    LayerProblem whole, divided;
    for (LayerProblem* p : {&whole, &divided}) require(tilemoe_forward(&p->experts, &p->forward));
    require(tilemoe_backward(&whole.experts, &whole.backward));
    tilemoe_backward_args first = divided.backward, second = divided.backward;
    first.mode = mode, second.mode = TILEMOE_BACKWARD_REST;
    first.dX = first.addend = first.ds = {};
    first.dweights = nullptr;
    require(tilemoe_backward(&divided.experts, &first));
    const bool over_H = mode == TILEMOE_BACKWARD_OVER_H;
    EXPECT_EQ(divided.saved.state, over_H ? TILEMOE_SAVED_DH_OVER_H : TILEMOE_SAVED_H_AND_DH);
    EXPECT_EQ(divided.saved.dH, over_H ? nullptr : first.workspace);
    second.dO = second.ds = divided.dweights.W2 = divided.dweights.b2 = {};
    require(tilemoe_backward(&divided.experts, &second));
    EXPECT_EQ(values(whole.backward.dX), values(second.dX));
    EXPECT_EQ(values(whole.dweights.W1), values(divided.dweights.W1));
  }
}

// dO is not read: it may be wrong or absent.
TEST(BackwardRest, DOIsNotRead) {
  Rest<TILEMOE_BACKWARD_OVER_H> p;
  p.backward.dO = p.backward.dX;
  expect_taken(p);
}

// ------------------------------------------------- outputs that share memory with something else

// The bytes of an output laid over another array; its strides and shape stay.
void move_to(tilemoe_tensor& tensor, const void* where) {
  tensor.data = const_cast<void*>(where);
}
void* rows_after(const tilemoe_tensor& tensor, int64_t rows) {
  return static_cast<float*>(tensor.data) + rows * kD;
}
#define ALIAS(output, other, ...) BAD(__VA_ARGS__, output, other, "shares memory with")

TEST(LayerAliasing, ForwardRefuses) {
  run_cases<Pass<false, true>>({
      ALIAS("O", "weights.W1", move_to(p.forward.O, p.weights.W1.data)),
      ALIAS("O", "weights.W2", move_to(p.forward.O, p.weights.W2.data)),
      ALIAS("O", "workspace", move_to(p.forward.O, p.forward.workspace)),
      ALIAS("O", "saved.H", move_to(p.forward.O, p.saved.H.data)),
      ALIAS("O", "routing", move_to(p.forward.O, p.routing.row_score)),
      ALIAS("saved.H", "X", move_to(p.forward.X, p.saved.H.data)),
      ALIAS("workspace", "X", move_to(p.forward.X, p.forward.workspace)),
      ALIAS("O", "addend", move_to(p.forward.addend, rows_after(p.forward.O, 1))),
  });
}

TEST(LayerAliasing, BackwardRefuses) {
  run_cases<Pass<true, true>>({
    ALIAS("dX", "X", move_to(p.backward.dX, p.backward.X.data)),
        ALIAS("dX", "dO", move_to(p.backward.dX, p.backward.dO.data)),
        ALIAS("dX", "addend", move_to(p.backward.addend, rows_after(p.backward.dX, -1))),
        ALIAS("dX", "saved.H", move_to(p.backward.dX, p.saved.H.data)),
        ALIAS("dX", "weights.W1", move_to(p.backward.dX, p.weights.W1.data)),
        ALIAS("dX", "workspace", move_to(p.backward.dX, p.backward.workspace)),
        ALIAS("ds", "dO", move_to(p.backward.ds, p.backward.dO.data)),
        ALIAS("ds", "routing", move_to(p.backward.ds, p.routing.row_score)),
        ALIAS("dweights.W1", "weights.W1", move_to(p.dweights.W1, p.weights.W1.data)),
        ALIAS("dweights.W2", "weights.W2", move_to(p.dweights.W2, p.weights.W2.data)),
        ALIAS("dweights.W1", "dweights.W1_up", move_to(p.dweights.W1, p.dweights.W1_up.data)),
        ALIAS("dweights.b2", "weights.b2", move_to(p.dweights.b2, p.weights.b2.data)),
        ALIAS("saved.H", "X", p.backward.mode = TILEMOE_BACKWARD_OVER_H;
              move_to(p.backward.X, p.saved.H.data)),
  });
}

TEST(LayerAliasing, OMayLieOverXOrTheAddend) {
  for (const int32_t column_blocks : {1, 3}) {
    LayerProblem apart, over_X, over_addend;
    for (LayerProblem* p : {&apart, &over_X, &over_addend})
      p->experts.column_blocks = column_blocks;
    move_to(over_X.forward.O, over_X.forward.X.data);
    move_to(over_addend.forward.O, over_addend.forward.addend.data);
    for (LayerProblem* p : {&apart, &over_X, &over_addend}) {
      require(tilemoe_forward(&p->experts, &p->forward));
      EXPECT_EQ(values(p->forward.O), values(apart.forward.O));
    }
  }
}

TEST(LayerAliasing, DXMayBeItsAddend) {
  LayerProblem apart, over;
  move_to(over.backward.dX, over.backward.addend.data);
  for (LayerProblem* p : {&apart, &over}) {
    require(tilemoe_forward(&p->experts, &p->forward));
    require(tilemoe_backward(&p->experts, &p->backward));
  }
  EXPECT_EQ(values(over.backward.dX), values(apart.backward.dX));
  EXPECT_EQ(values(over.backward.ds), values(apart.backward.ds));
}

// REST reads no dO, so dX may have its memory.
TEST(LayerAliasing, DXMayLieOverDOInAStageThatDoesNotReadIt) {
  LayerProblem whole, staged;
  for (LayerProblem* p : {&whole, &staged}) require(tilemoe_forward(&p->experts, &p->forward));
  require(tilemoe_backward(&whole.experts, &whole.backward));
  tilemoe_backward_args first = staged.backward, rest = staged.backward;
  const tilemoe_weights none = {sizeof(tilemoe_weights), {}, {}, {}, {}, {}, {}};
  first.mode = TILEMOE_BACKWARD_FIRST, rest.mode = TILEMOE_BACKWARD_REST;
  first.dX = first.addend = rest.ds = {};
  first.dweights = rest.dweights = &none;
  require(tilemoe_backward(&staged.experts, &first));
  move_to(rest.dX, rest.dO.data);
  require(tilemoe_backward(&staged.experts, &rest));
  EXPECT_EQ(values(rest.dX), values(whole.backward.dX));
}

}  // namespace
}  // namespace tilemoe::arguments
