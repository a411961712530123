// Up- and down-projection of the fp8 recipe on a simulated Hopper: the bits of sums in the order of
// the recipe, and A near the activation of H, for every kernel.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <tuple>

#include "core/fp8.h"
#include "cuda/kernels/kernels.h"
#include "cuda/ops/table.h"
#include "cuda/plan.h"
#include "lora_problem.h"
#include "simulator/tensor_core.h"
#include "verify/memory.h"
#include "verify/random.h"

namespace tilemoe::test {
namespace {

struct Case {
  int64_t d = 272, n = 144;  // 128 divides neither
  tilemoe_dtype dtype = TILEMOE_BFLOAT16;
  tilemoe_activation activation = TILEMOE_SWIGLU;
  bool is_split = true;
  bool has_biases = false;
  bool gathers = true;
  bool keeps_H = true;
  bool float_scales = false;
  int64_t first_row = 0;  // of the block of columns of Y
  int64_t rank_1 = 0, rank_2 = 0;
  const cuda::TileConfiguration* tile = &cuda::kCluster256;
};

template <class Number>
std::vector<Number> numbers_of(const verify::GuardedBuffer& buffer) {
  const std::vector<std::byte> bytes = buffer.read();
  std::vector<Number> numbers(bytes.size() / sizeof(Number));
  std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(Number));
  return numbers;
}

// Codes (E, rows, columns) on the device with a scale per block of `block_rows` x 128.
class Codes {
 public:
  Codes(int64_t E, int64_t rows, int64_t columns, int32_t block_rows)
      : E_(E),
        rows_(rows),
        columns_(columns),
        block_rows_(block_rows),
        codes_(memory(), static_cast<size_t>(E * rows * columns)),
        scales_(memory(), static_cast<size_t>(E * blocks_of(rows, block_rows) * k_blocks()) * 4) {}

  // Normal numbers, quantised by the library.
  void fill(verify::Random& random, bool float_scales) {
    verify::GuardedTensor values(memory(), DType::kBFloat16, {E_, rows_, columns_});
    std::vector<float> numbers;
    for (int64_t i = 0; i < E_ * rows_ * columns_; ++i)
      numbers.push_back(static_cast<float>(random.normal()));
    values.write(numbers);
    tilemoe_quantize_fp8_args args{};
    args.block_rows = block_rows_, args.float_scales = float_scales ? 1 : 0;
    args.part_rows = rows_, args.values = values.view();
    args.codes = rows().codes, args.scales = rows().scales;
    cuda::quantize_fp8(args, nullptr);
    expect_clean_run();
    fetch();
  }
  void fetch() { codes_of_ = numbers_of<uint8_t>(codes_), scales_of_ = numbers_of<float>(scales_); }
  Fp8Rows rows() {
    return {static_cast<uint8_t*>(codes_.data()), static_cast<float*>(scales_.data())};
  }
  tilemoe_quantized weight() {
    tilemoe_quantized weight{};
    weight.format = TILEMOE_FORMAT_FP8;
    weight.codes = codes_.data(), weight.scales = scales_.data();
    return weight;
  }
  const uint8_t* codes(int64_t e, int64_t row) const {
    return &codes_of_[static_cast<size_t>((e * rows_ + row) * columns_)];
  }
  const float* scales(int64_t e, int64_t row) const {
    const int64_t block = e * blocks_of(rows_, block_rows_) + row / block_rows_;
    return &scales_of_[static_cast<size_t>(block * k_blocks())];
  }
  int64_t row_count() const { return rows_; }
  int64_t columns() const { return columns_; }
  int64_t k_blocks() const { return blocks_of(columns_, kFp8Tile); }
  bool intact() const { return codes_.guards_intact() && scales_.guards_intact(); }

 private:
  static verify::Memory& memory() { return verify::cuda_memory(); }
  int64_t E_, rows_, columns_;
  int32_t block_rows_;
  verify::GuardedBuffer codes_, scales_;
  std::vector<uint8_t> codes_of_;
  std::vector<float> scales_of_;
};

// The recipe's sums of a row of A and each row of an expert's weight.
std::vector<float> sums_of(const Codes& A, int64_t row, const Codes& W, int64_t expert) {
  constexpr auto kSteps = size_t{simulator::kE4m3Steps};
  const auto count = static_cast<size_t>(W.row_count());  // a multiple of 8
  std::vector<float> D(count), S(count);
  for (int64_t block = 0; block < A.k_blocks(); ++block) {
    for (int64_t k = block * kFp8Tile; k < (block + 1) * kFp8Tile; k += simulator::kE4m3Steps) {
      const auto steps =
          static_cast<size_t>(std::clamp<int64_t>(A.columns() - k, 0, simulator::kE4m3Steps));
      uint8_t left[kSteps] = {};
      std::vector<uint8_t> right(count * kSteps);
      std::copy_n(A.codes(0, row) + k, steps, left);
      for (size_t b = 0; b < count; ++b)
        std::copy_n(W.codes(expert, static_cast<int64_t>(b)) + k, steps, &right[b * kSteps]);
      simulator::multiply_e4m3(1, static_cast<int>(count), left, right.data(),
                               k != block * kFp8Tile, S.data());
    }
    const float scale = A.scales(0, row)[block];
    for (size_t b = 0; b < count; ++b)
      D[b] = std::fma(S[b], scale * W.scales(expert, static_cast<int64_t>(b))[block], D[b]);
  }
  return D;
}

double activation_of(tilemoe_activation activation, double gate, double up) {
  if (activation == TILEMOE_REGLU) return std::max(gate, 0.0) * up;
  return gate / (1 + std::exp(-gate)) * up;
}

class Problem {
 public:
  explicit Problem(const Case& c)
      : case_(c),
        rows_({130, 0, 3, 67}, 9, 150),
        X_(1, c.gathers ? rows_.T : rows_.capacity, c.d, 1),
        gate_(rows_.E, (c.is_split ? 1 : 2) * c.n, c.d, kFp8Tile),
        up_(rows_.E, c.n, c.d, kFp8Tile),
        W2_(rows_.E, c.d, c.n, kFp8Tile),
        A_(1, rows_.capacity, c.n, 1),
        b1_(c.dtype, {rows_.E, 2 * c.n}, {2 * c.n, 1}),
        b2_(c.dtype, {rows_.E, c.d}, {c.d, 1}),
        P1_(factor_rows(rows_.capacity, c.rank_1)),
        P2_(factor_rows(rows_.capacity, c.rank_2)),
        B1_(factor(2 * c.n, c.rank_1)),
        B2_(factor(c.d, c.rank_2)),
        A_values_(c.dtype, {rows_.capacity, c.n}, {c.n, 1}),
        H_(c.dtype, {rows_.capacity, 2 * c.n}, {2 * c.n, 1}),
        Y_(c.dtype, {rows_.capacity, Y_columns()}, {Y_columns(), 1}) {
    verify::Random random(3, 1);
    for (Codes* codes : {&X_, &gate_, &up_, &W2_}) codes->fill(random, c.float_scales);
    b1_.fill([](const Index& i) { return static_cast<double>(i[0] + i[1] % 7) / 8; });
    b2_.fill([](const Index& i) { return static_cast<double>(i[0] + i[1] % 5) / 4; });
    for (PlacedTensor* P : {&P1_, &P2_})
      P->fill([](const Index& i) { return static_cast<double>((3 * i[0] + i[1]) % 5 - 2) / 4; });
    for (PlacedTensor* B : {&B1_, &B2_})
      B->fill([&](const Index& i) {
        return i[2] == term_of(*B, i[1]) ? static_cast<double>(i[0]) + 0.5 : 0.;
      });
    experts_.struct_size = sizeof experts_, experts_.device = TILEMOE_CUDA;
    experts_.dtype = c.dtype, experts_.d = c.d, experts_.n = c.n, experts_.E = rows_.E;
    experts_.activation = c.activation;
    experts_.gate_layout = c.is_split ? TILEMOE_GATE_SPLIT : TILEMOE_GATE_CONCATENATED;
  }

  void run() {
    start();
    expect_clean_run();
    A_.fetch();
    EXPECT_TRUE(A_.intact());
  }
  void start() {
    const int64_t E = rows_.E, d = case_.d, n = case_.n;
    Rows rows{.E = E, .capacity = rows_.capacity, .offsets = rows_.offsets.data<int32_t>()};
    if (case_.gathers) rows.token = rows_.token.data<int32_t>();
    UpProjection up{};
    up.experts = &experts_, up.rows = rows;
    up.X = shape(X_rows(), d);
    up.weights.W1 = shape(E, (case_.is_split ? 1 : 2) * n, d);
    if (case_.is_split) up.weights.W1_up = up.weights.W1;
    if (case_.has_biases) up.weights.b1 = b1_.tensor();
    if (case_.has_biases && case_.is_split) {
      up.weights.b1_up = rows_of(columns_of(b1_.tensor(), n, n), 0, n, 1);
      up.weights.b1 = columns_of(b1_.tensor(), 0, n);
    }
    if (case_.keeps_H) up.H = H_.tensor();
    if (case_.rank_1 > 0) up.adapter = {P1_.tensor(), B1_.tensor()};
    if (case_.rank_2 > 0) up.A = A_values_.tensor();
    up.codes = {gate_.weight(), case_.is_split ? up_.weight() : tilemoe_quantized{}};
    up.X_codes = X_.rows(), up.A_codes = A_.rows(), up.float_scales = case_.float_scales;
    up.tuning.tile = case_.tile;
    start(up);

    DownProjection down{};
    down.experts = &experts_, down.rows = rows;
    down.W2 = shape(E, Y_columns(), n);
    if (case_.has_biases) down.b2 = columns_of(b2_.tensor(), case_.first_row, Y_columns());
    down.Y = Y_.tensor();
    down.codes = {W2_.weight(), {}, case_.first_row};
    down.A_codes = A_.rows();
    if (case_.rank_2 > 0) {
      down.adapter = {P2_.tensor(), B2_.tensor()};
      tilemoe_tensor& factor = down.adapter.factor;
      factor.data = static_cast<char*>(factor.data) + case_.first_row * factor.stride[1] * 2;
      factor.shape[1] = Y_columns();
    }
    down.tuning.tile = case_.tile;
    start(down);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  bool has_run(const cuda::instances::Row& row) const {
    return std::ranges::any_of(
        run_, [&](const auto& one) { return one.key == row.key && one.tile == row.tile; });
  }
  void expect_sums() {
    const auto has_row = [&](const Index& i) { return i[0] < rows_.M; };
    if (case_.keeps_H) H_.expect("H", has_row, [&](const Index& i) { return H(i[0], i[1]); });
    Y_.expect("Y", has_row, [&](const Index& i) {
      const int64_t e = expert_of(i[0]), column = case_.first_row + i[1];
      const float bias = case_.has_biases ? static_cast<float>(b2_.at(e, column)) : 0;
      const float Y = sum(A_, i[0], W2_, e, column);
      return (case_.rank_2 > 0 ? Y + low_rank(P2_, B2_, i[0], column) : Y) + bias;
    });
    if (case_.rank_2 > 0 && case_.activation == TILEMOE_REGLU)
      A_values_.expect("A", has_row, [&](const Index& i) {
        return std::max(H(i[0], i[1]), 0.f) * H(i[0], case_.n + i[1]);
      });
    for (int64_t r = 0; r < rows_.M; ++r)
      for (int64_t first = 0; first < case_.n; first += kFp8Tile) expect_codes(r, first);
  }

 private:
  template <class Step>
  void start(const Step& step) {
    run_.push_back({cuda::key_of(step), *cuda::kernel_of(step)});
    cuda::start(cuda::kernel_of(step), step);
  }
  int64_t X_rows() const { return case_.gathers ? rows_.T : rows_.capacity; }
  int64_t Y_columns() const { return case_.d - case_.first_row; }
  tilemoe_tensor shape(int64_t rows, int64_t columns) const {
    return {.data = nullptr,
            .dtype = case_.dtype,
            .ndim = 2,
            .shape = {rows, columns},
            .stride = {columns, 1}};
  }
  tilemoe_tensor shape(int64_t E, int64_t rows, int64_t columns) const {
    return {.data = nullptr,
            .dtype = case_.dtype,
            .ndim = 3,
            .shape = {E, rows, columns},
            .stride = {rows * columns, columns, 1}};
  }
  static tilemoe_tensor columns_of(tilemoe_tensor bias, int64_t first, int64_t columns) {
    bias.data = static_cast<char*>(bias.data) + first * 2;
    bias.shape[1] = columns;
    return bias;
  }
  // P (capacity, rank) and B (E, rows, rank), of which each row has one number: sums are exact. Of
  // rank 0: one column that no step reads.
  PlacedTensor factor_rows(int64_t rows, int64_t rank) const {
    rank = std::max<int64_t>(rank, 1);
    return PlacedTensor(case_.dtype, {rows, rank}, {rank, 1});
  }
  PlacedTensor factor(int64_t rows, int64_t rank) const {
    rank = std::max<int64_t>(rank, 1);
    return PlacedTensor(case_.dtype, {rows_.E, rows, rank}, {rows * rank, rank, 1});
  }
  static int64_t term_of(const PlacedTensor& B, int64_t row) {
    return (5 * row + 3) % B.tensor().shape[2];
  }
  float low_rank(const PlacedTensor& P, const PlacedTensor& B, int64_t row, int64_t column) const {
    const int64_t term = term_of(B, column);
    return static_cast<float>(P.at(row, term) * B.at({expert_of(row), column, term}));
  }
  int64_t expert_of(int64_t row) const {
    int64_t e = 0;
    while (rows_.end(e) <= row) ++e;
    return e;
  }
  float sum(const Codes& A, int64_t a, const Codes& W, int64_t expert, int64_t w) const {
    std::vector<float>& known = sums_[{&A, a, &W, expert}];
    if (known.empty()) known = sums_of(A, a, W, expert);
    return known[static_cast<size_t>(w)];
  }
  float H(int64_t row, int64_t column) const {
    const int64_t e = expert_of(row), source = case_.gathers ? row * 7 % rows_.T : row;
    const bool is_up = column >= case_.n;
    float H = is_up && case_.is_split ? sum(X_, source, up_, e, column - case_.n)
                                      : sum(X_, source, gate_, e, column);
    if (case_.rank_1 > 0) H += low_rank(P1_, B1_, row, column);
    return case_.has_biases ? H + static_cast<float>(b1_.at(e, column)) : H;
  }
  // A's scale is that of its own numbers, and a code is at most one from that of the activation in
  // double: exponentials differ.
  void expect_codes(int64_t row, int64_t first) {
    const int64_t end = std::min(case_.n, first + kFp8Tile);
    std::vector<float> A;
    float amax = 0;
    for (int64_t c = first; c < end; ++c) {
      A.push_back(
          static_cast<float>(activation_of(case_.activation, H(row, c), H(row, case_.n + c))));
      amax = std::max(amax, std::fabs(A.back()));
    }
    const float factor = fp8_factor(amax, largest_of(case_.dtype), !case_.float_scales);
    const float scale = A_.scales(0, row)[first / kFp8Tile];
    ASSERT_NEAR(scale * factor, 1, 1e-5) << "row " << row << ", column " << first;
    for (int64_t c = first; c < end; ++c) {
      const float number = A[static_cast<size_t>(c - first)] / scale;
      const float code = e4m3_to_float(A_.codes(0, row)[c]);
      ASSERT_NEAR(code, number, std::max(std::fabs(number) * 0x1.01p-4, 0x1p-10))
          << "A at " << row << ", " << c;
    }
  }

  Case case_;
  ExpertRows rows_;
  Codes X_, gate_, up_, W2_, A_;
  PlacedTensor b1_, b2_, P1_, P2_, B1_, B2_, A_values_, H_, Y_;
  tilemoe_experts experts_{};
  std::vector<cuda::instances::Row> run_;
  mutable std::map<std::tuple<const Codes*, int64_t, const Codes*, int64_t>, std::vector<float>>
      sums_;
};

class Fp8Projections : public testing::Test {
 protected:
  void SetUp() override {
    static uint64_t seed = 0;  // a repeated test has another one
    simulate("sm90");
    simulator::Machine::instance().set_seed(++seed);
  }
  static void check(const Case& c) {
    Problem problem(c);
    problem.run();
    problem.expect_sums();
  }
};

// Each row of the table, by a case that is made of it.
TEST_F(Fp8Projections, HaveTheSumsOfTheRecipe) {
  using enum cuda::Activations;
  int rows = 0;
  for (const cuda::instances::Row& row : cuda::instances::kRows) {
    const cuda::Variant& variant = row.key.variant;
    const bool is_up = row.key.gemm == cuda::GemmName::kUpProjection;
    if (!is_fp8(variant.recipe) || !(is_up || row.key.gemm == cuda::GemmName::kDownProjection))
      continue;
    SCOPED_TRACE("row " + std::to_string(++rows));
    Problem problem(
        {.dtype = variant.recipe == cuda::RecipeName::kFp8BF16 ? TILEMOE_BFLOAT16 : TILEMOE_FLOAT16,
         .activation = is_up && variant.activations != kSwiGLU ? TILEMOE_REGLU : TILEMOE_SWIGLU,
         .gathers = variant.gathers,
         .rank_1 = variant.adapter && is_up ? 80 : 0,
         .rank_2 = variant.adapter ? 24 : 0,
         .tile = &row.tile});
    problem.run();
    problem.expect_sums();
    EXPECT_TRUE(problem.has_run(row)) << "another kernel ran";
  }
  EXPECT_EQ(rows, 13);
}
TEST_F(Fp8Projections, AddAnAdapterOfOneWeight) {
  check({.activation = TILEMOE_REGLU, .has_biases = true, .rank_1 = 8});
  check({.activation = TILEMOE_REGLU, .has_biases = true, .gathers = false, .rank_2 = 64});
}
TEST_F(Fp8Projections, AddAnAdapterToABlockOfColumns) {
  check({.d = 400,
         .n = 128,
         .dtype = TILEMOE_FLOAT16,
         .activation = TILEMOE_REGLU,
         .is_split = false,
         .keeps_H = false,
         .first_row = 128,
         .rank_1 = 16,
         .rank_2 = 72});
}
TEST_F(Fp8Projections, AddBiases) {
  check({.has_biases = true, .keeps_H = false});
}
TEST_F(Fp8Projections, ReadConcatenatedWeightsAndABlockOfColumns) {
  check({.d = 400, .n = 128, .is_split = false, .has_biases = true, .first_row = 128});
}
// A lane keeps the scales of a warp's number of k blocks.
TEST_F(Fp8Projections, HaveLongSums) {
  check({.d = 33 * kFp8Tile - 112, .n = 16});
}
TEST_F(Fp8Projections, HaveOtherActivationsAndScales) {
  check({.dtype = TILEMOE_FLOAT16, .activation = TILEMOE_REGLU, .float_scales = true});
  check({.d = 16, .n = 16, .activation = TILEMOE_REGLU});
}

// The planted defects of these kernels (simulator/defects.inc).
TEST_F(Fp8Projections, HaveTheirDefectsFound) {
  using enum simulator::FindingKind;
  simulator::Machine& machine = simulator::Machine::instance();
  int number = 0, found = 0;
  const auto run = [&](int defect, uint64_t seed) {
    Problem problem({.keeps_H = false});
    machine.plant(defect), machine.set_seed(seed);
    problem.start();
    machine.plant(0);
    return machine.take_findings();
  };
  const auto check_defect = [&](const std::string& name, uint64_t seed,
                                simulator::FindingKind kind) {
    ++found;
    EXPECT_TRUE(run(0, seed).empty()) << name;
    std::string all;
    bool is_found = false;
    for (const simulator::Finding& finding : run(number, seed))
      all += describe(finding) + "\n", is_found = is_found || finding.kind == kind;
    EXPECT_TRUE(is_found) << name << ":\n" << all;
  };
#define DEFECT(name, file, text, replacement, test_case, device, seed, kind) \
  ++number;                                                                  \
  if (std::string(test_case) == "fp8") check_defect(#name, seed, kind);
  constexpr auto kWrongValues = kReadBeforeWrite;
  static_cast<void>(kWrongValues);
#include "simulator/defects.inc"
#undef DEFECT
  EXPECT_EQ(found, 2);
}

}  // namespace
}  // namespace tilemoe::test
