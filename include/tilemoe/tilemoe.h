/**
 * @file
 * The C interface of TileMoE, its only binary boundary.
 *
 * The C++ headers in this folder (`layer.h`, `routing.h`, ...) are inline wrappers that throw an
 * exception if a function of this header returns an error status. Symbols are those of
 * docs/mathematics.md:
 *
 *     T, d      tokens of a batch, width of a token
 *     E, K      experts, experts per token
 *     n         width inside an expert; W1 has 2n rows if the activation is gated, else n
 *     f_e, M    rows of expert e; M is the sum of all f_e
 *     capacity  rows that the buffers can hold; M is known on the device only
 *     X, O      input and output (T, d)
 *     s         router weight of a pair (token, expert), float32
 *     H, A, Y   pre-activation (M, 2n), activation (M, n), expert output (M, d); rows by expert
 *
 * Rules for every function:
 *
 * - **Memory.** The caller owns all memory. A call does not allocate memory for tensors, and does
 *   not keep a pointer after it returns (CPU), or after the work that it put on the stream has run
 *   (CUDA).
 * - **Errors.** A function that returns `tilemoe_status` checks its arguments (null, dtype, shape,
 *   stride, alignment, sizes, overlap, workspace) before it writes anything. A failed check returns
 *   TILEMOE_INVALID_ARGUMENT or TILEMOE_UNSUPPORTED, leaves every output unchanged and sets
 *   tilemoe_last_error(). Values inside arrays are never errors.
 * - **Alignment.** Data pointers of X, weights, biases, H and outputs are aligned to 16 bytes, and
 *   so is every stride except the contiguous one. Workspaces are aligned to 16 bytes.
 * - **Overlap.** An output must not overlap another output, an input, the routing or the workspace,
 *   unless the function documents it; otherwise the call is an error. Views that interleave with
 *   one set of strides, such as the column halves of one matrix, do not overlap.
 * - **CUDA.** `stream` is a `cudaStream_t`; null is the legacy default stream. A call uses the
 *   current device of the calling thread: every pointer and the stream must belong to it. Arrays,
 *   also the routing's, `ids`, `seed` and `step`, are device memory; structs are host memory. The
 *   CPU backend does not read `stream`.
 * - **Limits.** Rows (T, pairs, capacity) are at most 2^31 - 1 on the CPU and 2^30 - 1 on CUDA.
 *   Size queries return an error above the limit, too.
 *
 * How structs grow: each struct starts with `struct_size`. The caller sets it to the `sizeof` of
 * the struct that it was compiled with, and zeroes every field that it does not use. New fields are
 * only appended. The library accepts
 *
 * - a smaller struct of an older caller: the missing fields are read as 0 and are not written;
 * - a larger struct of a newer caller if all fields that the library does not know are 0.
 *
 * Any other size is an error. Structs that the library fills follow the same rule: set their
 * `struct_size` first. Fields named `reserved` must be 0. tilemoe_tensor and tilemoe_quantized have
 * no `struct_size` and never change.
 */
#ifndef TILEMOE_TILEMOE_H_
#define TILEMOE_TILEMOE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Exports a symbol from the shared library. */
#if defined(_WIN32)
#define TILEMOE_API
#else
#define TILEMOE_API __attribute__((visibility("default")))
#endif

/** Underlying type of every enum that is an argument or a field. An int outside the enumerators is
 * then an error of the call, in C++ too, and not undefined behaviour. */
#ifdef __cplusplus
#define TILEMOE_INT : int
#else
#define TILEMOE_INT
#endif

/** @defgroup tilemoe_status Status and version
 * @{ */

/** Major version of this header. */
#define TILEMOE_VERSION_MAJOR 0
/** Minor version of this header. */
#define TILEMOE_VERSION_MINOR 2
/** Patch version of this header. */
#define TILEMOE_VERSION_PATCH 0
/** 10000 * major + 100 * minor + patch of this header; compare with tilemoe_version_number(). */
#define TILEMOE_VERSION_NUMBER \
  (10000 * TILEMOE_VERSION_MAJOR + 100 * TILEMOE_VERSION_MINOR + TILEMOE_VERSION_PATCH)

/** Result of a call. */
typedef enum tilemoe_status TILEMOE_INT {
  TILEMOE_SUCCESS = 0,          /**< the call succeeded */
  TILEMOE_INVALID_ARGUMENT = 1, /**< a shape, stride, dtype, pointer or size is wrong */
  TILEMOE_UNSUPPORTED = 2,      /**< valid, but not supported by this backend or build */
  TILEMOE_DEVICE_ERROR = 3,     /**< the device or its driver reported an error */
  TILEMOE_INTERNAL_ERROR = 4    /**< a defect of the library */
} tilemoe_status;

/** Returns the version of the library at run time, for instance "0.2.0". */
TILEMOE_API const char* tilemoe_version(void);
/** Returns the TILEMOE_VERSION_NUMBER of the library at run time, for instance 200. */
TILEMOE_API int tilemoe_version_number(void);
/** Returns the name of a status, for instance "invalid argument". Never null, for any number. */
TILEMOE_API const char* tilemoe_status_name(tilemoe_status status);
/** Returns the message of the last failed call on this thread, with the shape seen, file and line;
 * empty after a success. Valid until the next call on this thread. */
TILEMOE_API const char* tilemoe_last_error(void);

/** @} */

/** @defgroup tilemoe_tensors Tensors
 * @{ */

/** Data type of a tensor's elements. */
typedef enum tilemoe_dtype TILEMOE_INT {
  TILEMOE_FLOAT32 = 0,  /**< IEEE 754 binary32 */
  TILEMOE_BFLOAT16 = 1, /**< bfloat16 */
  TILEMOE_FLOAT16 = 2,  /**< IEEE 754 binary16 */
  TILEMOE_INT32 = 3,    /**< signed, 32 bits */
  TILEMOE_INT64 = 4     /**< signed, 64 bits */
} tilemoe_dtype;

/** Maximum number of dimensions of a tensor. */
#define TILEMOE_MAX_DIMS 3

/** A view of the caller's memory. An absent optional tensor has `data` null and `ndim` 0 (a zeroed
 * struct). A tensor of zero elements may have `data` null. The struct never changes, because other
 * structs contain it by value. */
typedef struct tilemoe_tensor {
  void* data;                       /**< first element */
  tilemoe_dtype dtype;              /**< data type of the elements */
  int32_t ndim;                     /**< number of dimensions; 0: absent */
  int64_t shape[TILEMOE_MAX_DIMS];  /**< size of each dimension */
  int64_t stride[TILEMOE_MAX_DIMS]; /**< step of each dimension, in elements */
} tilemoe_tensor;

/** Returns the bytes of one element; 0 for an unknown dtype. */
TILEMOE_API size_t tilemoe_dtype_size(tilemoe_dtype dtype);
/** Returns the name of a dtype, for instance "bfloat16". Never null, for any number. */
TILEMOE_API const char* tilemoe_dtype_name(tilemoe_dtype dtype);

/** @} */

/** @defgroup tilemoe_devices Devices
 * @{ */

/** Backend that runs a call, and the kind of memory of its arrays. */
typedef enum tilemoe_device TILEMOE_INT {
  TILEMOE_CPU = 0, /**< x86-64 CPU */
  TILEMOE_CUDA = 1 /**< the current CUDA device of the calling thread */
} tilemoe_device;

/** Returns 1 if this build has the backend and a device for it is present, else 0; the reason is in
 * tilemoe_last_error(). A GPU needs compute capability 8.0 or newer. If no arch of this build runs
 * on it (tilemoe_set_cuda_arch()), the layer returns TILEMOE_UNSUPPORTED; routing and the router
 * run. */
TILEMOE_API int tilemoe_device_available(tilemoe_device device);
/** Returns one line about the backend, for instance "cpu: 2 threads, AVX3, oneDNN 2.6.3", or the
 * error. Valid until the next call on this thread. */
TILEMOE_API const char* tilemoe_device_description(tilemoe_device device);
/** Sets the number of threads of the CPU backend, including the calling thread. 0 (the default)
 * requests one per core. Results do not depend on it; workspace sizes do. Do not call it while
 * another thread is inside the library.
 *
 * Returns TILEMOE_DEVICE_ERROR if the system starts fewer threads than requested; the library
 * continues with these, and tilemoe_num_threads() counts them. A child of `fork()` has none of its
 * parent's threads and starts the same number at its first computation. A build without the CPU
 * backend (`TILEMOE_CPU=OFF`) has 0 threads and returns TILEMOE_UNSUPPORTED. */
TILEMOE_API tilemoe_status tilemoe_set_num_threads(int threads);
/** Returns the number of threads of the CPU backend, including the calling thread. */
TILEMOE_API int tilemoe_num_threads(void);

/** Selects the arch, the kernels of the layer's grouped GEMMs on GPUs, for the whole process.
 *
 * `name` is "sm80" (compute capability 8.0 and newer), "sm90" (9.0), "sm100" (10.x, in builds for
 * 100f; experimental: not tested on a GPU), or "auto" or null for the newest arch that the device
 * runs, except "sm100". Before the first call the environment variable `TILEMOE_ARCH` (older name:
 * `TILEMOE_KIT`) selects the arch; it is read once and takes the same names. Without it: "auto".
 *
 * Returns TILEMOE_INVALID_ARGUMENT for an unknown name and TILEMOE_UNSUPPORTED for an arch that the
 * build lacks; the selection then stays as it was. Each call of the layer returns
 * TILEMOE_UNSUPPORTED, before it writes anything, if the device does not run the arch. A wrong
 * `TILEMOE_ARCH` is an error of these calls, too. An arch that was selected by name is never
 * replaced by another one.
 *
 * May be called from any thread at any time. A call of the layer reads the selection when it begins
 * and uses that arch for all its GEMMs. */
TILEMOE_API tilemoe_status tilemoe_set_cuda_arch(const char* name);
/** Returns the arch of the current device and the reason, for instance "sm90, the newest for
 * compute capability 9.0" or "sm80, set by TILEMOE_ARCH"; or the error if no arch runs there. Valid
 * until the next call on this thread. */
TILEMOE_API const char* tilemoe_cuda_arch(void);
/** Older name of tilemoe_set_cuda_arch(), with the same errors. */
TILEMOE_API tilemoe_status tilemoe_set_cuda_kit(const char* name);
/** Older name of tilemoe_cuda_arch(), with the same errors. */
TILEMOE_API const char* tilemoe_cuda_kit(void);

/** @} */

/** @defgroup tilemoe_routing Routing
 * @{ */

/** Source of a batch's rows. It also determines the order of the pairs, and so of ds. */
typedef enum tilemoe_routing_kind TILEMOE_INT {
  TILEMOE_ROUTING_TOP_K = 0,   /**< K pairs per token; pair `t * K + k` */
  TILEMOE_ROUTING_GENERAL = 1, /**< triples (token, expert, score) of the caller; pair = triple */
  TILEMOE_ROUTING_ROUNDED = 2, /**< token rounding; pairs by token, see `token_offsets` */
  TILEMOE_ROUTING_GROUPED = 3  /**< rows already sorted by expert; pair = row */
} tilemoe_routing_kind;

/** Rounding of an expert's count f_e to f'_e, a multiple of m, under token rounding. */
typedef enum tilemoe_rounding TILEMOE_INT {
  TILEMOE_ROUND_NEAREST = 0,    /**< up if f_e mod m >= m/2, else down */
  TILEMOE_ROUND_UP = 1,         /**< to the next multiple */
  TILEMOE_ROUND_DOWN = 2,       /**< to the previous multiple */
  TILEMOE_ROUND_STOCHASTIC = 3, /**< up with probability (f_e mod m) / m */
  TILEMOE_ROUND_BALANCED = 4    /**< keeps the sum: the largest remainders are rounded up */
} tilemoe_rounding;

/** How scores are computed from logits, and the value by which experts are chosen. */
typedef enum tilemoe_scoring TILEMOE_INT {
  TILEMOE_SOFTMAX_OVER_CHOSEN = 0,  /**< softmax over the K chosen logits */
  TILEMOE_SOFTMAX_OVER_ALL = 1,     /**< softmax over E; the chosen scores are kept as they are */
  TILEMOE_SOFTMAX_RENORMALIZED = 2, /**< softmax over E; the chosen scores divided by their sum */
  TILEMOE_SIGMOID = 3, /**< sigmoid; a selection bias affects the choice, not the score */
  TILEMOE_SIGMOID_RENORMALIZED = 4 /**< as SIGMOID, divided by the sum of the chosen scores
                                      (DeepSeek-V3) */
} tilemoe_scoring;

/** Score of a group of experts, if a token chooses among the best groups. Both rules use the value
 * that ranks experts: the logit, or sigmoid + selection bias. */
typedef enum tilemoe_group_score TILEMOE_INT {
  TILEMOE_GROUP_TOP2_SUM = 0, /**< sum of the two best experts (DeepSeek-V3); sigmoid scorings
                                 only */
  TILEMOE_GROUP_MAX = 1       /**< the best expert (DeepSeek-V2) */
} tilemoe_group_score;

/** Sizes of a routing, known on the host before the logits are computed. */
typedef struct tilemoe_routing_spec {
  uint64_t struct_size;      /**< sizeof(tilemoe_routing_spec) */
  tilemoe_device device;     /**< device of the routing's arrays */
  tilemoe_routing_kind kind; /**< source of the rows */
  int64_t T;                 /**< tokens (top-K, general, rounded); 0 for grouped */
  int64_t E;                 /**< experts */
  int64_t K;                 /**< experts per token (top-K, rounded); 0 otherwise */
  int64_t pairs;             /**< general: number of triples; 0 otherwise */
  int64_t capacity;          /**< rows; 0: the bound of the kind, see tilemoe_routing_capacity().
                                Grouped: the number of rows given */
  int64_t m;                 /**< rounded: rows are rounded to multiples of m >= 1 */
  tilemoe_rounding rounding; /**< rounded: the rounding rule */
  int32_t reserved;          /**< 0 */
  int64_t round_tokens;      /**< rounded: each `round_tokens` consecutive tokens are rounded
                                separately; a divisor of T. 0: all T together */
} tilemoe_routing_spec;

/** Indices of tilemoe_routing::counters, which are counted while a routing is built. */
enum tilemoe_counter {
  TILEMOE_COUNT_OVER_CAPACITY = 0, /**< pairs above the capacity: highest expert first, then highest
                                      token */
  TILEMOE_COUNT_BAD_IDS = 1,       /**< ids outside [0, E); tokens outside [0, T) or out of order */
  TILEMOE_COUNT_NAN_TOKENS = 2,    /**< tokens with a NaN logit; from pairs: with a NaN score */
  TILEMOE_COUNT_DROPPED = 3,       /**< rounded: chosen pairs that rounding dropped, also those
                                      above the capacity. Added pairs: M + OVER_CAPACITY - T*K +
                                      DROPPED */
  TILEMOE_COUNTERS = 4             /**< number of counters */
};

/** The routing of a batch: one object in the caller's memory, laid out by tilemoe_routing_bind().
 * The arrays are device memory; everything else is host memory. The arrays have 12 bytes per pair,
 * plus O(E), plus 4 bytes per token for general and rounded routing. `spec` is last, so that it can
 * grow. */
typedef struct tilemoe_routing {
  uint64_t struct_size;      /**< sizeof(tilemoe_routing) */
  int32_t* offsets;          /**< (E + 1): expert e has rows `[offsets[e], offsets[e + 1])`;
                                `offsets[E]` is M */
  int32_t* counters;         /**< (TILEMOE_COUNTERS), indexed by tilemoe_counter */
  int32_t* row_token;        /**< (capacity): token of a row; null for grouped */
  float* row_score;          /**< (capacity): s of a row; 1 for grouped without scores */
  int32_t* pair_row;         /**< (pairs): row of a pair, -1 if it has none; null for grouped */
  int32_t* token_offsets;    /**< (T + 1): pairs of token t are
                                `[token_offsets[t], token_offsets[t + 1])`; null for top-K, whose
                                pairs are `[t * K, t * K + K)`, and for grouped */
  void* reserved[4];         /**< null */
  tilemoe_routing_spec spec; /**< the sizes, with `pairs` and `capacity` filled in */
} tilemoe_routing;

/** Symbolic size of a routing's array. */
typedef enum tilemoe_routing_size TILEMOE_INT {
  TILEMOE_ROUTING_SIZE_0 = 0,       /**< 0 */
  TILEMOE_ROUTING_SIZE_T = 1,       /**< T */
  TILEMOE_ROUTING_SIZE_E = 2,       /**< E */
  TILEMOE_ROUTING_SIZE_PAIRS = 3,   /**< pairs */
  TILEMOE_ROUTING_SIZE_CAPACITY = 4 /**< capacity */
} tilemoe_routing_size;
/** One array of a routing: `size + more` elements of 4 bytes. */
typedef struct tilemoe_routing_array {
  const char* name;          /**< name of the field in tilemoe_routing */
  tilemoe_routing_size size; /**< the symbolic part of the size */
  int32_t more;              /**< the constant part of the size */
} tilemoe_routing_array;
/** Size of the arrays that tilemoe_routing_layout() fills. */
enum tilemoe_routing_array_count {
  TILEMOE_ROUTING_ARRAYS = 6 /**< maximum number of arrays of a routing */
};

/** Returns the arrays of a routing of this kind, in the order of tilemoe_routing_bind(). It writes
 * the first `*count` elements of `arrays[TILEMOE_ROUTING_ARRAYS]`.
 *
 * The first array begins at the start of the memory, and each other array at the next multiple of
 * 16 bytes after the previous one; the memory ends at the next multiple after the last one. For
 * callers that keep a routing as one array of their own and read parts of it without pointers. */
TILEMOE_API tilemoe_status tilemoe_routing_layout(tilemoe_routing_kind kind,
                                                  tilemoe_routing_array* arrays, int32_t* count);

/**
 * Returns the upper bound on M that determines the size of buffers:
 *
 *     top-K; rounded down        T*K
 *     rounded up, stochastic     T*K + E*(m-1)
 *     rounded nearest            T*K + E*(m/2)
 *     rounded balanced           T*K + m
 *     general                    pairs
 *     grouped                    capacity
 *
 * Bounds of top-K and rounded routing are at most T*E. With `round_tokens`: the bound of
 * `round_tokens` tokens times the number of groups. A `spec->capacity` other than 0 replaces the
 * bound. */
TILEMOE_API tilemoe_status tilemoe_routing_capacity(const tilemoe_routing_spec* spec,
                                                    int64_t* capacity);
/** Returns the bytes of the routing's arrays. Requires no device. */
TILEMOE_API tilemoe_status tilemoe_routing_bytes(const tilemoe_routing_spec* spec, size_t* bytes);
/** Returns the bytes of the workspace that builds the routing and computes its backward. Requires
 * no device. */
TILEMOE_API tilemoe_status tilemoe_routing_workspace_bytes(const tilemoe_routing_spec* spec,
                                                           size_t* bytes);
/** Lays the arrays out in `memory`, which has at least tilemoe_routing_bytes() bytes aligned to 16,
 * and fills `*routing`. Set `routing->struct_size` first. Does not write to `memory`, which must
 * outlive the routing. */
TILEMOE_API tilemoe_status tilemoe_routing_bind(const tilemoe_routing_spec* spec, void* memory,
                                                size_t bytes, tilemoe_routing* routing);

/** Arguments of tilemoe_top_k(). */
typedef struct tilemoe_top_k_args {
  uint64_t struct_size;          /**< sizeof(tilemoe_top_k_args) */
  tilemoe_device device;         /**< device of the arrays */
  tilemoe_scoring scoring;       /**< the scoring rule */
  int64_t K;                     /**< experts per token */
  tilemoe_tensor logits;         /**< (T, E) float32, bfloat16 or float16 */
  tilemoe_tensor selection_bias; /**< (E) float32, sigmoid scorings only; optional */
  tilemoe_tensor ids;            /**< out (T, K) int32 or int64, contiguous */
  tilemoe_tensor scores;         /**< out (T, K) float32, contiguous */
  tilemoe_tensor expert_counts;  /**< out (E) int32: tokens that chose each expert; optional */
  void* stream;                  /**< cudaStream_t */
  int64_t n_group;               /**< groups of experts; at most 32, divides E. 0 or 1: no groups */
  int64_t topk_group; /**< groups per token, in [1, n_group], with at least K experts in all; 0
                         without groups */
  tilemoe_group_score group_score; /**< the rule; TOP2_SUM requires groups of at least 2 experts */
  float routed_scaling_factor;     /**< factor of every score; 0 stands for 1 */
} tilemoe_top_k_args;
/** Chooses the top K of each token's logits and computes their scores. Ties go to the lower id, NaN
 * ranks last, and a token's K experts are in descending order. A token with any NaN logit gets K
 * distinct valid ids and NaN scores.
 *
 * With `n_group` groups of E / n_group consecutive experts, a token chooses its K among the experts
 * of its `topk_group` best groups (node-limited routing, arXiv 2412.19437, section 2.1.2); of equal
 * groups the lower one ranks first. Every score is finally multiplied by
 * `routed_scaling_factor`. */
TILEMOE_API tilemoe_status tilemoe_top_k(const tilemoe_top_k_args* args);

/** Arguments of tilemoe_top_k_scores(). */
typedef struct tilemoe_top_k_scores_args {
  uint64_t struct_size;         /**< sizeof(tilemoe_top_k_scores_args) */
  tilemoe_device device;        /**< device of the arrays */
  tilemoe_scoring scoring;      /**< the scoring rule */
  float routed_scaling_factor;  /**< factor of every score; 0 stands for 1 */
  int32_t reserved;             /**< 0 */
  tilemoe_tensor logits;        /**< (T, E) float32, bfloat16 or float16 */
  tilemoe_tensor ids;           /**< (T, K) int32 or int64, contiguous; K >= 1 */
  tilemoe_tensor scores;        /**< out (T, K) float32, contiguous */
  tilemoe_tensor expert_counts; /**< out (E) int32: occurrences of each expert; optional */
  void* stream;                 /**< cudaStream_t */
} tilemoe_top_k_scores_args;
/** Computes the scores of experts that were chosen elsewhere, for instance of ids that are replayed
 * from a rollout. If the ids are those that tilemoe_top_k() chooses, in its order, the scores are
 * bit-identical to its scores. An id outside [0, E) is absent: its score is 0, and sums do not
 * include it. Repeated ids each count. A token with any NaN logit gets NaN for each id in [0,
 * E). */
TILEMOE_API tilemoe_status tilemoe_top_k_scores(const tilemoe_top_k_scores_args* args);

/** Arguments of tilemoe_router_logits(). */
typedef struct tilemoe_router_logits_args {
  uint64_t struct_size;   /**< sizeof(tilemoe_router_logits_args) */
  tilemoe_device device;  /**< device of the arrays */
  int32_t reserved;       /**< 0 */
  tilemoe_tensor X;       /**< (T, d) float32, bfloat16 or float16; d a multiple of 8 */
  tilemoe_tensor weight;  /**< (E, d) X's dtype or float32 */
  tilemoe_tensor bias;    /**< (E) float32, bfloat16 or float16; optional */
  tilemoe_tensor logits;  /**< out (T, E) float32, bfloat16 or float16 */
  void* workspace;        /**< any contents */
  size_t workspace_bytes; /**< at least tilemoe_router_logits_workspace_bytes() */
  void* stream;           /**< cudaStream_t */
} tilemoe_router_logits_args;
/** Returns the bytes of the workspace of tilemoe_router_logits(). */
TILEMOE_API tilemoe_status tilemoe_router_logits_workspace_bytes(tilemoe_device device, int64_t T,
                                                                 int64_t E, int64_t d,
                                                                 tilemoe_dtype weight_dtype,
                                                                 size_t* bytes);
/** Computes the logits of a router, `X weight^T + bias`, in float32 with a fixed order of the sum,
 * rounded once. The bits of a token's logits depend on neither T, nor its position in the batch,
 * nor the other tokens: a rollout of one token and a training batch choose the same experts. The
 * bits may differ between devices (docs/mathematics.md).
 *
 * CUDA: X is bfloat16 or float16. A float32 weight is computed as a sum of three bfloat16 terms,
 * each the rounding of the remainder of the previous ones, and X must then be bfloat16. Any other
 * combination returns TILEMOE_UNSUPPORTED. */
TILEMOE_API tilemoe_status tilemoe_router_logits(const tilemoe_router_logits_args* args);

/** Arguments of tilemoe_route_top_k(). */
typedef struct tilemoe_route_top_k_args {
  uint64_t struct_size;   /**< sizeof(tilemoe_route_top_k_args) */
  tilemoe_tensor ids;     /**< (T, K) int32 or int64 */
  tilemoe_tensor scores;  /**< (T, K) float32, bfloat16 or float16 */
  void* workspace;        /**< any contents */
  size_t workspace_bytes; /**< at least tilemoe_routing_workspace_bytes() */
  void* stream;           /**< cudaStream_t */
} tilemoe_route_top_k_args;
/** Builds a routing of kind TOP_K from chosen ids and scores. The rows of an expert are in the
 * order of the pairs. Ids outside [0, E) are skipped. */
TILEMOE_API tilemoe_status tilemoe_route_top_k(tilemoe_routing* routing,
                                               const tilemoe_route_top_k_args* args);

/** Maximum T of tilemoe_route_tokens(). */
#define TILEMOE_ROUTE_TOKENS_MOST_T 64
/** Maximum E of tilemoe_route_tokens(). */
#define TILEMOE_ROUTE_TOKENS_MOST_E 512
/** Maximum K of tilemoe_route_tokens(). */
#define TILEMOE_ROUTE_TOKENS_MOST_K 32
/** Maximum d of tilemoe_route_tokens(). */
#define TILEMOE_ROUTE_TOKENS_MOST_D 65536
/** Arguments of tilemoe_route_tokens(). */
typedef struct tilemoe_route_tokens_args {
  uint64_t struct_size;            /**< sizeof(tilemoe_route_tokens_args) */
  tilemoe_scoring scoring;         /**< the scoring rule */
  tilemoe_dtype logits_dtype;      /**< float32, bfloat16 or float16: experts are chosen from logits
                                      of this dtype */
  tilemoe_tensor X;                /**< (T, d) float32, bfloat16 or float16; d a multiple of 8 */
  tilemoe_tensor router_weight;    /**< (E, d) X's dtype or float32 */
  tilemoe_tensor router_bias;      /**< (E) float32, bfloat16 or float16; optional */
  tilemoe_tensor selection_bias;   /**< (E) float32, sigmoid scorings only; optional */
  tilemoe_tensor logits;           /**< out (T, E) logits_dtype, contiguous; optional */
  tilemoe_tensor expert_counts;    /**< out (E) int32: tokens that chose each expert; optional */
  int64_t n_group;                 /**< as in tilemoe_top_k_args */
  int64_t topk_group;              /**< as in tilemoe_top_k_args */
  tilemoe_group_score group_score; /**< as in tilemoe_top_k_args */
  float routed_scaling_factor;     /**< as in tilemoe_top_k_args */
  void* workspace;                 /**< any contents */
  size_t workspace_bytes;          /**< at least tilemoe_route_tokens_workspace_bytes() */
  void* stream;                    /**< cudaStream_t */
} tilemoe_route_tokens_args;
/** Returns the bytes of the workspace of tilemoe_route_tokens() for tokens of width d. */
TILEMOE_API tilemoe_status tilemoe_route_tokens_workspace_bytes(const tilemoe_routing_spec* spec,
                                                                int64_t d, size_t* bytes);
/** Builds a routing of kind TOP_K from the tokens: the router's GEMM, the choice and the routing of
 * a small number of tokens in one launch. For inference: the logits, which backward may read, are
 * written only if `logits` is given.
 *
 * The logits are `X router_weight^T + router_bias` in float32, in the fixed order of the sum of
 * both backends (docs/mathematics.md), rounded to `logits_dtype`. All other results are
 * bit-identical to those of tilemoe_top_k() and tilemoe_route_top_k() with these logits and the
 * spec's K.
 *
 * Returns TILEMOE_UNSUPPORTED on either backend above TILEMOE_ROUTE_TOKENS_MOST_T tokens,
 * TILEMOE_ROUTE_TOKENS_MOST_E experts, TILEMOE_ROUTE_TOKENS_MOST_K experts per token or width
 * TILEMOE_ROUTE_TOKENS_MOST_D; use a dense GEMM, tilemoe_top_k() and tilemoe_route_top_k()
 * instead. */
TILEMOE_API tilemoe_status tilemoe_route_tokens(tilemoe_routing* routing,
                                                const tilemoe_route_tokens_args* args);

/** Arguments of tilemoe_route_general(). */
typedef struct tilemoe_route_general_args {
  uint64_t struct_size;   /**< sizeof(tilemoe_route_general_args) */
  tilemoe_tensor tokens;  /**< (pairs) int32 or int64, ascending */
  tilemoe_tensor experts; /**< (pairs) int32 or int64 */
  tilemoe_tensor scores;  /**< (pairs) float32, bfloat16 or float16 */
  void* workspace;        /**< any contents */
  size_t workspace_bytes; /**< at least tilemoe_routing_workspace_bytes() */
  void* stream;           /**< cudaStream_t */
} tilemoe_route_general_args;
/** Builds a routing of kind GENERAL from triples (token, expert, score) sorted by token. A triple
 * is skipped if its token is outside [0, T) or smaller than a previous one, or if its expert is
 * outside [0, E), for instance -1 for an expert of another rank. Repeated pairs are valid. */
TILEMOE_API tilemoe_status tilemoe_route_general(tilemoe_routing* routing,
                                                 const tilemoe_route_general_args* args);

/** Arguments of tilemoe_route_rounded(). */
typedef struct tilemoe_route_rounded_args {
  uint64_t struct_size;         /**< sizeof(tilemoe_route_rounded_args) */
  tilemoe_tensor logits;        /**< (T, E) float32, bfloat16 or float16 */
  tilemoe_tensor seed;          /**< (1) int64; stochastic rounding only */
  tilemoe_tensor step;          /**< (1) int64; stochastic rounding only */
  tilemoe_tensor expert_counts; /**< out (E) int32: f_e before rounding; optional */
  void* workspace;              /**< any contents */
  size_t workspace_bytes;       /**< at least tilemoe_routing_workspace_bytes() */
  void* stream;                 /**< cudaStream_t */
} tilemoe_route_rounded_args;
/** Builds a routing of kind ROUNDED from logits: top-K by softmax over all experts, renormalised,
 * then each expert's count is rounded to a multiple of m.
 *
 * Expert e ranks its top-K tokens before all other tokens, then by s, then by lower token id, and
 * takes the first f'_e. If f'_e would exceed T, it is `floor(T/m)*m`; if `T < m`, the routing is
 * plain top-K. The rows of an expert are in ascending order of tokens. A token's pairs are in the
 * order of its K, followed by added pairs in the order of experts; dropped pairs are not among
 * them, and the unused tail of `pair_row` is -1.
 *
 * With `round_tokens` = S in the spec, all of this applies to each S tokens with T = S, as if they
 * were a separate batch; the rows of an expert are those of the first S tokens, then of the next S,
 * and counts and counters are sums. Stochastic rounding of group g of G draws with `step * G + g`
 * (modulo 2^64), so that two groups of a training run never draw the same numbers. */
TILEMOE_API tilemoe_status tilemoe_route_rounded(tilemoe_routing* routing,
                                                 const tilemoe_route_rounded_args* args);

/** Arguments of tilemoe_route_grouped(). */
typedef struct tilemoe_route_grouped_args {
  uint64_t struct_size;  /**< sizeof(tilemoe_route_grouped_args) */
  tilemoe_tensor counts; /**< (E) int32 or int64: rows of each expert */
  tilemoe_tensor scores; /**< (capacity) float32; optional: every s is 1 */
  void* stream;          /**< cudaStream_t */
} tilemoe_route_grouped_args;
/** Builds a routing of kind GROUPED from the number of rows of each expert. Negative counts count
 * as 0; rows after the sum of the counts are never read. */
TILEMOE_API tilemoe_status tilemoe_route_grouped(tilemoe_routing* routing,
                                                 const tilemoe_route_grouped_args* args);

/** Arguments of tilemoe_router_backward(). */
typedef struct tilemoe_router_backward_args {
  uint64_t struct_size;           /**< sizeof(tilemoe_router_backward_args) */
  tilemoe_scoring scoring;        /**< rule of the choice; rounded routing: SOFTMAX_RENORMALIZED */
  int32_t accumulate;             /**< dlogits: 0 written, 1 added to */
  const tilemoe_routing* routing; /**< of kind TOP_K or ROUNDED */
  tilemoe_tensor logits;          /**< (T, E); optional if the scores suffice */
  tilemoe_tensor ds;              /**< (pairs) float32, as written by tilemoe_backward() */
  tilemoe_tensor dlogits;         /**< out (T, E), float32 or the logits' dtype */
  void* workspace;                /**< any contents */
  size_t workspace_bytes;         /**< at least tilemoe_routing_workspace_bytes() */
  void* stream;                   /**< cudaStream_t */
  float routed_scaling_factor;    /**< factor of the scores; 0 stands for 1; rounded: 0 or 1 */
  int32_t reserved;               /**< 0 */
} tilemoe_router_backward_args;
/** Computes the gradient of the logits from ds. Top-K routing with SOFTMAX_OVER_CHOSEN or
 * SOFTMAX_RENORMALIZED does not need the logits; other scorings read them as the router stored
 * them. A token's skipped pairs count as absent. */
TILEMOE_API tilemoe_status tilemoe_router_backward(const tilemoe_router_backward_args* args);

/** Arguments of tilemoe_router_losses(). */
typedef struct tilemoe_router_losses_args {
  uint64_t struct_size;         /**< sizeof(tilemoe_router_losses_args) */
  tilemoe_device device;        /**< device of the arrays */
  float balance_coefficient;    /**< factor of the balance loss in dlogits */
  float z_coefficient;          /**< factor of the z loss in dlogits */
  int32_t reserved;             /**< 0 */
  tilemoe_tensor logits;        /**< (T, E) float32, bfloat16 or float16 */
  tilemoe_tensor expert_counts; /**< (E) int32: c_e, tokens that chose each expert, before
                                   rounding */
  tilemoe_tensor losses;        /**< out (2) float32: balance, z; optional */
  tilemoe_tensor dlogits; /**< (T, E), float32 or the logits' dtype: the gradient of the losses is
                             added to it; optional */
  void* workspace;        /**< any contents */
  size_t workspace_bytes; /**< at least tilemoe_router_losses_workspace_bytes() */
  void* stream;           /**< cudaStream_t */
} tilemoe_router_losses_args;
/** Returns the bytes of the workspace of tilemoe_router_losses(). */
TILEMOE_API tilemoe_status tilemoe_router_losses_workspace_bytes(tilemoe_device device, int64_t T,
                                                                 int64_t E, size_t* bytes);
/**
 * Computes the auxiliary losses of a router and adds their gradient to dlogits. With p the softmax
 * over E:
 *
 *     balance = E * sum_e (c_e / sum(c)) * mean_t p(t, e)     1 if balanced
 *     z       = mean_t logsumexp(logits_t)^2
 *
 * Sources: Switch Transformer, arXiv 2101.03961, equation 4; ST-MoE, arXiv 2202.08906, equation 5.
 * Tokens with a NaN logit are excluded from both means. */
TILEMOE_API tilemoe_status tilemoe_router_losses(const tilemoe_router_losses_args* args);

/** @} */

/** @defgroup tilemoe_rows Sums of rows
 * @{ */

/** Maximum number of sources of tilemoe_sum_rows(). */
#define TILEMOE_MAX_SOURCES 64
/** Maximum number of places per row of tilemoe_sum_rows(). */
#define TILEMOE_MAX_PLACES 64
/** Arguments of tilemoe_sum_rows(). */
typedef struct tilemoe_sum_rows_args {
  uint64_t struct_size;      /**< sizeof(tilemoe_sum_rows_args) */
  tilemoe_device device;     /**< device of `place`, `addend` and `out` */
  int32_t sources;           /**< number of sources, in [1, TILEMOE_MAX_SOURCES] */
  const void* const* source; /**< (sources), host memory: each (source_rows, d) of out's dtype,
                                contiguous. CUDA: memory that the current device can read, its own
                                or another GPU's */
  int64_t source_rows;       /**< rows of a source; `sources * source_rows` is at most 2^31 - 1 */
  tilemoe_tensor place;  /**< (rows, P) int32, contiguous; P in [1, TILEMOE_MAX_PLACES]. Row r of
                            source s is `s * source_rows + r`; any other number is not a row */
  tilemoe_tensor addend; /**< (rows, d) out's dtype; may be `out`, with its strides; optional */
  tilemoe_tensor out;    /**< (rows, d) float32 (CPU), bfloat16 or float16; d a multiple of 8 */
  void* stream;          /**< cudaStream_t */
} tilemoe_sum_rows_args;
/** Sums rows of several arrays: out_i is addend_i plus the rows at row i's places, in float32, in
 * the order of the places (the addend first), rounded once. The first existing term starts the sum:
 * a single term keeps its value, including -0; with one place and no addend, `out` has the bits of
 * the source, including NaN. Without terms a row is zero.
 *
 * Sources may be memory of other GPUs, mapped for instance as symmetric memory. The caller ensures
 * that they are written before the call and not again until it has run. An overlap of `out` and a
 * source is detected by address only: memory that is mapped twice has two addresses. */
TILEMOE_API tilemoe_status tilemoe_sum_rows(const tilemoe_sum_rows_args* args);

/** @} */

/** @defgroup tilemoe_layer The layer
 * @{ */

/** Activation of the experts; `activations.inc` lists the formulas. W1 is (E, 2n, d) if the
 * activation is gated, else (E, n, d). New activations are appended, gated or not: call
 * tilemoe_activation_gated() and do not rely on the order. */
typedef enum tilemoe_activation TILEMOE_INT {
  TILEMOE_SWIGLU = 0,       /**< gated: `silu(gate) * up` */
  TILEMOE_GEGLU = 1,        /**< gated: `gelu(gate) * up` */
  TILEMOE_GEGLU_TANH = 2,   /**< gated: `gelu_tanh(gate) * up` */
  TILEMOE_REGLU = 3,        /**< gated: `relu(gate) * up` */
  TILEMOE_SILU = 4,         /**< `silu(h)` */
  TILEMOE_GELU = 5,         /**< `gelu(h)` */
  TILEMOE_GELU_TANH = 6,    /**< `gelu_tanh(h)` */
  TILEMOE_RELU = 7,         /**< `relu(h)` */
  TILEMOE_RELU_SQUARED = 8, /**< `relu(h) ** 2` */
  TILEMOE_IDENTITY = 9,     /**< `h` */
  TILEMOE_GLU = 10,         /**< gated: `sigmoid(gate) * up` */
  TILEMOE_SITU_GLU = 11,    /**< gated: `4 * tanh(gate / 4) * sigmoid(gate) * 25 * tanh(up / 25)` */
} tilemoe_activation;
/** Returns 1 if W1 has gate and up rows, else 0; 0 also for an unknown activation. */
TILEMOE_API int tilemoe_activation_gated(tilemoe_activation activation);
/** Returns the name of an activation, for instance "swiglu". Never null, for any number. */
TILEMOE_API const char* tilemoe_activation_name(tilemoe_activation activation);

/** Position of W1's gate and up rows. CONCATENATED if the activation is not gated. */
typedef enum tilemoe_gate_layout TILEMOE_INT {
  TILEMOE_GATE_CONCATENATED = 0, /**< W1 (E, 2n, d): n gate rows, then n up rows (gate_up_proj) */
  TILEMOE_GATE_INTERLEAVED = 1,  /**< W1 (E, 2n, d): gate and up rows alternate, gate first */
  TILEMOE_GATE_SPLIT = 2         /**< W1 (E, n, d) is the gate, W1_up (E, n, d) the up (w1, w3) */
} tilemoe_gate_layout;

/** Format of a quantised weight in a checkpoint, see tilemoe_quantized. */
typedef enum tilemoe_format TILEMOE_INT {
  TILEMOE_FORMAT_NONE = 0,       /**< not quantised */
  TILEMOE_FORMAT_FP8 = 1,        /**< DeepSeek-V3: e4m3, a float32 scale per 128 x 128 values */
  TILEMOE_FORMAT_MXFP4 = 2,      /**< gpt-oss: e2m1, an e8m0 scale per 32 values of a row */
  TILEMOE_FORMAT_NF4 = 3,        /**< bitsandbytes: NormalFloat4, a float32 scale per 64 values */
  TILEMOE_FORMAT_NF4_DOUBLE = 4, /**< as NF4, with 8-bit scales that are quantised in blocks of
                                    256 */
  TILEMOE_FORMAT_NVFP4 = 5       /**< e2m1, an e4m3 scale per 16 values of a row, and a float32
                                    scale per expert */
} tilemoe_format;
/** Returns the name of a format: "fp8", "mxfp4", "nf4", "nf4_double", "nvfp4"; "none" for 0 and
 * "unknown format" for any other number. */
TILEMOE_API const char* tilemoe_format_name(tilemoe_format format);

/** How the GEMMs of the experts compute, see tilemoe_experts::recipe. */
typedef enum tilemoe_recipe TILEMOE_INT {
  TILEMOE_RECIPE_BF16 = 0, /**< operands of the experts' dtype; quantised weights are dequantised */
  /** e4m3 operands with block scales in forward, the activation gradient and the input gradient;
   * operands of the experts' dtype in the weight gradients */
  TILEMOE_RECIPE_FP8 = 1,
  TILEMOE_RECIPE_FP8_FORWARD = 2 /**< FP8 in forward, BF16 in backward */
} tilemoe_recipe;

/** Sizes and function of the experts. */
typedef struct tilemoe_experts {
  uint64_t struct_size;            /**< sizeof(tilemoe_experts) */
  tilemoe_device device;           /**< device of the arrays */
  tilemoe_dtype dtype;             /**< dtype of X, O, weights, biases and H: float32 (CPU),
                                      bfloat16 or float16 */
  int64_t d;                       /**< width of a token, a multiple of 8 */
  int64_t n;                       /**< width inside an expert, a multiple of 8 */
  int64_t E;                       /**< experts */
  tilemoe_activation activation;   /**< activation of the experts */
  tilemoe_gate_layout gate_layout; /**< position of W1's gate and up rows */
  /** SwiGLU only, the form of gpt-oss: `gate = min(gate, clamp)`, `up = clip(up, -clamp, clamp)`,
   * `A = gate * sigmoid(alpha * gate) * (up + up_shift)`. All three 0: the plain form (no clamp,
   * alpha 1). */
  float clamp;
  float alpha;    /**< see `clamp` */
  float up_shift; /**< see `clamp` */
  /** Number of column blocks in which Y (capacity, d) of the forward and dX~ (capacity, d) of the
   * backward are computed, one after the other: less workspace, slightly slower. A block has a
   * multiple of 64 columns; 0 or 1: all columns at once. The results have the same error bounds. */
  int32_t column_blocks;
  int32_t rank_1; /**< columns of P1, see tilemoe_lora; 0: W1 has no adapter */
  int32_t rank_2; /**< columns of P2, see tilemoe_lora; 0: W2 has no adapter */
  /** Format of W1 and W1_up, see tilemoe_quantized. A quantised weight is absent in
   * tilemoe_weights, is passed as `quantized` of the call, and has a gradient only in the FP8
   * recipes. With TILEMOE_RECIPE_BF16 each pass dequantises the experts that have rows into the
   * workspace and computes with the result: the bits are those of the layer with that weight. */
  tilemoe_format format_1;
  tilemoe_format format_2; /**< format of W2, as `format_1` */
  /** Number of blocks of experts in which quantised weights are dequantised. The workspace holds
   * one block, which is used before the next one is dequantised: less workspace, slightly slower. 0
   * or 1: all experts at once. The bits are the same. */
  int32_t weight_blocks;
  int32_t reserved; /**< 0 */
  /** The FP8 recipes multiply e4m3 codes. X and A, and in backward dO and dH, are quantised with a
   * scale per 128 columns of a row (dH: of gate or of up), as tilemoe_quantize_fp8() does with
   * `block_rows` 1, and the weights are the codes of the call. Every 128 terms a sum is multiplied
   * by the scales and added to a float32 accumulator. A is quantised from float32, dH from its
   * rounded values; H (see `format_H`), Y, O, dH, A' and dX~ have the experts' dtype.
   *
   * In backward, TILEMOE_RECIPE_FP8 reads the transposed weights of the call, and computes the
   * weight gradients from dO, A', dH and X in the experts' dtype. TILEMOE_RECIPE_FP8_FORWARD
   * dequantises the weights and computes as TILEMOE_RECIPE_BF16 does, from the H of this forward.
   * With both, the gradients of W1 and W2 may be requested: those of the values of the codes.
   *
   * Requires: FP8 weights that are not transposed; an activation with a gate; d and n multiples of
   * 16; the gate layout split, or concatenated with n a multiple of 128; adapters only with
   * FP8_FORWARD, P1, P2 and their GEMMs in the experts' dtype; on CUDA a GPU with FP8 wgmma and the
   * arch "sm90". A block of `column_blocks` has a multiple of 128 columns. */
  tilemoe_recipe recipe;
  int32_t float_scales; /**< FP8: 1: scales of rows are any float32; 0: powers of two */
  /** Format of the H that forward saves: NONE, the experts' dtype, or FP8, e4m3 codes with a scale
   * per 128 columns of gate or of up of a row (tilemoe_saved::H_codes), about half of the bytes.
   * Forward computes A from float32 and quantises H from float32, so that O does not depend on this
   * field; backward computes with code * scale, rounded to the experts' dtype. Requires
   * TILEMOE_RECIPE_FP8. */
  tilemoe_format format_H;
  int32_t reserved_2; /**< 0 */
} tilemoe_experts;

/** Weights of the experts, in the layout of the checkpoint, or their gradients. The last two
 * dimensions of a weight may be stored in either order: W1 (E, 2n, d) with stride 1 on d, or on 2n
 * if the checkpoint stores (E, d, 2n). W1 and W1_up are stored in the same order. Each gradient has
 * its own order and dtype, except that the gradient of an interleaved W1 with stride 1 on d must
 * have stride 1 on d, too. */
typedef struct tilemoe_weights {
  uint64_t struct_size; /**< sizeof(tilemoe_weights) */
  tilemoe_tensor W1;    /**< (E, 2n, d), or (E, n, d) if split or not gated; absent if quantised */
  tilemoe_tensor W1_up; /**< (E, n, d) if split, else absent; absent if quantised */
  tilemoe_tensor W2;    /**< (E, d, n); absent if quantised */
  tilemoe_tensor b1;    /**< (E, 2n) in W1's row order, or (E, n) if split or not gated; optional */
  tilemoe_tensor b1_up; /**< (E, n) if split and biased, else absent */
  tilemoe_tensor b2;    /**< (E, d); optional */
} tilemoe_weights;

/**
 * A quantised weight of all experts as its checkpoint stores it, contiguous: (E, R, C) values. They
 * are the weight (E, rows, columns), or with `transposed` the weight as (E, columns, rows): W1 has
 * R = 2n and C = d, transposed R = d and C = 2n. `codes` has one narrow number per value, in this
 * order, and `scales` one number per block of values:
 *
 *     format      codes                           scales                     value
 *     FP8         (E, R, C) e4m3                  (E, R/128, C/128) float32  code * scale
 *     MXFP4       (E, R, C/2), low nibble first   (E, R, C/32) e8m0          code * 2^(scale - 127)
 *     NF4         (E*R*C/2), high nibble first    (E*R*C/64) float32         nf4[code] * scale
 *     NF4_DOUBLE  as NF4                          (E*R*C/64) uint8           nf4[code] * s
 *     NVFP4       (E, R, C/2), low nibble first   (E, R, C/16) e4m3          code * g
 *
 *     s = offset + scale_map[scale] * scale_of_scales[block / 256]
 *     g = scale_of_scales[expert] * scale
 *
 * FP8 rounds R/128 and C/128 up. C must be a multiple of 32 (MXFP4), 16 (NVFP4) or 8 (others), and
 * E*R*C of 64 (NF4, NF4_DOUBLE). Each multiplication and addition is in float32; the value is
 * rounded once more, to the dtype of the result. NaN codes of e4m3, and the e8m0 scale 255, are
 * NaN. `codes` is aligned to 16 bytes, other arrays to their element. The struct never changes,
 * because other structs contain it by value. */
typedef struct tilemoe_quantized {
  tilemoe_format format;        /**< NONE: absent, and all other fields are 0 */
  int32_t transposed;           /**< 1: the values are (E, columns, rows); else 0 */
  const void* codes;            /**< the narrow numbers, see above */
  const void* scales;           /**< scales of blocks of values, see above */
  const float* scale_map;       /**< NF4_DOUBLE: (256); else null */
  const float* scale_of_scales; /**< NF4_DOUBLE: (E*R*C/64/256, rounded up); NVFP4: (E); else
                                   null */
  const float* scale_offset;    /**< NF4_DOUBLE: (1); else null */
} tilemoe_quantized;

/** Quantised weights of a call. The weights with a format in tilemoe_experts are given; all others
 * have the format NONE. W1 and W1_up have the same `transposed`. */
typedef struct tilemoe_quantized_weights {
  uint64_t struct_size;    /**< sizeof(tilemoe_quantized_weights) */
  tilemoe_quantized W1;    /**< W1, of experts.format_1 */
  tilemoe_quantized W1_up; /**< W1_up, of experts.format_1, if split */
  tilemoe_quantized W2;    /**< W2, of experts.format_2 */
  /** TILEMOE_RECIPE_FP8: the same weights with `transposed` 1, as tilemoe_quantize_fp8() writes
   * them to `transposed_codes`; only backward reads them. Any other recipe: the format NONE. */
  tilemoe_quantized W1_transposed;
  tilemoe_quantized W1_up_transposed; /**< as W1_transposed */
  tilemoe_quantized W2_transposed;    /**< as W1_transposed */
} tilemoe_quantized_weights;

/** Arguments of tilemoe_dequantize(). */
typedef struct tilemoe_dequantize_args {
  uint64_t struct_size;     /**< sizeof(tilemoe_dequantize_args) */
  tilemoe_device device;    /**< device of the arrays */
  int32_t reserved;         /**< 0 */
  tilemoe_quantized weight; /**< the quantised weight */
  tilemoe_tensor out; /**< (E, R, C), contiguous, also if the weight is transposed: float32 (CPU),
                         bfloat16 or float16. C is a multiple of 8 */
  void* stream;       /**< cudaStream_t */
} tilemoe_dequantize_args;
/** Dequantises a whole weight. The layer does not need it: it dequantises in its workspace. */
TILEMOE_API tilemoe_status tilemoe_dequantize(const tilemoe_dequantize_args* args);

/** Arguments of tilemoe_quantize_fp8(). */
typedef struct tilemoe_quantize_fp8_args {
  uint64_t struct_size;  /**< sizeof(tilemoe_quantize_fp8_args) */
  tilemoe_device device; /**< device of the arrays */
  int32_t block_rows;    /**< rows of a block: 1 or 128 */
  int32_t float_scales;  /**< 0: scales are powers of two; 1: any float32 */
  int32_t reserved;      /**< 0 */
  int64_t part_rows;     /**< a divisor of R; 0 stands for R */
  tilemoe_tensor values; /**< (E, R, C) with stride 1 on C, float32, bfloat16 or float16; C is a
                            multiple of 8 */
  uint8_t* codes;        /**< out (E, R, C) e4m3, contiguous, aligned to 16 bytes */
  float* scales;         /**< out (E, S, C/128 rounded up), contiguous */
  void* stream;          /**< cudaStream_t */
  /** Blocks of 128 rows: the transposed codes, out (E, C, R), contiguous and aligned to 16 bytes; R
   * is a multiple of 8. Optional. */
  uint8_t* transposed_codes;
  float*
      transposed_scales; /**< with `transposed_codes`: out (E, C/128 rounded up, S), contiguous */
} tilemoe_quantize_fp8_args;
/** Quantises values to e4m3 with one scale per block of `block_rows` x 128 values; a value is
 * code * scale. Each part of the rows, for instance gate and up of W1, has its own blocks, so that
 * S = R / part_rows * (part_rows / block_rows, rounded up). Blocks at the ends of rows and parts may
 * be smaller. Blocks of 128 rows and one part give the arrays of TILEMOE_FORMAT_FP8.
 *
 * The scales are those of TransformerEngine's Float8BlockScaling: the values of a block are
 * multiplied by 448 / amax, by default rounded down to a power of two, and the scale is the
 * reciprocal. Codes are rounded to nearest, ties to even. A block of zeros has the scale 1. A NaN
 * has the code 0x7f and does not change the scale. An infinity gives its block the scale 1 and
 * becomes 448. */
TILEMOE_API tilemoe_status tilemoe_quantize_fp8(const tilemoe_quantize_fp8_args* args);

/** Maximum rank of a low-rank adapter. */
#define TILEMOE_MAX_RANK 256
/**
 * Low-rank adapters (LoRA, arXiv 2106.09685), or the gradients of A and B. The layer computes with
 * W1 + scale_1 B1 A1 and W2 + scale_2 B2 A2 for every expert, without storing these sums. An
 * adapter is absent if both of its factors are absent. A split gate may have an adapter of W1, of
 * W1_up, or of both, each with its own rank. A rank is a multiple of 8 and at most
 * TILEMOE_MAX_RANK; padding with zeros is exact.
 *
 *     P1 = X A1^T            H = [X, P1] [W1, scale_1 B1]^T
 *     P2 = A A2^T            Y = [A, P2] [W2, scale_2 B2]^T
 *     Q2 = dO scale_2 B2     dA' = [dO, Q2] [W2; A2]
 *     Q1 = dH scale_1 B1     dX~ = [dH, Q1] [W1; A1]
 *     dA1 = Q1^T X           dB1 = dH^T (scale_1 P1)
 *     dA2 = Q2^T (s A)       dB2 = dO^T (scale_2 s P2)
 *
 * A, scale B, P, Q, scale P and scale s P are rounded to the experts' dtype; sums are float32. If B
 * is 0, O and dX are bit-identical to the layer without adapters. */
typedef struct tilemoe_lora {
  uint64_t struct_size; /**< sizeof(tilemoe_lora) */
  tilemoe_tensor A1;    /**< (E, r, d) */
  tilemoe_tensor B1;    /**< (E, 2n, r) in W1's row order, or (E, n, r) if split or not gated */
  tilemoe_tensor A1_up; /**< (E, r, d), only if split */
  tilemoe_tensor B1_up; /**< (E, n, r), only if split */
  tilemoe_tensor A2;    /**< (E, r, n) */
  tilemoe_tensor B2;    /**< (E, d, r) */
  float scale_1;        /**< factor of B1 A1 and of B1_up A1_up; not read in gradients */
  float scale_2;        /**< factor of B2 A2; not read in gradients */
} tilemoe_lora;

/** Adapters in the form that the GEMMs read: in the experts' dtype, with the scale in B, in the
 * order of H's columns and in the storage order of the weights. tilemoe_pack_lora() fills the
 * struct, which refers to the caller's memory. It is valid for all calls until A, B or a scale
 * changes. */
typedef struct tilemoe_packed_lora {
  uint64_t struct_size; /**< sizeof(tilemoe_packed_lora) */
  tilemoe_tensor A1;    /**< (E, rank_1, d) */
  tilemoe_tensor B1;    /**< (E, columns of H, rank_1) */
  tilemoe_tensor A2;    /**< (E, rank_2, n) */
  tilemoe_tensor B2;    /**< (E, d, rank_2) */
  float scale_1;        /**< as in tilemoe_lora */
  float scale_2;        /**< as in tilemoe_lora */
  int32_t rank_gate;    /**< split: number of columns of P1 before those of W1_up's adapter */
  int32_t reserved;     /**< 0 */
} tilemoe_packed_lora;

/** Returns the bytes of the memory of packed adapters, from experts.rank_1 and rank_2. rank_1 is
 * the rank of A1; if the gate is split, the sum of the ranks of A1 and A1_up. */
TILEMOE_API tilemoe_status tilemoe_packed_lora_bytes(const tilemoe_experts* experts, size_t* bytes);
/** Arguments of tilemoe_pack_lora(). */
typedef struct tilemoe_pack_lora_args {
  uint64_t struct_size;           /**< sizeof(tilemoe_pack_lora_args) */
  const tilemoe_lora* lora;       /**< the adapters: float32, bfloat16 or float16, any strides */
  const tilemoe_weights* weights; /**< W1 and W2 with the strides of the layer's calls; their data
                                     is not read. A quantised weight has the strides of the
                                     contiguous (E, rows, columns), or if transposed of (E, columns,
                                     rows); an absent weight is not transposed */
  void* memory;                   /**< out: the packed adapters, aligned to 16 bytes */
  size_t bytes;                   /**< at least tilemoe_packed_lora_bytes() */
  void* stream;                   /**< cudaStream_t */
} tilemoe_pack_lora_args;
/** Packs adapters into memory of the caller and fills `*packed`. Set `packed->struct_size`
 * first. */
TILEMOE_API tilemoe_status tilemoe_pack_lora(const tilemoe_experts* experts,
                                             const tilemoe_pack_lora_args* args,
                                             tilemoe_packed_lora* packed);
/** Sets A1, B1, A2 and B2 of `*packed` to the factors in memory that tilemoe_pack_lora() has
 * filled, for experts of the same sizes and weights of the same strides. The caller sets the other
 * fields: `scale_1`, `scale_2` and `rank_gate` as tilemoe_pack_lora() returned them. No data is
 * read or written. For callers that keep packed adapters as one array of bytes, without the
 * struct. */
TILEMOE_API tilemoe_status tilemoe_packed_lora_bind(const tilemoe_experts* experts,
                                                    const tilemoe_weights* weights, void* memory,
                                                    size_t bytes, tilemoe_packed_lora* packed);

/** The state of a forward pass from which a backward pass starts. */
typedef enum tilemoe_saved_state TILEMOE_INT {
  TILEMOE_SAVED_H = 0,          /**< H, as written by forward */
  TILEMOE_SAVED_H_AND_DH = 1,   /**< H, and dH in the workspace `dH` */
  TILEMOE_SAVED_DH_OVER_H = 2,  /**< dH in the memory of H: H is consumed */
  TILEMOE_SAVED_PARTS_OF_DH = 3 /**< dH over H for the tokens of some parts: only calls with the
                                   other parts may follow, or a new forward */
} tilemoe_saved_state;

/** State that forward saves for backward in addition to X and the routing. The struct is host
 * memory, its arrays are device memory. */
typedef struct tilemoe_saved {
  uint64_t struct_size; /**< sizeof(tilemoe_saved) */
  tilemoe_tensor H; /**< (capacity, 2n) or (capacity, n), contiguous: gate columns, then up columns;
                       on CUDA in W1's own order if W1 is interleaved and has stride 1 on 2n. With
                       experts.format_H FP8 absent, except in mode OVER_H and in REST after it: the
                       memory of dH, which OVER_H writes */
  const void* dH;   /**< set by backward: the workspace that contains dH; null if none does */
  tilemoe_saved_state state; /**< set by forward and backward */
  int32_t reserved;          /**< 0 */
  int64_t parts_tokens; /**< set by backward: tokens whose dH is over H in SAVED_PARTS_OF_DH; not
                           counted in the smaller struct of an older caller */
  tilemoe_tensor P1;    /**< (capacity, rank_1), contiguous; absent without an adapter of W1 */
  tilemoe_tensor P2;    /**< (capacity, rank_2), contiguous; absent without an adapter of W2 */
  /** experts.format_H FP8: H as (capacity, 2n) e4m3 codes, contiguous and aligned to 16 bytes, else
   * null. Backward in mode OVER_H overwrites the codes and the scales; REST does not read them, and
   * they may be null. 16 columns of gate are followed by the same columns of up, both in the order
   * 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15. */
  uint8_t* H_codes;
  float* H_scales; /**< with `H_codes`: (capacity, n/128 rounded up, 2), gate and up, contiguous */
} tilemoe_saved;

/** Bytes of memory that must be kept from forward to backward. */
typedef struct tilemoe_saved_size {
  uint64_t struct_size; /**< sizeof(tilemoe_saved_size) */
  size_t rows;    /**< X (T, d), or the rows (capacity, d) of grouped routing, kept by the caller */
  size_t H;       /**< tilemoe_saved::H, or H_codes and H_scales */
  size_t routing; /**< tilemoe_routing_bytes() */
  size_t total;   /**< the sum of all other fields */
  size_t P1;      /**< tilemoe_saved::P1, part of `total` */
  size_t P2;      /**< tilemoe_saved::P2, part of `total` */
  size_t H_scales; /**< tilemoe_saved::H_scales, part of `H` */
} tilemoe_saved_size;
/** Fills `*size` with the bytes of the saved state. Set `size->struct_size` first. */
TILEMOE_API tilemoe_status tilemoe_saved_bytes(const tilemoe_experts* experts,
                                               const tilemoe_routing_spec* routing,
                                               tilemoe_saved_size* size);

/** Division of a backward pass: one call, or stages of one call each.
 *
 * ds, dW2 and db2 need dO; dX, dW1 and db1 need only dH. Each mode except REST computes the
 * requested gradients of all six. The bits do not depend on how the pass is divided. Peak memory is
 * lowest with OVER_H for ds, dW2, db2 and dX, followed by REST for dW1 and db1 with a separate
 * workspace: memory for dW1 is then not needed while dX's workspace is. If REST computes dX, ds is
 * complete before it, so that the router's part of dX can be the addend of dX. */
typedef enum tilemoe_backward_mode TILEMOE_INT {
  TILEMOE_BACKWARD_WHOLE = 0,  /**< Computes from dO and H. dH, if needed, is in the workspace and
                                  is lost afterwards. H is kept: backward may run again. */
  TILEMOE_BACKWARD_OVER_H = 1, /**< Computes from dO and H, and writes dH over H. The saved state is
                                  consumed: only REST may follow until the next forward. */
  TILEMOE_BACKWARD_FIRST = 2,  /**< Computes from dO and H, and leaves dH in the workspace. H is
                                  kept. REST may follow. */
  TILEMOE_BACKWARD_REST = 3    /**< Computes dX, dW1 and db1 from the dH of OVER_H or FIRST; may be
                                  repeated. The saved state has the place of dH. dO is not read and
                                  may be absent; ds, dW2 and db2 must be absent. After FIRST: with
                                  FIRST's workspace, not written in between. After OVER_H: with any
                                  workspace. */
} tilemoe_backward_mode;

/** A pass of the layer, as in tilemoe_workspace_query. */
typedef enum tilemoe_pass TILEMOE_INT {
  TILEMOE_PASS_INFERENCE = 0, /**< forward without a saved state */
  TILEMOE_PASS_FORWARD = 1,   /**< forward with a saved state */
  TILEMOE_PASS_BACKWARD = 2   /**< backward in one of its modes */
} tilemoe_pass;

/** Gradients as bits, which select those that a backward computes. */
enum tilemoe_gradient {
  TILEMOE_GRADIENT_X = 1,        /**< dX */
  TILEMOE_GRADIENT_S = 2,        /**< ds */
  TILEMOE_GRADIENT_W1 = 4,       /**< dW1 */
  TILEMOE_GRADIENT_W1_UP = 8,    /**< dW1_up */
  TILEMOE_GRADIENT_W2 = 16,      /**< dW2 */
  TILEMOE_GRADIENT_B1 = 32,      /**< db1 */
  TILEMOE_GRADIENT_B1_UP = 64,   /**< db1_up */
  TILEMOE_GRADIENT_B2 = 128,     /**< db2 */
  TILEMOE_GRADIENT_LORA_1 = 256, /**< gradients of A1, B1, A1_up and B1_up */
  TILEMOE_GRADIENT_LORA_2 = 512, /**< gradients of A2 and B2 */
  TILEMOE_GRADIENT_A = 1024      /**< dA, only of tilemoe_combine_mm_backward() */
};

/** Arguments of tilemoe_workspace_bytes(). */
typedef struct tilemoe_workspace_query {
  uint64_t struct_size;                /**< sizeof(tilemoe_workspace_query) */
  const tilemoe_experts* experts;      /**< the experts of the pass */
  const tilemoe_routing_spec* routing; /**< the routing's sizes */
  tilemoe_pass pass;                   /**< the pass */
  tilemoe_backward_mode mode; /**< PASS_BACKWARD: the mode; 0 for others. REST is a call after
                                 OVER_H; a call after FIRST uses FIRST's workspace */
  uint32_t gradients; /**< PASS_BACKWARD: the tilemoe_gradient bits that may be requested; 0: all of
                         the mode, except those of quantised weights. FIRST: its own gradients and
                         those of the REST calls that follow */
  int32_t cuda_sms;   /**< CUDA: SMs of the device of the pass, at most TILEMOE_MAX_SMS; the query
                         then requires no device. 0: those of the current device */
  const char* cuda_arch; /**< with `cuda_sms`: the arch of the pass, "sm80", "sm90" or "sm100"; null
                            or "auto": any arch of this build. Without `cuda_sms`: null */
} tilemoe_workspace_query;
/** Maximum tilemoe_workspace_query::cuda_sms. */
#define TILEMOE_MAX_SMS 65535
/** Returns the bytes of the workspace of one pass, sufficient for a call that requests these
 * gradients or some of them. The size depends on the shapes, the capacity and the requested
 * gradients, never on f_e; on the CPU also on the number of threads, and on CUDA on the SMs of the
 * device of the pass, which must be current unless `cuda_sms` is set. For a pass that may run on
 * several kinds of devices, use the largest of their sizes. */
TILEMOE_API tilemoe_status tilemoe_workspace_bytes(const tilemoe_workspace_query* query,
                                                   size_t* bytes);

/** A part of a pass, for X or dO that arrives in parts: the tokens
 * `[first_token, first_token + tokens)` and, of each expert e, their rows `[begins[e], ends[e])`.
 * The rows of an expert are in the order of their tokens, so consecutive tokens have one range of
 * rows of every expert.
 *
 * Parts are calls one after the other on one stream, in any order; each row and each token is in
 * exactly one part. Shared arrays (H, O, the workspace) are passed whole to each call. The bits do
 * not depend on how a pass is divided. Not supported with grouped routing. */
typedef struct tilemoe_part {
  uint64_t struct_size;  /**< sizeof(tilemoe_part) */
  const int32_t* begins; /**< (E), device memory: the routing's offsets, or `ends` of the previous
                            tokens */
  const int32_t* ends;   /**< (E), device memory: at most the end of the expert's rows */
  int64_t first_token;   /**< the first token of the part */
  int64_t tokens;        /**< number of tokens of the part */
  int32_t last;          /**< backward: 1 in the last call of the pass, else 0 */
  int32_t reserved;      /**< 0 */
} tilemoe_part;

/** Arguments of tilemoe_forward(). */
typedef struct tilemoe_forward_args {
  uint64_t struct_size;           /**< sizeof(tilemoe_forward_args) */
  const tilemoe_routing* routing; /**< the routing of the batch */
  const tilemoe_weights* weights; /**< the weights */
  tilemoe_tensor X;               /**< (T, d); grouped: (capacity, d) */
  tilemoe_tensor O;               /**< out, X's shape */
  tilemoe_tensor addend;          /**< X's shape; optional */
  tilemoe_saved* saved;           /**< null: inference, H is not written */
  void* workspace;                /**< any contents */
  size_t workspace_bytes;         /**< at least tilemoe_workspace_bytes() */
  void* stream;                   /**< cudaStream_t */
  /** CUDA: CTAs per SM of a GEMM, in waves; in [1, 16], 0 stands for 1. With 1, a CTA is persistent
   * for the whole GEMM and fills its pipeline once. If kernels of another stream occupy SMs, for
   * instance collectives that overlap with a training step, CTAs of these SMs start only when other
   * CTAs have ended; with 4, other SMs take over most of their work. The bits are the same. */
  int32_t block_turns;
  /** 1: check the arguments except the workspace, and do nothing else. Nothing is read, written or
   * launched: pointers, also the routing's, may be any addresses that are aligned to 16 bytes and
   * do not overlap. The saved state is unchanged. 0: run the pass. */
  int32_t dry_run;
  /** null: the whole pass. Otherwise only this part's rows of H and O are written, and only its
   * tokens' rows of X are read. */
  const tilemoe_part* part;
  /** Adapters; required if experts.rank_1 or rank_2 is not 0, else null. */
  const tilemoe_packed_lora* lora;
  /** Quantised weights; required if experts.format_1 or format_2 is not 0, else null. */
  const tilemoe_quantized_weights* quantized;
  /** FP8 recipes without an adapter of W1: X as e4m3 codes (T, d), or (capacity, d) if grouped,
   * contiguous and aligned to 16 bytes; X then must be absent. Null: X is quantised. */
  const uint8_t* X_codes;
  const float* X_scales; /**< with `X_codes`: (T, d/128 rounded up), contiguous; else null */
} tilemoe_forward_args;
/** Computes the forward pass of the layer, or inference if `saved` is null.
 *
 * `O_t = addend_t + sum over the token's pairs of s * (act(X_t W1_e^T + b1_e) W2_e^T + b2_e)`, in
 * float32, in the order of the token's pairs. Grouped: `O_r = addend_r + s_r * (...)`, and rows
 * after the sum of the counts are zero. O may share X's memory (backward needs X again), and may be
 * the addend, with its strides. */
TILEMOE_API tilemoe_status tilemoe_forward(const tilemoe_experts* experts,
                                           const tilemoe_forward_args* args);

/** Arguments of tilemoe_backward(). */
typedef struct tilemoe_backward_args {
  uint64_t struct_size;            /**< sizeof(tilemoe_backward_args) */
  tilemoe_backward_mode mode;      /**< division of the pass */
  int32_t accumulate;              /**< dweights and dlora: 0 written, 1 added to (in float32,
                                      rounded once) */
  const tilemoe_routing* routing;  /**< as in forward */
  const tilemoe_weights* weights;  /**< as in forward */
  tilemoe_tensor X;                /**< as in forward */
  tilemoe_tensor dO;               /**< X's shape; not read in REST */
  tilemoe_saved* saved;            /**< the state that forward saved */
  tilemoe_tensor dX;               /**< out, X's shape; may be the addend, with its strides */
  tilemoe_tensor addend;           /**< added to dX (the router's part, the residual's); X's shape;
                                      optional */
  const tilemoe_weights* dweights; /**< out, each in its weight's shape, in the weight's dtype or
                                      float32; null: none is computed */
  tilemoe_tensor ds; /**< out (pairs) float32; (T, K) is accepted for top-K. Skipped pairs get 0 */
  void* workspace;   /**< any contents; REST after FIRST: FIRST's workspace */
  size_t workspace_bytes; /**< at least tilemoe_workspace_bytes() */
  void* stream;           /**< cudaStream_t */
  int32_t block_turns;    /**< as in forward */
  int32_t dry_run;        /**< as in forward */
  /** null: the whole call. Otherwise dO arrives in parts, in any mode except REST: all calls have
   * the same arguments, and a workspace that is not written between them. Each call reads its own
   * tokens' rows of dO; the last one, which writes the gradients, reads all rows of dO and X. In
   * mode OVER_H the saved state counts the tokens of the parts. After the first part, a repeated
   * part, a last part before all tokens arrived, and any other backward are errors. */
  const tilemoe_part* part;
  const tilemoe_packed_lora* lora; /**< as in forward */
  const tilemoe_lora* dlora; /**< out: gradients of A and B, each in the experts' dtype or float32;
                                written or added to, as dweights; null: none is computed */
  /** As in forward. dweights has gradients of these weights only with an FP8 recipe. */
  const tilemoe_quantized_weights* quantized;
} tilemoe_backward_args;
/** Computes the gradients of the layer. The gradient of an absent output is not computed. */
TILEMOE_API tilemoe_status tilemoe_backward(const tilemoe_experts* experts,
                                            const tilemoe_backward_args* args);

/** @} */

/**
 * @defgroup tilemoe_mm The GEMMs of the layer, one by one
 *
 * For activations that tilemoe_activation lacks: the caller computes A from H between two calls.
 *
 *     gathered_mm  H_r = W_e X_t + b_e for each row r of an expert e, with t the row's token
 *     combine_mm   O_t = addend_t + sum over the token's pairs of s * (W_e A_r + b_e)
 *
 * Both run the steps of the layer with TILEMOE_IDENTITY: H is bit-identical to the layer's H, and
 * with A = H the results and gradients are bit-identical to those of such a layer. `experts` has
 * the activation TILEMOE_IDENTITY, no adapters and no quantised weights; n is the width of H, or of
 * A: it may differ between the two calls. H, A and their gradients are contiguous. Rows from M on,
 * the sum of all f_e, have no token: in H and dA they are set to zero, in A and dH they are not
 * read.
 *
 * @{ */

/** Arguments of tilemoe_gathered_mm(). */
typedef struct tilemoe_gathered_mm_args {
  uint64_t struct_size;           /**< sizeof(tilemoe_gathered_mm_args) */
  const tilemoe_routing* routing; /**< the routing of the batch */
  tilemoe_tensor X;               /**< (T, d); grouped: (capacity, d) */
  tilemoe_tensor W;               /**< (E, n, d), with stride 1 on d or on n */
  tilemoe_tensor b;               /**< (E, n); optional */
  tilemoe_tensor H;               /**< out (capacity, n) */
  void* workspace;                /**< any contents */
  size_t workspace_bytes;         /**< at least tilemoe_mm_workspace_bytes() */
  void* stream;                   /**< cudaStream_t */
  int32_t block_turns;            /**< as in tilemoe_forward_args */
  int32_t reserved;               /**< 0 */
} tilemoe_gathered_mm_args;
/** Gathers the rows of X and computes H. */
TILEMOE_API tilemoe_status tilemoe_gathered_mm(const tilemoe_experts* experts,
                                               const tilemoe_gathered_mm_args* args);

/** Arguments of tilemoe_gathered_mm_backward(). */
typedef struct tilemoe_gathered_mm_backward_args {
  uint64_t struct_size;           /**< sizeof(tilemoe_gathered_mm_backward_args) */
  const tilemoe_routing* routing; /**< as in forward */
  tilemoe_tensor X;               /**< as in forward */
  tilemoe_tensor W;               /**< as in forward */
  tilemoe_tensor dH;              /**< (capacity, n) */
  tilemoe_tensor dX;              /**< out, X's shape; may be the addend, with its strides */
  tilemoe_tensor addend;          /**< added to dX; X's shape; optional */
  tilemoe_tensor dW;              /**< out, W's shape, in its dtype or float32, in either order */
  tilemoe_tensor db;              /**< out (E, n), in W's dtype or float32 */
  void* workspace;                /**< any contents */
  size_t workspace_bytes;         /**< at least tilemoe_mm_workspace_bytes() */
  void* stream;                   /**< cudaStream_t */
  int32_t block_turns;            /**< as in tilemoe_forward_args */
  int32_t accumulate;             /**< dW and db: 0 written, 1 added to */
} tilemoe_gathered_mm_backward_args;
/** Computes the gradients of gathered_mm. The gradient of an absent output is not computed. */
TILEMOE_API tilemoe_status tilemoe_gathered_mm_backward(
    const tilemoe_experts* experts, const tilemoe_gathered_mm_backward_args* args);

/** Arguments of tilemoe_combine_mm(). */
typedef struct tilemoe_combine_mm_args {
  uint64_t struct_size;           /**< sizeof(tilemoe_combine_mm_args) */
  const tilemoe_routing* routing; /**< the routing of the batch */
  tilemoe_tensor A;               /**< (capacity, n) */
  tilemoe_tensor W;               /**< (E, d, n), with stride 1 on n or on d */
  tilemoe_tensor b;               /**< (E, d); optional */
  tilemoe_tensor O;               /**< out (T, d); grouped: (capacity, d) */
  tilemoe_tensor addend;          /**< O's shape; may be O, with its strides; optional */
  void* workspace;                /**< any contents */
  size_t workspace_bytes;         /**< at least tilemoe_mm_workspace_bytes() */
  void* stream;                   /**< cudaStream_t */
  int32_t block_turns;            /**< as in tilemoe_forward_args */
  int32_t reserved;               /**< 0 */
} tilemoe_combine_mm_args;
/** Computes O from A. Grouped: `O_r = addend_r + s_r * (...)`, and rows from M on are zero. */
TILEMOE_API tilemoe_status tilemoe_combine_mm(const tilemoe_experts* experts,
                                              const tilemoe_combine_mm_args* args);

/** Arguments of tilemoe_combine_mm_backward(). */
typedef struct tilemoe_combine_mm_backward_args {
  uint64_t struct_size;           /**< sizeof(tilemoe_combine_mm_backward_args) */
  const tilemoe_routing* routing; /**< as in forward */
  tilemoe_tensor A;               /**< as in forward */
  tilemoe_tensor W;               /**< as in forward */
  tilemoe_tensor b;               /**< as in forward, because ds depends on it; optional */
  tilemoe_tensor dO;              /**< O's shape */
  tilemoe_tensor dA;              /**< out (capacity, n), including the factor s */
  tilemoe_tensor ds; /**< out (pairs) float32; (T, K) is accepted for top-K. Skipped pairs get 0 */
  tilemoe_tensor dW; /**< out, W's shape, in its dtype or float32, in either order */
  tilemoe_tensor db; /**< out (E, d), in W's dtype or float32 */
  void* workspace;   /**< any contents */
  size_t workspace_bytes; /**< at least tilemoe_mm_workspace_bytes() */
  void* stream;           /**< cudaStream_t */
  int32_t block_turns;    /**< as in tilemoe_forward_args */
  int32_t accumulate;     /**< dW and db: 0 written, 1 added to */
} tilemoe_combine_mm_backward_args;
/** Computes the gradients of combine_mm. The gradient of an absent output is not computed. */
TILEMOE_API tilemoe_status tilemoe_combine_mm_backward(
    const tilemoe_experts* experts, const tilemoe_combine_mm_backward_args* args);

/** One of the GEMMs, as in tilemoe_mm_workspace_query. */
typedef enum tilemoe_mm TILEMOE_INT {
  TILEMOE_GATHERED_MM = 0,          /**< tilemoe_gathered_mm() */
  TILEMOE_GATHERED_MM_BACKWARD = 1, /**< tilemoe_gathered_mm_backward() */
  TILEMOE_COMBINE_MM = 2,           /**< tilemoe_combine_mm() */
  TILEMOE_COMBINE_MM_BACKWARD = 3   /**< tilemoe_combine_mm_backward() */
} tilemoe_mm;

/** Arguments of tilemoe_mm_workspace_bytes(). */
typedef struct tilemoe_mm_workspace_query {
  uint64_t struct_size;                /**< sizeof(tilemoe_mm_workspace_query) */
  const tilemoe_experts* experts;      /**< the experts of the call */
  const tilemoe_routing_spec* routing; /**< the routing's sizes */
  tilemoe_mm mm;                       /**< the call */
  uint32_t gradients; /**< backward: the gradients that may be requested; 0: all. gathered_mm:
                         TILEMOE_GRADIENT_X, W1 and B1; combine_mm: A, S, W2 and B2 */
} tilemoe_mm_workspace_query;
/** Returns the bytes of the workspace of one of these calls, as tilemoe_workspace_bytes() does for
 * a pass. */
TILEMOE_API tilemoe_status tilemoe_mm_workspace_bytes(const tilemoe_mm_workspace_query* query,
                                                      size_t* bytes);

/** @} */

#ifdef __cplusplus
}
#endif
#endif /* TILEMOE_TILEMOE_H_ */
