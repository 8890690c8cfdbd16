// Weight matrices packed for products with few rows, and the product itself.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "gguf_blocks.h"
#include "kernels.h"

namespace ridgeline {

// Rows of inputs: fp32, each padded with zeros to whole strips and more, so that kernels may read
// past the width and rows do not fall into the same few cache sets. Copies of fewer bits come on
// demand.
class Rows {
 public:
  // Room for so many rows; what they hold afterwards is unspecified, the padding is zero.
  void resize(int rows, int width);

  int rows() const { return rows_; }
  int width() const { return width_; }
  ptrdiff_t stride() const { return stride_; }
  float* row(int row) { return values_.data() + row * stride_; }
  const float* row(int row) const { return values_.data() + row * stride_; }

  // Copies of the present values as 8-bit integers, or as bf16, rounded to nearest even.
  void quantise();
  void halve();
  const QuantRows& quantised() const { return quantised_; }
  const uint16_t* half(int row) const { return half_.data() + row * stride_; }

 private:
  int rows_ = 0, width_ = 0;
  ptrdiff_t stride_ = 0;
  std::vector<float> values_;
  std::vector<uint16_t> half_;
  std::vector<int8_t> q_;
  std::vector<float> scales_, totals_;
  std::vector<int32_t> sums_;
  QuantRows quantised_{};
};

// Where products go: [rows, outputs] of a type, a row every `stride` elements.
struct Output {
  Type type;
  void* data;
  ptrdiff_t stride;
};

// Which of the rows' copies a product reads.
enum class Inputs : int { f32 = 0, bf16 = 1, int8 = 2 };

// Outputs lie in tiles of 16, padded with zeros to whole tiles.
class Weights {
 public:
  virtual ~Weights() = default;
  int outputs() const { return outputs_; }
  int inputs() const { return inputs_; }
  int tiles() const { return (outputs_ + kTile - 1) / kTile; }
  virtual size_t bytes() const = 0;
  virtual Inputs reads() const = 0;
  // The weights of one output, as fp32 [inputs].
  virtual void row(int output, float* to) const = 0;
  // x * weights^T + bias for the tiles first..end of the outputs. Every row's bits depend on that
  // row alone. Thread-safe.
  virtual void multiply(const Rows& x, int first, int end, const Output& y) const = 0;

 protected:
  // bias [outputs] of fp32 or bf16, or null.
  Weights(int outputs, int inputs, Type bias_type, const void* bias);
  // Adds the bias to fp32 sums [rows, width tiles] of x's rows from `row` on and writes them.
  void write(const float* sums, int row, int rows, int tile, int width, const Output& y) const;

  int outputs_, inputs_;
  std::vector<float> bias_;  // [tiles * 16]
};

// fp32 and bf16: in a tile the inputs follow each other, fp32 as [input][output] and bf16 as
// [input / 2][output][2], the pairs that bf16 dot products read. Inputs are padded to pairs.
class DenseWeights : public Weights {
 public:
  // weights [outputs, inputs], a row every `stride` elements; bias of the same type. Both are
  // copied. Throws std::bad_alloc.
  DenseWeights(Type type, const void* weights, size_t stride, const void* bias, int outputs,
               int inputs);
  Type type() const { return type_; }
  size_t bytes() const override { return size_t(tiles()) * tile_bytes_; }
  Inputs reads() const override;
  void row(int output, float* to) const override;
  void multiply(const Rows& x, int first, int end, const Output& y) const override;
  // Writes the weights back as [outputs, inputs] in their type, dense.
  void unpack(void* weights) const;

 private:
  void multiply_group(const Rows& x, int row, int rows, int tile, int width, const Output& y) const;

  Type type_;
  size_t tile_bytes_;
  std::shared_ptr<std::byte> weights_;
};

// Integers of 4, 6 or 8 bits: `Format` and quant_tile.h have the layout.
class QuantWeights : public Weights {
 public:
  // blocks: [outputs, inputs / type.weights] of a GGUF file; output n is its row rows[n]. Inputs
  // are a multiple of type.weights. bias is fp32. Throws std::bad_alloc.
  QuantWeights(const BlockType& type, const std::byte* blocks, const int32_t* rows,
               const float* bias, int outputs, int inputs);
  // weights [outputs, inputs] of fp32 or bf16, rounded to 4 or 8 bits in groups of 32; inputs are
  // a multiple of 32. bias of the same type.
  QuantWeights(int bits, Type type, const void* weights, const void* bias, int outputs, int inputs);
  size_t bytes() const override { return size_t(tiles()) * tile_bytes_; }
  Inputs reads() const override { return Inputs::int8; }
  void row(int output, float* to) const override;
  void multiply(const Rows& x, int first, int end, const Output& y) const override;
 private:
  const Format& format() const { return kFormats[format_]; }
  void allocate();
  void round(const float* weights, Strip& to) const;
  struct Place {
    std::byte *integers, *factors;
    std::byte *scales, *minima;  // bytes, of nested formats
  };
  Place place(int tile, int strip) const;
  void put(int tile, int strip, const Strip* outputs);
  void get(int output, int strip, Strip& to) const;

  FormatName format_;
  size_t tile_bytes_;
  std::shared_ptr<std::byte> weights_;
};

// One of the products of the same rows.
struct Product {
  const Weights* weights;
  Output y;
};

// All products at once, on all threads; makes the copies of the rows that they read.
void multiply(Rows& x, const Product* products, int count);

}  // namespace ridgeline
