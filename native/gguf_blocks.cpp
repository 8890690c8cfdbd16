#include "gguf_blocks.h"

#include <cstring>

#include "half.h"

namespace ridgeline {
namespace {

float half_at(const std::byte* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return half_to_float(bits);
}

const uint8_t* bytes_at(const std::byte* p) { return reinterpret_cast<const uint8_t*>(p); }

void set(Strip& to, float scale, float minimum) {
  to.scale_factor = scale;
  to.minimum_factor = minimum;
  to.scale[0] = to.scale[1] = to.minimum = 1;
}

// Inputs 0..15 in the low halves of 16 bytes, 16..31 in the high ones.
void nibbles(const uint8_t* from, uint8_t* to) {
  for (int i = 0; i < 16; i++) {
    to[i] = from[i] & 15;
    to[i + 16] = from[i] >> 4;
  }
}

// One bit more for each of 32 inputs, of weight 16.
void fifth_bits(const std::byte* from, uint8_t* to) {
  uint32_t bits;
  std::memcpy(&bits, from, sizeof bits);
  for (int i = 0; i < kStrip; i++) to[i] |= (bits >> i & 1) << 4;
}

void decode_q4_0(const std::byte* block, int, Strip& to) {
  set(to, half_at(block), 0);
  nibbles(bytes_at(block) + 2, to.q);
}

void decode_q4_1(const std::byte* block, int, Strip& to) {
  set(to, half_at(block), half_at(block + 2));
  nibbles(bytes_at(block) + 4, to.q);
}

void decode_q5_0(const std::byte* block, int, Strip& to) {
  set(to, half_at(block), 0);
  nibbles(bytes_at(block) + 6, to.q);
  fifth_bits(block + 2, to.q);
  for (uint8_t& q : to.q) q += 16;  // the file's offset is 16, that of six bits 32
}

void decode_q5_1(const std::byte* block, int, Strip& to) {
  set(to, half_at(block), half_at(block + 2));
  nibbles(bytes_at(block) + 8, to.q);
  fifth_bits(block + 4, to.q);
}

void decode_q8_0(const std::byte* block, int, Strip& to) {
  set(to, half_at(block), 0);
  for (int i = 0; i < kStrip; i++) to.q[i] = bytes_at(block)[2 + i] ^ 0x80;  // + 128
}

// Q4_K and Q5_K begin with d and dmin and eight pairs of a 6-bit scale and a 6-bit minimum: four
// pairs plain, the low halves of four more in the next bytes and their high bits atop the former.
void k_scales(const std::byte* block, int strip, Strip& to) {
  const uint8_t* packed = bytes_at(block) + 4;
  set(to, half_at(block), -half_at(block + 2));
  if (strip < 4) {
    to.scale[0] = packed[strip] & 63;
    to.minimum = packed[strip + 4] & 63;
  } else {
    to.scale[0] = (packed[strip + 4] & 15) | packed[strip - 4] >> 6 << 4;
    to.minimum = packed[strip + 4] >> 4 | packed[strip] >> 6 << 4;
  }
  to.scale[1] = to.scale[0];
}

// Two strips share 32 bytes, the even one in the low halves.
void k_nibbles(const uint8_t* from, int strip, uint8_t* to) {
  const int shift = strip % 2 * 4;
  for (int i = 0; i < kStrip; i++) to[i] = from[strip / 2 * 32 + i] >> shift & 15;
}

void decode_q4_k(const std::byte* block, int strip, Strip& to) {
  k_scales(block, strip, to);
  k_nibbles(bytes_at(block) + 16, strip, to.q);
}

void decode_q5_k(const std::byte* block, int strip, Strip& to) {
  k_scales(block, strip, to);
  k_nibbles(bytes_at(block) + 48, strip, to.q);
  const uint8_t* high = bytes_at(block) + 16;
  for (int i = 0; i < kStrip; i++) to.q[i] |= (high[i] >> strip & 1) << 4;
}

// Two halves of four strips: 64 bytes of low nibbles, 32 bytes of pairs of high bits each.
void decode_q6_k(const std::byte* block, int strip, Strip& to) {
  const int half = strip / 4, quarter = strip % 4;
  const uint8_t* low = bytes_at(block) + half * 64 + quarter % 2 * 32;
  const uint8_t* high = bytes_at(block) + 128 + half * 32;
  for (int i = 0; i < kStrip; i++)
    to.q[i] = (low[i] >> quarter / 2 * 4 & 15) | (high[i] >> 2 * quarter & 3) << 4;
  set(to, half_at(block + 208), 0);
  for (int i = 0; i < 2; i++) to.scale[i] = int8_t(bytes_at(block)[192 + 2 * strip + i]);
}

constexpr BlockType kTypes[] = {
    {2, 32, 18, k4, decode_q4_0},         {3, 32, 20, k4Affine, decode_q4_1},
    {6, 32, 22, k6, decode_q5_0},         {7, 32, 24, k6Affine, decode_q5_1},
    {8, 32, 34, k8, decode_q8_0},         {12, 256, 144, k4Nested, decode_q4_k},
    {13, 256, 176, k6Nested, decode_q5_k}, {14, 256, 210, k6Half, decode_q6_k},
};

}  // namespace

const BlockType* block_type(int number) {
  for (const BlockType& type : kTypes)
    if (type.number == number) return &type;
  return nullptr;
}

}  // namespace ridgeline
