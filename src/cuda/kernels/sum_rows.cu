// Sums of rows of several arrays, some of them in other GPUs' memory: each row of `out` gathers its
// places' rows and sums them in float32, in their order. No atomics, so the same bits on every run.
#include <bit>

#include "core/check.h"
#include "cuda/core/device.h"
#include "cuda/core/fragment.h"
#include "cuda/core/launch.h"
#include "cuda/core/recipe.h"
#include "cuda/kernels/kernels.h"
#include "cuda/ptx/copy.h"

// Not tilemoe::cuda: it serves the exchange between GPUs, not the layer.
namespace tilemoe::exchange {
namespace {

constexpr int kThreads = 256;

// n / divisor for n below 2^31, as a product: a division before each load would keep it back by 100
// cycles. The multiplier passes 2^shift / divisor by at most 1, so the product is too large by less
// than 2^31 / 2^shift, which is no more than the 1 / divisor that is there to the next quotient.
struct Quotient {
  uint32_t multiplier = 0;
  int32_t shift = 0;

  explicit Quotient(uint32_t divisor) {
    if (divisor == 0) return;  // no rows, so no quotient is used
    shift = 31 + std::bit_width(divisor - 1);
    multiplier = static_cast<uint32_t>((uint64_t{1} << shift) / divisor + 1);
  }
  __device__ uint32_t of(uint32_t n) const {
    return static_cast<uint32_t>(uint64_t{n} * multiplier >> shift);
  }
};

struct SumRowsParams {
  const char* source[TILEMOE_MAX_SOURCES];  // (sources), each (source_rows, d)
  uint32_t source_rows;
  Quotient by_source_rows;
  uint32_t all_rows;     // of all sources
  int64_t row_bytes;     // of a source
  const int32_t* place;  // (rows, P)
  const char* addend;    // (rows, d), `out` too; null: none
  int64_t addend_bytes;
  char* out;  // (rows, d)
  int64_t out_bytes;
  int64_t rows;
  int32_t P;
  int32_t chunks;       // of 16 bytes, a row
  int32_t part_chunks;  // of them, in each of the parts that a row is cut into

  __device__ const char* row(uint32_t place_of_row) const {
    const uint32_t s = by_source_rows.of(place_of_row);
    return source[s] + int64_t{place_of_row - s * source_rows} * row_bytes;
  }
};

// Eight sums of a thread's 16 bytes. -0 + x is x whatever x is: the first term begins the sum.
template <class Element>
struct FloatSums {
  static constexpr bool kTakesAddend = true;
  float sum[8] = {-0.f, -0.f, -0.f, -0.f, -0.f, -0.f, -0.f, -0.f};

  __device__ void add(const uint4& bytes) {
    float x[8];
    cuda::unpack_eight<Element>(bytes, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += x[i];
  }
  __device__ uint4 rounded() const {
    return cuda::pack_eight<Element>(sum);
  }
};

// One term alone, bit for bit.
struct Copy {
  static constexpr bool kTakesAddend = false;
  uint4 term;

  __device__ void add(const uint4& bytes) { term = bytes; }
  __device__ uint4 rounded() const { return term; }
};

// One thread for 16 bytes of each part of one row of `out`. A load from another GPU takes 1 to 2
// us, so each thread has the parts of kAtOnce rows in flight together; with few places, more parts.
// Nothing is loaded as read-only (.nc): other GPUs write the sources between two launches.
template <class Sums, int kParts, int kAtOnce>
__global__ void __launch_bounds__(kThreads)
    sum_places(const __grid_constant__ SumRowsParams params) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t i = index / params.part_chunks;
  if (i >= params.rows) return;
  const auto first_chunk = static_cast<int32_t>(index - i * params.part_chunks);
  const auto chunk_of = [&](int part) { return first_chunk + part * params.part_chunks; };
  const auto is_there = [&](int part) { return kParts == 1 || chunk_of(part) < params.chunks; };
  const auto load = [&](const char* row, uint4(&value)[kParts]) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      if (is_there(part))
        value[part] = cuda::ptx::load_global_16(row + int64_t{16} * chunk_of(part));
  };

  Sums sums[kParts];
  const auto add = [&](const uint4(&value)[kParts]) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      if (is_there(part)) sums[part].add(value[part]);
  };
  const bool has_addend = Sums::kTakesAddend && params.addend != nullptr;
  uint4 addend[kParts];
  if (has_addend) load(params.addend + i * params.addend_bytes, addend);  // may be `out`

  bool any = has_addend;
  const int32_t* const places = params.place + i * params.P;
  for (int32_t begin = 0; begin < params.P; begin += kAtOnce) {
    uint32_t place[kAtOnce];  // all of them, then all addresses, so that only loads follow loads
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      place[k] = begin + k < params.P ? static_cast<uint32_t>(places[begin + k]) : UINT32_MAX;
    bool exists[kAtOnce];
    const char* row[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      exists[k] = place[k] < params.all_rows;
      row[k] = params.row(exists[k] ? place[k] : 0);
    }
    uint4 value[kAtOnce][kParts];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (exists[k]) load(row[k], value[k]);
    if (has_addend && begin == 0) add(addend);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (exists[k]) add(value[k]);
      any = any || exists[k];
    }
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part)
    if (is_there(part))
      *reinterpret_cast<uint4*>(params.out + i * params.out_bytes + int64_t{16} * chunk_of(part)) =
          any ? sums[part].rounded() : uint4{};
}

template <class Sums, int kParts, int kAtOnce>
void launch_parts(SumRowsParams params, void* stream) {
  params.part_chunks = (params.chunks + kParts - 1) / kParts;
  const int64_t blocks = (params.rows * params.part_chunks + kThreads - 1) / kThreads;
  TILEMOE_CHECK_SUPPORTED(blocks <= INT32_MAX, "sum_rows of " << params.rows << " rows");
  cuda::launch_kernel("sum_rows",
                      {.blocks = static_cast<unsigned>(blocks),
                       .threads = kThreads,
                       .stream = static_cast<cudaStream_t>(stream)},
                      sum_places<Sums, kParts, kAtOnce>, params);
}

template <class Element>
void run(const SumRowsParams& params, void* stream) {
  using Sums = FloatSums<Element>;
  if (params.P == 1 && params.addend == nullptr)
    launch_parts<Copy, 8, 1>(params, stream);
  else if (params.P <= 2)
    launch_parts<Sums, 4, 2>(params, stream);
  else if (params.P <= 4)
    launch_parts<Sums, 2, 4>(params, stream);
  else
    launch_parts<Sums, 1, 8>(params, stream);
}

}  // namespace
}  // namespace tilemoe::exchange

namespace tilemoe::cuda {

void sum_rows(const tilemoe_sum_rows_args& args) {
  constexpr int64_t kElementBytes = 2;
  const int64_t d = args.out.shape[1];
  TILEMOE_CHECK_SUPPORTED(
      is_16bit(args.out.dtype),
      "out is " << tilemoe_dtype_name(args.out.dtype) << ", expected bfloat16 or float16 on CUDA");
  exchange::SumRowsParams params{
      .source = {},
      .source_rows = static_cast<uint32_t>(args.source_rows),
      .by_source_rows = exchange::Quotient(static_cast<uint32_t>(args.source_rows)),
      .all_rows = static_cast<uint32_t>(args.sources * args.source_rows),
      .row_bytes = d * kElementBytes,
      .place = static_cast<const int32_t*>(args.place.data),
      .addend = present(args.addend) ? static_cast<const char*>(args.addend.data) : nullptr,
      .addend_bytes = present(args.addend) ? args.addend.stride[0] * kElementBytes : 0,
      .out = static_cast<char*>(args.out.data),
      .out_bytes = args.out.stride[0] * kElementBytes,
      .rows = args.out.shape[0],
      .P = static_cast<int32_t>(args.place.shape[1]),
      .chunks = static_cast<int32_t>(d * kElementBytes / 16),
      .part_chunks = 0};
  for (int32_t s = 0; s < args.sources; ++s)
    params.source[s] = static_cast<const char*>(args.source[s]);
  if (params.rows == 0) return;
  with_element(args.out.dtype,
               [&]<class Element>() { exchange::run<Element>(params, args.stream); });
}

}  // namespace tilemoe::cuda
