// What a decoder layer does between its matrix products, written once over the vector type V of
// tile.h. Included as tile.h is: everything has internal linkage.
//
// Every result depends on its own row alone, computed in one fixed order. In attention, positions
// go one after the other, in lanes and tiles that depend on the position alone: it makes no
// difference which rows are computed together, nor whether a position lies in the shared part.
#pragma once

#include <cmath>
#include <cstring>

#include "half.h"
#include "kernels.h"
#include "unroll.h"

namespace ridgeline {
namespace {

// A key or value of the cache as fp32, 16 numbers every `step`.
template <class V>
void load_head(Type type, const std::byte* from, float* to, int dim, int step) {
  for (int d = 0; d < dim; d += kTile, to += step) {
    if (type == Type::f32) {
      V::store(to, V::load(reinterpret_cast<const float*>(from) + d));
    } else if (type == Type::f16) {
      V::store(to, V::load_half(reinterpret_cast<const uint16_t*>(from) + d));
    } else {
      const auto* bf16 = reinterpret_cast<const uint16_t*>(from) + d;
      for (int i = 0; i < kTile; i++) to[i] = bf16_to_float(bf16[i]);
    }
  }
}

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

// Lane by lane, the products of a key with a query.
template <class V>
V products(const float* key, const float* query, int dim) {
  V sum = V::multiply(V::load(key), V::load(query));
  for (int d = kTile; d < dim; d += kTile) sum = V::fma(V::load(key + d), V::load(query + d), sum);
  return sum;
}

// The same for a tile of keys [dim / kTile, kTile keys, kTile] at once, each then summed.
template <class V>
V score_tile(const float* keys, const float* query, int dim) {
  V sums[kTile];
  V part = V::load(query);
  RIDGELINE_UNROLL
  for (int i = 0; i < kTile; i++) sums[i] = V::multiply(V::load(keys + i * kTile), part);
  for (int d = kTile; d < dim; d += kTile) {
    part = V::load(query + d);
    keys += kTile * kTile;
    RIDGELINE_UNROLL
    for (int i = 0; i < kTile; i++) sums[i] = V::fma(V::load(keys + i * kTile), part, sums[i]);
  }
  return V::sum_each(sums);
}

// For instruction sets without a better way: the sums of 16 vectors, each as V::sum computes it.
template <class V>
V sum_one_by_one(const V (&vectors)[kTile]) {
  float sums[kTile];
  for (int i = 0; i < kTile; i++) sums[i] = V::sum(vectors[i]);
  return V::load(sums);
}

// Adds `count` weighted values, `dim` apart, to N vectors of an output.
template <class V, int N>
void add_part(const float* values, int count, const float* weights, int dim, float* out) {
  V sums[N];
  RIDGELINE_UNROLL
  for (int n = 0; n < N; n++) sums[n] = V::load(out + n * kTile);
  for (int i = 0; i < count; i++) {
    const V weight = V::broadcast(weights + i);
    RIDGELINE_UNROLL
    for (int n = 0; n < N; n++)
      sums[n] = V::fma(V::load(values + i * dim + n * kTile), weight, sums[n]);
  }
  RIDGELINE_UNROLL
  for (int n = 0; n < N; n++) V::store(out + n * kTile, sums[n]);
}

template <class V>
void add_values(const float* values, int count, const float* weights, int dim, float* out) {
  constexpr int wide = V::outputs;
  int d = 0;
  for (; d + wide * kTile <= dim; d += wide * kTile)
    add_part<V, wide>(values + d, count, weights, dim, out + d);
  for (; d < dim; d += kTile) add_part<V, 1>(values + d, count, weights, dim, out + d);
}

// The weights of scores: exp(score - largest) for those in begin..end, 0 for the rest of `count`.
// Returns their sum, taken in lanes of the position. `begin` and `end` count from the first score,
// whose position is the first of a tile.
float softmax_weights(float* scores, int begin, int end, int count) {
  for (int i = 0; i < begin; i++) scores[i] = -INFINITY;
  for (int i = end; i < count; i++) scores[i] = -INFINITY;
  float lanes[kTile];
  std::memcpy(lanes, scores, sizeof lanes);
  for (int i = kTile; i < count; i += kTile)
    for (int j = 0; j < kTile; j++) lanes[j] = scores[i + j] > lanes[j] ? scores[i + j] : lanes[j];
  float largest = lanes[0];
  for (float lane : lanes) largest = lane > largest ? lane : largest;
  for (int i = 0; i < count; i++) scores[i] = exp_negative(scores[i] - largest);
  float sums[kTile] = {};
  for (int i = 0; i < count; i += kTile)
    for (int j = 0; j < kTile; j++) sums[j] += scores[i + j];
  return sum_lanes(sums);
}

template <class V>
void attention(const AttentionTask& t) {
  int last = 0, first = t.positions[0];
  for (int row = 0; row < t.rows; row++) {
    last = t.positions[row] > last ? t.positions[row] : last;
    first = t.positions[row] < first ? t.positions[row] : first;
  }
  const auto begin = [&](int row) {  // first position that it sees
    const int end = t.positions[row] + 1;
    return t.window && end > t.window ? end - t.window : 0;
  };
  // Whole tiles of positions, from the first that any row sees.
  const int start = t.window && first >= t.window ? (first - t.window + 1) / kTile * kTile : 0;
  const int shared = t.shared < last + 1 ? t.shared : last + 1;
  const int own = t.shared > start ? t.shared : start;  // first of a row's own that may be seen
  const int stride = attention_stride(last - start + 1);
  float* scores = t.scratch;
  float* loaded = scores + size_t(t.rows) * t.share * stride;
  float* totals = loaded + kTile * t.dim;
  const auto load = [&](const std::byte* from, int64_t slot, float* to, int step) {
    load_head<V>(t.type, from + slot * t.slot_stride, to, t.dim, step);
  };
  // A tile's keys or values, each `step` after the other; the next tile's are asked for.
  const auto load_tile = [&](const std::byte* from, int tile, int count, int apart, int step) {
    for (int i = 0; i < count; i++) {
      const int ahead = tile + i + kTile;
      if (ahead < shared)
        for (size_t at = 0; at < t.dim * size_of(t.type); at += 64)
          __builtin_prefetch(from + t.slots[ahead] * t.slot_stride + at);
      load(from, t.slots[tile + i], loaded + i * apart, step);
    }
  };
  // Calls task(row, head) for the heads of every row that sees positions of the tile.
  const auto each_head = [&](int tile, const auto& task) {
    for (int row = 0; row < t.rows; row++)
      if (tile <= t.positions[row] && tile + kTile > begin(row))
        for (int head = 0; head < t.share; head++) task(row, head);
  };
  const auto query = [&](int row, int head) {
    return t.query + row * t.query_stride + head * t.dim;
  };
  const auto out = [&](int row, int head) { return t.out + row * t.out_stride + head * t.dim; };
  const auto at = [&](int row, int head, int position) {
    return scores + size_t(row * t.share + head) * stride + position - start;
  };

  const V scale = V::broadcast(&t.scale);
  for (int tile = start; tile < shared; tile += kTile) {
    const int count = shared - tile < kTile ? shared - tile : kTile;
    if (count < kTile) std::memset(loaded, 0, size_t(kTile) * t.dim * sizeof(float));
    load_tile(t.keys, tile, count, kTile, kTile * kTile);
    each_head(tile, [&](int row, int head) {
      const V tile_scores = score_tile<V>(loaded, query(row, head), t.dim);
      V::store(at(row, head, tile), V::multiply(tile_scores, scale));
    });
  }
  for (int row = 0; row < t.rows; row++)
    for (int position = own; position <= t.positions[row]; position++) {
      load(t.keys, t.own[row][position - t.shared], loaded, kTile);
      for (int head = 0; head < t.share; head++)
        *at(row, head, position) =
            V::sum(products<V>(loaded, query(row, head), t.dim)) * t.scale;
    }

  for (int row = 0; row < t.rows; row++)
    for (int head = 0; head < t.share; head++) {
      const int from = begin(row) > start ? begin(row) - start : 0;
      totals[row * t.share + head] = softmax_weights(
          at(row, head, start), from, t.positions[row] + 1 - start, stride);
      std::memset(out(row, head), 0, t.dim * sizeof(float));
    }

  for (int tile = start; tile < shared; tile += kTile) {
    const int count = shared - tile < kTile ? shared - tile : kTile;
    load_tile(t.values, tile, count, t.dim, kTile);
    each_head(tile, [&](int row, int head) {
      // Only what the row sees: a weight of 0 would not silence an infinite value of a later token.
      const int from = begin(row) > tile ? begin(row) - tile : 0;
      const int end = t.positions[row] + 1 - tile < count ? t.positions[row] + 1 - tile : count;
      add_values<V>(loaded + from * t.dim, end - from, at(row, head, tile + from), t.dim,
                    out(row, head));
    });
  }
  for (int row = 0; row < t.rows; row++) {
    for (int position = own; position <= t.positions[row]; position++) {
      load(t.values, t.own[row][position - t.shared], loaded, kTile);
      for (int head = 0; head < t.share; head++)
        add_values<V>(loaded, 1, at(row, head, position), t.dim, out(row, head));
    }
    for (int head = 0; head < t.share; head++) {
      const float inverse = 1 / totals[row * t.share + head];
      for (int d = 0; d < t.dim; d++) out(row, head)[d] *= inverse;
    }
  }
}

}  // namespace
}  // namespace ridgeline
