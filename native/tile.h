// The inner loop, written once over two types that each instruction set defines:
//   V, a vector of kTile floats: load, load_half, store, broadcast, multiply, fma (w * x + sum);
//   W, weights: pair_bytes (two inputs of a tile), reads_half (whether inputs are bf16), add_pair.
// Each file that includes this is compiled for one instruction set, so everything here has internal
// linkage: the linker must never share it.
//
// Every sum is one chain over the inputs in their order: sum = fma(weight[k], x[k], sum) for k = 0,
// 1, 2, ..., or two inputs at a time. It does not depend on how many rows or tiles are computed
// together, so neither do the bits of the result.
#pragma once

#include <cstring>

#include "half.h"
#include "kernels.h"
#include "ops.h"
#include "quant_plain.h"

namespace ridgeline {
namespace {

// fp32 weights lie as vectors are loaded.
template <class V>
struct F32 {
  static constexpr int pair_bytes = 2 * kTile * 4;
  template <int Input>
  static V load(const std::byte* p) {
    return V::load(reinterpret_cast<const float*>(p) + Input * kTile);
  }
};

// Adds the products of one input, the first or the second of a pair.
template <class V, class L, int Input, int R, int T>
void step(V (&sums)[R][T], const std::byte* weights, ptrdiff_t tile_bytes, const float* x,
          ptrdiff_t x_stride) {
  V w[T];
  RIDGELINE_UNROLL
  for (int t = 0; t < T; t++) w[t] = L::template load<Input>(weights + t * tile_bytes);
  RIDGELINE_UNROLL
  for (int r = 0; r < R; r++) {
    const V xr = V::broadcast(x + r * x_stride);
    RIDGELINE_UNROLL
    for (int t = 0; t < T; t++) sums[r][t] = V::fma(w[t], xr, sums[r][t]);
  }
}

// Weights that L::load<0 or 1>(address of a pair) widens to V, times fp32 inputs.
template <class V, class L>
struct Widened {
  static constexpr int pair_bytes = L::pair_bytes;
  static constexpr bool reads_half = false;

  template <int R, int T>
  static void add_pair(V (&sums)[R][T], const std::byte* weights, ptrdiff_t tile_bytes,
                       const float* x, ptrdiff_t x_stride) {
    step<V, L, 0>(sums, weights, tile_bytes, x, x_stride);
    step<V, L, 1>(sums, weights, tile_bytes, x + 1, x_stride);
  }
};

template <int Bytes, int T>
void prefetch(const std::byte* ahead, ptrdiff_t tile_bytes) {
  RIDGELINE_UNROLL
  for (int t = 0; t < T; t++)
    RIDGELINE_UNROLL
    for (int line = 0; line < Bytes; line += 64)
      __builtin_prefetch(ahead + t * tile_bytes + line);
}

// R rows times T tiles.
template <class V, class W, int R, int T>
void block(const Block& b) {
  const auto* x = [&] {
    if constexpr (W::reads_half)
      return b.half;
    else
      return b.x;
  }();
  const std::byte* weights = b.weights;
  const std::byte* ahead = b.ahead;
  V sums[R][T];
  RIDGELINE_UNROLL
  for (int r = 0; r < R; r++)
    RIDGELINE_UNROLL
    for (int t = 0; t < T; t++) sums[r][t] = V::load(b.sums + (r * T + t) * kTile);
  for (int k = 0; k < b.inputs; k += 2) {
    if constexpr (R > 1)  // for one row the processor's own prefetcher is faster alone
      prefetch<W::pair_bytes, T>(ahead, b.tile_bytes);
    W::add_pair(sums, weights, b.tile_bytes, x, b.x_stride);
    weights += W::pair_bytes;
    ahead += b.ahead_step;
    x += 2;
  }
  RIDGELINE_UNROLL
  for (int r = 0; r < R; r++)
    RIDGELINE_UNROLL
    for (int t = 0; t < T; t++) V::store(b.sums + (r * T + t) * kTile, sums[r][t]);
}

// Room: how many tiles' worth of registers there are for sums and weights.
template <class V, class W, int Room, int R, int T>
constexpr BlockFn block_if_room() {
  if constexpr (R * T + T <= Room) return block<V, W, R, T>;
  return nullptr;
}

template <class V, class W, int Room, int R = 1>
constexpr void fill(BlockFn (&table)[kMaxRows][kWidths]) {
  if constexpr (R <= kMaxRows) {
    table[R - 1][0] = block_if_room<V, W, Room, R, 1>();
    table[R - 1][1] = block_if_room<V, W, Room, R, 2>();
    fill<V, W, Room, R + 1>(table);
  }
}

template <class V>
void widen(Type type, const void* from, float* to, size_t n) {
  const auto* half = static_cast<const uint16_t*>(from);
  size_t i = 0;
  if (type == Type::f32) {
    std::memcpy(to, from, n * sizeof(float));
  } else if (type == Type::bf16) {
    for (; i < n; i++) to[i] = bf16_to_float(half[i]);
  } else {
    for (; i + kTile <= n; i += kTile) V::store(to + i, V::load_half(half + i));
    for (; i < n; i++) to[i] = half_to_float(half[i]);
  }
}

void narrow(Type type, const float* sums, const float* bias, void* to, size_t n) {
  auto* f32 = static_cast<float*>(to);
  auto* half = static_cast<uint16_t*>(to);
  const auto value = [&](size_t i) { return bias ? sums[i] + bias[i] : sums[i]; };
  if (type == Type::f32)
    for (size_t i = 0; i < n; i++) f32[i] = value(i);
  else if (type == Type::bf16)
    for (size_t i = 0; i < n; i++) half[i] = float_to_bf16(value(i));
  else
    for (size_t i = 0; i < n; i++) half[i] = float_to_half(value(i));
}

template <class V, class BF16, int Room, class Quant>
constexpr Kernels make_kernels(const char* name) {
  Kernels k{};
  k.name = name;
  k.bf16_inputs = BF16::reads_half;
  k.max_rows = Room - 1 < kMaxRows ? Room - 1 : kMaxRows;
  fill<V, Widened<V, F32<V>>, Room>(k.block[int(Type::f32)]);
  fill<V, BF16, Room>(k.block[int(Type::bf16)]);
  fill_quant<Quant>(k.quant);
  k.widen = widen<V>;
  k.narrow = narrow;
  k.quantise = quantise;
  k.rms_norm = rms_norm<V>;
  k.silu_multiply = silu_multiply;
  k.attention = attention<V>;
  return k;
}

}  // namespace
}  // namespace ridgeline
