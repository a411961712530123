// A linear map without bias, y = x W^T, and its gradients.
#pragma once

#include "train/ops/tasks.h"

namespace tilemoe::train {

struct LinearShape {
  int64_t rows = 0;
  int64_t in = 0;
  int64_t out = 0;
};

enum class Write { kStore, kAdd };

void linear(const LinearShape& shape,
            ConstFloats x,       // (rows, in)
            ConstFloats weight,  // (out, in)
            Floats y,            // out (rows, out)
            Write write = Write::kStore);

void linear_backward_input(const LinearShape& shape,
                           ConstFloats dy,      // (rows, out)
                           ConstFloats weight,  // (out, in)
                           Floats dx,           // out (rows, in)
                           Write write = Write::kStore);

int64_t linear_backward_weight_scratch(const LinearShape& shape);

void linear_backward_weight(const LinearShape& shape,
                            ConstFloats dy,  // (rows, out)
                            ConstFloats x,   // (rows, in)
                            Floats dweight,  // out (out, in)
                            Floats scratch);

// y += bias, row by row
void add_bias(ConstFloats bias,  // (out)
              Floats y);         // (rows, out)

int64_t bias_gradient_scratch(int64_t rows, int64_t out);

// dbias = sum of dy's rows
void bias_gradient(ConstFloats dy,  // (rows, out)
                   Floats dbias,    // out (out)
                   Floats scratch);

}  // namespace tilemoe::train
