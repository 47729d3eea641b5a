// See sampling.hpp. A row is one thread's; its scratch is two rows of double.
#include "sampling.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "dispatch.hpp"

namespace quire {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNearTop[] = {1e-3, 1e-6};  // weights looked at first for top-p; the likeliest token's is 1
constexpr int64_t kPart = 1024;

typedef std::vector<double> Numbers;

// False if there is no finite peak: nothing can be drawn from such numbers.
bool heat(const double* values, double temperature, Numbers& heated) {
    double peak = -kInfinity;
    bool is_number = true;
    for (size_t at = 0; at < heated.size(); ++at) {
        peak = values[at] > peak ? values[at] : peak;
        is_number &= values[at] == values[at];
    }
    for (size_t at = 0; at < heated.size(); ++at) heated[at] = (values[at] - peak) / temperature;
    return is_number && peak < kInfinity;
}

void keep_min_p(double min_p, Numbers& heated, Numbers& weights) {
    chosen_kernels().exp_double(heated.data(), weights.data(), static_cast<int64_t>(heated.size()));
    for (size_t at = 0; at < heated.size(); ++at)
        if (weights[at] < min_p) heated[at] = -kInfinity;
}

void keep_top_k(int64_t top_k, Numbers& heated, Numbers& scratch) {
    scratch = heated;
    std::nth_element(scratch.begin(), scratch.begin() + (top_k - 1), scratch.end(), std::greater<double>());
    const double border = scratch[static_cast<size_t>(top_k - 1)];
    for (double& one : heated)
        if (one < border) one = -kInfinity;
}

double sum_of(const Numbers& weights) {
    double total = 0.0;
    for (const double weight : weights) total += weight;
    return total;
}

// The least weight that stays: the likelier ones before it hold less than `mass`.
bool find_border(Numbers& candidates, double mass, double& border) {
    std::sort(candidates.begin(), candidates.end(), std::greater<double>());
    double total = 0.0;
    for (const double weight : candidates) {
        total += weight;
        if (!(total - weight < mass)) return true;
        border = weight;
    }
    return false;
}

void keep_top_p(double top_p, Numbers& weights, Numbers& candidates) {
    const double mass = sum_of(weights) * top_p;
    double border = 1.0;
    bool is_found = false;
    for (const double least : kNearTop) {
        candidates.clear();
        for (const double weight : weights)
            if (weight >= least) candidates.push_back(weight);
        if ((is_found = find_border(candidates, mass, border))) break;
    }
    if (!is_found) {
        candidates = weights;
        find_border(candidates, mass, border);
    }
    for (double& weight : weights)
        if (weight < border) weight = 0.0;
}

int64_t drawn(const Numbers& weights, double number) {
    const double target = number * sum_of(weights);
    double total = 0.0;
    int64_t at = 0;
    for (const int64_t size = static_cast<int64_t>(weights.size()); at < size; ++at) {
        total += weights[static_cast<size_t>(at)];
        if (total > target) break;
    }
    return at;
}

int64_t draw_row(const DrawCall& call, int64_t row, Numbers& heated, Numbers& weights) {
    if (!heat(call.values + row * call.stride, call.temperatures[row], heated)) return call.size;
    weights.resize(heated.size());
    if (call.min_ps[row] > 0.0) keep_min_p(call.min_ps[row], heated, weights);
    if (call.top_ks[row] > 0 && call.top_ks[row] < call.size) keep_top_k(call.top_ks[row], heated, weights);
    chosen_kernels().exp_double(heated.data(), weights.data(), call.size);
    if (call.top_ps[row] < 1.0) keep_top_p(call.top_ps[row], weights, heated);
    heated.resize(static_cast<size_t>(call.size));
    return drawn(weights, call.numbers[row]);
}

double exp_total(const float* logits, int64_t size, double peak) {
    double below[kPart], total = 0.0;
    for (int64_t first = 0; first < size; first += kPart) {
        const int64_t count = std::min(kPart, size - first);
        for (int64_t at = 0; at < count; ++at) below[at] = static_cast<double>(logits[first + at]) - peak;
        chosen_kernels().exp_double(below, below, count);
        for (int64_t at = 0; at < count; ++at) total += below[at];
    }
    return total;
}

}  // namespace

void draw(const DrawCall& call) {
#pragma omp parallel num_threads(call.num_threads) if (call.num_rows > 1)
    {
        Numbers heated(static_cast<size_t>(call.size)), weights(static_cast<size_t>(call.size));
#pragma omp for schedule(dynamic, 1)
        for (int64_t row = 0; row < call.num_rows; ++row) call.out[row] = draw_row(call, row, heated, weights);
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
