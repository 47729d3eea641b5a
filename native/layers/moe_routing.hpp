// Routing of rows to the experts of a mixture of experts (MoE). Experts are chosen per row. Pairs (expert, row) are
// sorted by expert, so that each expert's weights are read once for all its rows. The sum of a row runs over its
// experts in their order. So the bits of a row do not depend on other rows.
//
//     rows        0: experts 2 5     1: experts 0 2     2: experts 2 7
//     pairs       0: (0, row 1)   1: (2, row 0)  2: (2, row 1)  3: (2, row 2)   4: (5, row 0)   5: (7, row 2)
//     hits        expert 0        expert 2                                      expert 5        expert 7
//     row 0 is the sum of pairs 1 and 4
#pragma once

#include <cmath>

#include "products/projection.hpp"

namespace quire {

// A hit is an expert that was chosen by some rows: its range of pairs, and the offsets of its tasks and scratch memory.
struct ExpertBatch {
    int32_t expert, first, count;
    int64_t first_task[2], scratch_at[2];  // [0]: gate and up; [1]: down
};

struct BatchCounts {
    int64_t num_hits, num_tasks[2];
};

// The routing of a chunk of rows, in separate memory: tasks write it once per step, and delayed threads read it later.
struct Routing {
    int32_t* experts;    // [row, used], ascending
    float* weights;      // [row, used]
    int32_t* row_pairs;  // [row, used]
    int32_t* pair_rows;  // [pair]
    int32_t* pair_hits;  // [pair]
    int32_t* ends;       // [expert]: end of the range of its pairs
    ExpertBatch* hits;
    BatchCounts* counts;

    static int64_t num_bytes(const MoE& mixture, int64_t num_rows) {
        const int64_t pairs = num_rows * mixture.num_used;
        return whole_lines(sizeof(BatchCounts)) + 5 * whole_lines(4 * pairs) +
               whole_lines(4 * mixture.num_experts) +
               whole_lines(std::min(pairs, mixture.num_experts) * static_cast<int64_t>(sizeof(ExpertBatch)));
    }

    Routing(char* memory, const MoE& mixture, int64_t num_rows) {
        const int64_t step = whole_lines(4 * num_rows * mixture.num_used);
        char* at = memory + whole_lines(sizeof(BatchCounts));
        counts = reinterpret_cast<BatchCounts*>(memory);
        experts = reinterpret_cast<int32_t*>(at);
        weights = reinterpret_cast<float*>(at + step);
        row_pairs = reinterpret_cast<int32_t*>(at + 2 * step);
        pair_rows = reinterpret_cast<int32_t*>(at + 3 * step);
        pair_hits = reinterpret_cast<int32_t*>(at + 4 * step);
        ends = reinterpret_cast<int32_t*>(at + 5 * step);
        hits = reinterpret_cast<ExpertBatch*>(at + 5 * step + whole_lines(4 * mixture.num_experts));
    }
};

inline double sigmoid_of(float x) { return 1.0 / (1.0 + std::exp(-static_cast<double>(x))); }

// Chooses the experts with the largest scores (the first of equal scores), and computes their weights: exp(score) or
// sigmoid(score), divided by the sum over the chosen experts or over all experts.
inline void choose_experts(const MoE& mixture, const float* scores, int64_t row, const Routing& routing) {
    int32_t* chosen = routing.experts + row * mixture.num_used;
    float* weights = routing.weights + row * mixture.num_used;
    const auto chosen_by = [&](int64_t expert) {
        if (mixture.selection_bias == nullptr) return scores[expert];
        const float score = scores[expert];
        return (mixture.is_sigmoid ? static_cast<float>(sigmoid_of(score)) : score) + mixture.selection_bias[expert];
    };
    float top = scores[0];
    for (int64_t at = 1; at < mixture.num_experts; ++at) top = scores[at] > top ? scores[at] : top;
    for (int64_t n = 0; n < mixture.num_used; ++n) {
        int32_t best = -1;
        for (int32_t at = 0; at < mixture.num_experts; ++at) {
            if (std::find(chosen, chosen + n, at) != chosen + n) continue;
            if (best < 0 || chosen_by(at) > chosen_by(best)) best = at;
        }
        chosen[n] = best;
    }
    std::sort(chosen, chosen + mixture.num_used);
    const auto power = [&](int64_t expert) {
        if (mixture.is_sigmoid) return sigmoid_of(scores[expert]);
        return std::exp(static_cast<double>(scores[expert] - top));
    };
    double total = mixture.denominator_eps;
    if (mixture.softmax_over_all)
        for (int64_t at = 0; at < mixture.num_experts; ++at) total += power(at);
    else
        for (int64_t n = 0; n < mixture.num_used; ++n) total += power(chosen[n]);
    for (int64_t n = 0; n < mixture.num_used; ++n) {
        weights[n] = static_cast<float>(power(chosen[n]) / total * mixture.scale);
        if (mixture.expert_scales != nullptr) weights[n] *= mixture.expert_scales[chosen[n]];
    }
}

// Buffers of experts, [pair] each: inputs, outputs of gate and up, gated activations, outputs of down; and scratch.
struct ExpertBuffers {
    float *rows, *gate_up, *gated, *out;
    char* scratch;
};

inline char* own_scratch(const ExpertBuffers& buffers, int64_t at) {
    return buffers.scratch == nullptr ? nullptr : buffers.scratch + at;
}

inline ProjectionSet expert_gate_up(const MoE& mixture, const ExpertBuffers& buffers, const ExpertBatch& hit, int64_t num_in) {
    const int64_t width = 2 * mixture.intermediate_size;
    return {mixture.gate_up + 2 * hit.expert, 2, buffers.rows + hit.first * num_in, buffers.gate_up + hit.first * width,
            width, hit.count, own_scratch(buffers, hit.scratch_at[0])};
}

inline ProjectionSet expert_down(const MoE& mixture, const ExpertBuffers& buffers, const ExpertBatch& hit, int64_t num_out) {
    return {mixture.down + hit.expert, 1, buffers.gated + hit.first * mixture.intermediate_size,
            buffers.out + hit.first * num_out, num_out, hit.count, own_scratch(buffers, hit.scratch_at[1])};
}

// Runs after all rows have chosen their experts: sorts pairs by expert, then by row, and numbers the tasks of products.
inline void sort_by_expert(const MoE& mixture, int64_t num_rows, int64_t hidden_size, const Routing& routing) {
    const int64_t num_choices = num_rows * mixture.num_used;
    int32_t* ends = routing.ends;  // at first counts, then starts, which advance to ends while pairs are assigned
    std::fill(ends, ends + mixture.num_experts, 0);
    for (int64_t at = 0; at < num_choices; ++at) ++ends[routing.experts[at]];
    int64_t num_hits = 0;
    int32_t first = 0;
    for (int32_t expert = 0; expert < mixture.num_experts; ++expert) {
        const int32_t count = ends[expert];
        ends[expert] = first;
        if (count > 0) routing.hits[num_hits++] = {expert, first, count, {}, {}};
        first += count;
    }
    for (int64_t at = 0; at < num_choices; ++at) {
        const int32_t pair = ends[routing.experts[at]]++;
        routing.pair_rows[pair] = static_cast<int32_t>(at / mixture.num_used);
        routing.row_pairs[at] = pair;
    }
    int64_t num_tasks[2] = {}, num_bytes[2] = {};
    for (int32_t at = 0; at < num_hits; ++at) {
        ExpertBatch& hit = routing.hits[at];
        std::fill(routing.pair_hits + hit.first, routing.pair_hits + hit.first + hit.count, at);
        const ProjectionSet groups[] = {expert_gate_up(mixture, {}, hit, hidden_size),
                                expert_down(mixture, {}, hit, hidden_size)};
        for (int of = 0; of < 2; ++of) {
            hit.first_task[of] = num_tasks[of];
            hit.scratch_at[of] = num_bytes[of];
            num_tasks[of] += groups[of].num_tasks();
            num_bytes[of] += groups[of].scratch_bytes();
        }
    }
    *routing.counts = {num_hits, {num_tasks[0], num_tasks[1]}};
}

// Returns the hit that a task belongs to: the last hit whose first task is at or before it.
inline const ExpertBatch& batch_of_task(const Routing& routing, int of, int64_t task) {
    const ExpertBatch* after = std::upper_bound(routing.hits, routing.hits + routing.counts->num_hits, task,
                                        [of](int64_t wanted, const ExpertBatch& hit) { return wanted < hit.first_task[of]; });
    return after[-1];
}

// An upper bound of the scratch memory that products of experts need, however rows are distributed over experts.
inline int64_t most_expert_scratch(const MoE& mixture, int64_t num_rows, int64_t hidden_size) {
    const int64_t pairs = num_rows * mixture.num_used, hits = std::min(pairs, mixture.num_experts);
    int64_t most = 0;
    for (int of = 0; of < 2; ++of) {
        const auto bytes = [&](int64_t count) {
            const ExpertBatch hit = {0, 0, static_cast<int32_t>(count), {}, {}};
            return (of == 0 ? expert_gate_up(mixture, {}, hit, hidden_size)
                            : expert_down(mixture, {}, hit, hidden_size)).scratch_bytes();
        };
        most = std::max(most, hits * bytes(1) + bytes(pairs));
    }
    return most;
}

}  // namespace quire
