// Tensor memory and the instructions that use it: tcgen05. An SM has one block here, which has all
// of the SM's tensor memory.
//
// A barrier alone does not order tcgen05 instructions of two threads. An instruction is ordered
// after another thread's tcgen05 instructions, or after a commit, if its thread has waited for a
// barrier that publishes them and has then passed tcgen05.fence::after_thread_sync. A barrier
// publishes what the arriving thread knew at its tcgen05.fence::before_thread_sync; tcgen05.commit
// publishes its MMAs without a fence.
//
// `ctas` of an instruction is 1 (cta_group::1) or 2 (cta_group::2). A CTA pair is two CTAs of a
// cluster whose ranks differ in the last bit. All instructions of a kernel have the same cta_group.
// Both CTAs of a pair must execute alloc, dealloc and relinquish; the first one waits for the
// other.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "simulator/machine/machine.h"
#include "simulator/tensor_words.h"

namespace tilemoe::simulator {

constexpr uint32_t kTensorLanes = 128, kTensorColumns = 512;
// The shadow knows pieces of 16 lanes by 8 columns, as a cell of 4 bytes each.
constexpr uint32_t kPieceLanes = 16, kPieceColumns = 8;

struct TensorMemory {
  struct Allocation {
    uint32_t first, columns, warp, site;
  };
  // An instruction of a CTA pair, in which a warp of this CTA waits for the other CTA's.
  struct TwoCtaCall {
    const void* kind;
    uint32_t number, place, warp;  // the same in both CTAs
    bool answered;
    uint32_t answer;
  };

  std::vector<float> numbers = std::vector<float>(kTensorLanes * kTensorColumns);
  std::vector<Cell> cells =
      std::vector<Cell>(kTensorLanes / kPieceLanes * (kTensorColumns / kPieceColumns));
  std::vector<Allocation> allocations;
  bool relinquished = false;
  std::vector<Thread*> waiting;  // for columns, or for the other CTA of the pair
  uint32_t changes = 0;          // of either
  int ctas = 0;                  // of the block's instructions; 0: none so far
  std::optional<TwoCtaCall> two_cta_call;
};

struct TensorMma {
  uint32_t d;
  TensorInstruction instruction;
  MatrixDescriptor a, b;
  bool accumulate;
  int ctas;
  uint32_t site;
};

// A lane's part of tcgen05.ld; its numbers may land before they may be used.
struct TensorLoad {
  float* to;
  uint32_t count;
  uint32_t lane, column;  // of tensor memory, of the warp's part
  bool landed;
  uint32_t site;
};

// The tcgen05 work of a thread.
struct TensorWork {
  Clock known;                 // others' tcgen05 instructions that precede its own
  std::deque<TensorMma> mmas;  // not yet computed
  uint64_t started = 0, committed = 0, computed = 0;
  uint32_t last_site = 0;  // of an MMA
  std::vector<TensorLoad> loads;
};

bool elect_lane(Thread& thread, uint32_t site);
// Writes the address of the first column to shared memory.
void allocate_tensor_memory(Thread& thread, int ctas, uint32_t shared, uint32_t columns,
                            uint32_t site);
void relinquish_tensor_memory(Thread& thread, int ctas, uint32_t site);
void free_tensor_memory(Thread& thread, int ctas, uint32_t address, uint32_t columns,
                        uint32_t site);
// `d` is an address in tensor memory; the others are words of tensor_words.h.
void multiply_into_tensor_memory(Thread& thread, int ctas, uint32_t d, uint64_t a, uint64_t b,
                                 uint32_t instruction, bool accumulate, uint32_t site);
// Arrives at `barrier` in each CTA of the cluster whose bit is set in `cta_mask`; 0: in this CTA.
void commit_tensor_mmas(Thread& thread, int ctas, uint32_t barrier, uint32_t cta_mask,
                        uint32_t site);
// 16 lanes by 8 `pieces` columns, 4 `pieces` numbers per lane.
void load_tensor_memory(Thread& thread, float* to, uint32_t pieces, uint32_t address,
                        uint32_t site);
void wait_for_tensor_loads(Thread& thread, uint32_t site);
void tensor_fence_before(Thread& thread);
void tensor_fence_after(Thread& thread);

}  // namespace tilemoe::simulator
