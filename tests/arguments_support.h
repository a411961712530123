// Bad arguments, table driven: a case spoils one field of a problem that works, and the call must
// answer with the documented status, name the argument, and write nothing.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "tilemoe/tilemoe.h"

namespace tilemoe::arguments {

// Workspaces have a part for every thread: with one, they stay small enough to be compared often.
class OneThread : public testing::Environment {
  void SetUp() override { ASSERT_EQ(tilemoe_set_num_threads(1), TILEMOE_SUCCESS); }
};
inline testing::Environment* const one_thread =
    testing::AddGlobalTestEnvironment(new OneThread);  // GoogleTest owns it

// Everything a problem points to, in one block whose bytes can be compared before and after a call.
class Arena {
 public:
  static constexpr size_t kBytes = size_t{1} << 17;
  static constexpr size_t kAlignment = 64;

  // Bytes on kAlignment, with at least as many untouched ones behind them.
  void* take(size_t bytes) {
    const size_t place = used_;
    used_ += (bytes + 2 * kAlignment - 1) / kAlignment * kAlignment;
    if (used_ > kBytes) throw std::bad_alloc();
    return base() + place;
  }
  template <class Element>
  Element* take_array(int64_t count) {
    return static_cast<Element*>(take(static_cast<size_t>(count) * sizeof(Element)));
  }
  std::vector<unsigned char> bytes() const { return memory_; }

 private:
  unsigned char* base() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (kAlignment - address % kAlignment) % kAlignment;
  }
  std::vector<unsigned char> memory_ = std::vector<unsigned char>(kBytes + kAlignment, 0xA5);
  size_t used_ = 0;
};

inline tilemoe_tensor tensor(void* data, tilemoe_dtype dtype, std::vector<int64_t> shape) {
  tilemoe_tensor view{};
  view.data = data, view.dtype = dtype, view.ndim = static_cast<int32_t>(shape.size());
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0; step *= shape[i])
    view.shape[i] = shape[i], view.stride[i] = step;
  return view;
}

// A tensor of the arena's memory; floats are small whole numbers, integers 0.
inline tilemoe_tensor new_tensor(Arena& arena, tilemoe_dtype dtype, std::vector<int64_t> shape) {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  const size_t bytes = static_cast<size_t>(count) * tilemoe_dtype_size(dtype);
  void* data = arena.take(bytes);
  std::memset(data, 0, bytes);
  if (dtype == TILEMOE_FLOAT32)
    for (int64_t i = 0; i < count; ++i)
      static_cast<float*>(data)[i] = static_cast<float>((i * 7 + 3) % 5 - 2);
  return tensor(data, dtype, shape);
}

inline std::string shape_text(const tilemoe_tensor& view) {
  std::string text = "(";
  for (int i = 0; i < view.ndim && i < TILEMOE_MAX_DIMS; ++i)
    text += (i ? ", " : "") + std::to_string(view.shape[i]);
  return text + ")";
}

// One way to spoil a Problem, and what the call must then say. The words are found after the
// spoiling, since they show the shape seen.
template <class Problem>
struct BadCase {
  std::string name;
  std::function<void(Problem&)> spoil;
  std::vector<std::string> words;
  tilemoe_status status = TILEMOE_INVALID_ARGUMENT;
};

enum class Layout { kContiguous, kRows, kMatrix };

// A tensor among a problem's arguments, by its public name.
template <class Problem>
struct Argument {
  const char* name;
  std::function<tilemoe_tensor&(Problem&)> get;
  Layout layout;
  bool optional = false;
  bool aligned = true;  // data and strides on 16 bytes
};

// Every way in which one tensor can be wrong.
template <class Problem>
std::vector<BadCase<Problem>> tensor_cases(const Argument<Problem>& argument) {
  std::vector<BadCase<Problem>> cases;
  Problem model;
  const tilemoe_tensor good = argument.get(model);
  const auto add = [&](const std::string& what, const std::function<void(tilemoe_tensor&)>& spoil,
                       bool shows_shape = true) {
    std::vector<std::string> words = {argument.name};
    if (shows_shape) {
      tilemoe_tensor spoilt = good;
      spoil(spoilt);
      words.push_back(shape_text(spoilt));
    }
    cases.push_back({std::string(argument.name) + ": " + what,
                     [get = argument.get, spoil](Problem& problem) { spoil(get(problem)); },
                     words});
  };

  if (!argument.optional)
    add(
        "absent", [](tilemoe_tensor& t) { t = {}; }, false);
  add("null data", [](tilemoe_tensor& t) { t.data = nullptr; });
  for (int dtype : {int{TILEMOE_INT32}, int{TILEMOE_INT64}, int{TILEMOE_FLOAT16}, 5, 99, -1})
    if (!model.accepts(argument.name, static_cast<tilemoe_dtype>(dtype)))
      add("dtype " + std::to_string(dtype),
          [dtype](tilemoe_tensor& t) { t.dtype = static_cast<tilemoe_dtype>(dtype); });
  for (int ndim : {-1, 0, 1, 2, 3, 4, INT32_MAX})
    if (ndim != good.ndim && !model.accepts_ndim(argument.name, ndim))
      add("ndim " + std::to_string(ndim), [ndim](tilemoe_tensor& t) { t.ndim = ndim; });
  for (int i = 0; i < good.ndim; ++i) {
    const std::string at = "[" + std::to_string(i) + "] = ";
    for (int64_t size :
         {good.shape[i] + 8, good.shape[i] - 1, int64_t{-1}, int64_t{0}, INT64_MAX, INT64_MIN})
      add("shape" + at + std::to_string(size), [i, size](tilemoe_tensor& t) { t.shape[i] = size; });

    if (good.shape[i] == 1) continue;  // nothing steps along it, so its stride is free
    const int64_t step = good.stride[i];
    std::vector<int64_t> strides = {0, -1, -step, INT64_MIN};
    const bool inner = i == good.ndim - 1;
    if (inner || argument.layout == Layout::kContiguous) strides.push_back(step + 1);
    if (!inner) strides.push_back(step - 8);  // the rows overlap
    if (!inner && argument.aligned) strides.push_back(step + 1);
    const auto spoil = [&](int64_t stride, bool shows_shape) {
      add(
          "stride" + at + std::to_string(stride),
          [i, stride](tilemoe_tensor& t) { t.stride[i] = stride; }, shows_shape);
    };
    for (int64_t stride : strides) spoil(stride, true);
    for (int64_t stride : {INT64_MAX, int64_t{1} << 61}) spoil(stride, false);  // overflow
  }
  const size_t off = argument.aligned ? tilemoe_dtype_size(good.dtype) : 1;
  add("misaligned data",
      [off](tilemoe_tensor& t) { t.data = static_cast<unsigned char*>(t.data) + off; });
  return cases;
}

// Runs every case on a problem of its own; a problem has arena, call() and function().
template <class Problem>
void run_cases(const std::vector<BadCase<Problem>>& cases) {
  {
    Problem good;
    ASSERT_EQ(good.call(), TILEMOE_SUCCESS) << tilemoe_last_error();
    ASSERT_STREQ(tilemoe_last_error(), "");
  }
  for (const BadCase<Problem>& bad : cases) {
    SCOPED_TRACE(bad.name);
    Problem problem;
    bad.spoil(problem);
    const auto before = problem.arena.bytes();
    const auto host_before = problem.host_outputs();
    EXPECT_EQ(problem.call(), bad.status) << tilemoe_last_error();
    const std::string error = tilemoe_last_error();
    EXPECT_EQ(error.rfind(std::string(problem.function()) + ": ", 0), 0u) << error;
    for (const std::string& word : bad.words)
      EXPECT_NE(error.find(word), std::string::npos) << "no '" << word << "' in: " << error;
    EXPECT_TRUE(problem.arena.bytes() == before) << "something was written, though: " << error;
    EXPECT_TRUE(problem.host_outputs() == host_before) << "a host struct was written: " << error;
  }
}

}  // namespace tilemoe::arguments
