// The steps of a layer by name, and who looks on while they run, as a benchmark's clock does. A new
// step is named here and run in layer.cpp.
#pragma once

namespace tilemoe {

// As they stand in tables and in JSON.
namespace step {
inline constexpr const char* kUpProjection = "up_projection";
inline constexpr const char* kDownProjection = "down_projection";
inline constexpr const char* kCombine = "combine";
inline constexpr const char* kActivationGradient = "activation_gradient";
inline constexpr const char* kScoreGradient = "score_gradient";
inline constexpr const char* kWeightGradient2 = "weight_gradient_2";
inline constexpr const char* kInputGradient = "input_gradient";
inline constexpr const char* kCombineGradient = "combine_dX";
inline constexpr const char* kWeightGradient1 = "weight_gradient_1";
inline constexpr const char* kBiasGradient = "bias_gradient";
}  // namespace step

class StepObserver {
 public:
  virtual ~StepObserver() = default;
  virtual void begin(const char* step) = 0;
  virtual void end(const char* step) = 0;
};

}  // namespace tilemoe
