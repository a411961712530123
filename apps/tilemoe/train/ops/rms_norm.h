// Root-mean-square normalisation (arXiv 1910.07467): y = gain * x / sqrt(mean(x^2) + 1e-6), row by
// row.
#pragma once

#include "train/ops/tasks.h"

namespace tilemoe::train {

void rms_norm(ConstFloats x,        // (T, d)
              ConstFloats gain,     // (d)
              Floats y,             // out (T, d)
              Floats inverse_rms);  // out (T), for the backward

// Floats that rms_norm_backward needs as scratch.
int64_t rms_norm_scratch(int64_t rows, int64_t width);

void rms_norm_backward(ConstFloats x,            // (T, d)
                       ConstFloats gain,         // (d)
                       ConstFloats inverse_rms,  // (T)
                       ConstFloats dy,           // (T, d)
                       Floats dx,                // added to (T, d)
                       Floats dgain,             // out (d)
                       Floats scratch);

}  // namespace tilemoe::train
