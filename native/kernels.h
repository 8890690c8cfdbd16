// The table of routines that one instruction set provides, and the choice among them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ridgeline {

enum class Type : int { f32 = 0, bf16 = 1, f16 = 2 };
constexpr int kWeightTypes = 2;  // matrices are fp32 or bf16; only caches are fp16

constexpr size_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

// A matrix product handles the outputs in tiles of this many, and the inputs in pairs.
constexpr int kTile = 16;

// Rows that one call takes at most: their sums and inputs stay in a cache.
constexpr int kRowGroup = 96;

// One call of a block routine: `rows` rows times `tiles` neighbouring tiles over `inputs` inputs.
struct Block {
  const float* x;        // [rows, inputs], a row every `x_stride` numbers
  const uint16_t* half;  // the same as bf16; null unless the weights are read with such inputs
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

// Quantised products handle the inputs in strips of this many; two halves of it have sums.
constexpr int kStrip = 32;

// How quantised weights are kept: integers with a scale for every `group` inputs of an output.
// Scales (and minima) are fp16; nested ones are bytes, times one fp16 number for every kNest strips.
struct Format {
  int bits;   // 4, 6 or 8
  int group;  // 32 or 16
  bool affine;  // whether there are minima, one a strip; if not, the integers' offset is half their range
  bool nested;

  constexpr int offset() const { return affine ? 0 : 1 << (bits - 1); }
  constexpr int sets() const { return kStrip / group; }  // of scales of a strip
  constexpr int planes() const { return kTile * kStrip * bits / 8; }  // bytes: integers of a strip
  constexpr int strip_bytes() const { return planes() + (nested ? 0 : kTile * 2 * (1 + affine)); }
  constexpr size_t tile_bytes(int strips) const;
};

constexpr int kNest = 8;
// In front of so many strips: scales' and minima's fp16 factors, then the bytes of each strip's
// scales (of all sets), then those of its minima. All nested formats need the same room.
constexpr int kNestFactors = 4 * kTile;
constexpr int kNestBytes = kNestFactors + 2 * kNest * kTile;

constexpr size_t Format::tile_bytes(int strips) const {
  return size_t(strips) * strip_bytes() + (nested ? strips / kNest * kNestBytes : 0);
}

enum FormatName { k4, k4Affine, k4Nested, k6, k6Affine, k6Nested, k6Half, k8, kFormatCount };
constexpr Format kFormats[kFormatCount] = {
    {4, 32, false, false}, {4, 32, true, false}, {4, 32, true, true},  {6, 32, false, false},
    {6, 32, true, false},  {6, 32, true, true},  {6, 16, false, true}, {8, 32, false, false}};

// Rows of inputs as 8-bit integers: x = scale * q for every strip of a row.
struct QuantRows {
  int8_t* q;      // [rows, strips, kStrip]
  float* scales;  // [rows, strips]
  float* totals;  // [rows, strips]: scale times the sum of the strip's integers
  int32_t* sums;  // [rows, strips, 3]: of the integers of each half, and of both
  int strips;
};

// One tile of quantised weights (see quant_tile.h for the layout) times up to kRowGroup rows.
struct QuantBlock {
  QuantRows x;
  int rows;
  const std::byte* weights;
  float* sums;  // [rows, kTile], written
};

using QuantFn = void (*)(const QuantBlock&);

// Attention of one key head: some consecutive rows of one sequence, each with the `share` query
// heads that use that head.
struct AttentionTask {
  const float* query;  // first head of the first row; a head every `dim`
  ptrdiff_t query_stride;
  float* out;  // as `query`
  ptrdiff_t out_stride;
  int rows, share, dim;
  float scale;
  int window;  // a row sees this many positions, itself included; 0: all
  const std::byte* keys;  // of this head: [slots, dim], a slot every `slot_stride` bytes
  const std::byte* values;
  ptrdiff_t slot_stride;
  Type type;
  // Where positions lie: those below `shared` at slots[position]; those from there on, up to the
  // row's own, at own[row][position - shared].
  const int64_t* slots;
  int shared;
  const int* positions;        // [rows]
  const int64_t* const* own;   // [rows]
  float* scratch;              // attention_scratch() floats
};

// Floats from one head's scores of so many positions to the next head's: an odd number of tiles,
// so that the same position's scores do not all fall into one cache set.
inline int attention_stride(int positions) { return ((positions + kTile - 1) / kTile | 1) * kTile; }

// Most floats that attention over so many positions needs.
inline size_t attention_scratch(int rows, int share, int dim, int positions) {
  return size_t(rows) * share * (attention_stride(positions) + 1) + size_t(kTile) * dim;
}

struct Kernels {
  const char* name;
  int max_rows;      // of a block
  bool bf16_inputs;  // whether bf16 weights are multiplied with bf16 inputs
  BlockFn block[kWeightTypes][kMaxRows][kWidths];  // [type][rows - 1][tiles - 1]; null: no room
  QuantFn quant[kFormatCount];
  // n numbers of a type to fp32, and fp32 sums plus bias (or null) to a type (nearest even).
  void (*widen)(Type type, const void* from, float* to, size_t n);
  void (*narrow)(Type type, const float* sums, const float* bias, void* to, size_t n);
  // A row of fp32 inputs to 8-bit ones; `row` of `to` is written.
  void (*quantise)(const float* from, const QuantRows& to, int row);
  // to = from / sqrt(mean(from^2) + eps) * weight; n and padding as for a row of `Rows`.
  void (*rms_norm)(const float* from, const float* weight, float eps, float* to, int n);
  // gate = gate / (1 + exp(-gate)) * up
  void (*silu_multiply)(float* gate, const float* up, int n);
  void (*attention)(const AttentionTask& task);
};

extern const Kernels portable_kernels;
#if defined(RIDGELINE_X86)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
extern const Kernels avx512_vnni_kernels;
extern const Kernels avx512_bf16_kernels;
extern const Kernels amx_kernels;
#elif defined(RIDGELINE_ARM64)
extern const Kernels neon_kernels;
#endif

// The fastest set that this CPU runs. `choose_kernels(name)` forces one: false if the CPU lacks it.
const Kernels& kernels();
bool choose_kernels(const char* name);

}  // namespace ridgeline
