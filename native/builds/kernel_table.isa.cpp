// The kernel table of one build. Compiled once per instruction set (QUIRE_ISA), like the kernels. Kernels that do not
// use the instructions specific to this build are taken from the build that it extends (QUIRE_BASE).
#include "panels/panel_calls.hpp"

namespace quire::QUIRE_BASE {

void attention(const AttentionCall& call, TeamThread& thread);
void norm_row(const NormCall& call, int64_t row);
void rope_row(const RopeCall& call, int64_t row);
void add_residual_row(const ResidualCall& call, int64_t row);
void gate_part(const GateCall& call, int64_t row, int64_t first, int64_t end);
void weighted_sum(const WeightedSumCall& call);
void logit_part(const LogitCall& call, int64_t row, int64_t first, int64_t end);
void argmax_row(const ArgmaxCall& call, int64_t row);
void conv1d(const RecurrentCall& call, int64_t run, int64_t first, int64_t end);
void compute_decays(const RecurrentCall& call, int64_t row);
void scan_run(const RecurrentCall& call, int64_t run, int64_t head, int64_t block);
void norm_and_gate_row(const RecurrentCall& call, int64_t row);
void apply_output_gate(const float* gates, float* outputs, int64_t size);
void exp(const float* in, float* out, int64_t size);
void exp_double(const double* in, double* out, int64_t size);
double max_logit(const LogitRow& in);
void exp_scaled(const SoftmaxCall& call);
int64_t filter(const FilterCall& call);
double read_sum(const void* data, int64_t num_bytes, int num_threads);
extern const MatmulKernels matmul_float32, matmul_bfloat16;
int64_t panel_float_tasks(const PanelCall& call);
void panel_floats(const PanelCall& call, int64_t task);
void panel_unpack(const UnpackCall& call, int64_t output);

}  // namespace quire::QUIRE_BASE

namespace quire::QUIRE_ISA {

int64_t panel_integer_tasks(const PanelCall& call);
void panel_integers(const PanelCall& call, int64_t task);
void panel_quantise(const PanelCall& call, int64_t row, int64_t first, int64_t end);
int64_t panel_scratch_bytes(ComputeType arithmetic, int64_t num_rows, int64_t num_in);

#define QUIRE_TEXT_OF(name) #name
#define QUIRE_TEXT(name) QUIRE_TEXT_OF(name)

namespace base = quire::QUIRE_BASE;

const PanelKernels panel_kernels = {base::panel_float_tasks, base::panel_floats, panel_integer_tasks,
                                      panel_integers,          panel_scratch_bytes, panel_quantise,
                                      base::panel_unpack};

extern const Kernels kernels;
const Kernels kernels = {QUIRE_TEXT(QUIRE_ISA), base::attention, base::norm_row, base::rope_row, base::add_residual_row,
                         base::gate_part, base::weighted_sum, base::logit_part, base::argmax_row, base::conv1d,
                         base::compute_decays, base::scan_run, base::norm_and_gate_row, base::apply_output_gate, base::exp,
                         base::exp_double, base::max_logit, base::exp_scaled, base::filter,
                         base::read_sum, &base::matmul_float32, &base::matmul_bfloat16, &panel_kernels};

}  // namespace quire::QUIRE_ISA
