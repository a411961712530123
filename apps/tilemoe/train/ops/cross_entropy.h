// Cross-entropy of the next byte, in nats.
#pragma once

#include "train/ops/embedding.h"

namespace tilemoe::train {

void cross_entropy(ConstFloats logits,  // (T, 256)
                   ConstBytes targets,  // (T)
                   Floats losses);      // out (T)

// The same, and in place of the logits the gradient of scale * sum of losses.
void cross_entropy_with_gradient(Floats logits,       // in (T, 256), out dlogits
                                 ConstBytes targets,  // (T)
                                 float scale,
                                 Floats losses);  // out (T)

}  // namespace tilemoe::train
