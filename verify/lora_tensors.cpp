#include "lora_tensors.h"

namespace tilemoe::verify {

LoraTensors::LoraTensors(const Case& test_case, DType dtype, Parts parts, Memory& memory)
    : case_(test_case), split_(test_case.gate_layout == GateLayout::kSplit) {
  const Adapters& lora = case_.lora;
  const int64_t E = case_.E, d = case_.d, n = case_.n;
  const MatrixLayout layout{.padded = case_.padded, .transposed = lora.transposed};
  // Rows of gate and up alternate in the gradient, which then has to be contiguous along the rank.
  MatrixLayout of_B1 = layout;
  if (case_.gate_layout == GateLayout::kInterleaved) of_B1.transposed = false;
  const auto pair = [&](std::optional<GuardedTensor>& A, std::optional<GuardedTensor>& B,
                        int64_t rank, int64_t columns, int64_t rows, MatrixLayout layout_of_B) {
    if (rank == 0) return;
    A.emplace(memory, dtype, std::vector{E, rank, columns}, layout);
    B.emplace(memory, dtype, std::vector{E, rows, rank}, layout_of_B);
  };
  if (parts.lora_1) {
    pair(A1_, B1_, lora.gate, d, split_ ? n : case_.h_width(), of_B1);
    pair(A1_up_, B1_up_, lora.up, d, n, of_B1);
  }
  if (parts.lora_2) pair(A2_, B2_, lora.down, n, d, layout);
}

LoraGradients LoraTensors::gradients() const {
  const auto of = [](const std::optional<GuardedTensor>& tensor) {
    return tensor ? tensor->view() : Tensor();
  };
  return {of(A1_), of(B1_), of(A1_up_), of(B1_up_), of(A2_), of(B2_)};
}

Lora LoraTensors::view() const {
  const LoraGradients all = gradients();
  return {all.A1, all.B1, all.A1_up,          all.B1_up,
          all.A2, all.B2, case_.lora.scale_1, case_.lora.scale_2};
}

template <class Visit>
void LoraTensors::for_each_of_A1(Visit&& visit) const {
  const int64_t rank = case_.lora.rank_1(), gate = case_.lora.gate, d = case_.d;
  for (int64_t e = 0; e < case_.E; ++e)
    for (int64_t r = 0; r < rank; ++r)
      for (int64_t j = 0; j < d; ++j) {
        const bool up = r >= gate;
        const int64_t row = up ? r - gate : r, rows = up ? rank - gate : gate;
        visit(up, static_cast<size_t>((e * rows + row) * d + j),
              static_cast<size_t>((e * rank + r) * d + j));
      }
}

template <class Visit>
void LoraTensors::for_each_of_B1(Visit&& visit) const {
  const int64_t rank = case_.lora.rank_1(), gate = case_.lora.gate;
  const int64_t n = case_.n, h = case_.h_width();
  const bool interleaved = case_.gated() && case_.gate_layout == GateLayout::kInterleaved;
  for (int64_t e = 0; e < case_.E; ++e)
    for (int64_t i = 0; i < h; ++i)
      for (int64_t r = 0; r < rank; ++r) {
        if (!has_factor(case_, i, r)) continue;
        const auto value = static_cast<size_t>((e * h + i) * rank + r);
        if (split_) {
          const bool up = i >= n;
          const int64_t columns = up ? rank - gate : gate;
          visit(up, static_cast<size_t>((e * n + i % n) * columns + (up ? r - gate : r)), value);
        } else {
          const int64_t row = interleaved ? 2 * (i % n) + i / n : i;
          visit(false, static_cast<size_t>((e * h + row) * rank + r), value);
        }
      }
}

void LoraTensors::write(const LoraValues& values) {
  const auto scatter = [](std::optional<GuardedTensor>& main, std::optional<GuardedTensor>& up,
                          const std::vector<float>& from, const auto& for_each) {
    if (!main && !up) return;
    const auto size = [](const std::optional<GuardedTensor>& tensor) {
      return tensor ? static_cast<size_t>(tensor->elements()) : 0;
    };
    std::vector<float> parts[2] = {std::vector<float>(size(main)), std::vector<float>(size(up))};
    for_each([&](bool in_up, size_t index, size_t value) { parts[in_up][index] = from[value]; });
    if (main) main->write(parts[0]);
    if (up) up->write(parts[1]);
  };
  scatter(A1_, A1_up_, values.A1, [&](const auto& visit) { for_each_of_A1(visit); });
  scatter(B1_, B1_up_, values.B1, [&](const auto& visit) { for_each_of_B1(visit); });
  if (A2_) A2_->write(values.A2), B2_->write(values.B2);
}

LoraValues LoraTensors::read() const {
  const auto gather = [](const std::optional<GuardedTensor>& main,
                         const std::optional<GuardedTensor>& up, int64_t size,
                         const auto& for_each) {
    if (!main && !up) return std::vector<float>();
    const std::vector<float> parts[2] = {main ? main->read() : std::vector<float>(),
                                         up ? up->read() : std::vector<float>()};
    std::vector<float> values(static_cast<size_t>(size));
    for_each([&](bool in_up, size_t index, size_t value) { values[value] = parts[in_up][index]; });
    return values;
  };
  const int64_t rank = case_.lora.rank_1();
  LoraValues values;
  values.A1 = gather(A1_, A1_up_, case_.E * rank * case_.d,
                     [&](const auto& visit) { for_each_of_A1(visit); });
  values.B1 = gather(B1_, B1_up_, case_.E * case_.h_width() * rank,
                     [&](const auto& visit) { for_each_of_B1(visit); });
  if (A2_) values.A2 = A2_->read(), values.B2 = B2_->read();
  return values;
}

std::vector<std::pair<const char*, GuardedTensor*>> LoraTensors::tensors() {
  std::vector<std::pair<const char*, GuardedTensor*>> present;
  const auto add = [&](const char* name, std::optional<GuardedTensor>& tensor) {
    if (tensor) present.emplace_back(name, &*tensor);
  };
  add("A1", A1_), add("B1", B1_), add("A1_up", A1_up_);
  add("B1_up", B1_up_), add("A2", A2_), add("B2", B2_);
  return present;
}

}  // namespace tilemoe::verify
