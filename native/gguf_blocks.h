// The blocks in which GGUF files store weights, decoded to what the packed formats keep.
// Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace ridgeline {

// A strip of one row (every block holds whole ones): 32 weights as unsigned integers. Those of input i are worth
// scale[i / 16] * (q[i] - offset) + minimum[i / 16].
struct Strip {
  uint8_t q[kStrip];
  float scale[2];
  float minimum[2];
};

// How a type of block is kept: bits of an integer, inputs that share a scale, and whether there
// are minima; where there are none, the offset is half the integers' range.
struct Format {
  int bits = 0;  // 4, 6 or 8
  int group = 32;  // or 16
  bool affine = false;

  int offset() const { return affine ? 0 : 1 << (bits - 1); }
};

struct BlockType {
  int number;         // ggml's
  int weights;        // of a block
  int bytes;          // of a block
  Format format;
  void (*decode)(const std::byte* block, int strip, Strip& to);  // the strip-th of the block
};

// The type with ggml's number, or null if it is none of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K
// and Q6_K.
const BlockType* block_type(int number);

}  // namespace ridgeline
