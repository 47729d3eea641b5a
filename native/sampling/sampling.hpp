// A token for a row of numbers, and what log-probabilities need of a row of logits. The arithmetic is that of
// backends/host/drawing.py, bit for bit: double precision, and every sum in the order of the tokens.
#pragma once

#include <cstdint>

namespace quire {

// One entry for each row.
struct DrawCall {
    const float* const* narrow;  // its numbers, -infinity where a token is struck out; null where they are wide
    const double* const* wide;
    const int64_t* sizes;       // how many they are
    const double* temperatures;
    const double* min_ps;
    const int64_t* top_ks;  // 0: no limit
    const double* top_ps;
    const double* numbers;  // uniform in [0, 1)
    int64_t* out;           // the place drawn, or the row's size if there is none to draw
    int64_t num_rows;
    int num_threads;
};

void draw(const DrawCall& call);

// For each row its largest logit, and the sum of e^(logit - largest).
struct TotalsCall {
    const float* logits;  // [row, size]
    int64_t stride;
    double* peaks;
    double* totals;
    int64_t num_rows, size;
    int num_threads;
};

void exp_totals(const TotalsCall& call);

}  // namespace quire
