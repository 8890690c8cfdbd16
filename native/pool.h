// A small thread pool: the caller works too, idle workers spin briefly, then sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace ridgeline {

class Pool {
 public:
  // The process's pool. A forked child starts with one thread, for threads do not survive a fork.
  static Pool& instance();

  int threads() const { return int(workers_.size()) + 1; }
  void resize(int threads);

  // Calls task(unit) once for every unit in [0, units), in any order; returns when all are done.
  template <class Task>
  void run(int units, const Task& task) {
    run(units, [](const void* t, int unit) { (*static_cast<const Task*>(t))(unit); }, &task);
  }

  // The same, or by the caller alone where the work is not worth waking others.
  template <class Task>
  void each(int units, bool worth, const Task& task) {
    if (worth)
      run(units, task);
    else
      for (int unit = 0; unit < units; unit++) task(unit);
  }

 private:
  using Call = void (*)(const void*, int);

  void run(int units, Call call, const void* task);
  bool work();
  void worker();
  void stop();

  std::mutex turn_;  // one job at a time
  std::vector<std::thread> workers_;

  // The job. `ticket_` is its number (upper half) and how many units are unclaimed (lower half):
  // who lowers it owns a unit, and until that unit is counted in `done_` the job cannot end. So a
  // worker that comes late finds nothing to claim and touches nothing; nobody waits for it.
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
