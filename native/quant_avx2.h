// Products of quantised weights with AVX2's integer instructions. Included as tile.h is: everything
// has internal linkage.
#pragma once

#include <immintrin.h>

#include "quant_tile.h"

namespace ridgeline {
namespace {

// Products of bytes in pairs, summed as 16-bit integers where those cannot overflow: eight products
// of 4-bit weights, two of 6-bit ones. 8-bit weights go as two halves. Both vectors of outputs
// share the inputs, half a strip of them at a time, for which eight registers hold the weights.
struct Avx2Quant {
  using I = __m256i;

  template <FormatName Name>
  static void tile(const QuantBlock& b) {
    constexpr Format f = kFormats[Name];
    I partial[kRowGroup][2];  // of the first half of each row's strip
    for (int i = 0; i < b.rows * kTile; i += 8) _mm256_storeu_ps(b.sums + i, _mm256_setzero_ps());
    Scales factors{};
    StripWalk<Name> walk(b.weights);
    for (int s = 0; s < b.x.strips; s++) {
      if (walk.move(s)) {
        factors.scale = halves(walk.factors);
        factors.minimum = halves(walk.factors + 2 * kTile);
      }
      Scales present = scales<Name>(walk.scales, walk.minima, factors);
      half<Name, 0>(b, s, walk.integers, present, partial);
      if constexpr (f.sets() == 2) present = scales<Name>(walk.scales + kTile, walk.minima, factors);
      half<Name, 1>(b, s, walk.integers, present, partial);
    }
  }

 private:
  struct Pair {  // of 16 outputs
    __m256 v[2];
  };
  struct Scales {
    Pair scale, minimum;
  };

  template <FormatName Name>
  static Scales scales(const std::byte* scales, const std::byte* minima, const Scales& factors) {
    constexpr Format f = kFormats[Name];
    Scales to{};
    to.scale = f.nested ? multiply(bytes(scales), factors.scale) : halves(scales);
    if constexpr (f.affine)
      to.minimum = f.nested ? multiply(bytes(minima), factors.minimum) : halves(minima);
    return to;
  }

  template <FormatName Name, int Part>
  static void half(const QuantBlock& b, int s, const std::byte* integers, const Scales& scales,
                   I (*partial)[2]) {
    constexpr Format f = kFormats[Name];
    constexpr int Bits = f.bits;
    constexpr bool last = Part == 1 || f.group == 16;  // of a group
    I w[2][4];
    unpack<Bits, Part>(integers, w[0]);
    unpack<Bits, Part>(integers + 32, w[1]);
    const int8_t* x = b.x.q + s * kStrip + Part * 16;
    const ptrdiff_t strips = b.x.strips;
    const float* x_scale = b.x.scales + s;
    const float* x_total = b.x.totals + s;
    const int32_t* x_sum = b.x.sums + 3 * s + (f.group == 16 ? Part : 2);
    float* sums = b.sums;
    for (int r = 0; r < b.rows; r++, x += strips * kStrip, sums += kTile) {
      I total[2];
      dot<Bits>(w, x, total);
      if constexpr (!last) {
        partial[r][0] = total[0];
        partial[r][1] = total[1];
      } else {
        const __m256 xs = _mm256_broadcast_ss(x_scale + r * strips);
        for (int i = 0; i < 2; i++) {
          if constexpr (f.group == 32)
            total[i] = Bits == 4 ? _mm256_add_epi16(total[i], partial[r][i])
                                 : _mm256_add_epi32(total[i], partial[r][i]);
          if constexpr (Bits == 4) total[i] = _mm256_madd_epi16(total[i], _mm256_set1_epi16(1));
          if constexpr (!f.affine)
            total[i] = _mm256_sub_epi32(
                total[i], _mm256_slli_epi32(_mm256_set1_epi32(x_sum[3 * r * strips]), Bits - 1));
          __m256 row = _mm256_loadu_ps(sums + 8 * i);
          row = _mm256_fmadd_ps(_mm256_mul_ps(scales.scale.v[i], xs), _mm256_cvtepi32_ps(total[i]), row);
          if constexpr (f.affine)
            row = _mm256_fmadd_ps(scales.minimum.v[i], _mm256_broadcast_ss(x_total + r * strips), row);
          _mm256_storeu_ps(sums + 8 * i, row);
        }
      }
    }
  }

  // The weights of 16 inputs, for 8 outputs.
  template <int Bits, int Part>
  static void unpack(const std::byte* integers, I* w) {
    const I low = _mm256_set1_epi8(15), two = _mm256_set1_epi8(0x30);
    if constexpr (Bits == 8) {
      for (int i = 0; i < 4; i++) w[i] = line(integers, Part * 4 + i);
    } else {
      for (int i = 0; i < 4; i += 2) {
        const I v = line(integers, Part * 2 + i / 2);
        w[i] = _mm256_and_si256(v, low);
        w[i + 1] = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
      }
    }
    if constexpr (Bits == 6) {
      const I v = line(integers, 4 + Part);
      w[0] = _mm256_or_si256(w[0], _mm256_and_si256(_mm256_slli_epi16(v, 4), two));
      w[1] = _mm256_or_si256(w[1], _mm256_and_si256(_mm256_slli_epi16(v, 2), two));
      w[2] = _mm256_or_si256(w[2], _mm256_and_si256(v, two));
      w[3] = _mm256_or_si256(w[3], _mm256_and_si256(_mm256_srli_epi16(v, 2), two));
    }
  }

  // Products with 16 inputs: of 4-bit weights 16-bit sums, of others 32-bit ones.
  template <int Bits>
  static void dot(const I (&w)[2][4], const int8_t* x, I* total) {
    const I ones = _mm256_set1_epi16(1);
    const I v[4] = {inputs(x), inputs(x + 4), inputs(x + 8), inputs(x + 12)};
    for (int i = 0; i < 2; i++) {
      if constexpr (Bits == 8) {
        const I mask = _mm256_set1_epi8(15), sixteen = _mm256_set1_epi16(16);
        I low[4], high[4];
        for (int j = 0; j < 4; j++) {
          low[j] = _mm256_maddubs_epi16(_mm256_and_si256(w[i][j], mask), v[j]);
          const I upper = _mm256_and_si256(_mm256_srli_epi16(w[i][j], 4), mask);
          high[j] = _mm256_maddubs_epi16(upper, v[j]);
        }
        total[i] = _mm256_add_epi32(_mm256_madd_epi16(add4(low), ones),
                                    _mm256_madd_epi16(add4(high), sixteen));
      } else {
        I p[4];
        for (int j = 0; j < 4; j++) p[j] = _mm256_maddubs_epi16(w[i][j], v[j]);
        if constexpr (Bits == 4)
          total[i] = add4(p);
        else
          total[i] = _mm256_add_epi32(_mm256_madd_epi16(_mm256_add_epi16(p[0], p[1]), ones),
                                      _mm256_madd_epi16(_mm256_add_epi16(p[2], p[3]), ones));
      }
    }
  }

  static I add4(const I (&p)[4]) {
    return _mm256_add_epi16(_mm256_add_epi16(p[0], p[1]), _mm256_add_epi16(p[2], p[3]));
  }
  static Pair halves(const std::byte* p) {
    const auto* eights = reinterpret_cast<const __m128i*>(p);
    return {{_mm256_cvtph_ps(_mm_loadu_si128(eights)), _mm256_cvtph_ps(_mm_loadu_si128(eights + 1))}};
  }
  static Pair bytes(const std::byte* p) {
    const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {{_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(all)),
             _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(all, 8)))}};
  }
  static Pair multiply(const Pair& a, const Pair& b) {
    return {{_mm256_mul_ps(a.v[0], b.v[0]), _mm256_mul_ps(a.v[1], b.v[1])}};
  }
  static I line(const std::byte* integers, int index) {
    return _mm256_loadu_si256(reinterpret_cast<const I*>(integers + 64 * index));
  }
  static I inputs(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
  }
};

}  // namespace
}  // namespace ridgeline
