// gathered_mm and combine_mm: the GEMMs of the layer one by one. They are passes of a layer whose
// activation is the identity, with one of the two weights, and the steps of those.
#include "core/backend.h"
#include "core/check.h"
#include "core/overlap.h"
#include "layer/call.h"
#include "layer/layer.h"
#include "layer/steps.h"

namespace tilemoe {
namespace {

constexpr uint32_t kOfGathered = TILEMOE_GRADIENT_X | TILEMOE_GRADIENT_W1 | TILEMOE_GRADIENT_B1;
constexpr uint32_t kOfCombine =
    TILEMOE_GRADIENT_A | TILEMOE_GRADIENT_S | TILEMOE_GRADIENT_W2 | TILEMOE_GRADIENT_B2;

uint32_t bit_of(const tilemoe_tensor& gradient, uint32_t bit) {
  return present(gradient) ? bit : 0;
}

// As a backward that begins with dH, where H was.
BackwardWork gathered_work(uint32_t gradients) {
  return {.mode = TILEMOE_BACKWARD_REST, .dH_over_H = true, .gradients = gradients};
}

// As one that ends with dH, which is dA.
BackwardWork combine_work(uint32_t gradients) {
  const bool dA = (gradients & TILEMOE_GRADIENT_A) != 0;
  return {.mode = dA ? TILEMOE_BACKWARD_OVER_H : TILEMOE_BACKWARD_WHOLE,
          .dH_over_H = dA,
          .gradients = gradients & ~uint32_t{TILEMOE_GRADIENT_A}};
}

tilemoe_experts read_mm_experts(const tilemoe_experts* given) {
  const tilemoe_experts experts = read_experts(given);
  TILEMOE_CHECK(experts.activation == TILEMOE_IDENTITY,
                "activation is " << tilemoe_activation_name(experts.activation)
                                 << ", expected identity: the caller computes the activation");
  TILEMOE_CHECK(experts.rank_1 == 0 && experts.rank_2 == 0,
                "rank_1 is " << experts.rank_1 << " and rank_2 " << experts.rank_2
                             << ", expected 0: these calls do not support adapters");
  TILEMOE_CHECK(experts.format_1 == TILEMOE_FORMAT_NONE && experts.format_2 == TILEMOE_FORMAT_NONE,
                "format_1 is " << tilemoe_format_name(experts.format_1) << " and format_2 "
                               << tilemoe_format_name(experts.format_2)
                               << ", expected none: these calls do not support quantised weights");
  return experts;
}

// The checks of a call, with the names of its arguments.
struct Checks {
  const tilemoe_experts& experts;
  const tilemoe_routing_spec& spec;

  TensorRule wide(bool gradient = false) const {  // W of combine_mm
    return {{experts.E, experts.d, experts.n}, dtypes(gradient), Strides::kMatrixEitherMajor};
  }
  TensorRule tall(bool gradient = false) const {  // W of gathered_mm
    return {{experts.E, experts.n, experts.d}, dtypes(gradient), Strides::kMatrixEitherMajor};
  }
  TensorRule bias(int64_t width, bool gradient = false) const {
    return {{experts.E, width}, dtypes(gradient), Strides::kRows};
  }
  TensorRule rows() const { return {{spec.capacity, experts.n}, dtypes(false)}; }
  void outer(const char* name, const tilemoe_tensor& tensor) const {
    check_rows(name, tensor, experts, spec);
  }
  void addend(const tilemoe_tensor& tensor) const {
    check_optional_rows("addend", tensor, experts, spec);
  }

 private:
  DTypes dtypes(bool gradient) const {
    return gradient ? DTypes{experts.dtype, TILEMOE_FLOAT32} : DTypes{experts.dtype};
  }
};

// What every call reads; the weight that it lacks has a shape alone.
struct Read {
  explicit Read(const tilemoe_experts* given, const tilemoe_routing* given_routing)
      : experts(read_mm_experts(given)), routing(read_routing_of(given_routing, experts)) {}

  Checks checks() const { return {experts, routing.spec}; }
  tilemoe_weights with_W1(const tilemoe_tensor& W, const tilemoe_tensor& b) const {
    tilemoe_weights weights{};
    weights.W1 = W, weights.b1 = b, weights.W2 = shape_of(experts.d, experts.n);
    return weights;
  }
  tilemoe_weights with_W2(const tilemoe_tensor& W, const tilemoe_tensor& b) const {
    tilemoe_weights weights{};
    weights.W2 = W, weights.b2 = b, weights.W1 = shape_of(experts.n, experts.d);
    return weights;
  }
  const Backend& backend(const tilemoe_weights& weights, const tilemoe_tensor& X,
                         const tilemoe_tensor& dO, const tilemoe_weights& gradients) const {
    const Backend& found = backend_for(experts.device);
    found.check_limits({experts, routing.spec, weights, X, dO, gradients});
    return found;
  }

  const tilemoe_experts experts;
  const tilemoe_routing routing;

 private:
  tilemoe_tensor shape_of(int64_t rows, int64_t columns) const {
    return {.data = nullptr,
            .dtype = experts.dtype,
            .ndim = 3,
            .shape = {experts.E, rows, columns},
            .stride = {rows * columns, columns, 1}};
  }
};

void check_common(const char* name, int32_t reserved, int32_t block_turns) {
  check_reserved(name, reserved);
  check_block_turns(block_turns);
}

void check_memory(MemoryUse& memory, const Read& read, const void* workspace, size_t bytes) {
  memory.reads("routing", read.routing.offsets, routing_bytes(read.routing.spec));
  memory.writes("workspace", workspace, bytes);
  memory.check();
}

// The arguments that the passes of the layer read, too.
template <class Pass, class Args>
Pass pass_of(const Args& given) {
  Pass args{};
  args.workspace = given.workspace, args.workspace_bytes = given.workspace_bytes;
  args.stream = given.stream;
  args.block_turns = given.block_turns;
  return args;
}

}  // namespace

void gathered_mm(const tilemoe_experts* experts, const tilemoe_gathered_mm_args* given) {
  const tilemoe_gathered_mm_args args = read_struct("gathered_mm args", given);
  const Read read(experts, args.routing);
  const Checks checks = read.checks();
  check_common("gathered_mm args", args.reserved, args.block_turns);
  checks.outer("X", args.X);
  check_tensor("W", args.W, checks.tall());
  check_optional("b", args.b, checks.bias(read.experts.n));
  check_tensor("H", args.H, checks.rows());
  const tilemoe_weights weights = read.with_W1(args.W, args.b);
  const Backend& backend = read.backend(weights, args.X, {}, {});
  auto pass = pass_of<tilemoe_forward_args>(args);
  pass.X = args.X;
  const ForwardCall call({read.experts, read.routing, weights}, pass, Gemms::kFirst);
  MemoryUse memory;
  memory.writes("H", args.H);
  memory.reads("X", args.X);
  memory.reads("W", args.W);
  memory.reads("b", args.b);
  check_memory(memory, read, args.workspace, call.plan.total);
  if (read.routing.spec.capacity == 0) return;
  run_forward(call, args.H, nullptr);
  backend.clear_rest(rows_of(read.routing), args.H, args.stream);
}

void gathered_mm_backward(const tilemoe_experts* experts,
                          const tilemoe_gathered_mm_backward_args* given) {
  const tilemoe_gathered_mm_backward_args args = read_struct("gathered_mm_backward args", given);
  const Read read(experts, args.routing);
  const Checks checks = read.checks();
  check_block_turns(args.block_turns);
  check_flag("accumulate", args.accumulate);
  checks.outer("X", args.X);
  check_tensor("W", args.W, checks.tall());
  check_tensor("dH", args.dH, checks.rows());
  check_optional_rows("dX", args.dX, read.experts, read.routing.spec);
  checks.addend(args.addend);
  TILEMOE_CHECK(!present(args.addend) || present(args.dX), "addend is given but dX is absent");
  check_optional("dW", args.dW, checks.tall(true));
  check_optional("db", args.db, checks.bias(read.experts.n, true));
  const tilemoe_weights weights = read.with_W1(args.W, {});
  tilemoe_weights gradients{};
  gradients.W1 = args.dW, gradients.b1 = args.db;
  read.backend(weights, args.X, {}, gradients);
  auto pass = pass_of<tilemoe_backward_args>(args);
  pass.mode = TILEMOE_BACKWARD_REST;
  pass.accumulate = args.accumulate;
  pass.X = args.X, pass.dX = args.dX, pass.addend = args.addend;
  const uint32_t wanted = bit_of(args.dX, TILEMOE_GRADIENT_X) |
                          bit_of(args.dW, TILEMOE_GRADIENT_W1) |
                          bit_of(args.db, TILEMOE_GRADIENT_B1);
  tilemoe_saved saved{};
  saved.H = args.dH, saved.state = TILEMOE_SAVED_DH_OVER_H;
  pass.saved = &saved;
  const BackwardCall call({read.experts, read.routing, weights}, pass, gradients, saved,
                          gathered_work(wanted), {});
  MemoryUse memory;
  memory.writes("dX", args.dX);
  memory.writes("dW", args.dW);
  memory.writes("db", args.db);
  memory.reads("X", args.X);
  memory.reads("W", args.W);
  memory.reads("dH", args.dH);
  memory.reads("addend", args.addend, same_view(args.addend, args.dX) ? "dX" : nullptr);
  check_memory(memory, read, args.workspace, call.plan.total);
  run_backward(call, saved, nullptr);
}

void combine_mm(const tilemoe_experts* experts, const tilemoe_combine_mm_args* given) {
  const tilemoe_combine_mm_args args = read_struct("combine_mm args", given);
  const Read read(experts, args.routing);
  const Checks checks = read.checks();
  check_common("combine_mm args", args.reserved, args.block_turns);
  check_tensor("A", args.A, checks.rows());
  check_tensor("W", args.W, checks.wide());
  check_optional("b", args.b, checks.bias(read.experts.d));
  checks.outer("O", args.O);
  checks.addend(args.addend);
  const tilemoe_weights weights = read.with_W2(args.W, args.b);
  read.backend(weights, {}, {}, {});
  auto pass = pass_of<tilemoe_forward_args>(args);
  pass.O = args.O, pass.addend = args.addend;
  const ForwardCall call({read.experts, read.routing, weights}, pass, Gemms::kSecond);
  MemoryUse memory;
  memory.writes("O", args.O);
  memory.reads("A", args.A);
  memory.reads("W", args.W);
  memory.reads("b", args.b);
  memory.reads("addend", args.addend, same_view(args.addend, args.O) ? "O" : nullptr);
  check_memory(memory, read, args.workspace, call.plan.total);
  run_forward(call, args.A, nullptr);
}

void combine_mm_backward(const tilemoe_experts* experts,
                         const tilemoe_combine_mm_backward_args* given) {
  const tilemoe_combine_mm_backward_args args = read_struct("combine_mm_backward args", given);
  const Read read(experts, args.routing);
  const tilemoe_routing_spec& spec = read.routing.spec;
  const Checks checks = read.checks();
  check_block_turns(args.block_turns);
  check_flag("accumulate", args.accumulate);
  check_tensor("A", args.A, checks.rows());
  check_tensor("W", args.W, checks.wide());
  check_optional("b", args.b, checks.bias(read.experts.d));
  checks.outer("dO", args.dO);
  check_optional("dA", args.dA, checks.rows());
  check_ds(args.ds, spec);
  check_optional("dW", args.dW, checks.wide(true));
  check_optional("db", args.db, checks.bias(read.experts.d, true));
  const tilemoe_weights weights = read.with_W2(args.W, args.b);
  tilemoe_weights gradients{};
  gradients.W2 = args.dW, gradients.b2 = args.db;
  const Backend& backend = read.backend(weights, {}, args.dO, gradients);
  const uint32_t wanted =
      bit_of(args.dA, TILEMOE_GRADIENT_A) | bit_of(args.ds, TILEMOE_GRADIENT_S) |
      bit_of(args.dW, TILEMOE_GRADIENT_W2) | bit_of(args.db, TILEMOE_GRADIENT_B2);
  const BackwardWork work = combine_work(wanted);
  auto pass = pass_of<tilemoe_backward_args>(args);
  pass.mode = work.mode;
  pass.accumulate = args.accumulate;
  pass.dO = args.dO, pass.ds = args.ds;
  tilemoe_saved saved{};
  saved.H = args.A, saved.state = TILEMOE_SAVED_H;
  pass.saved = &saved;
  const BackwardCall call({read.experts, read.routing, weights}, pass, gradients, saved, work,
                          args.dA);
  MemoryUse memory;
  memory.writes("dA", args.dA);
  memory.writes("ds", args.ds);
  memory.writes("dW", args.dW);
  memory.writes("db", args.db);
  memory.reads("A", args.A);
  memory.reads("W", args.W);
  memory.reads("b", args.b);
  memory.reads("dO", args.dO);
  check_memory(memory, read, args.workspace, call.plan.total);
  run_backward(call, saved, nullptr);
  if (present(args.dA) && spec.capacity > 0)
    backend.clear_rest(rows_of(read.routing), args.dA, args.stream);
}

size_t mm_workspace_bytes(const tilemoe_mm_workspace_query* given) {
  const tilemoe_mm_workspace_query query = read_struct("query", given);
  const tilemoe_experts experts = read_mm_experts(query.experts);
  const tilemoe_routing_spec spec = read_spec(query.routing, experts);
  const Backend& backend = backend_for(experts.device);
  backend.check_supported(experts);
  const auto requested = [&](uint32_t all) {
    TILEMOE_CHECK((query.gradients & ~all) == 0,
                  "gradients is " << query.gradients << ", expected a subset of the bits " << all);
    return query.gradients ? query.gradients : all;
  };
  switch (query.mm) {
    case TILEMOE_GATHERED_MM:
      requested(0);
      return ForwardPlan(backend, experts, spec, false, {}, Gemms::kFirst).total;
    case TILEMOE_COMBINE_MM:
      requested(0);
      return ForwardPlan(backend, experts, spec, false, {}, Gemms::kSecond).total;
    case TILEMOE_GATHERED_MM_BACKWARD:
      return BackwardPlan(backend, experts, spec, gathered_work(requested(kOfGathered))).total;
    case TILEMOE_COMBINE_MM_BACKWARD:
      return BackwardPlan(backend, experts, spec, combine_work(requested(kOfCombine))).total;
  }
  TILEMOE_CHECK(false, "mm is " << static_cast<int>(query.mm) << ", expected a value in [0, 3]");
}

}  // namespace tilemoe
