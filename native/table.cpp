// One build's kernels by name. Compiled once per instruction set, like the kernels themselves.
#include "panel_products.hpp"

namespace quire::QUIRE_ISA {

void attention(const AttentionCall& call);
void add_rms_norm(const NormCall& call);
void rope_write(const RopeCall& call);
void silu_mul(const SiluCall& call);
void argmax(const ArgmaxCall& call);
void exp(const float* in, float* out, int64_t size);
void exp_double(const double* in, double* out, int64_t size);
double read_sum(const void* data, int64_t num_bytes, int num_threads);
extern const Products products_float32, products_bfloat16;
void panel_floats(const PanelCall& call);
void panel_integers(const PanelCall& call);
int64_t panel_scratch_bytes(Arithmetic arithmetic, int64_t num_rows, int64_t num_in);
void panel_unpack(const UnpackCall& call);

#define QUIRE_TEXT_OF(name) #name
#define QUIRE_TEXT(name) QUIRE_TEXT_OF(name)

const PanelProducts panel_products = {panel_floats, panel_integers, panel_scratch_bytes, panel_unpack};

extern const Kernels kernels;
const Kernels kernels = {QUIRE_TEXT(QUIRE_ISA), attention, add_rms_norm, rope_write, silu_mul, argmax, exp, exp_double,
                         read_sum, &products_float32, &products_bfloat16, &panel_products};

}  // namespace quire::QUIRE_ISA
