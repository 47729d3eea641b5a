// A team of threads that computes a step together. Kernels are divided into tasks; this file assigns tasks to threads
// and detects when all tasks of a phase are done.
//
// Each thread has a range of consecutive tasks and takes tasks from this range in order, so that it reads memory in
// order; when the range is used up, it takes tasks from the ranges of other threads. A phase ends when all its tasks
// are done, not when all threads have arrived. A thread that is delayed (its core runs another program) and has taken
// no task does not delay other threads; later it finds no tasks left in the phases that it missed.
//
//     phase        1                   2                3                4
//     thread 0     take take take      take take        take take take   take ...
//     thread 1     take take           delayed .....................     (2, 3: none left)  take ...
//
// Each counter includes its phase number. A counter of an older phase means zero, a counter of a newer phase means that
// this phase has ended. So no thread resets counters, and no task is taken twice, however late a thread arrives.
#pragma once

#include <omp.h>

#include "builds/kernels.hpp"

namespace quire {

constexpr int kMaxTaskRanges = 64;   // threads beyond this number have no range of their own
constexpr int kMaxQueues = 4;  // task queues per phase

// A counter of one phase: the phase number in the upper 32 bits, the count in the lower 32 bits.
struct alignas(64) TaskCursor {
    uint64_t word = 0;

    // Takes the next number below `limit`. Returns false if the phase has none left.
    QUIRE_INLINE bool take(uint32_t phase, int64_t limit, int64_t& number) {
        uint64_t current = __atomic_load_n(&word, __ATOMIC_RELAXED);
        do {
            if (current >> 32 > phase) return false;
            number = current >> 32 == phase ? static_cast<uint32_t>(current) : 0;
            if (number >= limit) return false;
        } while (!exchange(current, phase, number + 1));
        return true;
    }

    QUIRE_INLINE void add(uint32_t phase, int64_t count) {
        uint64_t current = __atomic_load_n(&word, __ATOMIC_RELAXED);
        while (!exchange(current, phase, count + (current >> 32 == phase ? static_cast<uint32_t>(current) : 0))) {
        }
    }

    // Whether at least `count` was counted in this phase, or a newer phase has begun.
    QUIRE_INLINE bool has(uint32_t phase, int64_t count) const {
        const uint64_t current = __atomic_load_n(&word, __ATOMIC_SEQ_CST);
        return current >> 32 > phase || (current >> 32 == phase && static_cast<uint32_t>(current) >= count);
    }

  private:
    QUIRE_INLINE bool exchange(uint64_t& current, uint32_t phase, int64_t count) {
        const uint64_t desired = uint64_t{phase} << 32 | static_cast<uint64_t>(count);
        return __atomic_compare_exchange_n(&word, &current, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
    }
};

// State shared by the threads of a team.
struct Team {
    TaskCursor cursors[kMaxQueues][kMaxTaskRanges];
    TaskCursor done;
    alignas(64) uint32_t num_asleep = 0;
    uint32_t wake_epoch = 0;  // incremented to wake sleeping threads
};

// Returns when `count` tasks of the phase are done. Spins for up to `patience_s`, then sleeps. A thread that had to
// sleep spins for half as long the next time, because another thread with an unfinished task may need this core.
void wait_until_done(Team& team, uint32_t phase, int64_t count, double& patience_s);

// Wakes all sleeping threads.
void wake_waiters(Team& team);

constexpr double kSpinLimit_s = 100e-6;

// One thread's view of the tasks of one queue: takes tasks, and counts in `num_done_here` those that it took.
class Tasks {
  public:
    QUIRE_INLINE Tasks(TaskCursor* cursors, uint32_t phase, int64_t num_tasks, int thread, int num_ranges, int64_t& num_done_here)
        : cursors_(cursors), phase_(phase), num_tasks_(num_tasks), thread_(thread), num_ranges_(num_ranges),
          num_done_here_(num_done_here) {
        enter_range();
    }

    // Takes the next task for this thread; returns false if none is left. A taken task must be finished before wait().
    QUIRE_INLINE bool take(int64_t& task) {
        for (; ranges_visited_ < num_ranges_; ++ranges_visited_, enter_range()) {
            if (!cursor_->take(phase_, end_ - begin_, task)) continue;
            task += begin_;
            ++num_done_here_;
            return true;
        }
        return false;
    }

  private:
    QUIRE_INLINE void enter_range() {
        const int range = (thread_ + ranges_visited_) % num_ranges_;
        cursor_ = cursors_ + range;
        begin_ = num_tasks_ * range / num_ranges_;
        end_ = num_tasks_ * (range + 1) / num_ranges_;
    }

    TaskCursor *cursors_, *cursor_;
    uint32_t phase_;
    int64_t num_tasks_, begin_, end_;
    int thread_, num_ranges_, ranges_visited_ = 0;
    int64_t& num_done_here_;
};

// One thread of a team. All threads must issue the same tasks and call wait() at the same places; a delayed thread
// may run the code outside of tasks late.
class TeamThread {
  public:
    QUIRE_INLINE TeamThread(Team& team, int number, int num_threads)
        : team_(team), number_(number), num_threads_(num_threads) {}

    QUIRE_INLINE int number() const { return number_; }

    // Issues tasks, one range per thread. May be called up to kMaxQueues times between two waits.
    QUIRE_INLINE Tasks tasks(int64_t num_tasks) {
        return tasks_in_ranges(num_tasks, num_threads_ < kMaxTaskRanges ? num_threads_ : kMaxTaskRanges);
    }

    // Like tasks(), but with one range for all threads, so that tasks are started in order.
    QUIRE_INLINE Tasks tasks_in_order(int64_t num_tasks) { return tasks_in_ranges(num_tasks, 1); }

    // Waits until all tasks issued since the previous wait are done.
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

    // Runs each task on one of the threads; returns when all tasks are done.
    template <typename Function>
    QUIRE_INLINE void share(int64_t num_tasks, Function function) {
        Tasks tasks = this->tasks(num_tasks);
        for (int64_t task; tasks.take(task);) function(task);
        wait();
    }

    // Like share(), with one task per kElementsPerTask elements of a row.
    template <typename Function>
    QUIRE_INLINE void for_each_chunk(int64_t num_rows, int64_t size, Function function) {
        const int64_t parts = (size + kElementsPerTask - 1) / kElementsPerTask;
        share(num_rows * parts, [&](int64_t task) {
            const int64_t first = task % parts * kElementsPerTask, end = first + kElementsPerTask;
            function(task / parts, first, end < size ? end : size);
        });
    }

  private:
    QUIRE_INLINE Tasks tasks_in_ranges(int64_t num_tasks, int num_ranges) {
        num_issued_ += num_tasks;
        return {team_.cursors[num_queues_++], phase_, num_tasks, number_ % num_ranges, num_ranges, num_done_here_};
    }

    Team& team_;
    int number_, num_threads_, num_queues_ = 0;
    uint32_t phase_ = 1;
    int64_t num_issued_ = 0, num_done_here_ = 0;
    double patience_s_ = kSpinLimit_s;
};

// Runs `work` on all threads of a new team.
template <typename Function>
void run_team(int num_threads, Function work) {
    Team team;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        TeamThread thread(team, omp_get_thread_num(), omp_get_num_threads());
        work(thread);
    }
}

}  // namespace quire
