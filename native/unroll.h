// Sums live in registers only when the loops over them are unrolled.
#pragma once

#if defined(__clang__)
#define RIDGELINE_UNROLL _Pragma("unroll")
#else
#define RIDGELINE_UNROLL _Pragma("GCC unroll 16")
#endif
