#include "train/ops/attention_head.h"
#include "train/ops/cpu_operators.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "train/ops/attention.cpp"
#include <hwy/foreach_target.h>

#include "train/ops/attention_kernel-inl.h"

#if HWY_ONCE
namespace tilemoe::train {

HWY_EXPORT(head_forward);
HWY_EXPORT(head_backward);

namespace {

AttentionHead head_of(const AttentionShape& shape) {
  return {.length = shape.sequences.length, .width = shape.head_width, .heads = shape.heads};
}

// body(head index, offset in qkv, offset in out, offset in log_sum, scratch), a task a head of a
// sequence.
template <class Body>
void for_heads(const AttentionShape& shape, Floats scratch, Body&& body) {
  const int64_t per_worker = attention_worker_scratch(shape);
  const int64_t length = shape.sequences.length;
  parallel_for(shape.sequences.count * shape.heads, [&](int64_t task, int worker) {
    const int64_t sequence = task / shape.heads, h = task % shape.heads;
    const int64_t column = h * shape.head_width;
    body(h, sequence * length * 3 * shape.width() + column,
         sequence * length * shape.width() + column, task * length,
         scratch.data() + worker * per_worker);
  });
}

}  // namespace

int64_t attention_worker_scratch(const AttentionShape& shape) {
  const int64_t padded = head_of(shape).padded_length(), width = shape.head_width;
  return 5 * padded * width + kQueries * (2 * padded + 3 * width);
}

void CpuOperators::attention(const AttentionShape& shape, ConstFloats slopes, ConstFloats qkv,
                             Floats out, Floats log_sum, Floats scratch) {
  for_heads(shape, scratch,
            [&](int64_t h, int64_t in_qkv, int64_t in_out, int64_t in_log_sum, float* mine) {
              HWY_DYNAMIC_DISPATCH(head_forward)
              (head_of(shape), slopes[static_cast<size_t>(h)], qkv.data() + in_qkv,
               out.data() + in_out, log_sum.data() + in_log_sum, mine);
            });
}

void CpuOperators::attention_backward(const AttentionShape& shape, ConstFloats slopes,
                                      ConstFloats qkv, ConstFloats out, ConstFloats log_sum,
                                      ConstFloats dout, Floats dqkv, Floats scratch) {
  for_heads(shape, scratch,
            [&](int64_t h, int64_t in_qkv, int64_t in_out, int64_t in_log_sum, float* mine) {
              HWY_DYNAMIC_DISPATCH(head_backward)
              (head_of(shape), slopes[static_cast<size_t>(h)], qkv.data() + in_qkv,
               out.data() + in_out, log_sum.data() + in_log_sum, dout.data() + in_out,
               dqkv.data() + in_qkv, mine);
            });
}

}  // namespace tilemoe::train
#endif
