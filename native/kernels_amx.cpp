// AVX-512 with AMX: an instruction multiplies up to 16 rows with 16 outputs, over 32 inputs of bf16
// or up to 64 of 8 bits. As many rows as a tile register holds cost hardly more than one.
#include "quant_vnni.h"

namespace ridgeline {
namespace {

constexpr int kTileRows = 16;  // of a tile register; its rows have 64 bytes

// GCC's tile loads do not tell the compiler which memory they read.
inline void settle() { asm volatile("" ::: "memory"); }

// Registers 0 to 3 hold sums, 4 and 5 rows of inputs, 6 and 7 weights.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr void set(int tile, int tile_rows, int bytes) {
    rows[tile] = uint8_t(tile_rows);
    row_bytes[tile] = uint16_t(bytes);
  }
};

// Shapes of this thread's registers until the end of the scope. Between calls they belong to
// whoever computes next, torch for one.
class Tiles {
 public:
  explicit Tiles(const TileShapes& shapes) { _tile_loadconfig(&shapes); }
  ~Tiles() { _tile_release(); }
};

// bf16: 32 inputs of a row times those of a tile, which lie in memory as registers take them. The
// order of the sums is the instruction's own and the same for any number of rows.
constexpr int kInputs = 32;
constexpr int kLines = kInputs / 2;  // of a tile of weights; one has a pair of inputs

template <int R>
constexpr TileShapes dense_shapes() {
  constexpr int lower = R < kTileRows ? R : kTileRows, upper = R - lower;
  TileShapes shapes;
  for (int i = 0; i < 2; i++) {
    shapes.set(i, lower, 64);
    if (upper) shapes.set(2 + i, upper, 64);
    shapes.set(6 + i, kLines, 64);
  }
  shapes.set(4, lower, 64);
  if (upper) shapes.set(5, upper, 64);
  return shapes;
}

// R rows times T tiles of 16 outputs; above 16 rows two registers hold them.
template <int R, int T>
void dense(const Block& b) {
  constexpr bool upper = R > kTileRows;
  constexpr int line = 64, sums_stride = T * line, second = kTileRows * T * kTile;
  static constexpr TileShapes shapes = dense_shapes<R>();
  const Tiles tiles(shapes);
  const ptrdiff_t x_stride = b.x_stride * 2;
  settle();
  _tile_loadd(0, b.sums, sums_stride);
  if constexpr (T == 2) _tile_loadd(1, b.sums + kTile, sums_stride);
  if constexpr (upper) _tile_loadd(2, b.sums + second, sums_stride);
  if constexpr (upper && T == 2) _tile_loadd(3, b.sums + second + kTile, sums_stride);
  // Weights are padded to pairs only: the last inputs are copied and zeros follow them.
  alignas(64) std::byte tail[T][kLines * line] = {};
  const std::byte* weights = b.weights;
  ptrdiff_t tile_bytes = b.tile_bytes;
  const std::byte* ahead = b.ahead;
  for (int k = 0; k < b.inputs; k += kInputs, weights += kLines * line) {
    if (k + kInputs > b.inputs) {
      for (int t = 0; t < T; t++)
        std::memcpy(tail[t], weights + t * tile_bytes, (b.inputs - k) / 2 * line);
      settle();
      weights = tail[0];
      tile_bytes = sizeof tail[0];
    }
    for (int i = 0; i < kLines; i++, ahead += b.ahead_step)
      for (int t = 0; t < T; t++) __builtin_prefetch(ahead + t * b.tile_bytes);
    _tile_loadd(4, b.half + k, x_stride);
    if constexpr (upper) _tile_loadd(5, b.half + kTileRows * b.x_stride + k, x_stride);
    _tile_loadd(6, weights, line);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (upper) _tile_dpbf16ps(2, 5, 6);
    if constexpr (T == 2) {
      _tile_loadd(7, weights + tile_bytes, line);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (upper) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, b.sums, sums_stride);
  if constexpr (T == 2) _tile_stored(1, b.sums + kTile, sums_stride);
  if constexpr (upper) _tile_stored(2, b.sums + second, sums_stride);
  if constexpr (upper && T == 2) _tile_stored(3, b.sums + second + kTile, sums_stride);
}

template <int R = 1>
constexpr void fill_dense(BlockFn (&table)[kMaxRows][kWidths]) {
  if constexpr (R <= kMaxRows) {
    table[R - 1][0] = dense<R, 1>;
    table[R - 1][1] = dense<R, 2>;
    fill_dense<R + 1>(table);
  }
}

// Quantised: the weights of a few strips are unpacked, then multiplied while the products of the
// strips before are scaled and added. Sums of integers are exact, so the bits are VnniQuant's.
constexpr int kBatch = 4;  // strips at a time, one for each register of sums
constexpr int kFew = 11;   // rows up to which VNNI is faster
constexpr int kFours = kStrip / 4;

template <int R>
constexpr TileShapes quant_shapes() {
  TileShapes shapes;
  for (int i = 0; i < 4; i++) shapes.set(i, R, 64);
  for (int i = 4; i < 6; i++) shapes.set(i, R, kStrip);
  for (int i = 6; i < 8; i++) shapes.set(i, kFours, 64);
  return shapes;
}

// Those for which it pays.
constexpr bool takes_tiles(FormatName name) {
  return kFormats[name].bits < 8 && kFormats[name].sets() == 1;
}

// One tile of weights and R rows.
template <FormatName Name, int R>
class AmxRows {
 public:
  AmxRows(const QuantBlock& b, int first)
      : x_(b.x.q + ptrdiff_t(first) * b.x.strips * kStrip),
        strips_(b.x.strips),
        numbers_(b.x, first),
        ahead_(b.weights),
        groups_(b.weights) {}

  void run(float* to) {
    static constexpr TileShapes shapes = quant_shapes<R>();
    const Tiles tiles(shapes);
    unpack(0, 0);
    int turn = 0;
    for (int s = 0; s < strips_; s += kBatch, turn ^= 1) {
      if (s + kBatch < strips_) unpack(s + kBatch, turn ^ 1);
      step(s, turn);
    }
    const int rest = (strips_ - 1) % kBatch + 1;
    for (int i = 0; i < rest; i++) add(strips_ - rest + i, products_[turn ^ 1][i]);
    for (int r = 0; r < R; r++) _mm512_storeu_ps(to + r * kTile, sums_[r]);
  }

 private:
  static constexpr int line = 64;

  const int8_t* x_;
  const int strips_;
  const RowNumbers numbers_;
  StripWalk<Name> ahead_;
  Groups<VnniQuant, Name, false> groups_;
  __m512 sums_[R] = {};
  alignas(64) std::byte weights_[2][kBatch][kFours * line];
  alignas(64) int32_t products_[2][kBatch][R][kTile];

  void unpack(int s, int turn) {
    for (int i = 0; i < kBatch && s + i < strips_; i++) {
      ahead_.move(s + i);
      __m512i w[kFours];
      VnniQuant::unpack<kFormats[Name].bits, kFours>(ahead_.integers, 0, w);
      for (int j = 0; j < kFours; j++) _mm512_store_si512(weights_[turn][i] + j * line, w[j]);
    }
    settle();
  }
  // Multiplies the strips from `s` on and adds those before them. Strips past the end are computed
  // from what there is, and not used.
  void step(int s, int turn) {
    const ptrdiff_t x_stride = ptrdiff_t(strips_) * kStrip;
#define RIDGELINE_STRIP(i, rows, weights)                                         \
  _tile_zero(i);                                                                  \
  _tile_loadd(rows, x_ + (s + i < strips_ ? s + i : s) * kStrip, x_stride);       \
  _tile_loadd(weights, weights_[turn][i], line);                                  \
  _tile_dpbsud(i, rows, weights);                                                 \
  _tile_stored(i, products_[turn][i], line);                                      \
  if (s > 0) add(s - kBatch + i, products_[turn ^ 1][i])
    RIDGELINE_STRIP(0, 4, 6);
    RIDGELINE_STRIP(1, 5, 7);
    RIDGELINE_STRIP(2, 4, 6);
    RIDGELINE_STRIP(3, 5, 7);
#undef RIDGELINE_STRIP
  }
  void add(int s, const int32_t (&products)[R][kTile]) {
    groups_.move(s);
    groups_.take(0);
    RIDGELINE_UNROLL
    for (int r = 0; r < R; r++)
      sums_[r] = groups_.add(sums_[r], _mm512_load_si512(products[r]), numbers_, r, s, 0);
  }
};

struct AmxQuant {
  static constexpr int rows = kTileRows;

  template <FormatName Name>
  static void tile(const QuantBlock& b) {
    if (!takes_tiles(Name) || b.rows <= kFew)
      VnniQuant::tile<Name>(b);
    else
      quant_tile<AmxQuant, Name>(b);
  }
  template <FormatName Name, int R>
  static void block(const QuantBlock& b, int first) {
    if constexpr (!takes_tiles(Name) || R < kTileRows / 2)
      VnniQuant::block<Name, R>(b, first);
    else
      AmxRows<Name, R>(b, first).run(b.sums + first * kTile);
  }
};

constexpr Kernels make_amx_kernels() {
  Kernels k = make_kernels<Vec, Widened<Vec, BF16>, 30, AmxQuant>("amx");
  k.bf16_inputs = true;
  fill_dense(k.block[int(Type::bf16)]);
  return k;
}

}  // namespace

extern constexpr Kernels amx_kernels = make_amx_kernels();

}  // namespace ridgeline
