// A normalisation with its gain and what its backward needs.
#pragma once

#include <string>

#include "train/parameters.h"
#include "train/workspace.h"

namespace tilemoe::train {

class NormLayer {
 public:
  NormLayer(const std::string& name, int64_t width, int64_t max_tokens, ParameterStore& parameters,
            Workspace& workspace)
      : workspace_(workspace),
        gain_(parameters.add_constant(name + "weight", {width}, ParameterGroup::kOther, 1.f)),
        y_(workspace.floats(max_tokens * width)),
        inverse_rms_(workspace.floats(max_tokens)) {
    workspace.need_scratch(rms_norm_scratch(max_tokens, width));
  }

  // x (T, d) -> y (T, d), valid until the next forward
  ConstFloats forward(ConstFloats x) {
    const int64_t tokens = std::ssize(x) / gain_.size();
    workspace_.operators().rms_norm(x, gain_.value.span(), y_.first(std::ssize(x)),
                                    inverse_rms_.first(tokens));
    return output(x);
  }
  // The output of the last forward of x.
  ConstFloats output(ConstFloats x) const { return y_.first(std::ssize(x)); }

  // dx += what dy passes on to x, the x of the last forward.
  void backward(ConstFloats x, ConstFloats dy, Floats dx) {
    const int64_t tokens = std::ssize(x) / gain_.size();
    workspace_.operators().rms_norm_backward(x, gain_.value.span(), inverse_rms_.first(tokens), dy,
                                             dx, gain_.gradient.span(), workspace_.scratch());
  }

 private:
  const Workspace& workspace_;
  Parameter& gain_;         // (d)
  FloatArray y_;            // (T, d)
  FloatArray inverse_rms_;  // (T)
};

}  // namespace tilemoe::train
