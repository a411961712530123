// The sums of lora_output_gradient.cu over slices of columns, for Q, and over chunks of rows, for dB.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/step_arguments.h"
#include "cuda/core/device.h"

namespace tilemoe::cuda {

// A part of dB: columns [first, first + count) of dOut.
struct OutputPart {
  void* dB;
  int64_t expert, column, rank;  // strides, elements
  int32_t first, count;
  tilemoe_dtype dtype;
  bool accumulate;
  bool vectors;  // four ranks of a column are 16 bytes of float32
};

// The parts of dB that are wanted.
struct OutputParts {
  OutputPart part[2];
  int32_t count;
};
OutputParts parts_of(const LoraGradient& gradient);

struct OutputSums {
  const int32_t* offsets;  // (E + 1)
  void* Q;                 // (capacity, rank), 16 bits
  int64_t Q_row;           // elements
  float* Q_slices;         // (slices, capacity, rank); null: one slice, Q is written
  float* dB_chunks;        // (chunks, rank, width), numbered as in row_chunks.h
  int64_t capacity;
  int32_t E, width, rank, slices, chunk_rows;
  bool stores_dB;  // of an expert with one chunk, whose sums then are no chunk
};

// Q = sum of the slices, in order, rounded.
void add_slices_of_Q(const OutputSums& sums, tilemoe_dtype dtype, const DeviceInfo& device,
                     cudaStream_t stream);
// dB = [dB +] sum of an expert's chunks, in order.
void add_chunks_of_dB(const OutputSums& sums, const OutputParts& parts, const DeviceInfo& device,
                      cudaStream_t stream);

}  // namespace tilemoe::cuda
