// How fast this machine reads memory: what a product with few rows is measured against.
#pragma once

#include <cstddef>

namespace ridgeline {

// Bytes a second, the best of `repeats` passes of the pool's threads over `bytes` of memory.
double stream_read(size_t bytes, int repeats);

}  // namespace ridgeline
