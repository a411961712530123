/* A C99 program outside TileMoE: forward and backward of a ReLU layer over small whole numbers,
 * where every sum is exact, against plain loops. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tilemoe/tilemoe.h"

enum { T = 5, D = 16, N = 8, E = 3, K = 2 };

static void require(tilemoe_status status) {
  if (status == TILEMOE_SUCCESS) return;
  fprintf(stderr, "%s: %s\n", tilemoe_status_name(status), tilemoe_last_error());
  exit(1);
}

/* Zeroed memory. The C library puts it on 16 bytes on every 64-bit machine, as tilemoe requires. */
static void* allocate(size_t bytes) {
  void* memory = calloc(1, bytes ? bytes : 1);
  if (!memory) {
    fprintf(stderr, "out of memory\n");
    exit(1);
  }
  return memory;
}

static tilemoe_tensor tensor(void* data, tilemoe_dtype dtype, int ndim, int64_t a, int64_t b,
                             int64_t c) {
  tilemoe_tensor view;
  int64_t step = 1;
  int i;
  memset(&view, 0, sizeof view);
  view.data = data;
  view.dtype = dtype;
  view.ndim = ndim;
  view.shape[0] = a;
  view.shape[1] = b;
  view.shape[2] = c;
  for (i = ndim - 1; i >= 0; --i) {
    view.stride[i] = step;
    step *= view.shape[i];
  }
  return view;
}

/* Whole numbers in [-2, 2], the same on every machine. */
static float small_whole(void) {
  static uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return (float)((int)((state >> 16) % 5u) - 2);
}

static void fill(void* values, size_t count) {
  float* value = values;
  size_t i;
  for (i = 0; i < count; ++i) value[i] = small_whole();
}

static int differs(const char* name, const void* found, const void* expected, size_t count) {
  const float* a = found;
  const float* b = expected;
  size_t i;
  for (i = 0; i < count; ++i)
    if (!(a[i] == b[i])) {
      fprintf(stderr, "%s[%zu] is %g, expected %g\n", name, i, (double)a[i], (double)b[i]);
      return 1;
    }
  return 0;
}

int main(void) {
  float(*X)[D] = allocate(sizeof(float[T][D]));
  float(*O)[D] = allocate(sizeof(float[T][D]));
  float(*dO)[D] = allocate(sizeof(float[T][D]));
  float(*dX)[D] = allocate(sizeof(float[T][D]));
  float(*W1)[N][D] = allocate(sizeof(float[E][N][D]));
  float(*W2)[D][N] = allocate(sizeof(float[E][D][N]));
  float(*dW2)[D][N] = allocate(sizeof(float[E][D][N]));
  float(*H)[N] = allocate(sizeof(float[T * K][N]));
  int32_t(*ids)[K] = allocate(sizeof(int32_t[T][K]));
  float(*scores)[K] = allocate(sizeof(float[T][K]));
  float(*ds)[K] = allocate(sizeof(float[T][K]));
  float wanted_O[T][D] = {{0}}, wanted_dX[T][D] = {{0}}, wanted_ds[T][K] = {{0}};
  float wanted_dW2[E][D][N] = {{{0}}};
  tilemoe_experts experts;
  tilemoe_routing_spec spec;
  tilemoe_routing routing;
  tilemoe_route_top_k_args route;
  tilemoe_forward_args forward;
  tilemoe_backward_args backward;
  tilemoe_saved saved;
  tilemoe_weights weights, dweights;
  tilemoe_workspace_query query;
  size_t routing_bytes, workspace_bytes, needed;
  int t, k, i, j;

  fill(X, T * D);
  fill(dO, T * D);
  fill(W1, E * N * D);
  fill(W2, E * D * N);
  fill(scores, T * K);
  for (t = 0; t < T; ++t)
    for (k = 0; k < K; ++k) ids[t][k] = (t + 2 * k) % E;

  memset(&experts, 0, sizeof experts);
  experts.struct_size = sizeof experts;
  experts.d = D;
  experts.n = N;
  experts.E = E;
  experts.activation = TILEMOE_RELU;

  memset(&spec, 0, sizeof spec);
  spec.struct_size = sizeof spec;
  spec.kind = TILEMOE_ROUTING_TOP_K;
  spec.T = T;
  spec.E = E;
  spec.K = K;

  require(tilemoe_routing_bytes(&spec, &routing_bytes));
  routing.struct_size = sizeof routing;
  require(tilemoe_routing_bind(&spec, allocate(routing_bytes), routing_bytes, &routing));
  require(tilemoe_routing_workspace_bytes(&spec, &workspace_bytes));
  memset(&query, 0, sizeof query);
  query.struct_size = sizeof query;
  query.experts = &experts;
  query.routing = &spec;
  query.pass = TILEMOE_PASS_FORWARD;
  require(tilemoe_workspace_bytes(&query, &needed));
  if (needed > workspace_bytes) workspace_bytes = needed;
  query.pass = TILEMOE_PASS_BACKWARD;
  require(tilemoe_workspace_bytes(&query, &needed));
  if (needed > workspace_bytes) workspace_bytes = needed;

  memset(&route, 0, sizeof route);
  route.struct_size = sizeof route;
  route.ids = tensor(ids, TILEMOE_INT32, 2, T, K, 0);
  route.scores = tensor(scores, TILEMOE_FLOAT32, 2, T, K, 0);
  route.workspace = allocate(workspace_bytes);
  route.workspace_bytes = workspace_bytes;
  require(tilemoe_route_top_k(&routing, &route));

  memset(&saved, 0, sizeof saved);
  saved.struct_size = sizeof saved;
  saved.H = tensor(H, TILEMOE_FLOAT32, 2, T * K, N, 0);

  memset(&weights, 0, sizeof weights);
  weights.struct_size = sizeof weights;
  weights.W1 = tensor(W1, TILEMOE_FLOAT32, 3, E, N, D);
  weights.W2 = tensor(W2, TILEMOE_FLOAT32, 3, E, D, N);

  memset(&forward, 0, sizeof forward);
  forward.struct_size = sizeof forward;
  forward.routing = &routing;
  forward.weights = &weights;
  forward.X = tensor(X, TILEMOE_FLOAT32, 2, T, D, 0);
  forward.O = tensor(O, TILEMOE_FLOAT32, 2, T, D, 0);
  forward.saved = &saved;
  forward.workspace = route.workspace;
  forward.workspace_bytes = workspace_bytes;
  require(tilemoe_forward(&experts, &forward));

  memset(&dweights, 0, sizeof dweights);
  dweights.struct_size = sizeof dweights;
  dweights.W2 = tensor(dW2, TILEMOE_FLOAT32, 3, E, D, N);

  memset(&backward, 0, sizeof backward);
  backward.struct_size = sizeof backward;
  backward.routing = &routing;
  backward.weights = &weights;
  backward.X = forward.X;
  backward.dO = tensor(dO, TILEMOE_FLOAT32, 2, T, D, 0);
  backward.saved = &saved;
  backward.dX = tensor(dX, TILEMOE_FLOAT32, 2, T, D, 0);
  backward.dweights = &dweights;
  backward.ds = tensor(ds, TILEMOE_FLOAT32, 2, T, K, 0);
  backward.workspace = route.workspace;
  backward.workspace_bytes = workspace_bytes;
  require(tilemoe_backward(&experts, &backward));

  for (t = 0; t < T; ++t)
    for (k = 0; k < K; ++k) {
      const int e = ids[t][k];
      const float s = scores[t][k];
      for (j = 0; j < N; ++j) {
        float h = 0, dA = 0;
        for (i = 0; i < D; ++i) h += X[t][i] * W1[e][j][i];
        for (i = 0; i < D; ++i) dA += dO[t][i] * W2[e][i][j];
        if (h <= 0) continue;
        wanted_ds[t][k] += dA * h;
        for (i = 0; i < D; ++i) {
          wanted_O[t][i] += s * h * W2[e][i][j];
          wanted_dX[t][i] += s * dA * W1[e][j][i];
          wanted_dW2[e][i][j] += dO[t][i] * s * h;
        }
      }
    }
  if (differs("O", O, wanted_O, T * D) || differs("dX", dX, wanted_dX, T * D) ||
      differs("dW2", dW2, wanted_dW2, E * D * N) || differs("ds", ds, wanted_ds, T * K))
    return 1;

  experts.d = 12; /* an error is a status and a sentence */
  if (tilemoe_forward(&experts, &forward) != TILEMOE_INVALID_ARGUMENT ||
      strstr(tilemoe_last_error(), "d is 12") == NULL) {
    fprintf(stderr, "d = 12 gave: %s\n", tilemoe_last_error());
    return 1;
  }
  printf("tilemoe %s from C: O, dX, dW2 and ds are exact\n", tilemoe_version());
  return 0;
}
