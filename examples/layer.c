/* One Mixture-of-Experts layer, forward and backward, on the CPU, in plain C (C99). Built by the
 * project as `example_layer_c`; outside it, find_package(TileMoE) or `pkg-config tilemoe`. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tilemoe/tilemoe.h"

/* Tokens, width of a token, width of an expert, experts, experts per token. */
enum { T = 512, D = 128, N = 64, E = 8, K = 2 };

static void require(tilemoe_status status) {
  if (status == TILEMOE_SUCCESS) return;
  fprintf(stderr, "%s: %s\n", tilemoe_status_name(status), tilemoe_last_error());
  exit(EXIT_FAILURE);
}

static void* allocated[32];
static int allocations;

/* Zeroed memory, until free_all(). calloc's has the 16-byte alignment that the library requires. */
static void* allocate(size_t bytes) {
  void* memory = calloc(1, bytes ? bytes : 1);
  if (memory == NULL || allocations == (int)(sizeof allocated / sizeof *allocated)) {
    fprintf(stderr, "out of memory\n");
    exit(EXIT_FAILURE);
  }
  allocated[allocations++] = memory;
  return memory;
}

static void free_all(void) {
  while (allocations > 0) free(allocated[--allocations]);
}

static float* floats(size_t count) {
  return allocate(count * sizeof(float));
}

/* Uniform in [-reach, reach], the same on every machine. */
static void fill(float* values, size_t count, float reach) {
  static uint32_t state = 1;
  size_t i;
  for (i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    values[i] = ((float)(state >> 8) / 8388608.0f - 1.0f) * reach;
  }
}

/* A contiguous tensor of `ndim` dimensions; the sizes past those are not read. */
static tilemoe_tensor tensor(void* data, tilemoe_dtype dtype, int ndim, int64_t a, int64_t b,
                             int64_t c) {
  const int64_t sizes[TILEMOE_MAX_DIMS] = {a, b, c};
  tilemoe_tensor view;
  int64_t step = 1;
  int i;
  memset(&view, 0, sizeof view);
  view.data = data;
  view.dtype = dtype;
  view.ndim = ndim;
  for (i = ndim - 1; i >= 0; --i) {
    view.shape[i] = sizes[i];
    view.stride[i] = step;
    step *= sizes[i];
  }
  return view;
}

static size_t workspace_of(const tilemoe_experts* experts, const tilemoe_routing_spec* spec,
                           tilemoe_pass pass) {
  tilemoe_workspace_query query;
  size_t bytes;
  memset(&query, 0, sizeof query);
  query.struct_size = sizeof query;
  query.experts = experts;
  query.routing = spec;
  query.pass = pass;
  require(tilemoe_workspace_bytes(&query, &bytes));
  return bytes;
}

/* |O|^2 / 2, whose gradient is O. */
static double loss_of(const float* O) {
  double sum = 0;
  size_t i;
  for (i = 0; i < (size_t)T * D; ++i) sum += 0.5 * (double)O[i] * (double)O[i];
  return sum;
}

int main(void) {
  /* Every struct is zeroed and names its own size. */
  tilemoe_experts experts;
  tilemoe_routing_spec spec;
  tilemoe_routing routing;
  tilemoe_saved_size saved_size;
  tilemoe_saved saved;
  tilemoe_weights weights, dweights;
  tilemoe_top_k_args top_k;
  tilemoe_route_top_k_args route;
  tilemoe_forward_args forward;
  tilemoe_backward_args backward;
  tilemoe_router_backward_args router_backward;
  size_t routing_bytes, routing_workspace_bytes, i;
  double before, after;

  float* X = floats((size_t)T * D);
  float* O = floats((size_t)T * D);
  float* dX = floats((size_t)T * D);
  float* logits = floats((size_t)T * E);
  float* dlogits = floats((size_t)T * E);
  float* W1 = floats((size_t)E * 2 * N * D); /* N gate rows, then N up rows */
  float* dW1 = floats((size_t)E * 2 * N * D);
  float* W2 = floats((size_t)E * D * N);
  float* dW2 = floats((size_t)E * D * N);
  float* scores = floats((size_t)T * K);
  float* ds = floats((size_t)T * K);
  int32_t* ids = allocate((size_t)T * K * sizeof *ids);
  fill(X, (size_t)T * D, 1.0f);
  fill(logits, (size_t)T * E, 1.0f);
  fill(W1, (size_t)E * 2 * N * D, 0.15f);
  fill(W2, (size_t)E * D * N, 0.2f);

  /* Sizes follow from the shapes alone. */
  memset(&experts, 0, sizeof experts);
  experts.struct_size = sizeof experts;
  experts.device = TILEMOE_CPU;
  experts.dtype = TILEMOE_FLOAT32;
  experts.d = D;
  experts.n = N;
  experts.E = E;
  experts.activation = TILEMOE_SWIGLU;

  memset(&spec, 0, sizeof spec);
  spec.struct_size = sizeof spec;
  spec.device = TILEMOE_CPU;
  spec.kind = TILEMOE_ROUTING_TOP_K;
  spec.T = T;
  spec.E = E;
  spec.K = K;

  require(tilemoe_routing_bytes(&spec, &routing_bytes));
  require(tilemoe_routing_workspace_bytes(&spec, &routing_workspace_bytes));
  memset(&saved_size, 0, sizeof saved_size);
  saved_size.struct_size = sizeof saved_size;
  require(tilemoe_saved_bytes(&experts, &spec, &saved_size));

  /* The K experts of each token, and their scores. */
  memset(&top_k, 0, sizeof top_k);
  top_k.struct_size = sizeof top_k;
  top_k.device = TILEMOE_CPU;
  top_k.scoring = TILEMOE_SOFTMAX_OVER_CHOSEN;
  top_k.K = K;
  top_k.logits = tensor(logits, TILEMOE_FLOAT32, 2, T, E, 0);
  top_k.ids = tensor(ids, TILEMOE_INT32, 2, T, K, 0);
  top_k.scores = tensor(scores, TILEMOE_FLOAT32, 2, T, K, 0);
  require(tilemoe_top_k(&top_k));

  /* The routing: each expert's rows. */
  memset(&routing, 0, sizeof routing);
  routing.struct_size = sizeof routing;
  require(tilemoe_routing_bind(&spec, allocate(routing_bytes), routing_bytes, &routing));
  memset(&route, 0, sizeof route);
  route.struct_size = sizeof route;
  route.ids = top_k.ids;
  route.scores = top_k.scores;
  route.workspace = allocate(routing_workspace_bytes);
  route.workspace_bytes = routing_workspace_bytes;
  require(tilemoe_route_top_k(&routing, &route));

  /* Forward. Backward reads H, X and the routing. */
  memset(&weights, 0, sizeof weights);
  weights.struct_size = sizeof weights;
  weights.W1 = tensor(W1, TILEMOE_FLOAT32, 3, E, 2 * N, D);
  weights.W2 = tensor(W2, TILEMOE_FLOAT32, 3, E, D, N);
  memset(&saved, 0, sizeof saved);
  saved.struct_size = sizeof saved;
  saved.H = tensor(allocate(saved_size.H), TILEMOE_FLOAT32, 2, routing.spec.capacity, 2 * N, 0);
  memset(&forward, 0, sizeof forward);
  forward.struct_size = sizeof forward;
  forward.routing = &routing;
  forward.weights = &weights;
  forward.X = tensor(X, TILEMOE_FLOAT32, 2, T, D, 0);
  forward.O = tensor(O, TILEMOE_FLOAT32, 2, T, D, 0);
  forward.saved = &saved;
  forward.workspace_bytes = workspace_of(&experts, &spec, TILEMOE_PASS_FORWARD);
  forward.workspace = allocate(forward.workspace_bytes);
  require(tilemoe_forward(&experts, &forward));
  before = loss_of(O);

  /* Backward of the loss, so dO = O. A gradient that is left absent is not computed. */
  memset(&dweights, 0, sizeof dweights);
  dweights.struct_size = sizeof dweights;
  dweights.W1 = tensor(dW1, TILEMOE_FLOAT32, 3, E, 2 * N, D);
  dweights.W2 = tensor(dW2, TILEMOE_FLOAT32, 3, E, D, N);
  memset(&backward, 0, sizeof backward);
  backward.struct_size = sizeof backward;
  backward.routing = &routing;
  backward.weights = &weights;
  backward.X = forward.X;
  backward.dO = forward.O;
  backward.saved = &saved;
  backward.dX = tensor(dX, TILEMOE_FLOAT32, 2, T, D, 0);
  backward.dweights = &dweights;
  backward.ds = tensor(ds, TILEMOE_FLOAT32, 2, T, K, 0);
  backward.workspace_bytes = workspace_of(&experts, &spec, TILEMOE_PASS_BACKWARD);
  backward.workspace = allocate(backward.workspace_bytes);
  require(tilemoe_backward(&experts, &backward));

  memset(&router_backward, 0, sizeof router_backward);
  router_backward.struct_size = sizeof router_backward;
  router_backward.scoring = top_k.scoring;
  router_backward.routing = &routing;
  router_backward.ds = backward.ds;
  router_backward.dlogits = tensor(dlogits, TILEMOE_FLOAT32, 2, T, E, 0);
  router_backward.workspace = route.workspace;
  router_backward.workspace_bytes = routing_workspace_bytes;
  require(tilemoe_router_backward(&router_backward));

  /* A step against the gradients of both weights lowers the loss. */
  for (i = 0; i < (size_t)E * 2 * N * D; ++i) W1[i] -= 1e-4f * dW1[i];
  for (i = 0; i < (size_t)E * D * N; ++i) W2[i] -= 1e-4f * dW2[i];
  require(tilemoe_forward(&experts, &forward));
  after = loss_of(O);
  printf("tilemoe %s: loss before a step %.4f, after %.4f\n", tilemoe_version(), before, after);
  free_all();
  return after < before ? EXIT_SUCCESS : EXIT_FAILURE;
}
