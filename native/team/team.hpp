// Threads that go through a step together. Kernels are tasks; who does which of them, and when all are done, is here.
//
// Each thread has a run of neighbouring tasks of its own and takes from it, in order; one that is done helps the
// others. So a thread meets memory in its order. A phase is over when its tasks are done, not when all threads are
// there: one that is held up (its core runs another program) and holds no task delays no other thread, and finds
// nothing left to do in the phases it missed.
//
//     phase        1                   2                3                4
//     thread 0     take take take      take take        take take take   take ...
//     thread 1     take take           held up .....................     (2, 3: none left)  take ...
//
// Counters carry the number of their phase. One of an older phase counts as zero, one of a newer says that this phase is
// over; so no thread resets a counter, and no task is taken twice, however late a thread comes.
#pragma once

#include <omp.h>

#include "builds/kernels.hpp"

namespace quire {

constexpr int kMaxTaskRanges = 64;   // of tasks: threads beyond them only help
constexpr int kMostQueues = 4;  // of one phase

// A phase's number above, what was counted in it below.
struct alignas(64) TaskCursor {
    uint64_t word = 0;

    // The next number below `limit`, if the phase has one left.
    QUIRE_INLINE bool take(uint32_t phase, int64_t limit, int64_t& number) {
        uint64_t found = __atomic_load_n(&word, __ATOMIC_RELAXED);
        do {
            if (found >> 32 > phase) return false;
            number = found >> 32 == phase ? static_cast<uint32_t>(found) : 0;
            if (number >= limit) return false;
        } while (!exchange(found, phase, number + 1));
        return true;
    }

    QUIRE_INLINE void add(uint32_t phase, int64_t count) {
        uint64_t found = __atomic_load_n(&word, __ATOMIC_RELAXED);
        while (!exchange(found, phase, count + (found >> 32 == phase ? static_cast<uint32_t>(found) : 0))) {
        }
    }

    // Whether so many were counted, or a newer phase has begun.
    QUIRE_INLINE bool has(uint32_t phase, int64_t count) const {
        const uint64_t found = __atomic_load_n(&word, __ATOMIC_SEQ_CST);
        return found >> 32 > phase || (found >> 32 == phase && static_cast<uint32_t>(found) >= count);
    }

  private:
    QUIRE_INLINE bool exchange(uint64_t& found, uint32_t phase, int64_t count) {
        const uint64_t wanted = uint64_t{phase} << 32 | static_cast<uint64_t>(count);
        return __atomic_compare_exchange_n(&word, &found, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
    }
};

// What the threads of a team share.
struct Team {
    TaskCursor taken[kMostQueues][kMaxTaskRanges];
    TaskCursor done;
    alignas(64) uint32_t num_asleep = 0;
    uint32_t wake_epoch = 0;  // to those asleep
};

// Returns when `count` tasks of the phase are done: watches for a short while, then sleeps. A thread that had to sleep
// watches for less the next time: who holds the task needs this core.
void wait_until_done(Team& team, uint32_t phase, int64_t count, double& patience_s);

// Wakes those asleep.
void wake_waiters(Team& team);

constexpr double kSpinLimit_s = 100e-6;

// Numbered tasks as one thread takes them, and how many it took.
class Tasks {
  public:
    QUIRE_INLINE Tasks(TaskCursor* taken, uint32_t phase, int64_t num_tasks, int thread, int num_runs, int64_t& num_mine)
        : taken_(taken), phase_(phase), num_tasks_(num_tasks), thread_(thread), num_runs_(num_runs),
          num_done_here_(num_mine) {
        enter();
    }

    // The next task for this thread, if there is one left. Who takes it must have done it before the phase's end.
    QUIRE_INLINE bool take(int64_t& task) {
        for (; ranges_visited_ < num_runs_; ++ranges_visited_, enter()) {
            if (!run_->take(phase_, end_ - begin_, task)) continue;
            task += begin_;
            ++num_done_here_;
            return true;
        }
        return false;
    }

  private:
    QUIRE_INLINE void enter() {
        const int at = (thread_ + ranges_visited_) % num_runs_;
        run_ = taken_ + at;
        begin_ = num_tasks_ * at / num_runs_;
        end_ = num_tasks_ * (at + 1) / num_runs_;
    }

    TaskCursor *taken_, *run_;
    uint32_t phase_;
    int64_t num_tasks_, begin_, end_;
    int thread_, num_runs_, ranges_visited_ = 0;
    int64_t& num_done_here_;
};

// One thread of a team. All of them ask for the same tasks and wait at the same places; what they do outside of tasks,
// a thread may do late.
class TeamThread {
  public:
    QUIRE_INLINE TeamThread(Team& team, int number, int num_threads)
        : team_(team), number_(number), num_threads_(num_threads) {}

    QUIRE_INLINE int number() const { return number_; }

    // Up to kMostQueues times between waits.
    QUIRE_INLINE Tasks tasks(int64_t num_tasks) {
        return tasks_in(num_tasks, num_threads_ < kMaxTaskRanges ? num_threads_ : kMaxTaskRanges);
    }

    // The same in one run for all, as it comes.
    QUIRE_INLINE Tasks tasks_in_order(int64_t num_tasks) { return tasks_in(num_tasks, 1); }

    // Until all tasks are done that were asked for since the last time.
    QUIRE_INLINE void wait() {
        if (num_threads_ > 1 && num_issued_ > 0) {
            if (num_done_here_ > 0) team_.done.add(phase_, num_done_here_);
            if (!team_.done.has(phase_, num_issued_))
                wait_until_done(team_, phase_, num_issued_, patience_s_);
            else if (__atomic_load_n(&team_.num_asleep, __ATOMIC_SEQ_CST) > 0)
                wake_waiters(team_);
        }
        ++phase_;
        num_issued_ = num_done_here_ = 0;
        num_queues_ = 0;
    }

    // Every task is done by one of the threads, and no thread goes on before all are done.
    template <typename Do>
    QUIRE_INLINE void share(int64_t num_tasks, Do each) {
        Tasks tasks = this->tasks(num_tasks);
        for (int64_t task; tasks.take(task);) each(task);
        wait();
    }

    // The same for rows of numbers, kElementsPerTask of them at a time.
    template <typename Do>
    QUIRE_INLINE void for_each_chunk(int64_t num_rows, int64_t size, Do each) {
        const int64_t parts = (size + kElementsPerTask - 1) / kElementsPerTask;
        share(num_rows * parts, [&](int64_t task) {
            const int64_t first = task % parts * kElementsPerTask, end = first + kElementsPerTask;
            each(task / parts, first, end < size ? end : size);
        });
    }

  private:
    QUIRE_INLINE Tasks tasks_in(int64_t num_tasks, int num_runs) {
        num_issued_ += num_tasks;
        return {team_.taken[num_queues_++], phase_, num_tasks, number_ % num_runs, num_runs, num_done_here_};
    }

    Team& team_;
    int number_, num_threads_, num_queues_ = 0;
    uint32_t phase_ = 1;
    int64_t num_issued_ = 0, num_done_here_ = 0;
    double patience_s_ = kSpinLimit_s;
};

// Work that all threads of a new team do.
template <typename Do>
void run_team(int num_threads, Do work) {
    Team team;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        TeamThread thread(team, omp_get_thread_num(), omp_get_num_threads());
        work(thread);
    }
}

}  // namespace quire
