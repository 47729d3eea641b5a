// How the threads of a team wait (see team.hpp). Compiled once, for all instruction sets.
#include "team/team.hpp"

#include <atomic>
#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

constexpr double kMinPatience_s = kSpinLimit_s / 64;
constexpr int kSpinsPerClockRead = 16;  // checks between two reads of the clock

void pause_cpu() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

bool spin_until_done(const Team& team, uint32_t phase, int64_t count, double patience_s) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point end = Clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(patience_s * 1e9));
    do {
        for (int check = 0; check < kSpinsPerClockRead; ++check, pause_cpu())
            if (team.done.has(phase, count)) return true;
    } while (Clock::now() < end);
    return false;
}

}  // namespace

void wait_until_done(Team& team, uint32_t phase, int64_t count, double& patience_s) {
    if (spin_until_done(team, phase, count, patience_s)) {
        patience_s = kSpinLimit_s;
        return;
    }
    patience_s = patience_s / 2 > kMinPatience_s ? patience_s / 2 : kMinPatience_s;
    // No lost wake-up: a waiter increments num_asleep, then checks `done` again; a finishing thread updates `done`,
    // then checks num_asleep. At least one of the two threads sees the change of the other.
    std::atomic_ref<uint32_t> num_asleep(team.num_asleep), epochs(team.wake_epoch);
    num_asleep.fetch_add(1);
    for (uint32_t epoch = epochs.load(); !team.done.has(phase, count); epoch = epochs.load()) epochs.wait(epoch);
    num_asleep.fetch_sub(1);
}

void wake_waiters(Team& team) {
    std::atomic_ref<uint32_t> epochs(team.wake_epoch);
    epochs.fetch_add(1);
    epochs.notify_all();
}

}  // namespace quire
