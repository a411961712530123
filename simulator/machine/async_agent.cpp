#include "simulator/machine/async_agent.h"

namespace tilemoe::simulator {
namespace {

Accessor accessor(Thread& thread, uint32_t local, Epoch epoch, bool in_order, uint32_t site) {
  const Block& block = *thread.block;
  return {.agent = block.number << kLocalBits | local,
          .epoch = epoch,
          .knows = &thread.knowledge,
          .cluster = &block.agents,
          .reads_done = thread.warp->reads_done,
          .in_order = in_order,
          .async_proxy = true,
          .site = site};
}

}  // namespace

Accessor new_operation(Thread& thread, uint32_t site) {
  Block& block = *thread.block;
  const uint32_t slot = block.next_operation++ % kAsyncOperations;
  return accessor(thread, block.agents.first_operation() + slot, ++block.operation_epochs[slot],
                  false, site);
}

Accessor warp_mmas(Thread& thread, uint32_t site) {
  return accessor(thread, thread.block->agents.first_mmas() + thread.warp->index,
                  thread.warp->mma_epoch, true, site);
}

void know(Thread& thread, const AsyncAgent& agent) {
  thread.knowledge.clock.raise(thread.block->agents.index(agent.agent), agent.epoch);
}

}  // namespace tilemoe::simulator
