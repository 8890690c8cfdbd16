// AVX-512F: one of the 32 registers holds a tile; two stay free for an input and a mask.
#include <immintrin.h>

#include "tile.h"

namespace ridgeline {
namespace {

struct Vec {
  __m512 v;
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static void store(float* p, Vec v) { _mm512_storeu_ps(p, v.v); }
  static Vec broadcast(const float* p) { return {_mm512_set1_ps(*p)}; }
  static Vec fma(Vec w, Vec x, Vec sum) { return {_mm512_fmadd_ps(w.v, x.v, sum.v)}; }
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
  template <int Input>  // of a pair, the even input lies in the low half of 32 bits
  static Vec load(const std::byte* p) {
    const __m512i pairs = _mm512_load_si512(p);
    return {_mm512_castsi512_ps(Input == 0
                                    ? _mm512_slli_epi32(pairs, 16)
                                    : _mm512_and_si512(pairs, _mm512_set1_epi32(-65536)))};
  }
};

}  // namespace

extern constexpr Kernels avx512_kernels = make_kernels<Vec, F32, BF16, 30>("avx512");

}  // namespace ridgeline
