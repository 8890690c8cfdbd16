#include "kernels.h"

#include <atomic>
#include <cstring>
#if defined(RIDGELINE_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ridgeline {
namespace {

struct Choice {
  const Kernels* kernels;
  bool runs;
};

#if defined(RIDGELINE_X86)
// Linux lets a process use the tile registers once it has asked.
bool tiles_permitted() {
#if defined(__linux__)
  constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
  return false;
#endif
}
#endif

// The fastest first. The compiler's run-time check covers the operating system's support too.
const Choice* choices(int& count) {
#if defined(RIDGELINE_X86)
  __builtin_cpu_init();
  const bool dots = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vnni");
  const bool bf16 = dots && __builtin_cpu_supports("avx512bf16");
  static const Choice all[] = {
      {&amx_kernels, bf16 && __builtin_cpu_supports("amx-int8") &&
                         __builtin_cpu_supports("amx-bf16") && tiles_permitted()},
      {&avx512_bf16_kernels, bf16},
      {&avx512_vnni_kernels, dots},
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
