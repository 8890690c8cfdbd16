// AVX-512 without dot products of bytes: those of AVX2 are as fast.
#include "avx512.h"
#include "quant_avx2.h"

namespace ridgeline {

extern constexpr Kernels avx512_kernels =
    make_kernels<Vec, Widened<Vec, BF16>, 30, Avx2Quant>("avx512");

}  // namespace ridgeline
