#include "simulator/machine/shadow.h"

#include <algorithm>

namespace tilemoe::simulator {
namespace {

bool known(const Clock& clock, const Recorded& before, const Accessor& now) {
  return clock.of(now.cluster->index(before.agent)) >= before.epoch;
}

bool happened(const Recorded& before, const Accessor& now) {
  if (before.epoch == 0 || (now.in_order && before.agent == now.agent)) return true;
  const uint32_t block = before.agent >> kLocalBits;
  if (block < now.knows->first_concurrent_block) return true;
  if (now.cluster->has(block)) return known(now.knows->clock, before, now);
  if (!now.knows->foreign) return false;
  // Clusters of a launch have equal shapes.
  auto at = now.knows->foreign->upper_bound(block);
  if (at == now.knows->foreign->begin()) return false;
  --at;
  AgentsOfCluster other = *now.cluster;
  other.first_block = at->first;
  return other.has(block) && at->second.of(other.index(before.agent)) >= before.epoch;
}

// Whether the async proxy sees an ordinary write of the same cluster.
bool fenced(const Recorded& before, const Accessor& now) {
  const uint32_t block = before.agent >> kLocalBits;
  if (before.epoch == 0 || block < now.knows->first_concurrent_block || !now.cluster->has(block) ||
      now.cluster->is_async_proxy(before.agent))
    return true;
  return known(now.knows->fenced, before, now);
}

class Check {
 public:
  Check(const Accessor& by, AccessKind kind, ConflictListener& listener)
      : by_(by), listener_(listener) {
    atomic_ = kind == AccessKind::kAtomicRead || kind == AccessKind::kAtomicWrite;
    writes_ = kind == AccessKind::kWrite || kind == AccessKind::kAtomicWrite;
    reads_ = kind != AccessKind::kWrite;
  }

  void word(Cell& cell, uint32_t mask, uint32_t generation, size_t byte) {
    if (cell.state >> Cell::kGenerationAt != generation) {
      cell = Cell();
      cell.state = generation << Cell::kGenerationAt;
    }
    const bool known_before = !writes_ && is_repeated(cell, mask);
    if (reads_ && (cell.state & mask) != mask && !reported_) {
      reported_ = true;
      listener_.found(Conflict::kNeverWritten, by_, nullptr, byte);
      cell.state |= mask;
    }
    if (known_before) return;
    meet_write(cell.write, mask, byte);
    if (writes_) {
      for (const Recorded& read : cell.reads) meet_read(read, mask, byte);
      cell.state |= mask;
      cell.write = record(mask);
      cell.reads[0] = cell.reads[1] = Recorded();
    } else {
      Recorded& slot = slot_for_read(cell, byte);
      slot = record(slot.agent == by_.agent && slot.epoch == by_.epoch ? mask | slot.mask() : mask);
    }
  }

 private:
  Recorded record(uint32_t mask) const {
    return {by_.agent, by_.epoch,
            by_.site | mask << Recorded::kSiteBits | (atomic_ ? Recorded::kAtomic : 0)};
  }
  bool is_repeated(const Cell& cell, uint32_t mask) const {
    for (const Recorded& read : cell.reads)
      if (read.agent == by_.agent && read.epoch == by_.epoch && (read.mask() & mask) == mask &&
          read.atomic() == atomic_)
        return true;
    return false;
  }
  void meet_write(const Recorded& write, uint32_t mask, size_t byte) {
    if (write.epoch == 0 || (write.mask() & mask) == 0) return;
    if (!(atomic_ && write.atomic()) && !happened(write, by_))
      report(writes_ ? Conflict::kWriteOfWrite : Conflict::kReadOfWrite, write, byte);
    else if (by_.async_proxy && !fenced(write, by_))
      report(Conflict::kUnfenced, write, byte);
  }
  void meet_read(const Recorded& read, uint32_t mask, size_t byte) {
    if (read.epoch == 0 || (read.mask() & mask) == 0 || (atomic_ && read.atomic())) return;
    if (!happened(read, by_) && !of_warp_and_over(read)) report(Conflict::kWriteOfRead, read, byte);
  }
  // Whether it is by a lane of the same warp that has since exchanged registers with this one.
  bool of_warp_and_over(const Recorded& read) const {
    const uint32_t local = (1u << kLocalBits) - 1;
    const uint32_t threads = by_.cluster->threads;
    if (read.agent >> kLocalBits != by_.agent >> kLocalBits || (read.agent & local) >= threads)
      return false;
    const uint32_t me = (by_.agent & local) % threads;
    return (read.agent & local) / 32 == me / 32 && by_.reads_done[read.agent % 32] >= read.epoch;
  }
  void report(Conflict conflict, const Recorded& other, size_t byte) {
    if (reported_) return;
    reported_ = true;
    listener_.found(conflict, by_, &other, byte);
  }
  // Two readers are remembered. This read replaces one that it is ordered after; if no reader is,
  // it replaces one of them by a rule that differs from place to place.
  Recorded& slot_for_read(Cell& cell, size_t byte) const {
    for (Recorded& read : cell.reads)
      if (read.epoch == 0 || (read.agent == by_.agent && by_.in_order)) return read;
    for (Recorded& read : cell.reads)
      if (happened(read, by_)) return read;
    return cell.reads[(byte / 4 * 0x9e3779b97f4a7c15 + by_.agent * 0x9e3779b9u) >> 33 & 1];
  }

  const Accessor& by_;
  ConflictListener& listener_;
  bool atomic_, writes_, reads_, reported_ = false;
};

}  // namespace

bool ordered(const Recorded& before, const Accessor& now) {
  return happened(before, now) && (!now.async_proxy || fenced(before, now));
}

void access(const Accessor& by, AccessKind kind, Cell* cells, size_t first, size_t bytes,
            uint32_t generation, ConflictListener& listener) {
  Check check(by, kind, listener);
  for (size_t byte = first, end = first + bytes; byte < end;) {
    const size_t next = std::min(end, (byte / 4 + 1) * 4);
    const uint32_t mask = ((1u << (next - byte)) - 1) << byte % 4;
    check.word(cells[byte / 4], mask, generation, byte);
    byte = next;
  }
}

void mark_written(Cell* cells, size_t first, size_t bytes) {
  for (size_t byte = first; byte < first + bytes; ++byte) cells[byte / 4].state |= 1u << byte % 4;
}

}  // namespace tilemoe::simulator
