// The frozen layout of version 0.2.0's structs: fields may be appended to structs, and nothing may
// be changed. An edit of the header that moves a field fails here.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "core/check.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe {
namespace {

struct Field {
  const char* name;
  size_t offset, bytes;  // now
  size_t bytes_then;     // in 0.2.0, in which a field begins where the one before it ends
};
struct Layout {
  const char* type;
  size_t bytes, bytes_then;
  size_t min_bytes,
      min_then;  // that are taken, part of the interface too; 0: it has no struct_size
  std::vector<Field> fields;
};
#define FIELD(name, bytes_then)                                     \
  Field {                                                           \
#name, offsetof(Struct, name), sizeof(Struct::name), bytes_then \
  }
#define STRUCT(type, bytes_then, min_then, ...)                                                 \
  [] {                                                                                          \
    using Struct = type;                                                                        \
    return Layout{#type, sizeof(type), bytes_then, min_bytes<type>(), min_then, {__VA_ARGS__}}; \
  }()

// Frozen: part of other structs by value, without a size.
template <class Struct>
constexpr bool kFrozen =
    std::is_same_v<Struct, tilemoe_tensor> || std::is_same_v<Struct, tilemoe_quantized>;

template <class Struct>
constexpr size_t min_bytes() {
  if constexpr (kFrozen<Struct>)
    return 0;
  else
    return kMinBytes<Struct>;
}

std::vector<Layout> layouts() {
  return {
      STRUCT(tilemoe_tensor, 64, 0, FIELD(data, 8), FIELD(dtype, 4), FIELD(ndim, 4),
             FIELD(shape, 24), FIELD(stride, 24)),
      STRUCT(tilemoe_routing_spec, 80, 56, FIELD(struct_size, 8), FIELD(device, 4), FIELD(kind, 4),
             FIELD(T, 8), FIELD(E, 8), FIELD(K, 8), FIELD(pairs, 8), FIELD(capacity, 8),
             FIELD(m, 8), FIELD(rounding, 4), FIELD(reserved, 4), FIELD(round_tokens, 8)),
      STRUCT(tilemoe_routing, 168, 144, FIELD(struct_size, 8), FIELD(offsets, 8),
             FIELD(counters, 8), FIELD(row_token, 8), FIELD(row_score, 8), FIELD(pair_row, 8),
             FIELD(token_offsets, 8), FIELD(reserved, 32), FIELD(spec, 80)),
      STRUCT(tilemoe_top_k_args, 376, 344, FIELD(struct_size, 8), FIELD(device, 4),
             FIELD(scoring, 4), FIELD(K, 8), FIELD(logits, 64), FIELD(selection_bias, 64),
             FIELD(ids, 64), FIELD(scores, 64), FIELD(expert_counts, 64), FIELD(stream, 8),
             FIELD(n_group, 8), FIELD(topk_group, 8), FIELD(group_score, 4),
             FIELD(routed_scaling_factor, 4)),
      STRUCT(tilemoe_top_k_scores_args, 288, 280, FIELD(struct_size, 8), FIELD(device, 4),
             FIELD(scoring, 4), FIELD(routed_scaling_factor, 4), FIELD(reserved, 4),
             FIELD(logits, 64), FIELD(ids, 64), FIELD(scores, 64), FIELD(expert_counts, 64),
             FIELD(stream, 8)),
      STRUCT(tilemoe_route_top_k_args, 160, 152, FIELD(struct_size, 8), FIELD(ids, 64),
             FIELD(scores, 64), FIELD(workspace, 8), FIELD(workspace_bytes, 8), FIELD(stream, 8)),
      STRUCT(tilemoe_route_tokens_args, 448, 440, FIELD(struct_size, 8), FIELD(scoring, 4),
             FIELD(logits_dtype, 4), FIELD(X, 64), FIELD(router_weight, 64), FIELD(router_bias, 64),
             FIELD(selection_bias, 64), FIELD(logits, 64), FIELD(expert_counts, 64),
             FIELD(n_group, 8), FIELD(topk_group, 8), FIELD(group_score, 4),
             FIELD(routed_scaling_factor, 4), FIELD(workspace, 8), FIELD(workspace_bytes, 8),
             FIELD(stream, 8)),
      STRUCT(tilemoe_router_logits_args, 296, 288, FIELD(struct_size, 8), FIELD(device, 4),
             FIELD(reserved, 4), FIELD(X, 64), FIELD(weight, 64), FIELD(bias, 64),
             FIELD(logits, 64), FIELD(workspace, 8), FIELD(workspace_bytes, 8), FIELD(stream, 8)),
      STRUCT(tilemoe_route_general_args, 224, 216, FIELD(struct_size, 8), FIELD(tokens, 64),
             FIELD(experts, 64), FIELD(scores, 64), FIELD(workspace, 8), FIELD(workspace_bytes, 8),
             FIELD(stream, 8)),
      STRUCT(tilemoe_route_rounded_args, 288, 280, FIELD(struct_size, 8), FIELD(logits, 64),
             FIELD(seed, 64), FIELD(step, 64), FIELD(expert_counts, 64), FIELD(workspace, 8),
             FIELD(workspace_bytes, 8), FIELD(stream, 8)),
      STRUCT(tilemoe_route_grouped_args, 144, 136, FIELD(struct_size, 8), FIELD(counts, 64),
             FIELD(scores, 64), FIELD(stream, 8)),
      STRUCT(tilemoe_router_backward_args, 248, 232, FIELD(struct_size, 8), FIELD(scoring, 4),
             FIELD(accumulate, 4), FIELD(routing, 8), FIELD(logits, 64), FIELD(ds, 64),
             FIELD(dlogits, 64), FIELD(workspace, 8), FIELD(workspace_bytes, 8), FIELD(stream, 8),
             FIELD(routed_scaling_factor, 4), FIELD(reserved, 4)),
      STRUCT(tilemoe_router_losses_args, 304, 296, FIELD(struct_size, 8), FIELD(device, 4),
             FIELD(balance_coefficient, 4), FIELD(z_coefficient, 4), FIELD(reserved, 4),
             FIELD(logits, 64), FIELD(expert_counts, 64), FIELD(losses, 64), FIELD(dlogits, 64),
             FIELD(workspace, 8), FIELD(workspace_bytes, 8), FIELD(stream, 8)),
      STRUCT(tilemoe_sum_rows_args, 232, 224, FIELD(struct_size, 8), FIELD(device, 4),
             FIELD(sources, 4), FIELD(source, 8), FIELD(source_rows, 8), FIELD(place, 64),
             FIELD(addend, 64), FIELD(out, 64), FIELD(stream, 8)),
      STRUCT(tilemoe_experts, 104, 48, FIELD(struct_size, 8), FIELD(device, 4), FIELD(dtype, 4),
             FIELD(d, 8), FIELD(n, 8), FIELD(E, 8), FIELD(activation, 4), FIELD(gate_layout, 4),
             FIELD(clamp, 4), FIELD(alpha, 4), FIELD(up_shift, 4), FIELD(column_blocks, 4),
             FIELD(rank_1, 4), FIELD(rank_2, 4), FIELD(format_1, 4), FIELD(format_2, 4),
             FIELD(weight_blocks, 4), FIELD(reserved, 4), FIELD(recipe, 4), FIELD(float_scales, 4),
             FIELD(format_H, 4), FIELD(reserved_2, 4)),
      STRUCT(tilemoe_quantized, 48, 0, FIELD(format, 4), FIELD(transposed, 4), FIELD(codes, 8),
             FIELD(scales, 8), FIELD(scale_map, 8), FIELD(scale_of_scales, 8),
             FIELD(scale_offset, 8)),
      STRUCT(tilemoe_quantized_weights, 296, 152, FIELD(struct_size, 8), FIELD(W1, 48),
             FIELD(W1_up, 48), FIELD(W2, 48), FIELD(W1_transposed, 48), FIELD(W1_up_transposed, 48),
             FIELD(W2_transposed, 48)),
      STRUCT(tilemoe_dequantize_args, 136, 128, FIELD(struct_size, 8), FIELD(device, 4),
             FIELD(reserved, 4), FIELD(weight, 48), FIELD(out, 64), FIELD(stream, 8)),
      STRUCT(tilemoe_quantize_fp8_args, 136, 112, FIELD(struct_size, 8), FIELD(device, 4),
             FIELD(block_rows, 4), FIELD(float_scales, 4), FIELD(reserved, 4), FIELD(part_rows, 8),
             FIELD(values, 64), FIELD(codes, 8), FIELD(scales, 8), FIELD(stream, 8),
             FIELD(transposed_codes, 8), FIELD(transposed_scales, 8)),
      STRUCT(tilemoe_weights, 392, 200, FIELD(struct_size, 8), FIELD(W1, 64), FIELD(W1_up, 64),
             FIELD(W2, 64), FIELD(b1, 64), FIELD(b1_up, 64), FIELD(b2, 64)),
      STRUCT(tilemoe_lora, 400, 392, FIELD(struct_size, 8), FIELD(A1, 64), FIELD(B1, 64),
             FIELD(A1_up, 64), FIELD(B1_up, 64), FIELD(A2, 64), FIELD(B2, 64), FIELD(scale_1, 4),
             FIELD(scale_2, 4)),
      STRUCT(tilemoe_packed_lora, 280, 264, FIELD(struct_size, 8), FIELD(A1, 64), FIELD(B1, 64),
             FIELD(A2, 64), FIELD(B2, 64), FIELD(scale_1, 4), FIELD(scale_2, 4),
             FIELD(rank_gate, 4), FIELD(reserved, 4)),
      STRUCT(tilemoe_pack_lora_args, 48, 40, FIELD(struct_size, 8), FIELD(lora, 8),
             FIELD(weights, 8), FIELD(memory, 8), FIELD(bytes, 8), FIELD(stream, 8)),
      STRUCT(tilemoe_saved, 240, 88, FIELD(struct_size, 8), FIELD(H, 64), FIELD(dH, 8),
             FIELD(state, 4), FIELD(reserved, 4), FIELD(parts_tokens, 8), FIELD(P1, 64),
             FIELD(P2, 64), FIELD(H_codes, 8), FIELD(H_scales, 8)),
      STRUCT(tilemoe_saved_size, 64, 32, FIELD(struct_size, 8), FIELD(rows, 8), FIELD(H, 8),
             FIELD(routing, 8), FIELD(total, 8), FIELD(P1, 8), FIELD(P2, 8), FIELD(H_scales, 8)),
      STRUCT(tilemoe_workspace_query, 48, 32, FIELD(struct_size, 8), FIELD(experts, 8),
             FIELD(routing, 8), FIELD(pass, 4), FIELD(mode, 4), FIELD(gradients, 4),
             FIELD(cuda_sms, 4), FIELD(cuda_arch, 8)),
      STRUCT(tilemoe_part, 48, 48, FIELD(struct_size, 8), FIELD(begins, 8), FIELD(ends, 8),
             FIELD(first_token, 8), FIELD(tokens, 8), FIELD(last, 4), FIELD(reserved, 4)),
      STRUCT(tilemoe_forward_args, 288, 248, FIELD(struct_size, 8), FIELD(routing, 8),
             FIELD(weights, 8), FIELD(X, 64), FIELD(O, 64), FIELD(addend, 64), FIELD(saved, 8),
             FIELD(workspace, 8), FIELD(workspace_bytes, 8), FIELD(stream, 8),
             FIELD(block_turns, 4), FIELD(dry_run, 4), FIELD(part, 8), FIELD(lora, 8),
             FIELD(quantized, 8), FIELD(X_codes, 8), FIELD(X_scales, 8)),
      STRUCT(tilemoe_backward_args, 424, 392, FIELD(struct_size, 8), FIELD(mode, 4),
             FIELD(accumulate, 4), FIELD(routing, 8), FIELD(weights, 8), FIELD(X, 64),
             FIELD(dO, 64), FIELD(saved, 8), FIELD(dX, 64), FIELD(addend, 64), FIELD(dweights, 8),
             FIELD(ds, 64), FIELD(workspace, 8), FIELD(workspace_bytes, 8), FIELD(stream, 8),
             FIELD(block_turns, 4), FIELD(dry_run, 4), FIELD(part, 8), FIELD(lora, 8),
             FIELD(dlora, 8), FIELD(quantized, 8)),
      STRUCT(tilemoe_gathered_mm_args, 304, 296, FIELD(struct_size, 8), FIELD(routing, 8),
             FIELD(X, 64), FIELD(W, 64), FIELD(b, 64), FIELD(H, 64), FIELD(workspace, 8),
             FIELD(workspace_bytes, 8), FIELD(stream, 8), FIELD(block_turns, 4),
             FIELD(reserved, 4)),
      STRUCT(tilemoe_gathered_mm_backward_args, 496, 488, FIELD(struct_size, 8), FIELD(routing, 8),
             FIELD(X, 64), FIELD(W, 64), FIELD(dH, 64), FIELD(dX, 64), FIELD(addend, 64),
             FIELD(dW, 64), FIELD(db, 64), FIELD(workspace, 8), FIELD(workspace_bytes, 8),
             FIELD(stream, 8), FIELD(block_turns, 4), FIELD(accumulate, 4)),
      STRUCT(tilemoe_combine_mm_args, 368, 360, FIELD(struct_size, 8), FIELD(routing, 8),
             FIELD(A, 64), FIELD(W, 64), FIELD(b, 64), FIELD(O, 64), FIELD(addend, 64),
             FIELD(workspace, 8), FIELD(workspace_bytes, 8), FIELD(stream, 8),
             FIELD(block_turns, 4), FIELD(reserved, 4)),
      STRUCT(tilemoe_combine_mm_backward_args, 560, 552, FIELD(struct_size, 8), FIELD(routing, 8),
             FIELD(A, 64), FIELD(W, 64), FIELD(b, 64), FIELD(dO, 64), FIELD(dA, 64), FIELD(ds, 64),
             FIELD(dW, 64), FIELD(db, 64), FIELD(workspace, 8), FIELD(workspace_bytes, 8),
             FIELD(stream, 8), FIELD(block_turns, 4), FIELD(accumulate, 4)),
      STRUCT(tilemoe_mm_workspace_query, 32, 28, FIELD(struct_size, 8), FIELD(experts, 8),
             FIELD(routing, 8), FIELD(mm, 4), FIELD(gradients, 4)),
  };
}

TEST(InterfaceLayout, FieldsKeepTheirOffsets) {
  for (const Layout& layout : layouts()) {
    size_t offset_then = 0;
    for (const Field& field : layout.fields) {
      EXPECT_EQ(field.offset, offset_then) << layout.type << "." << field.name;
      offset_then += field.bytes_then;
      // A spec may grow within a routing, in which it is last.
      const bool last = std::string(field.name) == "spec";
      EXPECT_TRUE(last ? field.bytes >= field.bytes_then : field.bytes == field.bytes_then)
          << layout.type << "." << field.name;
    }
  }
}

TEST(InterfaceLayout, StructsOnlyGrow) {
  for (const Layout& layout : layouts()) EXPECT_GE(layout.bytes, layout.bytes_then) << layout.type;
  EXPECT_EQ(sizeof(tilemoe_tensor), 64u);
  EXPECT_EQ(sizeof(tilemoe_quantized), 48u);
}

// An appended field must not lie in the padding of older callers, which is garbage: so no struct
// has padding, at its end or between fields.
TEST(InterfaceLayout, HasNoPadding) {
  for (const Layout& layout : layouts()) {
    size_t end = 0;
    for (const Field& field : layout.fields) {
      EXPECT_EQ(field.offset, end) << "before " << layout.type << "." << field.name;
      end = field.offset + field.bytes;
    }
    EXPECT_EQ(end, layout.bytes) << layout.type;
  }
}

TEST(InterfaceLayout, StructSizeIsFirst) {
  for (const Layout& layout : layouts()) {
    if (layout.min_bytes == 0) continue;
    EXPECT_STREQ(layout.fields[0].name, "struct_size") << layout.type;
    EXPECT_EQ(layout.fields[0].offset, 0u);
    EXPECT_EQ(layout.fields[0].bytes, sizeof(uint64_t));
  }
}

TEST(InterfaceLayout, MinimumSizes) {
  for (const Layout& layout : layouts())
    EXPECT_EQ(layout.min_bytes, layout.min_then) << layout.type;
}

// Callers have the numbers of enums compiled in.
TEST(InterfaceLayout, NumbersOfEnums) {
  EXPECT_EQ(TILEMOE_INTERNAL_ERROR, 4);
  EXPECT_EQ(TILEMOE_INT64, 4);
  EXPECT_EQ(TILEMOE_CUDA, 1);
  EXPECT_EQ(TILEMOE_ROUTING_GROUPED, 3);
  EXPECT_EQ(TILEMOE_ROUND_BALANCED, 4);
  EXPECT_EQ(TILEMOE_COUNT_NAN_TOKENS, 2);
  EXPECT_EQ(TILEMOE_COUNT_DROPPED, 3);
  EXPECT_EQ(TILEMOE_COUNTERS, 4);
  EXPECT_EQ(TILEMOE_ROUTING_SIZE_CAPACITY, 4);
  EXPECT_EQ(TILEMOE_ROUTING_ARRAYS, 6);
  EXPECT_EQ(TILEMOE_SIGMOID_RENORMALIZED, 4);
  EXPECT_EQ(TILEMOE_REGLU, 3);
  EXPECT_EQ(TILEMOE_IDENTITY, 9);
  EXPECT_EQ(TILEMOE_GATE_SPLIT, 2);
  EXPECT_EQ(TILEMOE_FORMAT_NONE, 0);
  EXPECT_EQ(TILEMOE_FORMAT_FP8, 1);
  EXPECT_EQ(TILEMOE_FORMAT_MXFP4, 2);
  EXPECT_EQ(TILEMOE_FORMAT_NF4, 3);
  EXPECT_EQ(TILEMOE_FORMAT_NF4_DOUBLE, 4);
  EXPECT_EQ(TILEMOE_FORMAT_NVFP4, 5);
  EXPECT_EQ(TILEMOE_PASS_BACKWARD, 2);
  EXPECT_EQ(TILEMOE_BACKWARD_OVER_H, 1);
  EXPECT_EQ(TILEMOE_BACKWARD_FIRST, 2);
  EXPECT_EQ(TILEMOE_BACKWARD_REST, 3);
  EXPECT_EQ(TILEMOE_SAVED_DH_OVER_H, 2);
  EXPECT_EQ(TILEMOE_COMBINE_MM_BACKWARD, 3);
  EXPECT_EQ(TILEMOE_GRADIENT_A, 1024);
  EXPECT_EQ(TILEMOE_GRADIENT_B2, 128);
  EXPECT_EQ(TILEMOE_GRADIENT_LORA_1, 256);
  EXPECT_EQ(TILEMOE_GRADIENT_LORA_2, 512);
}

// ------------------------------------------------- a library that is newer

// A struct as of 0.2.0, and of a later version that appended a field.
struct Then {
  uint64_t struct_size = sizeof(Then);
  int64_t a = 0;
};
struct Now {
  uint64_t struct_size = sizeof(Now);
  int64_t a = 0, appended = 0;
};

TEST(GrownStruct, OfAnOlderCallerLacksNothingButTheNewField) {
  Then then[2];
  then[0].a = 5, then[1].struct_size = 77, then[1].a = 78;  // no part of the first
  const Now now = read_struct("x", reinterpret_cast<const Now*>(then), sizeof(Then));
  EXPECT_EQ(now.a, 5);
  EXPECT_EQ(now.appended, 0);
  EXPECT_EQ(now.struct_size, sizeof(Now));
}

TEST(GrownStruct, OfAnOlderCallerIsNotWrittenPast) {
  Then then[2];
  then[1].struct_size = 77, then[1].a = 78;
  Now value;
  value.a = 6, value.appended = 7;
  write_struct("x", reinterpret_cast<Now*>(then), value, sizeof(Then));
  EXPECT_EQ(then[0].a, 6);
  EXPECT_EQ(then[0].struct_size, sizeof(Then));
  EXPECT_EQ(then[1].struct_size, 77u);
  EXPECT_EQ(then[1].a, 78);
}

TEST(GrownStruct, OfANewerCallerIsAcceptedIfNewFieldsAreZero) {
  Now now;
  now.a = 5;
  EXPECT_EQ(read_struct("x", reinterpret_cast<const Then*>(&now)).a, 5);
  now.appended = 1;
  EXPECT_THROW(read_struct("x", reinterpret_cast<const Then*>(&now)), Error);
  Then value;
  value.a = 9;
  write_struct("x", reinterpret_cast<Then*>(&now), value);
  EXPECT_EQ(now.a, 9);
  EXPECT_EQ(now.appended, 0) << "what the library does not know of is zeroed";
}

TEST(GrownStruct, SizesThatWereNeverSetAreRefused) {
  Now now;
  for (const uint64_t size : {uint64_t{0}, uint64_t{8}, uint64_t{15}, uint64_t{17},
                              uint64_t{kMaxStructBytes} + 8, UINT64_MAX}) {
    now.struct_size = size;
    EXPECT_THROW(read_struct("x", &now, sizeof(Then)), Error) << size;
    EXPECT_THROW(write_struct("x", &now, Now{}, sizeof(Then)), Error) << size;
    EXPECT_EQ(now.struct_size, size);
  }
  EXPECT_THROW(read_struct<Now>("x", nullptr), Error);
  EXPECT_THROW(write_struct<Now>("x", nullptr, Now{}), Error);
}

}  // namespace
}  // namespace tilemoe
