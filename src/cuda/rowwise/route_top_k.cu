// A routing from each token's chosen ids and scores.
#include "cuda/rowwise/pair_sort.h"
#include "cuda/rowwise/routing.h"

namespace tilemoe::cuda {

void route_top_k(const tilemoe_routing& routing, const tilemoe_route_top_k_args& args) {
  ScratchLayout layout(args.workspace);
  const PairScratch scratch(routing.spec, layout);
  sort_pairs({.experts = integer_array(args.ids),
              .scores = float_array(args.scores),
              .tokens = nullptr,
              .K = static_cast<int32_t>(routing.spec.K),
              .E = static_cast<int32_t>(routing.spec.E),
              .count = routing.spec.pairs},
             scratch, routing, args.stream);
}

}  // namespace tilemoe::cuda
