#include "simulator/intrinsics.h"

#include <cstring>

#include "simulator/machine/async_copy.h"
#include "simulator/machine/machine.h"
#include "simulator/machine/synchronization.h"
#include "simulator/tensor_core.h"

#define TILEMOE_SITE site_of(__builtin_return_address(0))

namespace tilemoe::simulator {
namespace {

Thread& current() {
  return *Machine::current();
}

// An address of its own for each instruction.
template <int kNumber>
const void* kind() {
  static const char here = 0;
  return &here;
}

constexpr unsigned kAllLanes = 0xffffffff;

// Registers went from lane to lane. Whoever has another's number comes after the reads that it was
// made from; of writes nothing follows.
void order_reads(Warp& warp, const Meeting& met) {
  if ((met.arrived | warp.exited) != kAllLanes) return;
  for (Thread* lane : warp.lanes)
    if ((met.arrived >> lane->lane & 1) != 0) warp.reads_done[lane->lane] = lane->epoch++;
}

void require_warp(const Meeting& meeting, Thread& thread, const char* what, uint32_t site) {
  if (meeting.arrived != kAllLanes)
    thread.block->machine->fail(thread, FindingKind::kDivergence, site,
                                std::string(what) + " by a part of a warp");
}

}  // namespace

void __syncthreads() {
  block_barrier(current(), 0, 0, true, false, TILEMOE_SITE);
}
int __syncthreads_or(int predicate) {
  return block_barrier(current(), 0, 0, true, predicate != 0, TILEMOE_SITE) ? 1 : 0;
}
void __syncwarp(unsigned mask) {
  Thread& thread = current();
  meet(thread, kind<0>(), mask, "__syncwarp()", TILEMOE_SITE, nullptr,
       [&](const Meeting& met) { share_knowledge(*thread.warp, met.arrived); });
}
void __threadfence() {
  thread_fence(current());
}
void cudaGridDependencySynchronize() {
  Thread& thread = current();
  thread.block->machine->wait_for_previous_launches(thread, TILEMOE_SITE);
}
void cudaTriggerProgrammaticLaunchCompletion() {
  Thread& thread = current();
  thread.block->machine->trigger(thread);
}

unsigned gather(unsigned mask, uint64_t bits, uint64_t (&all)[32]) {
  struct Operand {
    uint64_t bits;
    uint64_t (*all)[32];
    unsigned lanes;
  } operand{bits, &all, 0};
  Thread& thread = current();
  meet(thread, kind<1>(), mask, "an exchange of a warp", TILEMOE_SITE, &operand,
       [&](const Meeting& met) {
         order_reads(*thread.warp, met);
         for (uint32_t to = 0; to < kLanes; ++to) {
           if ((met.arrived >> to & 1) == 0) continue;
           auto& taker = *static_cast<Operand*>(met.operands[to]);
           taker.lanes = met.arrived;
           for (uint32_t from = 0; from < kLanes; ++from)
             if ((met.arrived >> from & 1) != 0)
               (*taker.all)[from] = static_cast<Operand*>(met.operands[from])->bits;
         }
       });
  return operand.lanes;
}

uint64_t shuffle(unsigned mask, uint64_t bits, Shuffle how, int by, int width) {
  Thread& thread = current();
  const uint32_t site = TILEMOE_SITE;
  struct Operand {
    uint64_t bits, result;
    int from;
  };
  const int lane = static_cast<int>(thread.lane);
  const int first = lane / width * width, last = first + width - 1;
  int from = lane;
  switch (how) {
    case Shuffle::kFrom: from = first + (by & (width - 1)); break;
    case Shuffle::kXor: from = (lane ^ by) > last ? lane : lane ^ by; break;
    case Shuffle::kUp: from = lane - by < first ? lane : lane - by; break;
    case Shuffle::kDown: from = lane + by > last ? lane : lane + by; break;
  }
  Operand operand{bits, 0, from};
  meet(thread, kind<2>(), mask, "a shuffle", site, &operand, [&](const Meeting& met) {
    order_reads(*thread.warp, met);
    for (uint32_t to = 0; to < kLanes; ++to) {
      if ((met.arrived >> to & 1) == 0) continue;
      auto& taker = *static_cast<Operand*>(met.operands[to]);
      if ((met.arrived >> taker.from & 1) == 0)
        thread.block->machine->fail(thread, FindingKind::kDivergence, site,
                                    "a shuffle from a lane that does not take part");
      taker.result = static_cast<Operand*>(met.operands[taker.from])->bits;
    }
  });
  return operand.result;
}

unsigned ballot(unsigned mask, bool predicate) {
  struct Operand {
    bool predicate;
    unsigned result;
  } operand{predicate, 0};
  Thread& thread = current();
  meet(thread, kind<3>(), mask, "a vote", TILEMOE_SITE, &operand, [&](const Meeting& met) {
    order_reads(*thread.warp, met);
    unsigned result = 0;
    for (uint32_t lane = 0; lane < kLanes; ++lane)
      if ((met.arrived >> lane & 1) != 0 && static_cast<Operand*>(met.operands[lane])->predicate)
        result |= 1u << lane;
    for (uint32_t lane = 0; lane < kLanes; ++lane)
      if ((met.arrived >> lane & 1) != 0)
        static_cast<Operand*>(met.operands[lane])->result = result;
  });
  return operand.result;
}

unsigned match_any(unsigned mask, uint64_t bits) {
  uint64_t all[32];
  const unsigned lanes = gather(mask, bits, all);
  unsigned result = 0;
  for (uint32_t lane = 0; lane < kLanes; ++lane)
    if ((lanes >> lane & 1) != 0 && all[lane] == bits) result |= 1u << lane;
  return result;
}

// ---- memory

void atomic_begin(void* at, size_t bytes, bool writes, bool reads) {
  atomic_access(current(), at, bytes, writes, reads, TILEMOE_SITE);
}
void atomic_end() {
  Thread& thread = current();
  thread.block->machine->yield(thread);
}
uint64_t raw_load(const void* at, size_t bytes) {
  uint64_t bits = 0;
  std::memcpy(&bits, at, bytes);
  return bits;
}
void raw_store(void* at, size_t bytes, uint64_t bits) {
  std::memcpy(at, &bits, bytes);
}
uint32_t to_shared(const void* generic) {
  Thread& thread = current();
  uint32_t offset = 0;
  if (!thread.block->machine->shared_offset(*thread.block, generic, offset))
    thread.block->machine->fail(thread, FindingKind::kOutOfBounds, TILEMOE_SITE,
                                "the shared address of what is not in shared memory");
  return offset;
}
void* dynamic_shared() {
  return current().block->worker->dynamic();
}

namespace {

std::byte* shared_access(AccessKind kind, uint32_t shared, uint32_t bytes, uint32_t site) {
  Thread& thread = current();
  Machine& machine = *thread.block->machine;
  Block* owner = nullptr;
  std::byte* const at = machine.shared_bytes(thread, shared, bytes, site, &owner);
  if (shared % bytes != 0)
    machine.fail(thread, FindingKind::kOutOfBounds, site,
                 "an address that is not on its " + std::to_string(bytes) + " bytes");
  machine.shared_access(machine.ordinary(thread, site), *owner, kind,
                        shared & ((1u << kRankAt) - 1), bytes);
  return at;
}

}  // namespace

void load_shared(uint32_t shared, void* to, uint32_t bytes) {
  std::memcpy(to, shared_access(AccessKind::kRead, shared, bytes, TILEMOE_SITE), bytes);
}
void store_shared(uint32_t shared, const void* from, uint32_t bytes) {
  std::memcpy(shared_access(AccessKind::kWrite, shared, bytes, TILEMOE_SITE), from, bytes);
}
void load_global(const void* global, void* to, uint32_t bytes) {
  Thread& thread = current();
  Machine& machine = *thread.block->machine;
  if (reinterpret_cast<uintptr_t>(global) % bytes != 0)
    machine.fail(thread, FindingKind::kOutOfBounds, TILEMOE_SITE,
                 "an address that is not on its " + std::to_string(bytes) + " bytes");
  machine.ordinary_access(thread, AccessKind::kRead, global, bytes, TILEMOE_SITE);
  std::memcpy(to, global, bytes);
}

// ---- barriers and copies

void named_barrier(uint32_t barrier, uint32_t threads, bool waits) {
  block_barrier(current(), barrier, threads, waits, false, TILEMOE_SITE);
}
void init_mbarrier(uint32_t barrier, uint32_t arrivals) {
  mbarrier_init(current(), barrier, arrivals, TILEMOE_SITE);
}
void arrive_mbarrier(uint32_t barrier, uint32_t bytes) {
  mbarrier_arrive(current(), barrier, bytes, TILEMOE_SITE);
}
bool test_mbarrier(uint32_t barrier, uint32_t parity) {
  Thread& thread = current();
  if (mbarrier_test(thread, barrier, parity, TILEMOE_SITE)) return true;
  thread.block->machine->yield(thread);
  return false;
}
void wait_mbarrier(uint32_t barrier, uint32_t parity) {
  mbarrier_wait(current(), barrier, parity, TILEMOE_SITE);
}
void copy_async(uint32_t shared, const void* source, uint32_t bytes) {
  start_copy(current(), shared, source, bytes, TILEMOE_SITE);
}
void arrive_copies(uint32_t barrier) {
  arrive_when_copied(current(), barrier, TILEMOE_SITE);
}
void fence_proxy() {
  proxy_fence(current());
}
int32_t thread_number() {
  return static_cast<int32_t>(current().index);
}

// ---- matrices

namespace {

// Four 8x8 blocks of 16-bit numbers, as their rows; lane 4 r + c has columns 2 c and 2 c + 1 of row
// r of each in its registers.
struct MatrixOperand {
  uint32_t shared;
  uint32_t* r;
  std::byte* row;
};

template <class Move>
void move_matrices(const Meeting& met, bool transposed, const Move& move) {
  for (uint32_t lane = 0; lane < kLanes; ++lane)
    for (uint32_t i = 0; i < 4; ++i) {
      auto& mine = *static_cast<MatrixOperand*>(met.operands[lane]);
      for (uint32_t half = 0; half < 2; ++half) {
        uint32_t row = lane / 4, column = lane % 4 * 2 + half;
        if (transposed) std::swap(row, column);
        auto& owner = *static_cast<MatrixOperand*>(met.operands[8 * i + row]);
        move(owner.row + 2 * column, mine.r[i], 16 * half);
      }
    }
}

}  // namespace

void load_matrices(uint32_t (&r)[4], uint32_t shared, bool transposed) {
  Thread& thread = current();
  const uint32_t site = TILEMOE_SITE;
  // A lane reads the row whose address it gives.
  MatrixOperand operand{shared, r, shared_access(AccessKind::kRead, shared, 16, site)};
  meet(thread, transposed ? kind<4>() : kind<5>(), kAllLanes, "ldmatrix", site, &operand,
       [&](const Meeting& met) {
         require_warp(met, thread, "ldmatrix", site);
         move_matrices(met, transposed, [](const std::byte* at, uint32_t& word, uint32_t shift) {
           uint16_t number;
           std::memcpy(&number, at, 2);
           word = (word & ~(0xffffu << shift)) | static_cast<uint32_t>(number) << shift;
         });
       });
}

void store_matrices(uint32_t shared, const uint32_t (&r)[4], bool transposed) {
  Thread& thread = current();
  const uint32_t site = TILEMOE_SITE;
  uint32_t words[4] = {r[0], r[1], r[2], r[3]};
  MatrixOperand operand{shared, words, shared_access(AccessKind::kWrite, shared, 16, site)};
  meet(thread, transposed ? kind<6>() : kind<7>(), kAllLanes, "stmatrix", site, &operand,
       [&](const Meeting& met) {
         require_warp(met, thread, "stmatrix", site);
         move_matrices(met, transposed, [](std::byte* at, const uint32_t& word, uint32_t shift) {
           const auto number = static_cast<uint16_t>(word >> shift);
           std::memcpy(at, &number, 2);
         });
       });
}

uint32_t move_matrix(uint32_t word) {
  Thread& thread = current();
  const uint32_t site = TILEMOE_SITE;
  struct Operand {
    uint32_t word, result;
  } operand{word, 0};
  meet(thread, kind<8>(), kAllLanes, "movmatrix", site, &operand, [&](const Meeting& met) {
    require_warp(met, thread, "movmatrix", site);
    order_reads(*thread.warp, met);
    for (uint32_t lane = 0; lane < kLanes; ++lane)
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t row = lane % 4 * 2 + half, column = lane / 4;
        const uint32_t from = static_cast<Operand*>(met.operands[4 * row + column / 2])->word;
        static_cast<Operand*>(met.operands[lane])->result |= (from >> 16 * (column % 2) & 0xffff)
                                                             << 16 * half;
      }
  });
  return operand.result;
}

void multiply_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                       bool bfloat16) {
  Thread& thread = current();
  const uint32_t site = TILEMOE_SITE;
  struct Operand {
    float* d;
    const uint32_t *a, *b;
  } operand{d, a, b};
  meet(thread, bfloat16 ? kind<9>() : kind<10>(), kAllLanes, "mma.sync", site, &operand,
       [&](const Meeting& met) {
         require_warp(met, thread, "mma.sync", site);
         uint16_t A[16 * 16], B[8 * 16];
         float D[16 * 8];
         for (uint32_t lane = 0; lane < kLanes; ++lane) {
           const auto& mine = *static_cast<const Operand*>(met.operands[lane]);
           const uint32_t row = lane / 4, column = lane % 4 * 2;
           for (uint32_t i = 0; i < 4; ++i)
             std::memcpy(&A[(row + 8 * (i % 2)) * 16 + 8 * (i / 2) + column], &mine.a[i], 4);
           for (uint32_t i = 0; i < 2; ++i)
             std::memcpy(&B[row * 16 + 8 * i + column], &mine.b[i], 4);
           for (uint32_t i = 0; i < 4; ++i) D[(row + 8 * (i / 2)) * 8 + column + i % 2] = mine.d[i];
         }
         const TensorCore& core =
             thread.block->machine->device().major >= 9 ? kHopperCore : kAmpereCore;
         multiply(core, bfloat16 ? OperandType::kBFloat16 : OperandType::kFloat16, 16, 8, A, B,
                  true, D);
         for (uint32_t lane = 0; lane < kLanes; ++lane) {
           const auto& mine = *static_cast<const Operand*>(met.operands[lane]);
           const uint32_t row = lane / 4, column = lane % 4 * 2;
           for (uint32_t i = 0; i < 4; ++i) mine.d[i] = D[(row + 8 * (i / 2)) * 8 + column + i % 2];
         }
       });
  if (thread.lane == 0)
    thread.block->machine->trace().note(thread.block->launch->number, thread.block->linear,
                                        thread.warp->index, Note::kProduct, 0);
}

}  // namespace tilemoe::simulator
