#include "simulator/machine/machine.h"

#include <link.h>

#include <algorithm>
#include <numeric>
#include <sstream>
#include <utility>

namespace tilemoe::simulator {
namespace {

constexpr uint32_t kMaxBlockNumbers = 1u << 19;
constexpr size_t kMaxFindings = 64;
constexpr uint32_t kMaxResident = 4;  // clusters

std::string in_words(uint3 index, dim3 size) {
  std::ostringstream text;
  text << "(" << index.x;
  if (size.y * size.z > 1) text << ", " << index.y;
  if (size.z > 1) text << ", " << index.z;
  text << ")";
  return text.str();
}
uint3 block_index(uint32_t linear, dim3 grid) {
  return {linear % grid.x, linear / grid.x % grid.y, linear / (grid.x * grid.y)};
}
std::string hexadecimal(uint32_t number) {
  std::ostringstream text;
  text << "0x" << std::hex << number;
  return text.str();
}

}  // namespace

Machine& Machine::instance() {
  static Machine machine;
  return machine;
}

Machine::Machine() : devices_{{"Simulated A100", 8, 0, 163 * 1024, 3}} {
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* to) {
        auto& machine = *static_cast<Machine*>(to);
        machine.program_begin_ = UINTPTR_MAX;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
          const uintptr_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
          machine.program_begin_ = std::min(machine.program_begin_, begin);
          machine.program_end_ = std::max(machine.program_end_, begin + info->dlpi_phdr[i].p_memsz);
        }
        return 1;
      },
      this);
}
Machine::~Machine() = default;

void Machine::set_device(const DeviceKind& kind) {
  const auto known = std::find(devices_.begin(), devices_.end(), kind);
  device_ = static_cast<size_t>(known - devices_.begin());
  if (known == devices_.end()) devices_.push_back(kind);
}

void Machine::set_seed(uint64_t seed) {
  seed_ = seed;
  launches_ever_ = 0;
  turns_of_blocks_ = 0;
  std::iota(group_ranks_.begin(), group_ranks_.end(), 0u);
  Random random(seed);
  for (auto left = static_cast<uint32_t>(group_ranks_.size()); left > 1; --left)
    std::swap(group_ranks_[left - 1], group_ranks_[random.below(left)]);
}

std::vector<Finding> Machine::take_findings() {
  reported_.clear();
  return std::exchange(findings_, {});
}

// ---- the host's side

cudaError_t Machine::launch(Launch launch) {
  const LaunchShape& shape = launch.shape;
  const uint64_t threads = uint64_t{shape.block.x} * shape.block.y * shape.block.z;
  const uint64_t blocks = uint64_t{shape.grid.x} * shape.grid.y * shape.grid.z;
  if (threads == 0 || threads > 1024 || blocks == 0 || blocks > kMaxBlockNumbers ||
      shape.dynamic_bytes > static_cast<size_t>(device().shared_bytes) ||
      shape.grid.x % shape.cluster != 0)
    return cudaErrorInvalidConfiguration;
  launch.number = launches_ever_++;
  launch.blocks = static_cast<uint32_t>(blocks);
  queue_.push_back({std::make_unique<Launch>(std::move(launch)), {}});
  return cudaSuccess;
}

void Machine::enqueue(std::function<void()> work) {
  queue_.push_back({nullptr, std::move(work)});
}

cudaError_t Machine::synchronize() {
  run_launches();
  previous_launch_ = 0;
  if (next_block_ > kMaxBlockNumbers) renumber();
  return std::exchange(failed_, false) ? cudaErrorLaunchFailure : cudaSuccess;
}

// Restarts block numbers: all accesses so far precede everything that follows.
void Machine::renumber() {
  memory_.forget_accesses();
  for (auto& worker : workers_) worker->forget_accesses();
  origins_.clear();
  next_block_ = 1;
}

bool Machine::may_start_next() const {
  if (active_.empty()) return true;
  const Launch& next = *queue_.front().launch;
  const Launch& last = *active_.back();
  return next.shape.pdl && last.triggered == last.blocks && active_.size() < 2;
}

void Machine::run_launches() {
  while (!queue_.empty() || !active_.empty()) {
    while (!queue_.empty()) {
      if (queue_.front().work) {
        if (!active_.empty()) break;
        queue_.front().work();
        queue_.pop_front();
        previous_launch_ = 0;
      } else if (may_start_next()) {
        start_launch(std::move(*queue_.front().launch));
        queue_.pop_front();
      } else {
        break;
      }
    }
    if (active_.empty()) continue;
    start_blocks();
    std::vector<Worker*> able;
    for (const auto& worker : workers_)
      if (worker->block && worker->block->can_run()) able.push_back(worker.get());
    if (able.empty()) {
      report_deadlock();
      aborting_ = true;
    } else {
      run_some_block(able);
    }
    if (aborting_) {
      abandon_all();
      return;
    }
    end_blocks();
  }
}

void Machine::run_some_block(const std::vector<Worker*>& able) {
  if (schedule_ == Schedule::kInStep) {
    Worker& next = *able[turns_of_blocks_++ % able.size()];
    return next.run_slice(static_cast<uint32_t>(next.block->runnable.size()));
  }
  std::vector<Worker*> first = able;
  if (schedule_ == Schedule::kByRank)  // the earlier kernel runs first
    std::erase_if(first, [&](const Worker* one) {
      return std::any_of(able.begin(), able.end(), [&](const Worker* other) {
        return other->block->launch->number < one->block->launch->number;
      });
    });
  Worker& next = *first[random_.below(static_cast<uint32_t>(first.size()))];
  next.run_slice(1 + random_.below(200));
}

// Threads that are under way are left where they are: code that accesses memory need not be able to
// unwind.
void Machine::abandon_all() {
  failed_ = true;
  for (const auto& worker : workers_) {
    if (!worker->block) continue;
    for (Thread& thread : worker->block->threads)
      if (thread.self) static_cast<void>(new boost::context::fiber(std::move(thread.self)));
    worker->block.reset();
  }
  active_.clear();
  queue_.clear();
  waiting_for_launches_.clear();
  released_.clear();
  aborting_ = false;
}

void Machine::start_launch(Launch started) {
  random_ = Random(seed_ * 0x9e3779b97f4a7c15 + started.number);
  Launch& launch = *active_.emplace_back(std::make_unique<Launch>(std::move(started)));
  launch.first_block = next_block_;
  next_block_ += launch.blocks;
  // It may overlap, whether it does in this run or not.
  launch.first_concurrent_block =
      launch.shape.pdl && previous_launch_ != 0 ? previous_launch_ : launch.first_block;
  previous_launch_ = launch.first_block;
  origins_.push_back({launch.first_block, launch.kernel, launch.shape.grid,
                      launch.shape.block.x * launch.shape.block.y * launch.shape.block.z});
  if (trace_.kept()) trace_.name_launch(launch.number, describe_kernel(launch.kernel));
  for (uint32_t first = 0; first < launch.blocks; first += launch.shape.cluster)
    launch.clusters_to_start.push_back(first);
  launch.resident = 1 + random_.below(kMaxResident);
  launch.lateness = 2u << 2 * random_.below(3);
}

uint32_t Machine::resident_clusters(const Launch& launch) const {
  uint32_t blocks = 0;
  for (const auto& worker : workers_)
    if (worker->block && worker->block->launch == &launch) ++blocks;
  return blocks / launch.shape.cluster;
}

Worker* Machine::idle_worker() {
  for (const auto& worker : workers_)
    if (!worker->block) return worker.get();
  return workers_.emplace_back(std::make_unique<Worker>(*this)).get();
}

// Starts any of the next few: the order in which a GPU starts blocks is not specified.
bool Machine::start_blocks() {
  bool started = false;
  for (const auto& launch : active_) {
    auto& waiting = launch->clusters_to_start;
    while (!waiting.empty() && resident_clusters(*launch) < launch->resident) {
      const auto which = random_.below(static_cast<uint32_t>(std::min<size_t>(waiting.size(), 8)));
      const uint32_t first = waiting[which];
      waiting.erase(waiting.begin() + which);
      start_cluster(*launch, first);
      started = true;
    }
  }
  return started;
}

void Machine::start_cluster(Launch& launch, uint32_t first) {
  const LaunchShape& shape = launch.shape;
  std::vector<Block*> cluster;
  for (uint32_t rank = 0; rank < shape.cluster; ++rank) {
    Worker* const worker = idle_worker();
    worker->block = std::make_unique<Block>();
    Block& block = *worker->block;
    block.machine = this;
    block.launch = &launch;
    block.worker = worker;
    block.linear = first + rank;
    block.number = launch.first_block + block.linear;
    block.index = block_index(block.linear, shape.grid);
    block.agents = {launch.first_block + first, shape.cluster,
                    shape.block.x * shape.block.y * shape.block.z};
    block.rank = rank;
    block.dynamic_bytes = static_cast<uint32_t>(shape.dynamic_bytes);
    // Far from the dynamic part: it has the variables of all kernels, most of them not this one's.
    block.static_at = kReservedShared + static_cast<uint32_t>(Worker::kMaxDynamic);
    block.shared_bytes = block.static_at + static_cast<uint32_t>(worker->static_bytes());
    cluster.push_back(&block);
  }
  for (Block* block : cluster) {
    block->cluster = cluster;
    block->worker->start(*block);
    for (Thread& thread : block->threads)
      thread.knowledge.first_concurrent_block = launch.first_concurrent_block;
    trace_.note(launch.number, block->linear, 0, Note::kBlockStarts, 0);
  }
}

void Machine::end_blocks() {
  for (const auto& worker : workers_) {
    if (!worker->block || !worker->block->done() || worker->block->can_run()) continue;
    const Block& block = *worker->block;
    // A cluster's shared memory exists until all of its blocks have ended.
    if (!std::all_of(block.cluster.begin(), block.cluster.end(),
                     [](const Block* one) { return one->done() && !one->can_run(); }))
      continue;
    Launch& launch = *block.launch;
    const std::vector<Block*> cluster = block.cluster;
    for (const Block* one : cluster) {
      trace_.note(launch.number, one->linear, 0, Note::kBlockEnds, 0);
      ++launch.ended;
      one->worker->block.reset();
    }
  }
  while (!active_.empty() && active_.front()->ended == active_.front()->blocks) {
    active_.pop_front();
    released_.clear();
    for (Thread* thread : std::exchange(waiting_for_launches_, {})) wake(*thread);
  }
}

void Machine::thread_ended(Thread& thread) {
  thread.state = Thread::State::kExited;
  thread.warp->exited |= 1u << thread.lane;
  Block& block = *thread.block;
  ++block.exited;
  trigger(thread);
  check_stores(thread);
  check_tensor_memory(thread);
  thread_left(thread);
  leave_cluster_barrier(block);
  if (!block.done()) return;
  for (const Event& event : block.events)
    if (event.arrives_from != 0)
      find(thread, FindingKind::kBarrierMisuse, event.arrives_from,
           "the block ends before this arrives at a barrier in its memory");
}

void Machine::trigger(Thread& thread) {
  if (std::exchange(thread.triggered, true)) return;
  Block& block = *thread.block;
  if (++block.triggered == block.threads.size()) ++block.launch->triggered;
}

void Machine::wait_for_previous_launches(Thread& thread, uint32_t site) {
  const Launch* const launch = thread.block->launch;
  while (active_.front().get() != launch) {
    waiting_for_launches_.push_back(&thread);
    wait(thread, "the end of the kernel before", site);
  }
  thread.knowledge.first_concurrent_block = launch->first_block;
}

void Machine::add_event(Block& block, std::function<void()> happen, uint32_t arrives_from) {
  if (done_at_once()) return happen();
  block.events.push_back({std::move(happen), arrives_from});
}

// ---- findings

void Machine::add(Finding finding, uint32_t site, uint32_t other) {
  const uint64_t key =
      uint64_t{site} << 32 ^ uint64_t { other } << 4 ^ static_cast<uint64_t>(finding.kind);
  if (findings_.size() >= kMaxFindings ||
      std::find(reported_.begin(), reported_.end(), key) != reported_.end())
    return;
  reported_.push_back(key);
  finding.site = describe_site(site);
  if (other != 0) finding.other = describe_site(other);
  findings_.push_back(std::move(finding));
}

void Machine::find(const Thread& thread, FindingKind kind, uint32_t site, const std::string& what,
                   const std::string& address) {
  const Block& block = *thread.block;
  add({.kind = kind,
       .kernel = describe_kernel(block.launch->kernel),
       .block = in_words(block.index, block.launch->shape.grid),
       .thread = std::to_string(thread.index),
       .address = address,
       .what = what,
       .site = {},
       .other = {},
       .other_thread = {}},
      site, 0);
}

void Machine::fail(const Thread& thread, FindingKind kind, uint32_t site, const std::string& what,
                   const std::string& address) {
  find(thread, kind, site, what, address);
  aborting_ = true;
  if (Thread* const runs = current()) leave(*runs);
  throw EventAborted();
}

std::string Machine::name_of_agent(uint32_t agent, const Launch& now) const {
  const uint32_t number = agent >> kLocalBits, local = agent & ((1u << kLocalBits) - 1);
  const auto after = std::find_if(origins_.rbegin(), origins_.rend(),
                                  [&](const Origin& one) { return one.first <= number; });
  if (after == origins_.rend()) return "an earlier launch";
  std::ostringstream text;
  if (after->first != now.first_block) text << "kernel " << describe_kernel(after->kernel) << ", ";
  text << "block " << in_words(block_index(number - after->first, after->grid), after->grid)
       << ", ";
  if (local < after->threads)
    text << "thread " << local;
  else if (local < 2 * after->threads)
    text << "cp.async of thread " << local - after->threads;
  else if (const uint32_t mma = 2 * after->threads + kAsyncOperations; local < mma)
    text << "the async proxy";
  else if (local < mma + kMaxWarps)
    text << "MMAs of warp " << local - mma;
  else
    text << "tcgen05.ld of warp " << local - mma - kMaxWarps;
  return text.str();
}

void Machine::found(Conflict conflict, const Accessor& by, const Recorded* other, size_t byte) {
  const Block& block = *accessed_block_;
  const Launch& launch = *block.launch;
  Finding finding{};
  switch (conflict) {
    case Conflict::kReadOfWrite:
      finding.kind = FindingKind::kReadBeforeWrite;
      finding.what = "nothing orders this read after the write";
      break;
    case Conflict::kWriteOfWrite:
      finding.kind = FindingKind::kWriteOverWrite;
      finding.what = "nothing orders this write and an earlier one";
      break;
    case Conflict::kWriteOfRead:
      finding.kind = FindingKind::kOverwrittenInUse;
      finding.what = "nothing orders this write after a read";
      break;
    case Conflict::kUnfenced:
      finding.kind = FindingKind::kMissingProxyFence;
      finding.what = "the async proxy does not see an ordinary write that no fence follows";
      break;
    case Conflict::kNeverWritten:
      finding.kind = FindingKind::kNeverWritten;
      finding.what = "nobody has written what is read";
      break;
  }
  finding.kernel = describe_kernel(launch.kernel);
  const uint32_t number = by.agent >> kLocalBits, local = by.agent & ((1u << kLocalBits) - 1);
  finding.block =
      in_words(block_index(number - launch.first_block, launch.shape.grid), launch.shape.grid);
  const uint32_t threads = by.cluster->threads;
  finding.thread = local < threads       ? std::to_string(local)
                   : local < 2 * threads ? std::to_string(local - threads) + " (cp.async)"
                                         : "(async proxy)";
  switch (accessed_) {
    case Space::kGlobal: finding.address = memory_.describe(byte); break;
    case Space::kShared:
      finding.address = "shared " + hexadecimal(static_cast<uint32_t>(byte));
      break;
    case Space::kTensor: finding.address = describe_tensor_piece(byte); break;
  }
  if (other != nullptr) finding.other_thread = name_of_agent(other->agent, launch);
  add(std::move(finding), by.site, other == nullptr ? 0 : other->site());
}

// Reports the threads that wait, by the place where they wait.
void Machine::report_deadlock() {
  std::vector<std::pair<uint32_t, uint32_t>> sites;  // and how many threads
  std::vector<const Thread*> first;
  for (const auto& worker : workers_) {
    if (!worker->block) continue;
    for (const Thread& thread : worker->block->threads) {
      if (thread.state != Thread::State::kBlocked) continue;
      const auto known = std::find_if(sites.begin(), sites.end(),
                                      [&](const auto& one) { return one.first == thread.site; });
      if (known != sites.end()) {
        ++known->second;
      } else {
        sites.emplace_back(thread.site, 1);
        first.push_back(&thread);
      }
    }
  }
  for (size_t i = 0; i < sites.size(); ++i)
    find(*first[i], FindingKind::kDeadlock, sites[i].first,
         "nothing can run; " + std::to_string(sites[i].second) + " threads wait here for " +
             first[i]->waits_for);
}

// ---- accesses

uint32_t Thread::agent() const {
  return block->number << kLocalBits | index;
}
uint32_t Thread::copy_agent() const {
  return block->number << kLocalBits | (block->agents.threads + index);
}
size_t Thread::clock_index() const {
  return block->agents.index(agent());
}

Accessor Machine::ordinary(const Thread& thread, uint32_t site) const {
  return {.agent = thread.agent(),
          .epoch = thread.epoch,
          .knows = &thread.knowledge,
          .cluster = &thread.block->agents,
          .reads_done = thread.warp->reads_done,
          .in_order = true,
          .async_proxy = false,
          .site = site};
}

bool Machine::shared_offset(const Block& block, const void* address, uint32_t& offset) const {
  const auto* const byte = static_cast<const std::byte*>(address);
  const Worker& worker = *block.worker;
  const auto in_dynamic = static_cast<size_t>(byte - worker.dynamic());
  if (in_dynamic < Worker::kMaxDynamic) {
    offset = kReservedShared + static_cast<uint32_t>(in_dynamic);
    return true;
  }
  const auto in_static = static_cast<size_t>(byte - worker.statics());
  if (in_static < worker.static_bytes()) {
    offset = block.static_at + static_cast<uint32_t>(in_static);
    return true;
  }
  return false;
}

void Machine::require_dynamic(Thread& thread, uint32_t address, uint32_t bytes, uint32_t site) {
  const uint32_t end = kReservedShared + thread.block->dynamic_bytes;
  if (address >= kReservedShared && address + bytes <= end) return;
  fail(thread, FindingKind::kOutOfBounds, site,
       "an operand outside the block's dynamic shared memory, whose last byte is at " +
           hexadecimal(end - 1),
       "shared " + hexadecimal(address));
}

std::byte* Block::shared_at(uint32_t address) const {
  return address < static_at ? worker->shared() + address
                             : worker->statics() + (address - static_at);
}

std::byte* Machine::shared_bytes(Thread& thread, uint32_t address, uint32_t bytes, uint32_t site,
                                 Block** owner) {
  Block& block = *thread.block;
  uint32_t rank = block.rank;
  const uint32_t offset = in_block(address);
  if (address >> kRankAt != 0) rank = (address >> kRankAt) - 1;
  if (rank >= block.cluster.size())
    fail(thread, FindingKind::kOutOfBounds, site, "the cluster has no such block",
         "shared " + hexadecimal(address));
  Block& at = *block.cluster[rank];
  if (owner != nullptr) *owner = &at;
  const uint32_t dynamic_end = kReservedShared + at.dynamic_bytes;
  if (offset >= kReservedShared && offset + bytes <= dynamic_end) return at.shared_at(offset);
  if (offset >= at.static_at && offset + bytes <= at.shared_bytes) return at.shared_at(offset);
  fail(thread, FindingKind::kOutOfBounds, site,
       std::to_string(bytes) + " bytes outside the block's shared memory, whose last is at " +
           hexadecimal(dynamic_end - 1),
       "shared " + hexadecimal(address));
}

void Machine::shared_access(const Accessor& by, Block& owner, AccessKind kind, uint32_t offset,
                            uint32_t bytes) {
  accessed_block_ = &owner;
  accessed_ = Space::kShared;
  access(by, kind, owner.worker->cells(), offset, bytes, owner.number, *this);
}

void Machine::global_access(const Accessor& by, Block& block, AccessKind kind, const void* address,
                            size_t bytes) {
  accessed_block_ = &block;
  accessed_ = Space::kGlobal;
  access(by, kind, memory_.cells(), memory_.offset(address), bytes, 0, *this);
}

void Machine::ordinary_access(Thread& thread, AccessKind kind, const void* address, size_t bytes,
                              uint32_t site) {
  const auto place = reinterpret_cast<uintptr_t>(address);
  if (place - reinterpret_cast<uintptr_t>(thread.stack) < Worker::kStackBytes) return;
  Block& block = *thread.block;
  uint32_t offset = 0;
  if (shared_offset(block, address, offset)) {
    const uint32_t end = kReservedShared + block.dynamic_bytes;
    if (offset < block.static_at && offset + bytes > end)
      fail(thread, FindingKind::kOutOfBounds, site,
           "past the block's dynamic shared memory, whose last byte is at " + hexadecimal(end - 1),
           "shared " + hexadecimal(offset));
    return shared_access(ordinary(thread, site), block, kind, offset, static_cast<uint32_t>(bytes));
  }
  if (memory_.has(address)) {
    if (!memory_.allocated(address, bytes))
      fail(thread, FindingKind::kOutOfBounds, site,
           std::to_string(bytes) + " bytes that no array of device memory has",
           memory_.describe(memory_.offset(address)));
    return global_access(ordinary(thread, site), block, kind, address, bytes);
  }
  const Launch& launch = *block.launch;
  const bool constant = place - program_begin_ < program_end_ - program_begin_ ||
                        place - reinterpret_cast<uintptr_t>(launch.call.get()) < launch.call_bytes;
  if (constant && kind == AccessKind::kRead) return;
  fail(thread, FindingKind::kOutOfBounds, site, "an address that is no memory of the device");
}

}  // namespace tilemoe::simulator
