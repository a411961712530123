// The embedding of bytes, and the loss at the model's other end.
#include "train/cuda/kernels.h"
#include "train/cuda/launch.h"
#include "train/ops/shapes.h"

namespace tilemoe::train::cuda {
namespace {

// The rows of the tables that a token adds up.
struct TableRows {
  const uint8_t* bytes;  // (sequences, tables - 1 + length)
  int64_t length, tables;

  __device__ int64_t row(int64_t token, int64_t table) const {
    const int64_t sequence = token / length, place = token % length;
    return table * kByteValues +
           bytes[sequence * (tables - 1 + length) + tables - 1 + place - table];
  }
};

__global__ void embed_tokens(TableRows rows, const float* table, float* x, int64_t count,
                             int64_t width) {
  const int64_t i = global_thread();
  if (i >= count) return;
  const int64_t token = i / width, column = i % width;
  float sum = 0;
  for (int64_t j = 0; j < rows.tables; ++j) sum += table[rows.row(token, j) * width + column];
  x[i] = sum;
}

// A CTA per row of the tables, which goes through the tokens in their order.
__global__ void sum_tokens_of_row(TableRows rows, const float* dx, float* dtable, int64_t tokens,
                                  int64_t width) {
  const int64_t row = blockIdx.x, table = row / kByteValues;
  for (int64_t column = threadIdx.x; column < width; column += blockDim.x) {
    float sum = 0;
    for (int64_t token = 0; token < tokens; ++token)
      if (rows.row(token, table) == row) sum += dx[token * width + column];
    dtable[row * width + column] = sum;
  }
}

// A warp a row of logits.
__global__ void losses_of_rows(const float* logits, const uint8_t* targets, float scale,
                               float* gradient, float* losses, int64_t rows) {
  constexpr int kEach = kByteValues / kWarp;
  const int64_t row = global_warp();
  if (row >= rows) return;
  const float* const from = logits + row * kByteValues;
  const int target = targets[row];
  float values[kEach], highest = -INFINITY, sum = 0;
  for (int i = 0; i < kEach; ++i) {
    values[i] = from[i * kWarp + lane()];
    highest = fmaxf(highest, values[i]);
  }
  highest = warp_max(highest);
  const float loss_of_target = from[target];
  for (float& value : values) {
    value = expf(value - highest);
    sum += value;
  }
  sum = warp_sum(sum);  // all lanes have read the logits
  if (lane() == 0) losses[row] = logf(sum) + highest - loss_of_target;
  if (gradient == nullptr) return;
  for (int i = 0; i < kEach; ++i) {
    const int value = i * static_cast<int>(kWarp) + static_cast<int>(lane());
    gradient[row * kByteValues + value] = values[i] * (scale / sum) - (value == target ? scale : 0);
  }
}

}  // namespace

void embed(Sequences sequences, int64_t tables, const uint8_t* bytes, const float* table, float* x,
           int64_t width) {
  const int64_t count = sequences.tokens() * width;
  embed_tokens<<<blocks_for(count, kThreads), kThreads>>>({bytes, sequences.length, tables}, table,
                                                          x, count, width);
  check_launch("embed_tokens");
}

void embed_backward(Sequences sequences, int64_t tables, const uint8_t* bytes, const float* dx,
                    float* dtable, int64_t width) {
  sum_tokens_of_row<<<static_cast<unsigned>(tables * kByteValues), kThreads>>>(
      {bytes, sequences.length, tables}, dx, dtable, sequences.tokens(), width);
  check_launch("sum_tokens_of_row");
}

void cross_entropy(const float* logits, const uint8_t* targets, float scale, float* gradient,
                   float* losses, int64_t rows) {
  losses_of_rows<<<blocks_for(rows, kWarps), kThreads>>>(logits, targets, scale, gradient, losses,
                                                         rows);
  check_launch("losses_of_rows");
}

}  // namespace tilemoe::train::cuda
