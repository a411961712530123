#include "cuda/tensor_map.h"

#include <cudaTypedefs.h>

#include "cuda/device.h"

namespace tilemoe::cuda {
namespace {

// From the driver through the runtime, so that nothing links against the driver's library.
PFN_cuTensorMapEncodeTiled_v12000 encode_function() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    TILEMOE_CHECK_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                        cudaEnableDefault, &result),
                       "looking for cuTensorMapEncodeTiled");
    TILEMOE_CHECK_SUPPORTED(result == cudaDriverEntryPointSuccess && found != nullptr,
                            "this driver has no tensor maps: CUDA 12.0 or newer is needed");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
  }();
  return function;
}

}  // namespace

CUtensorMap make_tensor_map(const TensorMapSpec& spec) {
  constexpr cuuint64_t kElementBytes = 2;
  cuuint64_t size[3];
  cuuint32_t box[3];
  for (size_t i = 0; i < 3; ++i) {
    size[i] = static_cast<cuuint64_t>(spec.size[i]);
    box[i] = static_cast<cuuint32_t>(spec.box[i]);
  }
  cuuint64_t stride_bytes[2];
  for (size_t i = 0; i < 2; ++i)
    stride_bytes[i] =
        size[i + 1] == 1 ? 16 : static_cast<cuuint64_t>(spec.stride[i]) * kElementBytes;
  const cuuint32_t every[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode_function()(
      &map,
      spec.dtype == TILEMOE_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                     : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      3, const_cast<void*>(spec.data), size, stride_bytes, box, every,
      CU_TENSOR_MAP_INTERLEAVE_NONE,
      spec.swizzle == Swizzle::k128Bytes ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TILEMOE_CHECK_AS(Status::kDeviceError, result == CUDA_SUCCESS,
                   "cuTensorMapEncodeTiled refused a tensor of size ("
                       << size[2] << ", " << size[1] << ", " << size[0] << "), strides "
                       << stride_bytes[1] << " and " << stride_bytes[0] << " bytes, box (" << box[2]
                       << ", " << box[1] << ", " << box[0] << "): error "
                       << static_cast<int>(result));
  return map;
}

}  // namespace tilemoe::cuda
