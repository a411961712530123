// Tensor memory and what works on it: tcgen05. A multiprocessor's is its one block's here.
//
// What tcgen05 instructions read and write is ordered by more than a barrier: of what another
// thread's have done, or of what was committed, an instruction comes after that which its thread
// has been told and has then passed tcgen05.fence::after_thread_sync for. A thread tells, by
// whatever barrier, of what it knew at tcgen05.fence::before_thread_sync; tcgen05.commit tells of
// its products by itself.
//
// `blocks` of an instruction is 1, or 2 of a pair: blocks of a cluster whose ranks differ in their
// last bit. A kernel has instructions of one kind alone. What a pair's warps call together, both
// call, or wait for.
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
  // A pair's instruction that a warp of this block waits in for the other block's.
  struct PairCall {
    const void* kind;
    uint32_t number, place, warp;  // the same in both blocks
    bool answered;
    uint32_t answer;
  };

  std::vector<float> numbers = std::vector<float>(kTensorLanes * kTensorColumns);
  std::vector<Cell> cells =
      std::vector<Cell>(kTensorLanes / kPieceLanes * (kTensorColumns / kPieceColumns));
  std::vector<Allocation> allocations;
  bool relinquished = false;
  std::vector<Thread*> waiting;  // for columns, or for the pair's other block
  uint32_t changes = 0;          // of either
  int blocks = 0;                // of the block's instructions; 0: it had none so far
  std::optional<PairCall> pair_call;
};

struct TensorProduct {
  uint32_t d;
  TensorInstruction instruction;
  MatrixDescriptor a, b;
  bool accumulate;
  int blocks;
  uint32_t site;
};

// A lane's part of tcgen05.ld; its numbers may be there before they may be used.
struct TensorLoad {
  float* to;
  uint32_t count;
  uint32_t lane, column;  // of tensor memory, of the warp's part
  bool landed;
  uint32_t site;
};

// A thread's.
struct TensorWork {
  Clock known;                         // of others' tcgen05: what its own comes after
  std::deque<TensorProduct> products;  // that are yet to be computed
  uint64_t started = 0, committed = 0, computed = 0;
  uint32_t last_site = 0;  // of a product
  std::vector<TensorLoad> loads;
};

bool elect_lane(Thread& thread, uint32_t site);
// Writes the address of the first column to shared memory.
void allocate_tensor_memory(Thread& thread, int blocks, uint32_t shared, uint32_t columns,
                            uint32_t site);
void relinquish_tensor_memory(Thread& thread, int blocks, uint32_t site);
void free_tensor_memory(Thread& thread, int blocks, uint32_t address, uint32_t columns,
                        uint32_t site);
// `d` an address in tensor memory; the others are words of tensor_words.h.
void multiply_into_tensor_memory(Thread& thread, int blocks, uint32_t d, uint64_t a, uint64_t b,
                                 uint32_t instruction, bool accumulate, uint32_t site);
// Arrives at the same place of each block of the cluster whose bit is set in `told`; 0: here.
void commit_tensor_products(Thread& thread, int blocks, uint32_t barrier, uint32_t told,
                            uint32_t site);
// 16 lanes by 8 `pieces` columns, 4 `pieces` numbers a lane.
void load_tensor_memory(Thread& thread, float* to, uint32_t pieces, uint32_t address,
                        uint32_t site);
void wait_for_tensor_loads(Thread& thread, uint32_t site);
void tensor_fence_before(Thread& thread);
void tensor_fence_after(Thread& thread);

}  // namespace tilemoe::simulator
