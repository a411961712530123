// Small cases of the router on the simulated GPU: the choice of experts, routings from every kind
// of input, the backward, the losses; and sums of rows of several arrays, which need no layer
// either. The CPU backend computes the expected results.
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

// The results of the case that differ, one line each; empty: none.
std::string compare_devices(const RouterCase& one, uint64_t data_seed);

}  // namespace tilemoe::simulator
