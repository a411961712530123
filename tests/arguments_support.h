// Bad arguments, table driven: a row changes one thing of a call that works, and the call must then
// return the documented status, name the argument, and write nothing.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "tilemoe/tilemoe.h"

namespace tilemoe::arguments {

constexpr int64_t kT = 7, kD = 24, kN = 16, kE = 5, kK = 3, kPairs = 11, kCapacity = 13;

inline void require(tilemoe_status status) {
  if (status != TILEMOE_SUCCESS) throw std::runtime_error(tilemoe_last_error());
}

// Everything a call points to, in one block whose bytes can be compared before and after it.
class Arena {
 public:
  static constexpr size_t kBytes = size_t{1} << 18;
  static constexpr size_t kAlignment = 64;

  // Bytes on kAlignment, with at least as many untouched ones behind them.
  void* take(size_t bytes) {
    const size_t place = used_;
    used_ += (bytes + 2 * kAlignment - 1) / kAlignment * kAlignment;
    if (used_ > kBytes) throw std::bad_alloc();
    return base() + place;
  }
  std::vector<unsigned char> bytes() const { return memory_; }
  // From the first byte that is taken on, wherever the block lies.
  std::vector<unsigned char> contents() { return {base(), base() + kBytes}; }

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

// A valid call of one entry. One derived from it has function(), its name, and call().
struct Problem {
  Arena arena;

  Problem() = default;
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  // The outputs that the call might write outside of the arena.
  std::vector<int64_t> host_outputs() const { return {}; }

  // Tensors of the arena's memory; floats are small whole numbers, integers 0.
  tilemoe_tensor integers(std::vector<int64_t> shape, tilemoe_dtype dtype = TILEMOE_INT32) {
    size_t bytes = tilemoe_dtype_size(dtype);
    for (int64_t size : shape) bytes *= static_cast<size_t>(size);
    void* data = arena.take(bytes);
    std::memset(data, 0, bytes);
    return tensor(data, dtype, shape);
  }
  tilemoe_tensor floats(std::vector<int64_t> shape) {
    const tilemoe_tensor view = integers(shape, TILEMOE_FLOAT32);
    for (int64_t i = 0; i < shape[0] * view.stride[0]; ++i)
      static_cast<float*>(view.data)[i] = static_cast<float>((i * 7 + 3) % 5 - 2);
    return view;
  }
};

// One change to a valid call, and the words that the error must then contain.
template <class P>
struct BadCase {
  std::string name;
  std::function<void(P&)> change;
  std::vector<std::string> words;
  tilemoe_status status = TILEMOE_INVALID_ARGUMENT;
};
template <class P>
using Cases = std::vector<BadCase<P>>;

// Rows of a table, named after their change to the call `p`.
#define BAD(change, ...)                \
  {                                     \
#change, [](auto& p) { change; }, { \
      __VA_ARGS__                       \
    }                                   \
  }
#define UNSUPPORTED(change, ...)                                          \
  {                                                                       \
#change, [](auto& p) { change; }, {__VA_ARGS__ }, TILEMOE_UNSUPPORTED \
  }
// A row for each value v of a number, which the error must name and show.
#define BAD_VALUES(cases, name, change, ...)                          \
  for (const int64_t v : std::initializer_list<int64_t>{__VA_ARGS__}) \
  cases.push_back({name " = " + std::to_string(v),                    \
                   [v](auto& p) { change; },                          \
                   {name " is " + std::to_string(v)}})
// Rows with each way in which a tensor of the call `p` can be wrong; behind it, fields of Argument.
#define BAD_TENSOR(cases, member, ...) \
  append_tensor(cases, #member, [](auto& p) -> tilemoe_tensor& { return p.member; }, {__VA_ARGS__})

enum class Layout { kContiguous, kRows, kMatrix };

// The accepted properties of a tensor.
struct Argument {
  Layout layout = Layout::kContiguous;
  bool optional = false;
  bool aligned = false;                      // data and strides on 16 bytes
  std::vector<tilemoe_dtype> accepted = {};  // dtypes other than the call's own
  std::vector<std::string> free = {};        // cases named so may show at another tensor
};
const std::vector<tilemoe_dtype> kFloats = {TILEMOE_FLOAT16};
const std::vector<tilemoe_dtype> kIntegers = {TILEMOE_INT32, TILEMOE_INT64};

// Each way in which a tensor can be wrong.
inline Cases<tilemoe_tensor> bad_tensors(const std::string& name, const tilemoe_tensor& good,
                                         const Argument& argument) {
  Cases<tilemoe_tensor> cases;
  const auto add = [&](const std::string& what, const std::function<void(tilemoe_tensor&)>& change,
                       bool shows_shape = true) {
    std::vector<std::string> words = {name};
    if (shows_shape) {
      tilemoe_tensor bad = good;
      change(bad);
      words.emplace_back("(");
      for (int i = 0; i < bad.ndim && i < TILEMOE_MAX_DIMS; ++i)
        words.back() += (i ? ", " : "") + std::to_string(bad.shape[i]);
      words.back() += ")";
    }
    for (const std::string& free : argument.free)
      if (what.find(free) != std::string::npos) words.clear();
    cases.push_back({name + ": " + what, change, words});
  };

  if (!argument.optional)
    add(
        "absent", [](auto& t) { t = {}; }, false);
  add("null data", [](auto& t) { t.data = nullptr; });
  for (int dtype : {int{TILEMOE_INT32}, int{TILEMOE_INT64}, int{TILEMOE_FLOAT16}, 5, 99, -1}) {
    const auto& accepted = argument.accepted;
    if (dtype != good.dtype && std::find(accepted.begin(), accepted.end(), dtype) == accepted.end())
      add("dtype " + std::to_string(dtype), [dtype](auto& t) { t.dtype = tilemoe_dtype(dtype); });
  }
  for (int ndim : {-1, 0, 1, 2, 3, 4, INT32_MAX})
    if (ndim != good.ndim) add("ndim " + std::to_string(ndim), [ndim](auto& t) { t.ndim = ndim; });
  for (int i = 0; i < good.ndim; ++i) {
    const std::string at = "[" + std::to_string(i) + "] = ";
    for (int64_t size :
         {good.shape[i] + 8, good.shape[i] - 1, int64_t{-1}, int64_t{0}, INT64_MAX, INT64_MIN})
      add("shape" + at + std::to_string(size), [i, size](auto& t) { t.shape[i] = size; });

    if (good.shape[i] == 1) continue;  // nothing steps along it, so its stride is free
    const int64_t step = good.stride[i];
    std::vector<int64_t> strides = {0, -1, -step, INT64_MIN};
    const bool inner = i == good.ndim - 1;
    if (inner || argument.layout == Layout::kContiguous) strides.push_back(step + 1);
    if (!inner) strides.push_back(step - 8);  // the rows overlap
    if (!inner && argument.aligned) strides.push_back(step + 1);
    const size_t show_shape = strides.size();
    for (int64_t stride : {INT64_MAX, int64_t{1} << 61}) strides.push_back(stride);  // overflow
    for (size_t s = 0; s < strides.size(); ++s)
      add(
          "stride" + at + std::to_string(strides[s]),
          [i, stride = strides[s]](auto& t) { t.stride[i] = stride; }, s < show_shape);
  }
  const size_t off = argument.aligned ? tilemoe_dtype_size(good.dtype) : 1;
  add("misaligned data", [off](auto& t) { t.data = static_cast<unsigned char*>(t.data) + off; });
  return cases;
}

template <class P>
void append_tensor(Cases<P>& cases, const char* member,
                   const std::type_identity_t<std::function<tilemoe_tensor&(P&)>>& get,
                   const Argument& argument) {
  // The name that the error has for it: without the args struct that holds it.
  std::string name = member;
  for (const char* owner : {"args.", "forward.", "backward."})
    if (name.rfind(owner, 0) == 0) name.erase(0, std::strlen(owner));
  P model;
  for (const auto& bad : bad_tensors(name, get(model), argument))
    cases.push_back({bad.name, [get, change = bad.change](P& p) { change(get(p)); }, bad.words});
}

template <class P>
void append(Cases<P>& cases, const Cases<P>& more) {
  cases.insert(cases.end(), more.begin(), more.end());
}

// The workspace of p.args.
template <class P>
void append_workspace(Cases<P>& cases) {
  append<P>(cases, {BAD(p.args.workspace_bytes -= 1, "workspace", "bytes"),
                    BAD(p.args.workspace = nullptr, "workspace"),
                    BAD(p.args.workspace = static_cast<char*>(p.args.workspace) + 4, "workspace",
                        "16 bytes")});
}

// The calling thread's message has the word.
inline void expect_error(const std::string& word) {
  const std::string error = tilemoe_last_error();
  EXPECT_NE(error.find(word), std::string::npos) << "no '" << word << "' in: " << error;
}
inline void expect_refused(tilemoe_status status, const std::string& word,
                           tilemoe_status expected = TILEMOE_INVALID_ARGUMENT) {
  EXPECT_EQ(status, expected) << tilemoe_last_error();
  expect_error(word);
}
template <class P>
void expect_taken(P& p) {
  EXPECT_EQ(p.call(), TILEMOE_SUCCESS) << tilemoe_last_error();
}

// Runs every case on a call of its own.
template <class P>
void run_cases(const Cases<P>& cases) {
  // Workspaces have a part for every thread: with one, they stay small enough to be compared often.
  ASSERT_EQ(tilemoe_set_num_threads(1), TILEMOE_SUCCESS);
  {
    P good;
    expect_taken(good);
    ASSERT_STREQ(tilemoe_last_error(), "");
  }
  for (const BadCase<P>& bad : cases) {
    SCOPED_TRACE(bad.name);
    P problem;
    bad.change(problem);
    const auto before = problem.arena.bytes();
    const auto host_before = problem.host_outputs();
    EXPECT_EQ(problem.call(), bad.status) << tilemoe_last_error();
    const std::string error = tilemoe_last_error();
    EXPECT_EQ(error.rfind(std::string(problem.function()) + ": ", 0), 0u) << error;
    for (const std::string& word : bad.words) expect_error(word);
    EXPECT_TRUE(problem.arena.bytes() == before) << "something was written, though: " << error;
    EXPECT_TRUE(problem.host_outputs() == host_before) << "a host struct was written: " << error;
  }
}

}  // namespace tilemoe::arguments
