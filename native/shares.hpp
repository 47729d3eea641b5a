// How threads share numbered tasks: each has a run of neighbours of its own and takes from it, in order; one that is
// done helps the others. So a thread meets memory in its order, and one that is held up (a core is lent to somebody
// else) keeps nobody waiting for more than a task. Included only by files that are compiled once per instruction set.
#pragma once

#include <cstdint>

namespace quire::QUIRE_ISA {

class Shares {
  public:
    Shares(int64_t num_tasks, int num_threads) : count_(num_threads < kMost ? num_threads : kMost) {
        for (int at = 0; at < count_; ++at)
            shares_[at] = {num_tasks * at / count_, num_tasks * (at + 1) / count_};
    }

    // The next task for this thread, if there is one left.
    bool take(int thread, int64_t& task) {
        for (int other = 0; other < count_; ++other) {
            Share& share = shares_[(thread + other) % count_];
            task = __atomic_fetch_add(&share.next, 1, __ATOMIC_RELAXED);
            if (task < share.end) return true;
        }
        return false;
    }

  private:
    static constexpr int kMost = 64;
    struct alignas(64) Share {
        int64_t next, end;
    };
    int count_;
    Share shares_[kMost];
};

}  // namespace quire::QUIRE_ISA
