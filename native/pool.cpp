#include "pool.h"

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(RIDGELINE_X86)
#include <immintrin.h>
#endif

namespace ridgeline {
namespace {

// About 100 us, longer than most gaps between the products of one layer. Yielding now and then
// leaves the core to another library's thread, torch's say, that is ready to run.
constexpr int kSpins = 4000;
constexpr int kSpinsToYield = 64;

void relax(int spins) {
  if (spins % kSpinsToYield == kSpinsToYield - 1) std::this_thread::yield();
#if defined(RIDGELINE_X86)
  _mm_pause();
#elif defined(RIDGELINE_ARM64)
  asm volatile("isb");
#endif
}

uint32_t unclaimed(uint64_t ticket) { return uint32_t(ticket); }

Pool* pool;

}  // namespace

Pool& Pool::instance() {
  static const bool once = [] {
    pool = new Pool;  // never deleted: workers may outlive static objects
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
#endif
    return true;
  }();
  (void)once;
  return *pool;
}

void Pool::resize(int threads) {
  const std::lock_guard<std::mutex> turn(turn_);
  if (threads == this->threads()) return;
  stop();
  for (int i = 1; i < threads; i++) workers_.emplace_back(&Pool::worker, this);
}

void Pool::stop() {
  {
    const std::lock_guard<std::mutex> lock(sleep_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : workers_) thread.join();
  workers_.clear();
  stopping_ = false;
}

void Pool::run(int units, Call call, const void* task) {
  const std::lock_guard<std::mutex> turn(turn_);
  if (workers_.empty() || units < 2) {
    for (int unit = 0; unit < units; unit++) call(task, unit);
    return;
  }
  call_ = call;
  task_ = task;
  units_ = units;
  done_.store(0, std::memory_order_relaxed);
  const uint64_t number = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  ticket_ = number << 32 | uint32_t(units);
  if (sleepers_ > 0) {
    { const std::lock_guard<std::mutex> lock(sleep_); }
    wake_.notify_all();
  }
  while (work()) {
  }
  for (int spins = 0; done_.load(std::memory_order_acquire) != units; spins++) relax(spins);
}

// Claims a unit and does it; false if there is none.
bool Pool::work() {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  do {
    if (unclaimed(ticket) == 0) return false;
  } while (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel));
  call_(task_, units_ - int(unclaimed(ticket)));
  done_.fetch_add(1, std::memory_order_release);
  return true;
}

void Pool::worker() {
  const auto ready = [this] { return unclaimed(ticket_) != 0 || stopping_; };
  while (!stopping_) {
    while (work()) {
    }
    for (int spins = 0; spins < kSpins && !ready(); spins++) relax(spins);
    if (ready()) continue;
    std::unique_lock<std::mutex> lock(sleep_);
    sleepers_++;
    wake_.wait(lock, ready);
    sleepers_--;
  }
}

}  // namespace ridgeline
