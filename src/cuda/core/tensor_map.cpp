#include "cuda/core/tensor_map.h"

#include <cudaTypedefs.h>

#include <algorithm>
#include <memory>

#include "core/check.h"
#include "cuda/core/device.h"
#include "cuda/core/recent.h"

namespace tilemoe::cuda {
namespace {

// The runtime returns the function of the driver, so that nothing links against the driver's
// library.
PFN_cuTensorMapEncodeTiled_v12000 encode_function() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    TILEMOE_CHECK_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                        cudaEnableDefault, &result),
                       "cudaGetDriverEntryPointByVersion for cuTensorMapEncodeTiled");
    TILEMOE_CHECK_SUPPORTED(result == cudaDriverEntryPointSuccess && found != nullptr,
                            "the driver does not support tensor maps, expected CUDA 12.0 or newer");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
  }();
  return function;
}

// The driver requires a current context. A thread that has not launched or allocated anything has
// none, for example the thread of autograd, if TileMoE is its first work.
void make_context_current() {
  int device = 0;
  TILEMOE_CHECK_CUDA(cudaGetDevice(&device), "cudaGetDevice");
  TILEMOE_CHECK_CUDA(cudaSetDevice(device), "cudaSetDevice");
}

CUtensorMapDataType map_type(tilemoe_dtype dtype) {
  switch (dtype) {
    case TILEMOE_BFLOAT16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case TILEMOE_FLOAT16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    default: break;
  }
  TILEMOE_ASSERT(false, "a tensor map of " << tilemoe_dtype_name(dtype));
}

// Sizes and box in elements, fastest dimension first; strides in bytes.
template <size_t kDims>
CUtensorMap encode_anew(tilemoe_dtype dtype, const void* data,
                        const std::array<cuuint64_t, kDims>& size,
                        const std::array<cuuint64_t, kDims - 1>& stride_bytes,
                        const std::array<cuuint32_t, kDims>& box) {
  std::array<cuuint32_t, kDims> element_strides;
  element_strides.fill(1);
  // No variable that is itself returned: that would be wherever the caller's compiler has the
  // result, for which some (GCC 12) do not keep the 64 bytes' alignment that the driver requires.
  std::array<CUtensorMap, 1> map;
  const CUtensorMapSwizzle swizzle = box[0] * tilemoe_dtype_size(dtype) == 64
                                         ? CU_TENSOR_MAP_SWIZZLE_64B
                                         : CU_TENSOR_MAP_SWIZZLE_128B;
  const auto try_to_encode = [&] {
    return encode_function()(map.data(), map_type(dtype), kDims, const_cast<void*>(data),
                             size.data(), stride_bytes.data(), box.data(), element_strides.data(),
                             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = try_to_encode();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    make_context_current();
    result = try_to_encode();
  }
  TILEMOE_CHECK_AS(Status::kDeviceError, result == CUDA_SUCCESS,
                   "cuTensorMapEncodeTiled failed for a tensor of size (..., "
                       << size[2] << ", " << size[1] << ", " << size[0] << "), strides "
                       << stride_bytes[1] << " and " << stride_bytes[0] << " bytes, box (..., "
                       << box[2] << ", " << box[1] << ", " << box[0] << "): error "
                       << static_cast<int>(result));
  return map[0];
}

// A map depends on its arguments alone: not on the device, nor on what the memory contains. So a map
// of memory that was freed and allocated again is valid, and another size, stride or dtype at the
// same address is another key. A layer has about 20 maps.
constexpr size_t kMaxDims = 5, kPlaces = 512;
using Maps = Recent<1 + 1 + kMaxDims + (kMaxDims - 1) + kMaxDims, CUtensorMap, kPlaces>;

Maps& maps_of_this_thread() {
  thread_local const std::unique_ptr<Maps> maps = std::make_unique<Maps>();
  return *maps;
}

template <size_t kDims>
CUtensorMap encode(tilemoe_dtype dtype, const void* data, const std::array<cuuint64_t, kDims>& size,
                   const std::array<cuuint64_t, kDims - 1>& stride_bytes,
                   const std::array<cuuint32_t, kDims>& box) {
  static_assert(kDims > 0 && kDims <= kMaxDims);
  Maps::Key key{};
  uint64_t* next = key.data();
  *next++ = kDims << 32 | static_cast<uint32_t>(dtype);
  *next++ = reinterpret_cast<uintptr_t>(data);
  next = std::copy(size.begin(), size.end(), next);
  next = std::copy(stride_bytes.begin(), stride_bytes.end(), next);
  std::copy(box.begin(), box.end(), next);
  return maps_of_this_thread().get(
      key, [&] { return encode_anew<kDims>(dtype, data, size, stride_bytes, box); });
}

}  // namespace

CUtensorMap make_tensor_map(const TensorMapSpec& spec) {
  std::array<cuuint64_t, 3> size;
  std::array<cuuint32_t, 3> box;
  for (size_t i = 0; i < 3; ++i) {
    size[i] = static_cast<cuuint64_t>(spec.size[i]);
    box[i] = static_cast<cuuint32_t>(spec.box[i]);
  }
  std::array<cuuint64_t, 2> stride_bytes;
  for (size_t i = 0; i < 2; ++i)
    stride_bytes[i] =
        size[i + 1] == 1 ? 16
                         : static_cast<cuuint64_t>(spec.stride[i]) * tilemoe_dtype_size(spec.dtype);
  return encode<3>(spec.dtype, spec.data, size, stride_bytes, box);
}

namespace {

constexpr cuuint64_t kWraps = uint64_t{1} << 34;  // times kRaggedRows is 2^64
static_assert(limits::kMaxRowsCuda < kRaggedRows && limits::kMaxWidth < kRaggedRows);

cuuint64_t ragged_row_bytes(const RaggedMapSpec& spec) {
  const auto row_bytes = static_cast<cuuint64_t>(spec.row_stride) * tilemoe_dtype_size(spec.dtype);
  TILEMOE_ASSERT(row_bytes < kWraps && spec.rows < kRaggedRows,  // cuda_backend.cpp
                 "a matrix of " << spec.rows << " rows of " << row_bytes << " bytes");
  return row_bytes;
}

}  // namespace

CUtensorMap make_ragged_map(const RaggedMapSpec& spec) {
  const cuuint64_t row_bytes = ragged_row_bytes(spec);
  return encode<4>(
      spec.dtype, spec.data,
      {static_cast<cuuint64_t>(spec.columns), cuuint64_t{kRaggedRows},
       static_cast<cuuint64_t>(spec.rows) + 1, cuuint64_t{kRaggedRows} + 1},
      {row_bytes, row_bytes, kWraps - row_bytes},
      {static_cast<cuuint32_t>(spec.box[0]), static_cast<cuuint32_t>(spec.box[1]), 1, 1});
}

CUtensorMap make_ragged_parts_map(const RaggedMapSpec& spec, const MapParts& parts) {
  const cuuint64_t row_bytes = ragged_row_bytes(spec);
  // The stride of a dimension of size 1 is free, as above.
  const cuuint64_t part_bytes =
      parts.count == 1 ? 16
                       : static_cast<cuuint64_t>(parts.stride) * tilemoe_dtype_size(spec.dtype);
  return encode<5>(
      spec.dtype, spec.data,
      {static_cast<cuuint64_t>(spec.columns), cuuint64_t{kRaggedRows},
       static_cast<cuuint64_t>(spec.rows) + 1, cuuint64_t{kRaggedRows} + 1,
       static_cast<cuuint64_t>(parts.count)},
      {row_bytes, row_bytes, kWraps - row_bytes, part_bytes},
      {static_cast<cuuint32_t>(spec.box[0]), static_cast<cuuint32_t>(spec.box[1]), 1, 1, 1});
}

}  // namespace tilemoe::cuda
