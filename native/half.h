// Half precision in plain C++, for what is done once or a few numbers at a time.
#pragma once

#include <cstdint>
#include <cstring>

namespace ridgeline {

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x400) return bits_to_float(sign | ((magnitude << 13) + (112 << 23)));
  const float small = float(magnitude) * 0x1p-24f;  // subnormal: exact
  return sign ? -small : small;
}

// Rounds to nearest even; what is too large becomes infinity, NaN stays NaN.
inline uint16_t float_to_half(float value) {
  const uint32_t bits = float_bits(value), magnitude = bits & 0x7fffffff;
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;
  if (magnitude < 0x38800000) {  // subnormal: adding 0.5 leaves the rounded mantissa in the low bits
    const float shifted = bits_to_float(magnitude) + 0.5f;
    return sign | uint16_t(float_bits(shifted) - 0x3f000000);
  }
  const uint32_t odd = magnitude >> 13 & 1;
  return sign | uint16_t((magnitude - (112 << 23) + 0xfff + odd) >> 13);
}

inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);  // NaN stays NaN
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float bf16_to_float(uint16_t bf16) { return bits_to_float(uint32_t(bf16) << 16); }

}  // namespace ridgeline
