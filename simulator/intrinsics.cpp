#include "simulator/intrinsics.h"

#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "simulator/machine/async_copy.h"
#include "simulator/machine/machine.h"
#include "simulator/machine/synchronization.h"
#include "simulator/machine/tensor_memory.h"
#include "simulator/machine/tma.h"
#include "simulator/machine/wgmma.h"
#include "simulator/tensor_core.h"
#include "simulator/warp_matrices.h"

#define TILEMOE_SITE site_of(__builtin_return_address(0))

namespace tilemoe::simulator {
namespace {

// The running thread, inside the machine: the machine's accesses are not the kernel's, even if the
// linker has taken an inline function of the standard library from a kernel's object file.
class Call {
 public:
  Call() : was_inside_(std::exchange(Machine::current()->inside_machine, true)) {
    thread_.block->machine->take_turn(thread_);
  }
  ~Call() { thread_.inside_machine = was_inside_; }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  operator Thread&() const { return thread_; }

 private:
  Thread& thread_ = *Machine::current();
  bool was_inside_;
};

// An address of its own for each instruction.
template <int kNumber>
const void* kind() {
  static const char here = 0;
  return &here;
}

constexpr unsigned kAllLanes = 0xffffffff;

// Registers went from lane to lane. A lane that has another lane's number is ordered after the
// reads that the number was made from; writes are not ordered.
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
  block_barrier(Call(), 0, 0, true, false, TILEMOE_SITE);
}
int __syncthreads_or(int predicate) {
  return block_barrier(Call(), 0, 0, true, predicate != 0, TILEMOE_SITE) ? 1 : 0;
}
void __syncwarp(unsigned mask) {
  const Call call;
  Thread& thread = call;
  meet(thread, kind<0>(), mask, "__syncwarp()", TILEMOE_SITE, nullptr,
       [&](const Meeting& met) { share_knowledge(*thread.warp, met.arrived); });
}
void __threadfence() {
  thread_fence(Call());
}
void cudaGridDependencySynchronize() {
  const Call call;
  Thread& thread = call;
  thread.block->machine->wait_for_previous_launches(thread, TILEMOE_SITE);
}
void cudaTriggerProgrammaticLaunchCompletion() {
  const Call call;
  Thread& thread = call;
  thread.block->machine->trigger(thread);
}

unsigned gather(unsigned mask, uint64_t bits, uint64_t (&all)[32]) {
  struct Operand {
    uint64_t bits;
    uint64_t (*all)[32];
    unsigned lanes;
  } operand{bits, &all, 0};
  const Call call;
  Thread& thread = call;
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
  const Call call;
  Thread& thread = call;
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
  const Call call;
  Thread& thread = call;
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
  atomic_access(Call(), at, bytes, writes, reads, TILEMOE_SITE);
}
void atomic_end() {
  const Call call;
  Thread& thread = call;
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
  const Call call;
  Thread& thread = call;
  uint32_t offset = 0;
  if (!thread.block->machine->shared_offset(*thread.block, generic, offset))
    thread.block->machine->fail(thread, FindingKind::kOutOfBounds, TILEMOE_SITE,
                                "the shared address of what is not in shared memory");
  return offset;
}
void* dynamic_shared() {
  return static_cast<Thread&>(Call()).block->worker->dynamic();
}

namespace {

std::byte* shared_access(AccessKind kind, uint32_t shared, uint32_t bytes, uint32_t site) {
  const Call call;
  Thread& thread = call;
  Machine& machine = *thread.block->machine;
  Block* owner = nullptr;
  std::byte* const at = machine.shared_bytes(thread, shared, bytes, site, &owner);
  if (shared % bytes != 0)
    machine.fail(thread, FindingKind::kOutOfBounds, site,
                 "an address that is not on its " + std::to_string(bytes) + " bytes");
  machine.shared_access(machine.ordinary(thread, site), *owner, kind, in_block(shared), bytes);
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
  const Call call;
  Thread& thread = call;
  Machine& machine = *thread.block->machine;
  if (reinterpret_cast<uintptr_t>(global) % bytes != 0)
    machine.fail(thread, FindingKind::kOutOfBounds, TILEMOE_SITE,
                 "an address that is not on its " + std::to_string(bytes) + " bytes");
  machine.ordinary_access(thread, AccessKind::kRead, global, bytes, TILEMOE_SITE);
  std::memcpy(to, global, bytes);
}

// ---- barriers and copies

void named_barrier(uint32_t barrier, uint32_t threads, bool waits) {
  block_barrier(Call(), barrier, threads, waits, false, TILEMOE_SITE);
}
void init_mbarrier(uint32_t barrier, uint32_t arrivals) {
  mbarrier_init(Call(), barrier, arrivals, TILEMOE_SITE);
}
void arrive_mbarrier(uint32_t barrier, uint32_t bytes) {
  mbarrier_arrive(Call(), barrier, bytes, TILEMOE_SITE);
}
bool test_mbarrier(uint32_t barrier, uint32_t parity) {
  const Call call;
  Thread& thread = call;
  if (mbarrier_test(thread, barrier, parity, TILEMOE_SITE)) return true;
  thread.block->machine->yield(thread);
  return false;
}
void wait_mbarrier(uint32_t barrier, uint32_t parity) {
  mbarrier_wait(Call(), barrier, parity, TILEMOE_SITE);
}
void copy_async(uint32_t shared, const void* source, uint32_t bytes) {
  start_copy(Call(), shared, source, bytes, 16, TILEMOE_SITE);
}
void copy_async_4(uint32_t shared, const void* source, uint32_t bytes) {
  start_copy(Call(), shared, source, bytes, 4, TILEMOE_SITE);
}
void arrive_copies(uint32_t barrier) {
  arrive_when_copied(Call(), barrier, TILEMOE_SITE);
}
void fence_proxy() {
  proxy_fence(Call());
}
int32_t thread_number() {
  return static_cast<int32_t>(Machine::current()->index);
}

// ---- matrices

namespace {

template <class T>
T& of_lane(const Meeting& met, uint32_t lane) {
  return *static_cast<T*>(met.operands[lane]);
}

struct MatrixOperand {
  uint32_t* r;
  std::byte* row;  // whose address the lane gives
};

}  // namespace

void load_matrices(uint32_t (&r)[4], uint32_t shared, bool transposed) {
  const Call call;
  Thread& thread = call;
  const uint32_t site = TILEMOE_SITE;
  // A lane reads the row whose address it gives.
  MatrixOperand operand{r, shared_access(AccessKind::kRead, shared, 16, site)};
  meet(thread, transposed ? kind<4>() : kind<5>(), kAllLanes, "ldmatrix", site, &operand,
       [&](const Meeting& met) {
         require_warp(met, thread, "ldmatrix", site);
         OfWarp<MatrixRow> rows;
         for (uint32_t lane = 0; lane < kLanes; ++lane)
           std::memcpy(&rows[lane], of_lane<MatrixOperand>(met, lane).row, 16);
         const auto loaded = load_matrices(rows, transposed);
         for (uint32_t lane = 0; lane < kLanes; ++lane)
           std::memcpy(of_lane<MatrixOperand>(met, lane).r, &loaded[lane], 16);
       });
}

void store_matrices(uint32_t shared, const uint32_t (&r)[4], bool transposed) {
  const Call call;
  Thread& thread = call;
  const uint32_t site = TILEMOE_SITE;
  uint32_t words[4] = {r[0], r[1], r[2], r[3]};
  MatrixOperand operand{words, shared_access(AccessKind::kWrite, shared, 16, site)};
  meet(thread, transposed ? kind<6>() : kind<7>(), kAllLanes, "stmatrix", site, &operand,
       [&](const Meeting& met) {
         require_warp(met, thread, "stmatrix", site);
         OfWarp<std::array<uint32_t, 4>> registers;
         for (uint32_t lane = 0; lane < kLanes; ++lane)
           std::memcpy(&registers[lane], of_lane<MatrixOperand>(met, lane).r, 16);
         const OfWarp<MatrixRow> rows = store_matrices(registers, transposed);
         for (uint32_t lane = 0; lane < kLanes; ++lane)
           std::memcpy(of_lane<MatrixOperand>(met, lane).row, &rows[lane], 16);
       });
}

uint32_t move_matrix(uint32_t word) {
  const Call call;
  Thread& thread = call;
  const uint32_t site = TILEMOE_SITE;
  meet(thread, kind<8>(), kAllLanes, "movmatrix", site, &word, [&](const Meeting& met) {
    require_warp(met, thread, "movmatrix", site);
    order_reads(*thread.warp, met);
    OfWarp<uint32_t> words;
    for (uint32_t lane = 0; lane < kLanes; ++lane) words[lane] = of_lane<uint32_t>(met, lane);
    words = transpose_matrix(words);
    for (uint32_t lane = 0; lane < kLanes; ++lane) of_lane<uint32_t>(met, lane) = words[lane];
  });
  return word;
}

namespace {

const TensorCore& tensor_core(const Thread& thread) {
  return thread.block->machine->device().major >= 9 ? kHopperCore : kAmpereCore;
}

}  // namespace

void multiply_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                       bool bfloat16) {
  const Call call;
  Thread& thread = call;
  const uint32_t site = TILEMOE_SITE;
  struct Operand {
    float* d;
    const uint32_t *a, *b;
  } operand{d, a, b};
  meet(thread, bfloat16 ? kind<9>() : kind<10>(), kAllLanes, "mma.sync", site, &operand,
       [&](const Meeting& met) {
         require_warp(met, thread, "mma.sync", site);
         OfWarp<float*> D;
         OfWarp<std::array<uint32_t, 4>> A;
         OfWarp<std::array<uint32_t, 2>> B;
         for (uint32_t lane = 0; lane < kLanes; ++lane) {
           const auto& mine = of_lane<Operand>(met, lane);
           D[lane] = mine.d;
           std::memcpy(&A[lane], mine.a, 16);
           std::memcpy(&B[lane], mine.b, 8);
         }
         multiply_warp(tensor_core(thread),
                       bfloat16 ? OperandType::kBFloat16 : OperandType::kFloat16, D, A, B);
       });
  if (thread.lane == 0)
    thread.block->machine->trace().note(thread.block->launch->number, thread.block->linear,
                                        thread.warp->index, Note::kMma, 0);
}

// ---- the async proxy

void load_box_async(uint32_t shared, const void* map, uint32_t barrier, uint32_t blocks,
                    const int32_t* coordinates, int dimensions) {
  const Call call;
  Thread& thread = call;
  load_box(thread, shared, map, barrier, blocks == 0 ? 1u << thread.block->rank : blocks,
           {coordinates, static_cast<size_t>(dimensions)}, TILEMOE_SITE);
}
void store_box_async(const void* map, uint32_t shared, const int32_t* coordinates, int dimensions) {
  store_box(Call(), map, shared, {coordinates, static_cast<size_t>(dimensions)}, TILEMOE_SITE);
}
void commit_box_stores() {
  commit_stores(Call());
}
void wait_box_stores(int pending, bool complete) {
  wait_for_stores(Call(), static_cast<size_t>(pending), complete, TILEMOE_SITE);
}
void multiply_wgmma(bool bfloat16, int columns, float* d, uint64_t a, uint64_t b, bool accumulate,
                    bool a_mn_major, bool b_mn_major) {
  const OperandType type = bfloat16 ? OperandType::kBFloat16 : OperandType::kFloat16;
  multiply_group(Call(), {type, columns, a_mn_major, b_mn_major}, d, a, b, accumulate,
                 TILEMOE_SITE);
}
void multiply_wgmma_e4m3(int columns, float* d, uint64_t a, uint64_t b, bool accumulate) {
  multiply_group(Call(), {OperandType::kE4M3, columns, false, false}, d, a, b, accumulate,
                 TILEMOE_SITE);
}
void fence_wgmma() {
  fence_mmas(Call(), TILEMOE_SITE);
}
void commit_wgmma() {
  commit_mmas(Call(), TILEMOE_SITE);
}
void wait_wgmma(int pending) {
  wait_for_mmas(Call(), static_cast<size_t>(pending), TILEMOE_SITE);
}
void sync_cluster() {
  cluster_barrier(Call(), TILEMOE_SITE);
}
uint32_t address_in_cluster(uint32_t shared, uint32_t rank) {
  return in_cluster(shared, rank);
}

// ---- tcgen05

bool elect_one_lane() {
  return elect_lane(Call(), TILEMOE_SITE);
}
void allocate_tensor_columns(int ctas, uint32_t shared, uint32_t columns) {
  allocate_tensor_memory(Call(), ctas, shared, columns, TILEMOE_SITE);
}
void relinquish_tensor_columns(int ctas) {
  relinquish_tensor_memory(Call(), ctas, TILEMOE_SITE);
}
void free_tensor_columns(int ctas, uint32_t address, uint32_t columns) {
  free_tensor_memory(Call(), ctas, address, columns, TILEMOE_SITE);
}
void load_tensor_columns(float* to, uint32_t pieces, uint32_t address) {
  load_tensor_memory(Call(), to, pieces, address, TILEMOE_SITE);
}
void wait_tensor_loads() {
  wait_for_tensor_loads(Call(), TILEMOE_SITE);
}
void fence_tcgen05(bool after) {
  if (after)
    tensor_fence_after(Call());
  else
    tensor_fence_before(Call());
}
void multiply_tcgen05(int ctas, uint32_t d, uint64_t a, uint64_t b, uint32_t instruction,
                      bool accumulate) {
  multiply_into_tensor_memory(Call(), ctas, d, a, b, instruction, accumulate, TILEMOE_SITE);
}
void commit_tcgen05(int ctas, uint32_t barrier, uint32_t cta_mask) {
  commit_tensor_mmas(Call(), ctas, barrier, cta_mask, TILEMOE_SITE);
}

bool planted(int defect) {
  return Machine::instance().planted() == defect;
}

}  // namespace tilemoe::simulator
