// The threads that matrix products run on.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace ridgeline {

// The caller works too, helped by `threads - 1` others. Whose? Two sets of threads that wait by
// spinning take the cores from each other (measured: alternating with torch's operations took a
// quarter to twice longer). So where torch's OpenMP runtime offers GNU's entry point, its threads
// help, which then never wait in two places; elsewhere workers of our own do, which spin briefly,
// then sleep.
class Pool {
 public:
  // The process's pool. A forked child starts with one thread, for threads do not survive a fork.
  static Pool& instance();

  int threads() const { return threads_; }
  bool shared() const { return team_ != nullptr; }

  // `share` false: workers of our own in any case.
  void resize(int threads, bool share);

  // Calls task(unit) once for every unit in [0, units), in any order, and returns when all are done.
  template <class Task>
  void run(int units, const Task& task) {
    run(units, [](const void* t, int unit) { (*static_cast<const Task*>(t))(unit); }, &task);
  }

 private:
  using Call = void (*)(const void*, int);
  using Team = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

  void run(int units, Call call, const void* task);
  bool work();
  void worker();
  void stop();

  std::mutex turn_;  // one job at a time
  int threads_ = 1;
  Team team_ = nullptr;
  std::vector<std::thread> workers_;

  // The job. `ticket_` is its number (upper half) and how many units are unclaimed (lower half): who
  // lowers it owns a unit, and until that unit is counted in `done_` the job cannot end. So a worker
  // that comes late finds nothing to claim and touches nothing, and nobody has to wait for it.
  Call call_ = nullptr;
  const void* task_ = nullptr;
  int units_ = 0;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> done_{0};

  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace ridgeline
