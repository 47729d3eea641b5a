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
constexpr double kAlmostAll = 0.999;
constexpr int64_t kShortPart = 64;  // so short that the sum of one part (a dependency chain) overlaps the next part
constexpr int kBucketShift = 46;    // a bucket is one exponent and the first 6 bits of the mantissa
constexpr size_t kNumBuckets = 4096;

typedef std::vector<double> Numbers;

// Allocates without zeroing; all elements are written before they are read.
template <typename Number>
std::unique_ptr<Number[]> room_for(int64_t size) {
    return std::unique_ptr<Number[]>(new Number[static_cast<size_t>(size)]);
}

struct Scratch {
    std::unique_ptr<double[]> heated, weights, picked;
    std::unique_ptr<int64_t[]> places;
    Numbers sorted, sums;

    explicit Scratch(int64_t size)
        : heated(room_for<double>(size)),
          weights(room_for<double>(size)),
          picked(room_for<double>(size)),
          places(room_for<int64_t>(size)),
          sums(kNumBuckets) {}
};

struct Row {
    LogitRow numbers;
    int64_t size;
    double temperature, min_p, top_p, number;
    int64_t top_k;

    bool has_top_k() const { return top_k > 0 && top_k < size; }
};

LogitRow part_of(const LogitRow& row, int64_t first, int64_t end) {
    return {row.narrow ? row.narrow + first : nullptr, row.wide ? row.wide + first : nullptr, end - first};
}

// Finds the maximum logit. Returns false if it is not finite, because no token can be sampled from such a row.
bool find_peak(const Row& row, double& peak) {
    peak = chosen_kernels().largest(row.numbers);
    return peak < kInfinity && peak > -kInfinity;
}

// Computes the weights of all tokens, relative to weight 1 of the most likely token, and returns their sum.
double weigh(const Row& row, double peak, Scratch& scratch) {
    double* heated = row.has_top_k() ? scratch.heated.get() : nullptr;
    double* weights = scratch.weights.get();
    double total = 0.0;
    for (int64_t first = 0; first < row.size; first += kShortPart) {
        const int64_t end = std::min(first + kShortPart, row.size);
        double* part = heated ? heated + first : nullptr;
        chosen_kernels().exp_scaled(
            {part_of(row.numbers, first, end), peak, row.temperature, part, weights + first});
        for (int64_t at = first; at < end; ++at) total += weights[at];
    }
    return total;
}

void keep_min_p(const Row& row, Scratch& scratch) {
    for (size_t at = 0; at < static_cast<size_t>(row.size); ++at)
        if (scratch.weights[at] < row.min_p) scratch.heated[at] = -kInfinity, scratch.weights[at] = 0.0;
}

void keep_top_k(const Row& row, Scratch& scratch) {
    scratch.sorted.assign(scratch.heated.get(), scratch.heated.get() + row.size);
    const auto border = scratch.sorted.begin() + (row.top_k - 1);
    std::nth_element(scratch.sorted.begin(), border, scratch.sorted.end(), std::greater<double>());
    for (size_t at = 0; at < static_cast<size_t>(row.size); ++at)
        if (scratch.heated[at] < *border) scratch.weights[at] = 0.0;
}

double sum_of(const double* weights, int64_t size) {
    double total = 0.0;
    for (int64_t at = 0; at < size; ++at) total += weights[at];
    return total;
}

// The definition of top-p: in order of weight, tokens are kept as long as the sum before them is less than `mass`.
// Returns the smallest kept weight.
double sorted_border(Numbers& weights, double mass) {
    std::sort(weights.begin(), weights.end(), std::greater<double>());
    double total = 0.0, border = 1.0;
    for (const double weight : weights) {
        total += weight;
        if (!(total - weight < mass)) return border;
        border = weight;
    }
    return 0.0;
}

size_t bucket_of(double weight) {
    constexpr uint64_t kOne = uint64_t{0x3ff0000000000000} >> kBucketShift;
    uint64_t bits;
    std::memcpy(&bits, &weight, sizeof bits);
    return std::min(kNumBuckets - 1, static_cast<size_t>(kOne - (bits >> kBucketShift)));
}

// Preselects the tokens that top-p may keep, in token order. A weight below (1 - top_p) * total / size is never kept;
// half of this bound allows for rounding. With top_p near 1, rounding would decide, so all tokens are selected.
int64_t pick_for_top_p(const Row& row, double total, Scratch& scratch) {
    const double share = row.top_p > kAlmostAll ? 0.0 : 0.5 * (1.0 - row.top_p);
    return chosen_kernels().pick({scratch.weights.get(), row.size, total * share / static_cast<double>(row.size),
                                  scratch.picked.get(), scratch.places.get()});
}

// Like sorted_border, but sorts only one bucket: weights are put into buckets, the largest first. This changes the
// order of sums and so possibly their last bits; if these could decide, all weights are sorted.
double top_p_border(const Row& row, double total, int64_t num_picked, Scratch& scratch) {
    const double mass = total * row.top_p, doubt = 4.0 * static_cast<double>(row.size) * kEpsilon * total;
    const double *first = scratch.picked.get(), *last = first + num_picked;
    std::fill(scratch.sums.begin(), scratch.sums.end(), 0.0);
    for (const double* weight = first; weight != last; ++weight) scratch.sums[bucket_of(*weight)] += *weight;
    double before = 0.0, border = 1.0;
    for (size_t bucket = 0; bucket < kNumBuckets; ++bucket) {
        if (before + scratch.sums[bucket] < mass - doubt) {
            before += scratch.sums[bucket];
            continue;
        }
        scratch.sorted.clear();
        for (const double* weight = first; weight != last; ++weight)
            if (bucket_of(*weight) == bucket) scratch.sorted.push_back(*weight);
        std::sort(scratch.sorted.begin(), scratch.sorted.end(), std::greater<double>());
        for (const double weight : scratch.sorted) {
            if (before >= mass - doubt && weight != border) {
                scratch.sorted.assign(first, last);
                return sorted_border(scratch.sorted, mass);
            }
            before += weight;
            border = weight;
            if (before > mass + doubt) return border;
        }
    }
    return 0.0;
}

// Returns the first index at which the cumulative sum of weights exceeds `target`.
int64_t place_of(const double* weights, int64_t size, double target) {
    double total = 0.0;
    int64_t at = 0;
    for (; at < size; ++at) {
        total += weights[at];
        if (total > target) break;
    }
    return at;
}

int64_t draw_row(const Row& row, Scratch& scratch) {
    double peak;
    if (!find_peak(row, peak)) return row.size;
    double total = weigh(row, peak, scratch);
    if (row.min_p > 0.0) keep_min_p(row, scratch);
    if (row.has_top_k()) keep_top_k(row, scratch);
    const double* weights = scratch.weights.get();
    if (row.min_p > 0.0 || row.has_top_k()) total = sum_of(weights, row.size);
    if (!(row.top_p < 1.0)) return place_of(weights, row.size, row.number * total);
    const int64_t num_picked = pick_for_top_p(row, total, scratch);
    const double border = top_p_border(row, total, num_picked, scratch);
    double* picked = scratch.picked.get();
    double kept = 0.0;
    for (int64_t at = 0; at < num_picked; ++at) kept += picked[at] = picked[at] >= border ? picked[at] : 0.0;
    const int64_t place = place_of(picked, num_picked, row.number * kept);
    return place < num_picked ? scratch.places[static_cast<size_t>(place)] : row.size;
}

double exp_total(const float* logits, int64_t size, double peak) {
    double below[kSumChunk], total = 0.0;
    for (int64_t first = 0; first < size; first += kSumChunk) {
        const int64_t count = std::min(kSumChunk, size - first);
        for (int64_t at = 0; at < count; ++at) below[at] = static_cast<double>(logits[first + at]) - peak;
        chosen_kernels().exp_double(below, below, count);
        for (int64_t at = 0; at < count; ++at) total += below[at];
    }
    return total;
}

}  // namespace

void draw(const DrawCall& call) {
    const int64_t most = call.num_rows ? *std::max_element(call.sizes, call.sizes + call.num_rows) : 0;
#pragma omp parallel num_threads(call.num_threads) if (call.num_rows > 1)
    {
        Scratch scratch(most);
#pragma omp for schedule(dynamic, 1)
        for (int64_t row = 0; row < call.num_rows; ++row)
            call.out[row] = draw_row({{call.narrow[row], call.wide[row], call.sizes[row]}, call.sizes[row],
                                      call.temperatures[row], call.min_ps[row], call.top_ps[row], call.numbers[row],
                                      call.top_ks[row]},
                                     scratch);
    }
}

void exp_totals(const TotalsCall& call) {
#pragma omp parallel for schedule(static) num_threads(call.num_threads) if (call.num_rows > 1)
    for (int64_t row = 0; row < call.num_rows; ++row) {
        const float* logits = call.logits + row * call.stride;
        call.peaks[row] = static_cast<double>(*std::max_element(logits, logits + call.size));
        call.totals[row] = exp_total(logits, call.size, call.peaks[row]);
    }
}

}  // namespace quire
