// What every backend knows of a scoring rule.
#pragma once

#include "routing/host_device.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe {

// Whether experts are ranked by sigmoid plus selection bias, else by the logit itself.
TILEMOE_HOST_DEVICE bool ranks_by_sigmoid(tilemoe_scoring scoring) {
  return scoring == TILEMOE_SIGMOID || scoring == TILEMOE_SIGMOID_RENORMALIZED;
}

// A share of a sum; where all are 0 the `present` ones share equally, as softmax does.
template <class Count>
TILEMOE_HOST_DEVICE float share_of(float value, float sum, Count present) {
  return sum > 0 ? value / sum : 1.f / static_cast<float>(present);
}

}  // namespace tilemoe
