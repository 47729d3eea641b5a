// See sampling.hpp. Each row is computed by one thread, with scratch memory of that thread.
#include "sampling/sampling.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "builds/dispatch.hpp"

namespace quire {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kEpsilon = std::numeric_limits<double>::epsilon();
constexpr int64_t kSumChunk = 1024;
constexpr double kTopPNearOne = 0.999;
constexpr int64_t kShortPart = 64;  // short: the sum of a part (a dependency chain) overlaps with the next part
constexpr int kBucketShift = 46;    // a bucket is one exponent and the first 6 bits of the mantissa
constexpr size_t kNumBuckets = 4096;

typedef std::vector<double> Numbers;

// Allocates without zeroing; all elements are written before they are read.
template <typename Number>
std::unique_ptr<Number[]> allocate(int64_t size) {
    return std::unique_ptr<Number[]>(new Number[static_cast<size_t>(size)]);
}

struct Scratch {
    std::unique_ptr<double[]> exponents, weights, candidates;
    std::unique_ptr<int64_t[]> candidate_indices;
    Numbers sorted, sums;

    explicit Scratch(int64_t size)
        : exponents(allocate<double>(size)),
          weights(allocate<double>(size)),
          candidates(allocate<double>(size)),
          candidate_indices(allocate<int64_t>(size)),
          sums(kNumBuckets) {}
};

struct Row {
    LogitRow logits;
    int64_t size;
    double temperature, min_p, top_p, uniform;
    int64_t top_k;

    bool has_top_k() const { return top_k > 0 && top_k < size; }
};

LogitRow part_of(const LogitRow& row, int64_t first, int64_t end) {
    return {row.floats ? row.floats + first : nullptr, row.doubles ? row.doubles + first : nullptr, end - first};
}

// Finds the maximum logit. Returns false if it is not finite, because no token can be sampled from such a row.
bool find_peak(const Row& row, double& peak) {
    peak = active_kernels().max_logit(row.logits);
    return peak < kInfinity && peak > -kInfinity;
}

// Computes the weights of all tokens, where the most likely token has weight 1, and returns their sum.
double compute_weights(const Row& row, double peak, Scratch& scratch) {
    double* exponents = row.has_top_k() ? scratch.exponents.get() : nullptr;
    double* weights = scratch.weights.get();
    double total = 0.0;
    for (int64_t first = 0; first < row.size; first += kShortPart) {
        const int64_t end = std::min(first + kShortPart, row.size);
        double* part = exponents ? exponents + first : nullptr;
        active_kernels().exp_scaled(
            {part_of(row.logits, first, end), peak, row.temperature, part, weights + first});
        for (int64_t i = first; i < end; ++i) total += weights[i];
    }
    return total;
}

void apply_min_p(const Row& row, Scratch& scratch) {
    for (size_t i = 0; i < static_cast<size_t>(row.size); ++i)
        if (scratch.weights[i] < row.min_p) scratch.exponents[i] = -kInfinity, scratch.weights[i] = 0.0;
}

void apply_top_k(const Row& row, Scratch& scratch) {
    scratch.sorted.assign(scratch.exponents.get(), scratch.exponents.get() + row.size);
    const auto threshold = scratch.sorted.begin() + (row.top_k - 1);
    std::nth_element(scratch.sorted.begin(), threshold, scratch.sorted.end(), std::greater<double>());
    for (size_t i = 0; i < static_cast<size_t>(row.size); ++i)
        if (scratch.exponents[i] < *threshold) scratch.weights[i] = 0.0;
}

double sum_of(const double* weights, int64_t size) {
    double total = 0.0;
    for (int64_t i = 0; i < size; ++i) total += weights[i];
    return total;
}

// The definition of top-p: returns the smallest of the largest weights whose sum reaches `mass`.
double threshold_by_sorting(Numbers& weights, double mass) {
    std::sort(weights.begin(), weights.end(), std::greater<double>());
    double total = 0.0, threshold = 1.0;
    for (const double weight : weights) {
        total += weight;
        if (!(total - weight < mass)) return threshold;
        threshold = weight;
    }
    return 0.0;
}

size_t bucket_of(double weight) {
    constexpr uint64_t kOne = uint64_t{0x3ff0000000000000} >> kBucketShift;
    uint64_t bits;
    std::memcpy(&bits, &weight, sizeof bits);
    return std::min(kNumBuckets - 1, static_cast<size_t>(kOne - (bits >> kBucketShift)));
}

// Preselects in token order the weights that top-p may select: at least (1 - top_p) * total / size, halved to allow for
// rounding. With top_p near 1, rounding would decide, so all tokens are preselected.
int64_t preselect_for_top_p(const Row& row, double total, Scratch& scratch) {
    const double share = row.top_p > kTopPNearOne ? 0.0 : 0.5 * (1.0 - row.top_p);
    return active_kernels().filter({scratch.weights.get(), row.size, total * share / static_cast<double>(row.size),
                                  scratch.candidates.get(), scratch.candidate_indices.get()});
}

// Like threshold_by_sorting, but sorts only one bucket of weights. This changes the order of sums and so possibly their
// last bits; if these could decide, all weights are sorted.
double top_p_threshold(const Row& row, double total, int64_t num_candidates, Scratch& scratch) {
    const double mass = total * row.top_p, max_rounding = 4.0 * static_cast<double>(row.size) * kEpsilon * total;
    const double *first = scratch.candidates.get(), *last = first + num_candidates;
    std::fill(scratch.sums.begin(), scratch.sums.end(), 0.0);
    for (const double* weight = first; weight != last; ++weight) scratch.sums[bucket_of(*weight)] += *weight;
    double sum_before = 0.0, threshold = 1.0;
    for (size_t bucket = 0; bucket < kNumBuckets; ++bucket) {
        if (sum_before + scratch.sums[bucket] < mass - max_rounding) {
            sum_before += scratch.sums[bucket];
            continue;
        }
        scratch.sorted.clear();
        for (const double* weight = first; weight != last; ++weight)
            if (bucket_of(*weight) == bucket) scratch.sorted.push_back(*weight);
        std::sort(scratch.sorted.begin(), scratch.sorted.end(), std::greater<double>());
        for (const double weight : scratch.sorted) {
            if (sum_before >= mass - max_rounding && weight != threshold) {
                scratch.sorted.assign(first, last);
                return threshold_by_sorting(scratch.sorted, mass);
            }
            sum_before += weight;
            threshold = weight;
            if (sum_before > mass + max_rounding) return threshold;
        }
    }
    return 0.0;
}

// Returns the first index at which the cumulative sum of weights exceeds `target`.
int64_t index_at_sum(const double* weights, int64_t size, double target) {
    double total = 0.0;
    int64_t index = 0;
    for (; index < size; ++index) {
        total += weights[index];
        if (total > target) break;
    }
    return index;
}

int64_t draw_row(const Row& row, Scratch& scratch) {
    double peak;
    if (!find_peak(row, peak)) return row.size;
    double total = compute_weights(row, peak, scratch);
    if (row.min_p > 0.0) apply_min_p(row, scratch);
    if (row.has_top_k()) apply_top_k(row, scratch);
    const double* weights = scratch.weights.get();
    if (row.min_p > 0.0 || row.has_top_k()) total = sum_of(weights, row.size);
    if (!(row.top_p < 1.0)) return index_at_sum(weights, row.size, row.uniform * total);
    const int64_t num_candidates = preselect_for_top_p(row, total, scratch);
    const double threshold = top_p_threshold(row, total, num_candidates, scratch);
    double* candidates = scratch.candidates.get();
    double sum = 0.0;
    for (int64_t i = 0; i < num_candidates; ++i)
        sum += candidates[i] = candidates[i] >= threshold ? candidates[i] : 0.0;
    const int64_t candidate = index_at_sum(candidates, num_candidates, row.uniform * sum);
    return candidate < num_candidates ? scratch.candidate_indices[static_cast<size_t>(candidate)] : row.size;
}

double sum_of_exps(const float* logits, int64_t size, double peak) {
    double values[kSumChunk], total = 0.0;
    for (int64_t first = 0; first < size; first += kSumChunk) {
        const int64_t count = std::min(kSumChunk, size - first);
        for (int64_t i = 0; i < count; ++i) values[i] = static_cast<double>(logits[first + i]) - peak;
        active_kernels().exp_double(values, values, count);
        for (int64_t i = 0; i < count; ++i) total += values[i];
    }
    return total;
}

}  // namespace

void draw(const DrawCall& call) {
    const int64_t max_size = call.num_rows ? *std::max_element(call.sizes, call.sizes + call.num_rows) : 0;
#pragma omp parallel num_threads(call.num_threads) if (call.num_rows > 1)
    {
        Scratch scratch(max_size);
#pragma omp for schedule(dynamic, 1)
        for (int64_t row = 0; row < call.num_rows; ++row)
            call.out[row] = draw_row({{call.float_logits[row], call.double_logits[row], call.sizes[row]},
                                      call.sizes[row], call.temperatures[row], call.min_ps[row], call.top_ps[row],
                                      call.uniforms[row], call.top_ks[row]},
                                     scratch);
    }
}

void exp_totals(const TotalsCall& call) {
#pragma omp parallel for schedule(static) num_threads(call.num_threads) if (call.num_rows > 1)
    for (int64_t row = 0; row < call.num_rows; ++row) {
        const float* logits = call.logits + row * call.stride;
        call.row_max[row] = static_cast<double>(*std::max_element(logits, logits + call.size));
        call.row_sums[row] = sum_of_exps(logits, call.size, call.row_max[row]);
    }
}

}  // namespace quire
