// A routing from triples. Whether a triple is in order depends on the largest token before it, so
// tokens and experts are settled first; then they are pairs like top-K's.
#include <algorithm>

#include "cuda/core/device.h"
#include "cuda/core/launch.h"
#include "cuda/kernels/block.h"
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/pair_sort.h"

namespace tilemoe::cuda {
namespace {

constexpr int kThreads = 512;
static_assert(PairBlocks::kPairsAtOnce == kThreads);
using LargestToken = BlockScan<int32_t, Max, kThreads>;

struct TripleParams {
  IntegerArray tokens;   // (count)
  IntegerArray experts;  // (count)
  int64_t count, block_size;
  int64_t T, E;
  int32_t* largest;       // (blocks)
  int32_t* pair_tokens;   // out (count)
  int32_t* pair_experts;  // out (count)

  // -1 where the token is outside [0, T).
  __device__ int32_t token(int64_t pair) const {
    const int64_t token = tokens.at(pair);
    return token >= 0 && token < T ? static_cast<int32_t>(token) : -1;
  }
  __device__ int64_t begin() const { return blockIdx.x * block_size; }
  __device__ int64_t end() const { return min(begin() + block_size, count); }
};

__global__ void __launch_bounds__(kThreads) find_largest_tokens(const TripleParams params) {
  __shared__ LargestToken::Shared shared;
  int32_t largest = -1;
  for (int64_t pair = params.begin() + threadIdx.x; pair < params.end(); pair += kThreads)
    largest = max(largest, params.token(pair));
  largest = LargestToken::scan(shared, largest).total;
  if (threadIdx.x == 0) params.largest[blockIdx.x] = largest;
}

__global__ void __launch_bounds__(kThreads) settle_triples(const TripleParams params) {
  __shared__ LargestToken::Shared shared;
  __shared__ int32_t tokens_seen[kThreads];  // the largest token up to a thread's triple
  int32_t largest = -1;
  for (unsigned block = threadIdx.x; block < blockIdx.x; block += kThreads)
    largest = max(largest, params.largest[block]);
  largest = LargestToken::scan(shared, largest).total;

  for (int64_t base = params.begin(); base < params.end(); base += kThreads) {
    const int64_t pair = base + threadIdx.x;
    const bool exists = pair < params.end();
    const int32_t token = exists ? params.token(pair) : -1;
    const auto scanned = LargestToken::scan(shared, token);
    const int32_t reached = max(largest, scanned.inclusive);
    tokens_seen[threadIdx.x] = reached;
    __syncthreads();
    const int32_t before = threadIdx.x == 0 ? largest : tokens_seen[threadIdx.x - 1];
    largest = max(largest, scanned.total);
    if (!exists) continue;
    const int64_t id = params.experts.at(pair);
    const bool counts = token >= 0 && token >= before && id >= 0 && id < params.E;
    params.pair_tokens[pair] = reached;
    params.pair_experts[pair] = counts ? static_cast<int32_t>(id) : kSkipped;
  }
}

// A token's range starts at the first pair that reaches it; skipped pairs fall to the token before.
__global__ void __launch_bounds__(kThreads)
    fill_token_offsets(const int32_t* pair_tokens, int64_t count, int64_t T, int32_t* offsets) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; t <= T; t += stride) {
    int64_t low = 0, high = count;  // the first pair of a token >= t lies in [low, high]
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (pair_tokens[middle] < t)
        low = middle + 1;
      else
        high = middle;
    }
    offsets[t] = static_cast<int32_t>(low);
  }
}

}  // namespace

void route_general(const tilemoe_routing& routing, const tilemoe_route_general_args& args) {
  const tilemoe_routing_spec& spec = routing.spec;
  const auto stream = static_cast<cudaStream_t>(args.stream);
  ScratchLayout layout(args.workspace);
  const PairScratch scratch(spec, layout);
  const TripleParams params{.tokens = integer_array(args.tokens),
                            .experts = integer_array(args.experts),
                            .count = spec.pairs,
                            .block_size = scratch.blocks.size,
                            .T = spec.T,
                            .E = spec.E,
                            .largest = scratch.largest,
                            .pair_tokens = scratch.tokens,
                            .pair_experts = scratch.experts};
  const auto blocks = static_cast<unsigned>(scratch.blocks.count);
  const KernelLaunch by_triples{.blocks = blocks, .threads = kThreads, .stream = stream};
  launch_kernel("the largest tokens of triples", by_triples, find_largest_tokens, params);
  launch_kernel("tokens and experts of triples", by_triples, settle_triples, params);
  const DeviceInfo& device = current_device();
  const int64_t token_blocks = std::min<int64_t>(spec.T / kThreads + 1, device.sms * 4);
  launch_kernel(
      "offsets of tokens",
      {.blocks = static_cast<unsigned>(token_blocks), .threads = kThreads, .stream = stream},
      fill_token_offsets, scratch.tokens, spec.pairs, spec.T, routing.token_offsets);
  sort_pairs(device,
             {.experts = {scratch.experts, false},
              .scores = float_array(args.scores),
              .tokens = scratch.tokens,
              .K = 0,
              .E = static_cast<int32_t>(spec.E),
              .count = spec.pairs},
             scratch, routing, args.stream);
}

}  // namespace tilemoe::cuda
