// The table of routines that one instruction set provides, and the choice among them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ridgeline {

enum class Type : int { f32 = 0, bf16 = 1 };
constexpr int kTypes = 2;

constexpr size_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

// A matrix product handles the outputs in tiles of this many, and the inputs in pairs.
constexpr int kTile = 16;

// One call of a block routine: `rows` rows times `tiles` neighbouring tiles over `inputs` inputs.
struct Block {
  const float* x;  // [rows, inputs], a row every `x_stride` floats
  ptrdiff_t x_stride;
  const std::byte* weights;  // a tile every `tile_bytes`
  ptrdiff_t tile_bytes;
  int inputs;              // even
  float* sums;             // [rows, tiles * kTile]: added to, so a long sum can be cut up
  const std::byte* ahead;  // where prefetching starts; for every tile, as with `weights`
  ptrdiff_t ahead_step;    // bytes that it moves on with a pair of inputs; may be below a line
};

using BlockFn = void (*)(const Block&);
constexpr int kMaxRows = 16;
constexpr int kWidths = 2;  // one tile or two at once

struct Kernels {
  const char* name;
  int max_rows;  // of a block
  BlockFn block[kTypes][kMaxRows][kWidths];  // [weights' type][rows - 1][tiles - 1]; null: no room
  // n numbers of a type to fp32, and fp32 sums plus bias to a type (round to nearest even).
  void (*widen)(Type type, const void* from, float* to, size_t n);
  void (*narrow)(Type type, const float* sums, const float* bias, void* to, size_t n);
};

extern const Kernels portable_kernels;
#if defined(RIDGELINE_X86)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#elif defined(RIDGELINE_ARM64)
extern const Kernels neon_kernels;
#endif

// The fastest set that this CPU runs. `choose_kernels(name)` forces one: false if the CPU lacks it.
const Kernels& kernels();
bool choose_kernels(const char* name);

}  // namespace ridgeline
