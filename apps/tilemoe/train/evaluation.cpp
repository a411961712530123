#include "train/evaluation.h"

#include <algorithm>
#include <vector>

namespace tilemoe::train {
namespace {

// Windows of the model's length, one after each `stride` bytes. Place p of window w predicts byte
// w * stride + p of the text from those before it.
class Windows {
 public:
  Windows(const Model& model, std::span<const uint8_t> text, int64_t context)
      : text_(text),
        length_(model.capacity().length),
        past_(model.past()),
        context_(context),
        inputs_(static_cast<size_t>(model.capacity().count * (past_ + length_))),
        targets_(static_cast<size_t>(model.capacity().tokens())) {}

  int64_t count() const {
    return 1 + std::max<int64_t>(0, ceil_div(std::ssize(text_) - length_, stride()));
  }

  void fill(int64_t first, int64_t windows) {
    for (int64_t w = 0; w < windows; ++w) {
      const int64_t start = (first + w) * stride();
      for (int64_t i = 0; i < past_ + length_; ++i)
        inputs_[static_cast<size_t>(w * (past_ + length_) + i)] = byte_before(start + i - past_);
      for (int64_t p = 0; p < length_; ++p)
        targets_[static_cast<size_t>(w * length_ + p)] = byte_before(start + p + 1);
    }
  }
  ConstBytes inputs(int64_t windows) const {
    return ConstBytes(inputs_).first(static_cast<size_t>(windows * (past_ + length_)));
  }
  ConstBytes targets(int64_t windows) const {
    return ConstBytes(targets_).first(static_cast<size_t>(windows * length_));
  }

  // Whether a window counts its loss at a place: the window before it has counted the places that
  // both have, and past the text nothing is counted.
  bool counts(int64_t window, int64_t place) const {
    return (window == 0 || place >= context_) && window * stride() + place < std::ssize(text_);
  }

 private:
  int64_t stride() const { return length_ - context_; }
  // The text follows a line end, and zeros before that. Past the text no byte that counts looks.
  uint8_t byte_before(int64_t i) const {
    if (i <= 0) return i == 0 ? '\n' : 0;
    return i <= std::ssize(text_) ? text_[static_cast<size_t>(i - 1)] : 0;
  }

  std::span<const uint8_t> text_;
  int64_t length_, past_, context_;
  std::vector<uint8_t> inputs_, targets_;
};

}  // namespace

Evaluation evaluate(Model& model, std::span<const uint8_t> text, int64_t context,
                    const std::function<bool(double)>& go_on) {
  const Sequences batch = model.capacity();
  Windows windows(model, text, context);
  double sum = 0;
  int64_t counted = 0;
  for (int64_t first = 0; first < windows.count(); first += batch.count) {
    if (go_on && !go_on(static_cast<double>(first) / static_cast<double>(windows.count()))) break;
    const int64_t count = std::min(batch.count, windows.count() - first);
    windows.fill(first, count);
    const ConstFloats losses =
        model.losses({count, batch.length}, windows.inputs(count), windows.targets(count));
    for (int64_t t = 0; t < std::ssize(losses); ++t) {
      if (!windows.counts(first + t / batch.length, t % batch.length)) continue;
      sum += losses[static_cast<size_t>(t)];
      ++counted;
    }
  }
  return {.loss = counted > 0 ? sum / static_cast<double>(counted) : 0.0};
}

}  // namespace tilemoe::train
