// What is asked of a scoring rule on the host.
#pragma once

#include "tilemoe/tilemoe.h"

namespace tilemoe {

// Whether experts are ranked by sigmoid plus selection bias, else by the logit itself.
inline bool ranks_by_sigmoid(tilemoe_scoring scoring) {
  return scoring == TILEMOE_SIGMOID || scoring == TILEMOE_SIGMOID_RENORMALIZED;
}

}  // namespace tilemoe
