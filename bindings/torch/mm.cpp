// gathered_mm and combine_mm: one GEMM of the layer, with the caller's code before or after it.
#include <string>

#include "operators.h"
#include "packing.h"
#include "routing.h"

namespace tilemoe_torch {
namespace {

// The bits of `wanted`, in the order of the returned gradients.
constexpr int64_t kOfX = 1, kOfW = 2, kOfB = 4;                   // of gathered_mm
constexpr int64_t kOfA = 1, kOfScores = 2, kOfW2 = 4, kOfB2 = 8;  // of combine_mm

// A weight (E, rows, columns) as a call reads it: on the CPU on 16 bytes, copied if need be.
Tensor usable(const Call& call, const Tensor& weight) {
  return call.device() == TILEMOE_CPU ? weight_on_16(weight) : weight;
}
MaybeTensor usable(const Call& call, const MaybeTensor& weight) {
  return weight ? MaybeTensor(usable(call, *weight)) : std::nullopt;
}

// The sizes of a call, and its routing.
struct Mm {
  Mm(const Call& its_call, const Tensor& rows, const Tensor& W, int64_t d, int64_t n, int64_t kind,
     int64_t K, int64_t outer, int64_t capacity)
      : call(its_call) {
    experts.struct_size = sizeof experts;
    experts.device = call.device();
    experts.dtype = call.view("rows", rows).dtype;
    experts.E = W.size(0), experts.d = d, experts.n = n;
    experts.activation = TILEMOE_IDENTITY;
    const auto which = narrowed<tilemoe_routing_kind>("kind", kind);
    const int64_t T = which == TILEMOE_ROUTING_GROUPED ? 0 : outer;
    spec = routing_spec(call, which, T, experts.E, K, capacity);
  }

  // Fills in what every call has, and allocates the workspace.
  template <class Args>
  Tensor begin(Args& args, const Tensor& routing_tensor, tilemoe_mm mm, uint32_t gradients = 0) {
    routing = bind_routing(call, spec, routing_tensor);
    args.struct_size = sizeof args;
    args.routing = &routing;
    args.stream = call.stream();
    args.block_turns = call.ctas_per_sm();
    tilemoe_mm_workspace_query query{};
    query.struct_size = sizeof query;
    query.experts = &experts, query.routing = &spec;
    query.mm = mm, query.gradients = gradients;
    check(tilemoe_mm_workspace_bytes(&query, &args.workspace_bytes));
    const Tensor workspace = call.bytes(args.workspace_bytes);
    args.workspace = workspace.data_ptr();
    return workspace;
  }

  const Call& call;
  tilemoe_experts experts{};
  tilemoe_routing_spec spec{};
  tilemoe_routing routing{};
};

// Rows (capacity, width) are contiguous, and on 16 bytes.
Tensor packed_rows(const Tensor& rows) {
  return dense_rows_on_16(dense(rows));
}

}  // namespace

Tensor gathered_mm(const Tensor& X, const Tensor& routing, const Tensor& W, const MaybeTensor& b,
                   int64_t capacity, int64_t kind, int64_t K) {
  const Call call({{"X", X}, {"routing", routing}, {"W", W}, {"b", b}});
  check_dims("X", X, 2, "(T, d)");
  check_dims("W", W, 3, "(E, n, d)");
  Mm mm(call, X, W, W.size(2), W.size(1), kind, K, X.size(0), capacity);
  const Tensor rows = dense_rows_on_16(X), weight = usable(call, W);
  const MaybeTensor bias = usable(call, b);
  const Tensor H = call.empty({mm.spec.capacity, W.size(1)}, X.scalar_type());
  tilemoe_gathered_mm_args args{};
  args.X = call.view("X", rows), args.W = call.view("W", weight), args.b = call.view("b", bias);
  args.H = call.view("H", H);
  const Tensor workspace = mm.begin(args, routing, TILEMOE_GATHERED_MM);
  check(tilemoe_gathered_mm(&mm.experts, &args));
  return H;
}

std::vector<Tensor> gathered_mm_backward(const Tensor& dH, const Tensor& X, const Tensor& routing,
                                         const Tensor& W, int64_t kind, int64_t K, int64_t wanted) {
  const Call call({{"dH", dH}, {"X", X}, {"routing", routing}, {"W", W}});
  check_dims("dH", dH, 2, "(capacity, n)");
  check_dims("X", X, 2, "(T, d)");
  check_dims("W", W, 3, "(E, n, d)");
  Mm mm(call, X, W, W.size(2), W.size(1), kind, K, X.size(0), dH.size(0));
  const Tensor rows = dense_rows_on_16(X), weight = usable(call, W), gradient = packed_rows(dH);
  MaybeTensor dX, dW, db;
  std::vector<Tensor> made;
  if (wanted & kOfX) made.push_back(*(dX = call.empty({X.size(0), X.size(1)}, X.scalar_type())));
  if (wanted & kOfW) made.push_back(*(dW = empty_like_weight(weight)));
  if (wanted & kOfB) made.push_back(*(db = call.empty({W.size(0), W.size(1)}, W.scalar_type())));
  if (made.empty()) return made;
  tilemoe_gathered_mm_backward_args args{};
  args.X = call.view("X", rows), args.W = call.view("W", weight);
  args.dH = call.view("dH", gradient);
  args.dX = call.view("dX", dX), args.dW = call.view("dW", dW), args.db = call.view("db", db);
  const uint32_t gradients = (dX ? uint32_t{TILEMOE_GRADIENT_X} : 0) |
                             (dW ? uint32_t{TILEMOE_GRADIENT_W1} : 0) |
                             (db ? uint32_t{TILEMOE_GRADIENT_B1} : 0);
  const Tensor workspace = mm.begin(args, routing, TILEMOE_GATHERED_MM_BACKWARD, gradients);
  check(tilemoe_gathered_mm_backward(&mm.experts, &args));
  return made;
}

Tensor combine_mm(const Tensor& A, const MaybeTensor& scores, const Tensor& routing,
                  const Tensor& W, const MaybeTensor& b, const MaybeTensor& addend, int64_t T,
                  int64_t kind, int64_t K) {
  const Call call(
      {{"A", A}, {"scores", scores}, {"routing", routing}, {"W", W}, {"b", b}, {"addend", addend}});
  check_dims("A", A, 2, "(capacity, n)");
  check_dims("W", W, 3, "(E, d, n)");
  Mm mm(call, A, W, W.size(1), W.size(2), kind, K, T, A.size(0));
  const Tensor rows = packed_rows(A), weight = usable(call, W);
  const MaybeTensor bias = usable(call, b);
  const MaybeTensor added = addend ? MaybeTensor(dense_rows_on_16(*addend)) : std::nullopt;
  const Tensor O = call.empty({T, W.size(1)}, A.scalar_type());
  tilemoe_combine_mm_args args{};
  args.A = call.view("A", rows), args.W = call.view("W", weight), args.b = call.view("b", bias);
  args.O = call.view("O", O), args.addend = call.view("addend", added);
  const Tensor workspace = mm.begin(args, routing, TILEMOE_COMBINE_MM);
  check(tilemoe_combine_mm(&mm.experts, &args));
  return O;
}

std::vector<Tensor> combine_mm_backward(const Tensor& dO, const Tensor& A, const Tensor& routing,
                                        const Tensor& W, const MaybeTensor& b, int64_t kind,
                                        int64_t K, int64_t wanted) {
  const Call call({{"dO", dO}, {"A", A}, {"routing", routing}, {"W", W}, {"b", b}});
  check_dims("dO", dO, 2, "(T, d)");
  check_dims("A", A, 2, "(capacity, n)");
  check_dims("W", W, 3, "(E, d, n)");
  Mm mm(call, A, W, W.size(1), W.size(2), kind, K, dO.size(0), A.size(0));
  const Tensor rows = packed_rows(A), weight = usable(call, W), gradient = dense_rows_on_16(dO);
  const MaybeTensor bias = usable(call, b);
  MaybeTensor dA, ds, dW, db;
  std::vector<Tensor> made;
  if (wanted & kOfA) made.push_back(*(dA = call.empty({A.size(0), A.size(1)}, A.scalar_type())));
  if (wanted & kOfScores)
    made.push_back(*(ds = mm.spec.kind == TILEMOE_ROUTING_TOP_K
                              ? call.empty({dO.size(0), K}, ScalarType::Float)
                              : call.empty({A.size(0)}, ScalarType::Float)));
  if (wanted & kOfW2) made.push_back(*(dW = empty_like_weight(weight)));
  if (wanted & kOfB2) made.push_back(*(db = call.empty({W.size(0), W.size(1)}, W.scalar_type())));
  if (made.empty()) return made;
  tilemoe_combine_mm_backward_args args{};
  args.A = call.view("A", rows), args.W = call.view("W", weight), args.b = call.view("b", bias);
  args.dO = call.view("dO", gradient);
  args.dA = call.view("dA", dA), args.ds = call.view("ds", ds);
  args.dW = call.view("dW", dW), args.db = call.view("db", db);
  const uint32_t gradients =
      (dA ? uint32_t{TILEMOE_GRADIENT_A} : 0) | (ds ? uint32_t{TILEMOE_GRADIENT_S} : 0) |
      (dW ? uint32_t{TILEMOE_GRADIENT_W2} : 0) | (db ? uint32_t{TILEMOE_GRADIENT_B2} : 0);
  const Tensor workspace = mm.begin(args, routing, TILEMOE_COMBINE_MM_BACKWARD, gradients);
  check(tilemoe_combine_mm_backward(&mm.experts, &args));
  return made;
}

}  // namespace tilemoe_torch
