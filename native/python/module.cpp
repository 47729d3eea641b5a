// The Python module quire._native. Functions take the addresses and sizes of arrays and release the GIL. Callers in
// quire.backends check types and shapes, so this module does not. *_bytes() return sizes of structs or packed weights.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdlib>
#include <memory>
#include <new>

#include "step/forward.hpp"
#include "builds/dispatch.hpp"
#include "panels/panel_calls.hpp"
#include "panels/pack.hpp"
#include "sampling/sampling.hpp"
#include "team/operations.hpp"
#include "attention/query_tiles.hpp"

namespace nb = nanobind;

namespace {

typedef uintptr_t Address;

template <typename T>
T* as(Address address) {
    return reinterpret_cast<T*>(address);
}

struct FreeDeleter {
    void operator()(char* memory) const { std::free(memory); }
};

void attention(Address queries, int64_t query_stride, Address out, int64_t out_stride, Address keys,
               int64_t key_block_stride, Address values, int64_t value_block_stride, int kv_type, int num_heads,
               int num_kv_heads, int key_size, int value_size, int block_size, Address tables, Address tile_rows,
               Address tiles, int64_t num_tiles, int64_t num_rows, int64_t num_padded_rows, int window, float scale,
               float softcap, int num_threads, Address sinks) {
    quire::AttentionCall call = {
        as<const float>(queries), query_stride, as<float>(out), out_stride, as<const void>(keys), key_block_stride,
        as<const void>(values), value_block_stride, static_cast<quire::KVType>(kv_type), num_heads, num_kv_heads,
        key_size, value_size, block_size, as<const int32_t>(tables), as<const quire::TileRow>(tile_rows),
        as<const quire::QueryTile>(tiles), num_tiles, num_rows, num_padded_rows, window, scale, softcap, num_threads,
        as<const float>(sinks)};
    const quire::AttentionScratch scratch(call);  // sets the scratch pointers of `call`
    quire::attention(quire::active_kernels(), call);
}

int64_t make_tiles(Address first_rows, Address num_rows, Address first_positions, Address table_offsets,
                   int64_t num_items, Address tables, int block_size, int heads_per_kv, Address tile_rows,
                       Address tiles) {
    const quire::WorkItems items = {as<const int32_t>(first_rows), as<const int32_t>(num_rows),
                                as<const int32_t>(first_positions), as<const int32_t>(table_offsets), num_items,
                                as<const int32_t>(tables)};
    return quire::make_tiles(items, block_size, heads_per_kv, as<quire::TileRow>(tile_rows),
                             as<quire::QueryTile>(tiles));
}

void add_rms_norm(Address delta, Address residual, Address weight, Address out, int64_t num_rows, int64_t size,
                  float eps, int num_threads) {
    quire::add_rms_norm(quire::active_kernels(),
                        {as<const float>(delta), as<float>(residual), as<const float>(weight), as<float>(out), num_rows,
                         size, eps}, num_threads);
}

void rope_write(Address qkv, int64_t qkv_stride, Address cos, Address sin, Address query_norm, Address key_norm,
                float eps, Address keys, int64_t key_block_stride, Address values, int64_t value_block_stride,
                int kv_type, Address blocks, Address slots, Address queries, int64_t num_rows, int num_heads,
                int num_kv_heads, int key_size, int value_size, int block_size, int num_threads) {
    quire::rope_write(quire::active_kernels(),
        {as<const float>(qkv), qkv_stride, int64_t{num_heads + num_kv_heads} * key_size, as<const float>(cos),
         as<const float>(sin), key_size, {as<const float>(query_norm), key_size}, {as<const float>(key_norm), key_size},
         {nullptr, value_size}, nullptr, eps, as<void>(keys), key_block_stride, as<void>(values), value_block_stride,
         static_cast<quire::KVType>(kv_type), as<const int64_t>(blocks), as<const int64_t>(slots), as<float>(queries),
         num_rows, num_heads, num_kv_heads, key_size, value_size, block_size},
        num_threads);
}

void gate_mul(Address gate_up, Address out, int64_t num_rows, int64_t size, int kind, int num_threads) {
    const float* gate = as<const float>(gate_up);
    quire::gate_mul(
        quire::active_kernels(),
        {gate, gate + size, 2 * size, 2 * size, as<float>(out), num_rows, size, static_cast<quire::Gate>(kind)},
        num_threads);
}

void argmax(Address logits, int64_t stride, Address out, Address is_finite, int64_t num_rows, int64_t size,
            int num_threads) {
    quire::argmax(quire::active_kernels(),
                  {as<const float>(logits), stride, as<int64_t>(out), as<uint8_t>(is_finite), num_rows, size},
                  num_threads);
}

void exp_of(Address in, Address out, int64_t size) {
    quire::active_kernels().exp(as<const float>(in), as<float>(out), size);
}

void exp_double(Address in, Address out, int64_t size) {
    quire::active_kernels().exp_double(as<const double>(in), as<double>(out), size);
}

void draw(Address float_logits, Address double_logits, Address sizes, Address temperatures, Address min_ps, Address top_ks, Address top_ps,
          Address uniforms, Address out, int64_t num_rows, int num_threads) {
    quire::draw({as<const float* const>(float_logits), as<const double* const>(double_logits), as<const int64_t>(sizes),
                 as<const double>(temperatures), as<const double>(min_ps), as<const int64_t>(top_ks),
                 as<const double>(top_ps), as<const double>(uniforms), as<int64_t>(out), num_rows, num_threads});
}

void exp_totals(Address logits, int64_t stride, Address row_max, Address row_sums, int64_t num_rows, int64_t size,
                int num_threads) {
    quire::exp_totals(
        {as<const float>(logits), stride, as<double>(row_max), as<double>(row_sums), num_rows, size, num_threads});
}

void compute_step(Address call) { quire::compute_step(*as<const quire::ForwardCall>(call)); }

int64_t layer_struct_bytes() { return sizeof(quire::Layer); }

int64_t rope_rule_struct_bytes() { return sizeof(quire::RopeRule); }

int64_t forward_call_struct_bytes() { return sizeof(quire::ForwardCall); }

double read_sum(Address data, int64_t num_bytes, int num_threads) {
    return quire::active_kernels().read_sum(as<const void>(data), num_bytes, num_threads);
}

int64_t packed_bytes(int type, int64_t num_out, int64_t num_in) {
    return quire::active_matmul(static_cast<quire::WeightType>(type)).packed_bytes(num_out, num_in);
}

void pack(int type, Address weight, int64_t num_out, int64_t num_in, Address packed, int num_threads) {
    quire::active_matmul(static_cast<quire::WeightType>(type))
        .pack({as<const float>(weight), num_out, num_in, as<void>(packed), num_threads});
}

void product(int type, Address packed, Address bias, int64_t num_in, int64_t num_out, int num_threads, Address rows,
             int64_t row_stride, Address out, int64_t out_stride, int64_t num_rows) {
    const quire::MatmulKernels& kernels = quire::active_matmul(static_cast<quire::WeightType>(type));
    const size_t num_bytes = static_cast<size_t>(kernels.scratch_bytes(num_rows, num_in));
    std::unique_ptr<char, FreeDeleter> scratch;
    if (num_bytes > 0) {
        scratch.reset(static_cast<char*>(std::aligned_alloc(64, (num_bytes + 63) / 64 * 64)));
        if (!scratch) throw std::bad_alloc();
    }
    quire::product(kernels,
                   {as<const float>(rows), row_stride, as<const void>(packed), as<const float>(bias), as<float>(out),
                    out_stride, num_rows, num_in, num_out, scratch.get()},
                   num_threads);
}

void unpack_rows(int type, Address packed, int64_t num_out, int64_t num_in, Address indices, int64_t num_indices,
                 Address out) {
    quire::active_matmul(static_cast<quire::WeightType>(type))
        .rows({as<const void>(packed), num_out, num_in, as<const int64_t>(indices), num_indices, as<float>(out)});
}

quire::PanelShape shape_of(int format, int64_t num_out, int64_t num_in, int64_t group_size) {  // see format.hpp
    return {static_cast<quire::Format>(format), num_out, num_in, group_size};
}

int64_t panel_bytes(int format, int64_t num_out, int64_t num_in, int64_t group_size) {
    return shape_of(format, num_out, num_in, group_size).packed_bytes();
}

void pack_panels(int format, int64_t num_out, int64_t num_in, int64_t group_size, Address rows, int64_t row_bytes,
                 Address scales, Address zeros, Address panels, int num_threads) {
    quire::pack_panels({shape_of(format, num_out, num_in, group_size), as<const uint8_t>(rows), row_bytes,
                        {as<const float>(scales), as<const uint8_t>(zeros)}, as<uint8_t>(panels), num_threads});
}

// Returns scratch memory for quantized rows. Each calling thread reuses its buffer, to avoid page faults.
char* scratch_of(size_t num_bytes) {
    static thread_local std::unique_ptr<char, FreeDeleter> buffer;
    static thread_local size_t buffer_bytes = 0;
    if (num_bytes > buffer_bytes) {
        buffer_bytes = 0;
        buffer.reset(static_cast<char*>(std::aligned_alloc(64, (num_bytes + 63) / 64 * 64)));
        if (!buffer) throw std::bad_alloc();
        buffer_bytes = num_bytes;
    }
    return buffer.get();
}

void panel_product(int format, int64_t num_out, int64_t num_in, int64_t group_size, Address packed, Address bias,
                   int compute_type_id, int num_threads, Address rows, int64_t row_stride, Address out,
                   int64_t out_stride, int64_t num_rows) {
    const quire::PanelKernels& kernels = *quire::active_kernels().panels;
    const auto compute_type = static_cast<quire::ComputeType>(compute_type_id);
    const size_t num_bytes = static_cast<size_t>(kernels.scratch_bytes(compute_type, num_rows, num_in));
    const quire::PanelCall call = {shape_of(format, num_out, num_in, group_size), as<const uint8_t>(packed),
                                   as<const float>(rows), row_stride, as<const float>(bias), as<float>(out), out_stride,
                                   num_rows, num_bytes > 0 ? scratch_of(num_bytes) : nullptr};
    quire::panel_product(quire::active_kernels(), compute_type, call, num_threads);
}

void panel_unpack(int format, int64_t num_out, int64_t num_in, int64_t group_size, Address packed, Address indices,
                  int64_t num_outputs, Address out, int64_t out_stride, int num_threads) {
    quire::panel_unpack(quire::active_kernels(),
                        {shape_of(format, num_out, num_in, group_size), as<const uint8_t>(packed), as<float>(out)},
                        {as<const int64_t>(indices), num_outputs, out_stride}, num_threads);
}

std::string isa() { return quire::active_kernels().isa; }

}  // namespace

NB_MODULE(_native, module) {
    const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
    module.def("isa", &isa, "The instruction set whose kernels run.");
    module.def("attention", &attention, unlocked);
    module.def("make_tiles", &make_tiles, unlocked);
    module.def("most_record_bytes", &quire::max_record_bytes);
    module.def("add_rms_norm", &add_rms_norm, unlocked);
    module.def("rope_write", &rope_write, unlocked);
    module.def("gate_mul", &gate_mul, unlocked);
    module.def("argmax", &argmax, unlocked);
    module.def("exp", &exp_of, unlocked);
    module.def("has_amx", &quire::has_amx, "Whether bf16 matrix products use AMX tile registers.");
    module.def("packed_bytes", &packed_bytes);
    module.def("pack", &pack, unlocked);
    module.def("product", &product, unlocked);
    module.def("packed_rows", &unpack_rows, unlocked);
    module.def("exp_double", &exp_double, unlocked);
    module.def("draw", &draw, unlocked);
    module.def("exp_totals", &exp_totals, unlocked);
    module.def("compute_step", &compute_step, unlocked);
    module.def("count_layers", [](Address counter) { quire::set_layer_counter(as<uint64_t>(counter)); });
    module.def("layer_bytes", &layer_struct_bytes);
    module.def("rope_rule_bytes", &rope_rule_struct_bytes);
    module.def("decoder_call_bytes", &forward_call_struct_bytes);
    module.def("panel_bytes", &panel_bytes);
    module.def("pack_panels", &pack_panels, unlocked);
    module.def("panel_product", &panel_product, unlocked);
    module.def("panel_unpack", &panel_unpack, unlocked);
    module.def("read_sum", &read_sum, unlocked);
}
