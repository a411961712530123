// A dispatch over dtypes takes the types that it names, and refuses the others by name.
#include "core/dtype.h"

#include <gtest/gtest.h>

namespace tilemoe {
namespace {

constexpr tilemoe_dtype kAll[] = {TILEMOE_FLOAT32, TILEMOE_BFLOAT16, TILEMOE_FLOAT16, TILEMOE_INT32,
                                  TILEMOE_INT64};

template <class Element>
struct Tag {};

template <class Element>
tilemoe_dtype read_back(Tag<Element>) {
  return kDTypeOf<Element>;
}

tilemoe_dtype dispatch_over_all(tilemoe_dtype dtype) {
  return with_one_of<float, BFloat16, Float16, int32_t, int64_t>(
      dtype, []<class Element>() { return read_back(Tag<Element>{}); });
}

TEST(DType, EveryOneHasItsOwnType) {
  for (const tilemoe_dtype dtype : kAll) EXPECT_EQ(dispatch_over_all(dtype), dtype);
  EXPECT_EQ(sizeof(BFloat16), tilemoe_dtype_size(TILEMOE_BFLOAT16));
  EXPECT_EQ(sizeof(Float16), tilemoe_dtype_size(TILEMOE_FLOAT16));
}

TEST(DType, ABodyRunsOnceAndOnlyForTheTypeThatIsNamed) {
  for (const tilemoe_dtype dtype : kAll) {
    int calls = 0;
    const auto count = [&]<class Element>() {
      ++calls;
      EXPECT_EQ(kDTypeOf<Element>, dtype);
    };
    if (is_float(dtype)) {
      with_float(dtype, count);
      EXPECT_EQ(calls, 1) << tilemoe_dtype_name(dtype);
    } else {
      EXPECT_THROW(with_float(dtype, count), Error) << tilemoe_dtype_name(dtype);
      EXPECT_EQ(calls, 0) << tilemoe_dtype_name(dtype);
    }
  }
}

TEST(DType, ARefusalNamesWhatWasGivenAndWhatIsTaken) {
  try {
    with_one_of<BFloat16, int64_t>(TILEMOE_FLOAT32, []<class Element>() { FAIL(); });
    FAIL() << "float32 was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("float32 is none of bfloat16, int64"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace tilemoe
