#include "train/ops/cpu_operators.h"

namespace tilemoe::train {
namespace {

// Rows of the table that a token adds up.
class TableRows {
 public:
  TableRows(Sequences sequences, ConstBytes bytes)
      : sequences_(sequences),
        bytes_(bytes.data()),
        pitch_(std::ssize(bytes) / std::max<int64_t>(1, sequences.count)) {}

  int64_t count() const { return pitch_ - sequences_.length + 1; }  // W
  int64_t row(int64_t token, int64_t j) const {
    const int64_t sequence = token / sequences_.length, place = token % sequences_.length;
    return j * kByteValues + bytes_[sequence * pitch_ + count() - 1 + place - j];
  }

 private:
  Sequences sequences_;
  const uint8_t* bytes_;
  int64_t pitch_;  // W - 1 + length
};

void add(const float* from, float* to, int64_t count) {
  for (int64_t c = 0; c < count; ++c) to[c] += from[c];
}

}  // namespace

void CpuOperators::embed(Sequences sequences, ConstBytes bytes, ConstFloats table, Floats x) {
  const TableRows rows(sequences, bytes);
  const int64_t width = std::ssize(x) / sequences.tokens();
  for_row_blocks(sequences.tokens(), [&](int64_t first, int64_t last, int64_t) {
    for (int64_t t = first; t < last; ++t) {
      float* const to = x.data() + t * width;
      std::copy_n(table.data() + rows.row(t, 0) * width, width, to);
      for (int64_t j = 1; j < rows.count(); ++j)
        add(table.data() + rows.row(t, j) * width, to, width);
    }
  });
}

// A task owns columns of one of the W tables, so a row's sum runs over the tokens in their order.
void CpuOperators::embed_backward(Sequences sequences, ConstBytes bytes, ConstFloats dx,
                                  Floats dtable) {
  const TableRows rows(sequences, bytes);
  const int64_t width = std::ssize(dx) / sequences.tokens();
  const int64_t slices = width / kRowMultiple;
  parallel_for(slices * rows.count(), [&](int64_t task, int) {
    const int64_t j = task / slices, first = task % slices * kRowMultiple;
    for (int64_t byte = 0; byte < kByteValues; ++byte)
      std::fill_n(dtable.data() + (j * kByteValues + byte) * width + first, kRowMultiple, 0.f);
    for (int64_t t = 0; t < sequences.tokens(); ++t)
      add(dx.data() + t * width + first, dtable.data() + rows.row(t, j) * width + first,
          kRowMultiple);
  });
}

}  // namespace tilemoe::train
