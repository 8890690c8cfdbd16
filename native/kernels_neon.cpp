// NEON: four of the 32 registers hold a tile; four stay free for an input and a mask.
#include <arm_neon.h>

#include "tile.h"

namespace ridgeline {
namespace {

struct Vec {
  float32x4_t v[4];
  static constexpr int outputs = 4;  // of attention at once
  static Vec load(const float* p) {
    return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
  }
  static Vec load_half(const uint16_t* p) {
    Vec v;
    for (int i = 0; i < 4; i++)
      v.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
    return v;
  }
  static void store(float* p, Vec v) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, v.v[i]);
  }
  static Vec broadcast(const float* p) {
    const float32x4_t v = vld1q_dup_f32(p);
    return {v, v, v, v};
  }
  static float sum(Vec v) {
    const float32x4_t four =
        vaddq_f32(vaddq_f32(v.v[0], v.v[2]), vaddq_f32(v.v[1], v.v[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
  }
  static Vec sum_each(const Vec (&v)[kTile]) { return sum_one_by_one(v); }
  static Vec multiply(Vec a, Vec b) {
    for (int i = 0; i < 4; i++) a.v[i] = vmulq_f32(a.v[i], b.v[i]);
    return a;
  }
  static Vec fma(Vec w, Vec x, Vec sum) {
    for (int i = 0; i < 4; i++) sum.v[i] = vfmaq_f32(sum.v[i], w.v[i], x.v[i]);
    return sum;
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

extern constexpr Kernels neon_kernels = make_kernels<Vec, Widened<Vec, BF16>, 7, PlainQuant<Vec>>("neon");

}  // namespace ridgeline
