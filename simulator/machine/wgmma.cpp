#include "simulator/machine/wgmma.h"

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <utility>

#include "simulator/machine/async_agent.h"
#include "simulator/machine/synchronization.h"
#include "simulator/matrix_descriptor.h"
#include "simulator/tensor_core.h"

namespace tilemoe::simulator {
namespace {

constexpr uint32_t kAllLanes = 0xffffffff;
constexpr uint32_t kPieceBytes = 16;
constexpr uint32_t kWarps = 4;  // of a warpgroup
constexpr int kRows = 16;       // of a warp

// A warp's 16 rows of D while MMAs are under way.
struct Accumulators {
  std::array<float*, kLanes> registers;
  size_t columns;
  std::vector<float> D;  // (kRows, columns)

  template <class Each>
  void each(const Each& each_number) {
    for (size_t lane = 0; lane < kLanes; ++lane)
      for (size_t i = 0; i < columns / 2; ++i) {
        const size_t row = lane / 4 + 8 * (i % 4 / 2), column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        each_number(D[row * columns + column], registers[lane][i]);
      }
  }
};

struct Mma {
  MmaShape shape;
  uint64_t a, b;
  bool accumulate;
  std::shared_ptr<Accumulators> of;
};
struct Group {
  Epoch epoch;
  std::vector<Mma> mmas;  // not yet computed
  std::vector<std::shared_ptr<Accumulators>> holds;
};

}  // namespace

struct WarpMmas {
  bool fenced = false;
  std::vector<Mma> open;
  std::deque<Group> groups;
  std::vector<std::shared_ptr<Accumulators>> accumulators;
};

namespace {

// Instructions that lanes meet at.
const char kMultiply = 0, kFence = 0, kCommit = 0, kWait = 0;

WarpMmas& mmas_of(Warp& warp) {
  if (!warp.mmas) warp.mmas = std::make_shared<WarpMmas>();
  return *warp.mmas;
}

OperandMajor major(bool mn) {
  return mn ? OperandMajor::kMN : OperandMajor::kK;
}

// Takes the lanes' registers unless an MMA under way has them.
std::shared_ptr<Accumulators> accumulators_of(WarpMmas& mmas, const Meeting& met, int columns) {
  for (const auto& taken : mmas.accumulators)
    if (taken->registers[0] == met.operands[0]) return taken;
  auto taken = std::make_shared<Accumulators>();
  taken->columns = static_cast<size_t>(columns);
  taken->D.resize(kRows * taken->columns);
  for (uint32_t lane = 0; lane < kLanes; ++lane)
    taken->registers[lane] = static_cast<float*>(met.operands[lane]);
  taken->each([](float& number, float& registers) {
    number = std::exchange(registers, std::numeric_limits<float>::quiet_NaN());
  });
  mmas.accumulators.push_back(taken);
  return taken;
}

// Writes the accumulators that no MMA under way uses to the lanes' registers.
void give_back(WarpMmas& mmas) {
  std::erase_if(mmas.accumulators, [](const auto& taken) {
    if (taken.use_count() > 1) return false;
    taken->each([](const float& number, float& registers) { registers = number; });
    return true;
  });
}

void compute(const Warp& warp, const Mma& mma) {
  const Block& block = *warp.block;
  const std::span<const std::byte> shared(block.worker->shared(),
                                          kReservedShared + block.dynamic_bytes);
  const std::vector<uint16_t> A = gather_operand(
      decode_matrix_descriptor(mma.a), major(mma.shape.a_mn_major), kWarps * kRows, shared);
  const std::vector<uint16_t> B = gather_operand(
      decode_matrix_descriptor(mma.b), major(mma.shape.b_mn_major), mma.shape.columns, shared);
  const uint16_t* const rows = A.data() + kRows * kStepsOfSum * (warp.index % kWarps);
  if (mma.shape.type == OperandType::kE4M3)  // 32 codes lie where 16 wider numbers do
    multiply_e4m3(kRows, mma.shape.columns, reinterpret_cast<const uint8_t*>(rows),
                  reinterpret_cast<const uint8_t*>(B.data()), mma.accumulate, mma.of->D.data());
  else
    multiply(block.machine->device().major >= 9 ? kHopperCore : kAmpereCore, mma.shape.type, kRows,
             mma.shape.columns, rows, B.data(), mma.accumulate, mma.of->D.data());
}
void compute(const Warp& warp, Group& group) {
  for (const Mma& mma : std::exchange(group.mmas, {})) compute(warp, mma);
}

}  // namespace

void fence_mmas(Thread& thread, uint32_t site) {
  meet(thread, &kFence, kAllLanes, "wgmma.fence", site, nullptr,
       [&](const Meeting&) { mmas_of(*thread.warp).fenced = true; });
}

void multiply_group(Thread& thread, const MmaShape& shape, float* d, uint64_t a, uint64_t b,
                    bool accumulate, uint32_t site) {
  Warp& warp = *thread.warp;
  Block& block = *thread.block;
  Machine& machine = *block.machine;
  meet(thread, &kMultiply, kAllLanes, "wgmma", site, d, [&](const Meeting& met) {
    if (met.arrived != kAllLanes)
      machine.fail(thread, FindingKind::kDivergence, site, "wgmma by a part of a warp");
    WarpMmas& mmas = mmas_of(warp);
    if (!mmas.fenced)
      machine.find(thread, FindingKind::kBarrierMisuse, site,
                   "wgmma without wgmma.fence after registers were the threads' own");
    // Checks the warp's own rows of A and a quarter of B's; the other warps of the warpgroup check
    // the rest.
    const Accessor by = warp_mmas(thread, site);
    const auto read = [&](uint64_t bits, bool mn_major, int rows) {
      const MatrixDescriptor descriptor = decode_matrix_descriptor(bits);
      const int quarter = rows / static_cast<int>(kWarps);
      const int first = quarter * static_cast<int>(warp.index % kWarps);
      for (const OperandPiece& piece : operand_pieces(descriptor, major(mn_major), rows)) {
        if (piece.row < first || piece.row >= first + quarter) continue;
        machine.require_dynamic(thread, piece.address, kPieceBytes, site);
        machine.shared_access(by, block, AccessKind::kRead, piece.address, kPieceBytes);
      }
    };
    try {
      read(a, shape.a_mn_major, kRows * static_cast<int>(kWarps));
      read(b, shape.b_mn_major, shape.columns);
    } catch (const std::invalid_argument& error) {
      machine.fail(thread, FindingKind::kOutOfBounds, site, error.what());
    }
    mmas.open.push_back({shape, a, b, accumulate, accumulators_of(mmas, met, shape.columns)});
    machine.trace().note(block.launch->number, block.linear, warp.index, Note::kMma,
                         decode_matrix_descriptor(a).start);
  });
}

// The MMAs take place at once, or as late as possible. If all asynchronous work is done at once,
// the threads get their registers back as well.
void commit_mmas(Thread& thread, uint32_t site) {
  Warp& warp = *thread.warp;
  meet(thread, &kCommit, kAllLanes, "wgmma.commit_group", site, nullptr, [&](const Meeting&) {
    WarpMmas& mmas = mmas_of(warp);
    Machine& machine = *thread.block->machine;
    const bool early = mmas.groups.empty() && machine.random().one_in(3);
    Group& group = mmas.groups.emplace_back();
    group.epoch = warp.mma_epoch++;
    group.mmas = std::exchange(mmas.open, {});
    for (const Mma& mma : group.mmas) group.holds.push_back(mma.of);
    if (early || machine.done_at_once()) compute(warp, group);
    if (machine.done_at_once()) group.holds.clear(), give_back(mmas);
  });
}

void wait_for_mmas(Thread& thread, size_t pending, uint32_t site) {
  Warp& warp = *thread.warp;
  meet(thread, &kWait, kAllLanes, "wgmma.wait_group", site, nullptr, [&](const Meeting&) {
    WarpMmas& mmas = mmas_of(warp);
    while (mmas.groups.size() > pending) {
      Group& group = mmas.groups.front();
      compute(warp, group);
      const uint32_t agent =
          thread.block->number << kLocalBits | (thread.block->agents.first_mmas() + warp.index);
      for (Thread* lane : warp.lanes) know(*lane, {agent, group.epoch});
      mmas.groups.pop_front();
    }
    give_back(mmas);
    mmas.fenced = false;
  });
}

}  // namespace tilemoe::simulator
