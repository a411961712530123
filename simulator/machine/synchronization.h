// How threads meet: lanes of a warp, threads of a block, arrivals at barriers in shared memory,
// fences and atomics.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "simulator/machine/machine.h"

namespace tilemoe::simulator {

// Waits until every lane of `mask` that has not exited is at an instruction of this kind, which an
// address identifies; the last lane calls `act(meeting)` for all. Meeting alone orders no memory
// accesses; `act` may.
template <class Act>
void meet(Thread& thread, const void* kind, uint32_t mask, const char* what, uint32_t site,
          void* operand, const Act& act);

// The lanes of a meeting know what each other did before.
void share_knowledge(Warp& warp, uint32_t mask);

// `threads` must arrive; 0: all of the block that have not exited. Returns whether `value` was true
// for any of them.
bool block_barrier(Thread& thread, uint32_t barrier, uint32_t threads, bool waits, bool value,
                   uint32_t site);

// Waits for all blocks of the cluster.
void cluster_barrier(Thread& thread, uint32_t site);

void mbarrier_init(Thread& thread, uint32_t address, uint32_t arrivals, uint32_t site);
// The barrier at `address`, which may be in another block; a finding if none is there. `by_copy`: a
// copy that the thread starts arrives there.
Mbarrier& mbarrier_at(Thread& thread, uint32_t address, uint32_t site, Block** owner,
                      bool by_copy = false);
// Arrives, and expects `bytes` more in the phase.
void mbarrier_arrive(Thread& thread, uint32_t address, uint32_t bytes, uint32_t site);
bool mbarrier_test(Thread& thread, uint32_t address, uint32_t parity, uint32_t site);
void mbarrier_wait(Thread& thread, uint32_t address, uint32_t parity, uint32_t site);
// Counts an arrival, or bytes that came; the last one ends the phase. `who` is for the trace.
void count_arrival(Thread& who, Mbarrier& barrier, uint32_t address, uint32_t site);
void count_bytes(Thread& who, Mbarrier& barrier, uint32_t address, uint32_t bytes, uint32_t site);

void thread_fence(Thread& thread);
void proxy_fence(Thread& thread);
// Before an atomic operation on memory, which reads and writes.
void atomic_access(Thread& thread, void* address, size_t bytes, bool writes, bool reads,
                   uint32_t site);

// ---- implementation

template <class Act>
void meet(Thread& thread, const void* kind, uint32_t mask, const char* what, uint32_t site,
          void* operand, const Act& act) {
  Warp& warp = *thread.warp;
  Machine& machine = *warp.block->machine;
  if ((mask >> thread.lane & 1) == 0)
    machine.fail(thread, FindingKind::kDivergence, site,
                 std::string("a lane calls ") + what + " with a mask that it is not in");
  const auto find = [&] {
    return std::find_if(warp.meetings.begin(), warp.meetings.end(),
                        [&](const Meeting& one) { return one.kind == kind && one.mask == mask; });
  };
  auto meeting = find();
  if (meeting == warp.meetings.end()) meeting = warp.meetings.insert(meeting, {kind, mask, 0, {}});
  meeting->arrived |= 1u << thread.lane;
  meeting->operands[thread.lane] = operand;
  thread.met = false;
  while (!thread.met) {
    meeting = find();
    if ((meeting->arrived | warp.exited) == (mask | warp.exited)) {
      const Meeting met = *meeting;
      warp.meetings.erase(meeting);
      act(met);
      for (Thread* lane : warp.lanes) {
        if ((met.arrived >> lane->lane & 1) == 0) continue;
        lane->met = true;
        machine.wake(*lane);
      }
    } else {
      machine.wait(thread, what, site);
    }
  }
}

}  // namespace tilemoe::simulator
