#include <cstdio>

#include "core/backend.h"
#include "core/check.h"
#include "core/overlap.h"
#include "layer/layer.h"

namespace tilemoe {
namespace {

using namespace limits;

void check_sizes(const tilemoe_sum_rows_args& args) {
  TILEMOE_CHECK(
      args.sources >= 1 && args.sources <= TILEMOE_MAX_SOURCES,
      "sources is " << args.sources << ", expected a value in [1, " << TILEMOE_MAX_SOURCES << "]");
  TILEMOE_CHECK(args.source != nullptr, "source is null, expected " << args.sources << " pointers");
  const int64_t limit = kMaxRows / args.sources;
  TILEMOE_CHECK(args.source_rows >= 0 && args.source_rows <= limit,
                "source_rows is " << args.source_rows << ", expected a value in [0, " << limit
                                  << "] for " << args.sources << " sources");
  TILEMOE_CHECK(is_float(args.out.dtype),
                "out is " << describe(args.out) << ", expected float32, bfloat16 or float16");
  TILEMOE_CHECK(args.out.ndim == 2, "out is " << describe(args.out) << ", expected (rows, d)");
  const int64_t rows = args.out.shape[0], d = args.out.shape[1];
  const int64_t row_limit = max_rows(args.device);
  TILEMOE_CHECK(rows >= 0 && rows <= row_limit,
                "rows is " << rows << ", expected a value in [0, " << row_limit << "]");
  TILEMOE_CHECK(d >= kWidthMultiple && d % kWidthMultiple == 0 && d <= kMaxWidth,
                "d is " << d << ", expected a positive multiple of " << kWidthMultiple
                        << ", at most " << kMaxWidth);
  TILEMOE_CHECK(args.place.ndim == 2,
                "place is " << describe(args.place) << ", expected (rows, P)");
  const int64_t P = args.place.shape[1];
  TILEMOE_CHECK(P >= 1 && P <= TILEMOE_MAX_PLACES, "place is " << describe(args.place) << ": P is "
                                                               << P << ", expected a value in [1, "
                                                               << TILEMOE_MAX_PLACES << "]");
}

// "source[3]"; without std::to_string, whose tables a shared library would export.
struct SourceName {
  char text[24];

  explicit SourceName(int32_t s) {
    std::snprintf(text, sizeof text, "source[%d]", static_cast<int>(s));
  }
};

tilemoe_tensor source_of(const tilemoe_sum_rows_args& args, int32_t s) {
  const int64_t d = args.out.shape[1];
  return {.data = const_cast<void*>(args.source[s]),
          .dtype = args.out.dtype,
          .ndim = 2,
          .shape = {args.source_rows, d, 0},
          .stride = {d, 1, 0}};
}

void check_memory(const tilemoe_sum_rows_args& args) {
  MemoryUse memory;
  memory.reads("place", args.place);
  memory.reads("addend", args.addend, same_view(args.addend, args.out) ? "out" : nullptr);
  memory.writes("out", args.out);
  memory.check();
  for (int32_t s = 0; s < args.sources; ++s) {
    const SourceName name(s);
    const tilemoe_tensor source = source_of(args, s);
    MemoryUse of_source;
    of_source.reads(name.text, source);
    of_source.writes("out", args.out);
    of_source.check();
  }
}

}  // namespace

void sum_rows(const tilemoe_sum_rows_args* given) {
  const tilemoe_sum_rows_args args = read_struct("sum_rows args", given);
  check_sizes(args);
  const Backend& backend = backend_for(args.device);
  const int64_t rows = args.out.shape[0], d = args.out.shape[1], P = args.place.shape[1];
  const DTypes dtype = {args.out.dtype};
  check_tensor("out", args.out, {{rows, d}, dtype, Strides::kRows});
  check_optional("addend", args.addend, {{rows, d}, dtype, Strides::kRows});
  check_tensor("place", args.place,
               {{rows, P}, {TILEMOE_INT32}, Strides::kContiguous, /*aligned=*/false});
  for (int32_t s = 0; s < args.sources; ++s)
    check_tensor(SourceName(s).text, source_of(args, s),
                 {{args.source_rows, d}, dtype, Strides::kContiguous});
  check_memory(args);
  backend.sum_rows(args);
}

}  // namespace tilemoe
