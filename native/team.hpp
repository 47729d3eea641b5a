// Threads that go through a step together. Kernels are tasks; who does which of them, and when all are done, is here.
//
// Each thread has a run of neighbouring tasks of its own and takes from it, in order; one that is done helps the
// others. So a thread meets memory in its order, and one that is held up (a core is lent to somebody else) keeps nobody
// waiting for more than a task.
//
//     thread 0   take take take ...            |  take take ...
//     thread 1   take take ... help help       |  ...                 one barrier between phases, no region of its own
//
// Counters of a phase must be zero when it begins, and threads enter it at different times. So there are two sets of
// them in turn: who enters a phase sets its own counters of the other set to zero, which nobody uses meanwhile.
#pragma once

#include <omp.h>

#include "kernels.hpp"

namespace quire {

constexpr int kMostRuns = 64;    // of tasks: threads beyond them only help
constexpr int kMostQueues = 4;  // of one phase

struct alignas(64) Taken {
    int64_t count;
};

// What the threads of a team share. Counters that no thread has are never looked at.
struct Team {
    explicit Team(int num_threads) {
        for (auto& set : taken)
            for (auto& queue : set)
                for (int run = 0; run < num_threads && run < kMostRuns; ++run) queue[run].count = 0;
    }

    Taken taken[2][kMostQueues][kMostRuns];
};

// Numbered tasks as one thread takes them.
class Tasks {
  public:
    QUIRE_INLINE Tasks(Taken* taken, int64_t num_tasks, int thread, int num_threads)
        : taken_(taken), num_tasks_(num_tasks), thread_(thread),
          num_runs_(num_threads < kMostRuns ? num_threads : kMostRuns) {
        enter();
    }

    // The next task for this thread, if there is one left.
    QUIRE_INLINE bool take(int64_t& task) {
        while (helped_ < num_runs_) {
            task = __atomic_fetch_add(&run_->count, 1, __ATOMIC_RELAXED) + begin_;
            if (task < end_) return true;
            ++helped_;
            enter();
        }
        return false;
    }

  private:
    QUIRE_INLINE void enter() {
        const int at = (thread_ + helped_) % num_runs_;
        run_ = taken_ + at;
        begin_ = num_tasks_ * at / num_runs_;
        end_ = num_tasks_ * (at + 1) / num_runs_;
    }

    Taken *taken_, *run_;
    int64_t num_tasks_, begin_, end_;
    int thread_, num_runs_, helped_ = 0;
};

// One thread of a team. All of them ask for the same tasks and wait at the same places.
class TeamThread {
  public:
    QUIRE_INLINE TeamThread(Team& team, int number, int num_threads)
        : team_(team), number_(number), num_threads_(num_threads) {}

    QUIRE_INLINE int number() const { return number_; }

    // Up to kMostQueues times between waits.
    QUIRE_INLINE Tasks tasks(int64_t num_tasks) { return {next_queue(), num_tasks, number_, num_threads_}; }

    // The same in one queue for all, as it comes.
    QUIRE_INLINE int64_t& queue() { return next_queue()->count; }

    // Until all threads have come here.
    QUIRE_INLINE void wait() {
        if (num_threads_ > 1) {
#pragma omp barrier
        }
        phase_ ^= 1;
        num_queues_ = 0;
        for (int queue = 0; queue < kMostQueues && number_ < kMostRuns; ++queue)
            team_.taken[phase_ ^ 1][queue][number_].count = 0;
    }

    // Every task is done by one of the threads, and nobody goes on before all are done.
    template <typename Do>
    QUIRE_INLINE void share(int64_t num_tasks, Do each) {
        Tasks tasks = this->tasks(num_tasks);
        for (int64_t task; tasks.take(task);) each(task);
        wait();
    }

    // The same for rows of numbers, kPart of them at a time.
    template <typename Do>
    QUIRE_INLINE void share_parts(int64_t num_rows, int64_t size, Do each) {
        const int64_t parts = (size + kPart - 1) / kPart;
        share(num_rows * parts, [&](int64_t task) {
            const int64_t first = task % parts * kPart, end = first + kPart;
            each(task / parts, first, end < size ? end : size);
        });
    }

  private:
    QUIRE_INLINE Taken* next_queue() { return team_.taken[phase_][num_queues_++]; }

    Team& team_;
    int number_, num_threads_, phase_ = 0, num_queues_ = 0;
};

// Work that all threads of a new team do.
template <typename Do>
void in_team(int num_threads, Do work) {
    Team team(num_threads);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        TeamThread thread(team, omp_get_thread_num(), omp_get_num_threads());
        work(thread);
    }
}

}  // namespace quire
