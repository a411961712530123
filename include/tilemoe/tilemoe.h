/* TileMoE's C interface: the one binary boundary of the library.
 *
 * The C++ headers in this folder (tensor.h, routing.h, ...) are thin wrappers over it that
 * turn a status into an exception. Symbols are those of docs/mathematics.md:
 *
 *   T, d      tokens in the batch, width of a token
 *   E, K      experts, experts per token
 *   n         width inside one expert; W1 has 2n rows if the activation is gated, else n
 *   f_e, M    tokens routed to expert e; M = sum of f_e
 *   capacity  rows that the buffers can hold; M is known on the device only
 *   X, O      input and output (T, d)
 *   s         router weight of a pair of token and expert, float32
 *   H, A, Y   pre-activation (M, 2n), activation (M, n), expert output (M, d); rows by expert
 *
 * Rules that hold for every function here:
 *   - All memory is the caller's. No call allocates memory for tensors or keeps a pointer after it
 *     returns (CPU), or after the work it put on the stream has run (CUDA).
 *   - Arguments (null, dtype, shape, stride, alignment, sizes, overlap, workspace) are checked
 *     before anything is written. A failed check returns TILEMOE_INVALID_ARGUMENT or
 *     TILEMOE_UNSUPPORTED, leaves every output as it was and sets tilemoe_last_error(). Values
 *     inside arrays are never errors.
 *   - Data pointers of X, weights, biases, H and outputs lie on 16 bytes, and so does every stride
 *     but the contiguous one.
 *   - An output must not overlap another output, an input, the routing or the workspace, unless
 *     its function says so; else the call is refused. Views that interleave with one set of
 *     strides, such as the column halves of one matrix, do not overlap.
 *   - CUDA: `stream` is a cudaStream_t; null is the legacy default stream. The current device of
 *     the calling thread is used: every pointer and the stream must belong to it. Routing's seed,
 *     step, ids and all other arrays are device memory; structs are host memory.
 *   - Rows (T, pairs, capacity) are at most 2^31 - 1 on the CPU and 2^30 - 1 on CUDA. A size
 *     query refuses more, too.
 *
 * How structs grow: each starts with `struct_size`, which the caller sets to sizeof the struct it
 * was compiled with, and zeroes every field that it does not use. Fields are only ever appended.
 * The library takes
 *   - a smaller struct of an older caller: the fields it lacks are 0 and are not written;
 *   - a larger struct of a newer caller if all fields that the library does not know are 0;
 * and refuses any other. Structs that it fills follow the same rule: set their struct_size first.
 * Fields named `reserved` must be 0. tilemoe_tensor has no size and never changes.
 */
#ifndef TILEMOE_TILEMOE_H_
#define TILEMOE_TILEMOE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define TILEMOE_API
#else
#define TILEMOE_API __attribute__((visibility("default")))
#endif

/* An enum of this interface holds any int: a wrong number is refused, in C++ too, where reading it
 * would otherwise be undefined. */
#ifdef __cplusplus
#define TILEMOE_INT : int
#else
#define TILEMOE_INT
#endif

#define TILEMOE_VERSION_MAJOR 0
#define TILEMOE_VERSION_MINOR 2
#define TILEMOE_VERSION_PATCH 0
/* 10000 * major + 100 * minor + patch of this header; compare with tilemoe_version_number(). */
#define TILEMOE_VERSION_NUMBER \
  (10000 * TILEMOE_VERSION_MAJOR + 100 * TILEMOE_VERSION_MINOR + TILEMOE_VERSION_PATCH)

/* ---------------------------------------------------------------- status */

typedef enum tilemoe_status TILEMOE_INT {
  TILEMOE_SUCCESS = 0,
  TILEMOE_INVALID_ARGUMENT = 1, /* a shape, stride, dtype, pointer or size is wrong */
  TILEMOE_UNSUPPORTED = 2,      /* legal, but not supported by this backend or build */
  TILEMOE_DEVICE_ERROR = 3,     /* the device or its driver reported an error */
  TILEMOE_INTERNAL_ERROR = 4    /* a defect of the library */
} tilemoe_status;

/* The library's version at run time: "0.2.0", and its TILEMOE_VERSION_NUMBER (200). */
TILEMOE_API const char* tilemoe_version(void);
TILEMOE_API int tilemoe_version_number(void);
/* "invalid argument", ... never null, whatever the number. */
TILEMOE_API const char* tilemoe_status_name(tilemoe_status status);
/* The message of the last failed call on this thread, with the shape seen, file and line. Empty
 * after a success. Valid until the thread's next call. */
TILEMOE_API const char* tilemoe_last_error(void);

/* --------------------------------------------------------------- tensors */

typedef enum tilemoe_dtype TILEMOE_INT {
  TILEMOE_FLOAT32 = 0,
  TILEMOE_BFLOAT16 = 1,
  TILEMOE_FLOAT16 = 2,
  TILEMOE_INT32 = 3,
  TILEMOE_INT64 = 4
} tilemoe_dtype;

#define TILEMOE_MAX_DIMS 3

/* A view of the caller's memory. `stride` counts elements. An absent optional tensor has data ==
 * NULL and ndim == 0 (a zeroed struct). A tensor of zero elements may have data == NULL. Frozen:
 * it is part of other structs by value. */
typedef struct tilemoe_tensor {
  void* data;
  tilemoe_dtype dtype;
  int32_t ndim;
  int64_t shape[TILEMOE_MAX_DIMS];
  int64_t stride[TILEMOE_MAX_DIMS];
} tilemoe_tensor;

/* Bytes of one element; 0 for a number that is no dtype. */
TILEMOE_API size_t tilemoe_dtype_size(tilemoe_dtype dtype);
TILEMOE_API const char* tilemoe_dtype_name(tilemoe_dtype dtype);

/* ---------------------------------------------------------------- devices */

typedef enum tilemoe_device TILEMOE_INT { TILEMOE_CPU = 0, TILEMOE_CUDA = 1 } tilemoe_device;

/* 1 if this build has the backend and a device for it is present, else 0 (tilemoe_last_error() has
 * the reason). GPUs need compute capability 8.0 or newer; if no arch of this build runs on the
 * device (tilemoe_set_cuda_arch), the layer is TILEMOE_UNSUPPORTED; routing and the router run. */
TILEMOE_API int tilemoe_device_available(tilemoe_device device);
/* One line about the backend ("cpu: 2 threads, AVX3, oneDNN 2.6.3"); valid until the thread's next
 * call. */
TILEMOE_API const char* tilemoe_device_description(tilemoe_device device);
/* Threads of the CPU backend, including the calling one. 0 requests one per core (the default).
 * Results do not depend on it, workspace sizes do. Must not be called while another thread is in
 * the library. TILEMOE_DEVICE_ERROR if the system starts fewer threads than requested; the library
 * continues with these, and tilemoe_num_threads() counts them. A child of fork() has none of its
 * parent's threads and starts the same number when it first computes. A build without the
 * CPU backend (TILEMOE_CPU=OFF) has 0 threads, and setting them is TILEMOE_UNSUPPORTED. */
TILEMOE_API tilemoe_status tilemoe_set_num_threads(int threads);
TILEMOE_API int tilemoe_num_threads(void);

/* Selects the arch, the kernels of the layer's grouped GEMMs on GPUs, for the whole process: "sm80"
 * (every GPU from compute capability 8.0 on), "sm90" (9.0), "sm100" (10.x, in builds for 100f;
 * experimental: never executed on a GPU), or null or "auto" for the newest that a device runs,
 * without "sm100". Before the first call the environment variable TILEMOE_ARCH (older name:
 * TILEMOE_KIT) selects it; the variable is read once and takes the same names. Without it: "auto".
 * An unknown name is TILEMOE_INVALID_ARGUMENT, an arch that the build lacks TILEMOE_UNSUPPORTED, and
 * nothing changes. Each call of the layer checks that the device runs the arch:
 * TILEMOE_UNSUPPORTED, before anything is written. A wrong TILEMOE_ARCH is an error of these calls,
 * too. No other arch replaces one that was selected by name.
 *
 * May be called from any thread at any time. A layer's call takes the arch that it finds when it
 * begins, for all its GEMMs. */
TILEMOE_API tilemoe_status tilemoe_set_cuda_arch(const char* name);
/* The current device's arch and the reason: "sm90, the newest for compute capability 9.0", "sm80,
 * set by TILEMOE_ARCH"; or the error if no arch runs there. Valid until the thread's next call. */
TILEMOE_API const char* tilemoe_cuda_arch(void);
/* The older names of the two functions above. They do the same, errors included. */
TILEMOE_API tilemoe_status tilemoe_set_cuda_kit(const char* name);
TILEMOE_API const char* tilemoe_cuda_kit(void);

/* ---------------------------------------------------------------- routing */

/* The source of a batch's rows, which also determines the pairs that ds has. */
typedef enum tilemoe_routing_kind TILEMOE_INT {
  TILEMOE_ROUTING_TOP_K = 0,   /* K slots a token; pair p = t * K + k */
  TILEMOE_ROUTING_GENERAL = 1, /* caller's (token, expert, score) triples; pair p = index of one */
  TILEMOE_ROUTING_ROUNDED = 2, /* token rounding; pairs by token, see token_offsets */
  TILEMOE_ROUTING_GROUPED = 3  /* rows already sorted by expert; pair p = row */
} tilemoe_routing_kind;

/* How many rows an expert gets under token rounding: f'_e, a multiple of m next to f_e. */
typedef enum tilemoe_rounding TILEMOE_INT {
  TILEMOE_ROUND_NEAREST = 0, /* up if f_e mod m >= m/2 */
  TILEMOE_ROUND_UP = 1,
  TILEMOE_ROUND_DOWN = 2,
  TILEMOE_ROUND_STOCHASTIC = 3, /* up with probability (f_e mod m) / m */
  TILEMOE_ROUND_BALANCED = 4    /* keeps the sum: the largest remainders go up */
} tilemoe_rounding;

/* Scores from logits, and the order in which experts are chosen. */
typedef enum tilemoe_scoring TILEMOE_INT {
  TILEMOE_SOFTMAX_OVER_CHOSEN = 0,  /* softmax over the K chosen logits */
  TILEMOE_SOFTMAX_OVER_ALL = 1,     /* softmax over E, the chosen ones kept as they are */
  TILEMOE_SOFTMAX_RENORMALIZED = 2, /* softmax over E, the chosen ones divided by their sum */
  TILEMOE_SIGMOID = 3,              /* sigmoid; a selection bias chooses, but is not in the score */
  TILEMOE_SIGMOID_RENORMALIZED = 4  /* the same, divided by the chosen ones' sum (DeepSeek-V3) */
} tilemoe_scoring;

/* The score of a group of experts, if a token chooses among the best groups. Both use the value
 * that ranks experts: the logit, or sigmoid + selection bias. */
typedef enum tilemoe_group_score TILEMOE_INT {
  TILEMOE_GROUP_TOP2_SUM = 0, /* the sum of its two best (DeepSeek-V3); sigmoid scorings only */
  TILEMOE_GROUP_MAX = 1       /* its best (DeepSeek-V2) */
} tilemoe_group_score;

/* The size of a routing, known on the host before any logit is. */
typedef struct tilemoe_routing_spec {
  uint64_t struct_size;
  tilemoe_device device;
  tilemoe_routing_kind kind;
  int64_t T;        /* tokens (top-K, general, rounded); 0 for grouped */
  int64_t E;        /* experts */
  int64_t K;        /* experts per token (top-K, rounded); 0 otherwise */
  int64_t pairs;    /* general: number of triples; 0 otherwise */
  int64_t capacity; /* rows; 0 stands for the kind's own bound. Grouped: the number of rows given */
  int64_t m;        /* rounded: rows are rounded to multiples of m (1 <= m) */
  tilemoe_rounding rounding;
  int32_t reserved;
  int64_t round_tokens; /* rounded: tokens [g * round_tokens, (g + 1) * round_tokens) are rounded
                           separately, for every g; a divisor of T. 0: all T together */
} tilemoe_routing_spec;

/* Counted on the device while a routing is built. */
enum {
  TILEMOE_COUNT_OVER_CAPACITY = 0, /* pairs that did not fit: highest expert, then highest token */
  TILEMOE_COUNT_BAD_IDS = 1,       /* ids outside [0, E); tokens outside [0, T) or out of order */
  TILEMOE_COUNT_NAN_TOKENS = 2,    /* tokens with a NaN logit; from pairs: with a NaN score */
  TILEMOE_COUNT_DROPPED = 3,       /* rounded: chosen pairs that rounding dropped, over capacity or
                                      not. Pairs it added: M + OVER_CAPACITY - T*K + DROPPED */
  TILEMOE_COUNTERS = 4
};

/* The routing of a batch: one object, in the caller's memory, which tilemoe_routing_bind laid out.
 * The arrays are device memory; everything else is host memory. 12 bytes per pair, plus O(E), plus
 * 4 bytes per token for general and rounded routing. The spec is last, so that it can grow. */
typedef struct tilemoe_routing {
  uint64_t struct_size;
  int32_t* offsets;       /* (E + 1): expert e has rows [offsets[e], offsets[e + 1]); [E] is M */
  int32_t* counters;      /* (TILEMOE_COUNTERS) */
  int32_t* row_token;     /* (capacity) token of a row; null when grouped */
  float* row_score;       /* (capacity) s of a row; 1 when grouped without scores */
  int32_t* pair_row;      /* (pairs) row of a pair, -1 if it has none; null when grouped */
  int32_t* token_offsets; /* (T + 1): pairs of token t are [token_offsets[t], token_offsets[t + 1]);
                             null for top-K, where they are [t * K, t * K + K), and when grouped */
  void* reserved[4];
  tilemoe_routing_spec spec; /* with pairs and capacity filled in */
} tilemoe_routing;

/* An array of a routing has `size` + `more` elements of 4 bytes. */
typedef enum tilemoe_routing_size TILEMOE_INT {
  TILEMOE_ROUTING_SIZE_0 = 0,
  TILEMOE_ROUTING_SIZE_T = 1,
  TILEMOE_ROUTING_SIZE_E = 2,
  TILEMOE_ROUTING_SIZE_PAIRS = 3,
  TILEMOE_ROUTING_SIZE_CAPACITY = 4
} tilemoe_routing_size;
typedef struct tilemoe_routing_array {
  const char* name; /* of its field in tilemoe_routing */
  tilemoe_routing_size size;
  int32_t more;
} tilemoe_routing_array;
enum { TILEMOE_ROUTING_ARRAYS = 6 };

/* The arrays of a routing of this kind, in the order in which tilemoe_routing_bind lays them out.
 * The first begins at the memory's beginning, each other one at the next multiple of 16 bytes after
 * the one before it; the memory ends at the next one after the last. Writes the first *count of
 * arrays[TILEMOE_ROUTING_ARRAYS]. For callers who keep a routing as one array of their own and read
 * parts of it, without pointers. */
TILEMOE_API tilemoe_status tilemoe_routing_layout(tilemoe_routing_kind kind,
                                                  tilemoe_routing_array* arrays, int32_t* count);

/* Bound on M, with which buffers are sized: T*K (top-K, down), T*K + E*(m-1) (up, stochastic),
 * T*K + E*(m/2) (nearest), T*K + m (balanced), each at most T*E; `pairs` (general); `capacity`
 * (grouped). With round_tokens: the bound of round_tokens tokens times the number of groups. A
 * spec->capacity that is not 0 replaces the bound. */
TILEMOE_API tilemoe_status tilemoe_routing_capacity(const tilemoe_routing_spec* spec,
                                                    int64_t* capacity);
/* Bytes of the routing object's arrays, and of the workspace for building it and for its
 * backward. Requires no device. */
TILEMOE_API tilemoe_status tilemoe_routing_bytes(const tilemoe_routing_spec* spec, size_t* bytes);
TILEMOE_API tilemoe_status tilemoe_routing_workspace_bytes(const tilemoe_routing_spec* spec,
                                                           size_t* bytes);
/* Lays the arrays out in `memory` (at least tilemoe_routing_bytes, on 16 bytes) and fills *routing,
 * up to the struct_size that the caller set in it. Writes nothing to `memory`. */
TILEMOE_API tilemoe_status tilemoe_routing_bind(const tilemoe_routing_spec* spec, void* memory,
                                                size_t bytes, tilemoe_routing* routing);

/* Top K of each token's logits. Ties go to the lower id, NaN ranks last, a token's K stand in
 * descending order. A token with any NaN logit gets K distinct valid ids and NaN scores.
 *
 * With n_group groups of E / n_group neighbouring experts, a token chooses its K among the experts
 * of its topk_group best groups (arXiv 2412.19437, section 2.1.2, node-limited routing); of equal
 * groups the lower stands first. Every score is finally multiplied by routed_scaling_factor. */
typedef struct tilemoe_top_k_args {
  uint64_t struct_size;
  tilemoe_device device;
  tilemoe_scoring scoring;
  int64_t K;
  tilemoe_tensor logits;         /* (T, E) float32, bfloat16 or float16 */
  tilemoe_tensor selection_bias; /* (E) float32, sigmoid scorings only; optional */
  tilemoe_tensor ids;            /* out (T, K) int32 or int64, contiguous */
  tilemoe_tensor scores;         /* out (T, K) float32, contiguous */
  tilemoe_tensor expert_counts;  /* out (E) int32: how often each expert was chosen; optional */
  void* stream;
  int64_t n_group;                 /* at most 32, divides E; 0 and 1: no groups */
  int64_t topk_group;              /* 1 to n_group, of at least K experts; 0 without groups */
  tilemoe_group_score group_score; /* a sum of two requires groups of at least 2 experts */
  float routed_scaling_factor;     /* 0 stands for 1 */
} tilemoe_top_k_args;
TILEMOE_API tilemoe_status tilemoe_top_k(const tilemoe_top_k_args* args);

/* The scores of experts that were chosen elsewhere, for instance ids replayed from a rollout, by
 * the rule of `scoring`: if the ids are those that tilemoe_top_k chooses, in its order, the scores
 * have its bits. An id outside [0, E) is absent: it has score 0 and no part in a sum. Repeated ids
 * each count. A token with any NaN logit gets NaN for the ids that it has. */
typedef struct tilemoe_top_k_scores_args {
  uint64_t struct_size;
  tilemoe_device device;
  tilemoe_scoring scoring;
  float routed_scaling_factor; /* 0 stands for 1 */
  int32_t reserved;
  tilemoe_tensor logits;        /* (T, E) float32, bfloat16 or float16 */
  tilemoe_tensor ids;           /* (T, K) int32 or int64, contiguous; K at least 1 */
  tilemoe_tensor scores;        /* out (T, K) float32, contiguous */
  tilemoe_tensor expert_counts; /* out (E) int32: how often each expert occurs; optional */
  void* stream;
} tilemoe_top_k_scores_args;
TILEMOE_API tilemoe_status tilemoe_top_k_scores(const tilemoe_top_k_scores_args* args);

/* The logits of a router in one order of the sum: logits = X weight^T + bias, in float32, rounded
 * once. The bits of a token's logits depend on neither T, nor its place in the batch, nor the other
 * tokens: a rollout of one token and a training batch choose the same experts. They may differ
 * between devices (docs/mathematics.md).
 *
 * CUDA: X is bfloat16 or float16. A float32 weight is computed as a sum of three bfloat16 terms,
 * each the rounding of what is left by those before it, and X then is bfloat16. Any other
 * combination is TILEMOE_UNSUPPORTED. */
typedef struct tilemoe_router_logits_args {
  uint64_t struct_size;
  tilemoe_device device;
  int32_t reserved;
  tilemoe_tensor X;       /* (T, d) float32, bfloat16 or float16; d a multiple of 8 */
  tilemoe_tensor weight;  /* (E, d) X's dtype or float32 */
  tilemoe_tensor bias;    /* (E) float32, bfloat16 or float16; optional */
  tilemoe_tensor logits;  /* out (T, E) float32, bfloat16 or float16 */
  void* workspace;        /* of any contents */
  size_t workspace_bytes; /* at least tilemoe_router_logits_workspace_bytes(...) */
  void* stream;
} tilemoe_router_logits_args;
TILEMOE_API tilemoe_status tilemoe_router_logits_workspace_bytes(tilemoe_device device, int64_t T,
                                                                 int64_t E, int64_t d,
                                                                 tilemoe_dtype weight_dtype,
                                                                 size_t* bytes);
TILEMOE_API tilemoe_status tilemoe_router_logits(const tilemoe_router_logits_args* args);

/* Builds a routing of kind TOP_K from chosen ids and scores. Rows of an expert stand in the order
 * of pairs. Ids outside [0, E) are skipped. ids (T, K) int32 or int64; scores (T, K) float32,
 * bfloat16 or float16. */
typedef struct tilemoe_route_top_k_args {
  uint64_t struct_size;
  tilemoe_tensor ids;
  tilemoe_tensor scores;
  void* workspace;
  size_t workspace_bytes;
  void* stream;
} tilemoe_route_top_k_args;
TILEMOE_API tilemoe_status tilemoe_route_top_k(tilemoe_routing* routing,
                                               const tilemoe_route_top_k_args* args);

/* Builds a routing of kind TOP_K from the tokens themselves: the router's GEMM, the choice and the
 * routing of a small number of tokens in one launch. For inference: the logits, which backward may
 * read, are written only if `logits` is given.
 *
 * logits = X router_weight^T + router_bias in float32, in one order of the sum that both backends
 * have (docs/mathematics.md), rounded to logits_dtype. The rest has the bits that tilemoe_top_k and
 * tilemoe_route_top_k compute from these logits, with the spec's K.
 *
 * Above TILEMOE_ROUTE_TOKENS_MOST_T tokens, _E experts, _K experts per token or width _D it is
 * TILEMOE_UNSUPPORTED on either backend: use a dense GEMM, tilemoe_top_k and tilemoe_route_top_k
 * instead. */
#define TILEMOE_ROUTE_TOKENS_MOST_T 64
#define TILEMOE_ROUTE_TOKENS_MOST_E 512
#define TILEMOE_ROUTE_TOKENS_MOST_K 32
#define TILEMOE_ROUTE_TOKENS_MOST_D 65536
typedef struct tilemoe_route_tokens_args {
  uint64_t struct_size;
  tilemoe_scoring scoring;
  tilemoe_dtype logits_dtype;    /* float32, bfloat16 or float16: the choice is made from these */
  tilemoe_tensor X;              /* (T, d) float32, bfloat16 or float16; d a multiple of 8 */
  tilemoe_tensor router_weight;  /* (E, d) X's dtype or float32 */
  tilemoe_tensor router_bias;    /* (E) float32, bfloat16 or float16; optional */
  tilemoe_tensor selection_bias; /* (E) float32, sigmoid scorings only; optional */
  tilemoe_tensor logits;         /* out (T, E) logits_dtype, contiguous; optional */
  tilemoe_tensor expert_counts;  /* out (E) int32: how often each expert was chosen; optional */
  int64_t n_group;               /* these four as in tilemoe_top_k_args */
  int64_t topk_group;
  tilemoe_group_score group_score;
  float routed_scaling_factor;
  void* workspace;        /* of any contents */
  size_t workspace_bytes; /* at least tilemoe_route_tokens_workspace_bytes(spec, d) */
  void* stream;
} tilemoe_route_tokens_args;
TILEMOE_API tilemoe_status tilemoe_route_tokens_workspace_bytes(const tilemoe_routing_spec* spec,
                                                                int64_t d, size_t* bytes);
TILEMOE_API tilemoe_status tilemoe_route_tokens(tilemoe_routing* routing,
                                                const tilemoe_route_tokens_args* args);

/* Builds a routing of kind GENERAL from triples sorted by token. A triple whose token is outside
 * [0, T) or smaller than one before it, or whose expert is outside [0, E) (-1: "not here"), is
 * skipped. Repeated pairs are legal. tokens, experts (pairs) int32 or int64; scores (pairs)
 * float32, bfloat16 or float16. */
typedef struct tilemoe_route_general_args {
  uint64_t struct_size;
  tilemoe_tensor tokens;
  tilemoe_tensor experts;
  tilemoe_tensor scores;
  void* workspace;
  size_t workspace_bytes;
  void* stream;
} tilemoe_route_general_args;
TILEMOE_API tilemoe_status tilemoe_route_general(tilemoe_routing* routing,
                                                 const tilemoe_route_general_args* args);

/* Builds a routing of kind ROUNDED from logits: top-K by softmax over all experts, renormalised,
 * then each expert's count is rounded to a multiple of m. Expert e ranks its top-K tokens before
 * the others, then by s, then by lower token id, and takes the first f'_e. If f'_e would exceed T,
 * it is floor(T/m)*m; if T < m, the routing is plain top-K. Rows of an expert stand in ascending
 * order of token. A token's pairs stand in the order of its K, then added ones by expert; dropped
 * ones are not among them, and the unused tail of pair_row is -1.
 *
 * With spec.round_tokens = S, all of this applies to each S tokens with T = S, as if they were a
 * separate batch; rows of an expert are those of the first S tokens, then of the next, and
 * counts and counters are sums. Stochastic rounding of group g of G draws with step * G + g (modulo
 * 2^64), so that no two groups of a training run draw the same. */
typedef struct tilemoe_route_rounded_args {
  uint64_t struct_size;
  tilemoe_tensor logits;        /* (T, E) float32, bfloat16 or float16 */
  tilemoe_tensor seed;          /* (1) int64 in device memory; stochastic only */
  tilemoe_tensor step;          /* (1) int64 in device memory; stochastic only */
  tilemoe_tensor expert_counts; /* out (E) int32: f_e before rounding; optional */
  void* workspace;
  size_t workspace_bytes;
  void* stream;
} tilemoe_route_rounded_args;
TILEMOE_API tilemoe_status tilemoe_route_rounded(tilemoe_routing* routing,
                                                 const tilemoe_route_rounded_args* args);

/* Builds a routing of kind GROUPED: counts (E) int32 or int64, scores (capacity) float32, optional
 * (absent: every s is 1). Negative counts count as 0; rows past the sum are never read. */
typedef struct tilemoe_route_grouped_args {
  uint64_t struct_size;
  tilemoe_tensor counts;
  tilemoe_tensor scores;
  void* stream;
} tilemoe_route_grouped_args;
TILEMOE_API tilemoe_status tilemoe_route_grouped(tilemoe_routing* routing,
                                                 const tilemoe_route_grouped_args* args);

/* From ds to the logits. `scoring` is the rule that chose (rounded routing: SOFTMAX_RENORMALIZED,
 * always). Top-K by SOFTMAX_OVER_CHOSEN or SOFTMAX_RENORMALIZED needs no logits; the others read
 * them as the router stored them. A token's skipped pairs count as absent. Routing kinds TOP_K and
 * ROUNDED. */
typedef struct tilemoe_router_backward_args {
  uint64_t struct_size;
  tilemoe_scoring scoring;
  int32_t accumulate; /* dlogits: 0 written, 1 added to */
  const tilemoe_routing* routing;
  tilemoe_tensor logits;  /* (T, E); optional if the scores suffice */
  tilemoe_tensor ds;      /* (pairs) float32, as tilemoe_backward wrote it */
  tilemoe_tensor dlogits; /* out (T, E), float32 or the logits' dtype */
  void* workspace;
  size_t workspace_bytes;
  void* stream;
  float routed_scaling_factor; /* the scores' own; 0 stands for 1; rounded routing: 0 or 1 */
  int32_t reserved;
} tilemoe_router_backward_args;
TILEMOE_API tilemoe_status tilemoe_router_backward(const tilemoe_router_backward_args* args);

/* balance = E * sum_e (c_e / sum(c)) * mean_t p(t, e) (Switch Transformer, arXiv 2101.03961, eq. 4;
 * 1 when balanced), z = mean_t logsumexp(logits_t)^2 (ST-MoE, arXiv 2202.08906, eq. 5), p = softmax
 * over E. Tokens with a NaN logit are left out of both means. */
typedef struct tilemoe_router_losses_args {
  uint64_t struct_size;
  tilemoe_device device;
  float balance_coefficient; /* with dlogits: scale of the balance loss */
  float z_coefficient;
  int32_t reserved;
  tilemoe_tensor logits;        /* (T, E) */
  tilemoe_tensor expert_counts; /* (E) int32: c_e, the experts' choices before rounding */
  tilemoe_tensor losses;        /* out (2) float32: balance, z; optional */
  tilemoe_tensor dlogits;       /* (T, E), float32 or the logits' dtype: the losses' gradient is
                                   ADDED here; optional */
  void* workspace;
  size_t workspace_bytes; /* at least tilemoe_router_losses_workspace_bytes(device, T, E) */
  void* stream;
} tilemoe_router_losses_args;
TILEMOE_API tilemoe_status tilemoe_router_losses_workspace_bytes(tilemoe_device device, int64_t T,
                                                                 int64_t E, size_t* bytes);
TILEMOE_API tilemoe_status tilemoe_router_losses(const tilemoe_router_losses_args* args);

/* ------------------------------------------------------------------ rows */

/* out_i = addend_i + the sum of row i's places, in float32, in the order of the places (the addend
 * first), rounded once. The first existing term starts the sum: a single term keeps its value,
 * -0 too; with one place and no addend out has the source's bits, NaN's too. Without terms: zeros.
 *
 * Sources may be other GPUs' memory, as symmetric memory maps it: the caller must ensure that they
 * are written before, and not again until this has run. An overlap of out and a source is detected,
 * and refused, by the addresses alone: memory that is mapped twice has two. */
#define TILEMOE_MAX_SOURCES 64
#define TILEMOE_MAX_PLACES 64
typedef struct tilemoe_sum_rows_args {
  uint64_t struct_size;
  tilemoe_device device;
  int32_t sources;           /* 1 to TILEMOE_MAX_SOURCES */
  const void* const* source; /* (sources), host memory: each (source_rows, d) of out's dtype,
                                contiguous. CUDA: memory that the current device can read, its own
                                or another GPU's */
  int64_t source_rows;       /* sources * source_rows is at most 2^31 - 1 */
  tilemoe_tensor place;  /* (rows, P) int32, contiguous; P from 1 to TILEMOE_MAX_PLACES. Row r of
                            source s is s * source_rows + r, any other number is no row */
  tilemoe_tensor addend; /* (rows, d) out's dtype; may be out itself, with its strides;
                            optional */
  tilemoe_tensor out;    /* (rows, d) float32 (CPU), bfloat16 or float16; d a multiple of 8 */
  void* stream;
} tilemoe_sum_rows_args;
TILEMOE_API tilemoe_status tilemoe_sum_rows(const tilemoe_sum_rows_args* args);

/* ---------------------------------------------------------------- layer */

/* activations.inc lists them with their formulas. W1 is (E, 2n, d) if the activation is gated, and
   (E, n, d) if it is not. New kinds are appended, gated or not: call tilemoe_activation_gated, do
   not use the order. */
typedef enum tilemoe_activation TILEMOE_INT {
  TILEMOE_SWIGLU = 0,
  TILEMOE_GEGLU = 1,
  TILEMOE_GEGLU_TANH = 2,
  TILEMOE_REGLU = 3,
  TILEMOE_SILU = 4,
  TILEMOE_GELU = 5,
  TILEMOE_GELU_TANH = 6,
  TILEMOE_RELU = 7,
  TILEMOE_RELU_SQUARED = 8,
  TILEMOE_IDENTITY = 9,
  TILEMOE_GLU = 10,
  TILEMOE_SITU_GLU = 11,
} tilemoe_activation;
/* 1 if W1 has gate and up rows; 0 if not, and for a number that is no activation. */
TILEMOE_API int tilemoe_activation_gated(tilemoe_activation activation);
TILEMOE_API const char* tilemoe_activation_name(tilemoe_activation activation);

/* Where W1's gate and up rows are. Meaningless (CONCATENATED) when the activation is not gated. */
typedef enum tilemoe_gate_layout TILEMOE_INT {
  TILEMOE_GATE_CONCATENATED = 0, /* W1 (E, 2n, d): n gate rows, then n up rows (gate_up_proj) */
  TILEMOE_GATE_INTERLEAVED = 1,  /* W1 (E, 2n, d): gate and up rows alternate, gate first */
  TILEMOE_GATE_SPLIT = 2         /* W1 (E, n, d) is the gate, W1_up (E, n, d) the up (w1, w3) */
} tilemoe_gate_layout;

/* How a checkpoint stores a quantised weight (tilemoe_quantized). */
typedef enum tilemoe_format TILEMOE_INT {
  TILEMOE_FORMAT_NONE = 0,       /* not quantised */
  TILEMOE_FORMAT_FP8 = 1,        /* DeepSeek-V3's: e4m3, a float32 scale per 128 x 128 values */
  TILEMOE_FORMAT_MXFP4 = 2,      /* gpt-oss's: e2m1, an e8m0 scale per 32 values of a row */
  TILEMOE_FORMAT_NF4 = 3,        /* bitsandbytes': NormalFloat4, a float32 scale per 64 values */
  TILEMOE_FORMAT_NF4_DOUBLE = 4, /* the same with 8-bit scales, quantised in blocks of 256 */
  TILEMOE_FORMAT_NVFP4 = 5       /* e2m1, an e4m3 scale per 16 values of a row, and one of these */
} tilemoe_format;
/* "fp8", "mxfp4", "nf4", "nf4_double", "nvfp4"; "none" for 0, "unknown format" for any other. */
TILEMOE_API const char* tilemoe_format_name(tilemoe_format format);

/* The function of the experts. */
typedef struct tilemoe_experts {
  uint64_t struct_size;
  tilemoe_device device;
  tilemoe_dtype dtype; /* of X, O, weights, biases and H: float32 (CPU), bfloat16, float16 */
  int64_t d, n, E;
  tilemoe_activation activation;
  tilemoe_gate_layout gate_layout;
  /* SwiGLU only, gpt-oss's form: gate = min(gate, clamp), up = clip(up, -clamp, clamp),
   * A = gate * sigmoid(alpha * gate) * (up + up_shift). All zero is the plain form (clamp none,
   * alpha 1). */
  float clamp;
  float alpha;
  float up_shift;
  /* Less workspace at a small cost in time: Y (capacity, d) of the forward and dX~ (capacity, d) of
   * the backward exist in this number of column blocks, one after the other. A block has a multiple
   * of 64 columns; 0 and 1: all columns at once. The results have the same error bounds. */
  int32_t column_blocks;
  /* Low-rank adapters (tilemoe_lora): columns of P1 and P2. 0: W1, or W2, has no adapter. */
  int32_t rank_1;
  int32_t rank_2;
  /* Quantised weights (tilemoe_quantized): the format of W1 and W1_up, and of W2. Such a weight
   * is absent in tilemoe_weights, the call's `quantized` has it, and it has no gradient. Each pass
   * dequantises it into the workspace, the experts with rows alone, and computes with the result:
   * the bits are those of the layer with the dequantised weight. */
  tilemoe_format format_1;
  tilemoe_format format_2;
  /* Less workspace for quantised weights at a small cost in time: the workspace has room for one of
   * this number of blocks of experts, each of which is dequantised and used before the next one. 0
   * and 1: all experts at once. The bits are the same. */
  int32_t weight_blocks;
  int32_t reserved;
} tilemoe_experts;

/* The experts' weights, in the checkpoint's own layout, or their gradients. A weight's last two
 * dimensions may be stored either way: W1 (E, 2n, d) with stride 1 on d, or on 2n when the
 * checkpoint keeps (E, d, 2n). W1 and W1_up are stored the same way; their gradients may differ
 * from them and from each other, in dtype too. Only the gradient of an interleaved W1 with stride 1
 * on d must have stride 1 on d as well. */
typedef struct tilemoe_weights {
  uint64_t struct_size;
  tilemoe_tensor W1;    /* (E, 2n, d), or (E, n, d) when split or not gated; absent if quantised */
  tilemoe_tensor W1_up; /* (E, n, d) when split, else absent; absent if quantised */
  tilemoe_tensor W2;    /* (E, d, n); absent if quantised */
  tilemoe_tensor b1;    /* (E, 2n) in W1's row order, or (E, n) when split or not gated; optional */
  tilemoe_tensor b1_up; /* (E, n) when split and biased, else absent */
  tilemoe_tensor b2;    /* (E, d); optional */
} tilemoe_weights;

/* One quantised weight of all experts, as its checkpoint stores it, contiguous: (E, R, C) values,
 * which are the weight (E, rows, columns), or with `transposed` the weight as (E, columns, rows):
 * W1 has R = 2n and C = d, transposed R = d and C = 2n. `codes` has one narrow number per value, in
 * this order, `scales` one number per block of them:
 *
 *   format      codes                            scales                      value
 *   FP8         (E, R, C) e4m3                   (E, R/128, C/128) float32   code * scale
 *   MXFP4       (E, R, C/2), low nibble first    (E, R, C/32) e8m0           code * 2^(scale - 127)
 *   NF4         (E*R*C/2), high nibble first     (E*R*C/64) float32          nf4[code] * scale
 *   NF4_DOUBLE  as NF4                           (E*R*C/64) uint8            nf4[code] * (offset +
 *                                        scale_map[scale] * scale_of_scales[block / 256])
 *   NVFP4       (E, R, C/2), low nibble first    (E, R, C/16) e4m3           code *
 *                                                            (scale_of_scales[expert] * scale)
 *
 * FP8 rounds R/128 and C/128 up. MXFP4 needs C % 32 = 0, NVFP4 C % 16 = 0, NF4 E*R*C % 64 = 0. Each
 * product and sum is of float32; the value is rounded once more, to the dtype of the result. NaN
 * codes of e4m3, and the e8m0 scale 255, are NaN. `codes` lies on 16 bytes, other arrays on their
 * element. Frozen: it is part of other structs by value. */
typedef struct tilemoe_quantized {
  tilemoe_format format; /* NONE: absent, all other fields are 0 */
  int32_t transposed;
  const void* codes;
  const void* scales;
  const float* scale_map;       /* NF4_DOUBLE: (256); else null */
  const float* scale_of_scales; /* NF4_DOUBLE: (E*R*C/64/256, rounded up); NVFP4: (E); else null */
  const float* scale_offset;    /* NF4_DOUBLE: (1); else null */
} tilemoe_quantized;

/* The quantised weights of a call. Those of experts.format_1 and format_2 are given, others have
 * format NONE. W1 and W1_up have the same `transposed`. */
typedef struct tilemoe_quantized_weights {
  uint64_t struct_size;
  tilemoe_quantized W1;
  tilemoe_quantized W1_up; /* when split */
  tilemoe_quantized W2;
} tilemoe_quantized_weights;

/* Dequantises a whole weight. The layer does it itself, in its workspace. */
typedef struct tilemoe_dequantize_args {
  uint64_t struct_size;
  tilemoe_device device;
  int32_t reserved;
  tilemoe_quantized weight;
  tilemoe_tensor out; /* (E, R, C), contiguous, whether the weight is transposed or not: float32
                         (CPU), bfloat16, float16. C is a multiple of 8 */
  void* stream;
} tilemoe_dequantize_args;
TILEMOE_API tilemoe_status tilemoe_dequantize(const tilemoe_dequantize_args* args);

/* Quantises values to e4m3 with one scale per block of block_rows x 128 values; a value is
 * code * scale. Each part of the rows (gate and up of W1) has blocks of its own, so that
 * S = R / part_rows * (part_rows / block_rows, rounded up) rows of scales; blocks at the ends of
 * rows and parts may be smaller. With 128 rows of a block and one part, these are the arrays of
 * TILEMOE_FORMAT_FP8.
 *
 * The scales are those of TransformerEngine's Float8BlockScaling: 448 / amax of a block, by default
 * rounded down to a power of two, is the factor of its values, and scale = 1 / factor. Codes are
 * rounded to nearest, ties to even. A block of zeros has scale 1. NaN has the code 0x7f and no
 * influence on the scale. An infinity makes its block's scale 1 and becomes 448. */
typedef struct tilemoe_quantize_fp8_args {
  uint64_t struct_size;
  tilemoe_device device;
  int32_t block_rows;   /* 1 or 128 */
  int32_t float_scales; /* 0: scales are powers of two; 1: any float32 */
  int32_t reserved;
  int64_t part_rows;     /* a divisor of R; 0: R */
  tilemoe_tensor values; /* (E, R, C), stride 1 on C: float32 (CPU), bfloat16, float16. C is a
                            multiple of 8 */
  uint8_t* codes;        /* (E, R, C) out, contiguous, on 16 bytes */
  float* scales;         /* (E, S, C/128 rounded up) out, contiguous */
  void* stream;
} tilemoe_quantize_fp8_args;
TILEMOE_API tilemoe_status tilemoe_quantize_fp8(const tilemoe_quantize_fp8_args* args);

/* Low-rank adapters, LoRA (arXiv 2106.09685): the layer computes with W1 + scale_1 B1 A1 and
 * W2 + scale_2 B2 A2 for every expert, without making these sums. Or the gradients of A and B. An
 * adapter of W1 or of W2 may be absent: both of its factors. A split gate may have an adapter of W1,
 * of W1_up, or of both, each with its own rank. A rank is a multiple of 8, at most 256 (pad with
 * zeros: exact).
 *
 *   P1 = X A1^T        H = [X, P1] [W1, scale_1 B1]^T
 *   P2 = A A2^T        Y = [A, P2] [W2, scale_2 B2]^T
 *   Q2 = dO scale_2 B2     dA' = [dO, Q2] [W2; A2]
 *   Q1 = dH scale_1 B1     dX~ = [dH, Q1] [W1; A1]
 *   dA1 = Q1^T X       dB1 = dH^T (scale_1 P1)
 *   dA2 = Q2^T (s A)   dB2 = dO^T (scale_2 s P2)
 *
 * A, scale B, P, Q, scale P and scale s P are rounded to the experts' dtype; sums are float32. With
 * B = 0, O and dX have the bits of the layer without adapters. */
#define TILEMOE_MAX_RANK 256
typedef struct tilemoe_lora {
  uint64_t struct_size;
  tilemoe_tensor A1;      /* (E, r, d) */
  tilemoe_tensor B1;      /* (E, 2n, r) in W1's row order, or (E, n, r) when split or not gated */
  tilemoe_tensor A1_up;   /* (E, r, d), only when split */
  tilemoe_tensor B1_up;   /* (E, n, r), only when split */
  tilemoe_tensor A2;      /* (E, r, n) */
  tilemoe_tensor B2;      /* (E, d, r) */
  float scale_1, scale_2; /* not read in gradients */
} tilemoe_lora;

/* Adapters as the GEMMs read them: in the experts' dtype, with scale in B, in the order of H's
 * columns and in the major of the weights. tilemoe_pack_lora fills it; it refers to the caller's
 * memory. It serves every call until A, B or a scale changes. */
typedef struct tilemoe_packed_lora {
  uint64_t struct_size;
  tilemoe_tensor A1; /* (E, rank_1, d) */
  tilemoe_tensor B1; /* (E, columns of H, rank_1) */
  tilemoe_tensor A2; /* (E, rank_2, n) */
  tilemoe_tensor B2; /* (E, d, rank_2) */
  float scale_1, scale_2;
  int32_t rank_gate; /* split: the columns of P1 before those of W1_up's adapter */
  int32_t reserved;
} tilemoe_packed_lora;

/* Bytes of the memory for packed adapters: of experts.rank_1 and rank_2. rank_1 is the rank of A1;
 * when split, the sum of both ranks. */
TILEMOE_API tilemoe_status tilemoe_packed_lora_bytes(const tilemoe_experts* experts, size_t* bytes);
/* Packs adapters into `memory` (on 16 bytes) and fills *packed. `lora`: float32, bfloat16 or float16,
 * any strides. `weights`: W1 and W2 with the strides that the layer's calls will have; no data is
 * read. A quantised weight has those of the contiguous (E, rows, columns), or if transposed of
 * (E, columns, rows); absent: not transposed. */
typedef struct tilemoe_pack_lora_args {
  uint64_t struct_size;
  const tilemoe_lora* lora;
  const tilemoe_weights* weights;
  void* memory;
  size_t bytes; /* at least tilemoe_packed_lora_bytes */
  void* stream;
} tilemoe_pack_lora_args;
TILEMOE_API tilemoe_status tilemoe_pack_lora(const tilemoe_experts* experts,
                                             const tilemoe_pack_lora_args* args,
                                             tilemoe_packed_lora* packed);
/* Sets A1, B1, A2 and B2 of *packed to the factors in memory that tilemoe_pack_lora has filled, of
 * experts with the same sizes and weights with the same strides. The other fields are the caller's:
 * scale_1, scale_2 and rank_gate as tilemoe_pack_lora returned them. No data is read or written. For
 * callers who keep packed adapters as one array of bytes, without the struct. */
TILEMOE_API tilemoe_status tilemoe_packed_lora_bind(const tilemoe_experts* experts,
                                                    const tilemoe_weights* weights, void* memory,
                                                    size_t bytes, tilemoe_packed_lora* packed);

/* The state of a forward pass from which backward starts. */
typedef enum tilemoe_saved_state TILEMOE_INT {
  TILEMOE_SAVED_H = 0,          /* H, as forward wrote it */
  TILEMOE_SAVED_H_AND_DH = 1,   /* H, and dH in the workspace `dH` */
  TILEMOE_SAVED_DH_OVER_H = 2,  /* dH where H was: H is consumed */
  TILEMOE_SAVED_PARTS_OF_DH = 3 /* dH over H for the tokens of some parts: only calls with the other
                                   parts may follow, or a new forward */
} tilemoe_saved_state;

/* What forward keeps for backward in addition to X and the routing. Host struct, device memory. */
typedef struct tilemoe_saved {
  uint64_t struct_size;
  tilemoe_tensor H; /* (capacity, 2n) or (capacity, n), contiguous: gate columns, then up columns;
                       on CUDA in W1's own order if W1 is interleaved and has stride 1 on 2n */
  const void* dH;   /* set by backward: the workspace that contains dH; null if none does */
  tilemoe_saved_state state; /* set by forward and backward */
  int32_t reserved;
  int64_t parts_tokens; /* set by backward: tokens whose dH lies over H in SAVED_PARTS_OF_DH; not
                           counted in the smaller struct of an older caller */
  tilemoe_tensor P1;    /* (capacity, rank_1), contiguous; absent without an adapter of W1 */
  tilemoe_tensor P2;    /* (capacity, rank_2), contiguous; absent without an adapter of W2 */
} tilemoe_saved;

/* Bytes that live from forward to backward. */
typedef struct tilemoe_saved_size {
  uint64_t struct_size;
  size_t rows; /* X (T, d), or the grouped entry's rows (capacity, d): the caller keeps them */
  size_t H;
  size_t routing; /* tilemoe_routing_bytes */
  size_t total;
  size_t P1, P2; /* of adapters; part of `total` */
} tilemoe_saved_size;
/* Fills *size, up to the struct_size that the caller set in it. */
TILEMOE_API tilemoe_status tilemoe_saved_bytes(const tilemoe_experts* experts,
                                               const tilemoe_routing_spec* routing,
                                               tilemoe_saved_size* size);

/* A backward pass runs in one call, or in stages, one call each:
 *
 *   WHOLE   computes from dO and H. dH, if it is needed, lies in the workspace and is lost
 *           afterwards. H stays: backward may run again.
 *   OVER_H  computes from dO and H, and writes dH over H. The saved state is consumed: REST may
 *           follow, no other backward until the next forward.
 *   FIRST   computes from dO and H, and leaves dH in the workspace. H stays. REST may follow.
 *   REST    computes dX, dW1 and db1 from the dH that OVER_H or FIRST left; may be repeated; the
 *           saved state says where dH is. dO is not read and may be absent; ds, dW2 and db2 must
 *           be. After FIRST: with FIRST's workspace, not written since. After OVER_H: with
 *           any workspace.
 *
 * ds, dW2 and db2 need dO; dX, dW1 and db1 need only dH. Each mode but REST computes those of
 * all six that are requested. Bits do not depend on how the pass is divided. The lowest peak is
 * OVER_H for ds, dW2, db2 and dX, then REST for dW1 and db1 with a separate workspace: memory for
 * dW1 is not needed while dX's workspace is. If REST computes dX, ds is complete before it,
 * so that the router's part of dX can be dX's addend. */
typedef enum tilemoe_backward_mode TILEMOE_INT {
  TILEMOE_BACKWARD_WHOLE = 0,
  TILEMOE_BACKWARD_OVER_H = 1,
  TILEMOE_BACKWARD_FIRST = 2,
  TILEMOE_BACKWARD_REST = 3
} tilemoe_backward_mode;

typedef enum tilemoe_pass TILEMOE_INT {
  TILEMOE_PASS_INFERENCE = 0,
  TILEMOE_PASS_FORWARD = 1,
  TILEMOE_PASS_BACKWARD = 2
} tilemoe_pass;

/* Gradients as bits, to select those that a backward computes. */
enum {
  TILEMOE_GRADIENT_X = 1,
  TILEMOE_GRADIENT_S = 2, /* ds */
  TILEMOE_GRADIENT_W1 = 4,
  TILEMOE_GRADIENT_W1_UP = 8,
  TILEMOE_GRADIENT_W2 = 16,
  TILEMOE_GRADIENT_B1 = 32,
  TILEMOE_GRADIENT_B1_UP = 64,
  TILEMOE_GRADIENT_B2 = 128,
  TILEMOE_GRADIENT_LORA_1 = 256, /* of A1, B1, A1_up and B1_up */
  TILEMOE_GRADIENT_LORA_2 = 512, /* of A2 and B2 */
  TILEMOE_GRADIENT_A = 1024      /* dA of tilemoe_combine_mm_backward alone */
};

typedef struct tilemoe_workspace_query {
  uint64_t struct_size;
  const tilemoe_experts* experts;
  const tilemoe_routing_spec* routing;
  tilemoe_pass pass;
  tilemoe_backward_mode mode; /* of PASS_BACKWARD; 0 for others. REST stands for a call after
                                 OVER_H: one after FIRST has FIRST's workspace */
  uint32_t gradients; /* PASS_BACKWARD: the TILEMOE_GRADIENT_ bits that may be requested; 0: all
                         that the mode has, without those of quantised weights. FIRST: its own
                         and those of REST calls that follow */
  int32_t cuda_sms; /* CUDA: SMs of the device that the pass will run on, up to TILEMOE_MAX_SMS; the
                       query then requires no device. 0: the current device's */
  const char* cuda_arch; /* with cuda_sms: the arch of the pass, "sm80", "sm90" or "sm100"; null or
                            "auto": any of this build. Without cuda_sms: null */
} tilemoe_workspace_query;
#define TILEMOE_MAX_SMS 65535
/* Workspace of one pass: enough for a call that requests those gradients or some of them. Depends
 * on the shapes, the capacity and the requested gradients, never on f_e; on the CPU also on the
 * number of threads, and on CUDA on the SMs of the device that the pass will run on: it must be
 * current, or cuda_sms has its number. For a pass that may run on several kinds of devices, take
 * the largest of their sizes. */
TILEMOE_API tilemoe_status tilemoe_workspace_bytes(const tilemoe_workspace_query* query,
                                                   size_t* bytes);

/* A part of a pass, if X or dO arrives in parts: tokens [first_token, first_token + tokens), and of
 * each expert the rows [begins[e], ends[e]), which are theirs. An expert's rows lie in the order of
 * their tokens, so tokens that follow each other have one range of rows of every expert. Parts are
 * calls one after the other on one stream, in any order, each row and token in one of them; what they
 * share (H, O, the workspace) is whole in each. The bits do not depend on how a pass is divided. Not
 * for the grouped entry. */
typedef struct tilemoe_part {
  uint64_t struct_size;
  const int32_t* begins; /* (E), device memory: as the routing's offsets, or the part's before */
  const int32_t* ends;   /* (E), device memory, at most the routing's */
  int64_t first_token, tokens;
  int32_t last; /* of backward: 1 if it is the last call of the pass, else 0 */
  int32_t reserved;
} tilemoe_part;

/* O_t = addend_t + sum over the token's pairs of s * (act(X_t W1_e^T + b1_e) W2_e^T + b2_e), in
 * float32, in the order of the token's pairs. Grouped: O_r = addend_r + s_r * (...), rows past the
 * sum of the counts are zero. `saved` null is inference: H is not written. O may share X's memory
 * (backward needs X again), and may be the addend itself, with its strides. */
typedef struct tilemoe_forward_args {
  uint64_t struct_size;
  const tilemoe_routing* routing;
  const tilemoe_weights* weights;
  tilemoe_tensor X;      /* (T, d); grouped: (capacity, d) */
  tilemoe_tensor O;      /* out, X's shape */
  tilemoe_tensor addend; /* X's shape; optional */
  tilemoe_saved* saved;
  void* workspace;
  size_t workspace_bytes;
  void* stream;
  /* CUDA: CTAs per SM of a GEMM, in waves: 1 to 16; 0 is 1. With 1 a CTA is persistent for the
   * whole GEMM and fills its pipeline once. If kernels of another stream occupy SMs, as collectives
   * do that overlap with a training step, the CTAs of those SMs start only when others have ended;
   * with 4, other SMs take over most of their work. The bits are the same.
   */
  int32_t block_turns;
  /* 1: only checks the arguments, all but the workspace. Nothing is read, written or launched:
   * pointers may be any addresses on 16 bytes that do not overlap, those of the routing too. The
   * saved state stays as it is. 0: the call. */
  int32_t dry_run;
  /* null: the whole pass. Else this part's rows of H and of O are written, and no other token's row
   * of X is read. */
  const tilemoe_part* part;
  const tilemoe_packed_lora* lora; /* required if experts.rank_1 or rank_2 is not 0, else null */
  const tilemoe_quantized_weights* quantized; /* required if experts.format_1 or format_2 is not 0,
                                                 else null */
} tilemoe_forward_args;
TILEMOE_API tilemoe_status tilemoe_forward(const tilemoe_experts* experts,
                                           const tilemoe_forward_args* args);

/* The gradients. An absent output is not computed. dX may be the addend itself, with its
 * strides. */
typedef struct tilemoe_backward_args {
  uint64_t struct_size;
  tilemoe_backward_mode mode;
  int32_t accumulate; /* dweights: 0 written, 1 added to (in float32, rounded once) */
  const tilemoe_routing* routing;
  const tilemoe_weights* weights;
  tilemoe_tensor X;  /* as in forward */
  tilemoe_tensor dO; /* X's shape; not read in REST */
  tilemoe_saved* saved;
  tilemoe_tensor dX;     /* out, X's shape */
  tilemoe_tensor addend; /* added to dX (the router's part, the residual's); X's shape; optional */
  const tilemoe_weights* dweights; /* out, each in its weight's shape, in the weight's dtype or
                                      float32; null: none is computed */
  tilemoe_tensor ds; /* out (pairs) float32; (T, K) is accepted for top-K. Skipped pairs get 0 */
  void* workspace;
  size_t workspace_bytes;
  void* stream;
  int32_t block_turns; /* as in forward */
  int32_t dry_run;     /* as in forward */
  /* null: the whole call. Else dO arrives in parts, in any mode but REST: all calls have the same
   * arguments, and a workspace that is not written between them. Each reads its own tokens' rows of
   * dO, and the last one, which writes the gradients, all of them and X. In mode OVER_H the saved
   * state counts the parts' tokens: a part that comes twice, a last part before all tokens came, and
   * any other backward once the first part was computed are refused. */
  const tilemoe_part* part;
  const tilemoe_packed_lora* lora; /* as in forward */
  const tilemoe_lora* dlora; /* out: gradients of A and B, each in the experts' dtype or float32;
                                written or added to, as dweights; null: none is computed */
  const tilemoe_quantized_weights* quantized; /* as in forward. dweights has no gradient of such a
                                                 weight */
} tilemoe_backward_args;
TILEMOE_API tilemoe_status tilemoe_backward(const tilemoe_experts* experts,
                                            const tilemoe_backward_args* args);

/* ------------------------------------------------- the GEMMs of the layer, one by one
 *
 * For activations that tilemoe_activation lacks: the caller computes A from H between two calls.
 *
 *   gathered_mm  H_r = W_e X_t + b_e for each row r of an expert e, t the row's token
 *   combine_mm   O_t = addend_t + sum over the token's pairs of s * (W_e A_r + b_e)
 *
 * They run the steps of the layer with TILEMOE_IDENTITY: H has the bits of the layer's H, and with
 * A = H the results and gradients have the bits of such a layer. `experts` has the activation
 * TILEMOE_IDENTITY, no adapters and no quantised weights; n is the width of H, or that of A: the
 * two calls may differ in it. H, A and their gradients are contiguous. Their rows from M on, the
 * sum of all f_e, have no token: those of H and of dA are set to zero, those of A and of dH are not
 * read. */

/* Forward of gathered_mm. */
typedef struct tilemoe_gathered_mm_args {
  uint64_t struct_size;
  const tilemoe_routing* routing;
  tilemoe_tensor X; /* (T, d); grouped: (capacity, d) */
  tilemoe_tensor W; /* (E, n, d), with stride 1 on d or on n */
  tilemoe_tensor b; /* (E, n); optional */
  tilemoe_tensor H; /* out (capacity, n) */
  void* workspace;
  size_t workspace_bytes;
  void* stream;
  int32_t block_turns; /* as in tilemoe_forward_args */
  int32_t reserved;
} tilemoe_gathered_mm_args;
TILEMOE_API tilemoe_status tilemoe_gathered_mm(const tilemoe_experts* experts,
                                               const tilemoe_gathered_mm_args* args);

/* Its gradients. An absent output is not computed. dX may be the addend itself, with its strides. */
typedef struct tilemoe_gathered_mm_backward_args {
  uint64_t struct_size;
  const tilemoe_routing* routing;
  tilemoe_tensor X; /* as in forward */
  tilemoe_tensor W;
  tilemoe_tensor dH;     /* (capacity, n) */
  tilemoe_tensor dX;     /* out, X's shape */
  tilemoe_tensor addend; /* added to dX; X's shape; optional */
  tilemoe_tensor dW;     /* out, W's shape, in its dtype or float32, either major */
  tilemoe_tensor db;     /* out (E, n), the same */
  void* workspace;
  size_t workspace_bytes;
  void* stream;
  int32_t block_turns;
  int32_t accumulate; /* dW and db: 0 written, 1 added to */
} tilemoe_gathered_mm_backward_args;
TILEMOE_API tilemoe_status tilemoe_gathered_mm_backward(
    const tilemoe_experts* experts, const tilemoe_gathered_mm_backward_args* args);

/* Forward of combine_mm. Grouped: O_r = addend_r + s_r * (...), rows from M on are zero. */
typedef struct tilemoe_combine_mm_args {
  uint64_t struct_size;
  const tilemoe_routing* routing;
  tilemoe_tensor A;      /* (capacity, n) */
  tilemoe_tensor W;      /* (E, d, n), with stride 1 on n or on d */
  tilemoe_tensor b;      /* (E, d); optional */
  tilemoe_tensor O;      /* out (T, d); grouped: (capacity, d) */
  tilemoe_tensor addend; /* O's shape; may be O itself, with its strides; optional */
  void* workspace;
  size_t workspace_bytes;
  void* stream;
  int32_t block_turns;
  int32_t reserved;
} tilemoe_combine_mm_args;
TILEMOE_API tilemoe_status tilemoe_combine_mm(const tilemoe_experts* experts,
                                              const tilemoe_combine_mm_args* args);

/* Its gradients. An absent output is not computed. */
typedef struct tilemoe_combine_mm_backward_args {
  uint64_t struct_size;
  const tilemoe_routing* routing;
  tilemoe_tensor A; /* as in forward */
  tilemoe_tensor W;
  tilemoe_tensor b;  /* as in forward: ds depends on it; optional */
  tilemoe_tensor dO; /* O's shape */
  tilemoe_tensor dA; /* out (capacity, n): s included */
  tilemoe_tensor ds; /* out (pairs) float32; (T, K) is accepted for top-K. Skipped pairs get 0 */
  tilemoe_tensor dW; /* out, W's shape, in its dtype or float32, either major */
  tilemoe_tensor db; /* out (E, d), the same */
  void* workspace;
  size_t workspace_bytes;
  void* stream;
  int32_t block_turns;
  int32_t accumulate; /* dW and db: 0 written, 1 added to */
} tilemoe_combine_mm_backward_args;
TILEMOE_API tilemoe_status tilemoe_combine_mm_backward(
    const tilemoe_experts* experts, const tilemoe_combine_mm_backward_args* args);

typedef enum tilemoe_mm TILEMOE_INT {
  TILEMOE_GATHERED_MM = 0,
  TILEMOE_GATHERED_MM_BACKWARD = 1,
  TILEMOE_COMBINE_MM = 2,
  TILEMOE_COMBINE_MM_BACKWARD = 3
} tilemoe_mm;

typedef struct tilemoe_mm_workspace_query {
  uint64_t struct_size;
  const tilemoe_experts* experts;
  const tilemoe_routing_spec* routing;
  tilemoe_mm mm;
  uint32_t gradients; /* of a backward, those that may be requested, and 0: all that it has. Of
                         gathered_mm: TILEMOE_GRADIENT_X, _W1 and _B1; of combine_mm: _A, which
                         is dA, _S, _W2 and _B2 */
} tilemoe_mm_workspace_query;
/* Workspace of one of these calls, as tilemoe_workspace_bytes() is of a pass. */
TILEMOE_API tilemoe_status tilemoe_mm_workspace_bytes(const tilemoe_mm_workspace_query* query,
                                                      size_t* bytes);

#ifdef __cplusplus
}
#endif
#endif /* TILEMOE_TILEMOE_H_ */
