// A token's vector from its byte and the bytes before it: x_t = sum over j < W of row byte(t - j)
// of table j. Each sequence comes with the W - 1 bytes that stand before it.
#pragma once

#include "train/ops/sequences.h"

namespace tilemoe::train {

inline constexpr int64_t kByteValues = 256;

void embed(Sequences sequences,
           ConstBytes bytes,   // (sequences, W - 1 + length)
           ConstFloats table,  // (W, 256, d)
           Floats x);          // out (T, d)

void embed_backward(Sequences sequences,
                    ConstBytes bytes,  // (sequences, W - 1 + length)
                    ConstFloats dx,    // (T, d)
                    Floats dtable);    // out (W, 256, d)

}  // namespace tilemoe::train
