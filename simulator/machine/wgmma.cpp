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

// A warp's 16 rows of D while products are under way.
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

struct Product {
  ProductShape shape;
  uint64_t a, b;
  bool accumulate;
  std::shared_ptr<Accumulators> of;
};
struct Group {
  Epoch epoch;
  std::vector<Product> products;  // that are yet to be computed
  std::vector<std::shared_ptr<Accumulators>> holds;
};

}  // namespace

struct WarpProducts {
  bool fenced = false;
  std::vector<Product> open;
  std::deque<Group> groups;
  std::vector<std::shared_ptr<Accumulators>> accumulators;
};

namespace {

// Instructions that lanes meet at.
const char kMultiply = 0, kFence = 0, kCommit = 0, kWait = 0;

WarpProducts& products_of(Warp& warp) {
  if (!warp.products) warp.products = std::make_shared<WarpProducts>();
  return *warp.products;
}

OperandMajor major(bool mn) {
  return mn ? OperandMajor::kMN : OperandMajor::kK;
}

// Takes the lanes' registers where no product under way has them.
std::shared_ptr<Accumulators> accumulators_of(WarpProducts& products, const Meeting& met,
                                              int columns) {
  for (const auto& held : products.accumulators)
    if (held->registers[0] == met.operands[0]) return held;
  auto held = std::make_shared<Accumulators>();
  held->columns = static_cast<size_t>(columns);
  held->D.resize(kRows * held->columns);
  for (uint32_t lane = 0; lane < kLanes; ++lane)
    held->registers[lane] = static_cast<float*>(met.operands[lane]);
  held->each([](float& number, float& registers) {
    number = std::exchange(registers, std::numeric_limits<float>::quiet_NaN());
  });
  products.accumulators.push_back(held);
  return held;
}

// To the lanes' registers, of those that no product under way has any more.
void give_back(WarpProducts& products) {
  std::erase_if(products.accumulators, [](const auto& held) {
    if (held.use_count() > 1) return false;
    held->each([](const float& number, float& registers) { registers = number; });
    return true;
  });
}

void compute(const Warp& warp, const Product& product) {
  const Block& block = *warp.block;
  const std::span<const std::byte> shared(block.worker->shared(),
                                          kReservedShared + block.dynamic_bytes);
  const std::vector<uint16_t> A = gather_operand(
      decode_matrix_descriptor(product.a), major(product.shape.a_mn_major), kWarps * kRows, shared);
  const std::vector<uint16_t> B =
      gather_operand(decode_matrix_descriptor(product.b), major(product.shape.b_mn_major),
                     product.shape.columns, shared);
  multiply(block.machine->device().major >= 9 ? kHopperCore : kAmpereCore,
           product.shape.bfloat16 ? OperandType::kBFloat16 : OperandType::kFloat16, kRows,
           product.shape.columns, A.data() + kRows * kStepsOfSum * (warp.index % kWarps), B.data(),
           product.accumulate, product.of->D.data());
}
void compute(const Warp& warp, Group& group) {
  for (const Product& product : std::exchange(group.products, {})) compute(warp, product);
}

}  // namespace

void fence_products(Thread& thread, uint32_t site) {
  meet(thread, &kFence, kAllLanes, "wgmma.fence", site, nullptr,
       [&](const Meeting&) { products_of(*thread.warp).fenced = true; });
}

void multiply_group(Thread& thread, const ProductShape& shape, float* d, uint64_t a, uint64_t b,
                    bool accumulate, uint32_t site) {
  Warp& warp = *thread.warp;
  Block& block = *thread.block;
  Machine& machine = *block.machine;
  meet(thread, &kMultiply, kAllLanes, "wgmma", site, d, [&](const Meeting& met) {
    if (met.arrived != kAllLanes)
      machine.fail(thread, FindingKind::kDivergence, site, "wgmma by a part of a warp");
    WarpProducts& products = products_of(warp);
    if (!products.fenced)
      machine.find(thread, FindingKind::kBarrierMisuse, site,
                   "wgmma without wgmma.fence after registers were the threads' own");
    // The warp's own rows of A, and a quarter of B's: of the others its warpgroup's other warps
    // must know as well.
    const Accessor by = warps_products(thread, site);
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
    products.open.push_back(
        {shape, a, b, accumulate, accumulators_of(products, met, shape.columns)});
    machine.trace().note(block.launch->number, block.linear, warp.index, Note::kProduct,
                         decode_matrix_descriptor(a).start);
  });
}

// They take place at once, or as late as can be. Where all asynchronous work is done at once, the
// threads have their registers back as well.
void commit_products(Thread& thread, uint32_t site) {
  Warp& warp = *thread.warp;
  meet(thread, &kCommit, kAllLanes, "wgmma.commit_group", site, nullptr, [&](const Meeting&) {
    WarpProducts& products = products_of(warp);
    Machine& machine = *thread.block->machine;
    const bool early = products.groups.empty() && machine.random().one_in(3);
    Group& group = products.groups.emplace_back();
    group.epoch = warp.product_epoch++;
    group.products = std::exchange(products.open, {});
    for (const Product& product : group.products) group.holds.push_back(product.of);
    if (early || machine.done_at_once()) compute(warp, group);
    if (machine.done_at_once()) group.holds.clear(), give_back(products);
  });
}

void wait_for_products(Thread& thread, size_t pending, uint32_t site) {
  Warp& warp = *thread.warp;
  meet(thread, &kWait, kAllLanes, "wgmma.wait_group", site, nullptr, [&](const Meeting&) {
    WarpProducts& products = products_of(warp);
    while (products.groups.size() > pending) {
      Group& group = products.groups.front();
      compute(warp, group);
      const uint32_t agent =
          thread.block->number << kLocalBits | (thread.block->agents.first_products() + warp.index);
      for (Thread* lane : warp.lanes) know(*lane, {agent, group.epoch});
      products.groups.pop_front();
    }
    give_back(products);
    products.fenced = false;
  });
}

}  // namespace tilemoe::simulator
