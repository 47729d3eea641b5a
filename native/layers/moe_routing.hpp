// Routing of rows to the experts of a mixture of experts (MoE). Experts are chosen per row. Pairs (expert, row) are
// sorted by expert, so that each expert's weights are read once for all its rows. The sum of a row runs over its
// experts in their order. So the bits of a row do not depend on other rows.
//
//     rows        0: experts 2 5     1: experts 0 2     2: experts 2 7
//     pairs       0: (0, row 1)   1: (2, row 0)  2: (2, row 1)  3: (2, row 2)   4: (5, row 0)   5: (7, row 2)
//     batches     expert 0        expert 2                                      expert 5        expert 7
//     row 0 is the sum of pairs 1 and 4
#pragma once

#include <cmath>

#include "products/projection.hpp"

namespace quire {

// The batch of an expert that some rows chose: its range of pairs, and the offsets of its tasks and scratch memory.
struct ExpertBatch {
    int32_t expert, first, count;
    int64_t first_task[2], scratch_offset[2];  // per stage: [0] gate and up, [1] down
};

struct BatchCounts {
    int64_t num_batches, num_tasks[2];
};

// The routing of a chunk of rows. Each has its own memory, because delayed threads may still read it later in the step.
struct Routing {
    int32_t* experts;    // [row, used], ascending
    float* weights;      // [row, used]
    int32_t* row_pairs;  // [row, used]
    int32_t* pair_rows;  // [pair]
    int32_t* pair_batches;  // [pair]
    int32_t* ends;       // [expert]: end of the range of its pairs
    ExpertBatch* batches;
    BatchCounts* counts;

    static int64_t num_bytes(const MoE& mixture, int64_t num_rows) {
        const int64_t pairs = num_rows * mixture.num_used;
        return pad_to_line(sizeof(BatchCounts)) + 5 * pad_to_line(4 * pairs) +
               pad_to_line(4 * mixture.num_experts) +
               pad_to_line(std::min(pairs, mixture.num_experts) * static_cast<int64_t>(sizeof(ExpertBatch)));
    }

    Routing(char* memory, const MoE& mixture, int64_t num_rows) {
        const int64_t stride = pad_to_line(4 * num_rows * mixture.num_used);
        char* arrays = memory + pad_to_line(sizeof(BatchCounts));
        counts = reinterpret_cast<BatchCounts*>(memory);
        experts = reinterpret_cast<int32_t*>(arrays);
        weights = reinterpret_cast<float*>(arrays + stride);
        row_pairs = reinterpret_cast<int32_t*>(arrays + 2 * stride);
        pair_rows = reinterpret_cast<int32_t*>(arrays + 3 * stride);
        pair_batches = reinterpret_cast<int32_t*>(arrays + 4 * stride);
        ends = reinterpret_cast<int32_t*>(arrays + 5 * stride);
        batches = reinterpret_cast<ExpertBatch*>(arrays + 5 * stride + pad_to_line(4 * mixture.num_experts));
    }
};

inline double sigmoid_of(float x) { return 1.0 / (1.0 + std::exp(-static_cast<double>(x))); }

// Chooses the experts with the largest scores (the first of equal scores), and computes their weights: exp(score) or
// sigmoid(score), divided by the sum over the chosen experts or over all experts.
inline void choose_experts(const MoE& mixture, const float* scores, int64_t row, const Routing& routing) {
    int32_t* chosen = routing.experts + row * mixture.num_used;
    float* weights = routing.weights + row * mixture.num_used;
    const auto selection_score = [&](int64_t expert) {
        if (mixture.selection_bias == nullptr) return scores[expert];
        const float score = scores[expert];
        return (mixture.is_sigmoid ? static_cast<float>(sigmoid_of(score)) : score) + mixture.selection_bias[expert];
    };
    float max_score = scores[0];
    for (int64_t i = 1; i < mixture.num_experts; ++i) max_score = scores[i] > max_score ? scores[i] : max_score;
    for (int64_t n = 0; n < mixture.num_used; ++n) {
        int32_t best = -1;
        for (int32_t expert = 0; expert < mixture.num_experts; ++expert) {
            if (std::find(chosen, chosen + n, expert) != chosen + n) continue;
            if (best < 0 || selection_score(expert) > selection_score(best)) best = expert;
        }
        chosen[n] = best;
    }
    std::sort(chosen, chosen + mixture.num_used);
    const auto raw_weight = [&](int64_t expert) {
        if (mixture.is_sigmoid) return sigmoid_of(scores[expert]);
        return std::exp(static_cast<double>(scores[expert] - max_score));
    };
    double total = mixture.denominator_eps;
    if (mixture.softmax_over_all)
        for (int64_t expert = 0; expert < mixture.num_experts; ++expert) total += raw_weight(expert);
    else
        for (int64_t n = 0; n < mixture.num_used; ++n) total += raw_weight(chosen[n]);
    for (int64_t n = 0; n < mixture.num_used; ++n) {
        weights[n] = static_cast<float>(raw_weight(chosen[n]) / total * mixture.scale);
        if (mixture.expert_scales != nullptr) weights[n] *= mixture.expert_scales[chosen[n]];
    }
}

// Buffers of experts, [pair] each: inputs, outputs of gate and up, gated activations, outputs of down; and scratch.
struct ExpertBuffers {
    float *rows, *gate_up, *gated, *out;
    char* scratch;
};

inline char* scratch_from(const ExpertBuffers& buffers, int64_t offset) {
    return buffers.scratch == nullptr ? nullptr : buffers.scratch + offset;
}

inline ProjectionSet expert_gate_up(const MoE& mixture, const ExpertBuffers& buffers, const ExpertBatch& batch, int64_t num_in) {
    const int64_t width = 2 * mixture.intermediate_size;
    return {mixture.gate_up + 2 * batch.expert, 2, buffers.rows + batch.first * num_in, buffers.gate_up + batch.first
            * width, width, batch.count, scratch_from(buffers, batch.scratch_offset[0])};
}

inline ProjectionSet expert_down(const MoE& mixture, const ExpertBuffers& buffers, const ExpertBatch& batch, int64_t num_out) {
    return {mixture.down + batch.expert, 1, buffers.gated + batch.first * mixture.intermediate_size,
            buffers.out + batch.first * num_out, num_out, batch.count, scratch_from(buffers, batch.scratch_offset[1])};
}

// Runs after all rows have chosen their experts: sorts pairs by expert, then by row, and numbers the tasks of products.
inline void sort_by_expert(const MoE& mixture, int64_t num_rows, int64_t hidden_size, const Routing& routing) {
    const int64_t num_choices = num_rows * mixture.num_used;
    int32_t* ends = routing.ends;  // first counts, then starts, which advance to ends while pairs are assigned
    std::fill(ends, ends + mixture.num_experts, 0);
    for (int64_t i = 0; i < num_choices; ++i) ++ends[routing.experts[i]];
    int64_t num_batches = 0;
    int32_t first = 0;
    for (int32_t expert = 0; expert < mixture.num_experts; ++expert) {
        const int32_t count = ends[expert];
        ends[expert] = first;
        if (count > 0) routing.batches[num_batches++] = {expert, first, count, {}, {}};
        first += count;
    }
    for (int64_t i = 0; i < num_choices; ++i) {
        const int32_t pair = ends[routing.experts[i]]++;
        routing.pair_rows[pair] = static_cast<int32_t>(i / mixture.num_used);
        routing.row_pairs[i] = pair;
    }
    int64_t num_tasks[2] = {}, num_bytes[2] = {};
    for (int32_t i = 0; i < num_batches; ++i) {
        ExpertBatch& batch = routing.batches[i];
        std::fill(routing.pair_batches + batch.first, routing.pair_batches + batch.first + batch.count, i);
        const ProjectionSet projections[] = {expert_gate_up(mixture, {}, batch, hidden_size),
                                expert_down(mixture, {}, batch, hidden_size)};
        for (int stage = 0; stage < 2; ++stage) {
            batch.first_task[stage] = num_tasks[stage];
            batch.scratch_offset[stage] = num_bytes[stage];
            num_tasks[stage] += projections[stage].num_tasks();
            num_bytes[stage] += projections[stage].scratch_bytes();
        }
    }
    *routing.counts = {num_batches, {num_tasks[0], num_tasks[1]}};
}

// Returns the batch of a task: the last batch whose first task is not after this task.
inline const ExpertBatch& batch_of_task(const Routing& routing, int stage, int64_t task) {
    const ExpertBatch* next = std::upper_bound(routing.batches, routing.batches + routing.counts->num_batches, task,
                                        [stage](int64_t number, const ExpertBatch& batch) { return number < batch.first_task[stage]; });
    return next[-1];
}

// An upper bound of the scratch memory of the experts' products, for any distribution of rows over experts.
inline int64_t max_expert_scratch(const MoE& mixture, int64_t num_rows, int64_t hidden_size) {
    const int64_t pairs = num_rows * mixture.num_used, batches = std::min(pairs, mixture.num_experts);
    int64_t max_bytes = 0;
    for (int stage = 0; stage < 2; ++stage) {
        const auto bytes = [&](int64_t count) {
            const ExpertBatch batch = {0, 0, static_cast<int32_t>(count), {}, {}};
            return (stage == 0 ? expert_gate_up(mixture, {}, batch, hidden_size)
                            : expert_down(mixture, {}, batch, hidden_size)).scratch_bytes();
        };
        max_bytes = std::max(max_bytes, batches * bytes(1) + bytes(pairs));
    }
    return max_bytes;
}

}  // namespace quire
