#include "simulator/machine/tma.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>

#include "simulator/machine/async_agent.h"
#include "simulator/machine/synchronization.h"
#include "simulator/tensor_map.h"

namespace tilemoe::simulator {

// A thread's store. It reads shared memory at one time and writes global memory at a later one.
struct BoxStore {
  AsyncAgent reader, writer;
  bool has_read = false, is_complete = false;
  bool read_is_known = false;  // to the thread
};

namespace {

constexpr uint32_t kPieceBytes = 16;

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

void load_box(Thread& thread, uint32_t shared, const void* map_address, uint32_t barrier,
              uint32_t blocks, std::span<const int32_t> coordinates, uint32_t site) {
  Block& block = *thread.block;
  Machine& machine = *block.machine;
  const TensorMap map = map_at(thread, map_address, site);
  for (uint32_t rank = 0; rank < block.cluster.size(); ++rank)
    if ((blocks >> rank & 1) != 0)
      mbarrier_at(thread, in_cluster(barrier, rank), site, nullptr, true);
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
        there,
        [&machine, &thread, &there, pieces, barrier, site, by, bytes = map.box_bytes()] {
          for (const BoxPiece& piece : *pieces) {
            std::byte* const to = there.shared_at(piece.shared);
            std::memset(to, 0, kPieceBytes);
            if (piece.bytes > 0)
              std::memcpy(to + piece.skipped, reinterpret_cast<const void*>(piece.global),
                          piece.bytes);
          }
          Mbarrier& at = there.mbarriers[barrier];
          at.gathering.add_epoch(there.agents.index(by.agent), by.epoch);
          machine.trace().note(there.launch->number, there.linear, 0, Note::kLanded, barrier);
          count_bytes(there.threads.front(), at, barrier, bytes, site);
        },
        site);
  }
}

void store_box(Thread& thread, const void* map_address, uint32_t shared,
               std::span<const int32_t> coordinates, uint32_t site) {
  Block& block = *thread.block;
  Machine& machine = *block.machine;
  const TensorMap map = map_at(thread, map_address, site);
  machine.shared_bytes(thread, shared, map.box_bytes(), site);
  auto store = std::make_shared<BoxStore>();
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
      std::memcpy(&bytes[i * kPieceBytes], block.shared_at(pieces[i].shared), kPieceBytes);
    store->has_read = true;
    if (thread.waits_for_stores) machine.wake(thread);
    machine.add_event(block, [&machine, &thread, store, pieces, bytes = std::move(bytes)] {
      for (size_t i = 0; i < pieces.size(); ++i)
        if (pieces[i].bytes > 0)
          std::memcpy(reinterpret_cast<void*>(pieces[i].global),
                      &bytes[i * kPieceBytes + pieces[i].skipped], pieces[i].bytes);
      store->is_complete = true;
      if (thread.waits_for_stores) machine.wake(thread);
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
          thread.waits_for_stores = true;
          thread.block->machine->wait(thread, "its stores", site);
          thread.waits_for_stores = false;
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

}  // namespace tilemoe::simulator
