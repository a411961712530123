// Small cases of the router on the simulated GPU: the choice of experts, routings from all that they
// are made of, the backward, the losses; and sums of rows of several arrays, which have no layer
// either. The CPU backend says what is right.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "verify/memory.h"

namespace tilemoe::simulator {

class RouterTensors;

struct RouterCase {
  std::string name;                                  // "router-top-k-of-groups"
  std::function<void(RouterTensors& tensors)> call;  // on the device of its tensors
};
const std::vector<RouterCase>& router_cases();

// Which results of the case differ, a line each; empty: none.
std::string compare_devices(const RouterCase& one, uint64_t data_seed);

}  // namespace tilemoe::simulator
