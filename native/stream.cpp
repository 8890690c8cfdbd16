#include "stream.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

#include "memory.h"
#include "pool.h"

namespace ridgeline {

double stream_read(size_t bytes, int repeats) {
  // A thread reads several places at once: prefetchers then fetch more than from a single one.
  constexpr size_t kShare = size_t(1) << 20, kStreams = 4, kLanes = 4;
  constexpr size_t kWords = kShare / sizeof(uint64_t) / kStreams;
  const int shares = int(bytes / kShare);
  const std::shared_ptr<std::byte> memory = allocate_weights(bytes);
  std::memset(memory.get(), 1, bytes);
  std::vector<uint64_t> sums(shares);
  double best = 0;
  for (int pass = 0; pass < repeats; pass++) {
    const auto start = std::chrono::steady_clock::now();
    Pool::instance().run(shares, [&](int share) {
      const auto* words = reinterpret_cast<const uint64_t*>(memory.get() + share * kShare);
      uint64_t lanes[kStreams * kLanes] = {};
      for (size_t i = 0; i < kWords; i += kLanes)
        for (size_t stream = 0; stream < kStreams; stream++)
          for (size_t lane = 0; lane < kLanes; lane++)
            lanes[stream * kLanes + lane] += words[stream * kWords + i + lane];
      for (const uint64_t lane : lanes) sums[share] += lane;
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, double(shares) * kShare / seconds.count());
  }
  volatile uint64_t kept = 0;  // or the compiler may see that nobody needs the sums
  for (const uint64_t sum : sums) kept = kept + sum;
  return best;
}

}  // namespace ridgeline
