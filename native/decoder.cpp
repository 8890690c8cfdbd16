#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "pool.h"

namespace ridgeline {
namespace {

constexpr int kSmall = 1 << 14;          // numbers of a row operation not worth waking a thread
constexpr int kScores = 1 << 19;         // scores that a unit of attention holds, if a row allows
constexpr int kAttentionRows = 16;       // rows of such a unit at most

// The products of rows with several weights, each into rows of its own.
void project(Rows& x, std::initializer_list<std::pair<const SharedWeights*, Rows*>> all) {
  Product products[3];
  int count = 0;
  for (const auto& [weights, to] : all) {
    to->resize(x.rows(), (*weights)->outputs());
    products[count++] = {weights->get(), {Type::f32, to->row(0), to->stride()}};
  }
  multiply(x, products, count);
}

// A row of `Rows`, normed where there is a weight for it.
void normalised(const float* from, const Vector& weight, float eps, float* to, int width) {
  if (weight.empty())
    std::memcpy(to, from, width * sizeof(float));
  else
    kernels().rms_norm(from, weight.data(), eps, to, width);
}

}  // namespace

void Decoder::finish(Vector norm, SharedWeights head) {
  norm_ = std::move(norm);
  head_ = std::move(head);
}

int Decoder::embedding() const {
  if (!entrance_) return shape_.hidden;
  return (entrance_->project ? entrance_->project->inputs() : shape_.input) - shape_.hidden;
}

template <class Task>
void Decoder::each_row(int rows, const Task& task) {
  Pool::instance().each(rows, int64_t(rows) * shape_.hidden > kSmall, task);
}

void Decoder::forward(const Pass& pass) {
  const std::lock_guard<std::mutex> turn(turn_);
  const Kernels& k = kernels();
  const int rows = pass.rows, hidden = shape_.hidden, dim = shape_.dim;
  locate(pass);
  enter(pass);

  const auto norm_row = [&](const Vector& weight, int from, float* to) {
    normalised(hidden_.row(from), weight, shape_.eps, to, hidden);
  };
  const auto normalise = [&](const Vector& weight) {
    normed_.resize(rows, hidden);
    each_row(rows, [&](int i) { norm_row(weight, i, normed_.row(i)); });
  };
  const auto add = [&] {
    each_row(rows, [&](int i) {
      float* to = hidden_.row(i);
      const float* from = added_.row(i);
      for (int n = 0; n < hidden; n++) to[n] += from[n];
    });
  };
  const auto keep_feature = [&](float* to, const Rows& from) {
    for (int i = 0; to && i < rows; i++)
      std::memcpy(to + size_t(i) * hidden, from.row(i), hidden * sizeof(float));
  };

  for (size_t index = 0; index < layers_.size(); index++) {
    const DecoderLayer& layer = layers_[index];
    keep_feature(pass.features[index], hidden_);
    const bool reads_both = index == 0 && entrance_ && !entrance_->project;
    if (!reads_both) normalise(layer.attention_norm);
    project(reads_both ? both_ : normed_, {{&layer.query, &query_}, {&layer.key, &key_}, {&layer.value, &value_}});
    each_row(rows, [&](int i) {
      for (int h = 0; h < shape_.heads; h++) {
        float* head = query_.row(i) + h * dim;
        if (!layer.query_norm.empty())
          k.rms_norm(head, layer.query_norm.data(), shape_.eps, head, dim);
        rotate(head, i);
      }
      for (int h = 0; h < shape_.kv_heads; h++) {
        float* head = key_.row(i) + h * dim;
        if (!layer.key_norm.empty())
          k.rms_norm(head, layer.key_norm.data(), shape_.eps, head, dim);
        rotate(head, i);
      }
      store(pass, pass.caches[index], i, slots_[i]);
    });
    attend(pass, layer, pass.caches[index]);
    project(mixed_, {{&layer.output, &added_}});
    add();
    normalise(layer.mlp_norm);
    project(normed_, {{&layer.gate, &gate_}, {&layer.up, &up_}});
    // In parts, so that a single wide row is shared too.
    const int width = gate_.width(), part = 1024, parts = (width + part - 1) / part;
    Pool::instance().each(rows * parts, int64_t(rows) * width > kSmall, [&](int unit) {
      const int from = unit % parts * part;
      k.silu_multiply(gate_.row(unit / parts) + from, up_.row(unit / parts) + from,
                      std::min(part, width - from));
    });
    project(gate_, {{&layer.down, &added_}});
    add();
  }

  if (pass.features[layers_.size()]) {
    normalise(norm_);
    keep_feature(pass.features[layers_.size()], normed_);
  }
  keep_feature(pass.features[layers_.size() + 1], hidden_);
  if (pass.kept == 0) return;
  kept_.resize(pass.kept, hidden);
  each_row(pass.kept, [&](int i) { norm_row(norm_, int(pass.keep[i]), kept_.row(i)); });
  const Product product{head_.get(), {Type::f32, pass.logits, head_->outputs()}};
  multiply(kept_, &product, 1);
}

// What the first layer's residual starts from, to `hidden_`; for draft heads also `both_`, what the
// embedding and the hidden state become side by side.
void Decoder::enter(const Pass& pass) {
  const int rows = pass.rows, hidden = shape_.hidden, width = embedding();
  const auto take = [&](Rows& to, const float* from) {
    for (int i = 0; i < rows; i++)
      std::memcpy(to.row(i), from + size_t(i) * to.width(), to.width() * sizeof(float));
  };
  hidden_.resize(rows, hidden);
  take(hidden_, entrance_ ? pass.states : pass.embeddings);
  if (!entrance_) return;
  const Entrance& e = *entrance_;
  added_.resize(rows, width);
  take(added_, pass.embeddings);
  both_.resize(rows, width + hidden);
  each_row(rows, [&](int i) {
    normalised(added_.row(i), e.embedding_norm, shape_.eps, both_.row(i), width);
    normalised(hidden_.row(i), e.feature_norm, shape_.eps, both_.row(i) + width, hidden);
    if (!e.project && e.residual_normed)
      std::memcpy(hidden_.row(i), both_.row(i) + width, hidden * sizeof(float));
  });
  if (e.project) project(both_, {{&e.project, &hidden_}});
}

// What all layers share: each row's slot, its rotation, and where positions beyond its span's
// trunk lie for it.
void Decoder::locate(const Pass& pass) {
  const int half = shape_.dim / 2;
  positions_.resize(pass.rows);
  slots_.resize(pass.rows);
  own_.resize(std::max<size_t>(own_.size(), pass.rows));
  own_starts_.resize(pass.rows);
  cosines_.resize(size_t(pass.rows) * half);
  sines_.resize(cosines_.size());
  int row = 0;
  for (int s = 0; s < pass.span_count; s++) {
    const Span& span = pass.spans[s];
    for (int i = 0; i < span.size; i++, row++) {
      positions_[row] = int(pass.positions[row]);
      slots_[row] = span.slots[span.kv_len + i];
      own_[row].clear();
      for (int at = i; at >= span.trunk; at = span.parents[at])
        own_[row].push_back(span.slots[span.kv_len + at]);
      std::reverse(own_[row].begin(), own_[row].end());
      own_starts_[row] = own_[row].data();
      for (int n = 0; n < half; n++) {
        const float angle = float(positions_[row]) * shape_.inverse_frequencies[n];
        cosines_[size_t(row) * half + n] = std::cos(angle) * shape_.rotary_scale;
        sines_[size_t(row) * half + n] = std::sin(angle) * shape_.rotary_scale;
      }
    }
  }
}

// Rotary positions, the halves of a head being the pairs (Su et al., arXiv 2104.09864).
void Decoder::rotate(float* head, int row) const {
  const int half = shape_.dim / 2;
  const float* cosine = cosines_.data() + size_t(row) * half;
  const float* sine = sines_.data() + size_t(row) * half;
  for (int n = 0; n < half; n++) {
    const float a = head[n], b = head[n + half];
    head[n] = a * cosine[n] - b * sine[n];
    head[n + half] = b * cosine[n] + a * sine[n];
  }
}

void Decoder::store(const Pass& pass, const LayerCache& cache, int row, int64_t slot) {
  const int width = shape_.kv_heads * shape_.dim;
  const size_t at = size_t(slot) * width * size_of(pass.cache_type);
  kernels().narrow(pass.cache_type, key_.row(row), nullptr, cache.keys + at, width);
  kernels().narrow(pass.cache_type, value_.row(row), nullptr, cache.values + at, width);
}

void Decoder::attend(const Pass& pass, const DecoderLayer& layer, const LayerCache& cache) {
  units_.clear();
  const int share = shape_.heads / shape_.kv_heads, dim = shape_.dim;
  const int threads = Pool::instance().threads();
  int64_t work = 0;
  for (int s = 0, start = 0; s < pass.span_count; start += pass.spans[s++].size) {
    const Span& span = pass.spans[s];
    const int64_t length = span.kv_len + span.size;
    const int even = (span.size * shape_.kv_heads + threads - 1) / threads;
    const int64_t room = kScores / (share * length);
    const int most = int(std::clamp<int64_t>(room, 1, std::min(even, kAttentionRows)));
    work += length * span.size * share * dim;
    for (int row = 0; row < span.size; row += most)
      for (int head = 0; head < shape_.kv_heads; head++)
        units_.push_back({&span, start + row, std::min(most, span.size - row), head});
  }
  mixed_.resize(pass.rows, shape_.heads * dim);
  Pool::instance().each(int(units_.size()), work > kSmall, [&](int index) {
    const Unit& unit = units_[index];
    static thread_local std::vector<float> scratch;
    const int positions = int(unit.span->kv_len) + unit.span->size;
    const size_t needed = attention_scratch(unit.rows, share, dim, positions);
    if (scratch.size() < needed) scratch.resize(needed);
    const size_t offset = size_t(unit.head) * dim * size_of(pass.cache_type);
    AttentionTask task;
    task.query = query_.row(unit.row) + unit.head * share * dim;
    task.query_stride = query_.stride();
    task.out = mixed_.row(unit.row) + unit.head * share * dim;
    task.out_stride = mixed_.stride();
    task.rows = unit.rows;
    task.share = share;
    task.dim = dim;
    task.scale = 1 / std::sqrt(float(dim));
    task.window = layer.window;
    task.keys = cache.keys + offset;
    task.values = cache.values + offset;
    task.slot_stride = ptrdiff_t(shape_.kv_heads) * dim * size_of(pass.cache_type);
    task.type = pass.cache_type;
    task.slots = unit.span->slots;
    task.shared = int(unit.span->kv_len) + unit.span->trunk;
    task.positions = positions_.data() + unit.row;
    task.own = own_starts_.data() + unit.row;
    task.scratch = scratch.data();
    kernels().attention(task);
  });
}

}  // namespace ridgeline
