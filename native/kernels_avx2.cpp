// AVX2 and FMA: two of the 16 registers hold a tile; two stay free for an input and a mask.
#include <immintrin.h>

#include "tile.h"

namespace ridgeline {
namespace {

struct Vec {
  __m256 lo, hi;
  static Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, Vec v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
  }
  static Vec broadcast(const float* p) {
    const __m256 v = _mm256_broadcast_ss(p);
    return {v, v};
  }
  static Vec fma(Vec w, Vec x, Vec sum) {
    // As assembly, for this form sums in place: GCC's choice of form makes it spill sums.
    asm("vfmadd231ps %1, %2, %0" : "+x"(sum.lo) : "x"(w.lo), "x"(x.lo));
    asm("vfmadd231ps %1, %2, %0" : "+x"(sum.hi) : "x"(w.hi), "x"(x.hi));
    return sum;
  }
};

struct F32 {
  static constexpr int pair_bytes = 2 * kTile * 4;
  template <int Input>
  static Vec load(const std::byte* p) {
    return Vec::load(reinterpret_cast<const float*>(p) + Input * kTile);
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

extern constexpr Kernels avx2_kernels = make_kernels<Vec, F32, BF16, 7>("avx2");

}  // namespace ridgeline
