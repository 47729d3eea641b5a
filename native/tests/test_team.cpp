// Tests teams under the thread sanitizer: each task runs once, in its phase, even if threads arrive late.
//
// Uses std::thread, with more threads than cores; some threads sleep to simulate the delays of a busy machine.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "team/team.hpp"

namespace {

void expect(bool is_true, const char* what, int64_t phase) {
    if (is_true) return;
    std::fprintf(stderr, "does not hold: %s, phase %ld\n", what, static_cast<long>(phase));
    std::abort();
}

struct Plan {
    std::vector<std::vector<int64_t>> sizes;  // of a phase's queues
    std::vector<bool> in_order;
};

Plan random_plan(std::mt19937& dice, int num_phases) {
    Plan plan;
    for (int phase = 0; phase < num_phases; ++phase) {
        std::vector<int64_t> queues(1 + dice() % quire::kMaxQueues);
        for (int64_t& size : queues) size = dice() % 3 == 0 ? 0 : dice() % 24;
        plan.sizes.push_back(queues);
        plan.in_order.push_back(dice() % 4 == 0);
    }
    return plan;
}

// Counts the executions of each task, in non-atomic memory, so that a phase that begins too early is a data race.
struct RunCounts {
    std::vector<std::vector<int64_t>> phases;

    explicit RunCounts(const Plan& plan) {
        for (const auto& queues : plan.sizes) {
            int64_t total = 0;
            for (int64_t size : queues) total += size;
            phases.emplace_back(static_cast<size_t>(total), 0);
        }
    }
};

void delay_sometimes(std::mt19937& dice) {
    const unsigned chance = dice() % 64;
    if (chance == 0) std::this_thread::sleep_for(std::chrono::microseconds(dice() % 300));
    if (chance < 8) std::this_thread::yield();
}

void run_plan(const Plan& plan, RunCounts& counts, quire::TeamThread& thread, unsigned seed) {
    std::mt19937 dice(seed);
    for (size_t phase = 0; phase < plan.sizes.size(); ++phase) {
        int64_t first = 0;
        for (int64_t size : plan.sizes[phase]) {
            delay_sometimes(dice);
            quire::Tasks tasks = plan.in_order[phase] ? thread.tasks_in_order(size) : thread.tasks(size);
            for (int64_t task; tasks.take(task);) {
                if (phase > 0)
                    for (int64_t count : counts.phases[phase - 1])
                        expect(count == 1, "a phase begins when the one before is over", static_cast<int64_t>(phase));
                delay_sometimes(dice);
                ++counts.phases[phase][static_cast<size_t>(first + task)];
            }
            first += size;
        }
        thread.wait();
    }
}

void run(std::mt19937& dice, int num_threads, int num_phases) {
    const Plan plan = random_plan(dice, num_phases);
    RunCounts counts(plan);
    quire::Team team;
    std::vector<std::thread> threads;
    for (int number = 0; number < num_threads; ++number)
        threads.emplace_back([&, number, seed = dice()] {
            quire::TeamThread thread(team, number, num_threads);
            run_plan(plan, counts, thread, static_cast<unsigned>(seed));
        });
    for (std::thread& thread : threads) thread.join();
    for (size_t phase = 0; phase < counts.phases.size(); ++phase)
        for (int64_t count : counts.phases[phase])
            expect(count == 1, "a task is done once", static_cast<int64_t>(phase));
}

// A thread that arrives after all phases have ended takes no task and waits for no thread.
void run_alone_then_late() {
    quire::Team team;
    int64_t num_tasks = 0;
    const auto run_thread = [&](int number) {
        quire::TeamThread thread(team, number, 2);
        for (int phase = 0; phase < 100; ++phase) thread.share(7, [&](int64_t) { ++num_tasks; });
    };
    run_thread(0);
    expect(num_tasks == 700, "one thread does the work of two", 0);
    run_thread(1);
    expect(num_tasks == 700, "who comes too late finds nothing to do", 0);
}

}  // namespace

int main() {
    std::mt19937 dice(20);
    run_alone_then_late();
    for (int round = 0; round < 60; ++round) run(dice, 1 + static_cast<int>(dice() % 6), 60);
    run(dice, quire::kMaxTaskRanges + 6, 20);
    std::puts("teams hold");
}
