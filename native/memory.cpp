#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

namespace ridgeline {
namespace {

constexpr size_t kPage = size_t(2) << 20;
constexpr size_t kRegion = size_t(32) << 20;  // untouched parts of it cost nothing

size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

#if defined(__unix__) || defined(__APPLE__)

std::shared_ptr<std::byte> map_region(size_t bytes) {
  // Ask for a page more and start at a boundary of 2 MiB: a large page needs one.
  const size_t mapped = bytes + kPage;
  void* base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  auto* start = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<size_t>(base), kPage));
#if defined(MADV_HUGEPAGE)
  madvise(start, bytes, MADV_HUGEPAGE);  // a wish: without it the memory works, only slower
#endif
  return {start, [base, mapped](std::byte*) { munmap(base, mapped); }};
}

#else

std::shared_ptr<std::byte> map_region(size_t bytes) {
  auto* base = static_cast<std::byte*>(std::calloc(bytes + 64, 1));
  if (!base) throw std::bad_alloc();
  auto* start = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<size_t>(base), 64));
  return {start, [base](std::byte*) { std::free(base); }};
}

#endif

}  // namespace

std::shared_ptr<std::byte> allocate_weights(size_t bytes) {
  static std::mutex mutex;
  static std::weak_ptr<std::byte> current;
  static size_t capacity = 0, used = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  bytes = round_up(bytes, 64);
  std::shared_ptr<std::byte> region = current.lock();
  if (!region || bytes > capacity - used) {
    const size_t size = round_up(bytes > kRegion ? bytes : kRegion, kPage);
    region = map_region(size);
    current = region;
    capacity = size;
    used = 0;
  }
  std::byte* start = region.get() + used;
  used += bytes;
  return {region, start};
}

}  // namespace ridgeline
