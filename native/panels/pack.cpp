// Packs the blocks of a file into panels, without converting values. Compiled once, for all instruction sets.
#include "panels/pack.hpp"

#include <cstring>

namespace quire {
namespace {

// The codes and factors of one block of one output, unpacked from the file.
struct Block {
    uint8_t codes[kSuper];
    uint16_t scale, minimum;    // fp16
    uint8_t factors[16], minima[8];
};

uint16_t load_half(const uint8_t* from) { return static_cast<uint16_t>(from[0] | from[1] << 8); }

void read_nibbles(const uint8_t* from, uint8_t* codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = from[i] & 15;
        codes[i + 16] = from[i] >> 4;
    }
}

// Unpacks 32 bytes: the 32 low nibbles, then the 32 high nibbles.
void read_halves(const uint8_t* from, uint8_t* codes) {
    for (int i = 0; i < 32; ++i) {
        codes[i] = from[i] & 15;
        codes[i + 32] = from[i] >> 4;
    }
}

void add_fifth_bits(const uint8_t* from, uint8_t* codes) {
    for (int i = 0; i < 32; ++i) codes[i] |= static_cast<uint8_t>((from[i / 8] >> i % 8 & 1) << 4);
}

// Unpacks eight scales and eight minima of six bits each from twelve bytes.
void read_six_bits(const uint8_t* from, Block& block) {
    for (int i = 0; i < 4; ++i) {
        block.factors[i] = from[i] & 63;
        block.minima[i] = from[i + 4] & 63;
        block.factors[i + 4] = static_cast<uint8_t>((from[i + 8] & 15) | (from[i] >> 6) << 4);
        block.minima[i + 4] = static_cast<uint8_t>(from[i + 8] >> 4 | (from[i + 4] >> 6) << 4);
    }
}

void read_q4_k(const uint8_t* from, Block& block) {
    block.scale = load_half(from);
    block.minimum = load_half(from + 2);
    read_six_bits(from + 4, block);
    for (int quarter = 0; quarter < 4; ++quarter) read_halves(from + 16 + 32 * quarter, block.codes + 64 * quarter);
}

void read_q5_k(const uint8_t* from, Block& block) {
    block.scale = load_half(from);
    block.minimum = load_half(from + 2);
    read_six_bits(from + 4, block);
    for (int quarter = 0; quarter < 4; ++quarter) read_halves(from + 48 + 32 * quarter, block.codes + 64 * quarter);
    for (int group = 0; group < 8; ++group)
        for (int i = 0; i < kGroupInputs; ++i)
            block.codes[group * kGroupInputs + i] |= static_cast<uint8_t>((from[16 + i] >> group & 1) << 4);
}

void read_q6_k(const uint8_t* from, Block& block) {
    for (int half = 0; half < 2; ++half)
        for (int quarter = 0; quarter < 4; ++quarter) {
            const uint8_t *low = from + half * 64 + quarter % 2 * 32, *high = from + 128 + half * 32;
            uint8_t* codes = block.codes + half * 128 + quarter * 32;
            for (int i = 0; i < 32; ++i)
                codes[i] = static_cast<uint8_t>((low[i] >> quarter / 2 * 4 & 15) | (high[i] >> quarter * 2 & 3) << 4);
        }
    std::memcpy(block.factors, from + 192, 16);
    block.scale = load_half(from + 208);
}

void read_iq4_xs(const uint8_t* from, Block& block) {
    block.scale = load_half(from);
    for (int group = 0; group < 8; ++group) {
        const int low = from[4 + group / 2] >> group % 2 * 4 & 15, high = load_half(from + 2) >> 2 * group & 3;
        block.factors[group] = static_cast<uint8_t>((low | high << 4) - 32);
        read_nibbles(from + 8 + 16 * group, block.codes + kGroupInputs * group);
    }
}

void read_block(Format format, const uint8_t* from, Block& block) {
    switch (format) {
        case Format::q8_0:
            for (int i = 0; i < kGroupInputs; ++i) block.codes[i] = from[2 + i] ^ 0x80;
            break;
        case Format::q4_0:
        case Format::iq4_nl: read_nibbles(from + 2, block.codes); break;
        case Format::q4_1: read_nibbles(from + 4, block.codes); break;
        case Format::mxfp4: read_nibbles(from + 1, block.codes); break;
        case Format::q5_0:
            read_nibbles(from + 6, block.codes);
            add_fifth_bits(from + 2, block.codes);
            break;
        case Format::q5_1:
            read_nibbles(from + 8, block.codes);
            add_fifth_bits(from + 4, block.codes);
            break;
        case Format::q4_k: return read_q4_k(from, block);
        case Format::q5_k: return read_q5_k(from, block);
        case Format::q6_k: return read_q6_k(from, block);
        case Format::iq4_xs: return read_iq4_xs(from, block);
        default: return;
    }
    block.scale = format == Format::mxfp4 ? from[0] : load_half(from);
    block.minimum = static_cast<uint16_t>(load_half(from + 2) ^ 0x8000);  // added in files, subtracted by kernels
}

// Writes the 32 codes of one lane into a group; writes to each cache line once.
template <int bits>
void put_codes(uint8_t* group, int lane, const uint8_t* codes) {
    uint32_t words[8];
    std::memcpy(words, codes, sizeof words);
    const auto put = [&](int line, uint32_t word) { std::memcpy(group + line * kCacheLineBytes + lane * 4, &word, 4); };
    if constexpr (bits == 8) {
        for (int k = 0; k < 8; ++k) put(k, words[k]);
        return;
    }
    for (int k = 0; k < 4; ++k) put(k, (words[k] & 0x0F0F0F0Fu) | (words[k + 4] & 0x0F0F0F0Fu) << 4);
    uint32_t high[2] = {0, 0};
    for (int k = 0; k < 8; ++k) {
        if constexpr (bits == 5) high[0] |= (words[k] >> 4 & 0x01010101u) << k;
        if constexpr (bits == 6) high[k / 4] |= (words[k] >> 4 & 0x03030303u) << k % 4 * 2;
    }
    for (int line = 4; line < bits; ++line) put(line, high[line - 4]);
}

void put_half(uint8_t* target, int lane, uint16_t half) { std::memcpy(target + 2 * lane, &half, 2); }

void put_scales(Scales scales, uint8_t* target, int lane, const Block& block) {
    if (scales == Scales::power) {
        target[lane] = static_cast<uint8_t>(block.scale);
        return;
    }
    put_half(target, lane, block.scale);
    target += 2 * kWidth;
    if (scales == Scales::half_minimum || scales == Scales::super_minimum) {
        put_half(target, lane, block.minimum);
        target += 2 * kWidth;
    }
    if (!is_super(scales)) return;
    const int num_factors = scales == Scales::super_halves ? 16 : 8;
    for (int i = 0; i < num_factors; ++i) target[i * kWidth + lane] = block.factors[i];
    if (scales == Scales::super_minimum)
        for (int i = 0; i < 8; ++i) target[(8 + i) * kWidth + lane] = block.minima[i];
}

// Packs the rows of a file into the lanes of a panel, block by block for all lanes, so that the written cache lines
// stay in the L1 cache until they are complete.
template <Format format>
void pack_blocks(const PanelShape& shape, const uint8_t* rows, int64_t row_bytes, uint8_t* panel, int num_lanes) {
    constexpr FormatTraits traits = traits_of(format);
    constexpr int num_groups = traits.file_inputs / kGroupInputs;
    const int64_t group_bytes = shape.group_bytes();
    uint8_t* codes = panel + shape.codes_offset();
    Block block = {};
    for (int64_t index = 0; index < shape.num_in / traits.file_inputs; ++index)
        for (int lane = 0; lane < num_lanes; ++lane) {
            read_block(format, rows + lane * row_bytes + index * traits.file_bytes, block);
            put_scales(traits.scales, panel + index * scale_step(traits.scales), lane, block);
            for (int group = 0; group < num_groups; ++group)
                put_codes<traits.code_bits>(codes + (index * num_groups + group) * group_bytes, lane,
                                            block.codes + group * kGroupInputs);
        }
}

typedef void (*PackBlocks)(const PanelShape&, const uint8_t* rows, int64_t row_bytes, uint8_t* panel, int num_lanes);

// Returns null for a format that is not stored in blocks.
PackBlocks pack_blocks_of(Format format) {
    switch (format) {
        case Format::q8_0: return pack_blocks<Format::q8_0>;
        case Format::q4_0: return pack_blocks<Format::q4_0>;
        case Format::q4_1: return pack_blocks<Format::q4_1>;
        case Format::q5_0: return pack_blocks<Format::q5_0>;
        case Format::q5_1: return pack_blocks<Format::q5_1>;
        case Format::q4_k: return pack_blocks<Format::q4_k>;
        case Format::q5_k: return pack_blocks<Format::q5_k>;
        case Format::q6_k: return pack_blocks<Format::q6_k>;
        case Format::iq4_nl: return pack_blocks<Format::iq4_nl>;
        case Format::iq4_xs: return pack_blocks<Format::iq4_xs>;
        case Format::mxfp4: return pack_blocks<Format::mxfp4>;
        default: return nullptr;
    }
}

// Packs values of `size` bytes; for bf16, `size` is a pair of inputs.
template <int size>
void pack_numbers(const uint8_t* row, int64_t count, uint8_t* to) {
    for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * kWidth * size, row + i * size, size);
}

void pack_dense(const PanelShape& shape, const uint8_t* row, uint8_t* panel, int lane) {
    uint8_t* codes = panel + shape.codes_offset();
    switch (shape.format) {
        case Format::f32: return pack_numbers<4>(row, shape.num_in, codes + lane * 4);
        case Format::f16: return pack_numbers<2>(row, shape.num_in, codes + lane * 2);
        case Format::bf16:
            pack_numbers<4>(row, shape.num_in / 2, codes + lane * 4);
            if (shape.num_in % 2 == 1)
                std::memcpy(codes + (shape.num_in / 2 * kWidth + lane) * 4, row + (shape.num_in - 1) * 2, 2);
            return;
        default: return pack_numbers<1>(row, shape.num_in, codes + lane);
    }
}

void pack_external(const PanelShape& shape, const ExternalScales& external, int64_t output, uint8_t* panel, int lane) {
    const int64_t num_scales = shape.num_scales();
    for (int64_t index = 0; index < num_scales; ++index) {
        std::memcpy(panel + (index * kWidth + lane) * 4, external.scales + output * num_scales + index, 4);
        if (shape.traits().scales == Scales::external_zero_point)
            panel[(4 * num_scales + index) * kWidth + lane] = external.zeros[output * num_scales + index];
    }
}

// Packs one output into its lane. Files of formats with external scales have one code per byte.
void pack_row(const PanelPackCall& call, int64_t output, uint8_t* panel, int lane) {
    const PanelShape& shape = call.shape;
    const uint8_t* row = call.rows + output * call.row_bytes;
    if (is_external(shape.traits().scales)) pack_external(shape, call.external, output, panel, lane);
    if (!is_coded(shape.format)) return pack_dense(shape, row, panel, lane);
    const auto put = shape.traits().code_bits == 4 ? put_codes<4> : put_codes<8>;
    for (int64_t group = 0; group < shape.num_in / kGroupInputs; ++group)
        put(panel + shape.codes_offset() + group * shape.group_bytes(), lane, row + group * kGroupInputs);
}

}  // namespace

void pack_panels(const PanelPackCall& call) {
    const PanelShape& shape = call.shape;
    const PackBlocks pack_blocks = pack_blocks_of(shape.format);
    // Dynamic scheduling, so that a thread whose core runs another program delays few panels.
#pragma omp parallel for schedule(dynamic, 4) num_threads(call.num_threads)
    for (int64_t panel_index = 0; panel_index < shape.num_panels(); ++panel_index) {
        uint8_t* panel = call.panels + panel_index * shape.panel_bytes();
        std::memset(panel, 0, static_cast<size_t>(shape.panel_bytes()));
        const int64_t first = panel_index * kWidth, remaining = shape.num_out - first;
        const int num_lanes = remaining < kWidth ? static_cast<int>(remaining) : kWidth;
        if (pack_blocks != nullptr) {
            pack_blocks(shape, call.rows + first * call.row_bytes, call.row_bytes, panel, num_lanes);
            continue;
        }
        for (int lane = 0; lane < num_lanes; ++lane) pack_row(call, first + lane, panel, lane);
    }
}

}  // namespace quire
