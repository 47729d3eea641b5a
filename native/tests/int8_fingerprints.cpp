// Prints digests of integer products, one line per supported build, coded format and case:
//
//     avx2 q4_k 3 8c0d5a6b1f2e3d4c
//
// The digests are equal on all processors; `make native-neon` compares them between x86 and ARM. All inputs come from
// an exact generator in this file, so that they do not depend on libraries.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "builds/dispatch.hpp"
#include "panels/panel_calls.hpp"
#include "panels/pack.hpp"
#include "team/operations.hpp"

namespace {

using quire::Format;

constexpr const char* kNames[] = {"f32",  "f16",  "bf16", "q8_0",   "q4_0",   "q4_1",  "q5_0", "q5_1", "q4_k",
                                  "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4", "int4", "int8", "fp8_e4m3"};
static_assert(sizeof kNames / sizeof kNames[0] == static_cast<size_t>(Format::count));

struct Dice {
    uint64_t state;

    uint32_t next() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<uint32_t>(state >> 33);
    }
    int pick(int low, int high) { return low + static_cast<int>(next() % static_cast<uint32_t>(high - low + 1)); }
    // A number from -1 to 1 in steps of 2^-20 (exact in float32), times a power of two.
    float number(int exponent) {
        const float unit = static_cast<float>(pick(-(1 << 20), 1 << 20)) * 0x1p-20f;
        return exponent < 0 ? unit / static_cast<float>(1 << -exponent) : unit * static_cast<float>(1 << exponent);
    }
};

struct Free {
    void operator()(char* memory) const { std::free(memory); }
};
typedef std::unique_ptr<char, Free> Memory;

Memory allocate_lines(int64_t num_bytes) {
    return Memory(static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(quire::pad_to_line(num_bytes)))));
}

// A byte of the largest codes: all bits set, or for table formats, twice the 4-bit code with the largest value.
uint8_t largest_codes(Format format) {
    if (quire::traits_of(format).codes == quire::Codes::linear) return 0xFF;
    int best = 0;
    for (int code = 0; code < 16; ++code)
        if (quire::table_of(format)[code] == quire::largest_code(format)) best = code;
    return static_cast<uint8_t>(best << 4 | best);
}

// Every fourth case is at the limits: all codes are the largest, all inputs 127 or -127.
struct Case {
    quire::PanelShape shape;
    Memory panels;
    int num_rows;
    std::vector<float> rows;

    Case(Format format, Dice dice, bool is_extreme) : shape{format, dice.pick(1, 70), 0, 32 * dice.pick(1, 4)} {
        const quire::FormatTraits& traits = shape.traits();
        const bool has_external_scales = quire::is_external(traits.scales);
        shape.num_in = (has_external_scales ? quire::kGroupInputs : traits.file_inputs) * dice.pick(1, 4);
        const int64_t row_bytes = shape.num_in / traits.file_inputs * traits.file_bytes;
        std::vector<uint8_t> bytes(static_cast<size_t>(row_bytes * shape.num_out));
        const int mask = has_external_scales ? (1 << traits.code_bits) - 1 : 0xDB;  // no fp16 exponent of all ones
        for (uint8_t& value : bytes) value = static_cast<uint8_t>(dice.pick(0, 255) & mask);
        const size_t num_scales = static_cast<size_t>(shape.num_out * shape.num_scales());
        std::vector<float> scales(num_scales);
        std::vector<uint8_t> zeros(num_scales);
        for (float& value : scales) value = dice.number(-6);
        for (uint8_t& value : zeros) value = static_cast<uint8_t>(dice.pick(0, (1 << traits.code_bits) - 1));
        panels = allocate_lines(shape.packed_bytes());
        quire::pack_panels({shape, bytes.data(), row_bytes, {scales.data(), zeros.data()},
                            reinterpret_cast<uint8_t*>(panels.get()), 1});
        for (int64_t panel = 0; is_extreme && panel < shape.num_panels(); ++panel)
            std::memset(panels.get() + panel * shape.panel_bytes() + shape.codes_offset(), largest_codes(format),
                        static_cast<size_t>(shape.num_in / quire::kGroupInputs * shape.group_bytes()));
        num_rows = dice.pick(1, 40);
        rows.resize(static_cast<size_t>(num_rows * shape.num_in));
        for (int row = 0; row < num_rows; ++row) {
            const int exponent = dice.pick(-20, 20);
            const bool has_both_signs = dice.pick(0, 1) == 1;
            for (int64_t i = 0; i < shape.num_in; ++i) {
                float& input = rows[static_cast<size_t>(row * shape.num_in + i)];
                input = dice.pick(0, 9) ? dice.number(exponent) : 0.0f;
                if (is_extreme) input = has_both_signs && dice.pick(0, 1) ? -3.0f : 3.0f;
            }
        }
    }

    uint64_t digest(const quire::Kernels& kernels) const {
        std::vector<float> out(static_cast<size_t>(num_rows * shape.num_out));
        const Memory scratch =
            allocate_lines(kernels.panels->scratch_bytes(quire::ComputeType::integer, num_rows, shape.num_in) + quire::kCacheLineBytes);
        quire::panel_product(kernels, quire::ComputeType::integer,
                             {shape, reinterpret_cast<const uint8_t*>(panels.get()), rows.data(), shape.num_in, nullptr,
                              out.data(), shape.num_out, num_rows, scratch.get()}, 1);
        uint64_t hash = 14695981039346656037u;
        const auto* bytes = reinterpret_cast<const uint8_t*>(out.data());
        for (size_t i = 0; i < 4 * out.size(); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
        return hash;
    }
};

}  // namespace

int main(int count, char** arguments) {
    const int num_cases = count > 1 ? std::atoi(arguments[1]) : 10;
    for (const char* isa : {"portable", "avx2", "avxvnni", "avx512", "avx512vnni", "neondot"}) {
        const quire::Kernels* kernels = quire::kernels_named(isa);
        if (kernels == nullptr) continue;
        for (int format = 0; format < static_cast<int>(Format::count); ++format) {
            if (!quire::is_coded(static_cast<Format>(format))) continue;
            for (int number = 0; number < num_cases; ++number) {
                const Case value(static_cast<Format>(format), {static_cast<uint64_t>(1000 * format + number + 1)},
                               number % 4 == 0);
                std::printf("%s %s %d %016llx\n", isa, kNames[format], number,
                            static_cast<unsigned long long>(value.digest(*kernels)));
            }
        }
    }
    return 0;
}
