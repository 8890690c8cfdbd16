// Products of quantised weights with 8-bit inputs, written once over a type that each instruction
// set defines. Included as tile.h is: everything has internal linkage.
//
// Layout of the integers of a tile of 16 outputs, for each strip of 32 inputs:
//   4 bits: 4 lines of 64 bytes; line j has inputs 8j..8j+3 in the low halves of its bytes and
//           8j+4..8j+7 in the high ones, byte 4 * output + input % 4;
//   6 bits: the same with the lower 4 bits, then 2 lines with the upper 2: line i has inputs
//           16i + 4m..16i + 4m + 3 in bits 2m and 2m + 1;
//   8 bits: 8 lines; line j has inputs 4j..4j+3.
// Where scales lie, `Format` says.
//
// The integer sums are exact, and a row's fp32 sum takes the groups one after the other, so a row's
// bits do not depend on how many rows there are.
#pragma once

#include "half.h"
#include "kernels.h"
#include "unroll.h"

namespace ridgeline {
namespace {

constexpr int kQuantAhead = 8192;  // bytes to prefetch before their use

inline void prefetch_ahead(const std::byte* at, int bytes) {
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch(at + kQuantAhead + line);
}

// Walks over the strips of a tile of weights, and prefetches unless another walk does.
template <FormatName Name, bool Prefetch = true>
struct StripWalk {
  static constexpr Format f = kFormats[Name];
  const std::byte* integers;  // of the present strip
  const std::byte* scales;    // its first set
  const std::byte* minima;
  const std::byte* factors = nullptr;  // of nested scales and minima

  explicit StripWalk(const std::byte* tile) : next_(tile) {}

  // To strip s; true if its factors are not those of the strip before.
  bool move(int s) {
    const int within = s % kNest;
    const bool fresh = f.nested && within == 0;
    if (fresh) {
      factors = next_;
      if constexpr (Prefetch) prefetch_ahead(factors, kNestBytes);
      next_ += kNestBytes;
    }
    integers = next_;
    if constexpr (Prefetch) prefetch_ahead(integers, f.strip_bytes());
    next_ += f.strip_bytes();
    if constexpr (f.nested) {
      scales = factors + kNestFactors + within * f.sets() * kTile;
      minima = factors + kNestFactors + (kNest + within) * kTile;
    } else {
      scales = integers + f.planes();
      minima = scales + 2 * kTile;
    }
    return fresh;
  }

 private:
  const std::byte* next_;
};

// The numbers of some rows, from `first` on, that come with their integers.
struct RowNumbers {
  ptrdiff_t strips;
  const float *scales, *totals;
  const int32_t* sums;

  RowNumbers(const QuantRows& x, int first)
      : strips(x.strips),
        scales(x.scales + first * strips),
        totals(x.totals + first * strips),
        sums(x.sums + 3 * first * strips) {}
};

// Over a type Q whose V is an fp32 number of each output (halves, bytes: 16 fp16 numbers, or 16
// signed bytes, as such): what the groups of a strip add to a row.
template <class Q, FormatName Name, bool Prefetch = true>
struct Groups {
  static constexpr Format f = kFormats[Name];
  static constexpr int parts = f.sets();  // groups of a strip
  static constexpr int count = 8 / parts;  // fours of inputs of a group
  using V = typename Q::V;

  StripWalk<Name, Prefetch> walk;
  V scale_factor = Q::broadcast(0), minimum_factor = Q::broadcast(0), minimum = Q::broadcast(0);
  V scale = Q::broadcast(0);

  explicit Groups(const std::byte* tile) : walk(tile) {}

  void move(int s) {
    if (walk.move(s)) {
      scale_factor = Q::halves(walk.factors);
      minimum_factor = Q::halves(walk.factors + 2 * kTile);
    }
    if constexpr (f.affine)
      minimum = f.nested ? Q::multiply(minimum_factor, Q::bytes(walk.minima))
                         : Q::halves(walk.minima);
  }
  void take(int part) {
    scale = f.nested ? Q::multiply(scale_factor, Q::bytes(walk.scales + part * kTile))
                     : Q::halves(walk.scales);
  }
  // `total`: the exact products of the integers of strip `s` of row `r`.
  template <class Total>
  V add(V sum, Total total, const RowNumbers& x, int r, int s, int part) const {
    const ptrdiff_t at = r * x.strips + s;
    if constexpr (!f.affine)
      total = Q::subtract(total, x.sums[3 * at + (parts == 2 ? part : 2)] * f.offset());
    sum = Q::fma(Q::multiply(scale, Q::broadcast(x.scales[at])), Q::to_float(total), sum);
    if constexpr (f.affine) sum = Q::fma(minimum, Q::broadcast(x.totals[at]), sum);
    return sum;
  }
};

// Over a type Q with, besides what Groups needs, a W of 4 inputs of 16 outputs as bytes:
//   rows: how many rows' sums there are registers for;
//   unpack<Bits, Count>(integers, part, W[Count]): part `part` of a strip's weights;
//   dot<Count>(W[Count], x): their exact products with 4 * Count inputs.
// Here for R rows, from `first` on.
template <class Q, FormatName Name, int R>
void quant_rows(const QuantBlock& b, int first) {
  using G = Groups<Q, Name>;
  const ptrdiff_t strips = b.x.strips;
  const int8_t* x = b.x.q + first * strips * kStrip;
  const RowNumbers numbers(b.x, first);
  typename Q::V sums[R];
  RIDGELINE_UNROLL
  for (int r = 0; r < R; r++) sums[r] = Q::broadcast(0);
  G groups(b.weights);
  for (int s = 0; s < strips; s++, x += kStrip) {
    groups.move(s);
    RIDGELINE_UNROLL
    for (int part = 0; part < G::parts; part++) {
      typename Q::W w[G::count];
      Q::template unpack<G::f.bits, G::count>(groups.walk.integers, part, w);
      groups.take(part);
      RIDGELINE_UNROLL
      for (int r = 0; r < R; r++) {
        const auto total =
            Q::template dot<G::count>(w, x + r * strips * kStrip + part * 4 * G::count);
        sums[r] = groups.add(sums[r], total, numbers, r, s, part);
      }
    }
  }
  RIDGELINE_UNROLL
  for (int r = 0; r < R; r++) Q::store(b.sums + (first + r) * kTile, sums[r]);
}

template <class Q, FormatName Name, int R = Q::rows>
void quant_rows(const QuantBlock& b, int first, int rows) {
  if constexpr (R == 1)
    Q::template block<Name, 1>(b, first);
  else if (rows == R)
    Q::template block<Name, R>(b, first);
  else
    quant_rows<Q, Name, R - 1>(b, first, rows);
}

// Any number of rows: the later ones find the weights in a cache.
template <class Q, FormatName Name>
void quant_tile(const QuantBlock& b) {
  const int blocks = (b.rows + Q::rows - 1) / Q::rows;
  for (int i = 0, first = 0; i < blocks; i++) {
    const int rows = b.rows / blocks + (i < b.rows % blocks);
    quant_rows<Q, Name>(b, first, rows);
    first += rows;
  }
}

// Q::tile<FormatName> is a QuantFn.
template <class Q, int Name = 0>
constexpr void fill_quant(QuantFn (&table)[kFormatCount]) {
  if constexpr (Name < kFormatCount) {
    table[Name] = Q::template tile<FormatName(Name)>;
    fill_quant<Q, Name + 1>(table);
  }
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
    int32_t values[kStrip];
    for (int i = 0; i < kStrip; i++) {
      // Adding 1.5 * 2^23 leaves the nearest integer in the low bits, ties to even.
      const float shifted = (usable ? from[i] : 0) * inverse + 0x1.8p23f;
      values[i] = int32_t(float_bits(shifted)) - 0x4b400000;
    }
    int32_t halves[2] = {0, 0};
    for (int i = 0; i < kStrip / 2; i++) {
      halves[0] += values[i];
      halves[1] += values[i + kStrip / 2];
    }
    for (int i = 0; i < kStrip; i++) q[i] = int8_t(values[i]);
    sums[3 * s] = halves[0];
    sums[3 * s + 1] = halves[1];
    sums[3 * s + 2] = halves[0] + halves[1];
    totals[s] = scales[s] * float(sums[3 * s + 2]);
  }
}

}  // namespace
}  // namespace ridgeline
