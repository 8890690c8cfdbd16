// Memory for weights, on 2 MiB pages where the system grants them.
#pragma once

#include <cstddef>
#include <memory>

namespace ridgeline {

// Zeroed memory aligned to 64 bytes. Small matrices share a region, so that they too lie on large
// pages and none is rounded up to one; a region goes back to the system with the last of its users.
// Throws std::bad_alloc.
std::shared_ptr<std::byte> allocate_weights(size_t bytes);

}  // namespace ridgeline
