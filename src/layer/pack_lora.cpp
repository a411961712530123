// The memory of packed adapters, and packing.
#include "core/check.h"
#include "layer/arguments.h"
#include "layer/lora.h"
#include "layer/quantized.h"
#include "layer/steps.h"
#include "layer/workspace.h"

namespace tilemoe {
namespace {

constexpr size_t kFactorAlignment = 256;

// A matrix of every expert, (E, rows, columns), with contiguous columns or contiguous rows.
tilemoe_tensor matrices(void* data, tilemoe_dtype dtype, int64_t E, int64_t rows, int64_t columns,
                        bool contiguous_columns) {
  return {
      .data = data,
      .dtype = dtype,
      .ndim = 3,
      .shape = {E, rows, columns},
      .stride = {rows * columns, contiguous_columns ? columns : 1, contiguous_columns ? 1 : rows}};
}

bool contiguous_along_n(const tilemoe_tensor& W2) {
  return W2.stride[2] == 1;
}

size_t factor_bytes(const tilemoe_experts& experts, int64_t rows, int64_t columns) {
  const int64_t elements = checked_product(experts.E, checked_product(rows, columns, "a factor"),
                                           "the factors of all experts");
  const auto element = static_cast<int64_t>(tilemoe_dtype_size(experts.dtype));
  return round_up(static_cast<size_t>(checked_product(elements, element, "bytes of a factor")),
                  kFactorAlignment);
}

// The factors in the packed memory, one after the other. Those of an absent adapter have no bytes.
struct PackedLayout {
  size_t A1, B1, A2, B2, total;

  explicit PackedLayout(const tilemoe_experts& experts) {
    A1 = 0;
    B1 = A1 + factor_bytes(experts, experts.rank_1, experts.d);
    A2 = B1 + factor_bytes(experts, experts.rank_1, h_width(experts));
    B2 = A2 + factor_bytes(experts, experts.rank_2, experts.n);
    total = B2 + factor_bytes(experts, experts.rank_2, experts.d);
  }
};

}  // namespace

// The factors have the major of the GEMM's weights: then one kernel reads both.
tilemoe_packed_lora packed_at(void* memory, const tilemoe_experts& experts,
                              const tilemoe_weights& weights) {
  const PackedLayout at(experts);
  auto* const base = static_cast<char*>(memory);
  const bool W1_along_d = contiguous_along_d(weights.W1);
  const bool W2_along_n = contiguous_along_n(weights.W2);
  const int64_t E = experts.E, d = experts.d, n = experts.n;
  tilemoe_packed_lora packed{};
  const auto factor = [&](size_t place, int64_t rows, int64_t columns, bool contiguous_columns) {
    return matrices(base ? base + place : nullptr, experts.dtype, E, rows, columns,
                    contiguous_columns);
  };
  if (experts.rank_1 > 0) {
    packed.A1 = factor(at.A1, experts.rank_1, d, W1_along_d);
    packed.B1 = factor(at.B1, h_width(experts), experts.rank_1, W1_along_d);
  }
  if (experts.rank_2 > 0) {
    packed.A2 = factor(at.A2, experts.rank_2, n, W2_along_n);
    packed.B2 = factor(at.B2, d, experts.rank_2, W2_along_n);
  }
  return packed;
}

namespace {

// The rank of an adapter: of A (E, rank, columns) and B (E, rows, rank), both or neither; else 0.
int64_t rank_of(const char* A_name, const tilemoe_tensor& A, const char* B_name,
                const tilemoe_tensor& B) {
  TILEMOE_CHECK(present(A) == present(B), A_name << " is " << describe(A) << " and " << B_name
                                                 << " is " << describe(B)
                                                 << ": give both or neither");
  return present(A) ? A.shape[1] : 0;
}

void check_factor(const char* name, const tilemoe_tensor& factor, int64_t E, int64_t rows,
                  int64_t columns) {
  check_optional(name, factor,
                 {{E, rows, columns},
                  {TILEMOE_FLOAT32, TILEMOE_BFLOAT16, TILEMOE_FLOAT16},
                  Strides::kAny,
                  false});
}

struct Ranks {
  int64_t gate, up, down;
};

// The ranks of the caller's adapters, which have passed all checks.
Ranks read_ranks(const tilemoe_experts& experts, const tilemoe_lora& lora) {
  const char* const not_split = "it requires the split gate layout";
  const Ranks ranks{rank_of("lora.A1", lora.A1, "lora.B1", lora.B1),
                    rank_of("lora.A1_up", lora.A1_up, "lora.B1_up", lora.B1_up),
                    rank_of("lora.A2", lora.A2, "lora.B2", lora.B2)};
  if (!split(experts)) {
    check_absent("lora.A1_up", lora.A1_up, not_split);
    check_absent("lora.B1_up", lora.B1_up, not_split);
  }
  for (const auto& [name, rank] :
       {std::pair("lora.A1", ranks.gate), std::pair("lora.A1_up", ranks.up),
        std::pair("lora.A2", ranks.down)})
    TILEMOE_CHECK(rank >= 0 && rank % limits::kWidthMultiple == 0 && rank <= TILEMOE_MAX_RANK,
                  name << " has rank " << rank << ", expected a multiple of "
                       << limits::kWidthMultiple << ", at most " << TILEMOE_MAX_RANK);
  TILEMOE_CHECK(ranks.gate + ranks.up == experts.rank_1,
                "experts.rank_1 is " << experts.rank_1 << ", expected " << ranks.gate + ranks.up
                                     << ", the rank of W1's adapters");
  TILEMOE_CHECK(ranks.down == experts.rank_2, "experts.rank_2 is " << experts.rank_2
                                                                   << ", expected " << ranks.down
                                                                   << ", the rank of W2's adapter");
  const int64_t E = experts.E, d = experts.d, n = experts.n;
  check_factor("lora.A1", lora.A1, E, ranks.gate, d);
  check_factor("lora.B1", lora.B1, E, w1_rows(experts), ranks.gate);
  check_factor("lora.A1_up", lora.A1_up, E, ranks.up, d);
  check_factor("lora.B1_up", lora.B1_up, E, n, ranks.up);
  check_factor("lora.A2", lora.A2, E, ranks.down, n);
  check_factor("lora.B2", lora.B2, E, d, ranks.down);
  check_scale("lora.scale_1", lora.scale_1);
  check_scale("lora.scale_2", lora.scale_2);
  return ranks;
}

void check_packed_memory(const tilemoe_experts& experts, const void* memory, size_t bytes) {
  const size_t needed = PackedLayout(experts).total;
  TILEMOE_CHECK(bytes >= needed,
                "the packed adapters have " << bytes << " bytes, expected " << needed);
  TILEMOE_CHECK(needed == 0 || memory != nullptr,
                "the memory of the packed adapters is null, expected " << needed << " bytes");
  TILEMOE_CHECK(reinterpret_cast<uintptr_t>(memory) % limits::kAlignment == 0,
                "the memory of the packed adapters " << memory << " is not aligned to 16 bytes");
}

}  // namespace

size_t packed_lora_bytes(const tilemoe_experts* experts) {
  return PackedLayout(read_experts(experts)).total;
}

tilemoe_packed_lora bind_packed_lora(const tilemoe_experts* given_experts,
                                     const tilemoe_weights* given_weights, void* memory,
                                     size_t bytes, const tilemoe_packed_lora* given) {
  const tilemoe_experts experts = read_experts(given_experts);
  const tilemoe_weights weights = with_shapes(read_struct("weights", given_weights), experts);
  const tilemoe_packed_lora of_caller = read_struct("packed", given);
  check_packed_memory(experts, memory, bytes);
  tilemoe_packed_lora packed = packed_at(memory, experts, weights);
  packed.scale_1 = of_caller.scale_1, packed.scale_2 = of_caller.scale_2;
  packed.rank_gate = of_caller.rank_gate, packed.reserved = of_caller.reserved;
  return packed;
}

tilemoe_packed_lora pack_lora(const tilemoe_experts* given_experts,
                              const tilemoe_pack_lora_args* given) {
  const tilemoe_experts experts = read_experts(given_experts);
  const tilemoe_pack_lora_args args = read_struct("pack lora args", given);
  const tilemoe_lora lora = read_struct("lora", args.lora);
  const tilemoe_weights weights = with_shapes(read_struct("weights", args.weights), experts);
  const Ranks ranks = read_ranks(experts, lora);
  check_packed_memory(experts, args.memory, args.bytes);
  tilemoe_packed_lora packed = packed_at(args.memory, experts, weights);
  packed.scale_1 = lora.scale_1, packed.scale_2 = lora.scale_2;
  packed.rank_gate = split(experts) ? static_cast<int32_t>(ranks.gate) : 0;

  MemoryUse memory;
  memory.writes("the packed adapters", args.memory, PackedLayout(experts).total);
  memory.reads("lora.A1", lora.A1);
  memory.reads("lora.B1", lora.B1);
  memory.reads("lora.A1_up", lora.A1_up);
  memory.reads("lora.B1_up", lora.B1_up);
  memory.reads("lora.A2", lora.A2);
  memory.reads("lora.B2", lora.B2);
  memory.check();

  LoraPacking packing{};
  const auto copy = [&](const tilemoe_tensor& from, const tilemoe_tensor& to, float scale) {
    if (to.shape[1] > 0 && to.shape[2] > 0) packing.copy[packing.count++] = {from, to, scale};
  };
  if (experts.rank_1 > 0 && split(experts)) {
    // B1 of gate and up on the diagonal: each reads its own columns of P1.
    const int64_t n = experts.n;
    const auto columns = [&](int64_t row, int64_t first, int64_t count) {
      return slice(slice(packed.B1, 1, row, n), 2, first, count);
    };
    copy(lora.A1, slice(packed.A1, 1, 0, ranks.gate), 1.0f);
    copy(lora.A1_up, slice(packed.A1, 1, ranks.gate, ranks.up), 1.0f);
    copy(lora.B1, columns(0, 0, ranks.gate), lora.scale_1);
    copy({}, columns(0, ranks.gate, ranks.up), 1.0f);
    copy({}, columns(n, 0, ranks.gate), 1.0f);
    copy(lora.B1_up, columns(n, ranks.gate, ranks.up), lora.scale_1);
  } else if (experts.rank_1 > 0) {
    copy(lora.A1, packed.A1, 1.0f);
    const UpParts rows = columns_of_H(experts, weights.W1, lora.B1);
    for (int p = 0; p < rows.count; ++p)
      copy(rows.part[p], slice(packed.B1, 1, p * rows.columns, rows.columns), lora.scale_1);
  }
  if (experts.rank_2 > 0) {
    copy(lora.A2, packed.A2, 1.0f);
    copy(lora.B2, packed.B2, lora.scale_2);
  }
  if (packing.count > 0) backend_for(experts.device).pack_lora(experts, packing, args.stream);
  return packed;
}

}  // namespace tilemoe
