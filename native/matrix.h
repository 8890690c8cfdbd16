// A weight matrix packed for products with few rows.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "kernels.h"

namespace ridgeline {

// Layout: tiles of 16 outputs; in a tile the inputs follow each other, fp32 as [input][output] and
// bf16 as [input / 2][output][2], the pairs that bf16 dot products read. Outputs are padded with
// zeros to whole tiles, inputs to pairs.
class Matrix {
 public:
  // weights [outputs, inputs], a row every `stride` elements; bias [outputs] of the same type, or
  // null. Both are copied. Throws std::bad_alloc.
  Matrix(Type type, const void* weights, size_t stride, const void* bias, int outputs, int inputs);

  Type type() const { return type_; }
  int outputs() const { return outputs_; }
  int inputs() const { return inputs_; }
  size_t bytes() const { return size_t(tiles_) * tile_bytes_; }

  // Writes the weights back as [outputs, inputs], dense.
  void unpack(void* weights) const;

  // y[rows, outputs] = x[rows, inputs] * weights^T + bias; both of `type`, dense. The sums are
  // fp32, in the order of the inputs.
  void multiply(Type type, const void* x, void* y, int rows) const;

 private:
  void multiply_group(Type type, const void* x, void* y, int rows) const;

  Type type_;
  int outputs_, inputs_, tiles_;
  size_t tile_bytes_;
  std::shared_ptr<std::byte> weights_;
  std::vector<float> bias_;  // [tiles * 16]
};

}  // namespace ridgeline
