// Any bytes as a safetensors file: a header that is taken describes the file, and all else is
// refused with std::runtime_error.
#include <stdexcept>

#include "fuzz_file.h"
#include "train/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  using namespace tilemoe::train;
  const std::string file = file_of(data, bytes);
  try {
    const SafetensorsHeader header = read_safetensors_header(file_with(file));
    uint64_t at = header.data_begin;
    for (const TensorInfo& tensor : header.tensors) {
      if (tensor.begin != at ||
          tensor.end - tensor.begin != tensor_bytes(tensor.dtype, tensor.shape))
        std::abort();
      at = tensor.end;
    }
    if (at != file.size()) std::abort();
  } catch (const std::runtime_error&) {
  }
  return 0;
}
