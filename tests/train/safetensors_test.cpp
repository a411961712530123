#include "train/safetensors.h"

#include <gtest/gtest.h>

#include "temp_folder.h"

namespace tilemoe::train {
namespace {

// A file of the given header and `data_bytes` bytes of data.
std::string file_of(const std::string& json, size_t data_bytes) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(json.size() >> (8 * i) & 0xff);
  return bytes + json + std::string(data_bytes, '\1');
}

class Safetensors : public testing::Test {
 protected:
  SafetensorsHeader read(const std::string& bytes) {
    write_file(folder_ / "x.safetensors", bytes);
    return read_safetensors_header(folder_ / "x.safetensors");
  }
  // The complaint about the file, which must name it.
  std::string error(const std::string& bytes) {
    const std::string text = error_of([&] { read(bytes); });
    EXPECT_TRUE(contains(text, "x.safetensors: "));
    return text;
  }

  TempFolder folder_;
};

TEST_F(Safetensors, ReadsWhatItWrites) {
  const float values[6] = {};
  const int64_t ids[2] = {};
  const std::string header = safetensors_header({{"w", "F32", {2, 3}, values},
                                                 {"none", "F32", {0, 7}, nullptr},
                                                 {"a \"quoted\" name", "I64", {2}, ids},
                                                 {"scalar", "U8", {}, ids}},
                                                {{"key", "line\none"}, {"json", R"({"a":1})"}});
  EXPECT_EQ(header.size() % 8, 0U);
  const SafetensorsHeader read_back = read(header + std::string(24 + 16 + 1, '\0'));
  EXPECT_EQ(read_back.data_begin, header.size());
  ASSERT_EQ(read_back.tensors.size(), 4U);
  const TensorInfo* quoted = read_back.find("a \"quoted\" name");
  ASSERT_NE(quoted, nullptr);
  EXPECT_EQ(quoted->dtype, "I64");
  EXPECT_EQ(quoted->shape, (std::vector<int64_t>{2}));
  EXPECT_EQ(quoted->begin, header.size() + 24);
  EXPECT_EQ(quoted->end, header.size() + 40);
  EXPECT_EQ(read_back.find("none")->shape, (std::vector<int64_t>{0, 7}));
  EXPECT_EQ(read_back.find("missing"), nullptr);
  EXPECT_EQ(read_back.metadata.at("key"), "line\none");
  EXPECT_EQ(read_back.metadata.at("json"), R"({"a":1})");
}

TEST_F(Safetensors, KeepsTheOrderOfTheDataNotOfTheHeader) {
  const SafetensorsHeader header =
      read(file_of(R"({"b":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                   R"("a":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})",
                   5));
  ASSERT_EQ(header.tensors.size(), 2U);
  EXPECT_EQ(header.tensors[0].name, "b");
}

TEST_F(Safetensors, RefusesToWriteNonsense) {
  EXPECT_THROW(safetensors_header({{"a", "F31", {1}, nullptr}}, {}), std::invalid_argument);
  EXPECT_THROW(safetensors_header({{"a", "F32", {-1}, nullptr}}, {}), std::invalid_argument);
  EXPECT_THROW(
      safetensors_header({{"a", "F32", {int64_t{1} << 40, int64_t{1} << 40}, nullptr}}, {}),
      std::invalid_argument);
  EXPECT_THROW(safetensors_header({{"a", "F32", {1}, nullptr}, {"a", "F32", {1}, nullptr}}, {}),
               std::invalid_argument);
}

TEST_F(Safetensors, RefusesForeignFiles) {
  EXPECT_TRUE(contains(error(""), "not a safetensors file"));
  EXPECT_TRUE(contains(error("short"), "not a safetensors file"));
  EXPECT_TRUE(contains(error("PK\3\4 this is some other format altogether"), "not a safetensors"));
  EXPECT_TRUE(contains(error(file_of("", 0)), "not JSON"));
  EXPECT_TRUE(contains(error(file_of("[1,2]", 0)), "not JSON"));
  EXPECT_TRUE(contains(error(file_of("{\"a\":", 0)), "not JSON"));
  EXPECT_TRUE(
      contains(error_of([&] { read_safetensors_header(folder_ / "none"); }), "No such file"));
}

TEST_F(Safetensors, RefusesAHeaderThatIsTooLong) {
  std::string bytes(16, '\0');
  bytes[7] = '\x10';  // 2^60 bytes
  EXPECT_TRUE(contains(error(bytes), "its header would be 1152921504606846976 bytes"));
  bytes[7] = '\0';
  bytes[2] = '\1';  // 65536 bytes in a file of 16
  EXPECT_TRUE(contains(error(bytes), "truncated: expected a header of 65536 bytes"));
}

TEST_F(Safetensors, RefusesEveryTruncation) {
  const std::string whole =
      safetensors_header({{"w", "F32", {2, 3}, nullptr}}, {{"k", "v"}}) + std::string(24, '\0');
  EXPECT_NO_THROW(read(whole));
  for (size_t length = 0; length < whole.size(); ++length) error(whole.substr(0, length));
  EXPECT_TRUE(contains(error(whole.substr(0, whole.size() - 1)), "truncated"));
  EXPECT_TRUE(contains(error(whole + "x"), "1 bytes follow the last tensor"));
}

TEST_F(Safetensors, RefusesDataThatOverlapOrLeaveHoles) {
  const auto two = [](const char* first, const char* second) {
    return file_of(std::string(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":)") + first +
                       R"(},"b":{"dtype":"F32","shape":[2],"data_offsets":)" + second + "}}",
                   16);
  };
  EXPECT_NO_THROW(read(two("[0,8]", "[8,16]")));
  EXPECT_TRUE(contains(error(two("[0,8]", "[4,12]")), "'b' begins at byte 4"));
  EXPECT_TRUE(contains(error(two("[0,8]", "[0,8]")), "begins at byte 0"));
  EXPECT_TRUE(contains(error(two("[0,8]", "[12,20]")), "'b' begins at byte 12"));
  EXPECT_TRUE(contains(error(two("[4,12]", "[12,20]")), "'a' begins at byte 4"));
  EXPECT_TRUE(contains(error(two("[0,8]", "[16,8]")), "'b': its shape has 8 bytes"));
  EXPECT_TRUE(contains(error(two("[0,8]", "[8,15]")), "'b': its shape has 8 bytes"));
  EXPECT_TRUE(contains(error(two("[0,8]", "[8]")), "not a list of two"));
  EXPECT_TRUE(contains(error(two("[0,8]", "[8,-16]")), "expected an integer in"));
  EXPECT_TRUE(contains(error(two("[0,8]", "[8,16.0]")), "expected an integer in"));
}

TEST_F(Safetensors, RefusesMalformedEntries) {
  const auto with = [](const std::string& entry) { return file_of("{" + entry + "}", 8); };
  const std::string good = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  EXPECT_NO_THROW(read(with(good)));
  EXPECT_TRUE(contains(error(with(good + "," + good)), "has 'a' twice"));
  EXPECT_TRUE(contains(error(with(R"("a":{"dtype":"F32","shape":[2],"shape":[2],)"
                                  R"("data_offsets":[0,8]})")),
                       "has 'shape' twice"));
  EXPECT_TRUE(contains(error(with(R"("a":[])")), "must have dtype, shape and data_offsets"));
  EXPECT_TRUE(contains(error(with(R"("a":{"dtype":"F32","shape":[2]})")),
                       "must have dtype, shape and data_offsets"));
  EXPECT_TRUE(contains(error(with(R"("a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]})")),
                       "unknown type 'F99'"));
  EXPECT_TRUE(contains(error(with(R"("a":{"dtype":4,"shape":[2],"data_offsets":[0,8]})")),
                       "dtype is not a string"));
  EXPECT_TRUE(contains(error(with(R"("a":{"dtype":"F32","shape":2,"data_offsets":[0,8]})")),
                       "shape is not a list"));
  EXPECT_TRUE(contains(error(with(R"("a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]})")),
                       "expected an integer in"));
  EXPECT_TRUE(contains(error(with(R"("a":{"dtype":"F32","shape":[4294967296,4294967296],)"
                                  R"("data_offsets":[0,8]})")),
                       "overflows"));
  EXPECT_TRUE(contains(error(with(R"("__metadata__":{"k":1},)" + good)), "'k' is not a string"));
  EXPECT_TRUE(contains(error(with(R"("__metadata__":"k",)" + good)), "not an object"));
}

}  // namespace
}  // namespace tilemoe::train
