// Samples a token from a row of logits, and computes the totals for log-probabilities. The results equal those of
// backends/host/drawing.py bit for bit: double precision, with each sum in the order of tokens.
#pragma once

#include <cstdint>

namespace quire {

// Arguments of sampling: arrays with one entry per row.
struct DrawCall {
    const float* const* float_logits;  // [logit], -infinity for excluded tokens; null: see double_logits
    const double* const* double_logits;   // [logit], or null
    const int64_t* sizes;       // numbers of logits
    const double* temperatures;
    const double* min_ps;
    const int64_t* top_ks;  // 0: no limit
    const double* top_ps;
    const double* uniforms;  // random, in [0, 1)
    int64_t* out;           // index of the sampled token, or the row's size if no token can be sampled
    int64_t num_rows;
    int num_threads;
};

void draw(const DrawCall& call);

// Computes for each row its largest logit, and the sum of e^(logit - largest).
struct TotalsCall {
    const float* logits;  // [row, size]
    int64_t stride;
    double* row_max;
    double* row_sums;
    int64_t num_rows, size;
    int num_threads;
};

void exp_totals(const TotalsCall& call);

}  // namespace quire
