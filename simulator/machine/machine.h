// The simulated GPU: launches, blocks, warps and threads, and who runs next.
//
// A CUDA thread is a fiber. A block that runs has a worker, an operating-system thread, so that
// `__shared__` variables, which are thread_local here, have an address in each block; workers run
// one at a time. One seed decides everything that is left to chance within the schedule: which
// block, warp and lane runs next, and when a copy lands.
#pragma once

#include <driver_types.h>
#include <vector_types.h>

#include <array>
#include <boost/context/fiber.hpp>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <semaphore>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "simulator/machine/device_memory.h"
#include "simulator/machine/finding.h"
#include "simulator/machine/knowledge.h"
#include "simulator/machine/random.h"
#include "simulator/machine/shadow.h"
#include "simulator/machine/trace.h"
#include "simulator/registers.h"

namespace tilemoe::simulator {

constexpr uint32_t kLanes = 32;
constexpr uint32_t kGroup = 4;              // warps that are ranked together
constexpr uint32_t kReservedShared = 1024;  // bytes of a block's shared memory before its own
constexpr int kRankAt = 24;                 // the rank's bits in an address of a cluster
inline uint32_t in_block(uint32_t shared) {
  return shared & ((1u << kRankAt) - 1);
}
inline uint32_t in_cluster(uint32_t shared, uint32_t rank) {
  return (rank + 1) << kRankAt | in_block(shared);
}

// Which of the runnable warps runs next, and when asynchronous work is done.
enum class Schedule {
  // Chosen by the seed, soon or late.
  kAny,
  // The seed ranks a block's groups of four warps. The warps of the first runnable group alternate;
  // each runs until it waits. A warp that polled would keep the groups behind it from running.
  // Asynchronous work is done as soon as it is started or committed.
  kByRank,
  // All threads alternate, one memory access each. Asynchronous work: the same.
  kInStep,
};

struct Block;
struct Warp;
struct Launch;
struct TensorMemory;
struct TensorWork;
class Worker;
class Machine;

struct Copy {
  void* to;
  const void* from;  // null: zeros
  uint32_t bytes;    // of the source
  uint32_t size;     // of the copy
};

struct BoxStore;  // tma.cpp
struct WarpMmas;  // wgmma.cpp

struct Thread {
  Block* block = nullptr;
  Warp* warp = nullptr;
  uint32_t index = 0;  // in the block
  uint32_t lane = 0;
  boost::context::fiber self, back;
  std::byte* stack = nullptr;
  const Registers* registers = nullptr;

  enum class State { kRunnable, kBlocked, kExited };
  State state = State::kRunnable;
  const char* waits_for = "";
  uint32_t site = 0;  // where it waits

  Epoch epoch = 1, copy_epoch = 1;
  Knowledge knowledge;
  std::unique_ptr<Foreign> acquired;        // by atomics, for the next fence
  std::shared_ptr<const Foreign> released;  // by the last fence, for atomics
  std::vector<Copy> copies;                 // cp.async since the last arrival
  std::vector<std::shared_ptr<BoxStore>> open_stores;
  std::deque<std::vector<std::shared_ptr<BoxStore>>> store_groups;
  bool waits_for_stores = false;
  bool inside_machine = false;  // in a function of the machine, not in the kernel's code
  bool triggered = false;
  bool met = false;                         // at its warp's meeting
  std::shared_ptr<TensorWork> tensor_work;  // null unless it runs tcgen05
  bool loads_registers = false;             // by tcgen05.ld, not yet waited for

  uint32_t agent() const;
  uint32_t copy_agent() const;
  size_t clock_index() const;
};

// The knowledge that a barrier gathers from the threads that arrive.
class Gathering {
 public:
  void add(Thread& thread);  // what it did so far; it continues in its next epoch
  void add_epoch(size_t agent, Epoch epoch) { all_.clock.raise(agent, epoch); }
  void add_tensor_epoch(size_t agent, Epoch epoch) {
    all_.clock.raise(agent, epoch);
    all_.tensor.raise(agent, epoch);
  }
  void add(const Knowledge& knowledge) { all_.join(knowledge); }
  const Knowledge& all() const { return all_; }
  void clear() { *this = Gathering(); }

 private:
  Knowledge all_;
  Clock last_;
};

// Lanes that meet at an instruction that they execute together.
struct Meeting {
  const void* kind;
  uint32_t mask, arrived = 0;
  void* operands[kLanes] = {};
};

struct Warp {
  Block* block = nullptr;
  uint32_t index = 0;
  std::vector<Thread*> lanes;
  uint32_t exited = 0;  // lanes
  bool listed = false;  // among its block's runnable ones
  std::vector<Meeting> meetings;
  Epoch reads_done[kLanes] = {};  // by each lane when all last exchanged registers
  Epoch mma_epoch = 1, tensor_load_epoch = 1;
  std::shared_ptr<WarpMmas> mmas;  // null before the first
  uint32_t elected = kLanes;       // by elect.sync; kLanes: none yet
};

// One of a block's sixteen named barriers.
struct BlockBarrier {
  uint32_t expected = 0, arrived = 0, phase = 0;
  Gathering gathering;
  std::vector<Thread*> waiting;
  bool any = false, any_before = false;  // of __syncthreads_or
  uint32_t site = 0;
};

struct Mbarrier {
  Block* owner = nullptr;
  uint32_t expected = 0, pending = 0;
  int64_t bytes = 0;  // still expected
  uint32_t phase = 0;
  Gathering gathering;
  Knowledge ended;  // gathered in the phase that ended last
  std::vector<Thread*> waiting;
  Recorded init;
};

// Asynchronous work that takes place at some later time.
struct Event {
  std::function<void()> happen;
  // The site of an event that arrives at a barrier of the block, which must still exist; else 0.
  uint32_t arrives_from = 0;
};
// Thrown by an event that cannot continue: no thread runs that could be left.
struct EventAborted {};

struct Block {
  Machine* machine = nullptr;
  Launch* launch = nullptr;
  Worker* worker = nullptr;
  uint32_t number = 0;  // of all blocks
  uint32_t linear = 0;  // in the grid
  uint3 index{};
  AgentsOfCluster agents;
  std::vector<Block*> cluster;  // by rank
  uint32_t rank = 0;
  uint32_t dynamic_bytes = 0, static_at = 0, shared_bytes = 0;
  std::deque<Thread> threads;
  std::deque<Warp> warps;
  std::vector<Warp*> runnable;
  uint32_t last_turn = UINT32_MAX;  // the warp that ran last, if warps alternate
  std::vector<Event> events;
  uint32_t exited = 0, triggered = 0;
  bool has_triggered = false;
  BlockBarrier barriers[16];
  std::unordered_map<uint32_t, Mbarrier> mbarriers;
  uint32_t next_operation = 0;  // of the async proxy
  Epoch operation_epochs[kAsyncOperations] = {};
  BlockBarrier of_cluster;                      // used in a cluster's first block
  std::shared_ptr<TensorMemory> tensor_memory;  // null until it is used

  std::byte* shared_at(uint32_t address) const;  // the address must be valid
  bool can_run() const { return !runnable.empty() || !events.empty(); }
  bool done() const { return exited == threads.size(); }
};

struct LaunchShape {
  dim3 grid, block;
  uint32_t cluster = 1;
  size_t dynamic_bytes = 0;
  bool pdl = false;
};

struct Launch {
  const void* kernel = nullptr;
  LaunchShape shape;
  std::shared_ptr<const void> call;  // the kernel's parameters
  size_t call_bytes = 0;
  void (*run)(const void*) = nullptr;  // calls the kernel with `call`
  uint32_t number = 0;
  uint32_t first_block = 0;
  uint32_t first_concurrent_block = 0;  // for threads that do not wait for the previous launch
  std::vector<uint32_t> clusters_to_start;
  uint32_t blocks = 0, ended = 0, triggered = 0;
  uint32_t resident = 1;  // clusters at a time
  uint32_t lateness = 1;  // one turn in `lateness` lets a copy land
};

// An operating-system thread with room for a block.
class Worker {
 public:
  explicit Worker(Machine& machine);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void start(Block& block);
  void run_slice(uint32_t turns);  // returns after `turns` turns, or if the block cannot run

  std::byte* shared() const { return shared_; }  // at address 0
  std::byte* dynamic() const { return shared_ + kReservedShared; }
  std::byte* statics() const { return statics_; }
  size_t static_bytes() const { return static_bytes_; }
  Cell* cells() { return cells_.data(); }
  std::byte* stack(uint32_t thread) const { return stacks_ + size_t{thread} * kStackBytes; }
  void forget_accesses() { std::fill(cells_.begin(), cells_.end(), Cell()); }

  std::unique_ptr<Block> block;

  static constexpr size_t kStackBytes = size_t{64} << 10;
  static constexpr size_t kMaxDynamic = size_t{256} << 10;

 private:
  void work();
  Warp& take_warp();  // the runnable warp whose turn it is
  void run_warp(Warp& warp);

  Machine& machine_;
  std::byte* shared_ = nullptr;
  std::byte* statics_ = nullptr;
  size_t static_bytes_ = 0;
  std::vector<Cell> cells_;
  std::byte* stacks_ = nullptr;
  uint32_t turns_ = 0;
  bool stop_ = false;
  std::binary_semaphore go_{0}, done_{0};
  std::thread thread_;
};

struct DeviceKind {
  std::string_view name;
  int major, minor;
  int shared_bytes;  // per block
  int sms;
  bool operator==(const DeviceKind&) const = default;
};

class Machine final : public ConflictListener {
 public:
  static Machine& instance();

  // ---- what is simulated
  // Each kind is a device of its own index, since a program may read an index's properties once.
  void set_device(const DeviceKind& kind);
  const DeviceKind& device() const { return devices_[device_]; }
  size_t device_index() const { return device_; }
  // Restarts the numbers of launches.
  void set_seed(uint64_t seed);
  void set_schedule(Schedule schedule) { schedule_ = schedule; }
  Schedule schedule() const { return schedule_; }
  // Switches on a defect of defects.inc, counted from 1; 0: none.
  void plant(int defect) { planted_ = defect; }
  int planted() const { return planted_; }
  std::vector<Finding> take_findings();
  uint64_t launches() const { return launches_ever_; }
  // Counts a cudaGetDevice().
  void count_device_query() { ++device_queries_; }
  uint64_t device_queries() const { return device_queries_; }
  Trace& trace() { return trace_; }
  DeviceMemory& memory() { return memory_; }

  // ---- the host's side
  cudaError_t launch(Launch launch);
  void enqueue(std::function<void()> work);
  cudaError_t synchronize();  // runs what is queued; an error if a launch was aborted

  // ---- for threads
  static Thread* current();
  void wait(Thread& thread, const char* for_what, uint32_t site);  // until wake()
  void wake(Thread& thread);
  void yield(Thread& thread);
  // Before each access: in step, all others have their access first.
  void take_turn(Thread& thread) {
    if (schedule_ == Schedule::kInStep) yield(thread);
  }
  void ordinary_access(Thread& thread, AccessKind kind, const void* address, size_t bytes,
                       uint32_t site);
  void wait_for_previous_launches(Thread& thread, uint32_t site);
  void trigger(Thread& thread);
  // The offset of a generic address in the block's shared memory; false if it lies elsewhere.
  bool shared_offset(const Block& block, const void* address, uint32_t& offset) const;
  // The bytes at a shared address, which may be in another block of the cluster. If they do not
  // exist: a finding and the end of the thread.
  std::byte* shared_bytes(Thread& thread, uint32_t address, uint32_t bytes, uint32_t site,
                          Block** owner = nullptr);
  // MMA operands must lie in the block's own dynamic shared memory.
  void require_dynamic(Thread& thread, uint32_t address, uint32_t bytes, uint32_t site);
  void shared_access(const Accessor& by, Block& owner, AccessKind kind, uint32_t offset,
                     uint32_t bytes);
  void global_access(const Accessor& by, Block& block, AccessKind kind, const void* address,
                     size_t bytes);
  // An access to a thread's own memory, which its loads that are under way may write.
  void check_registers(Thread& thread, const void* address, size_t bytes, uint32_t site);
  void tensor_access(const Accessor& by, Block& block, AccessKind kind, uint32_t piece);
  Accessor ordinary(const Thread& thread, uint32_t site) const;

  void find(const Thread& thread, FindingKind kind, uint32_t site, const std::string& what,
            const std::string& address = {});
  // The same, and ends everything that runs, since the program cannot continue.
  [[noreturn]] void fail(const Thread& thread, FindingKind kind, uint32_t site,
                         const std::string& what, const std::string& address = {});
  bool aborting() const { return aborting_; }
  void thread_ended(Thread& thread);
  void thread_left(Thread& thread);  // barriers and meetings no longer wait for it
  // Checks of a thread that ends.
  void check_stores(Thread& thread);
  void check_tensor_memory(Thread& thread);
  void leave_cluster_barrier(Block& block);
  void add_event(Block& block, std::function<void()> happen, uint32_t arrives_from = 0);
  // Whether asynchronous work is done at once, without an event.
  bool done_at_once() const { return schedule_ != Schedule::kAny; }
  // The rank of a group of warps; the lowest one runs first. In step all have rank 0.
  uint32_t rank(uint32_t group) const {
    return schedule_ == Schedule::kByRank ? group_ranks_[group] : 0;
  }

  Random& random() { return random_; }
  // For the contents of its stack before it starts; the schedule does not depend on it.
  Random random_of(const Thread& thread) const {
    return Random(seed_ << 48 ^ uint64_t{thread.block->number} << 16 ^ thread.index);
  }
  std::unordered_map<const void*, Foreign>& released() { return released_; }

 private:
  Machine();
  ~Machine();
  void found(Conflict conflict, const Accessor& by, const Recorded* other, size_t byte) override;

  [[noreturn]] void leave(Thread& thread);
  void abandon_all();
  void run_launches();
  void start_launch(Launch launch);
  bool may_start_next() const;
  bool start_blocks();
  void start_cluster(Launch& launch, uint32_t first);
  Worker* idle_worker();
  void run_some_block(const std::vector<Worker*>& able);
  uint32_t resident_clusters(const Launch& launch) const;
  void end_blocks();
  void report_deadlock();
  void renumber();
  void add(Finding finding, uint32_t site, uint32_t other);
  std::string name_of_agent(uint32_t agent, const Launch& launch) const;

  struct Queued {
    std::unique_ptr<Launch> launch;
    std::function<void()> work;
  };
  struct Origin {  // of a range of block numbers
    uint32_t first;
    const void* kernel;
    dim3 grid;
    uint32_t threads;
  };

  std::vector<DeviceKind> devices_;
  size_t device_ = 0;  // the current one
  uint64_t seed_ = 1;
  Schedule schedule_ = Schedule::kAny;
  int planted_ = 0;
  std::array<uint32_t, kMaxWarps / kGroup> group_ranks_{};
  size_t turns_of_blocks_ = 0;
  DeviceMemory memory_;
  Trace trace_;
  Random random_;
  std::deque<Queued> queue_;
  std::deque<std::unique_ptr<Launch>> active_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<Thread*> waiting_for_launches_;
  std::unordered_map<const void*, Foreign> released_;
  std::vector<Origin> origins_;
  uint32_t next_block_ = 1;
  uint32_t previous_launch_ = 0;  // its first block; 0: nothing overlaps with the next launch
  uint32_t launches_ever_ = 0;
  uint64_t device_queries_ = 0;
  bool aborting_ = false, failed_ = false;
  std::vector<Finding> findings_;
  std::vector<uint64_t> reported_;
  // The access that `found` receives.
  const Block* accessed_block_ = nullptr;
  enum class Space { kGlobal, kShared, kTensor } accessed_ = Space::kGlobal;
  uintptr_t program_begin_ = 0, program_end_ = 0;
};

// "tensor memory, lane 16, column 8", from a place in its shadow.
std::string describe_tensor_piece(size_t byte);

}  // namespace tilemoe::simulator
