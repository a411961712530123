// Common code of the tests of the steps of low-rank adapters: simulated devices, tensors of any
// strides among NaN, and the rows of experts.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "simulator/machine/machine.h"
#include "simulator/setting.h"
#include "verify/number.h"

namespace tilemoe::test {

using Index = std::array<int64_t, 3>;

inline void simulate(const std::string& setting_name) {
  const simulator::Setting& setting = simulator::setting_of(setting_name);
  simulator::Machine::instance().set_device(setting.device);
  ASSERT_EQ(tilemoe_set_cuda_arch(setting.arch), TILEMOE_SUCCESS) << tilemoe_last_error();
}

inline void expect_clean_run() {
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (const simulator::Finding& finding : simulator::Machine::instance().take_findings())
    ADD_FAILURE() << describe(finding);
}

// Settings that this build has.
inline std::vector<std::string> settings() {
#ifdef TILEMOE_WITHOUT_SM100
  return {"sm80", "sm90"};
#else
  return {"sm80", "sm90", "sm100"};
#endif
}

// A tensor of one to three dimensions in an array of the device, in which it may have any strides.
// All else in the array is NaN, and so is the tensor until it is filled.
class PlacedTensor {
 public:
  PlacedTensor(tilemoe_dtype dtype, std::vector<int64_t> shape, std::vector<int64_t> stride,
               int64_t first = 0, int64_t after = 0)
      : dtype_(dtype), first_(first) {
    int64_t last = first;
    view_.dtype = dtype, view_.ndim = static_cast<int32_t>(shape.size());
    for (size_t i = 0; i < shape.size(); ++i) {
      view_.shape[i] = shape[i], view_.stride[i] = stride[i];
      last += (shape[i] - 1) * stride[i];
    }
    bytes_.assign(static_cast<size_t>(last + 1 + after) * tilemoe_dtype_size(dtype), kNaN);
    EXPECT_EQ(cudaMalloc(&device_, bytes_.size()), cudaSuccess);
    upload();
  }
  // Columns [first, first + columns) of a matrix of `width` columns.
  static PlacedTensor columns(tilemoe_dtype dtype, int64_t rows, int64_t columns, int64_t width,
                              int64_t first) {
    return PlacedTensor(dtype, {rows, columns}, {width, 1}, first, width - first - columns);
  }
  ~PlacedTensor() { cudaFree(device_); }
  PlacedTensor(PlacedTensor&& other) noexcept
      : dtype_(other.dtype_),
        view_(other.view_),
        first_(other.first_),
        bytes_(std::move(other.bytes_)),
        device_(std::exchange(other.device_, nullptr)) {}
  PlacedTensor(const PlacedTensor&) = delete;
  PlacedTensor& operator=(const PlacedTensor&) = delete;

  // value(index), rounded to the dtype.
  template <class Value>
  void fill(const Value& value) {
    for_each([&](const Index& i) {
      verify::store(static_cast<DType>(dtype_), bytes_.data(), place(i), value(i));
    });
    upload();
  }
  double at(const Index& i) const {
    return verify::load(static_cast<DType>(dtype_), bytes_.data(), place(i));
  }
  double at(int64_t row, int64_t column) const { return at({row, column, 0}); }
  // All elements, the last dimension's next to each other.
  std::vector<double> values() const {
    std::vector<double> values;
    for_each([&](const Index& i) { values.push_back(at(i)); });
    return values;
  }

  tilemoe_tensor tensor() const {
    tilemoe_tensor tensor = view_;
    tensor.data =
        static_cast<char*>(device_) + first_ * static_cast<int64_t>(tilemoe_dtype_size(dtype_));
    return tensor;
  }
  template <class Element>
  const Element* data() const {
    return static_cast<const Element*>(tensor().data);
  }

  // Expects of the device value(index), rounded, at every index for which `written` is true, and at
  // all other places what was uploaded.
  template <class Written, class Value>
  void expect(const std::string& name, const Written& written, const Value& value) {
    std::vector<uint8_t> expected = bytes_, got(bytes_.size());
    EXPECT_EQ(cudaMemcpy(got.data(), device_, got.size(), cudaMemcpyDeviceToHost), cudaSuccess);
    int failures = 0;
    for_each([&](const Index& i) {
      if (!written(i)) return;
      const auto dtype = static_cast<DType>(dtype_);
      verify::store(dtype, expected.data(), place(i), value(i));
      const double right = verify::load(dtype, expected.data(), place(i));
      const double found = verify::load(dtype, got.data(), place(i));
      if (found != right && ++failures <= 3)
        ADD_FAILURE() << name << " at " << i[0] << ", " << i[1] << ", " << i[2] << ": " << found
                      << ", expected " << right;
    });
    if (failures == 0) {
      EXPECT_EQ(got, expected) << name << ": written elsewhere, or another zero";
    }
  }
  template <class Value>
  void expect(const std::string& name, const Value& value) {
    expect(
        name, [](const Index&) { return true; }, value);
  }

 private:
  static constexpr uint8_t kNaN = 0xff;

  template <class Visit>
  void for_each(const Visit& visit) const {
    const auto size = [&](int i) { return i < view_.ndim ? view_.shape[i] : 1; };
    for (int64_t i = 0; i < size(0); ++i)
      for (int64_t j = 0; j < size(1); ++j)
        for (int64_t k = 0; k < size(2); ++k) visit(Index{i, j, k});
  }
  int64_t place(const Index& index) const {
    int64_t at = first_;
    for (int i = 0; i < view_.ndim; ++i) at += index[static_cast<size_t>(i)] * view_.stride[i];
    return at;
  }
  void upload() {
    EXPECT_EQ(cudaMemcpy(device_, bytes_.data(), bytes_.size(), cudaMemcpyHostToDevice),
              cudaSuccess);
  }

  tilemoe_dtype dtype_;
  tilemoe_tensor view_{};
  int64_t first_;
  std::vector<uint8_t> bytes_;
  void* device_ = nullptr;
};

// Bits of a tensor's array on the device, with what lies around it.
inline std::vector<uint8_t> bytes_of(const PlacedTensor& placed) {
  const tilemoe_tensor tensor = placed.tensor();
  std::vector<uint8_t> bytes(static_cast<size_t>(tensor.shape[0] * tensor.stride[0]) *
                             tilemoe_dtype_size(tensor.dtype));
  EXPECT_EQ(cudaMemcpy(bytes.data(), tensor.data, bytes.size(), cudaMemcpyDeviceToHost),
            cudaSuccess);
  return bytes;
}

// The experts' rows. Rows past the last name no token, and their scores are NaN.
struct ExpertRows {
  ExpertRows(std::vector<int32_t> counts, int64_t spare, int64_t tokens)
      : count(std::move(counts)),
        E(static_cast<int64_t>(count.size())),
        M(std::accumulate(count.begin(), count.end(), int64_t{0})),
        capacity(M + spare),
        T(tokens),
        offsets(TILEMOE_INT32, {E + 1}, {1}),
        token(TILEMOE_INT32, {capacity}, {1}),
        score(TILEMOE_FLOAT32, {capacity}, {1}) {
    offsets.fill([&](const Index& i) { return static_cast<double>(begin(i[0])); });
    token.fill([&](const Index& i) {
      return i[0] < M ? static_cast<double>(i[0] * 7 % T) : static_cast<double>(INT32_MAX);
    });
    score.fill([&](const Index& i) {
      return i[0] < M ? 0.25 * static_cast<double>(1 + i[0] * 3 % 5) : NAN;
    });
  }

  int64_t begin(int64_t e) const { return std::accumulate(count.begin(), count.begin() + e, 0); }
  int64_t end(int64_t e) const { return begin(e + 1); }
  int64_t expert_of(int64_t row) const {
    int64_t e = 0;
    while (row >= end(e)) ++e;
    return e;
  }
  int64_t source_of(int64_t row, bool gathers) const {
    return gathers ? static_cast<int64_t>(token.at({row, 0, 0})) : row;
  }
  Rows rows(bool gathers) const {
    return {.E = E,
            .capacity = capacity,
            .offsets = offsets.data<int32_t>(),
            .token = gathers ? token.data<int32_t>() : nullptr,
            .score = score.data<float>()};
  }

  const std::vector<int32_t> count;
  int64_t E, M, capacity, T;
  PlacedTensor offsets, token, score;
};

// A whole number from -range to range that looks random.
inline double whole(const Index& i, int64_t salt, int64_t range) {
  auto mixed = static_cast<uint64_t>((i[0] * 1009 + i[1]) * 2003 + i[2] * 31 + salt);
  mixed = (mixed ^ mixed >> 13) * 0x9e3779b97f4a7c15;
  return static_cast<double>(
      static_cast<int64_t>((mixed >> 33) % static_cast<uint64_t>(2 * range + 1)) - range);
}

constexpr int64_t kMargin = 8;  // columns of NaN on either side

// The gradient of a factor, and whether it is wanted.
struct Output {
  bool wanted = true;
  bool is_float32 = true;
  bool contiguous_rows = false;  // along its second dimension

  // (E, rows, columns) among NaN. Numbers to add to, if it accumulates.
  std::unique_ptr<PlacedTensor> place(tilemoe_dtype dtype, int64_t E, int64_t rows, int64_t columns,
                                      bool accumulates) const {
    const int64_t line = (contiguous_rows ? rows : columns) + kMargin;
    const int64_t expert = line * (contiguous_rows ? columns : rows);
    auto out = std::make_unique<PlacedTensor>(
        is_float32 ? TILEMOE_FLOAT32 : dtype, std::vector<int64_t>{E, rows, columns},
        contiguous_rows ? std::vector<int64_t>{expert, 1, line}
                        : std::vector<int64_t>{expert, line, 1},
        kMargin, kMargin);
    if (accumulates) out->fill([](const Index& i) { return whole(i, 5, 8); });
    return out;
  }
};

}  // namespace tilemoe::test
