// The Python module quire._native. Functions take addresses and sizes and release the GIL. Callers in quire.backends
// check types and shapes; this module does not check them again.
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
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

struct FreeDeleter {
    void operator()(char* memory) const { std::free(memory); }
};

void attention(Address queries, int64_t query_stride, Address out, int64_t out_stride, Address keys,
               int64_t key_block_stride, Address values, int64_t value_block_stride, int kv_type, int num_heads,
               int num_kv_heads, int key_size, int value_size, int block_size, Address tables, Address members,
               Address tiles, int64_t num_tiles, int64_t num_rows, int64_t num_padded_rows, int window, float scale,
               float softcap, int num_threads, Address sinks) {
    quire::AttentionCall call = {
        at<const float>(queries), query_stride, at<float>(out), out_stride, at<const void>(keys), key_block_stride,
        at<const void>(values), value_block_stride, static_cast<quire::KVType>(kv_type), num_heads, num_kv_heads,
        key_size, value_size, block_size, at<const int32_t>(tables), at<const quire::TileRow>(members),
        at<const quire::QueryTile>(tiles), num_tiles, num_rows, num_padded_rows, window, scale, softcap, num_threads,
        at<const float>(sinks)};
    const quire::AttentionMemory memory(call);
    quire::attention(quire::chosen_kernels(), call);
}

int64_t make_tiles(Address first_rows, Address num_rows, Address first_positions, Address table_offsets,
                   int64_t num_items, Address tables, int block_size, int group, Address members, Address tiles) {
    const quire::WorkItems items = {at<const int32_t>(first_rows), at<const int32_t>(num_rows),
                                at<const int32_t>(first_positions), at<const int32_t>(table_offsets), num_items,
                                at<const int32_t>(tables)};
    return quire::make_tiles(items, block_size, group, at<quire::TileRow>(members), at<quire::QueryTile>(tiles));
}

void add_rms_norm(Address added, Address residual, Address weight, Address out, int64_t num_rows, int64_t size,
                  float eps, int num_threads) {
    quire::add_rms_norm(quire::chosen_kernels(),
                        {at<const float>(added), at<float>(residual), at<const float>(weight), at<float>(out), num_rows,
                         size, eps},
                        num_threads);
}

void rope_write(Address qkv, int64_t qkv_stride, Address cos, Address sin, Address query_norm, Address key_norm,
                float eps, Address keys, int64_t key_block_stride, Address values, int64_t value_block_stride,
                int kv_type, Address blocks, Address slots, Address queries, int64_t num_rows, int num_heads,
                int num_kv_heads, int key_size, int value_size, int block_size, int num_threads) {
    quire::rope_write(
        quire::chosen_kernels(),
        {at<const float>(qkv), qkv_stride, int64_t{num_heads + num_kv_heads} * key_size, at<const float>(cos),
         at<const float>(sin), key_size, {at<const float>(query_norm), key_size}, {at<const float>(key_norm), key_size},
         {nullptr, value_size}, nullptr, eps, at<void>(keys), key_block_stride, at<void>(values), value_block_stride,
         static_cast<quire::KVType>(kv_type), at<const int64_t>(blocks), at<const int64_t>(slots), at<float>(queries),
         num_rows, num_heads, num_kv_heads, key_size, value_size, block_size},
        num_threads);
}

void gate_mul(Address gate_up, Address out, int64_t num_rows, int64_t size, int kind, int num_threads) {
    const float* gate = at<const float>(gate_up);
    quire::gate_mul(
        quire::chosen_kernels(),
        {gate, gate + size, 2 * size, 2 * size, at<float>(out), num_rows, size, static_cast<quire::Gate>(kind)},
        num_threads);
}

void argmax(Address logits, int64_t stride, Address out, Address is_finite, int64_t num_rows, int64_t size,
            int num_threads) {
    quire::argmax(quire::chosen_kernels(),
                  {at<const float>(logits), stride, at<int64_t>(out), at<uint8_t>(is_finite), num_rows, size},
                  num_threads);
}

void exp_of(Address in, Address out, int64_t size) {
    quire::chosen_kernels().exp(at<const float>(in), at<float>(out), size);
}

void exp_double(Address in, Address out, int64_t size) {
    quire::chosen_kernels().exp_double(at<const double>(in), at<double>(out), size);
}

void draw(Address narrow, Address wide, Address sizes, Address temperatures, Address min_ps, Address top_ks, Address top_ps,
          Address numbers, Address out, int64_t num_rows, int num_threads) {
    quire::draw({at<const float* const>(narrow), at<const double* const>(wide), at<const int64_t>(sizes),
                 at<const double>(temperatures), at<const double>(min_ps), at<const int64_t>(top_ks),
                 at<const double>(top_ps), at<const double>(numbers), at<int64_t>(out), num_rows, num_threads});
}

void exp_totals(Address logits, int64_t stride, Address peaks, Address totals, int64_t num_rows, int64_t size,
                int num_threads) {
    quire::exp_totals(
        {at<const float>(logits), stride, at<double>(peaks), at<double>(totals), num_rows, size, num_threads});
}

void compute_step(Address call) { quire::compute_step(*at<const quire::ForwardCall>(call)); }

int64_t layer_bytes() { return sizeof(quire::Layer); }

int64_t rope_rule_bytes() { return sizeof(quire::RopeRule); }

int64_t decoder_call_bytes() { return sizeof(quire::ForwardCall); }

double read_sum(Address data, int64_t num_bytes, int num_threads) {
    return quire::chosen_kernels().read_sum(at<const void>(data), num_bytes, num_threads);
}

int64_t packed_bytes(int type, int64_t num_out, int64_t num_in) {
    return quire::chosen_products(static_cast<quire::WeightType>(type)).packed_bytes(num_out, num_in);
}

void pack(int type, Address weight, int64_t num_out, int64_t num_in, Address packed, int num_threads) {
    quire::chosen_products(static_cast<quire::WeightType>(type))
        .pack({at<const float>(weight), num_out, num_in, at<void>(packed), num_threads});
}

void product(int type, Address packed, Address bias, int64_t num_in, int64_t num_out, int num_threads, Address rows,
             int64_t row_stride, Address out, int64_t out_stride, int64_t num_rows) {
    const quire::Products& products = quire::chosen_products(static_cast<quire::WeightType>(type));
    const size_t num_bytes = static_cast<size_t>(products.scratch_bytes(num_rows, num_in));
    std::unique_ptr<char, FreeDeleter> scratch;
    if (num_bytes > 0) {
        scratch.reset(static_cast<char*>(std::aligned_alloc(64, (num_bytes + 63) / 64 * 64)));
        if (!scratch) throw std::bad_alloc();
    }
    quire::product(products,
                   {at<const float>(rows), row_stride, at<const void>(packed), at<const float>(bias), at<float>(out),
                    out_stride, num_rows, num_in, num_out, scratch.get()},
                   num_threads);
}

void packed_rows(int type, Address packed, int64_t num_out, int64_t num_in, Address indices, int64_t num_rows,
                 Address out) {
    quire::chosen_products(static_cast<quire::WeightType>(type))
        .rows({at<const void>(packed), num_out, num_in, at<const int64_t>(indices), num_rows, at<float>(out)});
}

quire::PanelShape shape_of(int format, int64_t num_out, int64_t num_in, int64_t group) {
    return {static_cast<quire::Format>(format), num_out, num_in, group};
}

int64_t panel_bytes(int format, int64_t num_out, int64_t num_in, int64_t group) {
    return shape_of(format, num_out, num_in, group).packed_bytes();
}

void pack_panels(int format, int64_t num_out, int64_t num_in, int64_t group, Address rows, int64_t row_bytes,
                 Address scales, Address zeros, Address panels, int num_threads) {
    quire::pack_panels({shape_of(format, num_out, num_in, group), at<const uint8_t>(rows), row_bytes,
                        {at<const float>(scales), at<const uint8_t>(zeros)}, at<uint8_t>(panels), num_threads});
}

// Returns scratch memory for quantized rows. Each thread reuses its memory for later products, to avoid page faults.
char* scratch_of(size_t num_bytes) {
    static thread_local std::unique_ptr<char, FreeDeleter> held;
    static thread_local size_t held_bytes = 0;
    if (num_bytes > held_bytes) {
        held_bytes = 0;
        held.reset(static_cast<char*>(std::aligned_alloc(64, (num_bytes + 63) / 64 * 64)));
        if (!held) throw std::bad_alloc();
        held_bytes = num_bytes;
    }
    return held.get();
}

void panel_product(int format, int64_t num_out, int64_t num_in, int64_t group, Address packed, Address bias,
                   int arithmetic, int num_threads, Address rows, int64_t row_stride, Address out, int64_t out_stride,
                   int64_t num_rows) {
    const quire::PanelProducts& products = *quire::chosen_kernels().panels;
    const auto kind = static_cast<quire::ComputeType>(arithmetic);
    const size_t num_bytes = static_cast<size_t>(products.scratch_bytes(kind, num_rows, num_in));
    const quire::PanelCall call = {shape_of(format, num_out, num_in, group), at<const uint8_t>(packed),
                                   at<const float>(rows), row_stride, at<const float>(bias), at<float>(out), out_stride,
                                   num_rows, num_bytes > 0 ? scratch_of(num_bytes) : nullptr};
    quire::panel_product(quire::chosen_kernels(), kind, call, num_threads);
}

void panel_unpack(int format, int64_t num_out, int64_t num_in, int64_t group, Address packed, Address outputs,
                  int64_t num_outputs, Address out, int64_t out_stride, int num_threads) {
    quire::panel_unpack(quire::chosen_kernels(),
                        {shape_of(format, num_out, num_in, group), at<const uint8_t>(packed), at<float>(out)},
                        {at<const int64_t>(outputs), num_outputs, out_stride}, num_threads);
}

std::string isa() { return quire::chosen_kernels().isa; }

}  // namespace

NB_MODULE(_native, module) {
    const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
    module.def("isa", &isa, "The instruction set whose kernels run.");
    module.def("attention", &attention, unlocked);
    module.def("make_tiles", &make_tiles, unlocked);
    module.def("most_record_bytes", &quire::most_record_bytes);
    module.def("add_rms_norm", &add_rms_norm, unlocked);
    module.def("rope_write", &rope_write, unlocked);
    module.def("gate_mul", &gate_mul, unlocked);
    module.def("argmax", &argmax, unlocked);
    module.def("exp", &exp_of, unlocked);
    module.def("has_amx", &quire::has_amx, "Whether products with bf16 weights are made in tile registers.");
    module.def("packed_bytes", &packed_bytes);
    module.def("pack", &pack, unlocked);
    module.def("product", &product, unlocked);
    module.def("packed_rows", &packed_rows, unlocked);
    module.def("exp_double", &exp_double, unlocked);
    module.def("draw", &draw, unlocked);
    module.def("exp_totals", &exp_totals, unlocked);
    module.def("compute_step", &compute_step, unlocked);
    module.def("count_layers", [](Address counter) { quire::count_layers(at<uint64_t>(counter)); });
    module.def("layer_bytes", &layer_bytes);
    module.def("rope_rule_bytes", &rope_rule_bytes);
    module.def("decoder_call_bytes", &decoder_call_bytes);
    module.def("panel_bytes", &panel_bytes);
    module.def("pack_panels", &pack_panels, unlocked);
    module.def("panel_product", &panel_product, unlocked);
    module.def("panel_unpack", &panel_unpack, unlocked);
    module.def("read_sum", &read_sum, unlocked);
}
