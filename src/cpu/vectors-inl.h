// Loops over rows by vectors, and float32 vectors loaded from and stored to every float type. For
// inclusion in a file that Highway compiles once for every target.
#if defined(TILEMOE_CPU_VECTORS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TILEMOE_CPU_VECTORS_INL_H_
#undef TILEMOE_CPU_VECTORS_INL_H_
#else
#define TILEMOE_CPU_VECTORS_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "core/numbers.h"

HWY_BEFORE_NAMESPACE();
namespace tilemoe::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Widths are multiples of 8, so the rest after full vectors is done by vectors of at most 8.
using FullTag = hn::ScalableTag<float>;
using RestTag = hn::CappedTag<float, 8>;

// body(d, i) for vectors that begin at i and cover [0, count).
template <class Body>
HWY_INLINE void for_each_vector(int64_t count, Body&& body) {
  const FullTag full;
  const RestTag rest;
  const auto full_lanes = static_cast<int64_t>(hn::Lanes(full));
  const auto rest_lanes = static_cast<int64_t>(hn::Lanes(rest));
  int64_t i = 0;
  for (; i + full_lanes <= count; i += full_lanes) body(full, i);
  for (; i < count; i += rest_lanes) body(rest, i);
}

// The sum over all lanes of the vectors that body(d, i) returns.
template <class Body>
HWY_INLINE float sum_each_vector(int64_t count, Body&& body) {
  const FullTag full;
  const RestTag rest;
  const auto full_lanes = static_cast<int64_t>(hn::Lanes(full));
  const auto rest_lanes = static_cast<int64_t>(hn::Lanes(rest));
  auto full_sum = hn::Zero(full);
  auto rest_sum = hn::Zero(rest);
  int64_t i = 0;
  for (; i + full_lanes <= count; i += full_lanes) full_sum = hn::Add(full_sum, body(full, i));
  for (; i < count; i += rest_lanes) rest_sum = hn::Add(rest_sum, body(rest, i));
  return hn::GetLane(hn::SumOfLanes(full, full_sum)) + hn::GetLane(hn::SumOfLanes(rest, rest_sum));
}

// ------------------------------------------------------------------ 16 bits <-> 32 bits

template <class D>
using Bits = hn::RebindToUnsigned<D>;
template <class D>
using HalfBits = hn::Rebind<uint16_t, D>;

template <class D, class V>
HWY_INLINE hn::Vec<D> widen_bfloat16(D d, V bits) {
  return hn::BitCast(d, hn::ShiftLeft<16>(bits));
}

// The exponent is rebased from 15 to 127 in the bits; all ones stays all ones. A subnormal number
// is what its bits add to 0.5, whose last place is worth 2^-24.
template <class D, class V>
HWY_INLINE hn::Vec<D> widen_float16(D d, V bits) {
  const Bits<D> du;
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffu));
  const auto sign = hn::ShiftLeft<16>(hn::Xor(bits, magnitude));
  const auto moved = hn::ShiftLeft<13>(magnitude);
  const auto is_special = hn::Gt(magnitude, hn::Set(du, 0x7bffu));
  const auto rebase = hn::IfThenElse(is_special, hn::Set(du, 224u << 23), hn::Set(du, 112u << 23));
  const auto normal = hn::BitCast(d, hn::Add(moved, rebase));
  const auto half = hn::Set(d, 0.5f);
  const auto subnormal = hn::Sub(hn::BitCast(d, hn::Or(magnitude, hn::BitCast(du, half))), half);
  const auto is_subnormal = hn::RebindMask(d, hn::Lt(magnitude, hn::Set(du, 0x0400u)));
  return hn::Or(hn::IfThenElse(is_subnormal, subnormal, normal), hn::BitCast(d, sign));
}

template <class D, class V>
HWY_INLINE hn::Vec<Bits<D>> narrow_to_bfloat16(D, V value) {
  const Bits<D> du;
  const auto bits = hn::BitCast(du, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fffu)));
  const auto quiet = hn::Or(bits, hn::Set(du, 0x00400000u));
  const auto is_number = hn::RebindMask(du, hn::Eq(value, value));
  return hn::ShiftRight<16>(hn::IfThenElse(is_number, rounded, quiet));
}

// Rebases the exponent from 127 to 15 and rounds 13 bits away; a carry out of the largest number
// makes infinity. Below 2^-14 the sum with 0.5 rounds to units of 2^-24.
template <class D, class V>
HWY_INLINE hn::Vec<Bits<D>> narrow_to_float16(D d, V value) {
  const Bits<D> du;
  const auto bits = hn::BitCast(du, value);
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffffffu));
  const auto sign = hn::ShiftRight<16>(hn::Xor(bits, magnitude));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
  const auto rebased = hn::Sub(magnitude, hn::Set(du, (112u << 23) - 0xfffu));
  const auto normal = hn::ShiftRight<13>(hn::Add(rebased, odd));
  const auto half = hn::Set(d, 0.5f);
  const auto sum = hn::Add(hn::BitCast(d, magnitude), half);
  const auto subnormal = hn::Sub(hn::BitCast(du, sum), hn::BitCast(du, half));
  auto result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(du, 113u << 23)), subnormal, normal);
  const auto infinity = hn::Set(du, 0x7c00u);
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, (143u << 23) - 1)), infinity, result);
  const auto is_nan = hn::Gt(magnitude, hn::Set(du, 0x7f800000u));
  result = hn::IfThenElse(is_nan, hn::Set(du, 0x7e00u), result);
  return hn::Or(result, sign);
}

// -------------------------------------------------------------------- loads and stores

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const float* from) {
  return hn::LoadU(d, from);
}
template <class D>
HWY_INLINE hn::Vec<D> load(D d, const BFloat16* from) {
  const auto bits = hn::LoadU(HalfBits<D>(), reinterpret_cast<const uint16_t*>(from));
  return widen_bfloat16(d, hn::PromoteTo(Bits<D>(), bits));
}
template <class D>
HWY_INLINE hn::Vec<D> load(D d, const Float16* from) {
  const auto bits = hn::LoadU(HalfBits<D>(), reinterpret_cast<const uint16_t*>(from));
  return widen_float16(d, hn::PromoteTo(Bits<D>(), bits));
}

// The elements at even places of twice as many.
template <class D>
HWY_INLINE hn::Vec<D> load_even(D d, const float* from) {
  hn::Vec<D> even, odd;
  hn::LoadInterleaved2(d, from, even, odd);
  return even;
}
// Two 16-bit elements are one 32-bit lane, whose low half comes first.
template <class D>
HWY_INLINE hn::Vec<D> load_even(D d, const BFloat16* from) {
  const auto pairs = hn::LoadU(Bits<D>(), reinterpret_cast<const uint32_t*>(from));
  return widen_bfloat16(d, pairs);
}
template <class D>
HWY_INLINE hn::Vec<D> load_even(D d, const Float16* from) {
  const auto pairs = hn::LoadU(Bits<D>(), reinterpret_cast<const uint32_t*>(from));
  return widen_float16(d, hn::And(pairs, hn::Set(Bits<D>(), 0xffffu)));
}

template <class D, class V>
HWY_INLINE void store(D d, V value, float* to) {
  hn::StoreU(value, d, to);
}
template <class D, class V>
HWY_INLINE void store_bits(D, V bits, uint16_t* to) {
  const hn::RebindToSigned<D> di;
  const HalfBits<D> dh;
  hn::StoreU(hn::DemoteTo(dh, hn::BitCast(di, bits)), dh, to);
}
template <class D, class V>
HWY_INLINE void store(D d, V value, BFloat16* to) {
  store_bits(d, narrow_to_bfloat16(d, value), reinterpret_cast<uint16_t*>(to));
}
template <class D, class V>
HWY_INLINE void store(D d, V value, Float16* to) {
  store_bits(d, narrow_to_float16(d, value), reinterpret_cast<uint16_t*>(to));
}

}  // namespace HWY_NAMESPACE
}  // namespace tilemoe::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
