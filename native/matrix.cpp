#include "matrix.h"

#include <algorithm>
#include <cstring>

#include "memory.h"
#include "pool.h"

namespace ridgeline {
namespace {

// Measured on Zen 3; half and twice of each make no difference beyond noise.
constexpr int kInputs = 256;     // inputs of a tile at a time where its rows take several blocks
constexpr int kAhead = 2048;     // bytes to prefetch before their use
constexpr int kShares = 8;       // shares of the work for each thread
constexpr int kRowGroup = 96;    // rows whose sums and inputs are held at once
constexpr int kSmall = 1 << 15;  // multiplications below which waking a thread costs more

int ceil_div(int a, int b) { return (a + b - 1) / b; }
int even(int n) { return n + (n & 1); }

// Tiles that a thread takes at once: whole pairs, in enough shares that threads finish together.
int grain_of(int tiles, int threads, int width) {
  const int grain = std::max(1, tiles / (threads * kShares));
  return grain < width ? grain : grain / width * width;
}

// fp32 rows of x for the kernels, padded to whole pairs with zeros. The stride keeps rows from
// falling into the same few cache sets.
class Inputs {
 public:
  Inputs(const Kernels& kernels, Type type, const void* x, int rows, int inputs)
      : stride_(size_t(even(inputs) + 63) / 64 * 64 + 16) {
    static thread_local std::vector<float> scratch;
    if (scratch.size() < rows * stride_) scratch.resize(rows * stride_);
    values_ = scratch.data();
    const auto convert = [&](int row) {
      const auto* from = static_cast<const std::byte*>(x) + size_t(row) * inputs * size_of(type);
      float* to = values_ + row * stride_;
      kernels.widen(type, from, to, inputs);
      to[inputs] = 0;
    };
    if (int64_t(rows) * inputs > kSmall)
      Pool::instance().run(rows, convert);
    else
      for (int row = 0; row < rows; row++) convert(row);
  }
  const float* row(int row) const { return values_ + row * stride_; }
  ptrdiff_t stride() const { return ptrdiff_t(stride_); }

 private:
  size_t stride_;
  float* values_;
};

}  // namespace

Matrix::Matrix(Type type, const void* weights, size_t stride, const void* bias, int outputs,
               int inputs)
    : type_(type),
      outputs_(outputs),
      inputs_(inputs),
      tiles_(ceil_div(outputs, kTile)),
      tile_bytes_(even(inputs) * size_of(type) * kTile),
      weights_(allocate_weights(bytes())),
      bias_(size_t(tiles_) * kTile) {
  if (bias) kernels().widen(type, bias, bias_.data(), outputs);
  // Both layouts are a transposition of 32-bit words: one fp32 number or a pair of bf16.
  const size_t row_bytes = stride * size_of(type);
  const size_t words = inputs * size_of(type) / 4, rest = inputs * size_of(type) % 4;
  Pool::instance().run(tiles_, [&](int tile) {
    const auto* from = static_cast<const std::byte*>(weights) + tile * kTile * row_bytes;
    std::byte* to = weights_.get() + tile * tile_bytes_;
    const int filled = std::min(kTile, outputs - tile * kTile);
    for (size_t word = 0; word < words; word++, to += 4 * kTile)
      for (int n = 0; n < filled; n++) std::memcpy(to + 4 * n, from + n * row_bytes + 4 * word, 4);
    if (rest)
      for (int n = 0; n < filled; n++)
        std::memcpy(to + 4 * n, from + n * row_bytes + 4 * words, rest);
  });
}

void Matrix::unpack(void* weights) const {
  const size_t row_bytes = inputs_ * size_of(type_);
  for (int n = 0; n < outputs_; n++) {
    const std::byte* from = weights_.get() + n / kTile * tile_bytes_ + n % kTile * 4;
    auto* to = static_cast<std::byte*>(weights) + n * row_bytes;
    for (size_t at = 0; at < row_bytes; at += 4)
      std::memcpy(to + at, from + at * kTile, std::min<size_t>(4, row_bytes - at));
  }
}

void Matrix::multiply(Type type, const void* x, void* y, int rows) const {
  for (int first = 0; first < rows; first += kRowGroup) {
    const size_t column = first * size_of(type);  // bytes of the rows before, for one column
    multiply_group(type, static_cast<const std::byte*>(x) + column * inputs_,
                   static_cast<std::byte*>(y) + column * outputs_,
                   std::min(kRowGroup, rows - first));
  }
}

void Matrix::multiply_group(Type type, const void* x, void* y, int rows) const {
  const Kernels& k = kernels();
  const BlockFn(&block)[kMaxRows][kWidths] = k.block[int(type_)];
  const Inputs in(k, type, x, rows, inputs_);
  const int blocks = ceil_div(rows, k.max_rows);
  const int block_rows = ceil_div(rows, blocks);
  const int widest = block[block_rows - 1][1] ? 2 : 1;

  // `width` tiles from `tile` on, for every row.
  const auto multiply_tiles = [&](int tile, int width) {
    float sums[kRowGroup * kTile * kWidths];
    std::fill_n(sums, rows * width * kTile, 0.0f);
    const std::byte* weights = weights_.get() + tile * tile_bytes_;
    const ptrdiff_t pair_bytes = 2 * size_of(type_) * kTile;
    const int chunk = blocks == 1 ? even(inputs_) : kInputs;
    for (int from = 0; from < inputs_; from += chunk) {
      const int count = std::min(chunk, even(inputs_) - from);
      const std::byte* w = weights + from / 2 * pair_bytes;
      for (int b = 0, row = 0; b < blocks; b++) {
        const int n = rows / blocks + (b < rows % blocks);
        const ptrdiff_t share = count / 2 * pair_bytes / blocks;
        const std::byte* ahead = blocks == 1 ? w + kAhead : w + count / 2 * pair_bytes + b * share;
        block[n - 1][width - 1]({in.row(row) + from, in.stride(), w, ptrdiff_t(tile_bytes_), count,
                                 sums + row * width * kTile, ahead, pair_bytes / blocks});
        row += n;
      }
    }
    for (int row = 0; row < rows; row++) {
      const int output = tile * kTile;
      auto* to = static_cast<std::byte*>(y) + (size_t(row) * outputs_ + output) * size_of(type);
      k.narrow(type, sums + row * width * kTile, bias_.data() + output, to,
               std::min(width * kTile, outputs_ - output));
    }
  };

  const int threads = Pool::instance().threads();
  const bool small = int64_t(rows) * outputs_ * inputs_ < kSmall;
  const int grain = small ? tiles_ : grain_of(tiles_, threads, widest);
  Pool::instance().run(ceil_div(tiles_, grain), [&](int unit) {
    int tile = unit * grain;
    const int end = std::min(tiles_, tile + grain);
    for (; tile + widest <= end; tile += widest) multiply_tiles(tile, widest);
    for (; tile < end; tile++) multiply_tiles(tile, 1);
  });
}

}  // namespace ridgeline
