// The blocks in which GGUF files store weights, decoded to what the packed formats keep.
// Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace ridgeline {

// A strip of one row (every block holds whole ones): 32 weights as unsigned integers, and what they
// are worth. The factors are fp16 numbers, and the integers beside them 1 in formats without nests.
struct Strip {
  uint8_t q[kStrip];
  float scale_factor, minimum_factor;
  int8_t scale[2];  // of each half of the strip
  int8_t minimum;

  float value(int i, int offset) const {
    return scale_factor * float(scale[i / 16]) * float(q[i] - offset) +
           minimum_factor * float(minimum);
  }
};

struct BlockType {
  int number;         // ggml's
  int weights;        // of a block
  int bytes;          // of a block
  FormatName format;
  void (*decode)(const std::byte* block, int strip, Strip& to);  // the strip-th of the block
};

// The type with ggml's number, or null if it is none of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K
// and Q6_K.
const BlockType* block_type(int number);

}  // namespace ridgeline
