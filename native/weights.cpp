#include "weights.h"

#include <algorithm>
#include <cstring>

#include "half.h"
#include "memory.h"
#include "pool.h"

namespace ridgeline {
namespace {

// Measured on Zen 3; half and twice of each make no difference beyond noise.
constexpr int kInputs = 256;     // inputs of a tile at a time where its rows take several blocks
constexpr int kAhead = 8192;     // bytes to prefetch before their use
constexpr int kShares = 8;       // shares of the work for each thread
constexpr int kSmall = 1 << 15;  // multiplications below which waking a thread costs more

int ceil_div(int a, int b) { return (a + b - 1) / b; }
int even(int n) { return n + (n & 1); }

}  // namespace

void Rows::resize(int rows, int width) {
  const int strips = ceil_div(width, kStrip);
  rows_ = rows;
  width_ = width;
  stride_ = ptrdiff_t(width + 63) / 64 * 64 + 16;
  if (values_.size() < size_t(rows) * stride_) values_.resize(size_t(rows) * stride_);
  for (int i = 0; i < rows; i++) std::fill_n(row(i) + width, stride_ - width, 0.0f);
  quantised_.strips = strips;
}

void Rows::quantise() {
  const size_t strips = size_t(rows_) * quantised_.strips;
  if (scales_.size() < strips) {
    q_.resize(strips * kStrip);
    scales_.resize(strips);
    totals_.resize(strips);
    sums_.resize(strips * 3);
  }
  quantised_ = {q_.data(), scales_.data(), totals_.data(), sums_.data(), quantised_.strips};
  const Kernels& k = kernels();
  const auto convert = [&](int i) { k.quantise(row(i), quantised_, i); };
  Pool::instance().each(rows_, rows_ * width_ > kSmall, convert);
}

void Rows::halve() {
  if (half_.size() < values_.size()) half_.resize(values_.size());
  const Kernels& k = kernels();
  const auto convert = [&](int i) {
    k.narrow(Type::bf16, row(i), nullptr, half_.data() + i * stride_, stride_);
  };
  Pool::instance().each(rows_, rows_ * width_ > kSmall, convert);
}

Weights::Weights(int outputs, int inputs, Type bias_type, const void* bias)
    : outputs_(outputs), inputs_(inputs), bias_(size_t(tiles()) * kTile) {
  if (bias) kernels().widen(bias_type, bias, bias_.data(), outputs);
}

void Weights::write(const float* sums, int row, int rows, int tile, int width,
                    const Output& y) const {
  const int output = tile * kTile;
  const int count = std::min(width * kTile, outputs_ - output);
  auto* to = static_cast<std::byte*>(y.data) + (row * y.stride + output) * size_of(y.type);
  for (int i = 0; i < rows; i++, sums += width * kTile, to += y.stride * size_of(y.type))
    kernels().narrow(y.type, sums, bias_.data() + output, to, count);
}

DenseWeights::DenseWeights(Type type, const void* weights, size_t stride, const void* bias,
                           int outputs, int inputs)
    : Weights(outputs, inputs, type, bias),
      type_(type),
      tile_bytes_(even(inputs) * size_of(type) * kTile),
      weights_(allocate_weights(bytes())) {
  // Both layouts are a transposition of 32-bit words: one fp32 number or a pair of bf16.
  const size_t row_bytes = stride * size_of(type);
  const size_t words = inputs * size_of(type) / 4, rest = inputs * size_of(type) % 4;
  Pool::instance().run(tiles(), [&](int tile) {
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

void DenseWeights::row(int output, float* to) const {
  const std::byte* from = weights_.get() + output / kTile * tile_bytes_ + output % kTile * 4;
  const int word = int(4 / size_of(type_));
  for (int i = 0; i < inputs_; i++) {
    const std::byte* at = from + i / word * 4 * kTile + i % word * size_of(type_);
    kernels().widen(type_, at, to + i, 1);
  }
}

void DenseWeights::unpack(void* weights) const {
  const size_t row_bytes = inputs_ * size_of(type_);
  for (int n = 0; n < outputs_; n++) {
    const std::byte* from = weights_.get() + n / kTile * tile_bytes_ + n % kTile * 4;
    auto* to = static_cast<std::byte*>(weights) + n * row_bytes;
    for (size_t at = 0; at < row_bytes; at += 4)
      std::memcpy(to + at, from + at * kTile, std::min<size_t>(4, row_bytes - at));
  }
}

Inputs DenseWeights::reads() const {
  return type_ == Type::bf16 && kernels().bf16_inputs ? Inputs::bf16 : Inputs::f32;
}

void DenseWeights::multiply(const Rows& x, int first, int end, const Output& y) const {
  for (int row = 0; row < x.rows(); row += kRowGroup) {
    const int rows = std::min(kRowGroup, x.rows() - row);
    const int block_rows = ceil_div(rows, ceil_div(rows, kernels().max_rows));
    const int widest = kernels().block[int(type_)][block_rows - 1][1] ? 2 : 1;
    int tile = first;
    for (; tile + widest <= end; tile += widest) multiply_group(x, row, rows, tile, widest, y);
    for (; tile < end; tile++) multiply_group(x, row, rows, tile, 1, y);
  }
}

// `width` tiles from `tile` on, for some of the rows.
void DenseWeights::multiply_group(const Rows& x, int row, int rows, int tile, int width,
                                  const Output& y) const {
  const Kernels& k = kernels();
  const int blocks = ceil_div(rows, k.max_rows);
  const bool half = reads() == Inputs::bf16;
  float sums[kRowGroup * kTile * kWidths];
  std::fill_n(sums, rows * width * kTile, 0.0f);
  const std::byte* weights = weights_.get() + tile * tile_bytes_;
  const ptrdiff_t pair_bytes = 2 * size_of(type_) * kTile;
  const int chunk = blocks == 1 ? even(inputs_) : kInputs;
  for (int from = 0; from < inputs_; from += chunk) {
    const int count = std::min(chunk, even(inputs_) - from);
    const std::byte* w = weights + from / 2 * pair_bytes;
    for (int b = 0, done = 0; b < blocks; b++) {
      const int n = rows / blocks + (b < rows % blocks);
      const ptrdiff_t share = count / 2 * pair_bytes / blocks;
      const std::byte* ahead = blocks == 1 ? w + kAhead : w + count / 2 * pair_bytes + b * share;
      k.block[int(type_)][n - 1][width - 1]({x.row(row + done) + from,
                                             half ? x.half(row + done) + from : nullptr,
                                             x.stride(), w, ptrdiff_t(tile_bytes_), count,
                                             sums + done * width * kTile, ahead,
                                             pair_bytes / blocks});
      done += n;
    }
  }
  write(sums, row, rows, tile, width, y);
}

QuantWeights::QuantWeights(const BlockType& type, const std::byte* blocks, const int32_t* rows,
                           const float* bias, int outputs, int inputs)
    : Weights(outputs, inputs, Type::f32, bias), format_(type.format) {
  allocate();
  const int strips = inputs / kStrip, block_strips = type.weights / kStrip;
  const size_t row_bytes = size_t(inputs / type.weights) * type.bytes;
  Pool::instance().run(tiles(), [&](int tile) {
    Strip values[kTile] = {};
    const int filled = std::min(kTile, outputs - tile * kTile);
    for (int s = 0; s < strips; s++) {
      for (int n = 0; n < filled; n++) {
        const std::byte* block =
            blocks + rows[tile * kTile + n] * row_bytes + size_t(s / block_strips) * type.bytes;
        type.decode(block, s % block_strips, values[n]);
      }
      put(tile, s, values);
    }
  });
}

QuantWeights::QuantWeights(int bits, Type type, const void* weights, const void* bias, int outputs,
                           int inputs)
    : Weights(outputs, inputs, type, bias), format_(bits == 4 ? k4Affine : k8) {
  allocate();
  const size_t row_bytes = inputs * size_of(type);
  Pool::instance().run(tiles(), [&](int tile) {
    Strip values[kTile] = {};
    const int filled = std::min(kTile, outputs - tile * kTile);
    for (int s = 0; s < inputs / kStrip; s++) {
      for (int n = 0; n < filled; n++) {
        float w[kStrip];
        const auto* row = static_cast<const std::byte*>(weights) + (tile * kTile + n) * row_bytes;
        kernels().widen(type, row + size_t(s) * kStrip * size_of(type), w, kStrip);
        round(w, values[n]);
      }
      put(tile, s, values);
    }
  });
}

// 4 bits span the group's range; 8 bits are symmetric about zero.
void QuantWeights::round(const float* w, Strip& to) const {
  const auto [low, high] = std::minmax_element(w, w + kStrip);
  const bool affine = format().affine;
  const int levels = (1 << format().bits) - 1;
  const float range = affine ? *high - *low : std::max(-*low, *high);
  const float steps = affine ? float(levels) : 127.0f;
  const float scale = half_to_float(float_to_half(range / steps));
  const float minimum = affine ? half_to_float(float_to_half(*low)) : 0;
  const float inverse = scale > 0 ? 1 / scale : 0;
  for (int i = 0; i < kStrip; i++) {
    const int q = int(__builtin_rintf((w[i] - minimum) * inverse)) + format().offset();
    to.q[i] = uint8_t(std::clamp(q, 0, levels));
  }
  to.scale_factor = scale;
  to.minimum_factor = minimum;
  to.scale[0] = to.scale[1] = to.minimum = 1;
}

void QuantWeights::allocate() {
  tile_bytes_ = format().tile_bytes(inputs_ / kStrip);
  weights_ = allocate_weights(bytes());
}

// Where a strip of a tile lies.
QuantWeights::Place QuantWeights::place(int tile, int strip) const {
  std::byte* at = weights_.get() + tile * tile_bytes_;
  if (!format().nested) {
    at += size_t(strip) * format().strip_bytes();
    return {at, at + format().planes(), nullptr, nullptr};
  }
  const int within = strip % kNest;
  std::byte* nest = at + format().tile_bytes(strip - within);
  std::byte* bytes = nest + kNestFactors;
  return {nest + kNestBytes + within * format().planes(), nest,
          bytes + within * format().sets() * kTile, bytes + (kNest + within) * kTile};
}

// One strip of a tile; four inputs of an output at a time.
void QuantWeights::put(int tile, int strip, const Strip* outputs) {
  const Place to = place(tile, strip);
  const int bits = format().bits, sets = format().sets();
  for (int lane = 0; lane < kTile; lane++) {
    const Strip& values = outputs[lane];
    uint32_t quads[8];
    std::memcpy(quads, values.q, sizeof quads);
    const auto store = [&](int line, uint32_t quad) {
      std::memcpy(to.integers + 64 * line + 4 * lane, &quad, 4);
    };
    if (bits == 8) {
      for (int i = 0; i < 8; i++) store(i, quads[i]);
    } else {
      const uint32_t low = 0x0f0f0f0f;
      for (int i = 0; i < 4; i++) store(i, (quads[2 * i] & low) | (quads[2 * i + 1] & low) << 4);
    }
    if (bits == 6)
      for (int i = 0; i < 2; i++) {
        uint32_t high = 0;
        for (int m = 0; m < 4; m++) high |= (quads[4 * i + m] >> 4 & 0x03030303) << 2 * m;
        store(4 + i, high);
      }
    auto* factors = reinterpret_cast<uint16_t*>(to.factors);
    factors[lane] = float_to_half(values.scale_factor);
    if (format().affine) factors[kTile + lane] = float_to_half(values.minimum_factor);
    if (!format().nested) continue;
    for (int set = 0; set < sets; set++) to.scales[set * kTile + lane] = std::byte(values.scale[set]);
    if (format().affine) to.minima[lane] = std::byte(values.minimum);
  }
}

// The reverse for one output.
void QuantWeights::get(int output, int strip, Strip& to) const {
  const Place from = place(output / kTile, strip);
  const int bits = format().bits, sets = format().sets(), lane = output % kTile;
  const auto* integers = reinterpret_cast<const uint8_t*>(from.integers);
  for (int i = 0; i < kStrip; i++) {
    const int quad = i / 4, at = 4 * lane + i % 4;
    to.q[i] = bits == 8 ? integers[64 * quad + at] : integers[64 * (quad / 2) + at] >> quad % 2 * 4 & 15;
    if (bits == 6) to.q[i] |= (integers[256 + 64 * (quad / 4) + at] >> quad % 4 * 2 & 3) << 4;
  }
  const auto* factors = reinterpret_cast<const uint16_t*>(from.factors);
  to.scale_factor = half_to_float(factors[lane]);
  to.minimum_factor = format().affine ? half_to_float(factors[kTile + lane]) : 0;
  to.scale[0] = to.scale[1] = to.minimum = 1;
  if (!format().nested) return;
  for (int half = 0; half < 2; half++)
    to.scale[half] = int8_t(from.scales[(sets == 2 ? half : 0) * kTile + lane]);
  if (format().affine) to.minimum = int8_t(from.minima[lane]);
}

void QuantWeights::row(int output, float* to) const {
  Strip strip;
  for (int s = 0; s < inputs_ / kStrip; s++) {
    get(output, s, strip);
    for (int i = 0; i < kStrip; i++) *to++ = strip.value(i, format().offset());
  }
}

void QuantWeights::multiply(const Rows& x, int first, int end, const Output& y) const {
  const QuantFn kernel = kernels().quant[format_];
  float sums[kRowGroup * kTile];
  for (int row = 0; row < x.rows(); row += kRowGroup) {
    const int rows = std::min(kRowGroup, x.rows() - row);
    QuantRows q = x.quantised();
    q.q += ptrdiff_t(row) * q.strips * kStrip;
    q.scales += ptrdiff_t(row) * q.strips;
    q.totals += ptrdiff_t(row) * q.strips;
    q.sums += ptrdiff_t(row) * q.strips * 3;
    for (int tile = first; tile < end; tile++) {
      kernel({q, rows, weights_.get() + tile * tile_bytes_, sums});
      write(sums, row, rows, tile, 1, y);
    }
  }
}

void multiply(Rows& x, const Product* products, int count) {
  const auto any_reads = [&](Inputs inputs) {
    return std::any_of(products, products + count,
                       [&](const Product& p) { return p.weights->reads() == inputs; });
  };
  if (any_reads(Inputs::bf16)) x.halve();
  if (any_reads(Inputs::int8)) x.quantise();
  // Units are runs of tiles of one of the matrices: enough that threads finish together, and of
  // even length, for dense products take two tiles at once.
  int tiles = 0;
  int64_t work = 0;
  for (int i = 0; i < count; i++) {
    tiles += products[i].weights->tiles();
    work += int64_t(products[i].weights->outputs()) * x.width() * x.rows();
  }
  const int grain = std::max(1, tiles / (Pool::instance().threads() * kShares));
  const int run = work < kSmall ? tiles : std::max(2, grain / 2 * 2);
  int units = 0;
  for (int i = 0; i < count; i++) units += ceil_div(products[i].weights->tiles(), run);
  Pool::instance().run(units, [&](int unit) {
    const Product* product = products;
    for (int own; unit >= (own = ceil_div(product->weights->tiles(), run)); product++) unit -= own;
    const int first = unit * run;
    const int end = std::min(first + run, product->weights->tiles());
    product->weights->multiply(x, first, end, product->y);
  });
}

}  // namespace ridgeline
