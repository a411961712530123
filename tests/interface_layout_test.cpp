// The layout of version 0.2.0's structs, frozen: what stands here may be added to, at the ends of
// structs, and never changed. An edit of the header that moves a field fails here.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <string>

#include "check.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe {
namespace {

struct Field {
  const char* type;
  const char* name;
  size_t offset, bytes;            // now
  size_t offset_then, bytes_then;  // in 0.2.0
};
struct Layout {
  const char* type;
  size_t bytes, bytes_then;
};
#define FIELD(type, name, offset, bytes)                                  \
  Field {                                                                 \
#type, #name, offsetof(type, name), sizeof(type::name), offset, bytes \
  }
#define LAYOUT(type, bytes)    \
  Layout {                     \
#type, sizeof(type), bytes \
  }

constexpr Layout kLayouts[] = {
    LAYOUT(tilemoe_tensor, 64),
    LAYOUT(tilemoe_routing_spec, 80),
    LAYOUT(tilemoe_routing, 168),
    LAYOUT(tilemoe_top_k_args, 376),
    LAYOUT(tilemoe_top_k_scores_args, 288),
    LAYOUT(tilemoe_route_top_k_args, 160),
    LAYOUT(tilemoe_route_tokens_args, 448),
    LAYOUT(tilemoe_route_general_args, 224),
    LAYOUT(tilemoe_route_rounded_args, 288),
    LAYOUT(tilemoe_route_grouped_args, 144),
    LAYOUT(tilemoe_router_backward_args, 248),
    LAYOUT(tilemoe_router_losses_args, 304),
    LAYOUT(tilemoe_sum_rows_args, 232),
    LAYOUT(tilemoe_experts, 64),
    LAYOUT(tilemoe_weights, 392),
    LAYOUT(tilemoe_saved, 96),
    LAYOUT(tilemoe_saved_size, 40),
    LAYOUT(tilemoe_workspace_query, 40),
    LAYOUT(tilemoe_part, 48),
    LAYOUT(tilemoe_forward_args, 256),
    LAYOUT(tilemoe_backward_args, 400),
};

constexpr Field kFields[] = {
    FIELD(tilemoe_tensor, data, 0, 8),
    FIELD(tilemoe_tensor, dtype, 8, 4),
    FIELD(tilemoe_tensor, ndim, 12, 4),
    FIELD(tilemoe_tensor, shape, 16, 24),
    FIELD(tilemoe_tensor, stride, 40, 24),
    FIELD(tilemoe_routing_spec, struct_size, 0, 8),
    FIELD(tilemoe_routing_spec, device, 8, 4),
    FIELD(tilemoe_routing_spec, kind, 12, 4),
    FIELD(tilemoe_routing_spec, T, 16, 8),
    FIELD(tilemoe_routing_spec, E, 24, 8),
    FIELD(tilemoe_routing_spec, K, 32, 8),
    FIELD(tilemoe_routing_spec, pairs, 40, 8),
    FIELD(tilemoe_routing_spec, capacity, 48, 8),
    FIELD(tilemoe_routing_spec, m, 56, 8),
    FIELD(tilemoe_routing_spec, rounding, 64, 4),
    FIELD(tilemoe_routing_spec, reserved, 68, 4),
    FIELD(tilemoe_routing_spec, round_tokens, 72, 8),
    FIELD(tilemoe_routing, struct_size, 0, 8),
    FIELD(tilemoe_routing, offsets, 8, 8),
    FIELD(tilemoe_routing, counters, 16, 8),
    FIELD(tilemoe_routing, row_token, 24, 8),
    FIELD(tilemoe_routing, row_score, 32, 8),
    FIELD(tilemoe_routing, pair_row, 40, 8),
    FIELD(tilemoe_routing, token_offsets, 48, 8),
    FIELD(tilemoe_routing, reserved, 56, 32),
    FIELD(tilemoe_routing, spec, 88, 80),
    FIELD(tilemoe_top_k_args, struct_size, 0, 8),
    FIELD(tilemoe_top_k_args, device, 8, 4),
    FIELD(tilemoe_top_k_args, scoring, 12, 4),
    FIELD(tilemoe_top_k_args, K, 16, 8),
    FIELD(tilemoe_top_k_args, logits, 24, 64),
    FIELD(tilemoe_top_k_args, selection_bias, 88, 64),
    FIELD(tilemoe_top_k_args, ids, 152, 64),
    FIELD(tilemoe_top_k_args, scores, 216, 64),
    FIELD(tilemoe_top_k_args, expert_counts, 280, 64),
    FIELD(tilemoe_top_k_args, stream, 344, 8),
    FIELD(tilemoe_top_k_args, n_group, 352, 8),
    FIELD(tilemoe_top_k_args, topk_group, 360, 8),
    FIELD(tilemoe_top_k_args, group_score, 368, 4),
    FIELD(tilemoe_top_k_args, routed_scaling_factor, 372, 4),
    FIELD(tilemoe_top_k_scores_args, struct_size, 0, 8),
    FIELD(tilemoe_top_k_scores_args, device, 8, 4),
    FIELD(tilemoe_top_k_scores_args, scoring, 12, 4),
    FIELD(tilemoe_top_k_scores_args, routed_scaling_factor, 16, 4),
    FIELD(tilemoe_top_k_scores_args, reserved, 20, 4),
    FIELD(tilemoe_top_k_scores_args, logits, 24, 64),
    FIELD(tilemoe_top_k_scores_args, ids, 88, 64),
    FIELD(tilemoe_top_k_scores_args, scores, 152, 64),
    FIELD(tilemoe_top_k_scores_args, expert_counts, 216, 64),
    FIELD(tilemoe_top_k_scores_args, stream, 280, 8),
    FIELD(tilemoe_route_top_k_args, struct_size, 0, 8),
    FIELD(tilemoe_route_top_k_args, ids, 8, 64),
    FIELD(tilemoe_route_top_k_args, scores, 72, 64),
    FIELD(tilemoe_route_top_k_args, workspace, 136, 8),
    FIELD(tilemoe_route_top_k_args, workspace_bytes, 144, 8),
    FIELD(tilemoe_route_top_k_args, stream, 152, 8),
    FIELD(tilemoe_route_tokens_args, struct_size, 0, 8),
    FIELD(tilemoe_route_tokens_args, scoring, 8, 4),
    FIELD(tilemoe_route_tokens_args, logits_dtype, 12, 4),
    FIELD(tilemoe_route_tokens_args, X, 16, 64),
    FIELD(tilemoe_route_tokens_args, router_weight, 80, 64),
    FIELD(tilemoe_route_tokens_args, router_bias, 144, 64),
    FIELD(tilemoe_route_tokens_args, selection_bias, 208, 64),
    FIELD(tilemoe_route_tokens_args, logits, 272, 64),
    FIELD(tilemoe_route_tokens_args, expert_counts, 336, 64),
    FIELD(tilemoe_route_tokens_args, n_group, 400, 8),
    FIELD(tilemoe_route_tokens_args, topk_group, 408, 8),
    FIELD(tilemoe_route_tokens_args, group_score, 416, 4),
    FIELD(tilemoe_route_tokens_args, routed_scaling_factor, 420, 4),
    FIELD(tilemoe_route_tokens_args, workspace, 424, 8),
    FIELD(tilemoe_route_tokens_args, workspace_bytes, 432, 8),
    FIELD(tilemoe_route_tokens_args, stream, 440, 8),
    FIELD(tilemoe_route_general_args, struct_size, 0, 8),
    FIELD(tilemoe_route_general_args, tokens, 8, 64),
    FIELD(tilemoe_route_general_args, experts, 72, 64),
    FIELD(tilemoe_route_general_args, scores, 136, 64),
    FIELD(tilemoe_route_general_args, workspace, 200, 8),
    FIELD(tilemoe_route_general_args, workspace_bytes, 208, 8),
    FIELD(tilemoe_route_general_args, stream, 216, 8),
    FIELD(tilemoe_route_rounded_args, struct_size, 0, 8),
    FIELD(tilemoe_route_rounded_args, logits, 8, 64),
    FIELD(tilemoe_route_rounded_args, seed, 72, 64),
    FIELD(tilemoe_route_rounded_args, step, 136, 64),
    FIELD(tilemoe_route_rounded_args, expert_counts, 200, 64),
    FIELD(tilemoe_route_rounded_args, workspace, 264, 8),
    FIELD(tilemoe_route_rounded_args, workspace_bytes, 272, 8),
    FIELD(tilemoe_route_rounded_args, stream, 280, 8),
    FIELD(tilemoe_route_grouped_args, struct_size, 0, 8),
    FIELD(tilemoe_route_grouped_args, counts, 8, 64),
    FIELD(tilemoe_route_grouped_args, scores, 72, 64),
    FIELD(tilemoe_route_grouped_args, stream, 136, 8),
    FIELD(tilemoe_router_backward_args, struct_size, 0, 8),
    FIELD(tilemoe_router_backward_args, scoring, 8, 4),
    FIELD(tilemoe_router_backward_args, accumulate, 12, 4),
    FIELD(tilemoe_router_backward_args, routing, 16, 8),
    FIELD(tilemoe_router_backward_args, logits, 24, 64),
    FIELD(tilemoe_router_backward_args, ds, 88, 64),
    FIELD(tilemoe_router_backward_args, dlogits, 152, 64),
    FIELD(tilemoe_router_backward_args, workspace, 216, 8),
    FIELD(tilemoe_router_backward_args, workspace_bytes, 224, 8),
    FIELD(tilemoe_router_backward_args, stream, 232, 8),
    FIELD(tilemoe_router_backward_args, routed_scaling_factor, 240, 4),
    FIELD(tilemoe_router_backward_args, reserved, 244, 4),
    FIELD(tilemoe_router_losses_args, struct_size, 0, 8),
    FIELD(tilemoe_router_losses_args, device, 8, 4),
    FIELD(tilemoe_router_losses_args, balance_coefficient, 12, 4),
    FIELD(tilemoe_router_losses_args, z_coefficient, 16, 4),
    FIELD(tilemoe_router_losses_args, reserved, 20, 4),
    FIELD(tilemoe_router_losses_args, logits, 24, 64),
    FIELD(tilemoe_router_losses_args, expert_counts, 88, 64),
    FIELD(tilemoe_router_losses_args, losses, 152, 64),
    FIELD(tilemoe_router_losses_args, dlogits, 216, 64),
    FIELD(tilemoe_router_losses_args, workspace, 280, 8),
    FIELD(tilemoe_router_losses_args, workspace_bytes, 288, 8),
    FIELD(tilemoe_router_losses_args, stream, 296, 8),
    FIELD(tilemoe_sum_rows_args, struct_size, 0, 8),
    FIELD(tilemoe_sum_rows_args, device, 8, 4),
    FIELD(tilemoe_sum_rows_args, sources, 12, 4),
    FIELD(tilemoe_sum_rows_args, source, 16, 8),
    FIELD(tilemoe_sum_rows_args, source_rows, 24, 8),
    FIELD(tilemoe_sum_rows_args, place, 32, 64),
    FIELD(tilemoe_sum_rows_args, addend, 96, 64),
    FIELD(tilemoe_sum_rows_args, out, 160, 64),
    FIELD(tilemoe_sum_rows_args, stream, 224, 8),
    FIELD(tilemoe_experts, struct_size, 0, 8),
    FIELD(tilemoe_experts, device, 8, 4),
    FIELD(tilemoe_experts, dtype, 12, 4),
    FIELD(tilemoe_experts, d, 16, 8),
    FIELD(tilemoe_experts, n, 24, 8),
    FIELD(tilemoe_experts, E, 32, 8),
    FIELD(tilemoe_experts, activation, 40, 4),
    FIELD(tilemoe_experts, gate_layout, 44, 4),
    FIELD(tilemoe_experts, clamp, 48, 4),
    FIELD(tilemoe_experts, alpha, 52, 4),
    FIELD(tilemoe_experts, up_shift, 56, 4),
    FIELD(tilemoe_experts, column_blocks, 60, 4),
    FIELD(tilemoe_weights, struct_size, 0, 8),
    FIELD(tilemoe_weights, W1, 8, 64),
    FIELD(tilemoe_weights, W1_up, 72, 64),
    FIELD(tilemoe_weights, W2, 136, 64),
    FIELD(tilemoe_weights, b1, 200, 64),
    FIELD(tilemoe_weights, b1_up, 264, 64),
    FIELD(tilemoe_weights, b2, 328, 64),
    FIELD(tilemoe_saved, struct_size, 0, 8),
    FIELD(tilemoe_saved, H, 8, 64),
    FIELD(tilemoe_saved, dH, 72, 8),
    FIELD(tilemoe_saved, state, 80, 4),
    FIELD(tilemoe_saved, reserved, 84, 4),
    FIELD(tilemoe_saved, parts_tokens, 88, 8),
    FIELD(tilemoe_saved_size, struct_size, 0, 8),
    FIELD(tilemoe_saved_size, rows, 8, 8),
    FIELD(tilemoe_saved_size, H, 16, 8),
    FIELD(tilemoe_saved_size, routing, 24, 8),
    FIELD(tilemoe_saved_size, total, 32, 8),
    FIELD(tilemoe_workspace_query, struct_size, 0, 8),
    FIELD(tilemoe_workspace_query, experts, 8, 8),
    FIELD(tilemoe_workspace_query, routing, 16, 8),
    FIELD(tilemoe_workspace_query, pass, 24, 4),
    FIELD(tilemoe_workspace_query, mode, 28, 4),
    FIELD(tilemoe_workspace_query, gradients, 32, 4),
    FIELD(tilemoe_workspace_query, reserved, 36, 4),
    FIELD(tilemoe_part, struct_size, 0, 8),
    FIELD(tilemoe_part, begins, 8, 8),
    FIELD(tilemoe_part, ends, 16, 8),
    FIELD(tilemoe_part, first_token, 24, 8),
    FIELD(tilemoe_part, tokens, 32, 8),
    FIELD(tilemoe_part, last, 40, 4),
    FIELD(tilemoe_part, reserved, 44, 4),
    FIELD(tilemoe_forward_args, struct_size, 0, 8),
    FIELD(tilemoe_forward_args, routing, 8, 8),
    FIELD(tilemoe_forward_args, weights, 16, 8),
    FIELD(tilemoe_forward_args, X, 24, 64),
    FIELD(tilemoe_forward_args, O, 88, 64),
    FIELD(tilemoe_forward_args, addend, 152, 64),
    FIELD(tilemoe_forward_args, saved, 216, 8),
    FIELD(tilemoe_forward_args, workspace, 224, 8),
    FIELD(tilemoe_forward_args, workspace_bytes, 232, 8),
    FIELD(tilemoe_forward_args, stream, 240, 8),
    FIELD(tilemoe_forward_args, block_turns, 248, 4),
    FIELD(tilemoe_forward_args, reserved, 252, 4),
    FIELD(tilemoe_forward_args, part, 256, 8),
    FIELD(tilemoe_backward_args, struct_size, 0, 8),
    FIELD(tilemoe_backward_args, mode, 8, 4),
    FIELD(tilemoe_backward_args, accumulate, 12, 4),
    FIELD(tilemoe_backward_args, routing, 16, 8),
    FIELD(tilemoe_backward_args, weights, 24, 8),
    FIELD(tilemoe_backward_args, X, 32, 64),
    FIELD(tilemoe_backward_args, dO, 96, 64),
    FIELD(tilemoe_backward_args, saved, 160, 8),
    FIELD(tilemoe_backward_args, dX, 168, 64),
    FIELD(tilemoe_backward_args, addend, 232, 64),
    FIELD(tilemoe_backward_args, dweights, 296, 8),
    FIELD(tilemoe_backward_args, ds, 304, 64),
    FIELD(tilemoe_backward_args, workspace, 368, 8),
    FIELD(tilemoe_backward_args, workspace_bytes, 376, 8),
    FIELD(tilemoe_backward_args, stream, 384, 8),
    FIELD(tilemoe_backward_args, block_turns, 392, 4),
    FIELD(tilemoe_backward_args, reserved, 396, 4),
    FIELD(tilemoe_backward_args, part, 400, 8),
};

TEST(InterfaceLayout, FieldsStandWhereTheyStood) {
  for (const Field& field : kFields) {
    EXPECT_EQ(field.offset, field.offset_then) << field.type << "." << field.name;
    // A spec may grow within a routing, at whose end it stands.
    const bool last = std::string(field.name) == "spec";
    EXPECT_TRUE(last ? field.bytes >= field.bytes_then : field.bytes == field.bytes_then)
        << field.type << "." << field.name;
  }
}

TEST(InterfaceLayout, StructsOnlyGrow) {
  for (const Layout& layout : kLayouts) EXPECT_GE(layout.bytes, layout.bytes_then) << layout.type;
  EXPECT_EQ(sizeof(tilemoe_tensor), 64u);
}

// A field that is appended must not land in what older callers have as padding, which is garbage:
// so no struct has any, at its end or between fields.
TEST(InterfaceLayout, HasNoPadding) {
  std::map<std::string, size_t> end;
  for (const Field& field : kFields) {
    EXPECT_EQ(field.offset, end[field.type]) << "before " << field.type << "." << field.name;
    end[field.type] = field.offset + field.bytes;
  }
  for (const Layout& layout : kLayouts) EXPECT_EQ(end[layout.type], layout.bytes) << layout.type;
}

TEST(InterfaceLayout, StructSizeStandsFirst) {
  for (const Layout& layout : kLayouts) {
    if (std::string(layout.type) == "tilemoe_tensor") continue;
    const auto* const first =
        std::find_if(std::begin(kFields), std::end(kFields),
                     [&](const Field& field) { return std::string(field.type) == layout.type; });
    EXPECT_STREQ(first->name, "struct_size") << layout.type;
    EXPECT_EQ(first->offset, 0u);
    EXPECT_EQ(first->bytes, sizeof(uint64_t));
  }
}

// The least sizes that are taken are part of the interface too.
TEST(InterfaceLayout, LeastSizes) {
  EXPECT_EQ(kLeastBytes<tilemoe_routing_spec>, 56u);
  EXPECT_EQ(kLeastBytes<tilemoe_routing>, 88u + 56u);
  EXPECT_EQ(kLeastBytes<tilemoe_top_k_args>, 344u);
  EXPECT_EQ(kLeastBytes<tilemoe_top_k_scores_args>, 280u);
  EXPECT_EQ(kLeastBytes<tilemoe_route_top_k_args>, 152u);
  EXPECT_EQ(kLeastBytes<tilemoe_route_tokens_args>, 440u);
  EXPECT_EQ(kLeastBytes<tilemoe_route_general_args>, 216u);
  EXPECT_EQ(kLeastBytes<tilemoe_route_rounded_args>, 280u);
  EXPECT_EQ(kLeastBytes<tilemoe_route_grouped_args>, 136u);
  EXPECT_EQ(kLeastBytes<tilemoe_router_backward_args>, 232u);
  EXPECT_EQ(kLeastBytes<tilemoe_router_losses_args>, 296u);
  EXPECT_EQ(kLeastBytes<tilemoe_sum_rows_args>, 224u);
  EXPECT_EQ(kLeastBytes<tilemoe_experts>, 48u);
  EXPECT_EQ(kLeastBytes<tilemoe_weights>, 200u);
  EXPECT_EQ(kLeastBytes<tilemoe_saved>, 88u);
  EXPECT_EQ(kLeastBytes<tilemoe_saved_size>, 32u);
  EXPECT_EQ(kLeastBytes<tilemoe_workspace_query>, 32u);
  EXPECT_EQ(kLeastBytes<tilemoe_forward_args>, 248u);
  EXPECT_EQ(kLeastBytes<tilemoe_backward_args>, 392u);
}

// Numbers of enums are what callers have compiled in.
TEST(InterfaceLayout, NumbersOfEnums) {
  EXPECT_EQ(TILEMOE_INTERNAL_ERROR, 4);
  EXPECT_EQ(TILEMOE_INT64, 4);
  EXPECT_EQ(TILEMOE_CUDA, 1);
  EXPECT_EQ(TILEMOE_ROUTING_GROUPED, 3);
  EXPECT_EQ(TILEMOE_ROUND_BALANCED, 4);
  EXPECT_EQ(TILEMOE_COUNT_NAN_TOKENS, 2);
  EXPECT_EQ(TILEMOE_COUNT_DROPPED, 3);
  EXPECT_EQ(TILEMOE_COUNTERS, 4);
  EXPECT_EQ(TILEMOE_SIGMOID_RENORMALIZED, 4);
  EXPECT_EQ(TILEMOE_REGLU, 3);
  EXPECT_EQ(TILEMOE_IDENTITY, 9);
  EXPECT_EQ(TILEMOE_GATE_SPLIT, 2);
  EXPECT_EQ(TILEMOE_PASS_BACKWARD, 2);
  EXPECT_EQ(TILEMOE_BACKWARD_OVER_H, 1);
  EXPECT_EQ(TILEMOE_BACKWARD_FIRST, 2);
  EXPECT_EQ(TILEMOE_BACKWARD_REST, 3);
  EXPECT_EQ(TILEMOE_SAVED_DH_OVER_H, 2);
  EXPECT_EQ(TILEMOE_GRADIENT_B2, 128);
}

// ------------------------------------------------- a library that is newer

// What 0.2.0 might have had, and a version after it that appended a field.
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

TEST(GrownStruct, OfANewerCallerIsTakenWhereItAsksForNothingNew) {
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
                              uint64_t{kMostStructBytes} + 8, UINT64_MAX}) {
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
