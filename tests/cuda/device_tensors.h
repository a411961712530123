// Tensors on the host and on the device with the same contents, for tests that run one step on two
// backends.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tilemoe/tensor.h"
#include "verify/number.h"
#include "verify/random.h"

namespace tilemoe::test {

inline void expect_cuda(cudaError_t error, const char* what) {
  ASSERT_EQ(error, cudaSuccess) << what << ": " << cudaGetErrorString(error);
}

// 16 bytes of guard lie on either side of the contents; poison is NaN in every floating type.
class TwinBuffer {
 public:
  explicit TwinBuffer(size_t bytes) : host_(bytes + 2 * kGuard, kPoison) {
    expect_cuda(cudaMalloc(&device_, host_.size()), "cudaMalloc");
    upload();
  }
  ~TwinBuffer() { cudaFree(device_); }
  TwinBuffer(const TwinBuffer&) = delete;
  TwinBuffer& operator=(const TwinBuffer&) = delete;

  uint8_t* host() { return host_.data() + kGuard; }
  uint8_t* device() { return static_cast<uint8_t*>(device_) + kGuard; }
  void upload() {
    const std::vector<uint8_t> bytes = reordered(host_, true);
    expect_cuda(cudaMemcpy(device_, bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "upload");
  }
  // The contents of the device, guards included.
  std::vector<uint8_t> download() const {
    std::vector<uint8_t> bytes(host_.size());
    expect_cuda(cudaMemcpy(bytes.data(), device_, bytes.size(), cudaMemcpyDeviceToHost),
                "download");
    return reordered(bytes, false);
  }
  // From here on the elements of a row's two halves are interleaved on the device.
  void alternate_on_device(size_t row_bytes, size_t element_bytes) {
    row_bytes_ = row_bytes, element_bytes_ = element_bytes;
    upload();
  }
  const std::vector<uint8_t>& host_bytes() const { return host_; }
  // Whether nothing was written outside the device's contents.
  bool guards_intact() const {
    const std::vector<uint8_t> bytes = download();
    const auto is_poison = [](uint8_t byte) { return byte == kPoison; };
    return std::all_of(bytes.begin(), bytes.begin() + kGuard, is_poison) &&
           std::all_of(bytes.end() - kGuard, bytes.end(), is_poison);
  }

  static constexpr uint8_t kPoison = 0xff;
  static constexpr size_t kGuard = 256;

 private:
  // Interleaves the halves, or separates them again.
  std::vector<uint8_t> reordered(const std::vector<uint8_t>& bytes, bool interleave) const {
    std::vector<uint8_t> result = bytes;
    if (row_bytes_ == 0) return result;
    const size_t half = row_bytes_ / 2;
    for (size_t row = kGuard; row + row_bytes_ + kGuard <= bytes.size(); row += row_bytes_)
      for (size_t at = 0; at < row_bytes_; at += element_bytes_) {
        const size_t alternate = at % half * 2 + at / half * element_bytes_;
        std::memcpy(&result[row + (interleave ? alternate : at)],
                    &bytes[row + (interleave ? at : alternate)], element_bytes_);
      }
    return result;
  }

  std::vector<uint8_t> host_;
  void* device_ = nullptr;
  size_t row_bytes_ = 0, element_bytes_ = 0;  // 0: the same order on both sides
};

// A dense tensor, or one whose last two dimensions are stored transposed.
class TwinTensor {
 public:
  TwinTensor(tilemoe_dtype dtype, std::vector<int64_t> shape, bool transposed = false)
      : dtype_(dtype), buffer_(bytes_of(dtype, shape)) {
    view_.dtype = dtype;
    view_.ndim = static_cast<int32_t>(shape.size());
    int64_t stride = 1;
    for (size_t i = shape.size(); i-- > 0;) {
      view_.shape[i] = shape[i];
      view_.stride[i] = stride;
      stride *= shape[i];
    }
    elements_ = stride;
    if (transposed) {
      view_.stride[1] = 1;
      view_.stride[2] = shape[1];
    }
  }

  // value(place in memory), rounded to the dtype
  template <class Value>
  void fill(const Value& value) {
    for (int64_t i = 0; i < elements_; ++i)
      verify::store(static_cast<DType>(dtype_), buffer_.host(), i, value(i));
    buffer_.upload();
  }
  // Rows of gate columns, then up columns on the host; interleaved on the device.
  void alternate_on_device() {
    const size_t element = tilemoe_dtype_size(dtype_);
    buffer_.alternate_on_device(static_cast<size_t>(view_.shape[1]) * element, element);
  }
  double at(const std::vector<uint8_t>& bytes, int64_t place) const {
    return verify::load(static_cast<DType>(dtype_), bytes.data() + TwinBuffer::kGuard, place);
  }

  tilemoe_tensor host() { return view(buffer_.host()); }
  tilemoe_tensor device() { return view(buffer_.device()); }
  tilemoe_tensor on(bool on_device) { return on_device ? device() : host(); }
  TwinBuffer& buffer() { return buffer_; }
  int64_t elements() const { return elements_; }

 private:
  static size_t bytes_of(tilemoe_dtype dtype, const std::vector<int64_t>& shape) {
    size_t bytes = tilemoe_dtype_size(dtype);
    for (int64_t size : shape) bytes *= static_cast<size_t>(size);
    return bytes;
  }
  tilemoe_tensor view(void* data) const {
    tilemoe_tensor tensor = view_;
    tensor.data = data;
    return tensor;
  }

  tilemoe_dtype dtype_;
  TwinBuffer buffer_;
  tilemoe_tensor view_{};
  int64_t elements_ = 0;
};

}  // namespace tilemoe::test
