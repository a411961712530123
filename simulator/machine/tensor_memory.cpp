#include "simulator/machine/tensor_memory.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "simulator/machine/async_agent.h"
#include "simulator/machine/synchronization.h"

namespace tilemoe::simulator {
namespace {

constexpr uint32_t kAllLanes = 0xffffffff;
constexpr uint32_t kPieceBytes = 16;
// Their addresses identify the kinds of meetings.
const char kElect = 0, kAllocate = 0, kRelinquish = 0, kFree = 0, kLoad = 0, kWait = 0;

std::string tensor_place(uint32_t address) {
  std::ostringstream text;
  text << "tensor memory, lane " << (address >> 16) << ", column " << (address & 0xffff);
  return text.str();
}

TensorMemory& memory_of(Block& block) {
  if (!block.tensor_memory) block.tensor_memory = std::make_shared<TensorMemory>();
  return *block.tensor_memory;
}
TensorWork& work_of(Thread& thread) {
  if (!thread.tensor_work) thread.tensor_work = std::make_shared<TensorWork>();
  return *thread.tensor_work;
}

uint32_t loads_agent(const Warp& warp) {
  const AgentsOfCluster& agents = warp.block->agents;
  return warp.block->number << kLocalBits | (agents.first_tensor_loads() + warp.index);
}

void require_warp(const Meeting& met, Thread& thread, const char* what, uint32_t site) {
  if (met.arrived != kAllLanes)
    thread.block->machine->fail(thread, FindingKind::kDivergence, site,
                                std::string(what) + " by a part of a warp");
}

// Ends the thread unless the lanes and columns lie in one of the block's allocations.
void require_allocated(Thread& thread, Block& block, uint32_t address, uint32_t lanes,
                       uint32_t columns, const char* what, uint32_t site) {
  const uint32_t lane = address >> 16, column = address & 0xffff;
  const auto& allocations = memory_of(block).allocations;
  const bool inside = lane + lanes <= kTensorLanes &&
                      std::any_of(allocations.begin(), allocations.end(), [&](const auto& one) {
                        return column >= one.first && column + columns <= one.first + one.columns;
                      });
  if (!inside)
    thread.block->machine->fail(thread, FindingKind::kOutOfBounds, site,
                                std::string(what) + " of " + std::to_string(columns) +
                                    " columns that the block has not allocated",
                                tensor_place(address));
}

// Records an access to the tensor memory of `block` by a tcgen05 instruction of `thread`, which is
// ordered after what the thread has passed a fence for.
void touch(Thread& thread, Block& block, uint32_t agent, Epoch epoch, AccessKind kind,
           uint32_t address, uint32_t lanes, uint32_t columns, uint32_t site) {
  Knowledge knows;
  knows.clock = work_of(thread).known;
  knows.first_concurrent_block = thread.knowledge.first_concurrent_block;
  const Accessor by{.agent = agent,
                    .epoch = epoch,
                    .knows = &knows,
                    .cluster = &thread.block->agents,
                    .reads_done = thread.warp->reads_done,
                    .in_order = true,
                    .async_proxy = false,
                    .site = site};
  const uint32_t first_lane = address >> 16, first_column = address & 0xffff;
  for (uint32_t lane = first_lane; lane < first_lane + lanes; lane += kPieceLanes)
    for (uint32_t column = first_column; column < first_column + columns; column += kPieceColumns)
      thread.block->machine->tensor_access(
          by, block, kind,
          lane / kPieceLanes * (kTensorColumns / kPieceColumns) + column / kPieceColumns);
}

}  // namespace

// Elects any lane, but the same one each time.
bool elect_lane(Thread& thread, uint32_t site) {
  Warp& warp = *thread.warp;
  meet(thread, &kElect, kAllLanes, "elect.sync", site, nullptr, [&](const Meeting& met) {
    require_warp(met, thread, "elect.sync", site);
    if (warp.elected == kLanes) warp.elected = thread.block->machine->random().below(kLanes);
  });
  return thread.lane == warp.elected;
}

// ---- waits of warps

namespace {

// A lane of a warp that waits: whether its condition holds, and the number of changes of tensor
// memory at the last check.
struct Waiter {
  bool done = false;
  uint32_t changes = 0;
};

void notify_of_change(Machine& machine, TensorMemory& memory) {
  ++memory.changes;
  for (Thread* waiting : std::exchange(memory.waiting, {})) machine.wake(*waiting);
}

// All lanes of a warp call it. They meet and call looks() after each change, until it returns true.
template <class Looks>
void wait_as_warp(Thread& thread, const void* kind, const char* what, uint32_t site,
                  const Looks& looks) {
  Machine& machine = *thread.block->machine;
  TensorMemory& memory = memory_of(*thread.block);
  Waiter waiter;
  while (true) {
    meet(thread, kind, kAllLanes, what, site, &waiter, [&](const Meeting& met) {
      require_warp(met, thread, what, site);
      const Waiter now{looks(), memory.changes};
      for (void* operand : met.operands) *static_cast<Waiter*>(operand) = now;
    });
    if (waiter.done) return;
    if (waiter.changes != memory.changes) continue;
    memory.waiting.push_back(&thread);
    machine.wait(thread, what, site);
  }
}

}  // namespace

// ---- CTA pairs

namespace {

Block& other_cta(Thread& thread) {
  return *thread.block->cluster[thread.block->rank ^ 1];
}

// Checks the cta_group of a tcgen05 instruction: 1 or 2 CTAs.
void require_ctas(Thread& thread, int ctas, const char* what, uint32_t site) {
  const Block& block = *thread.block;
  const auto misused = [&](const char* how) {
    block.machine->fail(thread, FindingKind::kTensorMemory, site, std::string(what) + how);
  };
  TensorMemory& memory = memory_of(*thread.block);
  if (memory.ctas != 0 && memory.ctas != ctas) misused(" of one CTA and of a CTA pair in a kernel");
  memory.ctas = ctas;
  if (ctas == 1) return;
  if (block.cluster.size() % 2 != 0)
    misused(" of a CTA pair in a cluster with an odd number of CTAs");
  if (other_cta(thread).done()) misused(" of a CTA pair whose other CTA has ended");
}

// Whether a cluster barrier, or what follows one, orders this thread after the other CTA's start.
bool knows_of_other_cta(Thread& thread) {
  const Block& other = other_cta(thread);
  return std::any_of(other.threads.begin(), other.threads.end(), [&](const Thread& one) {
    return thread.knowledge.clock.of(one.clock_index()) > 0;
  });
}

// An instruction that two warps execute, one of each CTA of a pair. When both have arrived,
// together() is called, and again after each change while it returns no answer; then both call
// each(answer).
template <class Together, class Each>
void meet_2cta(Thread& thread, const void* kind, const char* what, uint32_t number, uint32_t place,
               uint32_t site, const Together& together, const Each& each) {
  Block& block = *thread.block;
  Machine& machine = *block.machine;
  TensorMemory &mine = memory_of(block), &others = memory_of(other_cta(thread));
  if (!knows_of_other_cta(thread))
    machine.fail(thread, FindingKind::kTensorMemory, site,
                 std::string(what) +
                     " of a CTA pair, and nothing orders it after the start of the other CTA");
  wait_as_warp(thread, kind, what, site, [&] {
    const uint32_t warp = thread.warp->index;
    if (!mine.two_cta_call) mine.two_cta_call = {kind, number, place, warp, false, 0};
    TensorMemory::TwoCtaCall& call = *mine.two_cta_call;
    if (call.kind != kind || call.warp != warp)
      machine.fail(thread, FindingKind::kTensorMemory, site,
                   std::string(what) + " of a CTA pair while another warp executes one");
    if (!call.answered && others.two_cta_call && !others.two_cta_call->answered) {
      TensorMemory::TwoCtaCall& other = *others.two_cta_call;
      if (other.kind != kind || other.number != number || other.place != place ||
          other.warp != warp)
        machine.fail(
            thread, FindingKind::kTensorMemory, site,
            std::string(what) + " of a CTA pair whose other CTA executes another instruction");
      if (const std::optional<uint32_t> answer = together()) {
        call.answered = other.answered = true;
        call.answer = other.answer = *answer;
        notify_of_change(machine, others);
      }
    }
    if (!call.answered) return false;
    each(call.answer);
    mine.two_cta_call.reset();
    return true;
  });
}

}  // namespace

// ---- allocation

namespace {

// A column at a multiple of `columns` from which on all of these memories are free.
std::optional<uint32_t> free_place(Machine& machine, uint32_t columns,
                                   std::initializer_list<const TensorMemory*> memories) {
  std::vector<uint32_t> places;
  for (uint32_t first = 0; first < kTensorColumns; first += columns)
    if (std::none_of(memories.begin(), memories.end(), [&](const TensorMemory* memory) {
          return std::any_of(
              memory->allocations.begin(), memory->allocations.end(), [&](const auto& one) {
                return first < one.first + one.columns && one.first < first + columns;
              });
        }))
      places.push_back(first);
  if (places.empty()) return std::nullopt;
  return places[machine.random().below(static_cast<uint32_t>(places.size()))];
}

// Allocates the columns and writes their address.
void take_columns(Thread& thread, uint32_t first, uint32_t columns, uint32_t shared,
                  uint32_t site) {
  Block& block = *thread.block;
  Machine& machine = *block.machine;
  memory_of(block).allocations.push_back({first, columns, thread.warp->index, site});
  std::byte* const to = machine.shared_bytes(thread, shared, 4, site);
  machine.shared_access(machine.ordinary(thread, site), block, AccessKind::kWrite, shared, 4);
  std::memcpy(to, &first, 4);
}

void free_columns(Thread& thread, uint32_t address, uint32_t columns, uint32_t site) {
  Machine& machine = *thread.block->machine;
  TensorMemory& memory = memory_of(*thread.block);
  const auto found =
      std::find_if(memory.allocations.begin(), memory.allocations.end(),
                   [&](const auto& one) { return one.first == address && one.columns == columns; });
  if (found == memory.allocations.end())
    machine.fail(thread, FindingKind::kTensorMemory, site,
                 "tcgen05.dealloc of what tcgen05.alloc has not given", tensor_place(address));
  if (found->warp != thread.warp->index)
    machine.find(thread, FindingKind::kTensorMemory, site,
                 "tcgen05.dealloc by another warp than the one that allocated",
                 tensor_place(address));
  // Counts as a write, which must be ordered after all reads and writes.
  touch(thread, *thread.block, loads_agent(*thread.warp), thread.warp->tensor_load_epoch,
        AccessKind::kWrite, address, kTensorLanes, columns, site);
  for (uint32_t lane = 0; lane < kTensorLanes / kPieceLanes; ++lane)
    for (uint32_t column = address; column < address + columns; column += kPieceColumns)
      memory.cells[lane * (kTensorColumns / kPieceColumns) + column / kPieceColumns] = {};
  memory.allocations.erase(found);
  notify_of_change(machine, memory);
}

}  // namespace

void allocate_tensor_memory(Thread& thread, int ctas, uint32_t shared, uint32_t columns,
                            uint32_t site) {
  constexpr const char* kWhat = "tcgen05.alloc";
  Block& block = *thread.block;
  Machine& machine = *block.machine;
  TensorMemory& memory = memory_of(block);
  require_ctas(thread, ctas, kWhat, site);
  if (columns < 32 || columns > kTensorColumns || !std::has_single_bit(columns))
    machine.fail(thread, FindingKind::kTensorMemory, site,
                 "an allocation of " + std::to_string(columns) + " columns");
  if (memory.relinquished)
    machine.fail(thread, FindingKind::kTensorMemory, site,
                 "tcgen05.alloc after tcgen05.relinquish_alloc_permit");
  if (ctas == 2)
    return meet_2cta(
        thread, &kAllocate, kWhat, columns, shared, site,
        [&] {
          return free_place(machine, columns, {&memory, &memory_of(other_cta(thread))});
        },
        [&](uint32_t first) { take_columns(thread, first, columns, shared, site); });
  wait_as_warp(thread, &kAllocate, kWhat, site, [&] {
    const std::optional<uint32_t> first = free_place(machine, columns, {&memory});
    if (first) take_columns(thread, *first, columns, shared, site);
    return first.has_value();
  });
}

void relinquish_tensor_memory(Thread& thread, int ctas, uint32_t site) {
  constexpr const char* kWhat = "tcgen05.relinquish_alloc_permit";
  require_ctas(thread, ctas, kWhat, site);
  TensorMemory& memory = memory_of(*thread.block);
  if (ctas == 2)
    return meet_2cta(
        thread, &kRelinquish, kWhat, 0, 0, site, [] { return std::optional<uint32_t>(0); },
        [&](uint32_t) { memory.relinquished = true; });
  meet(thread, &kRelinquish, kAllLanes, kWhat, site, nullptr, [&](const Meeting& met) {
    require_warp(met, thread, kWhat, site);
    memory.relinquished = true;
  });
}

void free_tensor_memory(Thread& thread, int ctas, uint32_t address, uint32_t columns,
                        uint32_t site) {
  constexpr const char* kWhat = "tcgen05.dealloc";
  require_ctas(thread, ctas, kWhat, site);
  if (ctas == 2)
    return meet_2cta(
        thread, &kFree, kWhat, columns, address, site, [] { return std::optional<uint32_t>(0); },
        [&](uint32_t) { free_columns(thread, address, columns, site); });
  meet(thread, &kFree, kAllLanes, kWhat, site, nullptr, [&](const Meeting& met) {
    require_warp(met, thread, kWhat, site);
    free_columns(thread, address, columns, site);
  });
}

// ---- MMAs

namespace {

// The CTAs of an MMA, in the order of its rows.
std::vector<Block*> ctas_of(Block& block, int ctas) {
  if (ctas == 1) return {&block};
  const uint32_t first = block.rank & ~1u;
  return {block.cluster[first], block.cluster[first + 1]};
}

void compute(Block& block, const TensorMma& mma) {
  const TensorInstruction& instruction = mma.instruction;
  const auto columns = static_cast<size_t>(instruction.columns);
  const int rows = instruction.rows / mma.ctas;  // of each block
  const std::vector<Block*> ctas = ctas_of(block, mma.ctas);
  const auto operand = [](const Block& of, const MatrixDescriptor& descriptor, OperandMajor major,
                          int count) {
    const std::span<const std::byte> shared(of.worker->shared(),
                                            kReservedShared + of.dynamic_bytes);
    return gather_operand(descriptor, major, count, shared);
  };
  std::vector<uint16_t> B;
  for (const Block* of : ctas) {
    const std::vector<uint16_t> part =
        operand(*of, mma.b, instruction.b_major, instruction.columns / mma.ctas);
    B.insert(B.end(), part.begin(), part.end());
  }
  for (Block* of : ctas) {
    const std::vector<uint16_t> A = operand(*of, mma.a, instruction.a_major, rows);
    std::vector<float> D(static_cast<size_t>(rows) * columns);
    float* const first = memory_of(*of).numbers.data() + (mma.d & 0xffff);
    if (mma.accumulate)
      for (size_t row = 0; row < static_cast<size_t>(rows); ++row)
        std::copy_n(first + row * kTensorColumns, columns, &D[row * columns]);
    multiply(kHopperCore, instruction.type, rows, instruction.columns, A.data(), B.data(),
             mma.accumulate, D.data());
    for (size_t row = 0; row < static_cast<size_t>(rows); ++row)
      std::copy_n(&D[row * columns], columns, first + row * kTensorColumns);
  }
}

// Computes MMAs in the order in which they were started.
void compute_up_to(Block& block, TensorWork& work, uint64_t end) {
  for (; work.computed < end; ++work.computed) {
    compute(block, work.mmas.front());
    work.mmas.pop_front();
  }
}

}  // namespace

void multiply_into_tensor_memory(Thread& thread, int ctas, uint32_t d, uint64_t a, uint64_t b,
                                 uint32_t instruction_bits, bool accumulate, uint32_t site) {
  Block& block = *thread.block;
  Warp& warp = *thread.warp;
  Machine& machine = *block.machine;
  TensorWork& work = work_of(thread);
  require_ctas(thread, ctas, "tcgen05.mma", site);
  TensorMma mma{};
  try {
    mma = {.d = d,
           .instruction = decode_tensor_instruction(instruction_bits, ctas),
           .a = decode_tensor_descriptor(a),
           .b = decode_tensor_descriptor(b),
           .accumulate = accumulate,
           .ctas = ctas,
           .site = site};
  } catch (const std::invalid_argument& error) {
    machine.fail(thread, FindingKind::kOutOfBounds, site, error.what());
  }
  const TensorInstruction& instruction = mma.instruction;
  const auto rows = static_cast<uint32_t>(instruction.rows / ctas);  // of each block
  const auto columns = static_cast<uint32_t>(instruction.columns);
  if (d >> 16 != 0)
    machine.fail(thread, FindingKind::kOutOfBounds, site, "128 rows begin at lane 0",
                 tensor_place(d));

  const Accessor by = warp_mmas(thread, site);
  for (Block* of : ctas_of(block, ctas)) {
    require_allocated(thread, *of, d, rows, columns, "tcgen05.mma", site);
    const auto read = [&](const MatrixDescriptor& descriptor, OperandMajor major, int count) {
      for (const OperandPiece& piece : operand_pieces(descriptor, major, count)) {
        machine.require_dynamic(thread, piece.address, kPieceBytes, site);
        machine.shared_access(by, *of, AccessKind::kRead, piece.address, kPieceBytes);
      }
    };
    read(mma.a, instruction.a_major, instruction.rows / ctas);
    read(mma.b, instruction.b_major, instruction.columns / ctas);
    if (accumulate)
      touch(thread, *of, by.agent, by.epoch, AccessKind::kRead, d, rows, columns, site);
    touch(thread, *of, by.agent, by.epoch, AccessKind::kWrite, d, rows, columns, site);
  }

  work.mmas.push_back(mma);
  ++work.started;
  work.last_site = site;
  machine.trace().note(block.launch->number, block.linear, warp.index, Note::kMma, d);
  // It may be computed at once, with all before it.
  if (machine.random().one_in(4) || machine.done_at_once())
    compute_up_to(block, work, work.started);
}

// The MMAs that were started are computed some time later; then this arrives at the barrier, which
// publishes the MMAs and what their thread knew before, such as that their operands had landed, but
// not what the thread did itself.
void commit_tensor_mmas(Thread& thread, int ctas, uint32_t address, uint32_t cta_mask,
                        uint32_t site) {
  Block& block = *thread.block;
  Machine& machine = *block.machine;
  Warp& warp = *thread.warp;
  require_ctas(thread, ctas, "tcgen05.commit", site);
  if (cta_mask == 0) cta_mask = 1u << block.rank;
  if (cta_mask >> block.cluster.size() != 0)
    machine.fail(thread, FindingKind::kOutOfBounds, site,
                 "tcgen05.commit to a block of no cluster");
  TensorWork& work = work_of(thread);
  const Accessor by = warp_mmas(thread, site);
  for (uint32_t rank = 0; rank < block.cluster.size(); ++rank) {
    if ((cta_mask >> rank & 1) == 0) continue;
    Block& there = *block.cluster[rank];
    mbarrier_at(thread, in_cluster(address, rank), site, nullptr);
    machine.add_event(
        there,
        [&machine, &thread, &block, &there, &work, address, site, by, end = work.started,
         knew = thread.knowledge] {
          compute_up_to(block, work, end);
          Thread& who = &there == &block ? thread : there.threads.front();
          Mbarrier& barrier = there.mbarriers[address];
          barrier.gathering.add(knew);
          barrier.gathering.add_tensor_epoch(there.agents.index(by.agent), by.epoch);
          machine.trace().note(there.launch->number, there.linear, who.warp->index, Note::kLanded,
                               address);
          count_arrival(who, barrier, address, site);
        },
        site);
  }
  work.committed = work.started;
  ++warp.mma_epoch;
}

// ---- loads

namespace {

void land(Block& block, TensorLoad& load, uint32_t lane) {
  const std::vector<float>& numbers = memory_of(block).numbers;
  for (uint32_t i = 0; i < load.count; ++i) {
    const uint32_t row = load.lane + lane / 4 + 8 * (i % 4 / 2);
    const uint32_t column = load.column + i / 4 * 8 + lane % 4 * 2 + i % 2;
    load.to[i] = numbers[row * kTensorColumns + column];
  }
  load.landed = true;
}

}  // namespace

void load_tensor_memory(Thread& thread, float* to, uint32_t pieces, uint32_t address,
                        uint32_t site) {
  Block& block = *thread.block;
  Warp& warp = *thread.warp;
  Machine& machine = *block.machine;
  struct Operand {
    float* to;
    uint32_t address;
  } operand{to, address};
  meet(thread, &kLoad, kAllLanes, "tcgen05.ld", site, &operand, [&](const Meeting& met) {
    require_warp(met, thread, "tcgen05.ld", site);
    for (void* other : met.operands)
      if (static_cast<Operand*>(other)->address != address)
        machine.fail(thread, FindingKind::kDivergence, site,
                     "tcgen05.ld of different addresses in a warp");
    const uint32_t lane = address >> 16, first = warp.index % 4 * kLanes;
    if (lane != first && lane != first + kPieceLanes)
      machine.fail(thread, FindingKind::kOutOfBounds, site,
                   "a warp reaches 32 lanes, from " + std::to_string(first) + " on",
                   tensor_place(address));
    require_allocated(thread, block, address, kPieceLanes, pieces * kPieceColumns, "tcgen05.ld",
                      site);
    touch(thread, block, loads_agent(warp), warp.tensor_load_epoch, AccessKind::kRead, address,
          kPieceLanes, pieces * kPieceColumns, site);
    const bool early = machine.random().one_in(3) || machine.done_at_once();
    for (Thread* one : warp.lanes) {
      TensorLoad load{.to = static_cast<Operand*>(met.operands[one->lane])->to,
                      .count = 4 * pieces,
                      .lane = lane,
                      .column = address & 0xffff,
                      .landed = false,
                      .site = site};
      std::fill_n(load.to, load.count, std::numeric_limits<float>::quiet_NaN());
      if (early) land(block, load, one->lane);
      work_of(*one).loads.push_back(load);
      one->loads_registers = true;
    }
  });
}

void wait_for_tensor_loads(Thread& thread, uint32_t site) {
  Warp& warp = *thread.warp;
  meet(thread, &kWait, kAllLanes, "tcgen05.wait::ld", site, nullptr, [&](const Meeting& met) {
    require_warp(met, thread, "tcgen05.wait::ld", site);
    const size_t agent = warp.block->agents.index(loads_agent(warp));
    const Epoch epoch = warp.tensor_load_epoch++;
    for (Thread* lane : warp.lanes) {
      TensorWork& work = work_of(*lane);
      for (TensorLoad& load : work.loads)
        if (!load.landed) land(*warp.block, load, lane->lane);
      work.loads.clear();
      lane->loads_registers = false;
      work.known.raise(agent, epoch);
      lane->knowledge.clock.raise(agent, epoch);
    }
  });
}

// ---- fences

void tensor_fence_before(Thread& thread) {
  thread.knowledge.tensor.join(thread.knowledge.clock);
}
void tensor_fence_after(Thread& thread) {
  work_of(thread).known.join(thread.knowledge.tensor);
}

// ---- checks by the machine

void Machine::check_registers(Thread& thread, const void* address, size_t bytes, uint32_t site) {
  const auto* const begin = static_cast<const std::byte*>(address);
  for (const TensorLoad& load : thread.tensor_work->loads) {
    const auto* const first = reinterpret_cast<const std::byte*>(load.to);
    if (begin < first + load.count * sizeof(float) && first < begin + bytes)
      find(thread, FindingKind::kReadBeforeWrite, site,
           "registers of tcgen05.ld are used before tcgen05.wait::ld");
  }
}

void Machine::check_tensor_memory(Thread& thread) {
  if (const TensorWork* const work = thread.tensor_work.get();
      work != nullptr && work->committed < work->started)
    find(thread, FindingKind::kTensorMemory, work->last_site,
         "a thread ends and has not committed this MMA");
  const Block& block = *thread.block;
  if (!block.done() || !block.tensor_memory) return;
  for (const auto& one : block.tensor_memory->allocations)
    find(thread, FindingKind::kTensorMemory, one.site,
         std::to_string(one.columns) + " columns are not freed when their block ends");
}

void Machine::tensor_access(const Accessor& by, Block& block, AccessKind kind, uint32_t piece) {
  accessed_block_ = &block;
  accessed_ = Space::kTensor;
  access(by, kind, block.tensor_memory->cells.data(), size_t{piece} * 4, 4, 0, *this);
}

std::string describe_tensor_piece(size_t byte) {
  const auto piece = static_cast<uint32_t>(byte / 4);
  constexpr uint32_t kPieces = kTensorColumns / kPieceColumns;
  return tensor_place(piece / kPieces * kPieceLanes << 16 | piece % kPieces * kPieceColumns);
}

}  // namespace tilemoe::simulator
