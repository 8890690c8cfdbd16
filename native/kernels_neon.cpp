// NEON: four of the 32 registers hold a tile; four stay free for an input and a mask.
#include <arm_neon.h>

#include "tile.h"

namespace ridgeline {
namespace {

struct Vec {
  float32x4_t v[4];
  static Vec load(const float* p) {
    return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
  }
  static void store(float* p, Vec v) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, v.v[i]);
  }
  static Vec broadcast(const float* p) {
    const float32x4_t v = vld1q_dup_f32(p);
    return {v, v, v, v};
  }
  static Vec fma(Vec w, Vec x, Vec sum) {
    for (int i = 0; i < 4; i++) sum.v[i] = vfmaq_f32(sum.v[i], w.v[i], x.v[i]);
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
  template <int Input>  // of a pair, the even input lies in the low half of 32 bits
  static Vec load(const std::byte* p) {
    Vec w;
    for (int i = 0; i < 4; i++) {
      const uint32x4_t pairs = vld1q_u32(reinterpret_cast<const uint32_t*>(p) + 4 * i);
      w.v[i] = vreinterpretq_f32_u32(Input == 0 ? vshlq_n_u32(pairs, 16)
                                                : vandq_u32(pairs, vdupq_n_u32(0xffff0000)));
    }
    return w;
  }
};

}  // namespace

extern constexpr Kernels neon_kernels = make_kernels<Vec, F32, BF16, 7>("neon");

}  // namespace ridgeline
