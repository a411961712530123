// The layer as gathered_mm and combine_mm compute it, with the identity between them.
#pragma once

#include <string>
#include <vector>

#include "memory.h"
#include "tilemoe/mm.h"

namespace tilemoe::verify {

// Between two calls, rows without a token must be zero, and are then set to NaN: the next call must
// not read them.
class MmCalls {
 public:
  MmCalls(const Experts& experts, const RoutingSpec& spec, Memory& memory);

  // With the arguments of the layer; H is that of its saved state, in whose place it is written.
  void forward(const ForwardArgs& args, const GuardedTensor& H);
  void backward(const BackwardArgs& args);
  // Lines for rows that were not zero, and for bytes written outside a workspace.
  const std::vector<std::string>& damage() const { return damage_; }

 private:
  template <class Call>
  void run(tilemoe_mm mm, uint32_t gradients, Call&& call);
  void spoil_rest(const char* name, const tilemoe_routing& routing, const GuardedTensor& from,
                  GuardedTensor& to);

  const Experts& experts_;
  const RoutingSpec& spec_;
  Memory& memory_;
  GuardedTensor A_, dA_;
  std::vector<std::string> damage_;
};

}  // namespace tilemoe::verify
