// Plain C++ for every CPU. Compiled without contraction, so that no compiler fuses a multiplication
// and an addition for one number of rows and not for another.
#include "tile.h"

namespace ridgeline {
namespace {

struct Vec {
  float v[kTile];
  static constexpr int outputs = 2;  // of attention at once
  static Vec load(const float* p) {
    Vec v;
    std::memcpy(v.v, p, sizeof v.v);
    return v;
  }
  static Vec load_half(const uint16_t* p) {
    Vec v;
    for (int i = 0; i < kTile; i++) v.v[i] = half_to_float(p[i]);
    return v;
  }
  static void store(float* p, const Vec& v) { std::memcpy(p, v.v, sizeof v.v); }
  static Vec broadcast(const float* p) {
    Vec v;
    for (float& f : v.v) f = *p;
    return v;
  }
  static float sum(Vec v) { return sum_lanes(v.v); }
  static Vec sum_each(const Vec (&v)[kTile]) { return sum_one_by_one(v); }
  static Vec multiply(Vec a, const Vec& b) {
    for (int i = 0; i < kTile; i++) a.v[i] *= b.v[i];
    return a;
  }
  static Vec fma(const Vec& w, const Vec& x, Vec sum) {
    for (int i = 0; i < kTile; i++) sum.v[i] += w.v[i] * x.v[i];
    return sum;
  }
};

struct BF16 {
  static constexpr int pair_bytes = 2 * kTile * 2;
  template <int Input>
  static Vec load(const std::byte* p) {
    uint16_t pairs[2 * kTile];
    std::memcpy(pairs, p, sizeof pairs);
    Vec w;
    for (int i = 0; i < kTile; i++) w.v[i] = bits_to_float(uint32_t(pairs[2 * i + Input]) << 16);
    return w;
  }
};

}  // namespace

extern constexpr Kernels portable_kernels =
    make_kernels<Vec, Widened<Vec, BF16>, 3, PlainQuant<Vec>>("portable");

}  // namespace ridgeline
