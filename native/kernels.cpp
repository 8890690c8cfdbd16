#include "kernels.h"

#include <atomic>
#include <cstring>

namespace ridgeline {
namespace {

struct Choice {
  const Kernels* kernels;
  bool runs;
};

// The fastest first. The compiler's run-time check covers the operating system's support too.
const Choice* choices(int& count) {
#if defined(RIDGELINE_X86)
  __builtin_cpu_init();
  static const Choice all[] = {
      {&avx512_bf16_kernels, __builtin_cpu_supports("avx512f") &&
                                 __builtin_cpu_supports("avx512vnni") &&
                                 __builtin_cpu_supports("avx512bf16")},
      {&avx512_vnni_kernels,
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vnni")},
      {&avx512_kernels, __builtin_cpu_supports("avx512f") != 0},
      {&avx2_kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
      {&portable_kernels, true},
  };
#elif defined(RIDGELINE_ARM64)
  static const Choice all[] = {{&neon_kernels, true}, {&portable_kernels, true}};
#else
  static const Choice all[] = {{&portable_kernels, true}};
#endif
  count = int(sizeof all / sizeof *all);
  return all;
}

const Kernels* find(const char* name) {
  int count;
  const Choice* all = choices(count);
  for (int i = 0; i < count; i++)
    if (all[i].runs && (!name || !std::strcmp(all[i].kernels->name, name))) return all[i].kernels;
  return nullptr;
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> chosen{find(nullptr)};
  return chosen;
}

}  // namespace

const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }

bool choose_kernels(const char* name) {
  const Kernels* found = find(name);
  if (found) current() = found;
  return found != nullptr;
}

}  // namespace ridgeline
