// Sums of rows of several arrays. A task is a range of rows; the sum of a block of columns stays in
// the nearest cache while its terms come one after the other.
#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "cpu/cpu_backend.h"
#include "cpu/elementwise.h"
#include "cpu/matrix.h"
#include "cpu/thread_pool.h"
#include "cpu/tiles.h"

namespace tilemoe::cpu {
namespace {

constexpr int64_t kRows = 64;  // of one task
constexpr int64_t kColumns = 512;

struct Sources {
  const void* const* source;  // (sources)
  int64_t rows;               // of each
  int64_t all_rows;
  size_t row_bytes;

  // Null: no row.
  const char* row(int32_t place) const {
    if (place < 0 || place >= all_rows) return nullptr;
    return static_cast<const char*>(source[place / rows]) +
           static_cast<size_t>(place % rows) * row_bytes;
  }
};

// The first term begins the sum, so that -0 keeps its sign.
class Sum {
 public:
  Sum(tilemoe_dtype dtype, int64_t count) : dtype_(dtype), count_(count) {}

  void add(const void* term) {
    if (empty_)
      to_float(term, dtype_, 1, sum_, count_);
    else
      add_scaled(term, dtype_, 1.f, sum_, count_);
    empty_ = false;
  }
  void store(void* out) {
    if (empty_) std::fill_n(sum_, count_, 0.f);
    from_float(sum_, out, dtype_, 1, count_, false);
  }

 private:
  tilemoe_dtype dtype_;
  int64_t count_;
  bool empty_ = true;
  float sum_[kColumns];
};

}  // namespace

void sum_rows(const tilemoe_sum_rows_args& args) {
  const int64_t rows = args.out.shape[0], d = args.out.shape[1], P = args.place.shape[1];
  const auto element = static_cast<int64_t>(tilemoe_dtype_size(args.out.dtype));
  const Matrix out = row_matrix(args.out);
  const Matrix addend = present(args.addend) ? row_matrix(args.addend) : Matrix{};
  const Sources sources{args.source, args.source_rows, args.sources * args.source_rows,
                        static_cast<size_t>(d * element)};
  const bool copies = P == 1 && !addend.data;

  parallel_for(tile_count(rows, kRows), [&](int64_t task, int) {
    const int64_t end = std::min(rows, (task + 1) * kRows);
    for (int64_t i = task * kRows; i < end; ++i) {
      const int32_t* const place = static_cast<const int32_t*>(args.place.data) + i * P;
      auto* const to = static_cast<char*>(out.row(i));
      if (const char* const row = sources.row(*place); copies && row) {
        std::memcpy(to, row, sources.row_bytes);
        continue;
      }
      for (int64_t column = 0; column < d; column += kColumns) {
        const int64_t at = column * element;
        Sum sum(args.out.dtype, std::min(kColumns, d - column));
        if (addend.data) sum.add(static_cast<const char*>(addend.row(i)) + at);
        for (int64_t p = 0; p < P; ++p)
          if (const char* const row = sources.row(place[p])) sum.add(row + at);
        sum.store(to + at);
      }
    }
  });
}

}  // namespace tilemoe::cpu
