// gathered_mm and combine_mm: each argument wrong, and what a call does not write.
#include <cstring>

#include "arguments_layer_problem.h"
#include "core/check.h"

namespace tilemoe::arguments {
namespace {

// A top-K routing, its experts, and memory that all four calls can have.
struct MmProblem : RoutingProblem {
  tilemoe_experts experts{};
  const tilemoe_experts* experts_pointer = &experts;

  MmProblem() : RoutingProblem(TILEMOE_ROUTING_TOP_K, kT) {
    experts.struct_size = sizeof experts;
    experts.d = kD, experts.n = kN, experts.E = kE;
    experts.activation = TILEMOE_IDENTITY;
    const tilemoe_route_top_k_args args = top_k_args(kE);
    require(tilemoe_route_top_k(&routing, &args));
  }
  std::vector<int64_t> host_outputs() const { return {shared_workspace.clean()}; }

 protected:
  tilemoe_tensor rows() { return floats({routing.spec.capacity, kN}); }
  template <class Args>
  void begin(Args& args, tilemoe_mm mm) {
    args.struct_size = sizeof args;
    args.routing = &routing;
    tilemoe_mm_workspace_query query{};
    query.struct_size = sizeof query;
    query.experts = &experts, query.routing = &spec, query.mm = mm;
    require(tilemoe_mm_workspace_bytes(&query, &args.workspace_bytes));
    args.workspace = shared_workspace.take(args.workspace_bytes);
  }
};

#define MM_CALL(name)                                     \
  const char* function() const {                          \
    return "tilemoe_" #name;                              \
  }                                                       \
  tilemoe_status call() {                                 \
    return tilemoe_##name(experts_pointer, args_pointer); \
  }                                                       \
  tilemoe_##name##_args args{};                           \
  const tilemoe_##name##_args* args_pointer = &args

struct Gathered : MmProblem {
  MM_CALL(gathered_mm);
  Gathered() {
    begin(args, TILEMOE_GATHERED_MM);
    args.X = floats({kT, kD}), args.W = floats({kE, kN, kD}), args.b = floats({kE, kN});
    args.H = rows();
  }
};
struct GatheredBackward : MmProblem {
  MM_CALL(gathered_mm_backward);
  GatheredBackward() {
    begin(args, TILEMOE_GATHERED_MM_BACKWARD);
    args.X = floats({kT, kD}), args.W = floats({kE, kN, kD}), args.dH = rows();
    args.dX = floats({kT, kD}), args.addend = floats({kT, kD});
    args.dW = floats({kE, kN, kD}), args.db = floats({kE, kN});
  }
};
struct Combined : MmProblem {
  MM_CALL(combine_mm);
  Combined() {
    begin(args, TILEMOE_COMBINE_MM);
    args.A = rows(), args.W = floats({kE, kD, kN}), args.b = floats({kE, kD});
    args.O = floats({kT, kD}), args.addend = floats({kT, kD});
  }
};
struct CombinedBackward : MmProblem {
  MM_CALL(combine_mm_backward);
  CombinedBackward() {
    begin(args, TILEMOE_COMBINE_MM_BACKWARD);
    args.A = rows(), args.W = floats({kE, kD, kN}), args.b = floats({kE, kD});
    args.dO = floats({kT, kD}), args.dA = rows(), args.ds = floats({kT * kK});
    args.dW = floats({kE, kD, kN}), args.db = floats({kE, kD});
  }
};

template <class P>
Cases<P> common_cases() {
  Cases<P> cases = {
      BAD(p.experts_pointer = nullptr, "experts is null"),
      BAD(p.args_pointer = nullptr, "args is null"),
      BAD(p.args.struct_size = 8, "struct_size"),
      BAD(p.args.routing = nullptr, "routing"),
      BAD(p.experts.activation = TILEMOE_SILU, "activation is silu", "identity"),
      BAD(p.experts.activation = TILEMOE_SWIGLU, "activation is swiglu", "identity"),
      BAD(p.experts.rank_1 = 8, "rank_1 is 8", "adapters"),
      BAD(p.experts.rank_2 = 8, "rank_2 8", "adapters"),
      BAD(p.experts.format_1 = TILEMOE_FORMAT_FP8, "format_1 is fp8", "quantised"),
      BAD(p.experts.format_2 = TILEMOE_FORMAT_FP8, "format_2 fp8", "quantised"),
      BAD(p.experts.E = 4, "experts.E is 4", "5"),
      BAD(p.experts.device = TILEMOE_CUDA, "device"),
  };
  BAD_VALUES(cases, "block_turns", p.args.block_turns = int32_t(v), -1, 17);
  append_workspace(cases);
  return cases;
}

TEST(MmArguments, GatheredMm) {
  auto cases = common_cases<Gathered>();
  append<Gathered>(
      cases, {
                 BAD(p.args.reserved = 1, "reserved"),
                 BAD(p.args.W.shape[1] += 8, "W", "(5, 24, 24)"),
                 BAD(p.args.W = p.args.H, "W has shape (21, 16)"),
                 BAD(p.args.b.shape[1] = kD, "b has shape", "(5, 24)"),
                 BAD(p.args.b.dtype = TILEMOE_FLOAT16, "b is", "float16"),
                 BAD(p.args.H.data = p.args.X.data, "H", "X", "shares memory with"),
                 BAD(p.args.H.data = p.args.workspace, "H", "workspace", "shares memory with"),
             });
  BAD_TENSOR(cases, args.X, .layout = Layout::kRows, .aligned = true);
  BAD_TENSOR(cases, args.H, .aligned = true);
  run_cases(cases);
}

TEST(MmArguments, GatheredMmBackward) {
  auto cases = common_cases<GatheredBackward>();
  append<GatheredBackward>(
      cases, {
                 BAD(p.args.dX = {}, "addend is given but dX is absent"),
                 BAD(p.args.dW.shape[2] = kN, "dW has shape", "(5, 16, 16)"),
                 BAD(p.args.db.shape[1] = kD, "db has shape", "(5, 24)"),
                 BAD(p.args.dW.data = p.args.W.data, "dW", "W", "shares memory with"),
                 BAD(p.args.db.data = p.args.dH.data, "db", "dH", "shares memory with"),
             });
  BAD_VALUES(cases, "accumulate", p.args.accumulate = int32_t(v), -1, 2);
  BAD_TENSOR(cases, args.dH, .aligned = true);
  run_cases(cases);
}

TEST(MmArguments, CombineMm) {
  auto cases = common_cases<Combined>();
  append<Combined>(cases, {
                              BAD(p.args.reserved = 1, "reserved"),
                              BAD(p.args.W.shape[1] = kN, "W has shape", "(5, 16, 16)"),
                              BAD(p.args.b.shape[1] = kN, "b has shape", "(5, 16)"),
                              BAD(p.args.O.data = p.args.A.data, "O", "A", "shares memory with"),
                              BAD(p.args.addend.data = static_cast<float*>(p.args.O.data) + 4,
                                  "addend", "O", "shares memory with"),
                          });
  BAD_TENSOR(cases, args.A, .aligned = true);
  BAD_TENSOR(cases, args.O, .layout = Layout::kRows, .aligned = true);
  run_cases(cases);
}

TEST(MmArguments, CombineMmBackward) {
  auto cases = common_cases<CombinedBackward>();
  append<CombinedBackward>(
      cases, {
                 BAD(p.args.W.shape[2] = kD, "W has shape", "(5, 24, 24)"),
                 BAD(p.args.ds.shape[0] -= 1, "ds has shape", "(20)"),
                 BAD(p.args.dW.dtype = TILEMOE_FLOAT16, "dW is", "float16"),
                 BAD(p.args.dA.data = p.args.A.data, "dA", "A", "shares memory with"),
                 BAD(p.args.ds.data = p.args.dO.data, "ds", "dO", "shares memory with"),
             });
  BAD_VALUES(cases, "accumulate", p.args.accumulate = int32_t(v), -1, 2);
  BAD_TENSOR(cases, args.dA, .optional = true, .aligned = true);
  BAD_TENSOR(cases, args.dO, .layout = Layout::kRows, .aligned = true);
  run_cases(cases);
}

// A caller of the first version, and one of a newer version with a field that is not zero.
template <class P>
void expect_grows() {
  P older;
  older.args.struct_size = kMinBytes<std::remove_cvref_t<decltype(older.args)>>;
  ASSERT_LT(older.args.struct_size, sizeof older.args);
  expect_taken(older);
  P newer;
  struct {
    decltype(newer.args) args;
    uint64_t more;
  } grown{newer.args, 0};
  grown.args.struct_size = sizeof grown;
  newer.args_pointer = &grown.args;
  expect_taken(newer);
  grown.more = 1;
  expect_refused(newer.call(), "newer version");
}

TEST(MmArguments, StructsGrow) {
  expect_grows<Gathered>();
  expect_grows<GatheredBackward>();
  expect_grows<Combined>();
  expect_grows<CombinedBackward>();
}

TEST(MmArguments, WorkspaceQuery) {
  MmProblem problem;
  tilemoe_mm_workspace_query query{};
  query.struct_size = sizeof query;
  query.experts = &problem.experts, query.routing = &problem.spec;
  size_t bytes = 0;
  const auto bytes_of = [&](tilemoe_mm mm, uint32_t gradients) {
    query.mm = mm, query.gradients = gradients;
    require(tilemoe_mm_workspace_bytes(&query, &bytes));
    return bytes;
  };
  // dW needs A' (capacity, n), and dX rows of dX~ (capacity, d): the other gradients need neither.
  EXPECT_GE(bytes_of(TILEMOE_COMBINE_MM_BACKWARD, TILEMOE_GRADIENT_W2),
            bytes_of(TILEMOE_COMBINE_MM_BACKWARD, TILEMOE_GRADIENT_A) + size_t{kT * kK * kN * 4});
  EXPECT_GE(bytes_of(TILEMOE_GATHERED_MM_BACKWARD, TILEMOE_GRADIENT_X), size_t{kT * kK * kD * 4});
  EXPECT_EQ(bytes_of(TILEMOE_COMBINE_MM_BACKWARD, 0),
            bytes_of(TILEMOE_COMBINE_MM_BACKWARD, TILEMOE_GRADIENT_A | TILEMOE_GRADIENT_S |
                                                      TILEMOE_GRADIENT_W2 | TILEMOE_GRADIENT_B2));
  const auto refused = [&](int mm, uint32_t gradients, const char* word) {
    query.mm = static_cast<tilemoe_mm>(mm), query.gradients = gradients;
    expect_refused(tilemoe_mm_workspace_bytes(&query, &bytes), word);
  };
  refused(4, 0, "mm is 4");
  refused(-1, 0, "mm is -1");
  refused(TILEMOE_GATHERED_MM, TILEMOE_GRADIENT_X, "gradients is 1");
  refused(TILEMOE_GATHERED_MM_BACKWARD, TILEMOE_GRADIENT_S, "gradients is 2");
  refused(TILEMOE_COMBINE_MM_BACKWARD, TILEMOE_GRADIENT_W1, "gradients is 4");
  expect_refused(tilemoe_mm_workspace_bytes(nullptr, &bytes), "query is null");
  expect_refused(tilemoe_mm_workspace_bytes(&query, nullptr), "bytes is null");
}

}  // namespace
}  // namespace tilemoe::arguments
