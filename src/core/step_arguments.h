// The arguments of the steps of the layer, named as in docs/mathematics.md. layer/ and routing/
// check every argument, and own the order of the steps and the memory plan, so a step does not
// check again. No step allocates: it receives its scratch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/check.h"
#include "core/fp8_rows.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe {

// W1, its gradient or its biases as the parts that make the columns of H: gate, then up, for every
// layout.
struct UpParts {
  tilemoe_tensor part[2];  // (E, columns, ...) each; absent where its tensor is
  int count;
  int64_t columns;  // of H, that a part makes
};

// `rows` rows from row `first` on, `step` apart.
inline tilemoe_tensor rows_of(tilemoe_tensor W, int64_t first, int64_t rows, int64_t step) {
  if (!present(W)) return W;
  W.data = static_cast<char*>(W.data) +
           first * W.stride[1] * static_cast<int64_t>(tilemoe_dtype_size(W.dtype));
  W.shape[1] = rows;
  W.stride[1] *= step;
  return W;
}

inline UpParts up_parts(const tilemoe_experts& experts, const tilemoe_tensor& W,
                        const tilemoe_tensor& W_up) {
  const int64_t n = experts.n;
  if (!tilemoe_activation_gated(experts.activation)) return {{W, {}}, 1, n};
  switch (experts.gate_layout) {
    case TILEMOE_GATE_SPLIT: return {{W, W_up}, 2, n};
    case TILEMOE_GATE_INTERLEAVED: return {{rows_of(W, 0, n, 2), rows_of(W, 1, n, 2)}, 2, n};
    default: return {{rows_of(W, 0, n, 1), rows_of(W, n, n, 1)}, 2, n};
  }
}

// (E, a, b) as (E, b, a)
inline tilemoe_tensor transposed(tilemoe_tensor W) {
  std::swap(W.shape[1], W.shape[2]);
  std::swap(W.stride[1], W.stride[2]);
  return W;
}

namespace cuda {
struct TileConfiguration;
struct ExpertsPlan;
}  // namespace cuda

struct Scratch {
  void* data = nullptr;
  size_t bytes = 0;
};

// Sizes that determine a step's scratch, in addition to the experts.
struct ScratchSizes {
  int64_t capacity;
  int64_t rows_of_an_expert = INT64_MAX;  // Rows::of_an_expert
  int32_t workers = 0;                    // of the weight gradients
  // weight_gradient_1: which outputs are wanted. Both: either may be left out.
  bool dW1 = true, dW1_up = true;
  const cuda::ExpertsPlan* plan = nullptr;  // Tuning::plan
};

// Settings of a CUDA step that a caller, a benchmark or a test may choose. No bit depends on them.
struct Tuning {
  int ctas_per_sm = 1;                            // CTAs per SM, in waves
  const cuda::TileConfiguration* tile = nullptr;  // one of the step's; null: the cost model chooses
  int32_t column_group = 0;  // blocks of columns that share rows while they are in L2; 0: 8
  // PDL: whether GEMMs and the combine start while the previous kernel ends. The layer sets it for
  // small M (docs/kernels.md).
  bool pdl = false;
  // The kernels of the call; null: the step chooses its kernel itself.
  const cuda::ExpertsPlan* plan = nullptr;
};

// The rows of a batch as a step receives them: device pointers.
struct Rows {
  int64_t E = 0;
  int64_t capacity = 0;
  int64_t of_an_expert =
      INT64_MAX;  // at most, unless ids repeat within a token; past capacity: any
  const int32_t* offsets = nullptr;  // (E + 1)
  // (E) the end of each expert's rows to process; null: the begin of the next expert's rows. Only
  // for steps with one row of output per row.
  const int32_t* ends = nullptr;
  const int32_t* token = nullptr;  // (capacity) source row in X and dO; null: row r is row r
  const float* score = nullptr;    // (capacity); null: every s is 1
};

// W1 and its biases, for the steps that read them.
struct UpWeights {
  tilemoe_tensor W1, W1_up;  // W1_up only when split
  tilemoe_tensor b1, b1_up;  // absent without biases
};

// A second source of a GEMM's sum: rows of a low-rank adapter times its factor. Absent without an
// adapter.
struct Adapter {
  tilemoe_tensor rows;    // P or Q (capacity, rank)
  tilemoe_tensor factor;  // (E, columns of the GEMM, rank), of the weights' major
};

// Quantised weights that a GEMM reads as their codes (Backend::reads_codes): the tensors of the
// weights then have shapes and strides, but no data. The activation and the input gradient read
// transposed ones.
struct WeightCodes {
  tilemoe_quantized weight = {};  // format NONE: the GEMM reads values
  tilemoe_quantized up = {};      // W1_up, when split
  int64_t first_row = 0;          // of the block of columns of Y in W2, or of dX~ in W1 transposed

  bool given() const { return weight.format != TILEMOE_FORMAT_NONE; }
};

// H = X W1^T + b1, A = act(H): gathers X. A comes from the float32 accumulator, not from the stored
// H.
struct UpProjection {
  const tilemoe_experts* experts;
  Rows rows;
  tilemoe_tensor X;  // (T, d)
  UpWeights weights;
  tilemoe_tensor H;  // out (capacity, 2n); absent in inference
  tilemoe_tensor A;  // out (capacity, n)
  Scratch scratch;
  void* stream;
  Tuning tuning = {};
  Adapter adapter = {};  // P1, scale_1 B1
  WeightCodes codes = {};
  // The fp8 recipe, with the codes of the weights: codes of X (T, d) are read instead of X, and A
  // is written as codes.
  Fp8Rows X_codes = {};
  Fp8Rows A_codes = {};       // out (capacity, n)
  bool float_scales = false;  // of A_codes and H_codes, as in QuantizeRows
  Fp8H H_codes = {};          // out, in place of H; absent: not saved, or saved as H
};

// Y = A W2^T + b2, or a block of the columns of Y: W2 then has only the rows of that block.
struct DownProjection {
  const tilemoe_experts* experts;
  Rows rows;
  tilemoe_tensor A;   // (capacity, n)
  tilemoe_tensor W2;  // (E, d or a block of it, n)
  tilemoe_tensor b2;  // (E, d or a block of it); optional
  tilemoe_tensor Y;   // out (capacity, d or a block of it)
  Scratch scratch;
  void* stream;
  Tuning tuning = {};
  Adapter adapter = {};  // P2, scale_2 B2 or a block of its rows
  WeightCodes codes = {};
  Fp8Rows A_codes = {};  // the fp8 recipe: (capacity, n), read instead of A
};

// out_t = addend_t + sum over the token's pairs of [s *] row, float32, in pair order. Grouped:
// out_r = addend_r + [s *] row, zero past the last row.
struct Combine {
  const tilemoe_experts* experts;
  const tilemoe_routing* routing;
  tilemoe_tensor row_values;  // Y or dX~ (capacity, d), or a block of columns, as all below
  bool scale_by_score;
  tilemoe_tensor addend;  // optional; `out` itself is one too
  tilemoe_tensor out;     // O or dX
  void* stream;
  Tuning tuning = {};
};

// ds is summed by groups of 64 columns of A for every tile size: each group writes a row of partial
// sums, which are then added in order. Inside a group the CUDA kernels have one order, too
// (docs/mathematics.md).
inline constexpr int64_t kDsColumns = 64;
constexpr int64_t ds_groups(int64_t n) {
  return (n + kDsColumns - 1) / kDsColumns;
}

// dA' = dO W2 (gathers dO); then A = act(H), ds partials = <dA', A> by groups of columns, dH =
// act'(H) (s dA'), A' = s A. dH may lie over H.
struct ActivationGradient {
  const tilemoe_experts* experts;
  Rows rows;
  tilemoe_tensor dO;       // (T, d)
  tilemoe_tensor W1 = {};  // for its layout alone, which may decide the order of H's columns
  tilemoe_tensor W2;
  tilemoe_tensor H;
  tilemoe_tensor dH;        // out (capacity, 2n); absent: not wanted
  tilemoe_tensor A_scaled;  // out A' (capacity, n); absent: not wanted
  float* ds_partial;        // out (ds_groups(n), capacity); null: not wanted
  Scratch scratch;
  void* stream;
  Tuning tuning = {};
  Adapter adapter = {};  // Q2, A2^T
  // The fp8 recipe: W2 transposed (E, n, d), and codes of dO (T, d), which are read instead of dO.
  WeightCodes codes = {};
  Fp8Rows dO_codes = {};
  Fp8H H_codes = {};  // read instead of H; A' of 16 bits may lie over the codes
  // out (2, capacity, n), the bits of quantize_dH; absent unless Backend::writes_dH_codes. Not over
  // the codes of H.
  Fp8Rows dH_codes = {};
};

// ds(pair) = sum over groups, in order, of ds_partial(group, row) + <dO_t, b2_e>; 0 for a pair
// without a row.
struct ScoreGradient {
  const tilemoe_experts* experts;
  const tilemoe_routing* routing;
  const float* ds_partial;  // (ds_groups(n), capacity)
  tilemoe_tensor dO;
  tilemoe_tensor b2;  // optional
  float* ds;          // out (pairs)
  void* stream;
  Tuning tuning = {};
};

// dW2_e = dO_e^T A'_e (gathers dO). `workers`: the number of workers that the split-K of long
// experts is made for, which decides the bits of these sums (CUDA); 0: half the SMs of the device.
// Exact zeros for an expert without rows (beta 0).
struct WeightGradient2 {
  const tilemoe_experts* experts;
  Rows rows;
  tilemoe_tensor dO;
  tilemoe_tensor A_scaled;
  tilemoe_tensor dW2;  // out (E, d, n), either major
  bool accumulate;
  Scratch scratch;
  void* stream;
  Tuning tuning = {};
  int32_t workers = 0;
};

// dX~ = dH W1, or a block of the columns of dX~: W1 then has only the columns of that block.
struct InputGradient {
  const tilemoe_experts* experts;
  Rows rows;
  tilemoe_tensor dH;
  UpWeights weights;
  tilemoe_tensor dX_rows;  // out dX~ (capacity, d or a block of it)
  Scratch scratch;
  void* stream;
  Tuning tuning = {};
  Adapter adapter = {};  // Q1, A1^T or a block of its rows
  // The fp8 recipe: W1 transposed (E, d, 2n), or (E, d, n) and W1_up, and codes of dH
  // (parts, capacity, n), which are read instead of dH. first_row: of the block of columns of dX~.
  WeightCodes codes = {};
  Fp8Rows dH_codes = {};
};

// dW1_e = dH_e^T X_e (gathers X)
struct WeightGradient1 {
  const tilemoe_experts* experts;
  Rows rows;
  tilemoe_tensor W1 = {};  // for its layout alone
  tilemoe_tensor dH;
  tilemoe_tensor X;
  tilemoe_tensor dW1, dW1_up;  // out, in W1's layout; either may be absent
  bool accumulate;
  Scratch scratch;
  void* stream;
  Tuning tuning = {};
  int32_t workers = 0;
};

// db2_e = sum of s dO over the expert's rows (gathers dO); db1_e = sum of dH.
struct BiasGradient {
  const tilemoe_experts* experts;
  Rows rows;
  tilemoe_tensor dO, db2;          // db2 absent: not wanted
  tilemoe_tensor W1 = {};          // for its layout alone
  tilemoe_tensor dH, db1, db1_up;  // db1 absent: not wanted
  bool accumulate;
  Scratch scratch;
  void* stream;
};

// ---- low-rank adapters

// dA_e = Q_e^T input_e, dB_e = dOut_e^T (scale [s] P_e). One of `input` and `dOut` is gathered, X
// of W1's adapter or dO of W2's, and the other one has a row per row. Exact zeros for an expert
// without rows.
struct LoraGradient {
  const tilemoe_experts* experts = nullptr;
  Rows rows = {};
  tilemoe_tensor input = {};      // X or A'
  tilemoe_tensor dOut = {};       // dH or dO
  bool gathers_input = false;     // W1's adapter
  tilemoe_tensor P = {}, Q = {};  // (capacity, rank): columns of P1 and Q1, or P2 and Q2
  float scale = 1;
  tilemoe_tensor dA = {};  // out (E, rank, width of the input), either major; absent: not wanted
  struct Part {
    tilemoe_tensor dB;  // out (E, columns, rank), either major; absent: not wanted
    int64_t first;      // its first column of dOut
  } part[2] = {};
  int parts = 0;
  bool accumulate = false;
  Scratch scratch = {};
  void* stream = nullptr;
  Tuning tuning = {};
  int32_t workers = 0;  // as in the weight gradients
};

// P or Q = source factor^T, rounded: gathers the source if rows.token is given. With Q a call may
// want the gradient of B, too, which is a sum over the same source, dOut.
struct LoraProjection {
  const tilemoe_experts* experts;
  Rows rows;
  tilemoe_tensor source;  // X, dO (T, width), or A, dH (capacity, width)
  tilemoe_tensor factor;  // (E, rank, width), either major
  tilemoe_tensor out;     // P or Q (capacity, rank)
  Scratch scratch;
  void* stream;
  Tuning tuning = {};
  LoraGradient gradient = {};  // without dA, and its scratch is this step's; no parts: not wanted
};

// ---- quantised weights

// The values of a block of experts, those without rows left out.
struct Dequantize {
  tilemoe_quantized weight;
  int64_t first;       // the block's first expert, of those that the weight has
  tilemoe_tensor out;  // (experts of the block, R, C), contiguous: in the order of the codes
  const int32_t* begins = nullptr;  // (experts of the block) rows [begins[e], ends[e]) of each
  const int32_t* ends = nullptr;    // null: every expert is written
  void* stream = nullptr;
};

// ---- packing

// Factors (E, rows, columns) of any strides, written to packed ones: rounded, times scale.
struct LoraPacking {
  struct Copy {
    tilemoe_tensor from;  // float32, bfloat16 or float16; absent: zeros are written
    tilemoe_tensor to;    // the experts' dtype
    float scale;
  };
  Copy copy[8];
  int count;
};

}  // namespace tilemoe
