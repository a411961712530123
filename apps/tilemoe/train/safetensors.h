// The safetensors format: eight bytes of little-endian header length, a JSON header, the data.
// Reading is strict: a file that is not exactly right is refused with its name and what is wrong.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace tilemoe::train {

// One tensor of a file; `dtype` as the format spells it ("F32", "I64", "BF16", ...).
struct TensorInfo {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  uint64_t begin = 0;  // its bytes are [begin, end) of the file
  uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // in the order of their data
  std::map<std::string, std::string> metadata;
  uint64_t data_begin = 0;  // offset of the first byte after the header

  const TensorInfo* find(const std::string& name) const;  // null if none
};

// Checks the whole header against the file's length: known types, non-negative shapes, sizes that
// fit, names that differ, data that covers the rest of the file without hole or overlap. Throws
// std::runtime_error.
SafetensorsHeader read_safetensors_header(const std::filesystem::path& path);

struct TensorView {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  const void* data = nullptr;
};

// The first bytes of the file: length and JSON, padded so that the data starts on eight bytes.
// The tensors' data follow in the order given. Throws std::invalid_argument for an unknown type, a
// negative extent or a repeated name.
std::string safetensors_header(const std::vector<TensorView>& tensors,
                               const std::map<std::string, std::string>& metadata);

uint64_t tensor_bytes(const std::string& dtype, const std::vector<int64_t>& shape);

}  // namespace tilemoe::train
