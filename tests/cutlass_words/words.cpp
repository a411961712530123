// Writes the descriptors of the archs' MMAs, as CUTLASS makes them, as rows of words.inc. Compiled
// and run only by write.py, with CUTLASS's headers.
#include <cutlass/version.h>

#include <cstdint>
#include <cstdio>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm100.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

namespace {

using namespace cute;

FILE* out;

// The archs' stages have 64 steps of the sum.
using Steps = Int<64>;
// Where a stage's operand may begin in a CTA's 227 KiB: first, between, last.
constexpr uint32_t kStarts[] = {0, 0x400, 0x4400, 0x38800};

// CUTLASS's descriptors of an operand (kRows, 64): for each start and fragment those of all steps.
// `Step<_2, _1>` is the order of the archs: all steps of 64 rows, then the next rows. With 2 CTAs
// each has kRows; these are the first CTA's descriptors, which the instruction uses in both.
template <class Operation, class Atom, int kRows, bool kIsA, int kCtas = 1>
void operand(const char* arch, const char* major) {
  using Element = cutlass::half_t;
  const auto staged =
      make_tensor(make_smem_ptr(static_cast<Element*>(nullptr)),
                  tile_to_shape(Atom{}, Shape<Int<kCtas * kRows>, Steps>{}, Step<_2, _1>{}));
  const auto mma = make_tiled_mma(Operation{}).get_slice(0);
  const auto words = [&] {
    if constexpr (kIsA)
      return mma.make_fragment_A(mma.partition_A(staged));
    else
      return mma.make_fragment_B(mma.partition_B(staged));
  }();
  for (const uint32_t start : kStarts)
    for (int fragment = 0; fragment < size<1>(words); ++fragment) {
      fprintf(out, "OPERAND(%s, %s%s, %s, %d, %d, 0x%05x", arch, kCtas == 1 ? "" : "TwoCta",
              kIsA ? "A" : "B", major, kRows, fragment, start);
      for (int step = 0; step < size<2>(words); ++step) {
        // A host pointer has no address in shared memory, so all descriptors have address 0.
        const auto moved =
            words.data() + words.layout()(0, fragment, step) + start / sizeof(uint128_t);
        fprintf(out, ", 0x%016llx", static_cast<unsigned long long>(uint64_t{*moved}));
      }
      fprintf(out, ")\n");
    }
}

template <int kColumns>
void hopper() {
  constexpr auto kK = SM90::GMMA::Major::K, kMN = SM90::GMMA::Major::MN;
  // The words do not depend on the element, nor those of B on A.
  using OfK = decltype(SM90::GMMA::ss_op_selector<cutlass::half_t, cutlass::half_t, float,
                                                  Shape<_64, Int<kColumns>, Steps>, kK, kK>());
  using OfMN = decltype(SM90::GMMA::ss_op_selector<cutlass::half_t, cutlass::half_t, float,
                                                   Shape<_64, Int<kColumns>, Steps>, kMN, kMN>());
  using AtomK = SM90::GMMA::Layout_K_SW128_Atom<cutlass::half_t>;
  using AtomMN = SM90::GMMA::Layout_MN_SW128_Atom<cutlass::half_t>;
  if constexpr (kColumns == 64) {
    operand<OfK, AtomK, 64, true>("Sm90", "K");
    operand<OfMN, AtomMN, 64, true>("Sm90", "MN");
    operand<OfK, AtomK, 128, true>("Sm90", "K");
    operand<OfMN, AtomMN, 128, true>("Sm90", "MN");
    operand<OfMN, AtomMN, 256, true>("Sm90", "MN");
  }
  operand<OfK, AtomK, kColumns, false>("Sm90", "K");
  operand<OfMN, AtomMN, kColumns, false>("Sm90", "MN");
}

template <class Element, int kColumns, UMMA::Major kA, UMMA::Major kB, int kCtas>
void instruction() {
  using Operation =
      conditional_t<kCtas == 1,
                    SM100_MMA_F16BF16_SS<Element, Element, float, 128, kColumns, kA, kB>,
                    SM100_MMA_F16BF16_2x1SM_SS<Element, Element, float, 256, kColumns, kA, kB>>;
  fprintf(out, "INSTRUCTION(%s, %d, %d, %s, %s, 0x%08x)\n",
          is_same_v<Element, cutlass::half_t> ? "F16" : "BF16", 128 * kCtas, kColumns,
          kA == UMMA::Major::K ? "K" : "MN", kB == UMMA::Major::K ? "K" : "MN",
          static_cast<unsigned>(uint32_t(MMA_Traits<Operation>{}.idesc_)));
}

template <int kColumns, int kCtas = 1>
void instructions() {
  constexpr auto kK = UMMA::Major::K, kMN = UMMA::Major::MN;
  const auto of_element = [](auto element) {
    using Element = decltype(element);
    instruction<Element, kColumns, kK, kK, kCtas>();
    instruction<Element, kColumns, kK, kMN, kCtas>();
    instruction<Element, kColumns, kMN, kK, kCtas>();
    instruction<Element, kColumns, kMN, kMN, kCtas>();
  };
  of_element(cutlass::half_t{});
  of_element(cutlass::bfloat16_t{});
}

template <int kColumns>
void blackwell() {
  constexpr auto kK = UMMA::Major::K, kMN = UMMA::Major::MN;
  instructions<kColumns>();
  using Element = cutlass::half_t;
  using OfK = SM100_MMA_F16BF16_SS<Element, Element, float, 128, kColumns, kK, kK>;
  using OfMN = SM100_MMA_F16BF16_SS<Element, Element, float, 128, kColumns, kMN, kMN>;
  using AtomK = UMMA::Layout_K_SW128_Atom<Element>;
  using AtomMN = UMMA::Layout_MN_SW128_Atom<Element>;
  if constexpr (kColumns == 64) {
    operand<OfK, AtomK, 128, true>("Sm100", "K");
    operand<OfMN, AtomMN, 128, true>("Sm100", "MN");
  }
  operand<OfK, AtomK, kColumns, false>("Sm100", "K");
  operand<OfMN, AtomMN, kColumns, false>("Sm100", "MN");
}

template <int kColumns>
void blackwell_2cta() {
  constexpr auto kK = UMMA::Major::K, kMN = UMMA::Major::MN;
  instructions<kColumns, 2>();
  using Element = cutlass::half_t;
  using OfK = SM100_MMA_F16BF16_2x1SM_SS<Element, Element, float, 256, kColumns, kK, kK>;
  using OfMN = SM100_MMA_F16BF16_2x1SM_SS<Element, Element, float, 256, kColumns, kMN, kMN>;
  using AtomK = UMMA::Layout_K_SW128_Atom<Element>;
  using AtomMN = UMMA::Layout_MN_SW128_Atom<Element>;
  operand<OfK, AtomK, 128, true, 2>("Sm100", "K");
  operand<OfMN, AtomMN, 128, true, 2>("Sm100", "MN");
  operand<OfK, AtomK, kColumns / 2, false, 2>("Sm100", "K");
  operand<OfMN, AtomMN, kColumns / 2, false, 2>("Sm100", "MN");
}

}  // namespace

// The argument is the file to write: CUTLASS itself writes to the standard output.
int main(int, char** arguments) {
  out = fopen(arguments[1], "w");
  if (out == nullptr) return 1;
  fprintf(out, "// CUTLASS %d.%d.%d\n", CUTLASS_MAJOR, CUTLASS_MINOR, CUTLASS_PATCH);
  blackwell<64>();
  blackwell<128>();
  blackwell<192>();
  blackwell<256>();
  blackwell_2cta<256>();
  hopper<64>();
  hopper<128>();
  hopper<192>();
  hopper<256>();
  return fclose(out) == 0 ? 0 : 1;
}
