#include "simulator/machine/async_copy.h"

#include <cstring>
#include <string>
#include <utility>

#include "simulator/machine/synchronization.h"

namespace tilemoe::simulator {
namespace {

void land(const Copy& copy) {
  if (copy.from == nullptr)
    std::memset(copy.to, 0, copy.size);
  else
    std::memcpy(copy.to, copy.from, copy.size);
}

}  // namespace

// A copy reads and writes at some time from now until its arrival. Reads of what it overwrites must
// precede it; reads of what it writes must wait for the arrival.
void start_copy(Thread& thread, uint32_t shared, const void* source, uint32_t bytes, uint32_t size,
                uint32_t site) {
  Block& block = *thread.block;
  Machine& machine = *block.machine;
  std::byte* const to = machine.shared_bytes(thread, shared, size, site);
  if (shared % size != 0 || (bytes != 0 && reinterpret_cast<uintptr_t>(source) % size != 0))
    machine.fail(thread, FindingKind::kOutOfBounds, site,
                 "cp.async of an address that is not on its size");
  const Accessor by{.agent = thread.copy_agent(),
                    .epoch = thread.copy_epoch,
                    .knows = &thread.knowledge,
                    .cluster = &block.agents,
                    .reads_done = thread.warp->reads_done,
                    .in_order = false,
                    .async_proxy = false,
                    .site = site};
  if (bytes != 0) {
    if (!machine.memory().has(source) || !machine.memory().allocated(source, bytes))
      machine.fail(thread, FindingKind::kOutOfBounds, site,
                   "cp.async from what is no array of device memory",
                   machine.memory().has(source)
                       ? machine.memory().describe(machine.memory().offset(source))
                       : std::string());
    Accessor reader = by;
    reader.in_order = true;  // it may read what its thread wrote
    machine.global_access(reader, block, AccessKind::kRead, source, bytes);
  }
  machine.shared_access(by, block, AccessKind::kWrite, shared, size);
  if (thread.lane == 0 && thread.copies.empty())
    machine.trace().note(block.launch->number, block.linear, thread.warp->index, Note::kCopy,
                         shared);
  const Copy copy{to, bytes == 0 ? nullptr : source, bytes, size};
  if (machine.done_at_once())
    land(copy);
  else
    thread.copies.push_back(copy);
}

void arrive_when_copied(Thread& thread, uint32_t address, uint32_t site) {
  Block& block = *thread.block;
  Machine& machine = *block.machine;
  mbarrier_at(thread, address, site, nullptr);
  const Epoch epoch = thread.copy_epoch++;
  // The async part of the arrival publishes what was copied, and nothing else of the thread.
  machine.add_event(
      block,
      [&machine, &thread, address, site, epoch, copies = std::exchange(thread.copies, {})] {
        for (const Copy& copy : copies) land(copy);
        Block& its = *thread.block;
        Mbarrier& barrier = its.mbarriers[address];
        barrier.gathering.add_epoch(its.agents.index(thread.copy_agent()), epoch);
        if (thread.lane == 0)
          machine.trace().note(its.launch->number, its.linear, thread.warp->index, Note::kLanded,
                               address);
        count_arrival(thread, barrier, address, site);
      },
      site);
}

}  // namespace tilemoe::simulator
