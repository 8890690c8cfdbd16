// ridgeline._native. Large tensors come as addresses, so that nothing here depends on torch's C++
// ABI; small ones as arrays. Everything is checked before it is used.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "decoder.h"
#include "gguf_blocks.h"
#include "kernels.h"
#include "pool.h"
#include "stream.h"
#include "weights.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace ridgeline;

namespace {

constexpr int kMaxThreads = 1024;
constexpr int kMaxSide = 1 << 30;  // so that sizes in elements fit an int and in bytes 64 bits

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const std::string& otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

Type checked_type(int type, int count) {
  require(type >= 0 && type < count, "unknown element type");
  return Type(type);
}

void* checked_address(uintptr_t address, size_t alignment) {
  require(address != 0 && address % alignment == 0,
          "an address is null or not aligned to its element type");
  return reinterpret_cast<void*>(address);
}

void* optional_address(uintptr_t address, size_t alignment) {
  return address ? checked_address(address, alignment) : nullptr;
}

void check_sides(int64_t outputs, int64_t inputs) {
  require(outputs >= 1 && inputs >= 1 && outputs <= kMaxSide && inputs <= kMaxSide,
          "a matrix needs 1 to 2^30 outputs and inputs");
}

std::shared_ptr<Weights> dense(int type, uintptr_t weights, int64_t stride, uintptr_t bias,
                               int64_t outputs, int64_t inputs) {
  const Type t = checked_type(type, kWeightTypes);
  check_sides(outputs, inputs);
  require(stride >= inputs && stride <= kMaxSide, "a row's stride must be its length to 2^30");
  return std::make_shared<DenseWeights>(t, checked_address(weights, size_of(t)), size_t(stride),
                                        optional_address(bias, size_of(t)),
                                        int(outputs), int(inputs));
}

std::shared_ptr<Weights> quantised(int bits, int type, uintptr_t weights, uintptr_t bias,
                                   int64_t outputs, int64_t inputs) {
  const Type t = checked_type(type, kWeightTypes);
  check_sides(outputs, inputs);
  require(bits == 4 || bits == 8, "weights are quantised to 4 or 8 bits");
  require(inputs % kStrip == 0, "quantised weights need a multiple of 32 inputs");
  return std::make_shared<QuantWeights>(bits, t, checked_address(weights, size_of(t)),
                                        optional_address(bias, size_of(t)),
                                        int(outputs), int(inputs));
}

const BlockType& checked_blocks(int number, int64_t size, int64_t rows, int64_t inputs) {
  const BlockType* type = block_type(number);
  require(type != nullptr, "GGUF type " + std::to_string(number) + " is not packed as it is");
  check_sides(rows, inputs);
  require(inputs % type->weights == 0, "a row is no whole number of blocks");
  require(size == rows * (inputs / type->weights) * type->bytes,
          "the blocks take another number of bytes than the shape calls for");
  return *type;
}

std::shared_ptr<Weights> from_gguf(int number, const Array<uint8_t>& blocks,
                                   const Array<int32_t>& rows, const Array<float>& bias,
                                   int64_t inputs) {
  const int64_t outputs = int64_t(rows.size());
  const BlockType& type = checked_blocks(number, int64_t(blocks.size()), outputs, inputs);
  for (int64_t i = 0; i < outputs; i++)
    require(rows.data()[i] >= 0 && rows.data()[i] < outputs, "a row's number is out of range");
  require(bias.size() == 0 || int64_t(bias.size()) == outputs, "a bias has one value an output");
  const auto* from = reinterpret_cast<const std::byte*>(blocks.data());
  const float* bias_data = bias.size() ? bias.data() : nullptr;
  const nb::gil_scoped_release release;
  return std::make_shared<QuantWeights>(type, from, rows.data(), bias_data, int(outputs),
                                        int(inputs));
}

// Rows `ids` of a GGUF tensor of `rows` rows, as fp32.
void gguf_rows(int number, const Array<uint8_t>& blocks, int64_t rows, int64_t inputs,
               const Array<int64_t>& ids, uintptr_t to, int64_t to_size) {
  const BlockType& type = checked_blocks(number, int64_t(blocks.size()), rows, inputs);
  require(to_size == int64_t(ids.size()) * inputs, "each row needs room for its numbers");
  auto* out = static_cast<float*>(checked_address(to, sizeof(float)));
  const int strips = type.weights / kStrip, offset = kFormats[type.format].offset();
  for (size_t i = 0; i < ids.size(); i++) {
    const int64_t id = ids.data()[i];
    require(id >= 0 && id < rows, "a row's number is out of range");
    const int64_t blocks_a_row = inputs / type.weights;
    const auto* block =
        reinterpret_cast<const std::byte*>(blocks.data()) + id * blocks_a_row * type.bytes;
    Strip values;
    for (int64_t b = 0; b < blocks_a_row; b++, block += type.bytes)
      for (int s = 0; s < strips; s++) {
        type.decode(block, s, values);
        for (int n = 0; n < kStrip; n++) *out++ = values.value(n, offset);
      }
  }
}

void multiply_rows(const Weights& self, int type, uintptr_t x, int64_t x_size, uintptr_t y,
                   int64_t y_size) {
  const Type t = checked_type(type, kWeightTypes);
  const int64_t rows = x_size / self.inputs();
  require(x_size >= 0 && x_size == rows * self.inputs() && y_size == rows * self.outputs() &&
              rows <= kMaxSide,
          "x must hold rows of " + std::to_string(self.inputs()) +
              " numbers and y as many rows of " + std::to_string(self.outputs()));
  if (rows == 0) return;
  const auto* from = static_cast<const std::byte*>(checked_address(x, size_of(t)));
  auto* to = static_cast<std::byte*>(checked_address(y, size_of(t)));
  static thread_local Rows in;
  constexpr int64_t kMost = 512;  // bounds the copies
  for (int64_t first = 0; first < rows; first += kMost) {
    const int count = int(std::min(kMost, rows - first));
    in.resize(count, self.inputs());
    for (int i = 0; i < count; i++, from += self.inputs() * size_of(t))
      kernels().widen(t, from, in.row(i), self.inputs());
    const Product product{&self, {t, to, self.outputs()}};
    multiply(in, &product, 1);
    to += int64_t(count) * self.outputs() * size_of(t);
  }
}

void unpack(const Weights& self, uintptr_t to, int64_t size) {
  require(size == int64_t(self.outputs()) * self.inputs(),
          "the space for the weights has another size than the matrix");
  if (const auto* dense = dynamic_cast<const DenseWeights*>(&self)) {
    dense->unpack(checked_address(to, size_of(dense->type())));
  } else {
    auto* values = static_cast<float*>(checked_address(to, sizeof(float)));
    for (int i = 0; i < self.outputs(); i++) self.row(i, values + int64_t(i) * self.inputs());
  }
}

void rows(const Weights& self, const Array<int64_t>& outputs, uintptr_t to, int64_t size) {
  require(size == int64_t(outputs.size()) * self.inputs(),
          "the space for the rows has another size than they have");
  for (size_t i = 0; i < outputs.size(); i++)
    require(outputs.data()[i] >= 0 && outputs.data()[i] < self.outputs(), "a row is out of range");
  if (size == 0) return;
  auto* values = static_cast<float*>(checked_address(to, sizeof(float)));
  for (size_t i = 0; i < outputs.size(); i++)
    self.row(int(outputs.data()[i]), values + int64_t(i) * self.inputs());
}

Vector vector(const Array<float>& from, int64_t size) {
  require(int64_t(from.size()) == size, "a vector of " + std::to_string(from.size()) +
                                            " numbers stands where " + std::to_string(size) +
                                            " are needed");
  return Vector(from.data(), from.data() + from.size());
}

Vector optional_vector(const Array<float>& from, int64_t size) {
  return from.size() ? vector(from, size) : Vector();
}

void make_decoder(Decoder* self, int hidden, int input, int heads, int kv_heads, int dim, float eps,
                  const Array<float>& inverse_frequencies, float rotary_scale) {
  require(hidden >= 1 && hidden <= kMaxSide && input >= 1 && input <= kMaxSide,
          "the hidden size and the inputs must be at least 1");
  require(heads >= 1 && kv_heads >= 1 &&
              heads % kv_heads == 0 && heads <= 1 << 16,
          "the heads must be a multiple of the key heads");
  require(dim >= kTile && dim % kTile == 0 && dim <= 1 << 12,
          "a head's dimension must be a multiple of 16");
  new (self) Decoder({hidden, heads, kv_heads, dim, input, eps, vector(inverse_frequencies, dim / 2),
                      rotary_scale});
}

void add_layer(Decoder& self, const Array<float>& attention_norm, const Array<float>& mlp_norm,
               const Array<float>& query_norm, const Array<float>& key_norm,
               const std::vector<std::shared_ptr<Weights>>& weights, int window) {
  const DecoderShape& s = self.shape();
  require(weights.size() == 7 && std::find(weights.begin(), weights.end(), nullptr) == weights.end(),
          "a layer has seven matrices: q, k, v, o, gate, up, down");
  require(!self.finished(), "the decoder has its head: no layer can follow");
  const int wide = weights[4]->outputs(), q = s.heads * s.dim, kv = s.kv_heads * s.dim;
  const int input = self.inputs(self.layers().size());
  const int shapes[7][2] = {{q, input},       {kv, input},      {kv, input},    {s.hidden, q},
                            {wide, s.hidden}, {wide, s.hidden}, {s.hidden, wide}};
  for (int i = 0; i < 7; i++)
    require(weights[i]->outputs() == shapes[i][0] && weights[i]->inputs() == shapes[i][1],
            "matrix " + std::to_string(i) + " of a layer must be " + std::to_string(shapes[i][0]) +
                " x " + std::to_string(shapes[i][1]));
  require(window >= 0, "a window is at least 0");
  self.add_layer({optional_vector(attention_norm, s.hidden), vector(mlp_norm, s.hidden),
                  optional_vector(query_norm, s.dim), optional_vector(key_norm, s.dim), weights[0],
                  weights[1], weights[2], weights[3], weights[4], weights[5], weights[6], window});
}

void enter_by(Decoder& self, const Array<float>& embedding_norm, const Array<float>& feature_norm,
              const std::shared_ptr<Weights>& project, bool residual_normed) {
  const int hidden = self.shape().hidden, input = self.shape().input;
  require(!self.finished(), "the decoder has its head: no entrance can follow");
  require(project ? project->outputs() == hidden && project->inputs() > hidden && input == hidden
                  : input > hidden,
          "an entrance needs a matrix from both its inputs to the hidden size, or a first layer that "
          "reads both");
  const int width = (project ? project->inputs() : input) - hidden;
  self.enter_by({optional_vector(embedding_norm, width), optional_vector(feature_norm, hidden),
                 project, residual_normed});
}

void finish(Decoder& self, const Array<float>& norm, const std::shared_ptr<Weights>& head) {
  require(head != nullptr, "a decoder needs a head");
  require(head->inputs() == self.shape().hidden, "the head's inputs are not the hidden size");
  self.finish(optional_vector(norm, self.shape().hidden), head);
}

// caches: addresses of keys, then of values, of each layer; features: addresses or 0; states: an
// address if the decoder has an entrance, else 0.
void forward(Decoder& self, uintptr_t embeddings, int64_t embeddings_size, uintptr_t states,
             int64_t states_size,
             const Array<int64_t>& positions,
             const Array<int32_t>& sizes, const Array<int32_t>& trunks,
             const Array<int64_t>& kv_lens, const Array<int64_t>& slots,
             const Array<int32_t>& parents, const Array<int64_t>& caches, int cache_type,
             int64_t cache_slots, const Array<int64_t>& keep, uintptr_t logits,
             int64_t logits_size, const Array<int64_t>& features) {
  require(self.finished(), "the decoder has no head yet: call finish first");
  const size_t layers = self.layers().size(), rows = positions.size(), count = sizes.size();
  require(rows >= 1 && rows <= size_t(kMaxSide) && parents.size() == rows &&
              trunks.size() == count && kv_lens.size() == count,
          "the arrays of a pass have different lengths");
  require(embeddings_size == int64_t(rows) * self.embedding() &&
              logits_size == int64_t(keep.size()) * self.head().outputs(),
          "a pass needs an embedding a row and logits for every kept row");
  require(self.has_entrance() ? states && states_size == int64_t(rows) * self.shape().hidden
                              : !states && self.shape().input == self.shape().hidden,
          "a pass needs a hidden state a row where the decoder has an entrance, and only there");
  require(caches.size() == 2 * layers && features.size() == layers + 2,
          "a pass needs keys and values of every layer, and two feature addresses more than layers");
  const Type type = checked_type(cache_type, 3);
  std::vector<Span> spans;
  std::vector<int64_t> written;
  size_t row = 0, slot = 0;
  for (size_t i = 0; i < count; i++) {
    const int size = sizes.data()[i], trunk = trunks.data()[i];
    const int64_t kv_len = kv_lens.data()[i];
    require(size >= 1 && trunk >= 1 && trunk <= size && size_t(size) <= rows - row && kv_len >= 0 &&
                kv_len + size < kMaxSide && size_t(kv_len + size) <= slots.size() - slot,
            "a span of a pass has an impossible size");
    for (int n = 0; n < size; n++) {
      const int parent = parents.data()[row + n];
      require(parent < n && parent >= (n < trunk ? n - 1 : trunk - 1),
              "a node's parent does not come before it");
      const int64_t position = positions.data()[row + n];
      require(position == (n ? positions.data()[row + parent] + 1 : kv_len),
              "a node's position is not that after its parent's");
    }
    spans.push_back({size, trunk, kv_len, slots.data() + slot, parents.data() + row});
    row += size;
    slot += size_t(kv_len + size);
    written.insert(written.end(), slots.data() + slot - size, slots.data() + slot);
  }
  require(row == rows && slot == slots.size(), "the spans of a pass do not cover its rows");
  for (size_t i = 0; i < slots.size(); i++)
    require(slots.data()[i] >= 0 && slots.data()[i] < cache_slots, "a slot is out of range");
  std::sort(written.begin(), written.end());
  require(std::adjacent_find(written.begin(), written.end()) == written.end(),
          "two rows have the same slot");
  for (size_t i = 0; i < keep.size(); i++)
    require(keep.data()[i] >= 0 && size_t(keep.data()[i]) < rows, "a kept row is out of range");
  std::vector<LayerCache> layer_caches;
  for (size_t i = 0; i < layers; i++)
    layer_caches.push_back(
        {static_cast<std::byte*>(checked_address(uintptr_t(caches.data()[2 * i]), size_of(type))),
         static_cast<std::byte*>(
             checked_address(uintptr_t(caches.data()[2 * i + 1]), size_of(type)))});
  std::vector<float*> wanted;
  for (size_t i = 0; i < layers + 2; i++)
    wanted.push_back(
        static_cast<float*>(optional_address(uintptr_t(features.data()[i]), sizeof(float))));
  Pass pass;
  pass.embeddings = static_cast<const float*>(checked_address(embeddings, sizeof(float)));
  pass.states = static_cast<const float*>(optional_address(states, sizeof(float)));
  pass.positions = positions.data();
  pass.spans = spans.data();
  pass.span_count = int(count);
  pass.rows = int(rows);
  pass.caches = layer_caches.data();
  pass.cache_type = type;
  pass.keep = keep.data();
  pass.kept = int(keep.size());
  pass.logits = keep.size() ? static_cast<float*>(checked_address(logits, sizeof(float))) : nullptr;
  pass.features = wanted.data();
  const nb::gil_scoped_release release;
  self.forward(pass);
}

void set_threads(int threads) {
  require(threads >= 1 && threads <= kMaxThreads,
          "the number of threads must be 1 to " + std::to_string(kMaxThreads));
  Pool::instance().resize(threads);
}

double read_rate(int64_t bytes, int repeats) {
  require(bytes >= 1 << 20 && bytes <= int64_t(1) << 40 && repeats >= 1,
          "reading takes 2^20 to 2^40 bytes and at least one pass");
  return stream_read(size_t(bytes), repeats);
}

void choose(const std::string& name) {
  require(choose_kernels(name.c_str()), "this CPU or build has no kernels named " + name);
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a model that lives until the program ends is no leak
  m.doc() = "Decoders and matrix products for few rows, with the same bits for any number of rows";
  m.attr("F32") = int(Type::f32);
  m.attr("BF16") = int(Type::bf16);
  m.attr("F16") = int(Type::f16);

  using release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Weights>(m, "Weights", "A weight matrix packed for products with few rows")
      .def("multiply", multiply_rows, release(), "y = x @ weights.T + bias; sizes count elements")
      .def("unpack", unpack, release(), "Write the weights to an address: dense ones in their type, "
                                        "quantised ones as fp32")
      .def("rows", rows, "outputs"_a, "to"_a, "size"_a,
           "Write the weights of some outputs as fp32 to an address")
      .def_prop_ro("outputs", &Weights::outputs)
      .def_prop_ro("inputs", &Weights::inputs)
      .def_prop_ro("nbytes", &Weights::bytes, "Memory that the packed weights take");
  m.def("dense", dense, "type"_a, "weights"_a, "stride"_a, "bias"_a, "outputs"_a, "inputs"_a,
        release(), "Pack weights [outputs, inputs] and a bias (its address, or 0)");
  m.def("quantised", quantised, "bits"_a, "type"_a, "weights"_a, "bias"_a, "outputs"_a, "inputs"_a,
        release(), "Round weights [outputs, inputs] to 4 or 8 bits in groups of 32");
  m.def("from_gguf", from_gguf, "type"_a, "blocks"_a, "rows"_a, "bias"_a, "inputs"_a,
        "Pack a GGUF tensor's blocks; output n is its row rows[n]; bias may be empty");
  m.def("gguf_rows", gguf_rows, "type"_a, "blocks"_a, "rows"_a, "inputs"_a, "ids"_a, "to"_a,
        "to_size"_a,
        "Write some rows of a GGUF tensor as fp32 to an address");
  m.def("packs_gguf", [](int number) { return block_type(number) != nullptr; }, "type"_a,
        "Whether from_gguf and gguf_rows know a type");
  nb::class_<Decoder>(m, "Decoder", "The layers and the head of a model of the Llama family")
      .def("__init__", make_decoder, "hidden"_a, "input"_a, "heads"_a, "kv_heads"_a, "dim"_a, "eps"_a,
           "inverse_frequencies"_a, "rotary_scale"_a)
      .def("add_layer", add_layer, "attention_norm"_a, "mlp_norm"_a, "query_norm"_a, "key_norm"_a,
           "weights"_a, "window"_a)
      .def("enter_by", enter_by, "embedding_norm"_a, "feature_norm"_a, "project"_a.none(),
           "residual_normed"_a, "Read a token's embedding and a hidden state, as draft heads do")
      .def("finish", finish, "norm"_a, "head"_a)
      .def("forward", forward, "embeddings"_a, "embeddings_size"_a,
           "states"_a, "states_size"_a, "positions"_a, "sizes"_a, "trunks"_a, "kv_lens"_a,
           "slots"_a, "parents"_a, "caches"_a, "cache_type"_a, "cache_slots"_a, "keep"_a,
           "logits"_a, "logits_size"_a, "features"_a);
  m.def("set_threads", set_threads, "threads"_a, release(), "Size the pool of threads");
  m.def("threads", [] { return Pool::instance().threads(); }, "Size of the pool");
  m.def("stream_read", read_rate, "bytes"_a, "repeats"_a, release(),
        "Best rate in bytes a second at which the threads read that much memory");
  m.def("kernels", [] { return std::string(kernels().name); }, "Kernels in use");
  m.def("choose_kernels", choose, "name"_a,
        "Use amx, avx512_bf16, avx512_vnni, avx512, avx2, neon or portable kernels instead of the fastest");
}
