// AVX-512F: one of the 32 registers holds a tile; two stay free for an input and a mask.
#pragma once

#include <immintrin.h>

#include "tile.h"

namespace ridgeline {
namespace {

struct Vec {
  __m512 v;
  static constexpr int outputs = 8;  // of attention at once
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load_half(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  static void store(float* p, Vec v) { _mm512_storeu_ps(p, v.v); }
  static Vec broadcast(const float* p) { return {_mm512_set1_ps(*p)}; }
  static float sum(Vec v) {
    const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v.v), 1));
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v.v), upper);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  // Halves of lanes are added as in `sum`, those of two vectors at once.
  static Vec sum_each(const Vec (&v)[kTile]) {
    __m512 a[8], b[4], c[2];
    for (int i = 0; i < 8; i++)
      a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[i].v, v[i + 8].v, 0x44),
                           _mm512_shuffle_f32x4(v[i].v, v[i + 8].v, 0xee));
    for (int i = 0; i < 4; i++)
      b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88),
                           _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
    for (int i = 0; i < 2; i++)
      c[i] = _mm512_add_ps(_mm512_shuffle_ps(b[i], b[i + 2], 0x44),
                           _mm512_shuffle_ps(b[i], b[i + 2], 0xee));
    const __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(c[0], c[1], 0x88),
                                      _mm512_shuffle_ps(c[0], c[1], 0xdd));
    // In fours, of vectors 0, 2, 1, 3, then 8.., 4.., 12..
    return {_mm512_permute_ps(_mm512_shuffle_f32x4(sums, sums, 0xd8), 0xd8)};
  }
  static Vec multiply(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
  static Vec fma(Vec w, Vec x, Vec sum) { return {_mm512_fmadd_ps(w.v, x.v, sum.v)}; }
};

struct BF16 {
  static constexpr int pair_bytes = 2 * kTile * 2;
  template <int Input>  // of a pair, the even input lies in the low half of 32 bits
  static Vec load(const std::byte* p) {
    const __m512i pairs = _mm512_load_si512(p);
    return {_mm512_castsi512_ps(Input == 0
                                    ? _mm512_slli_epi32(pairs, 16)
                                    : _mm512_and_si512(pairs, _mm512_set1_epi32(-65536)))};
  }
};

}  // namespace
}  // namespace ridgeline
