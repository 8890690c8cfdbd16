// ridgeline._native: tensors come as addresses, so that nothing here depends on torch's C++ ABI.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "matrix.h"
#include "pool.h"
#include "stream.h"

namespace nb = nanobind;
using namespace nb::literals;
using ridgeline::Matrix;
using ridgeline::Type;

namespace {

constexpr int kMaxThreads = 1024;
constexpr int kMaxSide = 1 << 30;  // so that sizes in elements fit an int and in bytes 64 bits

Type checked_type(int type) {
  if (type < 0 || type >= ridgeline::kTypes) throw std::invalid_argument("unknown element type");
  return Type(type);
}

void* checked_address(uintptr_t address, Type type) {
  if (address == 0 || address % size_of(type) != 0)
    throw std::invalid_argument("an address is null or not aligned to its element type");
  return reinterpret_cast<void*>(address);
}

void pack(Matrix* self, int type, uintptr_t weights, int64_t stride, uintptr_t bias,
          int64_t outputs, int64_t inputs) {
  const Type t = checked_type(type);
  if (outputs < 1 || inputs < 1 || outputs > kMaxSide || inputs > kMaxSide || stride < inputs)
    throw std::invalid_argument("a matrix needs 1 to 2^30 outputs and inputs, and a row stride of "
                                "at least its inputs");
  new (self) Matrix(t, checked_address(weights, t), size_t(stride),
                    bias ? checked_address(bias, t) : nullptr, int(outputs), int(inputs));
}

void multiply(const Matrix& self, int type, uintptr_t x, int64_t x_size, uintptr_t y,
              int64_t y_size) {
  const Type t = checked_type(type);
  const int64_t rows = x_size / self.inputs();
  if (x_size < 0 || x_size != rows * self.inputs() || y_size != rows * self.outputs() ||
      rows > kMaxSide)
    throw std::invalid_argument("x must hold rows of " + std::to_string(self.inputs()) +
                                " numbers and y as many rows of " + std::to_string(self.outputs()));
  if (rows > 0) self.multiply(t, checked_address(x, t), checked_address(y, t), int(rows));
}

void unpack(const Matrix& self, uintptr_t weights, int64_t size) {
  if (size != int64_t(self.outputs()) * self.inputs())
    throw std::invalid_argument("the space for the weights has another size than the matrix");
  self.unpack(checked_address(weights, self.type()));
}

void set_threads(int threads) {
  if (threads < 1 || threads > kMaxThreads)
    throw std::invalid_argument("the number of threads must be 1 to " +
                                std::to_string(kMaxThreads));
  ridgeline::Pool::instance().resize(threads);
}

double stream_read(int64_t bytes, int repeats) {
  if (bytes < 1 << 20 || bytes > int64_t(1) << 40 || repeats < 1)
    throw std::invalid_argument("reading takes 2^20 to 2^40 bytes and at least one pass");
  return ridgeline::stream_read(size_t(bytes), repeats);
}

void choose_kernels(const std::string& name) {
  if (!ridgeline::choose_kernels(name.c_str()))
    throw std::invalid_argument("this CPU or build has no kernels named " + name);
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Matrix products for few rows, with the same bits for any number of rows";
  m.attr("F32") = int(Type::f32);
  m.attr("BF16") = int(Type::bf16);

  using release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Matrix>(m, "Matrix", "A weight matrix packed for products with few rows")
      .def("__init__", pack, "type"_a, "weights"_a, "stride"_a, "bias"_a, "outputs"_a, "inputs"_a,
           release(), "Copy weights [outputs, inputs] and bias (its address, or 0) from memory")
      .def("multiply", multiply, release(), "y = x @ weights.T + bias; sizes count elements")
      .def("unpack", unpack, release(), "Write the weights back, dense, to an address")
      .def_prop_ro("nbytes", &Matrix::bytes, "Memory that the packed weights take");
  m.def("set_threads", set_threads, "threads"_a, release(), "Size the pool of threads");
  m.def("threads", [] { return ridgeline::Pool::instance().threads(); }, "Size of the pool");
  m.def("stream_read", stream_read, "bytes"_a, "repeats"_a, release(),
        "Best rate in bytes a second at which the threads read that much memory");
  m.def("kernels", [] { return std::string(ridgeline::kernels().name); }, "Kernels in use");
  m.def("choose_kernels", choose_kernels, "name"_a,
        "Use avx512, avx2, neon or portable kernels instead of the fastest");
}
