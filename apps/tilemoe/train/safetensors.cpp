#include "safetensors.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <stdexcept>

#include "file.h"
#include "json.h"

namespace tilemoe::train {
namespace {

using Json = nlohmann::json;

constexpr size_t kLengthBytes = 8;
constexpr size_t kDataAlignment = 8;
// The limit of the format's own reader.
constexpr uint64_t kLongestHeader = 100'000'000;

struct DtypeSize {
  const char* name;
  uint64_t bytes;
};
constexpr std::array kDtypes = {
    DtypeSize{"F64", 8},  DtypeSize{"F32", 4},     DtypeSize{"F16", 2},     DtypeSize{"BF16", 2},
    DtypeSize{"I64", 8},  DtypeSize{"I32", 4},     DtypeSize{"I16", 2},     DtypeSize{"I8", 1},
    DtypeSize{"U64", 8},  DtypeSize{"U32", 4},     DtypeSize{"U16", 2},     DtypeSize{"U8", 1},
    DtypeSize{"BOOL", 1}, DtypeSize{"F8_E4M3", 1}, DtypeSize{"F8_E5M2", 1},
};

// Nothing if the product does not fit in 63 bits or the type is unknown.
std::optional<uint64_t> checked_bytes(const std::string& dtype, const std::vector<int64_t>& shape) {
  const auto* size = std::find_if(kDtypes.begin(), kDtypes.end(),
                                  [&](const DtypeSize& entry) { return entry.name == dtype; });
  if (size == kDtypes.end()) return std::nullopt;
  uint64_t bytes = size->bytes;
  for (const int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    const auto factor = static_cast<uint64_t>(extent);
    constexpr auto kMax = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    if (factor != 0 && bytes > kMax / factor) return std::nullopt;
    bytes *= factor;
  }
  return bytes;
}

// Reads one file's header; every complaint names the file.
class HeaderReader {
 public:
  explicit HeaderReader(const std::filesystem::path& path)
      : file_(path, O_RDONLY, "read"), file_bytes_(file_.size()) {}

  SafetensorsHeader read() {
    const Json json = read_json();
    for (const auto& [name, value] : json.items()) {
      if (name == "__metadata__")
        read_metadata(value);
      else
        read_tensor(name, value);
    }
    require_no_hole();
    return std::move(header_);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw std::runtime_error(file_.path().string() + ": " + what);
  }

  Json read_json() {
    if (file_bytes_ < kLengthBytes) refuse("not a safetensors file (shorter than its first field)");
    std::array<uint8_t, kLengthBytes> field{};
    file_.read_at(0, field.data(), field.size());
    uint64_t length = 0;
    for (size_t i = kLengthBytes; i-- > 0;) length = length << 8 | field[i];
    if (length > kLongestHeader)
      refuse("not a safetensors file (its header would be " + std::to_string(length) + " bytes)");
    if (length > file_bytes_ - kLengthBytes)
      refuse("truncated: expected a header of " + std::to_string(length) + " bytes, the file has " +
             std::to_string(file_bytes_));
    std::string text(static_cast<size_t>(length), '\0');
    file_.read_at(kLengthBytes, text.data(), text.size());
    header_.data_begin = kLengthBytes + length;
    if (text.empty() || text.front() != '{')
      refuse("not a safetensors file (its header is not JSON)");
    return parse(text);
  }

  Json parse(const std::string& text) const {
    constexpr int kDeepest = 3;  // a tensor's shape
    try {
      return parse_json(text, kDeepest);
    } catch (const std::runtime_error& error) {
      refuse(std::string("not a safetensors file (its header ") + error.what() + ")");
    }
  }

  void read_metadata(const Json& value) {
    if (!value.is_object()) refuse("__metadata__ is not an object");
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string()) refuse("__metadata__ '" + key + "' is not a string");
      header_.metadata[key] = text.get<std::string>();
    }
  }

  void read_tensor(const std::string& name, const Json& value) {
    const std::string tensor = "tensor '" + name + "'";
    if (!value.is_object() || value.size() != 3 || !value.contains("dtype") ||
        !value.contains("shape") || !value.contains("data_offsets"))
      refuse(tensor + " must have dtype, shape and data_offsets, and nothing else");
    TensorInfo info;
    info.name = name;
    if (!value["dtype"].is_string()) refuse(tensor + ": dtype is not a string");
    info.dtype = value["dtype"].get<std::string>();
    if (!value["shape"].is_array()) refuse(tensor + ": shape is not a list");
    for (const Json& extent : value["shape"])
      info.shape.push_back(static_cast<int64_t>(read_size(extent, tensor + ": shape")));
    const Json& offsets = value["data_offsets"];
    if (!offsets.is_array() || offsets.size() != 2)
      refuse(tensor + ": data_offsets is not a list of two integers");
    info.begin = read_size(offsets[0], tensor + ": data_offsets");
    info.end = read_size(offsets[1], tensor + ": data_offsets");

    const auto bytes = checked_bytes(info.dtype, info.shape);
    if (!bytes) refuse(tensor + ": unknown type '" + info.dtype + "' or a shape that overflows");
    if (info.end < info.begin || info.end - info.begin != *bytes)
      refuse(tensor + ": its shape has " + std::to_string(*bytes) +
             " bytes, its data_offsets are [" + std::to_string(info.begin) + ", " +
             std::to_string(info.end) + "]");
    header_.tensors.push_back(std::move(info));
  }

  // A whole number from 0 to the largest int64.
  uint64_t read_size(const Json& value, const std::string& what) const {
    constexpr auto kMax = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    if (!value.is_number_unsigned() || value.get<uint64_t>() > kMax)
      refuse(what + " has " + value.dump() + ", expected an integer in [0, 2^63)");
    return value.get<uint64_t>();
  }

  // Turns offsets within the data into offsets within the file, too.
  void require_no_hole() {
    auto& tensors = header_.tensors;
    std::stable_sort(tensors.begin(), tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    uint64_t covered = 0;
    for (TensorInfo& tensor : tensors) {
      if (tensor.begin != covered)
        refuse("tensor '" + tensor.name + "' begins at byte " + std::to_string(tensor.begin) +
               " of the data, expected byte " + std::to_string(covered));
      covered = tensor.end;
      tensor.begin += header_.data_begin;
      tensor.end += header_.data_begin;
    }
    const uint64_t data_bytes = file_bytes_ - header_.data_begin;
    if (data_bytes < covered)
      refuse("truncated: expected " + std::to_string(covered) + " bytes of data, the file has " +
             std::to_string(data_bytes));
    if (data_bytes > covered)
      refuse(std::to_string(data_bytes - covered) + " bytes follow the last tensor");
  }

  File file_;
  uint64_t file_bytes_;
  SafetensorsHeader header_;
};

}  // namespace

const TensorInfo* SafetensorsHeader::find(const std::string& name) const {
  const auto at = std::find_if(tensors.begin(), tensors.end(),
                               [&](const TensorInfo& info) { return info.name == name; });
  return at == tensors.end() ? nullptr : &*at;
}

SafetensorsHeader read_safetensors_header(const std::filesystem::path& path) {
  return HeaderReader(path).read();
}

uint64_t tensor_bytes(const std::string& dtype, const std::vector<int64_t>& shape) {
  const auto bytes = checked_bytes(dtype, shape);
  if (!bytes)
    throw std::invalid_argument("safetensors: type '" + dtype +
                                "' is unknown, or a shape is negative or overflows");
  return *bytes;
}

std::string safetensors_header(const std::vector<TensorView>& tensors,
                               const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  header["__metadata__"] = metadata;
  uint64_t offset = 0;
  for (const TensorView& tensor : tensors) {
    if (header.contains(tensor.name))
      throw std::invalid_argument("safetensors: two tensors are named '" + tensor.name + "'");
    const uint64_t end = offset + tensor_bytes(tensor.dtype, tensor.shape);
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + kDataAlignment - 1) / kDataAlignment * kDataAlignment, ' ');
  std::string bytes;
  for (size_t i = 0; i < kLengthBytes; ++i)
    bytes += static_cast<char>(static_cast<uint64_t>(text.size()) >> (8 * i) & 0xff);
  return bytes + text;
}

}  // namespace tilemoe::train
