// Products of quantised weights in plain C++ over a vector type as tile.h describes it.
#pragma once

#include "quant_tile.h"

namespace ridgeline {
namespace {

template <class Vector>
struct PlainQuant {
  template <FormatName Name>
  static void tile(const QuantBlock& b) {
    quant_tile<PlainQuant, Name>(b);
  }
  template <FormatName Name, int R>
  static void block(const QuantBlock& b, int first) {
    quant_rows<PlainQuant, Name, R>(b, first);
  }
  static constexpr int rows = 4;
  struct W {
    uint8_t v[4 * kTile];
  };
  struct Sum {
    int32_t v[kTile];
  };
  using V = Vector;

  template <int Bits, int Count>
  static void unpack(const std::byte* integers, int part, W* w) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(integers);
    for (int i = 0; i < Count; i++) {
      const int at = part * Count + i;
      for (int j = 0; j < 4 * kTile; j++) {
        if constexpr (Bits == 8) {
          w[i].v[j] = bytes[64 * at + j];
        } else {
          w[i].v[j] = bytes[64 * (at / 2) + j] >> at % 2 * 4 & 15;
          if constexpr (Bits == 6) w[i].v[j] |= (bytes[256 + 64 * (at / 4) + j] >> at % 4 * 2 & 3) << 4;
        }
      }
    }
  }
  template <int Count>
  static Sum dot(const W* w, const int8_t* x) {
    Sum sum{};
    for (int i = 0; i < Count; i++)
      for (int output = 0; output < kTile; output++)
        for (int j = 0; j < 4; j++) sum.v[output] += w[i].v[4 * output + j] * x[4 * i + j];
    return sum;
  }
  static Sum subtract(Sum sum, int32_t all) {
    for (int32_t& v : sum.v) v -= all;
    return sum;
  }
  static V to_float(const Sum& sum) {
    float v[kTile];
    for (int i = 0; i < kTile; i++) v[i] = float(sum.v[i]);
    return V::load(v);
  }
  static V halves(const std::byte* p) {
    return V::load_half(reinterpret_cast<const uint16_t*>(p));
  }
  static V bytes(const std::byte* p) {
    float v[kTile];
    for (int i = 0; i < kTile; i++) v[i] = float(int8_t(p[i]));
    return V::load(v);
  }
  static V load(const float* p) { return V::load(p); }
  static void store(float* p, const V& v) { V::store(p, v); }
  static V broadcast(float v) { return V::broadcast(&v); }
  static V multiply(const V& a, const V& b) { return V::multiply(a, b); }
  static V fma(const V& a, const V& b, const V& sum) { return V::fma(a, b, sum); }
};

}  // namespace
}  // namespace ridgeline
