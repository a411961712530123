#include "bindings/cuda/runtime.h"

#include <cuda_runtime_api.h>

#include "verify/memory.h"

int tilemoe_runtime_sms(int device) {
  int sms = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  return error == cudaSuccess ? sms : 0;
}

const char* tilemoe_runtime_capture(void* stream, unsigned long long* id) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long found = 0;
  const cudaError_t error =
      cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &found);
  *id = status == cudaStreamCaptureStatusActive ? found : 0;
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

tilemoe::verify::Memory* tilemoe_runtime_memory() {
  return &tilemoe::verify::cuda_memory();
}
