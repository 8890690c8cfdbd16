// AVX2 and FMA: two of the 16 registers hold a tile; two stay free for an input and a mask.
#include <immintrin.h>

#include "quant_avx2.h"
#include "tile.h"

namespace ridgeline {
namespace {

struct Vec {
  __m256 lo, hi;
  static constexpr int outputs = 4;  // of attention at once
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
  // Halves of lanes are added as in `sum`, those of two vectors at once.
  static Vec sum_each(const Vec (&v)[kTile]) {
    __m256 a[16], b[8], c[4], d[2];
    for (int i = 0; i < 16; i++) a[i] = _mm256_add_ps(v[i].lo, v[i].hi);
    for (int i = 0; i < 8; i++)
      b[i] = _mm256_add_ps(_mm256_permute2f128_ps(a[i], a[i + 8], 0x20),
                           _mm256_permute2f128_ps(a[i], a[i + 8], 0x31));
    for (int i = 0; i < 4; i++)
      c[i] = _mm256_add_ps(_mm256_shuffle_ps(b[i], b[i + 4], 0x44),
                           _mm256_shuffle_ps(b[i], b[i + 4], 0xee));
    for (int i = 0; i < 2; i++)
      d[i] = _mm256_add_ps(_mm256_shuffle_ps(c[i], c[i + 2], 0x88),
                           _mm256_shuffle_ps(c[i], c[i + 2], 0xdd));
    // d[0] has the sums of vectors 0, 4, 2, 6 and 8, 12, 10, 14; d[1] those of the odd ones.
    const __m256 low = _mm256_unpacklo_ps(d[0], d[1]), high = _mm256_unpackhi_ps(d[0], d[1]);
    const __m256 even = _mm256_shuffle_ps(low, high, 0x44);
    const __m256 odd = _mm256_shuffle_ps(low, high, 0xee);
    return {_mm256_permute2f128_ps(even, odd, 0x20), _mm256_permute2f128_ps(even, odd, 0x31)};
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

}  // namespace

extern constexpr Kernels avx2_kernels = make_kernels<Vec, Widened<Vec, BF16>, 7, Avx2Quant>("avx2");

}  // namespace ridgeline
