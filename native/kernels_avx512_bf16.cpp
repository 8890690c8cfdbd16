// AVX-512 with dot products of bytes and of bf16 pairs.
#include "quant_vnni.h"

namespace ridgeline {
namespace {

// An instruction adds the products of two bf16 inputs for each of 16 outputs: the second one's
// first, each rounded. Denormal numbers count as zero.
struct BF16Pairs {
  static constexpr int pair_bytes = 2 * kTile * 2;
  static constexpr bool reads_half = true;

  template <int R, int T>
  static void add_pair(Vec (&sums)[R][T], const std::byte* weights, ptrdiff_t tile_bytes,
                       const uint16_t* x, ptrdiff_t x_stride) {
    __m512bh w[T];
    RIDGELINE_UNROLL
    for (int t = 0; t < T; t++) w[t] = (__m512bh)_mm512_load_si512(weights + t * tile_bytes);
    RIDGELINE_UNROLL
    for (int r = 0; r < R; r++) {
      int32_t two;
      std::memcpy(&two, x + r * x_stride, sizeof two);
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(two);
      RIDGELINE_UNROLL
      for (int t = 0; t < T; t++) sums[r][t].v = _mm512_dpbf16_ps(sums[r][t].v, w[t], pair);
    }
  }
};

}  // namespace

extern constexpr Kernels avx512_bf16_kernels =
    make_kernels<Vec, BF16Pairs, 30, VnniQuant>("avx512_bf16");

}  // namespace ridgeline
