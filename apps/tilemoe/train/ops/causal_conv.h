// A short causal convolution, one filter a channel: y(t) = addend(t) + sum over j of w_j * x(t -
// j), within each sequence; what would lie before a sequence is zero.
#pragma once

#include "train/ops/sequences.h"

namespace tilemoe::train {

void causal_conv(Sequences sequences,
                 ConstFloats x,       // (T, d)
                 ConstFloats filter,  // (taps, d), the current token's tap first
                 int64_t taps,
                 ConstFloats addend,  // (T, d)
                 Floats y);           // out (T, d)

int64_t causal_conv_scratch(Sequences sequences, int64_t taps, int64_t width);

void causal_conv_backward(Sequences sequences,
                          ConstFloats x,       // (T, d)
                          ConstFloats filter,  // (taps, d)
                          int64_t taps,
                          ConstFloats dy,  // (T, d)
                          Floats dx,       // added to (T, d)
                          Floats dfilter,  // out (taps, d)
                          Floats scratch);

}  // namespace tilemoe::train
