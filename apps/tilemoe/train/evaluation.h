// How well a model predicts a text that it was not trained on.
#pragma once

#include <cstdint>
#include <functional>
#include <numbers>
#include <span>

#include "train/model.h"

namespace tilemoe::train {

struct Evaluation {
  double loss = 0;  // mean over all bytes, nats
  double bits_per_byte() const { return loss / std::numbers::ln2; }
};

// Every byte of `text` is predicted once, from the bytes before it: at least `context` of them but
// at the beginning, at most the model's longest sequence. The first follows a line end. Routing is
// top-K. `go_on` is called now and then, with the part that is done, from 0 on; if it returns false
// the evaluation ends, and the result covers the text so far.
Evaluation evaluate(Model& model, std::span<const uint8_t> text, int64_t context,
                    const std::function<bool(double)>& go_on = {});

}  // namespace tilemoe::train
