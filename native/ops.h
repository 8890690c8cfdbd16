// What a decoder layer does between its matrix products, written once over the vector type V of
// tile.h. Included as tile.h is: everything has internal linkage.
//
// Every result depends on its own row alone, computed in one fixed order. In attention, positions
// go one after the other, in lanes and tiles that depend on the position alone: it makes no
// difference which rows are computed together, nor whether a position lies in the shared part.
#pragma once

#include <cstring>

#include "half.h"
#include "kernels.h"

namespace ridgeline {
namespace {

template <class V>
void widen(Type type, const void* from, float* to, size_t n);

// exp for x <= 0, and exactly 0 below -87; relative error below 2e-7. Written for a compiler to
// vectorise: Cody-Waite reduction and a polynomial of degree 6.
float exp_negative(float x) {
  const float clamped = x < -87.0f ? -87.0f : x;
  const float shifted = clamped * 1.44269504f + 0x1.8p23f;
  const float n = shifted - 0x1.8p23f;
  const float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t exponent = (float_bits(shifted) - 0x4b400000u + 127u) << 23;
  const float result = p * bits_to_float(exponent);
  return x < -87.0f ? 0.0f : result;
}

// The sum of 16 numbers by halving, as every V::sum computes it.
float sum_lanes(float (&lanes)[kTile]) {
  for (int width = kTile / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}

template <class V>
void rms_norm(const float* from, const float* weight, float eps, float* to, int n) {
  const float zeros[kTile] = {};
  V squares = V::load(zeros);
  for (int i = 0; i < n; i += kTile) {  // what pads a row is zero
    const V x = V::load(from + i);
    squares = V::fma(x, x, squares);
  }
  const float scale = 1 / __builtin_sqrtf(V::sum(squares) / float(n) + eps);
  for (int i = 0; i < n; i++) to[i] = from[i] * scale * weight[i];
}

void silu_multiply(float* gate, const float* up, int n) {
  for (int i = 0; i < n; i++) {
    const float x = gate[i];
    const float e = exp_negative(x < 0 ? x : -x);  // exp(-|x|)
    const float sigmoid = (x < 0 ? e : 1.0f) / (1.0f + e);
    gate[i] = x * sigmoid * up[i];
  }
}

// Scores of one key for rows first..end, each in its place in the row's scores.
template <class V>
void score_key(const AttentionTask& t, const float* key, float* scores, size_t stride, int first,
               int end) {
  for (int row = first; row < end; row++) {
    const float* query = t.query + row * t.query_stride;
    for (int head = 0; head < t.share; head++, query += t.dim) {
      V sum = V::multiply(V::load(key), V::load(query));
      for (int d = kTile; d < t.dim; d += kTile)
        sum = V::fma(V::load(key + d), V::load(query + d), sum);
      scores[(row * t.share + head) * stride] = V::sum(sum) * t.scale;
    }
  }
}

// Adds `count` weighted values to the outputs of rows first..end; the values lie `dim` apart.
template <class V>
void add_values(const AttentionTask& t, const float* values, int count, const float* weights,
                size_t stride, int first, int end) {
  for (int row = first; row < end; row++) {
    float* out = t.out + row * t.out_stride;
    for (int head = 0; head < t.share; head++, out += t.dim) {
      const float* weight = weights + (row * t.share + head) * stride;
      for (int d = 0; d < t.dim; d += kTile) {
        V sum = V::load(out + d);
        for (int i = 0; i < count; i++)
          sum = V::fma(V::load(values + i * t.dim + d), V::broadcast(weight + i), sum);
        V::store(out + d, sum);
      }
    }
  }
}

template <class V>
void attention(const AttentionTask& t) {
  int last = 0, first = t.positions[0];
  for (int row = 0; row < t.rows; row++) {
    last = t.positions[row] > last ? t.positions[row] : last;
    first = t.positions[row] < first ? t.positions[row] : first;
  }
  // Whole tiles of positions, from the first that any row sees.
  const int start = t.window && first >= t.window ? (first - t.window + 1) / kTile * kTile : 0;
  const int shared = t.shared < last + 1 ? t.shared : last + 1;
  const int own = t.shared > start ? t.shared : start;  // first of a row's own that may be seen
  const size_t stride = size_t(last - start + kTile) / kTile * kTile;
  float* scores = t.scratch;
  float* loaded = scores + t.rows * t.share * stride;
  float* totals = loaded + kTile * t.dim;
  const auto load = [&](const std::byte* from, int64_t slot, float* to) {
    from += slot * t.slot_stride;
    if (t.type == Type::f32) return reinterpret_cast<const float*>(from);
    widen<V>(t.type, from, to, t.dim);
    return static_cast<const float*>(to);
  };

  for (int position = start; position < shared; position++)
    score_key<V>(t, load(t.keys, t.slots[position], loaded), scores + position - start, stride, 0,
                 t.rows);
  for (int row = 0; row < t.rows; row++)
    for (int position = own; position <= t.positions[row]; position++)
      score_key<V>(t, load(t.keys, t.own[row][position - t.shared], loaded),
                   scores + position - start, stride, row, row + 1);

  for (int row = 0; row < t.rows; row++) {
    const int end = t.positions[row] + 1;
    const int begin = t.window && end > t.window ? end - t.window : 0;
    for (int head = 0; head < t.share; head++) {
      float* s = scores + (row * t.share + head) * stride - start;
      float largest = s[begin];
      for (int i = begin + 1; i < end; i++) largest = s[i] > largest ? s[i] : largest;
      // Weights of whole tiles: zero where the row does not see.
      for (int i = start; i < begin; i++) s[i] = 0;
      for (int i = begin; i < end; i++) s[i] = exp_negative(s[i] - largest);
      for (int i = end; i < start + int(stride); i++) s[i] = 0;
      float lanes[kTile] = {};
      for (int i = begin / kTile * kTile; i < end; i += kTile)
        for (int j = 0; j < kTile; j++) lanes[j] += s[i + j];
      totals[row * t.share + head] = sum_lanes(lanes);
    }
    std::memset(t.out + row * t.out_stride, 0, size_t(t.share) * t.dim * sizeof(float));
  }

  for (int tile = start; tile < shared; tile += kTile) {
    const int count = shared - tile < kTile ? shared - tile : kTile;
    for (int i = 0; i < count; i++) {
      float* to = loaded + i * t.dim;
      const float* value = load(t.values, t.slots[tile + i], to);
      if (value != to) std::memcpy(to, value, t.dim * sizeof(float));
    }
    add_values<V>(t, loaded, count, scores + tile - start, stride, 0, t.rows);
  }
  for (int row = 0; row < t.rows; row++) {
    for (int position = own; position <= t.positions[row]; position++)
      add_values<V>(t, load(t.values, t.own[row][position - t.shared], loaded), 1,
                    scores + position - start, stride, row, row + 1);
    float* out = t.out + row * t.out_stride;
    for (int head = 0; head < t.share; head++) {
      const float inverse = 1 / totals[row * t.share + head];
      for (int d = 0; d < t.dim; d++) *out++ *= inverse;
    }
  }
}

}  // namespace
}  // namespace ridgeline
