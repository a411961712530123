// Sums of rows of several arrays, each argument wrong in every way.
#include "arguments_support.h"

namespace tilemoe::arguments {
namespace {

constexpr int64_t kRows = 5, kPlaces = 3, kWidth = 24, kSourceRows = 4;
constexpr int32_t kSources = 3;

struct SumRows {
  Arena arena;
  tilemoe_sum_rows_args args{};
  const tilemoe_sum_rows_args* args_pointer = &args;
  const void* sources[TILEMOE_MAX_SOURCES + 1] = {};

  SumRows() {
    args.struct_size = sizeof args;
    args.sources = kSources, args.source = sources;
    args.source_rows = kSourceRows;
    for (int32_t s = 0; s < kSources; ++s)
      sources[s] = new_tensor(arena, TILEMOE_FLOAT32, {kSourceRows, kWidth}).data;
    args.place = new_tensor(arena, TILEMOE_INT32, {kRows, kPlaces});
    args.addend = new_tensor(arena, TILEMOE_FLOAT32, {kRows, kWidth});
    args.out = new_tensor(arena, TILEMOE_FLOAT32, {kRows, kWidth});
  }
  bool accepts(const std::string& name, tilemoe_dtype dtype) const {
    return dtype == (name == "place" ? TILEMOE_INT32 : TILEMOE_FLOAT32);
  }
  bool accepts_ndim(const std::string&, int) const { return false; }
  std::vector<int64_t> host_outputs() const { return {}; }
  const char* function() const { return "tilemoe_sum_rows"; }
  tilemoe_status call() { return tilemoe_sum_rows(args_pointer); }
  tilemoe_tensor source(int32_t s) const {
    return tensor(const_cast<void*>(sources[s]), TILEMOE_FLOAT32, {kSourceRows, kWidth});
  }
};

using Bad = BadCase<SumRows>;

// rows and d come from out, P from place: a wrong shape of theirs may show at another tensor, as
// another dtype of out does.
void append_tensor(std::vector<Bad>& cases, const char* name,
                   tilemoe_tensor tilemoe_sum_rows_args::*member, Layout layout, bool optional,
                   bool decides) {
  const bool aligned = layout == Layout::kRows;
  for (Bad bad : tensor_cases<SumRows>(
           {name, [member](SumRows& p) -> tilemoe_tensor& { return p.args.*member; }, layout,
            optional, aligned})) {
    if (decides && (bad.name.find("shape[") != std::string::npos ||
                    bad.name.find("dtype") != std::string::npos))
      bad.words.clear();
    // (5, 3) of place may also be (5, 2): P is place's own to say
    if (bad.name == "place: shape[1] = 2" || bad.name == "place: shape[1] = 11") continue;
    cases.push_back(bad);
  }
}

TEST(SumRowsArguments, EachIsChecked) {
  std::vector<Bad> cases = {
      {"args null", [](SumRows& p) { p.args_pointer = nullptr; }, {"args is null"}},
      {"struct_size", [](SumRows& p) { p.args.struct_size = 8; }, {"struct_size is 8"}},
      {"device 3", [](SumRows& p) { p.args.device = tilemoe_device(3); }, {"device is 3"}},
      {"cuda", [](SumRows& p) { p.args.device = TILEMOE_CUDA; }, {"CUDA"}, TILEMOE_UNSUPPORTED},
      {"no source", [](SumRows& p) { p.args.sources = 0; }, {"sources is 0", "1 to 64"}},
      {"-1 sources", [](SumRows& p) { p.args.sources = -1; }, {"sources is -1"}},
      {"65 sources", [](SumRows& p) { p.args.sources = 65; }, {"sources is 65", "1 to 64"}},
      {"source null", [](SumRows& p) { p.args.source = nullptr; }, {"source is null"}},
      {"source[1] null",
       [](SumRows& p) { p.sources[1] = nullptr; },
       {"source[1]", "(4, 24)", "null"}},
      {"source[2] misaligned",
       [](SumRows& p) { p.sources[2] = static_cast<const char*>(p.sources[2]) + 8; },
       {"source[2]", "16 bytes"}},
      {"source_rows -1", [](SumRows& p) { p.args.source_rows = -1; }, {"source_rows is -1"}},
      {"source_rows too many",
       [](SumRows& p) { p.args.source_rows = INT32_MAX / kSources + 1; },
       {"source_rows is 715827883", "715827882"}},
      {"source_rows INT64_MAX",
       [](SumRows& p) { p.args.source_rows = INT64_MAX; },
       {"source_rows is 9223372036854775807"}},
      {"d no multiple of 8",
       [](SumRows& p) {
         for (tilemoe_tensor* t : {&p.args.out, &p.args.addend}) t->shape[1] = 20;
       },
       {"d is 20", "8"}},
      {"d 0",
       [](SumRows& p) {
         for (tilemoe_tensor* t : {&p.args.out, &p.args.addend}) t->shape[1] = 0;
       },
       {"d is 0"}},
      {"no place a row",
       [](SumRows& p) {
         p.args.place = tensor(p.args.place.data, TILEMOE_INT32, {kRows, 0});
       },
       {"P is 0", "1 to 64"}},
      {"65 places a row",
       [](SumRows& p) {
         p.args.place = tensor(p.args.place.data, TILEMOE_INT32, {kRows, 65});
       },
       {"P is 65", "1 to 64"}},
      {"another dtype than the addend's",
       [](SumRows& p) { p.args.out.dtype = TILEMOE_BFLOAT16; },
       {"addend", "bfloat16"}},
      {"too many rows",
       [](SumRows& p) { p.args.out.shape[0] = int64_t{1} << 31; },
       {"rows is 2147483648"}},
      {"out over place",
       [](SumRows& p) { p.args.out.data = p.args.place.data; },
       {"out", "place", "shares memory"}},
      {"out over a source",
       [](SumRows& p) { p.args.out.data = p.source(1).data; },
       {"out", "source[1]", "shares memory"}},
      {"out from a source's last row on",
       [](SumRows& p) {
         p.args.out.data = static_cast<char*>(p.source(0).data) + (kSourceRows - 1) * kWidth * 4;
       },
       {"out", "source[0]", "shares memory"}},
      {"out a row beside the addend",
       [](SumRows& p) { p.args.addend.data = static_cast<char*>(p.args.out.data) + kWidth * 4; },
       {"out", "addend", "shares memory"}},
  };
  append_tensor(cases, "place", &tilemoe_sum_rows_args::place, Layout::kContiguous, false, false);
  append_tensor(cases, "addend", &tilemoe_sum_rows_args::addend, Layout::kRows, true, false);
  append_tensor(cases, "out", &tilemoe_sum_rows_args::out, Layout::kRows, false, true);
  run_cases(cases);
}

TEST(SumRowsArguments, WhatIsTaken) {
  {
    SumRows problem;  // values are no errors
    for (int64_t i = 0; i < kRows * kPlaces; ++i)
      static_cast<int32_t*>(problem.args.place.data)[i] = i % 2 == 0 ? INT32_MIN : INT32_MAX;
    EXPECT_EQ(problem.call(), TILEMOE_SUCCESS) << tilemoe_last_error();
  }
  {
    SumRows problem;  // no rows
    for (tilemoe_tensor* t : {&problem.args.place, &problem.args.addend, &problem.args.out})
      t->shape[0] = 0, t->data = nullptr;
    EXPECT_EQ(problem.call(), TILEMOE_SUCCESS) << tilemoe_last_error();
  }
  {
    SumRows problem;  // sources without rows are nowhere
    problem.args.source_rows = 0;
    for (const void*& source : problem.sources) source = nullptr;
    EXPECT_EQ(problem.call(), TILEMOE_SUCCESS) << tilemoe_last_error();
  }
  {
    SumRows problem;  // one source twice, and the addend among them
    problem.sources[1] = problem.sources[0];
    problem.args.addend = problem.source(0);
    problem.args.addend.shape[0] = problem.args.out.shape[0] = problem.args.place.shape[0] =
        kSourceRows;
    EXPECT_EQ(problem.call(), TILEMOE_SUCCESS) << tilemoe_last_error();
  }
  {
    SumRows problem;
    problem.args.addend = problem.args.out;
    EXPECT_EQ(problem.call(), TILEMOE_SUCCESS) << tilemoe_last_error();
    problem.args.addend = {};
    EXPECT_EQ(problem.call(), TILEMOE_SUCCESS) << tilemoe_last_error();
  }
}

}  // namespace
}  // namespace tilemoe::arguments
