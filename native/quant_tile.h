// Products of quantised weights with 8-bit inputs, written once over a type that each instruction
// set defines. Included as tile.h is: everything has internal linkage.
//
// Layout of a tile of 16 outputs, for each strip of 32 inputs:
//   4 bits: 4 lines of 64 bytes; line j has inputs 8j..8j+3 in the low halves of its bytes and
//           8j+4..8j+7 in the high ones, byte 4 * output + input % 4;
//   6 bits: the same with the lower 4 bits, then 2 lines with the upper 2: line i has inputs
//           16i + 4m..16i + 4m + 3 in bits 2m and 2m + 1;
//   8 bits: 8 lines; line j has inputs 4j..4j+3;
// then fp16 scales of the 16 outputs, for groups of 16 inputs twice, and as many fp16 minima.
//
// The integer sums are exact, and a row's fp32 sum takes the groups one after the other, so a row's
// bits do not depend on how many rows there are.
#pragma once

#include "half.h"
#include "kernels.h"

namespace ridgeline {
namespace {

constexpr int kQuantAhead = 2048;  // bytes to prefetch before their use

// Over a type Q that handles `lanes` outputs at once. Its W is 4 inputs of each as bytes, its F an
// fp32 number of each:
//   unpack<Bits, Count>(strip, part, W[Count]): part `part` of the strip's weights;
//   dot<Bits, Count>(W[Count], x): their exact products with 4 * Count inputs.
template <class Q, int Bits, int Group, bool Affine>
void quant_tile(const QuantBlock& b) {
  using W = typename Q::W;
  using F = typename Q::F;
  constexpr int parts = Group == 16 ? 2 : 1;
  constexpr int count = 8 / parts;
  constexpr int planes = strip_planes(Bits);
  constexpr int scale_sets = kStrip / Group;
  const int strips = b.x.strips;
  for (int i = 0; i < b.rows * kTile; i++) b.sums[i] = 0;
  const std::byte* strip = b.weights;
  for (int s = 0; s < strips; s++, strip += strip_bytes(Bits, Group, Affine)) {
    for (int line = 0; line < strip_bytes(Bits, Group, Affine); line += 64)
      __builtin_prefetch(strip + kQuantAhead + line);
    for (int lane = 0; lane < kTile; lane += Q::lanes) {
      for (int part = 0; part < parts; part++) {
        W w[count];
        Q::template unpack<Bits, count>(strip + 4 * lane, part, w);
        const int set = scale_sets == 2 ? part : 0;
        const std::byte* scales = strip + planes + 2 * (set * kTile + lane);
        const F scale = Q::half(scales);
        F minimum{};
        if constexpr (Affine) minimum = Q::half(scales + scale_sets * kTile * 2);
        const int8_t* x = b.x.q + s * kStrip + part * (kStrip / parts);
        const float* x_scale = b.x.scales + s;
        const float* x_total = b.x.totals + s;
        const int32_t* x_sum = b.x.sums + 3 * s + (parts == 2 ? part : 2);
        float* sums = b.sums + lane;
        for (int r = 0; r < b.rows; r++) {
          auto total = Q::template dot<Bits, count>(w, x);
          if constexpr (!Affine) total = Q::subtract(total, *x_sum * (1 << (Bits - 1)));
          F row = Q::load(sums);
          row = Q::fma(Q::multiply(scale, Q::broadcast(*x_scale)), Q::to_float(total), row);
          if constexpr (Affine) row = Q::fma(minimum, Q::broadcast(*x_total), row);
          Q::store(sums, row);
          x += strips * kStrip;
          x_scale += strips;
          x_total += strips;
          x_sum += 3 * strips;
          sums += kTile;
        }
      }
    }
  }
}

// Q::tile<Bits, Group, Affine> is a QuantFn.
template <class Q, int Bits>
constexpr void fill_quant(QuantFn (&table)[3]) {
  table[0] = Q::template tile<Bits, 32, false>;
  table[1] = Q::template tile<Bits, 32, true>;
  table[2] = Q::template tile<Bits, 16, false>;
}

// A strip's largest magnitude becomes 127. Integer comparison of the bits orders magnitudes, and
// lets NaN win: then the scale is NaN and so is whatever comes of it.
void quantise(const float* from, const QuantRows& to, int row) {
  int8_t* q = to.q + ptrdiff_t(row) * to.strips * kStrip;
  float* scales = to.scales + ptrdiff_t(row) * to.strips;
  float* totals = to.totals + ptrdiff_t(row) * to.strips;
  int32_t* sums = to.sums + ptrdiff_t(row) * to.strips * 3;
  for (int s = 0; s < to.strips; s++, from += kStrip, q += kStrip) {
    int32_t largest = 0;
    for (int i = 0; i < kStrip; i++) {
      const int32_t magnitude = int32_t(float_bits(from[i]) & 0x7fffffff);
      largest = magnitude > largest ? magnitude : largest;
    }
    const float top = bits_to_float(uint32_t(largest));
    const bool usable = top > 1e-30f && largest < 0x7f800000;
    const float inverse = usable ? 127 / top : 0;
    scales[s] = top / 127;
    int32_t halves[2] = {0, 0};
    for (int i = 0; i < kStrip; i++) {
      // Adding 1.5 * 2^23 leaves the nearest integer in the low bits, ties to even.
      const float shifted = (usable ? from[i] : 0) * inverse + 0x1.8p23f;
      const int32_t value = int32_t(float_bits(shifted)) - 0x4b400000;
      q[i] = int8_t(value);
      halves[i / 16] += value;
    }
    sums[3 * s] = halves[0];
    sums[3 * s + 1] = halves[1];
    sums[3 * s + 2] = halves[0] + halves[1];
    totals[s] = scales[s] * float(sums[3 * s + 2]);
  }
}

}  // namespace
}  // namespace ridgeline
