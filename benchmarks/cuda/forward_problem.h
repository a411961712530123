// The three steps of the experts' forward pass on the device, with tensors and a random routing.
#pragma once

#include "step_bench.h"

namespace tilemoe {

class ForwardProblem {
 public:
  explicit ForwardProblem(const Config& c)
      : X_(bytes(c.T, c.d)),
        W1_(bytes(c.E * 2 * c.n, c.d)),
        W2_(bytes(c.E * c.d, c.n)),
        H_(bytes(c.T * c.K, 2 * c.n)),
        A_(bytes(c.T * c.K, c.n)),
        Y_(bytes(c.T * c.K, c.d)),
        O_(bytes(c.T, c.d)),
        offsets_(static_cast<size_t>(c.E + 1) * 4),
        tokens_(static_cast<size_t>(c.T * c.K) * 4),
        pair_row_(tokens_.bytes()),
        scores_(tokens_.bytes()) {
    const int64_t M = c.T * c.K;
    X_.fill(0.2), W1_.fill(0.02), W2_.fill(0.02);
    const RandomRouting random(c);
    offsets_.upload(random.offsets), tokens_.upload(random.tokens);
    pair_row_.upload(random.pair_row), scores_.upload(random.scores);

    experts_.struct_size = sizeof experts_;
    experts_.device = TILEMOE_CUDA;
    experts_.dtype = TILEMOE_BFLOAT16;
    experts_.d = c.d, experts_.n = c.n, experts_.E = c.E;
    routing_.spec.kind = TILEMOE_ROUTING_TOP_K;
    routing_.spec.T = c.T, routing_.spec.E = c.E, routing_.spec.K = c.K;
    routing_.spec.pairs = routing_.spec.capacity = M;
    routing_.offsets = static_cast<int32_t*>(offsets_.data());
    routing_.pair_row = static_cast<int32_t*>(pair_row_.data());
    routing_.row_score = static_cast<float*>(scores_.data());
    const Rows rows{.E = c.E,
                    .capacity = M,
                    .offsets = routing_.offsets,
                    .token = static_cast<const int32_t*>(tokens_.data()),
                    .score = nullptr};
    up.experts = down.experts = combine.experts = &experts_;
    up.rows = down.rows = rows;
    up.X = tensor(X_, {c.T, c.d});
    up.weights.W1 = tensor(W1_, {c.E, 2 * c.n, c.d});
    up.H = tensor(H_, {M, 2 * c.n});
    up.A = down.A = tensor(A_, {M, c.n});
    down.W2 = tensor(W2_, {c.E, c.d, c.n});
    down.Y = combine.row_values = tensor(Y_, {M, c.d});
    combine.routing = &routing_;
    combine.scale_by_score = true;
    combine.out = tensor(O_, {c.T, c.d});
  }

  // The up-projection from W1 stored (E, d, 2n), in a layout of gate and up.
  UpProjection transposed_up(tilemoe_gate_layout layout) {
    UpProjection step = up;
    transposed_experts_ = experts_;
    transposed_experts_.gate_layout = layout;
    step.experts = &transposed_experts_;
    const tilemoe_tensor& W1 = up.weights.W1;
    step.weights.W1.stride[1] = 1;
    step.weights.W1.stride[2] = W1.shape[1];
    return step;
  }
  // The up-projection of the grouped entry: rows sorted already.
  UpProjection grouped_up(const DeviceBuffer& rows) const {
    UpProjection step = up;
    step.rows.token = nullptr;
    step.X = tensor(rows, {up.rows.capacity, up.X.shape[1]});
    return step;
  }

  UpProjection up{};
  DownProjection down{};
  Combine combine{};

 private:
  static size_t bytes(int64_t rows, int64_t columns) {
    return static_cast<size_t>(rows * columns * 2);
  }

  DeviceBuffer X_, W1_, W2_, H_, A_, Y_, O_, offsets_, tokens_, pair_row_, scores_;
  tilemoe_experts experts_{}, transposed_experts_{};
  tilemoe_routing routing_{};
};

}  // namespace tilemoe
