// The shadow of simulated memory: for every 4 bytes, who wrote them last and who read them since,
// and by which of the two proxies. It detects two accesses that nothing orders, in whatever order
// they happened to run.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simulator/machine/knowledge.h"

namespace tilemoe::simulator {

enum class AccessKind : uint8_t { kRead, kWrite, kAtomicRead, kAtomicWrite };

// Agents of a block by their local numbers: its threads; the cp.async copies of each thread; then
// operations of the async proxy, round-robin; then each warp's MMAs, and its loads from tensor
// memory.
constexpr uint32_t kLocalBits = 12;
constexpr uint32_t kAsyncOperations = 64;
constexpr uint32_t kMaxWarps = 32;

// A cluster's clock has the agents of its blocks one block after the other.
struct AgentsOfCluster {
  uint32_t first_block = 0;
  uint32_t blocks = 1;
  uint32_t threads = 0;  // of a block

  uint32_t first_operation() const { return 2 * threads; }
  uint32_t first_mmas() const { return first_operation() + kAsyncOperations; }
  uint32_t first_tensor_loads() const { return first_mmas() + kMaxWarps; }
  uint32_t of_block() const { return first_tensor_loads() + kMaxWarps; }
  bool has(uint32_t block) const { return block - first_block < blocks; }
  // The position in a clock of an agent of this cluster.
  size_t index(uint32_t agent) const {
    return ((agent >> kLocalBits) - first_block) * of_block() + (agent & ((1u << kLocalBits) - 1));
  }
  bool is_async_proxy(uint32_t agent) const {
    return (agent & ((1u << kLocalBits) - 1)) >= first_operation();
  }
};

// Who makes an access now.
struct Accessor {
  uint32_t agent;
  Epoch epoch;
  const Knowledge* knows;  // the knowledge of the thread that makes it, or made the copy that does
  const AgentsOfCluster* cluster;
  const Epoch* reads_done;  // of its warp's lanes: reads up to these epochs are over
  bool in_order;            // its own earlier accesses are ordered before this one
  bool async_proxy;         // sees ordinary writes only after a fence
  uint32_t site;            // where in the program: bytes from its beginning
};

// An access that was made: the mask says to which of 4 bytes.
struct Recorded {
  uint32_t agent = 0;
  Epoch epoch = 0;  // 0: none
  uint32_t site_and_mask = 0;

  static constexpr uint32_t kSiteBits = 27, kAtomic = 1u << 31;
  uint32_t site() const { return site_and_mask & ((1u << kSiteBits) - 1); }
  uint32_t mask() const { return site_and_mask >> kSiteBits & 15; }
  bool atomic() const { return (site_and_mask & kAtomic) != 0; }
};

struct Cell {
  static constexpr uint32_t kWritten = 15, kAllocated = 16;
  static constexpr int kGenerationAt = 8;
  uint32_t state = 0;  // bytes written, whether allocated, and the owner of shared memory
  Recorded write, reads[2];
};

enum class Conflict { kReadOfWrite, kWriteOfWrite, kWriteOfRead, kUnfenced, kNeverWritten };

// Receives what an access conflicts with; `other` is null if it read what nobody wrote.
class ConflictListener {
 public:
  virtual void found(Conflict conflict, const Accessor& by, const Recorded* other, size_t byte) = 0;

 protected:
  ~ConflictListener() = default;
};

// Whether the recorded access happened before.
bool ordered(const Recorded& before, const Accessor& now);

// Checks and records an access to `bytes` bytes from byte `first` on; `cells` are the cells of the
// space. Cells of another generation count as never used.
void access(const Accessor& by, AccessKind kind, Cell* cells, size_t first, size_t bytes,
            uint32_t generation, ConflictListener& listener);

// Counts bytes as written by somebody long ago.
void mark_written(Cell* cells, size_t first, size_t bytes);

}  // namespace tilemoe::simulator
