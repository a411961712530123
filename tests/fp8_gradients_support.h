// The activation and the input gradient of the fp8 recipe on any device, from random codes, with
// guards around every array. A problem has the same numbers on every device, so that outputs are
// compared by their bits.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "core/activation_kinds.h"
#include "core/backend.h"
#include "core/fp8.h"
#include "cuda/core/variant.h"
#include "verify/memory.h"
#include "verify/number.h"
#include "verify/random.h"

namespace tilemoe::test {

struct Fp8GradientCase {
  std::vector<int32_t> counts = {130, 0, 3, 67};
  int64_t d = 272, n = 208;  // 128 divides neither
  tilemoe_dtype dtype = TILEMOE_BFLOAT16;
  tilemoe_activation activation = TILEMOE_REGLU;
  bool is_split = true;
  bool gathers = true;
  bool float_scales = false;
  bool dH_over_H = false;
  bool H_in_codes = false;                // with dH_over_H, A' lies over them
  bool codes_of_dH = false;               // also written, by the activation gradient or a step
  int64_t first_column = 0, columns = 0;  // of the block of columns of dX~; no columns: the rest
  std::optional<cuda::TileConfiguration> tile = {};
};

inline std::ostream& operator<<(std::ostream& out, const Fp8GradientCase& c) {
  return out << c.counts.size() << " experts, d " << c.d << ", n " << c.n << ", "
             << tilemoe_dtype_name(c.dtype) << ", " << tilemoe_activation_name(c.activation)
             << (c.is_split ? ", split" : "") << (c.gathers ? "" : ", in order")
             << (c.float_scales ? ", float scales" : "") << (c.H_in_codes ? ", H in codes" : "")
             << ", columns from " << c.first_column;
}

class Fp8GradientProblem {
 public:
  // Outputs of the steps; dH, A' and dX~ as their bits, poisoned where no row is.
  struct Outputs {
    std::vector<std::byte> dH, A_scaled, dX;
    std::vector<float> ds;                       // of the rows that exist
    std::vector<std::byte> dH_codes, dH_scales;  // the same
  };

  Fp8GradientProblem(const Fp8GradientCase& c, verify::Memory& memory)
      : c_(c),
        memory_(memory),
        E_(static_cast<int64_t>(c.counts.size())),
        M_(std::accumulate(c.counts.begin(), c.counts.end(), int64_t{0})),
        capacity_(M_ + kSpareRows),
        offsets_(memory, DType::kInt32, {E_ + 1}),
        token_(memory, DType::kInt32, {capacity_}),
        score_(memory, DType::kFloat32, {capacity_}),
        H_(memory, dtype(), {capacity_, 2 * c.n}),
        dH_(memory, dtype(), {capacity_, 2 * c.n}),
        A_scaled_(memory, dtype(), {capacity_, c.n}),
        ds_(memory, DType::kFloat32, {ds_groups(c.n), capacity_}),
        dX_(memory, dtype(), {capacity_, dX_columns()}),
        H_codes_(memory, static_cast<size_t>(capacity_ * 2 * c.n)),
        H_scales_(memory, static_cast<size_t>(capacity_ * 2 * blocks_of(c.n, kFp8Tile)) * 4),
        dO_codes_(1, c.gathers ? kTokens : capacity_, c.d, 1),
        dH_codes_(2, capacity_, c.n, 1),
        W2_(E_, c.n, c.d, kFp8Tile),
        W1_(E_, c.d, c.is_split ? c.n : 2 * c.n, kFp8Tile),
        W1_up_(E_, c.d, c.n, kFp8Tile),
        codes_of_dH_(memory, static_cast<size_t>(c.codes_of_dH ? 2 * capacity_ * c.n : 0)),
        scales_of_dH_(memory, static_cast<size_t>(c.codes_of_dH ? 2 * capacity_ * k_blocks() : 0) *
                                  sizeof(float)) {
    fill_rows();
    for (Codes* codes : {&dO_codes_, &dH_codes_, &W2_, &W1_, &W1_up_})
      codes->quantise(memory, random_, c.float_scales);
    experts_.struct_size = sizeof experts_, experts_.device = to_c(memory.device());
    experts_.dtype = c.dtype, experts_.d = c.d, experts_.n = c.n, experts_.E = E_;
    experts_.activation = c.activation, experts_.recipe = TILEMOE_RECIPE_FP8;
    experts_.gate_layout = c.is_split ? TILEMOE_GATE_SPLIT : TILEMOE_GATE_CONCATENATED;
    experts_.format_1 = experts_.format_2 = TILEMOE_FORMAT_FP8;
    experts_.float_scales = c.float_scales ? 1 : 0;
  }

  const tilemoe_experts& experts() const { return experts_; }

  ActivationGradient activation_gradient() const {
    ActivationGradient step{};
    step.experts = &experts_, step.rows = rows();
    step.dO = shape(dO_codes_.rows, c_.d);
    step.W1 = shape(E_, (c_.is_split ? 1 : 2) * c_.n, c_.d), step.W2 = shape(E_, c_.d, c_.n);
    if (c_.H_in_codes)
      step.H_codes = {static_cast<uint8_t*>(H_codes_.data()),
                      static_cast<float*>(H_scales_.data())};
    else
      step.H = H_.view();
    step.dH = dH().view();
    if (c_.codes_of_dH && kernel_writes_codes()) step.dH_codes = out_codes();
    step.A_scaled = A_scaled_.view();
    if (c_.H_in_codes && c_.dH_over_H) step.A_scaled.data = H_codes_.data();
    step.ds_partial = static_cast<float*>(ds_.view().data);
    step.codes.weight = W2_.weight(), step.dO_codes = dO_codes_.given();
    step.tuning = tuning();
    return step;
  }
  InputGradient input_gradient() const {
    InputGradient step{};
    step.experts = &experts_, step.rows = rows();
    step.dH = dH_.view();
    step.weights.W1 = shape(E_, (c_.is_split ? 1 : 2) * c_.n, dX_columns());
    if (c_.is_split) step.weights.W1_up = step.weights.W1;
    step.dX_rows = dX_.view();
    step.codes = {W1_.weight(), c_.is_split ? W1_up_.weight() : tilemoe_quantized{},
                  c_.first_column};
    step.dH_codes = dH_codes_.given();
    step.tuning = tuning();
    return step;
  }

  Outputs run() {
    const Backend& backend =
        memory_.device() == Device::kCpu ? cpu_backend() : backend_for(TILEMOE_CUDA);
    const auto run_step = [&](auto step, const auto& of_backend) {
      const size_t bytes = of_backend.scratch_bytes(experts_, {.capacity = capacity_});
      verify::GuardedBuffer scratch(memory_, bytes);
      step.scratch = {scratch.data(), bytes};
      of_backend.run(step);
      if (memory_.device() == Device::kCuda) {
        std::byte last;  // a copy waits for the step
        memory_.copy_out(&last, dX_.view().data, 1);
      }
      EXPECT_TRUE(scratch.guards_intact());
    };
    run_step(activation_gradient(), backend.steps.activation_gradient);
    if (c_.codes_of_dH && !kernel_writes_codes())
      backend.steps.quantize_dH.run({.values = dH().view(),
                                     .out = out_codes(),
                                     .float_scales = c_.float_scales,
                                     .stream = nullptr,
                                     .parts = 2});
    run_step(input_gradient(), backend.steps.input_gradient);
    return outputs();
  }

  Outputs outputs() const {
    for (const verify::GuardedTensor* tensor : {&H_, &dH_, &A_scaled_, &ds_, &dX_})
      EXPECT_TRUE(tensor->gaps_intact()) << c_;
    for (const verify::GuardedBuffer* codes :
         {&H_codes_, &H_scales_, &codes_of_dH_, &scales_of_dH_})
      EXPECT_TRUE(codes->guards_intact()) << c_;
    const bool over_codes = c_.H_in_codes && c_.dH_over_H;
    Outputs all;
    all.dH = dH().bits(), all.A_scaled = over_codes ? H_codes_.read() : A_scaled_.bits();
    all.dX = dX_.bits();
    all.dH_codes = of_rows(codes_of_dH_.read(), static_cast<size_t>(c_.n));
    all.dH_scales = of_rows(scales_of_dH_.read(), static_cast<size_t>(k_blocks()) * sizeof(float));
    const std::vector<float> ds = ds_.read();
    for (int64_t group = 0; group < ds_groups(c_.n); ++group)
      for (int64_t row = 0; row < M_; ++row)
        all.ds.push_back(ds[static_cast<size_t>(group * capacity_ + row)]);
    return all;
  }

 private:
  static constexpr int64_t kTokens = 150, kSpareRows = 9;

  // Codes (E, rows, columns) and a scale per block of block_rows x 128.
  struct Codes {
    Codes(int64_t matrices, int64_t height, int64_t width, int32_t of_block)
        : E(matrices), rows(height), columns(width), block_rows(of_block) {}

    // Normal numbers, quantised by the library.
    void quantise(verify::Memory& memory, verify::Random& random, bool float_scales) {
      codes.emplace(memory, static_cast<size_t>(E * rows * columns));
      scales.emplace(memory, static_cast<size_t>(E * blocks_of(rows, block_rows) *
                                                 blocks_of(columns, kFp8Tile)) *
                                 sizeof(float));
      verify::GuardedTensor values(memory, DType::kBFloat16, {E, rows, columns});
      std::vector<float> numbers;
      for (int64_t i = 0; i < values.elements(); ++i)
        numbers.push_back(static_cast<float>(random.normal()));
      values.write(numbers);
      tilemoe_quantize_fp8_args args{};
      args.struct_size = sizeof args, args.device = to_c(memory.device());
      args.block_rows = block_rows, args.float_scales = float_scales ? 1 : 0;
      args.part_rows = rows, args.values = values.view();
      args.codes = given().codes, args.scales = given().scales;
      ASSERT_EQ(tilemoe_quantize_fp8(&args), TILEMOE_SUCCESS) << tilemoe_last_error();
      std::byte last;  // a copy waits for the kernel
      memory.copy_out(&last, codes->data(), 1);
    }
    Fp8Rows given() const {
      return {static_cast<uint8_t*>(codes->data()), static_cast<float*>(scales->data())};
    }
    tilemoe_quantized weight() const {
      tilemoe_quantized weight{};
      weight.format = TILEMOE_FORMAT_FP8, weight.transposed = 1;
      weight.codes = codes->data(), weight.scales = scales->data();
      return weight;
    }

    int64_t E, rows, columns;
    int32_t block_rows;
    std::optional<verify::GuardedBuffer> codes, scales;
  };

  const verify::GuardedTensor& dH() const { return c_.dH_over_H ? H_ : dH_; }
  bool kernel_writes_codes() const {
    const auto writes = backend_for(to_c(memory_.device())).writes_dH_codes;
    return writes != nullptr && writes(experts_);
  }
  int64_t k_blocks() const { return blocks_of(c_.n, kFp8Tile); }
  Fp8Rows out_codes() const {
    return {static_cast<uint8_t*>(codes_of_dH_.data()), static_cast<float*>(scales_of_dH_.data())};
  }
  // Of two parts of rows, the rows that exist.
  std::vector<std::byte> of_rows(const std::vector<std::byte>& all, size_t row_bytes) const {
    std::vector<std::byte> rows;
    for (size_t part = 0; part < 2 && !all.empty(); ++part) {
      const auto first = all.begin() + static_cast<std::ptrdiff_t>(part * all.size() / 2);
      rows.insert(rows.end(), first,
                  first + static_cast<std::ptrdiff_t>(static_cast<size_t>(M_) * row_bytes));
    }
    return rows;
  }
  DType dtype() const { return static_cast<DType>(c_.dtype); }
  int64_t dX_columns() const { return c_.columns != 0 ? c_.columns : c_.d - c_.first_column; }
  Tuning tuning() const {
    Tuning tuning{};
    tuning.tile = c_.tile ? &*c_.tile : nullptr;
    return tuning;
  }
  Rows rows() const {
    return {.E = E_,
            .capacity = capacity_,
            .offsets = static_cast<const int32_t*>(offsets_.view().data),
            .token = c_.gathers ? static_cast<const int32_t*>(token_.view().data) : nullptr,
            .score = static_cast<const float*>(score_.view().data)};
  }
  // A tensor without data: its shape and strides.
  tilemoe_tensor shape(int64_t rows, int64_t columns) const {
    return ConstTensor(nullptr, dtype(), {rows, columns});
  }
  tilemoe_tensor shape(int64_t E, int64_t rows, int64_t columns) const {
    return ConstTensor(nullptr, dtype(), {E, rows, columns});
  }

  // Rows past the last name no token, and their scores and H stay poisoned.
  void fill_rows() {
    std::vector<float> begins = {0.f};
    for (const int32_t count : c_.counts)
      begins.push_back(begins.back() + static_cast<float>(count));
    offsets_.write(begins);
    std::vector<float> token, score, H;
    for (int64_t row = 0; row < capacity_; ++row) {
      const bool exists = row < M_;
      token.push_back(exists ? static_cast<float>(row * 7 % kTokens) : 0x1p30f);
      score.push_back(exists ? 0.25f * static_cast<float>(1 + row * 3 % 5) : NAN);
      for (int64_t column = 0; column < 2 * c_.n; ++column)
        H.push_back(exists ? H_at(column < c_.n) : NAN);
    }
    token_.write(token), score_.write(score), H_.write(H);
    if (c_.H_in_codes) fill_codes(H);
    for (verify::GuardedTensor* out : {&dH_, &A_scaled_, &ds_, &dX_}) out->poison();
  }
  // The codes of these values, with scales that do not fit them.
  void fill_codes(const std::vector<float>& H) {
    const int64_t blocks = blocks_of(c_.n, kFp8Tile);
    std::vector<std::byte> codes(H_codes_.bytes()), bytes(H_scales_.bytes());
    std::vector<float> scales(static_cast<size_t>(capacity_ * blocks * 2));
    for (int64_t row = 0; row < capacity_; ++row)
      for (int half = 0; half < 2; ++half) {
        for (int64_t j = 0; j < c_.n; ++j)
          codes[static_cast<size_t>(row * 2 * c_.n + place_in_fp8_H(half, j))] =
              std::byte{to_e4m3(H[static_cast<size_t>((2 * row + half) * c_.n + j)])};
        for (int64_t block = 0; block < blocks; ++block) {
          const float scale =
              std::ldexp(c_.float_scales ? 1.37f : 1.f, static_cast<int>(row + block + half) % 4);
          scales[static_cast<size_t>((row * blocks + block) * 2 + half)] = row < M_ ? scale : NAN;
        }
      }
    std::memcpy(bytes.data(), scales.data(), bytes.size());
    H_codes_.write(codes), H_scales_.write(bytes);
  }
  // Of SwiGLU, gates whose sigmoid is 1/2 or 1: every device has the same bits.
  float H_at(bool is_gate) {
    const double number = random_.normal();
    if (is_gate && c_.activation == TILEMOE_SWIGLU) return number < -0.5 ? 0.f : 64.f;
    return static_cast<float>(number);
  }

  Fp8GradientCase c_;
  verify::Memory& memory_;
  verify::Random random_{3, 1};
  int64_t E_, M_, capacity_;
  verify::GuardedTensor offsets_, token_, score_, H_, dH_, A_scaled_, ds_, dX_;
  verify::GuardedBuffer H_codes_, H_scales_;
  Codes dO_codes_, dH_codes_, W2_, W1_, W1_up_;
  verify::GuardedBuffer codes_of_dH_, scales_of_dH_;
  tilemoe_experts experts_{};
};

// Elements of a 16-bit tensor that differ.
inline int64_t differences(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  int64_t count = a.size() == b.size() ? 0 : -1;
  for (size_t i = 0; count >= 0 && i + 1 < a.size(); i += 2)
    count += a[i] != b[i] || a[i + 1] != b[i + 1] ? 1 : 0;
  return count;
}

// Bits of dH, A' and dX~; the partial sums of ds up to the order of their sums.
inline void expect_equal(const Fp8GradientProblem::Outputs& got,
                         const Fp8GradientProblem::Outputs& expected, const Fp8GradientCase& c) {
  EXPECT_EQ(differences(got.dH, expected.dH), 0) << c;
  EXPECT_EQ(differences(got.A_scaled, expected.A_scaled), 0) << c;
  EXPECT_EQ(differences(got.dX, expected.dX), 0) << c;
  EXPECT_EQ(differences(got.dH_codes, expected.dH_codes), 0) << c;
  EXPECT_EQ(differences(got.dH_scales, expected.dH_scales), 0) << c;
  double error = 0, norm = 0;
  ASSERT_EQ(got.ds.size(), expected.ds.size());
  for (size_t i = 0; i < got.ds.size(); ++i) {
    error += std::pow(double{got.ds[i]} - double{expected.ds[i]}, 2);
    norm += std::pow(double{expected.ds[i]}, 2);
  }
  EXPECT_LE(std::sqrt(error), 1e-5 * std::sqrt(norm)) << c;
}

}  // namespace tilemoe::test
