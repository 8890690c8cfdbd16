// AVX-512 without dot products of bytes.
#include "avx512.h"

namespace ridgeline {

extern constexpr Kernels avx512_kernels =
    make_kernels<Vec, BF16, 30, PlainQuant<Vec>>("avx512");

}  // namespace ridgeline
