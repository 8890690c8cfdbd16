// The forward pass of the Llama family over a paged cache: attention with rotary positions and
// grouped heads, a gated MLP, RMS norms before each. Activations are fp32 throughout.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "weights.h"

namespace ridgeline {

using Vector = std::vector<float>;
using SharedWeights = std::shared_ptr<const Weights>;

struct DecoderShape {
  int hidden, heads, kv_heads, dim;
  int input;  // what the first layer's attention reads: hidden, unless an entrance gives both
  float eps;
  Vector inverse_frequencies;  // [dim / 2]
  float rotary_scale;          // of sines and cosines
};

struct DecoderLayer {
  Vector attention_norm, mlp_norm;  // [hidden]; the former may be empty: no norm
  Vector query_norm, key_norm;      // [dim], or empty
  SharedWeights query, key, value, output, gate, up, down;
  int window;  // positions that a token sees, itself included; 0: all
};

// What stands before the layer of a draft head: it reads a token's embedding and a hidden state.
struct Entrance {
  Vector embedding_norm, feature_norm;  // may be empty: no norm
  SharedWeights project;  // of both to where the residual starts; null: attention reads both
  bool residual_normed;   // without `project`: whether the residual starts normed
};

// One sequence's part of a pass: its rows follow the previous sequence's. Of `size` rows the first
// `trunk` follow each other; row i >= trunk comes after row parents[i] of the same span.
struct Span {
  int size, trunk;
  int64_t kv_len;         // positions before the first row
  const int64_t* slots;   // [kv_len + size]: of those positions, then of the rows
  const int32_t* parents; // [size]
};

// Keys and values of one layer: [slots, kv_heads, dim].
struct LayerCache {
  std::byte* keys;
  std::byte* values;
};

struct Pass {
  const float* embeddings;  // [rows, embedding]
  const float* states;      // [rows, hidden]: of a decoder with an entrance; else null
  const int64_t* positions; // [rows]
  const Span* spans;
  int span_count;
  int rows;
  const LayerCache* caches;  // [layers]
  Type cache_type;
  const int64_t* keep;  // [kept]: rows that need logits
  int kept;
  float* logits;  // [kept, outputs of the head]
  // Hidden states asked for: features[i] is null or takes [rows, hidden] of the input of layer i,
  // the next one what the final norm gives, the last one what it is given.
  float* const* features;  // [layers + 2]
};

class Decoder {
 public:
  explicit Decoder(DecoderShape shape) : shape_(std::move(shape)) {}
  void add_layer(DecoderLayer layer) { layers_.push_back(std::move(layer)); }
  void enter_by(Entrance entrance) { entrance_ = std::make_unique<Entrance>(std::move(entrance)); }
  void finish(Vector norm, SharedWeights head);

  const DecoderShape& shape() const { return shape_; }
  const std::vector<DecoderLayer>& layers() const { return layers_; }
  bool finished() const { return head_ != nullptr; }
  const Weights& head() const { return *head_; }
  int inputs(size_t layer) const { return layer ? shape_.hidden : shape_.input; }
  bool has_entrance() const { return entrance_ != nullptr; }
  int embedding() const;  // width of an embedding

  void forward(const Pass& pass);

 private:
  struct Unit {  // of attention: a span, first of the pass's rows, how many, key head
    const Span* span;
    int row, rows, head;
  };

  void enter(const Pass& pass);
  void locate(const Pass& pass);
  void rotate(float* head, int row) const;
  void attend(const Pass& pass, const DecoderLayer& layer, const LayerCache& cache);
  void store(const Pass& pass, const LayerCache& cache, int row, int64_t slot);
  template <class Task>
  void each_row(int rows, const Task& task);

  DecoderShape shape_;
  std::vector<DecoderLayer> layers_;
  std::unique_ptr<const Entrance> entrance_;
  Vector norm_;  // may be empty: no norm
  SharedWeights head_;

  std::mutex turn_;  // the rows below are one pass's
  Rows both_, hidden_, normed_, query_, key_, value_, mixed_, added_, gate_, up_, kept_;
  std::vector<float> cosines_, sines_;  // [rows, dim / 2]
  std::vector<int> positions_;
  std::vector<std::vector<int64_t>> own_;  // [rows]
  std::vector<const int64_t*> own_starts_;
  std::vector<int64_t> slots_;  // [rows]
  std::vector<Unit> units_;
};

}  // namespace ridgeline
