#include "simulator/machine/synchronization.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace tilemoe::simulator {
namespace {

std::string shared_place(uint32_t address) {
  std::ostringstream text;
  text << "shared 0x" << std::hex << address;
  return text.str();
}

void end_phase_if_over(Thread& who, Mbarrier& barrier, uint32_t address) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  Machine& machine = *who.block->machine;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  barrier.ended = barrier.gathering.all();
  barrier.gathering.clear();
  machine.trace().note(who.block->launch->number, barrier.owner->linear, who.warp->index,
                       Note::kPhaseEnds, in_block(address));
  for (Thread* thread : std::exchange(barrier.waiting, {})) machine.wake(*thread);
}

void end_block_barrier(Block& block, BlockBarrier& barrier) {
  Machine& machine = *block.machine;
  for (Thread* thread : barrier.waiting) {
    // The thread's own knowledge is part of what was gathered.
    Knowledge& knowledge = thread->knowledge;
    knowledge = barrier.gathering.all();
    machine.wake(*thread);
  }
  barrier.waiting.clear();
  barrier.gathering.clear();
  barrier.any_before = std::exchange(barrier.any, false);
  barrier.arrived = barrier.expected = 0;
  ++barrier.phase;
}

// This cluster's knowledge in the form that other clusters use.
Foreign as_foreign(const Thread& thread) {
  Foreign foreign = thread.knowledge.foreign ? *thread.knowledge.foreign : Foreign();
  Clock own = thread.knowledge.clock;
  own.raise(thread.clock_index(), thread.epoch);
  foreign[thread.block->agents.first_block].join(own);
  return foreign;
}

}  // namespace

void Gathering::add(Thread& thread) {
  Knowledge& knowledge = thread.knowledge;
  if (!knowledge.clock.same_as(last_)) {
    last_ = knowledge.clock;
    all_.clock.join(knowledge.clock);
  }
  all_.fenced.join(knowledge.fenced);
  all_.tensor.join(knowledge.tensor);
  all_.first_concurrent_block =
      std::max(all_.first_concurrent_block, knowledge.first_concurrent_block);
  if (knowledge.foreign) {
    Knowledge foreign;
    foreign.foreign = knowledge.foreign;
    all_.join(foreign);
  }
  all_.clock.raise(thread.clock_index(), thread.epoch++);
}

void share_knowledge(Warp& warp, uint32_t mask) {
  Gathering gathering;
  for (Thread* lane : warp.lanes)
    if ((mask >> lane->lane & 1) != 0) gathering.add(*lane);
  for (Thread* lane : warp.lanes)
    if ((mask >> lane->lane & 1) != 0) lane->knowledge = gathering.all();
}

bool block_barrier(Thread& thread, uint32_t number, uint32_t threads, bool waits, bool value,
                   uint32_t site) {
  Block& block = *thread.block;
  Machine& machine = *block.machine;
  if (number >= 16 || threads % kLanes != 0 || threads > block.threads.size())
    machine.fail(thread, FindingKind::kBarrierMisuse, site,
                 "barrier " + std::to_string(number) + " of " + std::to_string(threads) +
                     " threads in a block of " + std::to_string(block.threads.size()));
  BlockBarrier& barrier = block.barriers[number];
  if (barrier.arrived > 0 && barrier.expected != threads)
    machine.fail(thread, FindingKind::kBarrierMisuse, site,
                 "barrier " + std::to_string(number) + " is waited for with " +
                     std::to_string(barrier.expected) + " and with " + std::to_string(threads) +
                     " threads");
  barrier.expected = threads;
  ++barrier.arrived;
  barrier.gathering.add(thread);
  barrier.any = barrier.any || value;
  if (thread.lane == 0)
    machine.trace().note(block.launch->number, block.linear, thread.warp->index,
                         Note::kBlockBarrier, number);
  if (waits) barrier.waiting.push_back(&thread);
  const uint32_t phase = barrier.phase;
  const auto all = static_cast<uint32_t>(block.threads.size()) - block.exited;
  if (barrier.arrived == (threads == 0 ? all : threads)) {
    end_block_barrier(block, barrier);
  } else if (waits) {
    while (barrier.phase == phase)
      machine.wait(thread, number == 0 ? "__syncthreads()" : "a named barrier", site);
  }
  return barrier.any_before;
}

void Machine::thread_left(Thread& thread) {
  Block& block = *thread.block;
  // Whole-block barriers no longer count it.
  BlockBarrier& barrier = block.barriers[0];
  const auto all = static_cast<uint32_t>(block.threads.size()) - block.exited;
  if (barrier.arrived > 0 && barrier.expected == 0 && barrier.arrived == all)
    end_block_barrier(block, barrier);
  // Wakes the lanes that wait for it.
  for (const Meeting& meeting : thread.warp->meetings)
    for (Thread* lane : thread.warp->lanes)
      if ((meeting.arrived >> lane->lane & 1) != 0) wake(*lane);
}

namespace {

// A cluster's threads that have not exited.
size_t threads_left(const Block& block) {
  size_t threads = 0;
  for (const Block* one : block.cluster) threads += one->threads.size() - one->exited;
  return threads;
}

void end_cluster_barrier(Block& first) {
  BlockBarrier& barrier = first.of_cluster;
  for (Thread* waiting : std::exchange(barrier.waiting, {})) {
    waiting->knowledge = barrier.gathering.all();
    first.machine->wake(*waiting);
  }
  barrier.gathering.clear();
  barrier.arrived = 0;
  ++barrier.phase;
}

}  // namespace

void cluster_barrier(Thread& thread, uint32_t site) {
  Block& first = *thread.block->cluster.front();
  BlockBarrier& barrier = first.of_cluster;
  ++barrier.arrived;
  barrier.gathering.add(thread);
  barrier.waiting.push_back(&thread);
  if (barrier.arrived == threads_left(first)) return end_cluster_barrier(first);
  for (const uint32_t phase = barrier.phase; barrier.phase == phase;)
    thread.block->machine->wait(thread, "the blocks of its cluster", site);
}

void Machine::leave_cluster_barrier(Block& block) {
  Block& first = *block.cluster.front();
  const size_t arrived = first.of_cluster.arrived;
  if (arrived > 0 && arrived == threads_left(first)) end_cluster_barrier(first);
}

void mbarrier_init(Thread& thread, uint32_t address, uint32_t arrivals, uint32_t site) {
  Block& block = *thread.block;
  Machine& machine = *block.machine;
  machine.shared_bytes(thread, address, 8, site);
  if (address % 8 != 0 || arrivals == 0 || arrivals >= 1u << 20)
    machine.fail(thread, FindingKind::kBarrierMisuse, site,
                 "a barrier of " + std::to_string(arrivals) + " arrivals", shared_place(address));
  machine.shared_access(machine.ordinary(thread, site), block, AccessKind::kWrite, address, 8);
  Mbarrier& barrier = block.mbarriers[address] = {};
  barrier.owner = &block;
  barrier.expected = barrier.pending = arrivals;
  barrier.init = block.worker->cells()[address / 4].write;
}

Mbarrier& mbarrier_at(Thread& thread, uint32_t address, uint32_t site, Block** owner,
                      bool by_copy) {
  Machine& machine = *thread.block->machine;
  Block* block = nullptr;
  machine.shared_bytes(thread, address, 8, site, &block);
  if (owner != nullptr) *owner = block;
  if (block->done())
    machine.find(thread, FindingKind::kBarrierMisuse, site,
                 "a barrier of a block of the cluster that has ended", shared_place(address));
  const uint32_t offset = in_block(address);
  const auto found = block->mbarriers.find(offset);
  if (found == block->mbarriers.end())
    machine.fail(thread, FindingKind::kBarrierMisuse, site, "no barrier was initialised here",
                 shared_place(address));
  const Recorded& write = block->worker->cells()[offset / 4].write;
  const Recorded& init = found->second.init;
  if (write.agent != init.agent || write.epoch != init.epoch || write.site() != init.site())
    machine.fail(thread, FindingKind::kBarrierMisuse, site, "the barrier was written over",
                 shared_place(address));
  Accessor now = machine.ordinary(thread, site);
  if (!ordered(write, now)) {
    machine.find(thread, FindingKind::kReadBeforeWrite, site,
                 "nothing orders this use of a barrier after its initialisation",
                 shared_place(address));
  } else if (now.async_proxy = by_copy || block != thread.block; !ordered(write, now)) {
    machine.find(
        thread, FindingKind::kMissingProxyFence, site,
        "no fence.mbarrier_init publishes a barrier that a copy or another block arrives at",
        shared_place(address));
  }
  return found->second;
}

void count_arrival(Thread& who, Mbarrier& barrier, uint32_t address, uint32_t site) {
  if (barrier.pending == 0)
    who.block->machine->fail(who, FindingKind::kBarrierMisuse, site,
                             "more arrivals than the barrier's phase has", shared_place(address));
  --barrier.pending;
  end_phase_if_over(who, barrier, address);
}

void count_bytes(Thread& who, Mbarrier& barrier, uint32_t address, uint32_t bytes, uint32_t site) {
  barrier.bytes -= bytes;
  if (barrier.bytes < -(1 << 20))
    who.block->machine->find(who, FindingKind::kBarrierMisuse, site,
                             "more bytes came than the barrier can count", shared_place(address));
  end_phase_if_over(who, barrier, address);
}

void mbarrier_arrive(Thread& thread, uint32_t address, uint32_t bytes, uint32_t site) {
  Machine& machine = *thread.block->machine;
  Mbarrier& barrier = mbarrier_at(thread, address, site, nullptr);
  barrier.gathering.add(thread);
  barrier.bytes += bytes;
  machine.trace().note(thread.block->launch->number, barrier.owner->linear, thread.warp->index,
                       Note::kArrive, in_block(address));
  count_arrival(thread, barrier, address, site);
}

bool mbarrier_test(Thread& thread, uint32_t address, uint32_t parity, uint32_t site) {
  Mbarrier& barrier = mbarrier_at(thread, address, site, nullptr);
  if ((barrier.phase & 1) == (parity & 1)) return false;
  thread.knowledge.join(barrier.ended);
  return true;
}

void mbarrier_wait(Thread& thread, uint32_t address, uint32_t parity, uint32_t site) {
  Machine& machine = *thread.block->machine;
  const auto note = [&](Note what) {
    if (thread.lane == 0)
      machine.trace().note(thread.block->launch->number, thread.block->linear, thread.warp->index,
                           what, address);
  };
  if (!mbarrier_test(thread, address, parity, site)) {
    note(Note::kWait);
    do {
      mbarrier_at(thread, address, site, nullptr).waiting.push_back(&thread);
      machine.wait(thread, "the end of a phase of a barrier in shared memory", site);
    } while (!mbarrier_test(thread, address, parity, site));
  }
  note(Note::kPassed);
}

void thread_fence(Thread& thread) {
  if (thread.acquired) {
    Foreign foreign = thread.knowledge.foreign ? *thread.knowledge.foreign : Foreign();
    for (const auto& [cluster, clock] : *thread.acquired) {
      if (cluster == thread.block->agents.first_block)
        thread.knowledge.clock.join(clock);
      else
        foreign[cluster].join(clock);
    }
    thread.knowledge.foreign = std::make_shared<Foreign>(std::move(foreign));
    thread.acquired.reset();
  }
  thread.released = std::make_shared<Foreign>(as_foreign(thread));
  ++thread.epoch;
}

// Covers writes by the block's own threads: other blocks need fences of their own.
void proxy_fence(Thread& thread) {
  const size_t agents = thread.block->agents.of_block(), first = thread.block->rank * agents;
  thread.knowledge.fenced.join(thread.knowledge.clock, first, first + agents);
  thread.knowledge.fenced.raise(thread.clock_index(), thread.epoch);
  ++thread.epoch;
}

void atomic_access(Thread& thread, void* address, size_t bytes, bool writes, bool reads,
                   uint32_t site) {
  Machine& machine = *thread.block->machine;
  machine.ordinary_access(thread, writes ? AccessKind::kAtomicWrite : AccessKind::kAtomicRead,
                          address, bytes, site);
  if (!machine.memory().has(address)) return;
  Foreign& there = machine.released()[address];
  if (reads && !there.empty()) {
    if (!thread.acquired) thread.acquired = std::make_unique<Foreign>();
    for (const auto& [cluster, clock] : there) (*thread.acquired)[cluster].join(clock);
  }
  if (!writes) return;
  if (!reads) there.clear();  // an independent store, which does not continue another's release
  if (thread.released)
    for (const auto& [cluster, clock] : *thread.released) there[cluster].join(clock);
}

}  // namespace tilemoe::simulator
