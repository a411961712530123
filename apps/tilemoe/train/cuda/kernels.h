// The trainer's kernels other than GEMMs: plain and short, float32, the same bits on
// every run. Pointers are device memory; work goes to the default stream. What each computes stands
// at the operator of its name in train/operators.h.
#pragma once

#include <cstdint>

#include "train/ops/shapes.h"

namespace tilemoe::train::cuda {

void round_to_bfloat16(const float* from, uint16_t* to, int64_t count);
// to = from + addend; addend may be null.
void widen_bfloat16(const uint16_t* from, const float* addend, float* to, int64_t count);

// `tables`: W, the bytes a token sees.
void embed(Sequences sequences, int64_t tables, const uint8_t* bytes, const float* table, float* x,
           int64_t width);
void embed_backward(Sequences sequences, int64_t tables, const uint8_t* bytes, const float* dx,
                    float* dtable, int64_t width);

void rms_norm(const float* x, const float* gain, float* y, float* inverse_rms, int64_t rows,
              int64_t width);
// scratch: rms_norm_scratch
void rms_norm_backward(const float* x, const float* gain, const float* inverse_rms, const float* dy,
                       float* dx, float* dgain, float* scratch, int64_t rows, int64_t width);

void causal_conv(Sequences sequences, const float* x, const float* filter, int64_t taps,
                 const float* addend, float* y, int64_t width);
// scratch: causal_conv_scratch
void causal_conv_backward(Sequences sequences, const float* x, const float* filter, int64_t taps,
                          const float* dy, float* dx, float* dfilter, float* scratch,
                          int64_t width);

// Throw std::runtime_error if a sequence is too long for a CTA's shared memory.
void attention(const AttentionShape& shape, const float* slopes, const float* qkv, float* out,
               float* log_sum);
void attention_backward(const AttentionShape& shape, const float* slopes, const float* qkv,
                        const float* out, const float* log_sum, const float* dout, float* dqkv);

void add_bias(const float* bias, float* y, int64_t rows, int64_t width);
// scratch: bias_gradient_scratch
void bias_gradient(const float* dy, float* dbias, float* scratch, int64_t rows, int64_t width);

// `gradient` may be null, or lie over the logits.
void cross_entropy(const float* logits, const uint8_t* targets, float scale, float* gradient,
                   float* losses, int64_t rows);

// Parts into which sum_of_squares cuts an array.
int64_t square_parts(int64_t count);
// sums (square_parts)
void sum_of_squares(const float* values, int64_t count, double* sums);
void adamw_update(const AdamWStretch& stretch, const AdamWFactors& factors);

}  // namespace tilemoe::train::cuda
