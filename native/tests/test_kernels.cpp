// Tests the kernels with random shapes, on all builds that this processor supports, under the address and
// undefined-behaviour sanitizers (`make native-sanitize`). Python tests check results; these tests use buffers of
// exactly the declared size and NaN in unwritten slots, and check that results are finite, and equal alone and in batches.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "step/forward.hpp"
#include "builds/dispatch.hpp"
#include "layers/moe_routing.hpp"
#include "panels/panel_calls.hpp"
#include "panels/pack.hpp"
#include "sampling/sampling.hpp"
#include "team/operations.hpp"
#include "attention/query_tiles.hpp"

namespace {

using quire::kSegment;
using quire::KVType;
std::mt19937 rng(7);

int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }

template <typename T>
std::vector<T> random_normals(size_t count) {
    std::vector<T> values(count);
    std::normal_distribution<float> normal;
    for (T& value : values) value = static_cast<T>(normal(rng));
    return values;
}

void expect(bool is_right, const char* what, const char* isa) {
    if (is_right) return;
    std::printf("FAILED on %s: %s\n", isa, what);
    std::exit(1);
}

bool all_finite(const std::vector<float>& values) {
    for (float value : values)
        if (!std::isfinite(value)) return false;
    return true;
}

int width_of(KVType type) { return type == KVType::float32 ? 4 : type == KVType::bfloat16 ? 2 : 1; }

// The scales of a block follow its codes and take the space of this number of additional elements per slot.
int scale_rows(KVType type) { return type == KVType::int8 ? 4 : 0; }

// Work items, and a KV store in which only their slots are written; as bytes, for all KV types.
struct Step {
    int max_past = pick(0, 3) ? 150 : 2300;  // sometimes several segments
    int block_size = 16 << pick(0, 2), num_kv_heads = pick(1, 3), group = pick(1, 9);
    int key_size = 8 * pick(4, max_past > kSegment ? 6 : 32), value_size = 8 * pick(4, max_past > kSegment ? 6 : 32);
    KVType type = static_cast<KVType>(pick(0, 2));
    std::vector<int32_t> first_rows, num_rows, first_positions, offsets, tables;
    int total = 0, num_blocks = 1;
    std::vector<char> keys, values;

    Step() {
        const int num_items = pick(1, max_past > kSegment ? 3 : 7), num_shared_blocks = pick(0, max_past / 64);
        for (int item = 0; item < num_items; ++item) add(pick(0, 2) ? 1 : pick(2, 30), pick(0, max_past), num_shared_blocks);
        keys = make_nan_buffer(int64_t{key_size});
        values = make_nan_buffer(int64_t{value_size});
        for (size_t item = 0; item < first_rows.size(); ++item) write(item);
    }

    void add(int rows, int num_past, int num_shared_blocks) {
        first_rows.push_back(total);
        num_rows.push_back(rows);
        first_positions.push_back(num_past);
        offsets.push_back(static_cast<int32_t>(tables.size()));
        for (int index = 0; index * block_size < num_past + rows; ++index) {
            if (first_rows.size() > 1 && index < num_shared_blocks && index < offsets[1 % offsets.size()])
                tables.push_back(tables[static_cast<size_t>(index)]);
            else
                tables.push_back(num_blocks++);
        }
        total += rows;
    }

    std::vector<char> make_nan_buffer(int64_t size) const {
        const int64_t num_elements = num_blocks * num_kv_heads * (size + scale_rows(type)) * block_size;
        return std::vector<char>(static_cast<size_t>(num_elements * width_of(type)), '\xFF');
    }

    void put_random(std::vector<char>& bytes, int64_t index) {
        const float value = std::normal_distribution<float>()(rng);
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        const uint16_t half = static_cast<uint16_t>(bits >> 16);
        if (type == KVType::float32)
            std::memcpy(bytes.data() + index * 4, &value, 4);
        else if (type == KVType::bfloat16)
            std::memcpy(bytes.data() + index * 2, &half, 2);
        else
            bytes[static_cast<size_t>(index)] = static_cast<char>(pick(-127, 127));
    }

    void put_scale(std::vector<char>& bytes, int64_t offset) {
        const float scale = 0.01f * static_cast<float>(pick(1, 3));
        if (type == KVType::int8) std::memcpy(bytes.data() + offset, &scale, 4);
    }

    void write(size_t item) {
        for (int64_t p = 0; p < first_positions[item] + num_rows[item]; ++p) {
            const int64_t block = tables[static_cast<size_t>(offsets[item] + p / block_size)], slot = p % block_size;
            for (int64_t head = block * num_kv_heads; head < (block + 1) * num_kv_heads; ++head) {
                const int64_t key = head * (key_size + scale_rows(type)) * block_size;
                const int64_t value = head * (value_size + scale_rows(type)) * block_size;
                for (int64_t i = 0; i < key_size; ++i) put_random(keys, key + i * block_size + slot);
                for (int64_t i = 0; i < value_size; ++i) put_random(values, value + slot * value_size + i);
                put_scale(keys, key + key_size * block_size + 4 * slot);
                put_scale(values, value + value_size * block_size + 4 * slot);
            }
        }
    }
};

struct Free {
    void operator()(char* memory) const { std::free(memory); }
};

// Computes the attention of work items [first, first + count) of a step in one call.
std::vector<float> attend(const quire::Kernels& kernels, const Step& step, const std::vector<float>& queries,
                          size_t first, size_t count, int window, float softcap, const float* sinks) {
    const quire::WorkItems items = {step.first_rows.data() + first, step.num_rows.data() + first,
                                step.first_positions.data() + first, step.offsets.data() + first,
                                static_cast<int64_t>(count), step.tables.data()};
    int rows = 0;
    for (size_t item = first; item < first + count; ++item) rows += step.num_rows[item];
    std::vector<quire::TileRow> members(static_cast<size_t>(rows));
    std::vector<quire::QueryTile> tiles(static_cast<size_t>(rows));
    const int64_t num_tiles = quire::make_tiles(items, step.block_size, step.group, members.data(), tiles.data());
    const int num_heads = step.num_kv_heads * step.group;
    std::vector<float> out(static_cast<size_t>(step.total * num_heads * step.value_size), 0.0f);
    quire::AttentionCall call = {};
    call.queries = queries.data();
    call.query_stride = num_heads * step.key_size;
    call.out = out.data();
    call.out_stride = num_heads * step.value_size;
    call.keys = step.keys.data();
    call.key_block_stride = int64_t{step.num_kv_heads} * (step.key_size + scale_rows(step.type)) * step.block_size;
    call.values = step.values.data();
    call.value_block_stride = int64_t{step.num_kv_heads} * (step.value_size + scale_rows(step.type)) * step.block_size;
    call.kv_type = step.type;
    call.num_heads = num_heads;
    call.num_kv_heads = step.num_kv_heads;
    call.key_size = step.key_size;
    call.value_size = step.value_size;
    call.block_size = step.block_size;
    call.tables = step.tables.data();
    call.members = members.data();
    call.tiles = tiles.data();
    call.num_tiles = num_tiles;
    call.num_rows = call.num_padded_rows = step.total;
    call.window = window;
    call.scale = 0.1f;
    call.softcap = softcap;
    call.num_threads = pick(1, 5);
    call.sinks = sinks;
    const quire::AttentionScratch memory(call);
    quire::attention(kernels, call);
    return out;
}

void test_attention(const quire::Kernels& kernels) {
    const Step step;
    const int window = pick(0, 1) ? -1 : pick(1, pick(0, 1) ? 60 : 1500);
    const float softcap = pick(0, 2) ? 0.0f : 20.0f;
    const size_t width = static_cast<size_t>(step.num_kv_heads * step.group);
    const std::vector<float> queries = random_normals<float>(static_cast<size_t>(step.total) * width * step.key_size);
    const std::vector<float> head_sinks = random_normals<float>(width);
    const float* sinks = pick(0, 1) ? nullptr : head_sinks.data();
    const std::vector<float> together =
        attend(kernels, step, queries, 0, step.first_rows.size(), window, softcap, sinks);
    expect(all_finite(together), "attention", kernels.isa);
    for (size_t item = 0; item < step.first_rows.size(); ++item) {
        const std::vector<float> alone = attend(kernels, step, queries, item, 1, window, softcap, sinks);
        const size_t from = static_cast<size_t>(step.first_rows[item]) * width * step.value_size;
        const size_t size = static_cast<size_t>(step.num_rows[item]) * width * step.value_size;
        expect(std::memcmp(&together[from], &alone[from], size * 4) == 0, "attention in a batch", kernels.isa);
    }
}

void test_rope(const quire::Kernels& kernels) {
    const int rows = pick(1, 20), heads = pick(1, 4), kv_heads = pick(1, 3), block_size = 16;
    const int key_size = 8 * pick(4, 64), value_size = 8 * pick(4, 64);
    const size_t width = static_cast<size_t>((heads + kv_heads) * key_size + kv_heads * value_size);
    const std::vector<float> qkv = random_normals<float>(static_cast<size_t>(rows) * width);
    const std::vector<float> cos = random_normals<float>(static_cast<size_t>(rows * key_size));
    const bool spans_all_heads = pick(0, 1);
    const quire::HeadNorm no_norm = {nullptr, 0};
    const std::vector<float> norm = random_normals<float>(static_cast<size_t>(std::max(4 * key_size, value_size)));
    const std::vector<float> scales = random_normals<float>(static_cast<size_t>(rows));
    std::vector<int64_t> blocks, slots;
    for (int row = 0; row < rows; ++row) blocks.push_back(row % 3), slots.push_back((row / 3) % block_size);
    for (KVType type : {KVType::float32, KVType::bfloat16, KVType::int8}) {
        const int key_rows = key_size + scale_rows(type), value_rows = value_size + scale_rows(type);
        const int bytes_per_dimension = 3 * kv_heads * block_size * width_of(type);
        std::vector<char> keys(static_cast<size_t>(bytes_per_dimension * key_rows));
        std::vector<char> values(static_cast<size_t>(bytes_per_dimension * value_rows));
        std::vector<float> queries(static_cast<size_t>(rows * heads * key_size));
        const bool has_norm = pick(0, 1);
        const quire::HeadNorm query_norm = {norm.data(), spans_all_heads ? heads * key_size : key_size};
        const quire::HeadNorm key_norm = {norm.data(), spans_all_heads ? kv_heads * key_size : key_size};
        const quire::HeadNorm value_norm = {norm.data(), value_size};
        quire::rope_write(kernels,
                          {qkv.data(), static_cast<int64_t>(width), int64_t{heads + kv_heads} * key_size, cos.data(),
                            cos.data(), key_size, has_norm ? query_norm : no_norm, has_norm ? key_norm : no_norm,
                            has_norm ? value_norm : no_norm, pick(0, 1) ? nullptr : scales.data(), 1e-5f,
                            keys.data(), int64_t{kv_heads} * key_rows * block_size, values.data(),
                            int64_t{kv_heads} * value_rows * block_size, type, blocks.data(), slots.data(),
                            queries.data(), rows, heads, kv_heads, key_size, value_size, block_size}, 2);
        expect(all_finite(queries), "rope", kernels.isa);
    }
}

void test_rowwise_kernels(const quire::Kernels& kernels) {
    const int rows = pick(1, 9), size = pick(1, 3000);
    const size_t count = static_cast<size_t>(rows) * static_cast<size_t>(size);
    const std::vector<float> delta = random_normals<float>(count), weight = random_normals<float>(static_cast<size_t>(size));
    std::vector<float> residual = random_normals<float>(count), out(count), gate_up = random_normals<float>(2 * count);
    quire::add_rms_norm(kernels, {delta.data(), residual.data(), weight.data(), out.data(), rows, size, 1e-5f}, 2);
    expect(all_finite(out), "norm", kernels.isa);
    for (const quire::Gate kind : {quire::Gate::silu, quire::Gate::gelu_tanh, quire::Gate::clamped_silu}) {
        const float* gate = gate_up.data();
        quire::gate_mul(kernels, {gate, gate + size, 2 * size, 2 * size, out.data(), rows, size, kind}, 2);
        expect(all_finite(out), "gate", kernels.isa);
    }
    kernels.add_residual_row({out.data(), residual.data(), weight.data(), size, 1e-5f, 0.5f, 2.0f}, rows - 1);
    kernels.logit_part({out.data(), size, 0.5f, 3.0f}, rows - 1, 0, size);
    expect(all_finite(out) && all_finite(residual), "residual and logit rows", kernels.isa);
    const int32_t parts[] = {rows - 1, 0};
    const float weights[] = {0.25f, 0.75f};
    kernels.weighted_sum({delta.data(), parts, weights, 2, size, out.data()});
    const float mixed = 0.75f * delta[0] + 0.25f * delta[static_cast<size_t>(rows - 1) * static_cast<size_t>(size)];
    expect(std::abs(out[0] - mixed) < 1e-5f, "mixed rows", kernels.isa);
    out[0] = std::numeric_limits<float>::quiet_NaN();
    std::vector<int64_t> best(static_cast<size_t>(rows));
    std::vector<uint8_t> is_finite(static_cast<size_t>(rows));
    quire::argmax(kernels, {out.data(), size, best.data(), is_finite.data(), rows, size}, 2);
    expect(is_finite[0] == 0, "argmax", kernels.isa);
    kernels.exp(delta.data(), out.data(), static_cast<int64_t>(count));
    kernels.read_sum(delta.data(), static_cast<int64_t>(4 * count), 2);  // used to measure bandwidth
}

// Tolerances relative to the sum of magnitudes: for a chain of float32 roundings, and for bfloat16 weights and rows.
constexpr double kFloat32Tolerance = 2e-6, kBfloat16Tolerance = 0.01;

// Computes some rows of a product with a packed weight.
std::vector<float> multiply(const quire::MatmulKernels& matmul, const std::vector<float>& rows, const void* packed,
                            const float* bias, int first, int count, int num_in, int num_out, int num_threads) {
    std::vector<float> out(static_cast<size_t>(count) * static_cast<size_t>(num_out), 0.0f);
    const size_t num_bytes = static_cast<size_t>(matmul.scratch_bytes(count, num_in));
    std::unique_ptr<char, Free> scratch(static_cast<char*>(std::aligned_alloc(64, (num_bytes + 63) / 64 * 64)));
    const int64_t from = int64_t{first} * num_in;
    quire::product(matmul, {rows.data() + from, num_in, packed, bias, out.data(), num_out, count, num_in, num_out,
                              scratch.get()}, num_threads);
    return out;
}

void test_products(const quire::MatmulKernels& matmul, const char* isa, double rounding) {
    const int num_rows = pick(1, pick(0, 3) ? 60 : 600), num_in = pick(1, 200), num_out = pick(1, 200);
    const std::vector<float> weight = random_normals<float>(static_cast<size_t>(num_out) * static_cast<size_t>(num_in));
    const std::vector<float> rows = random_normals<float>(static_cast<size_t>(num_rows) * static_cast<size_t>(num_in));
    const std::vector<float> biases = random_normals<float>(static_cast<size_t>(num_out));
    const float* bias = pick(0, 1) ? biases.data() : nullptr;
    std::unique_ptr<char, Free> packed(
        static_cast<char*>(std::malloc(static_cast<size_t>(matmul.packed_bytes(num_out, num_in)))));
    matmul.pack({weight.data(), num_out, num_in, packed.get(), 2});
    const std::vector<int64_t> indices = {num_out - 1, 0, num_out / 2};
    std::vector<float> unpacked(3 * static_cast<size_t>(num_in));
    matmul.rows({packed.get(), num_out, num_in, indices.data(), 3, unpacked.data()});
    for (size_t i = 0; i < unpacked.size(); ++i) {
        const float term = weight[static_cast<size_t>(indices[i / num_in]) * num_in + i % num_in];
        expect(std::abs(unpacked[i] - term) <= std::abs(term) * 0.005, "rows", isa);
    }
    const std::vector<float> all = multiply(matmul, rows, packed.get(), bias, 0, num_rows, num_in, num_out, 2);
    for (size_t row = 0; row < static_cast<size_t>(num_rows); ++row)
        for (size_t n = 0; n < static_cast<size_t>(num_out); ++n) {
            double sum = bias == nullptr ? 0.0 : bias[n], magnitude = 1.0;
            for (size_t i = 0; i < static_cast<size_t>(num_in); ++i) {
                const double term = double{rows[row * num_in + i]} * double{weight[n * num_in + i]};
                sum += term;
                magnitude += std::abs(term);
            }
            expect(std::abs(all[row * num_out + n] - sum) <= rounding * magnitude, "a product", isa);
        }
    const int first = pick(0, num_rows - 1), count = pick(1, num_rows - first);
    const std::vector<float> part = multiply(matmul, rows, packed.get(), bias, first, count, num_in, num_out, 1);
    expect(std::memcmp(&all[static_cast<size_t>(first) * static_cast<size_t>(num_out)], part.data(), part.size() * 4) == 0,
           "a product in a batch", isa);
}

// Samples from rows with excluded tokens, with all combinations of limits: a sampled token must not be excluded.
void test_sampling() {
    const int rows = pick(1, 6), size = pick(1, 3000);
    std::vector<double> values = random_normals<double>(static_cast<size_t>(rows) * static_cast<size_t>(size));
    std::vector<double> temperatures, min_ps, top_ps, uniforms;
    std::vector<int64_t> top_ks, out(static_cast<size_t>(rows), -1);
    for (int row = 0; row < rows; ++row) {
        for (int i = 1; i < size; i += pick(1, 9)) values[static_cast<size_t>(row * size + i)] = -INFINITY;
        temperatures.push_back(pick(0, 4) ? 0.1 * pick(1, 30) : 1e-300);
        min_ps.push_back(pick(0, 1) ? 0.0 : 0.2);
        top_ks.push_back(pick(0, 1) ? 0 : pick(1, 2 * size));
        top_ps.push_back(pick(0, 1) ? 1.0 : 0.001 * pick(0, 999));
        uniforms.push_back(0.001 * pick(0, 999));
    }
    const std::vector<float> narrow_values(values.begin(), values.end());
    std::vector<const double*> wide;
    std::vector<const float*> narrow;
    for (int row = 0; row < rows; ++row) {
        const bool is_wide = pick(0, 1);
        wide.push_back(is_wide ? &values[static_cast<size_t>(row * size)] : nullptr);
        narrow.push_back(is_wide ? nullptr : &narrow_values[static_cast<size_t>(row * size)]);
    }
    const std::vector<int64_t> sizes(static_cast<size_t>(rows), size);
    quire::draw({narrow.data(), wide.data(), sizes.data(), temperatures.data(), min_ps.data(), top_ks.data(),
                 top_ps.data(), uniforms.data(), out.data(), rows, 2});
    for (int row = 0; row < rows; ++row) {
        const bool is_in_range = out[static_cast<size_t>(row)] >= 0 && out[static_cast<size_t>(row)] < size;
        expect(is_in_range && std::isfinite(values[static_cast<size_t>(row * size + out[static_cast<size_t>(row)])]),
               "sampled token", "every build");
    }
    const std::vector<float> logits = random_normals<float>(static_cast<size_t>(rows) * static_cast<size_t>(size));
    std::vector<double> peaks(static_cast<size_t>(rows)), totals(static_cast<size_t>(rows));
    quire::exp_totals({logits.data(), size, peaks.data(), totals.data(), rows, size, 2});
    for (double total : totals) expect(total >= 1.0 && total <= size, "exp_totals", "every build");
}

// A weight of some format with random codes and small scales, packed into a buffer of exactly its size.
struct PackedPanels {
    quire::PanelShape shape;
    std::unique_ptr<char, Free> panels;

    static quire::PanelShape any_shape(quire::Format format) {
        const quire::FormatTraits& traits = quire::traits_of(format);
        const bool is_any_size = traits.scales == quire::Scales::external || traits.scales == quire::Scales::none;
        return {format, pick(1, 100), is_any_size ? pick(1, 200) : std::max(traits.file_inputs, quire::kGroupInputs) * pick(1, 4),
                is_any_size ? pick(1, 100) : 32 * pick(1, 4)};
    }

    // `is_small`: with small scales, so that the output of a few layers is finite.
    explicit PackedPanels(const quire::PanelShape& panel_shape, bool is_small = false) : shape(panel_shape) {
        const quire::FormatTraits& traits = shape.traits();
        const size_t row_bytes = static_cast<size_t>(shape.num_in / traits.file_inputs * traits.file_bytes);
        std::vector<uint8_t> rows(row_bytes * static_cast<size_t>(shape.num_out));
        for (uint8_t& value : rows) value = static_cast<uint8_t>(pick(0, 255) & 0xDB);  // no exponent of all ones
        const size_t num_scales = static_cast<size_t>(shape.num_out * shape.num_scales());
        std::vector<float> scales = random_normals<float>(num_scales);
        for (float& value : scales) value *= is_small ? 0.02f : 1.0f;
        for (size_t i = 1; is_small && shape.format == quire::Format::q8_0 && i < rows.size(); i += 34)
            rows[i] = 0x14;  // the byte of a scale that contains its exponent
        const std::vector<uint8_t> zero_points(num_scales, 7);
        if (traits.code_bits == 4 && traits.file_inputs == 1)
            for (uint8_t& value : rows) value &= 15;
        const size_t num_bytes = static_cast<size_t>(shape.packed_bytes());
        panels.reset(static_cast<char*>(std::aligned_alloc(64, num_bytes)));
        quire::pack_panels({shape, rows.data(), static_cast<int64_t>(row_bytes), {scales.data(), zero_points.data()}, bytes(),
                            2});
    }

    uint8_t* bytes() const { return reinterpret_cast<uint8_t*>(panels.get()); }
};

// A recurrent layer of a random kind, with its small tensors and its offsets in a slot.
struct RandomRecurrent {
    std::vector<float> taps, tap_bias, log_decay, step_bias, skip, norm;
    quire::Recurrent layer = {};
    int64_t slot_size = 0;

    // The output size is a multiple of `out_multiple`; for a convolution it is `hidden`.
    RandomRecurrent(int64_t hidden, int64_t out_multiple) {
        const auto kind = layer.kind = static_cast<quire::RecurrentKind>(pick(1, 3));
        const bool is_convolution = kind == quire::RecurrentKind::convolution, is_ssm = kind == quire::RecurrentKind::state_space;
        layer.num_taps = pick(2, quire::kMaxTaps);
        if (!is_convolution) {
            layer.num_key_heads = pick(1, 3), layer.num_heads = layer.num_key_heads * pick(1, 3);
            layer.key_size = 2 * pick(1, 20), layer.value_size = out_multiple * (out_multiple > 1 ? pick(1, 2) : pick(1, 70));
        }
        const int64_t keys = layer.num_key_heads * layer.key_size, heads = layer.num_heads;
        const int64_t out = layer.out_size = is_convolution ? hidden : heads * layer.value_size;
        const int64_t channels = layer.num_channels = is_convolution ? hidden : 2 * keys + out;
        layer.kv_heads_strided = pick(0, 1), layer.is_gated_first = is_ssm;
        layer.norm_span = is_ssm ? out / layer.num_key_heads : layer.value_size;
        if (is_convolution)
            layer.mixed_offset = 2 * channels, layer.rate_offset = channels, layer.in_size = 3 * channels;
        else if (is_ssm)
            layer.mixed_offset = out, layer.dt_offset = out + channels, layer.in_size = out + channels + heads,
            layer.key_offset = out, layer.query_offset = out + keys;
        else
            layer.gate_offset = channels, layer.rate_offset = channels + out, layer.dt_offset = channels + out + heads,
            layer.in_size = channels + out + 2 * heads, layer.key_offset = keys, layer.value_offset = 2 * keys;
        layer.min_dt = is_ssm ? 0.01 : 0.0, layer.max_dt = is_ssm ? 2.0 : INFINITY;
        layer.state_offset = (layer.num_taps - 1) * channels;
        slot_size = layer.state_offset + heads * num_state_blocks(layer) * quire::kColumns * layer.key_size;
        const auto some = [](int64_t count) { return random_normals<float>(static_cast<size_t>(count)); };
        taps = some(layer.num_taps * channels), tap_bias = some(channels), log_decay = some(heads);
        step_bias = some(heads), skip = some(heads), norm = some(is_ssm ? out : layer.norm_span);
        for (float& one : log_decay) one = -std::abs(one);
        layer.taps = taps.data(), layer.tap_bias = pick(0, 1) ? nullptr : tap_bias.data();
        layer.log_decay = log_decay.data(), layer.step_bias = step_bias.data(), layer.norm = norm.data();
        layer.skip = is_ssm ? skip.data() : nullptr;
    }
};

// The outputs of a step for some runs (the rows of one sequence in the step), and their slots afterwards.
struct RecurrentResult {
    std::vector<float> out, slots;

    void compute(const quire::Kernels& kernels, const RandomRecurrent& recurrent, const std::vector<float>& in,
             const std::vector<int64_t>& run_rows, const std::vector<int64_t>& run_slots, int64_t chunk) {
        const quire::Recurrent& layer = recurrent.layer;
        const int64_t num_rows = run_rows.back(), num_runs = static_cast<int64_t>(run_slots.size());
        out.assign(static_cast<size_t>(num_rows * layer.out_size), NAN);
        for (int64_t first = 0; first < num_rows; first += chunk) {
            const int64_t count = std::min(chunk, num_rows - first);
            std::vector<float> mixed(static_cast<size_t>(count * layer.num_channels), NAN);
            std::vector<float> rates(static_cast<size_t>(count * 2 * layer.num_heads), NAN);
            const auto begin = in.begin() + first * layer.in_size;
            const std::vector<float> rows(begin, begin + count * layer.in_size);
            const quire::RecurrentCall call = {
                &layer, rows.data(), mixed.data(), rates.data(), out.data() + first * layer.out_size, slots.data(),
                recurrent.slot_size, run_rows.data(), run_slots.data(), first, count, 1e-5f};
            for (int64_t run = 0; run < num_runs; ++run) {
                if (run_rows[size_t(run)] >= first + count || run_rows[size_t(run) + 1] <= first) continue;
                const int64_t middle = pick(0, int(layer.num_channels));
                kernels.conv1d(call, run, middle, layer.num_channels);
                kernels.conv1d(call, run, 0, middle);
            }
            if (layer.kind == quire::RecurrentKind::convolution) continue;
            for (int64_t row = 0; row < count; ++row) kernels.compute_decays(call, row);
            const int64_t blocks = num_state_blocks(layer);
            for (int64_t run = 0; run < num_runs; ++run) {
                if (run_rows[size_t(run)] >= first + count || run_rows[size_t(run) + 1] <= first) continue;
                for (int64_t task = layer.num_heads * blocks - 1; task >= 0; --task)
                    kernels.scan_run(call, run, task / blocks, task % blocks);
            }
            for (int64_t row = 0; row < count; ++row) kernels.norm_and_gate_row(call, row);
        }
    }
};

// Computes sequences in one step, in chunks, and each alone in two steps: bits are equal, other slots do not change.
void test_recurrent(const quire::Kernels& kernels) {
    const RandomRecurrent recurrent(pick(1, 70), 1);
    const int64_t num_runs = pick(1, 4), in_size = recurrent.layer.in_size, out_size = recurrent.layer.out_size;
    std::vector<int64_t> run_rows = {0}, run_slots;
    for (int64_t run = 0; run < num_runs; ++run)
        run_rows.push_back(run_rows.back() + pick(1, 9)), run_slots.push_back(run + 1);
    std::shuffle(run_slots.begin(), run_slots.end(), rng);
    const std::vector<float> in = random_normals<float>(static_cast<size_t>(run_rows.back() * in_size));
    RecurrentResult whole, chunks;
    whole.slots.assign(static_cast<size_t>((num_runs + 1) * recurrent.slot_size), 0.0f);
    std::fill_n(whole.slots.begin(), recurrent.slot_size, NAN);  // slot 0 belongs to no sequence
    chunks.slots = whole.slots;
    const std::vector<float> before = whole.slots;
    whole.compute(kernels, recurrent, in, run_rows, run_slots, run_rows.back());
    expect(all_finite(whole.out), "a recurrent layer", kernels.isa);
    chunks.compute(kernels, recurrent, in, run_rows, run_slots, pick(1, 5));
    const auto is_same = [](const std::vector<float>& a, const std::vector<float>& b) {
        return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
    };
    expect(is_same(whole.out, chunks.out) && is_same(whole.slots, chunks.slots), "a recurrent layer in chunks",
           kernels.isa);
    for (size_t run = 0; run < static_cast<size_t>(num_runs); ++run) {
        const int64_t rows = run_rows[run + 1] - run_rows[run], split = pick(0, int(rows) - 1);
        RecurrentResult alone;
        std::vector<float> out;
        alone.slots = before;
        for (const auto& [first, end] : {std::pair{int64_t{0}, split}, std::pair{split, rows}}) {
            if (first == end) continue;
            const auto begin = in.begin() + (run_rows[run] + first) * in_size;
            alone.compute(kernels, recurrent, std::vector<float>(begin, begin + (end - first) * in_size), {0, end - first},
                      {run_slots[run]}, pick(1, 9));
            out.insert(out.end(), alone.out.begin(), alone.out.end());
        }
        const float* together = whole.out.data() + run_rows[run] * out_size;
        const int64_t slot = run_slots[run] * recurrent.slot_size;
        expect(std::memcmp(out.data(), together, out.size() * 4) == 0 &&
                   std::equal(alone.slots.begin() + slot, alone.slots.begin() + slot + recurrent.slot_size,
                              whole.slots.begin() + slot), "a recurrent layer in a batch", kernels.isa);
        std::copy_n(before.begin() + slot, recurrent.slot_size, alone.slots.begin() + slot);
        expect(is_same(alone.slots, before), "a slot of another sequence", kernels.isa);
    }
    std::vector<float> inputs = random_normals<float>(static_cast<size_t>(in_size)), gates = inputs;
    kernels.apply_output_gate(gates.data(), inputs.data(), in_size);
    for (size_t i = 0; i < inputs.size(); ++i)
        expect(std::abs(inputs[i] - gates[i] / (1.0f + std::exp(-gates[i]))) < 1e-5f, "gated inputs", kernels.isa);
}

// Compares the chosen experts and their weights with an implementation by plain sorting.
void test_expert_routing() {
    const int64_t count = pick(1, 12), num_used = pick(1, int(count)), rows = pick(1, 3);
    quire::MoE mixture = {};
    std::vector<float> scores = random_normals<float>(size_t(rows * count)), bias = random_normals<float>(size_t(count));
    if (pick(0, 2) == 0) std::fill(bias.begin(), bias.end(), 0.0f), scores[0] = scores.back();  // sometimes equal scores
    const std::vector<float> scales = random_normals<float>(static_cast<size_t>(count));
    mixture.num_experts = count, mixture.num_used = num_used, mixture.is_sigmoid = pick(0, 1);
    mixture.selection_bias = pick(0, 2) == 0 ? nullptr : bias.data();
    mixture.expert_scales = pick(0, 1) ? nullptr : scales.data();
    mixture.softmax_over_all = pick(0, 1), mixture.denominator_eps = pick(0, 1) ? 0.0 : 1e-6, mixture.scale = pick(1, 3);
    const size_t num_bytes = static_cast<size_t>(quire::Routing::num_bytes(mixture, rows));
    std::unique_ptr<char, Free> memory(static_cast<char*>(std::aligned_alloc(64, num_bytes)));
    const quire::Routing routing(memory.get(), mixture, rows);
    for (int64_t row = 0; row < rows; ++row) {
        const float* logits = scores.data() + row * count;
        quire::choose_experts(mixture, logits, row, routing);
        const auto raw_weight = [&](int32_t e) {
            return mixture.is_sigmoid ? 1.0 / (1.0 + std::exp(-double{logits[e]})) : std::exp(double{logits[e]});
        };
        const auto selection_score = [&](int32_t e) {
            if (mixture.selection_bias == nullptr) return logits[e];
            return (mixture.is_sigmoid ? static_cast<float>(raw_weight(e)) : logits[e]) + bias[size_t(e)];
        };
        std::vector<int32_t> experts(static_cast<size_t>(count));
        for (int32_t i = 0; i < count; ++i) experts[size_t(i)] = i;
        std::stable_sort(experts.begin(), experts.end(),
                         [&](int32_t a, int32_t b) { return selection_score(a) > selection_score(b); });
        double total = mixture.denominator_eps;
        for (int64_t i = 0; i < (mixture.softmax_over_all ? count : num_used); ++i) total += raw_weight(experts[size_t(i)]);
        std::sort(experts.begin(), experts.begin() + num_used);
        for (int64_t i = 0; i < num_used; ++i) {
            const int32_t expert = experts[size_t(i)];
            const double scale = mixture.expert_scales == nullptr ? 1.0 : double{scales[size_t(expert)]};
            const double weight = raw_weight(expert) / total * mixture.scale * scale;
            expect(routing.experts[row * num_used + i] == expert, "a choice of experts", "every build");
            expect(std::abs(routing.weights[row * num_used + i] - weight) < 1e-4 * (1.0 + std::abs(weight)),
                   "an expert's weight", "every build");
        }
    }
}

// A packed weight of some layer with its memory: dense, or panels of some format.
struct PackedLinear {
    std::vector<float> weight;
    std::unique_ptr<char, Free> bytes;
    quire::Linear linear;

    // `panel_variant`: bit 0 selects the format of panels, bit 1 the arithmetic.
    PackedLinear(quire::Packing packing, int64_t num_out, int64_t num_in, int panel_variant = pick(0, 3)) {
        if (packing == quire::kPanels) {
            pack_panels(num_out, num_in, panel_variant % 2, panel_variant / 2);
            return;
        }
        weight = random_normals<float>(static_cast<size_t>(num_out * num_in));
        const quire::MatmulKernels& matmul = quire::active_matmul(static_cast<quire::WeightType>(packing));
        const size_t size = static_cast<size_t>(matmul.packed_bytes(num_out, num_in));
        bytes.reset(static_cast<char*>(std::aligned_alloc(64, (size + 63) / 64 * 64)));
        for (float& one : weight) one *= 0.1f;
        matmul.pack({weight.data(), num_out, num_in, bytes.get(), 2});
        linear = {packing, 0, 0, 0, bytes.get(), nullptr, num_in, num_out};
    }

    // Packs panels with codes in groups of 32.
    void pack_panels(int64_t num_out, int64_t num_in, bool has_few_bits, int64_t arithmetic) {
        const auto format = has_few_bits ? quire::Format::int4 : quire::Format::q8_0;
        PackedPanels packed_panels({format, num_out, num_in, 32}, true);
        bytes = std::move(packed_panels.panels);
        linear = {quire::kPanels, static_cast<int64_t>(format), arithmetic, 32, bytes.get(), nullptr, num_in, num_out};
    }
};

// The weights of a layer, with a random choice of the features of model families.
struct RandomLayer {
    std::vector<PackedLinear> packed, experts;
    std::vector<quire::Linear> gate_up, down;
    std::unique_ptr<RandomRecurrent> recurrent;  // instead of attention, or null
    quire::Layer layer = {};

    // `is_shared`: the second layer uses the keys and values of the first.
    RandomLayer(quire::Packing type, const quire::ForwardCall& call, int64_t kv_heads, int64_t head_size, int64_t mlp_size,
              const float* ones, bool is_shared, int64_t number) {
        const bool shares = is_shared && number == 1;
        const int64_t hidden = call.hidden_size, query = call.num_heads * head_size, kv = kv_heads * head_size;
        const auto some = [ones] { return pick(0, 1) ? ones : nullptr; };
        const bool has_mixture = pick(0, 1), has_dense = !has_mixture || pick(0, 1), has_values = pick(0, 2) > 0;
        const auto linear = [&](int64_t num_out, int64_t num_in) {
            packed.emplace_back(type, num_out, num_in);
            return packed.back().linear;
        };
        layer.input_norm = some(), layer.attention_norm = some(), layer.mlp_norm = some(), layer.after_norm = some();
        layer.query_norm = some(), layer.key_norm = some(), layer.value_norm = some(), layer.sinks = some();
        if (!is_shared && pick(0, 2) == 0) {
            recurrent = std::make_unique<RandomRecurrent>(hidden, type == quire::kPanels ? 32 : 1);
            layer.recurrent = recurrent->layer;
            layer.qkv[0] = linear(layer.recurrent.in_size, hidden);
            layer.out = linear(hidden, layer.recurrent.out_size);
        } else {
            layer.qkv[0] = linear(query, hidden);
            if (!shares) layer.qkv[1] = linear((has_values ? 2 : 1) * kv, hidden);
            if (pick(0, 1)) layer.has_gate = 1, layer.qkv[2] = linear(query, hidden);
            layer.out = linear(hidden, query);
        }
        if (has_dense) {
            layer.gate_up[0] = linear(mlp_size, hidden), layer.gate_up[1] = linear(mlp_size, hidden);
            layer.down = linear(hidden, mlp_size);
        }
        if (has_mixture) add_experts(type, hidden, mlp_size, ones);
        if (call.per_layer_size > 0)
            layer.per_layer = {linear(call.per_layer_size, hidden), linear(hidden, call.per_layer_size), some()};
        layer.window = pick(0, 1) ? -1 : pick(1, 9);
        layer.num_kv_heads = kv_heads, layer.head_size = head_size, layer.intermediate_size = has_dense ? mlp_size : 0;
        layer.has_kv = !shares, layer.has_values = has_values, layer.rope = number, layer.number = number;
        const int64_t kind = pick(0, 2);
        layer.query_span = kind == 0 ? 0 : kind == 1 ? head_size : query;
        layer.key_span = kind == 0 ? 0 : kind == 1 ? head_size : kv;
        layer.scale = pick(0, 1) ? 1.0 : 0.5;
    }

    void add_experts(quire::Packing type, int64_t hidden, int64_t mlp_size, const float* ones) {
        const auto some = [ones] { return pick(0, 1) ? ones : nullptr; };
        const int64_t count = pick(1, 9), num_used = pick(1, int(count));
        const int panel_variant = pick(0, 3);
        for (int64_t i = 0; i < 3 * count; ++i)
            experts.emplace_back(type, i % 3 < 2 ? mlp_size : hidden, i % 3 < 2 ? hidden : mlp_size, panel_variant);
        for (int64_t i = 0; i < 3 * count; ++i)
            (i % 3 < 2 ? gate_up : down).push_back(experts[static_cast<size_t>(i)].linear);
        packed.emplace_back(quire::kFloat32, count, hidden);
        layer.mixture = {packed.back().linear, some(), some(), some(), some(), some(), gate_up.data(), down.data(),
                         count, num_used, mlp_size, pick(0, 1), pick(0, 1), some(), some(), 1e-6, 1.5};
    }
};

// Two layers over one block, with buffers of exactly their size; rows are processed in chunks of three.
void test_decoder() {
    const auto type = static_cast<quire::Packing>(pick(0, 2));
    quire::ForwardCall call = {};
    const int64_t heads = call.num_heads = 4, rows = pick(1, 16), block = 16;
    const int64_t hidden = call.hidden_size = type == quire::kPanels ? 32 * pick(1, 3) : pick(10, 90);
    const int64_t mlp_size = type == quire::kPanels ? 32 * pick(1, 3) : pick(10, 90);
    const int64_t per_layer = call.per_layer_size = pick(0, 1) ? 0 : type == quire::kPanels ? 32 : pick(10, 40);
    const bool is_shared = pick(0, 2) == 0;
    const int64_t kv_heads[] = {2, is_shared ? 2 : 1}, first_head = 8 * pick(4, 8);
    const int64_t head_sizes[] = {first_head, is_shared ? first_head : 8 * pick(4, 8)};
    const int64_t max_head = std::max(head_sizes[0], head_sizes[1]), query = heads * max_head, kv = 2 * max_head;
    auto floats = [](int64_t count) { return random_normals<float>(static_cast<size_t>(count)); };
    const std::vector<float> ones = floats(std::max({hidden, query, per_layer, int64_t{9}}));
    std::vector<RandomLayer> random_layers;
    std::vector<quire::Layer> layers;
    for (int64_t i = 0; i < 2; ++i)
        random_layers.emplace_back(type, call, kv_heads[i], head_sizes[i], mlp_size, ones.data(), is_shared, i);
    int64_t slot_size = 0, max_in = 2 * query + 2 * kv, max_out = query, max_channels = 0, max_heads = 0;
    for (RandomLayer& layer : random_layers) {
        quire::Recurrent& state = layer.layer.recurrent;
        if (layer.recurrent) {
            state.history_offset += slot_size, state.state_offset += slot_size, slot_size += layer.recurrent->slot_size;
            max_in = std::max(max_in, state.in_size), max_out = std::max(max_out, state.out_size);
            max_channels = std::max(max_channels, state.num_channels), max_heads = std::max(max_heads, state.num_heads);
        }
        layers.push_back(layer.layer);
    }
    const int64_t vocabulary = pick(2, 50), num_logit_rows = pick(0, int(2 * rows)), num_sampled = pick(0, int(num_logit_rows));
    std::vector<PackedLinear> packed;
    packed.emplace_back(type, vocabulary, hidden);
    packed.emplace_back(type, vocabulary, hidden);
    if (per_layer > 0) {
        packed.emplace_back(type, vocabulary, 2 * per_layer);
        packed.emplace_back(type, 2 * per_layer, hidden);
        call.per_layer_embedding = packed[2].linear, call.per_layer_projection = packed[3].linear;
        call.per_layer_norm = ones.data();
        call.per_layer_scale = 2.0, call.projection_scale = 0.5, call.per_layer_sum_scale = 0.7;
    }
    std::vector<std::vector<float>> kv_buffers(4, std::vector<float>(static_cast<size_t>(2 * kv * block), NAN));
    std::vector<quire::LayerStore> layer_stores;
    for (size_t i = 0; i < 2; ++i) {
        const size_t key_index = is_shared ? 0 : 2 * i;
        const int64_t stride = kv_heads[i] * head_sizes[i] * block;
        layer_stores.push_back({kv_buffers[key_index].data(), kv_buffers[key_index + 1].data(), stride, stride});
    }
    const std::vector<float> frequencies = floats(max_head / 2);
    const std::vector<quire::RopeRule> ropes = {{frequencies.data(), 1.0, head_sizes[0], 0},
                                                {frequencies.data(), 1.5, head_sizes[1], head_sizes[0]}};
    std::vector<int64_t> blocks(static_cast<size_t>(rows), 1), slots, tokens, logit_rows;
    for (int64_t row = 0; row < rows; ++row) slots.push_back(row), tokens.push_back(pick(0, int(vocabulary) - 1));
    for (int64_t i = 0; i < num_logit_rows; ++i) logit_rows.push_back(pick(0, int(rows) - 1));
    std::vector<int64_t> last_rows;  // all rows, or the rows with logits and possibly others
    const bool needs_all = pick(0, 1);
    for (int64_t row = 0; row < rows; ++row)
        if (needs_all || pick(0, 3) == 0 || std::count(logit_rows.begin(), logit_rows.end(), row)) last_rows.push_back(row);
    const int64_t border = pick(0, int(rows) - 1);  // between two sequences, if it is not the first row
    std::vector<int64_t> run_rows = {0, rows};
    const std::vector<int64_t> run_slots = {2, 1};
    if (border > 0) run_rows.insert(run_rows.begin() + 1, border);
    std::vector<float> states(static_cast<size_t>(3 * slot_size));
    std::fill_n(states.begin(), slot_size, NAN);
    const int32_t table = 1, zero = 0, count = static_cast<int32_t>(rows);
    std::vector<quire::TileRow> members(static_cast<size_t>(rows));
    std::vector<quire::QueryTile> tiles(static_cast<size_t>(rows));
    const int64_t max_group_size = is_shared ? 2 : 4;
    const int64_t num_tiles = quire::make_tiles({&zero, &count, &zero, &zero, 1, &table}, int(block),
                                                int(max_group_size), members.data(), tiles.data());
    const int64_t chunk = 3 < rows ? 3 : rows, angles = head_sizes[0] + head_sizes[1], gated_size = std::max(mlp_size, per_layer);
    std::vector<float> residual = floats(rows * hidden), out(residual.size()), delta(residual.size());
    std::vector<float> cos = floats(rows * angles), sin = floats(rows * angles), logit_inputs = floats(num_logit_rows * hidden);
    std::vector<float> logits(static_cast<size_t>(num_logit_rows * vocabulary), NAN);
    std::vector<int64_t> argmax_tokens(static_cast<size_t>(num_sampled), -1);
    std::vector<uint8_t> are_logits_finite(static_cast<size_t>(num_sampled));
    std::vector<float> queries = floats(rows * query), attention_out(size_t(rows * max_out)), qkv = floats(chunk * max_in);
    std::vector<float> gates = floats(rows * query), mixed = floats(chunk * max_channels);
    std::vector<float> rates = floats(chunk * 2 * max_heads);
    std::vector<float> gate_up = floats(chunk * 2 * gated_size), gated = floats(chunk * gated_size);
    std::vector<float> query_scales = floats(rows), per_layers = floats(rows * 2 * per_layer);
    std::vector<uint8_t> is_finite(static_cast<size_t>(rows));
    std::vector<double> seconds(quire::kScan + 1);
    call.embedding = packed[0].linear, call.head = packed[1].linear;
    call.layers = layers.data(), call.stores = layer_stores.data(), call.ropes = ropes.data();
    call.num_layers = call.num_all_layers = call.num_ropes = 2, call.norm = ones.data();
    call.eps = 1e-5, call.scale = 0.2, call.softcap = pick(0, 1) ? 0.0 : 9.0;
    call.embedding_scale = pick(0, 1) ? 1.0 : 2.0, call.added_scale = pick(0, 1) ? 1.0 : 0.5;
    call.logit_scale = pick(0, 1) ? 1.0 : 0.5, call.logit_cap = pick(0, 1) ? 0.0 : 20.0;
    call.query_beta = pick(0, 1) ? 0.0 : 0.1, call.query_origin = 4.0, call.gate = pick(0, 2);
    call.angles_size = angles, call.max_head_size = max_head, call.max_group_size = max_group_size;
    call.kv_type = 0, call.block_size = block;
    call.tokens = tokens.data(), call.positions = slots.data(), call.blocks = blocks.data(), call.slots = slots.data();
    call.tables = &table, call.members = members.data(), call.tiles = tiles.data(), call.wanted = logit_rows.data();
    call.needed = last_rows.data(), call.num_needed = static_cast<int64_t>(last_rows.size());
    call.num_tiles = num_tiles, call.num_rows = rows, call.num_wanted = num_logit_rows, call.num_sampled = num_sampled;
    call.num_threads = 2;
    call.states = states.data(), call.slot_size = slot_size, call.run_rows = run_rows.data();
    call.run_slots = run_slots.data(), call.num_runs = static_cast<int64_t>(run_rows.size()) - 1;
    call.gates = gates.data(), call.mixed = mixed.data(), call.rates = rates.data();
    call.hidden = out.data(), call.logits = logits.data(), call.argmax_tokens = argmax_tokens.data();
    call.are_logits_finite = are_logits_finite.data(), call.is_finite = is_finite.data();
    call.residual = residual.data(), call.added = delta.data(), call.queries = queries.data();
    call.answers = attention_out.data(), call.cos = cos.data(), call.sin = sin.data(), call.picked = logit_inputs.data();
    call.query_scales = query_scales.data(), call.per_layer = per_layers.data();
    call.qkv = qkv.data(), call.gate_up = gate_up.data(), call.gated = gated.data(), call.chunk_rows = 3;
    call.seconds = pick(0, 1) ? seconds.data() : nullptr;
    quire::compute_step(call);
    for (uint8_t flag : is_finite) expect(flag == 1, "decoder", "every build");
    expect(all_finite(out) && all_finite(logits), "decoder", "every build");
    for (int64_t i = 0; i < num_sampled; ++i) {
        const float* row = logits.data() + i * vocabulary;
        const bool is_first = std::max_element(row, row + vocabulary) - row == argmax_tokens[static_cast<size_t>(i)];
        expect(is_first && are_logits_finite[static_cast<size_t>(i)] == 1, "the argmax token", "every build");
    }
    tokens[0] = vocabulary;
    bool is_refused = false;
    try {
        quire::compute_step(call);
    } catch (const std::out_of_range&) {
        is_refused = true;
    }
    expect(is_refused, "a token beyond the vocabulary", "every build");
}

std::vector<float> multiply_panels(const quire::Kernels& kernels, const PackedPanels& weight, const std::vector<float>& rows,
                                   int first, int count, quire::ComputeType arithmetic) {
    const quire::PanelShape& shape = weight.shape;
    std::vector<float> out(static_cast<size_t>(count * shape.num_out));
    const int64_t num_bytes = kernels.panels->scratch_bytes(arithmetic, count, shape.num_in);
    std::unique_ptr<char, Free> scratch(
        static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(num_bytes + 63) / 64 * 64)));
    const quire::PanelCall call = {shape, weight.bytes(), rows.data() + first * shape.num_in, shape.num_in, nullptr,
                                   out.data(), shape.num_out, count, scratch.get()};
    quire::panel_product(kernels, arithmetic, call, pick(1, 3));
    return out;
}

// For each format: rows are equal alone and together, and integer products equal those of the portable build.
void test_panels(const quire::Kernels& kernels, quire::Format format) {
    const PackedPanels weight(PackedPanels::any_shape(format));
    const int num_rows = pick(1, pick(0, 3) ? 20 : 250);
    const std::vector<float> rows = random_normals<float>(static_cast<size_t>(num_rows * weight.shape.num_in));
    const int first = pick(0, num_rows - 1), count = pick(1, num_rows - first);
    for (const auto arithmetic : {quire::ComputeType::floating, quire::ComputeType::integer}) {
        if (arithmetic == quire::ComputeType::integer && !quire::is_coded(format)) continue;
        const std::vector<float> all = multiply_panels(kernels, weight, rows, 0, num_rows, arithmetic);
        const std::vector<float> part = multiply_panels(kernels, weight, rows, first, count, arithmetic);
        expect(all_finite(all), "a product of panels", kernels.isa);
        expect(std::memcmp(&all[static_cast<size_t>(first * weight.shape.num_out)], part.data(), part.size() * 4) == 0,
               "a product of panels in a batch", kernels.isa);
        if (arithmetic == quire::ComputeType::integer) {
            const quire::Kernels& base = *quire::kernels_named("portable");
            const std::vector<float> portable = multiply_panels(base, weight, rows, 0, num_rows, arithmetic);
            expect(std::memcmp(all.data(), portable.data(), all.size() * 4) == 0, "portable integers", kernels.isa);
        }
    }
    std::vector<int64_t> outputs = {pick(0, static_cast<int>(weight.shape.num_out) - 1)};
    std::vector<float> unpacked(static_cast<size_t>(weight.shape.num_in));
    quire::panel_unpack(kernels, {weight.shape, weight.bytes(), unpacked.data()},
                        {outputs.data(), 1, weight.shape.num_in}, 1);
    expect(all_finite(unpacked), "rows of panels", kernels.isa);
}

}  // namespace

int main() {
    for (int round = 0; round < 60; ++round) {
        if (round % 4 == 0) test_sampling();
        test_expert_routing();
        test_decoder();
    }
    std::printf("sampling and layers: clean\n");
    for (const char* isa : {"portable", "avx2", "avxvnni", "avx512", "avx512vnni", "neondot"}) {
        const quire::Kernels* kernels = quire::kernels_named(isa);
        if (kernels == nullptr) continue;
        for (int round = 0; round < 15; ++round) {
            test_attention(*kernels);
            test_rope(*kernels);
            test_rowwise_kernels(*kernels);
            for (int time = 0; time < 4; ++time) test_recurrent(*kernels);
            test_products(*kernels->float32, isa, kFloat32Tolerance);
            test_products(*kernels->bfloat16, isa, kBfloat16Tolerance);
            for (int format = 0; format < static_cast<int>(quire::Format::count); ++format)
                test_panels(*kernels, static_cast<quire::Format>(format));
        }
        std::printf("%s: clean\n", kernels->isa);
    }
    if (quire::has_amx()) {
        for (int round = 0; round < 15; ++round)
            test_products(quire::active_matmul(quire::WeightType::bfloat16), "amx", kBfloat16Tolerance);
        std::printf("amx: clean\n");
    }
    return 0;
}
