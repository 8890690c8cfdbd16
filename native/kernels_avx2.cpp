// AVX2 and FMA: two of the 16 registers hold a tile; two stay free for an input and a mask.
#include <immintrin.h>

#include "tile.h"

namespace ridgeline {
namespace {

struct Vec {
  __m256 lo, hi;
  static Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static Vec load_half(const uint16_t* p) {
    const auto* halves = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
  }
  static void store(float* p, Vec v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
  }
  static Vec broadcast(const float* p) {
    const __m256 v = _mm256_broadcast_ss(p);
    return {v, v};
  }
  static float sum(Vec v) {
    const __m256 eight = _mm256_add_ps(v.lo, v.hi);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static Vec multiply(Vec a, Vec b) {
    return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
  }
  static Vec fma(Vec w, Vec x, Vec sum) {
    // As assembly, for this form sums in place: GCC's choice of form makes it spill sums.
    asm("vfmadd231ps %1, %2, %0" : "+x"(sum.lo) : "x"(w.lo), "x"(x.lo));
    asm("vfmadd231ps %1, %2, %0" : "+x"(sum.hi) : "x"(w.hi), "x"(x.hi));
    return sum;
  }
};

struct BF16 {
  static constexpr int pair_bytes = 2 * kTile * 2;
  template <int Input>
  static Vec load(const std::byte* p) {
    return {half<Input>(p), half<Input>(p + 32)};
  }

 private:
  template <int Input>  // of a pair, the even input lies in the low half of 32 bits
  static __m256 half(const std::byte* p) {
    const __m256i pairs = _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_castsi256_ps(Input == 0 ? _mm256_slli_epi32(pairs, 16)
                                          : _mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
  }
};

// Products of bytes in pairs, summed as 16-bit integers where those cannot overflow: eight products
// of 4-bit weights, two of 6-bit ones. 8-bit weights go as two halves. Both vectors of outputs
// share the inputs, half a strip of them at a time, for which eight registers hold the weights.
struct Quant {
  using I = __m256i;

  template <int Bits, int Group, bool Affine>
  static void tile(const QuantBlock& b) {
    const int strips = b.x.strips;
    __m256i partial[kRowGroup][2];  // of the first half of each row's strip
    for (int i = 0; i < b.rows * kTile; i += 8) _mm256_storeu_ps(b.sums + i, _mm256_setzero_ps());
    const std::byte* strip = b.weights;
    for (int s = 0; s < strips; s++, strip += strip_bytes(Bits, Group, Affine)) {
      for (int line = 0; line < strip_bytes(Bits, Group, Affine); line += 64)
        __builtin_prefetch(strip + kQuantAhead + line);
      const std::byte* scales = strip + strip_planes(Bits);
      half<Bits, Group, Affine, 0>(b, s, strip, scales, partial);
      half<Bits, Group, Affine, 1>(b, s, strip, scales + (Group == 16 ? 2 * kTile : 0), partial);
    }
  }

 private:
  template <int Bits, int Group, bool Affine, int Part>
  static void half(const QuantBlock& b, int s, const std::byte* strip, const std::byte* scales,
                   __m256i (*partial)[2]) {
    constexpr bool last = Part == 1 || Group == 16;  // of a group
    I w[2][4];
    unpack<Bits, Part>(strip, w[0]);
    unpack<Bits, Part>(strip + 32, w[1]);
    const __m256 scale[2] = {halves(scales), halves(scales + 16)};
    const __m256 minimum[2] = {Affine ? halves(scales + 32) : __m256{},
                               Affine ? halves(scales + 48) : __m256{}};
    const int8_t* x = b.x.q + s * kStrip + Part * 16;
    const ptrdiff_t strips = b.x.strips;
    const float* x_scale = b.x.scales + s;
    const float* x_total = b.x.totals + s;
    const int32_t* x_sum = b.x.sums + 3 * s + (Group == 16 ? Part : 2);
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
          if constexpr (Group == 32)
            total[i] = Bits == 4 ? _mm256_add_epi16(total[i], partial[r][i])
                                 : _mm256_add_epi32(total[i], partial[r][i]);
          if constexpr (Bits == 4) total[i] = _mm256_madd_epi16(total[i], _mm256_set1_epi16(1));
          if constexpr (!Affine)
            total[i] = _mm256_sub_epi32(
                total[i], _mm256_slli_epi32(_mm256_set1_epi32(x_sum[3 * r * strips]), Bits - 1));
          __m256 row = _mm256_loadu_ps(sums + 8 * i);
          row = _mm256_fmadd_ps(_mm256_mul_ps(scale[i], xs), _mm256_cvtepi32_ps(total[i]), row);
          if constexpr (Affine)
            row = _mm256_fmadd_ps(minimum[i], _mm256_broadcast_ss(x_total + r * strips), row);
          _mm256_storeu_ps(sums + 8 * i, row);
        }
      }
    }
  }

  // The weights of 16 inputs, for 8 outputs.
  template <int Bits, int Part>
  static void unpack(const std::byte* strip, I* w) {
    const I low = _mm256_set1_epi8(15), two = _mm256_set1_epi8(0x30);
    if constexpr (Bits == 8) {
      for (int i = 0; i < 4; i++) w[i] = line(strip, Part * 4 + i);
    } else {
      for (int i = 0; i < 4; i += 2) {
        const I v = line(strip, Part * 2 + i / 2);
        w[i] = _mm256_and_si256(v, low);
        w[i + 1] = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
      }
    }
    if constexpr (Bits == 6) {
      const I v = line(strip, 4 + Part);
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
  static __m256 halves(const std::byte* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I line(const std::byte* strip, int index) {
    return _mm256_loadu_si256(reinterpret_cast<const I*>(strip + 64 * index));
  }
  static I inputs(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
  }
};

}  // namespace

extern constexpr Kernels avx2_kernels = make_kernels<Vec, BF16, 7, Quant>("avx2");

}  // namespace ridgeline
