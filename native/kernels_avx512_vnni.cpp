// AVX-512 with dot products of bytes.
#include "quant_vnni.h"

namespace ridgeline {

extern constexpr Kernels avx512_vnni_kernels =
    make_kernels<Vec, Widened<Vec, BF16>, 30, VnniQuant>("avx512_vnni");

}  // namespace ridgeline
