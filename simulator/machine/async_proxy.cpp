#include "simulator/machine/async_proxy.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "simulator/machine/synchronization.h"
#include "simulator/matrix_descriptor.h"
#include "simulator/tensor_core.h"
#include "simulator/tensor_map.h"

namespace tilemoe::simulator {
namespace {

constexpr uint32_t kPieceBytes = 16;
constexpr uint32_t kAllLanes = 0xffffffff;

// An agent for one operation, whose accesses nothing else orders.
Accessor new_operation(Thread& thread, uint32_t site) {
  Block& block = *thread.block;
  const uint32_t slot = block.next_operation++ % kAsyncOperations;
  return {.agent = block.number << kLocalBits | (block.agents.first_operation() + slot),
          .epoch = ++block.operation_epochs[slot],
          .knows = &thread.knowledge,
          .cluster = &block.agents,
          .reads_done = thread.warp->reads_done,
          .in_order = false,
          .async_proxy = true,
          .site = site};
}

void know(Thread& thread, const BulkAgent& agent) {
  thread.knowledge.clock.raise(thread.block->agents.index(agent.agent), agent.epoch);
}

TensorMap map_at(Thread& thread, const void* map, uint32_t site) {
  try {
    return decode_tensor_map(map);
  } catch (const std::invalid_argument& error) {
    thread.block->machine->fail(thread, FindingKind::kOutOfBounds, site, error.what());
  }
}

std::vector<BoxPiece> pieces_of(Thread& thread, const TensorMap& map,
                                std::span<const int32_t> coordinates, uint32_t shared,
                                uint32_t site) {
  try {
    return box_pieces(map, coordinates, shared);
  } catch (const std::invalid_argument& error) {
    thread.block->machine->fail(thread, FindingKind::kOutOfBounds, site, error.what());
  }
}

void require_global(Thread& thread, const void* address, uint32_t bytes, uint32_t site) {
  Machine& machine = *thread.block->machine;
  if (!machine.memory().has(address) || !machine.memory().allocated(address, bytes))
    machine.fail(
        thread, FindingKind::kOutOfBounds, site, "a box of what is no array of device memory",
        machine.memory().has(address) ? machine.memory().describe(machine.memory().offset(address))
                                      : std::string());
}

}  // namespace

// ---- loads

void load_box(Thread& thread, uint32_t shared, const void* map_address, uint32_t barrier,
              uint32_t blocks, std::span<const int32_t> coordinates, uint32_t site) {
  Block& block = *thread.block;
  Machine& machine = *block.machine;
  const TensorMap map = map_at(thread, map_address, site);
  mbarrier_at(thread, barrier, site, nullptr);
  machine.shared_bytes(thread, shared, map.box_bytes(), site);
  const auto pieces =
      std::make_shared<std::vector<BoxPiece>>(pieces_of(thread, map, coordinates, shared, site));
  machine.trace().note(block.launch->number, block.linear, thread.warp->index, Note::kCopy, shared);
  bool first = true;
  for (uint32_t rank = 0; rank < block.cluster.size(); ++rank) {
    if ((blocks >> rank & 1) == 0) continue;
    Block& there = *block.cluster[rank];
    const Accessor by = new_operation(thread, site);
    for (const BoxPiece& piece : *pieces) {
      if (first && piece.bytes > 0) {
        const auto* const from = reinterpret_cast<const void*>(piece.global);
        require_global(thread, from, piece.bytes, site);
        machine.global_access(by, block, AccessKind::kRead, from, piece.bytes);
      }
      machine.shared_access(by, there, AccessKind::kWrite, piece.shared, kPieceBytes);
    }
    first = false;
    machine.add_event(
        there, [&machine, &thread, &there, pieces, barrier, site, by, bytes = map.box_bytes()] {
          std::byte* const memory = there.worker->shared();
          for (const BoxPiece& piece : *pieces) {
            std::memset(memory + piece.shared, 0, kPieceBytes);
            if (piece.bytes > 0)
              std::memcpy(memory + piece.shared + piece.skipped,
                          reinterpret_cast<const void*>(piece.global), piece.bytes);
          }
          const auto at = there.mbarriers.find(barrier);
          if (at == there.mbarriers.end()) {
            machine.find(thread, FindingKind::kBarrierMisuse, site,
                         "bytes came to a block of the cluster that has no barrier there");
            return;
          }
          at->second.gathering.add_epoch(there.agents.index(by.agent), by.epoch);
          machine.trace().note(there.launch->number, there.linear, 0, Note::kLanded, barrier);
          count_bytes(there.threads.front(), at->second, barrier, bytes, site);
        });
  }
}

// ---- stores

// Shared memory is read at some time, and global memory written at another.
void store_box(Thread& thread, const void* map_address, uint32_t shared,
               std::span<const int32_t> coordinates, uint32_t site) {
  Block& block = *thread.block;
  Machine& machine = *block.machine;
  const TensorMap map = map_at(thread, map_address, site);
  machine.shared_bytes(thread, shared, map.box_bytes(), site);
  auto store = std::make_shared<BulkStore>();
  const std::vector<BoxPiece> pieces = pieces_of(thread, map, coordinates, shared, site);
  const Accessor reader = new_operation(thread, site), writer = new_operation(thread, site);
  store->reader = {reader.agent, reader.epoch};
  store->writer = {writer.agent, writer.epoch};
  machine.trace().note(block.launch->number, block.linear, thread.warp->index, Note::kStore,
                       shared);
  for (const BoxPiece& piece : pieces) {
    if (piece.bytes == 0) continue;
    machine.shared_access(reader, block, AccessKind::kRead, piece.shared + piece.skipped,
                          piece.bytes);
    auto* const to = reinterpret_cast<void*>(piece.global);
    require_global(thread, to, piece.bytes, site);
    machine.global_access(writer, block, AccessKind::kWrite, to, piece.bytes);
  }
  thread.open_stores.push_back(store);
  machine.add_event(block, [&machine, &thread, &block, store, pieces] {
    std::vector<std::byte> bytes(pieces.size() * kPieceBytes);
    for (size_t i = 0; i < pieces.size(); ++i)
      std::memcpy(&bytes[i * kPieceBytes], block.worker->shared() + pieces[i].shared, kPieceBytes);
    store->has_read = true;
    machine.wake(thread);
    machine.add_event(block, [&machine, &thread, store, pieces, bytes = std::move(bytes)] {
      for (size_t i = 0; i < pieces.size(); ++i)
        if (pieces[i].bytes > 0)
          std::memcpy(reinterpret_cast<void*>(pieces[i].global),
                      &bytes[i * kPieceBytes + pieces[i].skipped], pieces[i].bytes);
      store->is_complete = true;
      machine.wake(thread);
    });
  });
}

void commit_stores(Thread& thread) {
  thread.store_groups.push_back(std::exchange(thread.open_stores, {}));
}

void wait_for_stores(Thread& thread, size_t pending, bool complete, uint32_t site) {
  while (thread.store_groups.size() > pending) {
    // Groups that have read are kept until they are known to be complete as well.
    const size_t groups = thread.store_groups.size() - pending;
    bool waited = false;
    for (size_t group = 0; group < groups; ++group)
      for (const auto& store : thread.store_groups[group])
        while (!(complete ? store->is_complete : store->has_read)) {
          thread.block->machine->wait(thread, "its stores", site);
          waited = true;
        }
    if (waited) continue;
    for (size_t group = 0; group < groups; ++group)
      for (const auto& store : thread.store_groups[group]) {
        store->read_is_known = true;
        know(thread, store->reader);
        if (complete) know(thread, store->writer);
      }
    if (complete)
      thread.store_groups.erase(thread.store_groups.begin(),
                                thread.store_groups.begin() + static_cast<std::ptrdiff_t>(groups));
    return;
  }
}

void Machine::check_stores(Thread& thread) {
  const auto unknown = [](const auto& stores) {
    return std::any_of(stores.begin(), stores.end(),
                       [](const auto& store) { return !store->read_is_known; });
  };
  if (unknown(thread.open_stores) ||
      std::any_of(thread.store_groups.begin(), thread.store_groups.end(), unknown))
    find(thread, FindingKind::kOverwrittenInUse, thread.site,
         "a thread ends while its stores may read the block's shared memory");
}

// ---- products

namespace {

// Not there: the address of a kind of meeting.
const char kMultiply = 0, kFence = 0, kCommit = 0, kWait = 0;

struct ProductOperand {
  float* d;
};

}  // namespace

void fence_products(Thread& thread, uint32_t site) {
  meet(thread, &kFence, kAllLanes, "wgmma.fence", site, nullptr,
       [&](const Meeting&) { thread.warp->products_fenced = true; });
}

void multiply_group(Thread& thread, bool bfloat16, int columns, float* d, uint64_t a, uint64_t b,
                    bool accumulate, bool a_mn_major, bool b_mn_major, uint32_t site) {
  Warp& warp = *thread.warp;
  Block& block = *thread.block;
  Machine& machine = *block.machine;
  meet(thread, &kMultiply, kAllLanes, "wgmma", site, d, [&](const Meeting& met) {
    if (met.arrived != kAllLanes)
      machine.fail(thread, FindingKind::kDivergence, site, "wgmma by a part of a warp");
    if (!warp.products_fenced)
      machine.find(thread, FindingKind::kBarrierMisuse, site,
                   "wgmma without wgmma.fence after registers were the threads' own");
    Product product{.bfloat16 = bfloat16,
                    .accumulate = accumulate,
                    .a_mn_major = a_mn_major,
                    .b_mn_major = b_mn_major,
                    .columns = columns,
                    .a = a,
                    .b = b,
                    .d = {}};
    for (uint32_t lane = 0; lane < kLanes; ++lane)
      product.d[lane] = static_cast<float*>(met.operands[lane]);
    // The warp's own rows of A, and a quarter of B's: of the others its warpgroup's other warps
    // must know as well.
    const uint32_t quarter = warp.index % 4;
    const Accessor by{.agent = block.number << kLocalBits |
                               (block.agents.first_operation() + kAsyncOperations + warp.index),
                      .epoch = warp.product_epoch,
                      .knows = &thread.knowledge,
                      .cluster = &block.agents,
                      .reads_done = warp.reads_done,
                      .in_order = true,
                      .async_proxy = true,
                      .site = site};
    const auto read = [&](uint64_t bits, bool mn_major, int rows, int first, int end) {
      const MatrixDescriptor descriptor = decode_matrix_descriptor(bits);
      for (const OperandPiece& piece :
           operand_pieces(descriptor, mn_major ? OperandMajor::kMN : OperandMajor::kK, rows)) {
        if (piece.row < first || piece.row >= end) continue;
        machine.shared_bytes(thread, piece.address, kPieceBytes, site);
        machine.shared_access(by, block, AccessKind::kRead, piece.address, kPieceBytes);
      }
    };
    try {
      const int in_quarter = static_cast<int>(quarter);
      read(a, a_mn_major, 64, 16 * in_quarter, 16 * in_quarter + 16);
      read(b, b_mn_major, columns, columns / 4 * in_quarter, columns / 4 * (in_quarter + 1));
    } catch (const std::invalid_argument& error) {
      machine.fail(thread, FindingKind::kOutOfBounds, site, error.what());
    }
    warp.open_products.push_back(product);
    if (thread.warp->index % 4 == 0)
      machine.trace().note(block.launch->number, block.linear, warp.index, Note::kProduct, 0);
  });
}

namespace {

void compute(Block& block, const Warp& warp, const Product& product) {
  const auto major = [](bool mn) { return mn ? OperandMajor::kMN : OperandMajor::kK; };
  const std::span<const std::byte> shared(block.worker->shared(),
                                          kReservedShared + block.dynamic_bytes);
  const std::vector<uint16_t> A =
      gather_operand(decode_matrix_descriptor(product.a), major(product.a_mn_major), 64, shared);
  const std::vector<uint16_t> B = gather_operand(
      decode_matrix_descriptor(product.b), major(product.b_mn_major), product.columns, shared);
  const auto columns = static_cast<size_t>(product.columns);
  std::vector<float> D(16 * columns);
  const auto place = [&](size_t lane, size_t number) {
    const size_t row = lane / 4 + 8 * (number % 4 / 2);
    return row * columns + number / 4 * 8 + lane % 4 * 2 + number % 2;
  };
  if (product.accumulate)
    for (size_t lane = 0; lane < kLanes; ++lane)
      for (size_t i = 0; i < columns / 2; ++i) D[place(lane, i)] = product.d[lane][i];
  multiply(block.machine->device().major >= 9 ? kHopperCore : kAmpereCore,
           product.bfloat16 ? OperandType::kBFloat16 : OperandType::kFloat16, 16, product.columns,
           A.data() + 16 * 16 * (warp.index % 4), B.data(), product.accumulate, D.data());
  for (size_t lane = 0; lane < kLanes; ++lane)
    for (size_t i = 0; i < columns / 2; ++i) product.d[lane][i] = D[place(lane, i)];
}

}  // namespace

// Early or as late as can be.
void commit_products(Thread& thread, uint32_t site) {
  Warp& warp = *thread.warp;
  Block& block = *thread.block;
  meet(thread, &kCommit, kAllLanes, "wgmma.commit_group", site, nullptr, [&](const Meeting&) {
    const bool early = warp.product_groups.empty() && block.machine->random().one_in(3);
    ProductGroup group{.epoch = warp.product_epoch++,
                       .products = std::exchange(warp.open_products, {})};
    if (early) {
      for (const Product& product : group.products) compute(block, warp, product);
      group.products.clear();
    }
    warp.product_groups.push_back(std::move(group));
  });
}

void wait_for_products(Thread& thread, size_t pending, uint32_t site) {
  Warp& warp = *thread.warp;
  Block& block = *thread.block;
  meet(thread, &kWait, kAllLanes, "wgmma.wait_group", site, nullptr, [&](const Meeting&) {
    while (warp.product_groups.size() > pending) {
      const ProductGroup& group = warp.product_groups.front();
      for (const Product& product : group.products) compute(block, warp, product);
      const uint32_t agent = block.number << kLocalBits |
                             (block.agents.first_operation() + kAsyncOperations + warp.index);
      for (Thread* lane : warp.lanes) know(*lane, {agent, group.epoch});
      warp.product_groups.pop_front();
    }
    warp.products_fenced = false;
  });
}

// ---- clusters

void cluster_barrier(Thread& thread, uint32_t site) {
  Block& first = *thread.block->cluster.front();
  size_t all = 0;
  for (const Block* block : thread.block->cluster) all += block->threads.size() - block->exited;
  BlockBarrier& barrier = first.of_cluster;
  ++barrier.arrived;
  barrier.gathering.add(thread);
  barrier.waiting.push_back(&thread);
  if (barrier.arrived < all)
    return thread.block->machine->wait(thread, "the blocks of its cluster", site);
  end_cluster_barrier(first);
}

void end_cluster_barrier(Block& first) {
  BlockBarrier& barrier = first.of_cluster;
  for (Thread* waiting : std::exchange(barrier.waiting, {})) {
    waiting->knowledge = barrier.gathering.all();
    first.machine->wake(*waiting);
  }
  barrier.gathering.clear();
  barrier.arrived = 0;
}

void Machine::leave_cluster_barrier(Block& block) {
  Block& first = *block.cluster.front();
  size_t all = 0;
  for (const Block* one : block.cluster) all += one->threads.size() - one->exited;
  if (first.of_cluster.arrived > 0 && first.of_cluster.arrived >= all) end_cluster_barrier(first);
}

}  // namespace tilemoe::simulator
