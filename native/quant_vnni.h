// Products of bytes with VNNI: an instruction adds the products of four bytes for each of 16 outputs.
#pragma once

#include "avx512.h"

namespace ridgeline {
namespace {

struct VnniQuant {
  template <FormatName Name>
  static void tile(const QuantBlock& b) {
    quant_tile<VnniQuant, Name>(b);
  }
  template <FormatName Name, int R>
  static void block(const QuantBlock& b, int first) {
    quant_rows<VnniQuant, Name, R>(b, first);
  }
  static constexpr int rows = 12;
  using W = __m512i;
  using V = __m512;

  template <int Bits, int Count>
  static void unpack(const std::byte* integers, int part, W* w) {
    const __m512i low = _mm512_set1_epi32(0x0f0f0f0f);
    if constexpr (Bits == 8) {
      for (int i = 0; i < Count; i++) w[i] = line(integers, part * Count + i);
    } else {
      for (int i = 0; i < Count; i += 2) {
        const __m512i v = line(integers, (part * Count + i) / 2);
        w[i] = _mm512_and_si512(v, low);
        w[i + 1] = _mm512_and_si512(_mm512_srli_epi32(v, 4), low);
      }
    }
    if constexpr (Bits == 6) {
      const __m512i two = _mm512_set1_epi32(0x30303030);
      for (int i = 0; i < Count; i += 4) {
        const __m512i v = line(integers, 4 + (part * Count + i) / 4);
        w[i] = _mm512_or_si512(w[i], _mm512_and_si512(_mm512_slli_epi32(v, 4), two));
        w[i + 1] = _mm512_or_si512(w[i + 1], _mm512_and_si512(_mm512_slli_epi32(v, 2), two));
        w[i + 2] = _mm512_or_si512(w[i + 2], _mm512_and_si512(v, two));
        w[i + 3] = _mm512_or_si512(w[i + 3], _mm512_and_si512(_mm512_srli_epi32(v, 2), two));
      }
    }
  }
  template <int Count>
  static __m512i dot(const W* w, const int8_t* x) {
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < Count; i++) {
      int32_t four;
      std::memcpy(&four, x + 4 * i, sizeof four);
      sum = _mm512_dpbusd_epi32(sum, w[i], _mm512_set1_epi32(four));
    }
    return sum;
  }
  static __m512i subtract(__m512i sum, int32_t all) {
    return _mm512_sub_epi32(sum, _mm512_set1_epi32(all));
  }
  static V to_float(__m512i sum) { return _mm512_cvtepi32_ps(sum); }
  static V halves(const std::byte* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static V bytes(const std::byte* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  }
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, V v) { _mm512_storeu_ps(p, v); }
  static V broadcast(float v) { return _mm512_set1_ps(v); }
  static V multiply(V a, V b) { return _mm512_mul_ps(a, b); }
  static V fma(V a, V b, V sum) { return _mm512_fmadd_ps(a, b, sum); }

 private:
  static __m512i line(const std::byte* integers, int index) {
    return _mm512_loadu_si512(integers + 64 * index);
  }
};

}  // namespace

}  // namespace ridgeline
