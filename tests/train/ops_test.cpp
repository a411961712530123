// The trainer's ops: forward against plain float64 loops, backward against their differences.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <stdexcept>
#include <thread>

#include "gradients.h"
#include "tilemoe/tilemoe.h"
#include "train/operators.h"
#include "train/ops/partial_sums.h"

namespace tilemoe::train {
namespace {

Operators& cpu = cpu_operators();

// ---------------------------------------------------------------- normalisation

Doubles norm_reference(const Doubles& x, const Doubles& gain) {
  const size_t width = gain.size();
  Doubles y(x.size());
  for (size_t row = 0; row < x.size(); row += width) {
    const std::span<const double> values(&x[row], width);
    const double rms = std::sqrt(inner(values, values) / static_cast<double>(width) + 1e-6);
    for (size_t c = 0; c < width; ++c) y[row + c] = gain[c] * x[row + c] / rms;
  }
  return y;
}

TEST(RmsNorm, EqualsItsDefinitionAndDerivative) {
  constexpr int64_t kRows = 2 * kRowsPerTask + 3, kWidth = 48;
  Doubles x = random_doubles("x", kRows * kWidth), gain = random_doubles("gain", kWidth);
  const Doubles dy = random_doubles("dy", kRows * kWidth);
  const FloatVec x_f = to_float(x), gain_f = to_float(gain), dy_f = to_float(dy);
  FloatVec y = zeros(kRows * kWidth), inverse_rms = zeros(kRows);
  cpu.rms_norm(x_f, gain_f, y, inverse_rms);
  EXPECT_LE(relative_error(y, norm_reference(x, gain)), kFloatTolerance);

  FloatVec dx(at(kRows * kWidth), 1.f), dgain = zeros(kWidth);
  FloatVec scratch = zeros(rms_norm_scratch(kRows, kWidth));
  cpu.rms_norm_backward(x_f, gain_f, inverse_rms, dy_f, dx, dgain, scratch);
  for (float& value : dx) value -= 1.f;  // it was added to
  // The rows are independent: the first and the last task's are enough of them.
  for (const int64_t row : {int64_t{0}, kRows - 1}) {
    const auto begin = row * kWidth;
    Doubles one(x.begin() + begin, x.begin() + begin + kWidth);
    const std::span<const double> one_dy(&dy[at(begin)], at(kWidth));
    const Doubles want =
        central_differences(one, [&] { return inner(norm_reference(one, gain), one_dy); });
    EXPECT_LE(relative_error(std::span(dx).subspan(at(begin), at(kWidth)), want), 1e-5);
  }
  const Doubles want =
      central_differences(gain, [&] { return inner(norm_reference(x, gain), dy); });
  EXPECT_LE(relative_error(dgain, want), kFloatTolerance);
}

// ------------------------------------------------------------------ convolution

Doubles conv_reference(Sequences sequences, const Doubles& x, const Doubles& filter, int64_t taps,
                       const Doubles& addend) {
  const int64_t width = std::ssize(filter) / taps;
  Doubles y = addend;
  for (int64_t t = 0; t < sequences.tokens(); ++t)
    for (int64_t j = 0; j <= std::min(taps - 1, t % sequences.length); ++j)
      for (int64_t c = 0; c < width; ++c)
        y[at(t * width + c)] += filter[at(j * width + c)] * x[at((t - j) * width + c)];
  return y;
}

TEST(CausalConv, EqualsItsDefinitionAndDerivative) {
  constexpr int64_t kTaps = 3, kWidth = 16;
  // The last sequence crosses a border between tasks; one sequence is shorter than the filter.
  for (const Sequences sequences : {Sequences{3, 50}, Sequences{4, 2}}) {
    const int64_t size = sequences.tokens() * kWidth;
    Doubles x = random_doubles("x", size), filter = random_doubles("filter", kTaps * kWidth);
    const Doubles addend = random_doubles("addend", size), dy = random_doubles("dy", size);
    const FloatVec x_f = to_float(x), filter_f = to_float(filter);
    FloatVec y = zeros(size);
    cpu.causal_conv(sequences, x_f, filter_f, kTaps, to_float(addend), y);
    EXPECT_LE(relative_error(y, conv_reference(sequences, x, filter, kTaps, addend)),
              kFloatTolerance);

    FloatVec dx(at(size), 1.f), dfilter = zeros(kTaps * kWidth);
    FloatVec scratch = zeros(causal_conv_scratch(sequences, kTaps, kWidth));
    cpu.causal_conv_backward(sequences, x_f, filter_f, kTaps, to_float(dy), dx, dfilter, scratch);
    for (float& value : dx) value -= 1.f;
    const auto loss = [&] {
      return inner(conv_reference(sequences, x, filter, kTaps, addend), dy);
    };
    EXPECT_LE(relative_error(dx, central_differences(x, loss)), kFloatTolerance);
    EXPECT_LE(relative_error(dfilter, central_differences(filter, loss)), kFloatTolerance);
  }
}

// -------------------------------------------------------------------- embedding

TEST(Embedding, AddsTheRowsOfAByteAndOfThoseBefore) {
  constexpr int64_t kTables = 3, kWidth = 16;
  const Sequences sequences{2, 70};
  const int64_t pitch = kTables - 1 + sequences.length;
  const RandomStream random(3, "bytes");
  std::vector<uint8_t> bytes(at(sequences.count * pitch));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(random.bits(i) % 5);
  const Doubles table = random_doubles("table", kTables * kByteValues * kWidth);
  const Doubles dx = random_doubles("dx", sequences.tokens() * kWidth);
  Doubles want(at(sequences.tokens() * kWidth)), want_gradient(table.size());
  for (int64_t t = 0; t < sequences.tokens(); ++t)
    for (int64_t j = 0; j < kTables; ++j) {
      const int64_t sequence = t / sequences.length, place = t % sequences.length;
      const int64_t byte = bytes[at(sequence * pitch + kTables - 1 + place - j)];
      for (int64_t c = 0; c < kWidth; ++c) {
        const size_t entry = at((j * kByteValues + byte) * kWidth + c);
        want[at(t * kWidth + c)] += table[entry];
        want_gradient[entry] += dx[at(t * kWidth + c)];
      }
    }
  FloatVec x = zeros(sequences.tokens() * kWidth), dtable(table.size(), NAN);
  cpu.embed(sequences, bytes, to_float(table), x);
  EXPECT_LE(relative_error(x, want), kFloatTolerance);
  cpu.embed_backward(sequences, bytes, to_float(dx), dtable);
  EXPECT_LE(relative_error(dtable, want_gradient), kFloatTolerance);
}

// ---------------------------------------------------------------- cross-entropy

double loss_reference(std::span<const double> logits, uint8_t target) {
  double sum = 0;
  for (const double logit : logits) sum += std::exp(logit);
  return std::log(sum) - logits[target];
}

TEST(CrossEntropy, EqualsItsDefinitionAndDerivative) {
  constexpr int64_t kRows = 3;
  const std::vector<uint8_t> targets = {0, 255, 17};
  Doubles logits = random_doubles("logits", kRows * kByteValues);
  const auto row = [&](int64_t t) {
    return std::span<const double>(logits).subspan(at(t * kByteValues), at(kByteValues));
  };
  Doubles want;
  for (int64_t t = 0; t < kRows; ++t) want.push_back(loss_reference(row(t), targets[at(t)]));
  FloatVec losses = zeros(kRows), losses_too = zeros(kRows), gradient = to_float(logits);
  cpu.cross_entropy(to_float(logits), targets, losses);
  EXPECT_LE(relative_error(losses, want), kFloatTolerance);

  cpu.cross_entropy_with_gradient(gradient, targets, 0.25f, losses_too);
  EXPECT_EQ(losses, losses_too);
  const Doubles want_gradient = central_differences(logits, [&] {
    double sum = 0;
    for (int64_t t = 0; t < kRows; ++t) sum += loss_reference(row(t), targets[at(t)]);
    return 0.25 * sum;
  });
  EXPECT_LE(relative_error(gradient, want_gradient), kFloatTolerance);
}

TEST(CrossEntropy, StaysFiniteWhereLogitsAreLarge) {
  FloatVec logits(at(kByteValues), -1e4f), losses = zeros(1);
  logits[3] = 1e4f;
  cpu.cross_entropy(logits, std::vector<uint8_t>{3}, losses);
  EXPECT_EQ(losses[0], 0.f);
  cpu.cross_entropy_with_gradient(logits, std::vector<uint8_t>{4}, 1.f, losses);
  EXPECT_EQ(losses[0], 2e4f);
  EXPECT_EQ(logits[3], 1.f);
  EXPECT_EQ(logits[4], -1.f);
}

// ------------------------------------------------------------------------ linear

TEST(Linear, EqualsPlainLoops) {
  const LinearShape shape{1030, 48, 33};  // three tasks, the last one short
  const int64_t in = shape.in, out = shape.out;
  const Doubles x = random_doubles("x", shape.rows * in), weight = random_doubles("w", out * in);
  const Doubles dy = random_doubles("dy", shape.rows * out);
  Doubles y(at(shape.rows * out)), dx(at(shape.rows * in)), dweight(at(out * in)), dbias(at(out));
  for (int64_t t = 0; t < shape.rows; ++t)
    for (int64_t o = 0; o < out; ++o) {
      const double gradient = dy[at(t * out + o)];
      dbias[at(o)] += gradient;
      for (int64_t i = 0; i < in; ++i) {
        y[at(t * out + o)] += x[at(t * in + i)] * weight[at(o * in + i)];
        dx[at(t * in + i)] += gradient * weight[at(o * in + i)];
        dweight[at(o * in + i)] += gradient * x[at(t * in + i)];
      }
    }
  const FloatVec x_f = to_float(x), weight_f = to_float(weight), dy_f = to_float(dy);
  FloatVec y_f(y.size(), NAN), dx_f(dx.size(), NAN), dweight_f(dweight.size(), NAN);
  FloatVec dbias_f(dbias.size(), NAN), scratch = zeros(linear_backward_weight_scratch(shape));
  cpu.linear(shape, x_f, weight_f, y_f);
  EXPECT_LE(relative_error(y_f, y), kFloatTolerance);
  cpu.linear_backward_input(shape, dy_f, weight_f, dx_f);
  EXPECT_LE(relative_error(dx_f, dx), kFloatTolerance);
  cpu.linear_backward_weight(shape, dy_f, x_f, dweight_f, scratch);
  EXPECT_LE(relative_error(dweight_f, dweight), kFloatTolerance);
  FloatVec bias_scratch = zeros(bias_gradient_scratch(shape.rows, out));
  cpu.bias_gradient(dy_f, dbias_f, bias_scratch);
  EXPECT_LE(relative_error(dbias_f, dbias), kFloatTolerance);

  cpu.linear(shape, x_f, weight_f, y_f, Write::kAdd);
  for (double& value : y) value *= 2;
  EXPECT_LE(relative_error(y_f, y), kFloatTolerance);
  cpu.linear_backward_input(shape, dy_f, weight_f, dx_f, Write::kAdd);
  for (double& value : dx) value *= 2;
  EXPECT_LE(relative_error(dx_f, dx), kFloatTolerance);
  const Doubles bias = random_doubles("bias", out);
  for (size_t i = 0; i < y.size(); ++i) y[i] += bias[i % at(out)];
  cpu.add_bias(to_float(bias), y_f);
  EXPECT_LE(relative_error(y_f, y), kFloatTolerance);
}

TEST(PartialSums, AddTheParts) {
  constexpr int64_t kParts = 3, kWidth = 5000;  // two tasks
  FloatVec partials = zeros(kParts * kWidth), sum(at(kWidth), NAN);
  for (size_t i = 0; i < partials.size(); ++i) partials[i] = static_cast<float>(i);
  sum_partials(partials, kParts, sum);
  for (int64_t i = 0; i < kWidth; ++i)
    ASSERT_EQ(sum[at(i)], static_cast<float>(3 * i + 3 * kWidth)) << i;
}

// ------------------------------------------------------------------------- AdamW

TEST(AdamWUpdate, EqualsItsDefinition) {
  constexpr int64_t kSize = 48;
  const AdamWFactors factors{.gradient_scale = 0.5f,
                             .beta1 = 0.75f,
                             .beta2 = 0.875f,
                             .epsilon = 0.0625f,
                             .step_size = 0.25f,
                             .square_scale = 2.f,
                             .kept = 0.5f};
  const Doubles gradient = random_doubles("g", kSize);
  Doubles value = random_doubles("value", kSize), mean = random_doubles("mean", kSize);
  Doubles square = random_doubles("square", kSize);
  for (double& v : square) v = static_cast<float>(v * v);
  const FloatVec gradient_f = to_float(gradient);
  FloatVec value_f = to_float(value), mean_f = to_float(mean), square_f = to_float(square);
  cpu.adamw_update({{.stretch = {.size = kSize,
                                 .gradient = gradient_f.data(),
                                 .value = value_f.data(),
                                 .mean = mean_f.data(),
                                 .square = square_f.data()},
                     .factors = factors}});
  for (size_t i = 0; i < gradient.size(); ++i) {
    const double g = 0.5 * gradient[i];
    mean[i] = 0.75 * mean[i] + 0.25 * g;
    square[i] = 0.875 * square[i] + 0.125 * g * g;
    value[i] = 0.5 * value[i] - 0.25 * mean[i] / (std::sqrt(2 * square[i]) + 0.0625);
  }
  EXPECT_LE(relative_error(mean_f, mean), kFloatTolerance);
  EXPECT_LE(relative_error(square_f, square), kFloatTolerance);
  EXPECT_LE(relative_error(value_f, value), kFloatTolerance);
}

TEST(SumOfSquares, EqualsPlainLoop) {
  const Doubles values = random_doubles("values", 2000);  // several runs, the last one short
  const FloatVec values_f = to_float(values);
  EXPECT_NEAR(cpu.sum_of_squares({values_f}) / inner(values, values), 1, 1e-6);
}

// ----------------------------------------------------------------------- threads

TEST(ParallelFor, RunsEachTaskOnceByAWorkerOfItsOwn) {
  for (const int threads : {1, 3, 2}) {
    ASSERT_EQ(tilemoe_set_num_threads(threads), TILEMOE_SUCCESS);
    EXPECT_EQ(num_threads(), threads);
    for (const int64_t tasks : {0, 1, 2, 1000}) {
      std::vector<std::atomic<int>> runs(at(tasks)), busy(at(threads));
      std::atomic<bool> shared = false;
      parallel_for(tasks, [&](int64_t task, int worker) {
        if (busy[at(worker)]++ != 0) shared = true;
        ++runs[at(task)];
        --busy[at(worker)];
      });
      EXPECT_FALSE(shared);
      EXPECT_TRUE(std::all_of(runs.begin(), runs.end(), [](int count) { return count == 1; }));
    }
    // As many tasks as workers, each of which waits for the others: all workers have one.
    std::vector<std::atomic<int>> taken(at(threads));
    std::atomic<int> begun = 0;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    parallel_for(threads, [&](int64_t, int worker) {
      ++taken[at(worker)];
      ++begun;
      while (begun < threads && std::chrono::steady_clock::now() < deadline)
        std::this_thread::yield();
    });
    EXPECT_TRUE(std::all_of(taken.begin(), taken.end(), [](int count) { return count == 1; }));
    const auto fails = [](int64_t task, int) {
      if (task == 7) throw std::runtime_error("task 7");
    };
    EXPECT_THROW(parallel_for(100, fails), std::runtime_error);
    EXPECT_NO_THROW(parallel_for(5, fails));  // nothing of the failure is left
  }
  EXPECT_EQ(tilemoe_set_num_threads(0), TILEMOE_SUCCESS);
}

// No handler runs in the middle of a loop, whichever thread takes the signal.
TEST(ParallelFor, LetsSignalsWait) {
  static volatile std::sig_atomic_t seen = 0;
  const auto earlier = std::signal(SIGUSR1, [](int) { seen = 1; });
  std::atomic<bool> early = false;
  parallel_for(100, [&](int64_t task, int) {
    if (task == 3) ::kill(::getpid(), SIGUSR1);
    if (seen != 0) early = true;
  });
  EXPECT_FALSE(early);
  EXPECT_EQ(seen, 1);
  std::signal(SIGUSR1, earlier);
}

}  // namespace
}  // namespace tilemoe::train
