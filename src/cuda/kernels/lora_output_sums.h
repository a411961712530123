// The sums of lora_output_gradient.cu over slices of columns, for Q, and over chunks of rows, for dB.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/step_arguments.h"
#include "cuda/core/device.h"

namespace tilemoe::cuda {

struct OutputSums {
  const int32_t* offsets;  // (E + 1)
  void* Q;                 // (capacity, rank), 16 bits
  int64_t Q_row;           // elements
  float* Q_slices;         // (slices, capacity, rank); null: one slice, Q is written
  float* dB_chunks;        // (chunks, rank, width), numbered as in row_chunks.h
  int64_t capacity;
  int32_t E, width, rank, slices, chunk_rows;
};

// Q = sum of the slices, in order, rounded.
void add_slices_of_Q(const OutputSums& sums, tilemoe_dtype dtype, const DeviceInfo& device,
                     cudaStream_t stream);
// dB = [dB +] sum of an expert's chunks, in order: the parts of `gradient` that are wanted.
void add_chunks_of_dB(const OutputSums& sums, const LoraGradient& gradient,
                      const DeviceInfo& device, cudaStream_t stream);

}  // namespace tilemoe::cuda
