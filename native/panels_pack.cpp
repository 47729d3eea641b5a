// From blocks of a file into panels: every number once, none converted. Compiled once, for any processor.
#include "panels_pack.hpp"

#include <cstring>

namespace quire {
namespace {

// The codes and factors of one output's block, as its file has them.
struct Block {
    uint8_t codes[kSuper];
    uint16_t scale, minimum;    // fp16
    uint8_t factors[16], minima[8];
};

uint16_t half_at(const uint8_t* from) { return static_cast<uint16_t>(from[0] | from[1] << 8); }

void read_nibbles(const uint8_t* from, uint8_t* codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = from[i] & 15;
        codes[i + 16] = from[i] >> 4;
    }
}

void add_fifth_bits(const uint8_t* from, uint8_t* codes) {
    for (int i = 0; i < 32; ++i) codes[i] |= static_cast<uint8_t>((from[i / 8] >> i % 8 & 1) << 4);
}

// Six bits each of eight scales and eight minima in twelve bytes.
void read_six_bits(const uint8_t* from, Block& block) {
    for (int i = 0; i < 4; ++i) {
        block.factors[i] = from[i] & 63;
        block.minima[i] = from[i + 4] & 63;
        block.factors[i + 4] = static_cast<uint8_t>((from[i + 8] & 15) | (from[i] >> 6) << 4);
        block.minima[i + 4] = static_cast<uint8_t>(from[i + 8] >> 4 | (from[i + 4] >> 6) << 4);
    }
}

void read_q4_k(const uint8_t* from, Block& block) {
    block.scale = half_at(from);
    block.minimum = half_at(from + 2);
    read_six_bits(from + 4, block);
    for (int i = 0; i < kSuper; ++i) block.codes[i] = from[16 + i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15;
}

void read_q5_k(const uint8_t* from, Block& block) {
    block.scale = half_at(from);
    block.minimum = half_at(from + 2);
    read_six_bits(from + 4, block);
    for (int i = 0; i < kSuper; ++i) {
        const int low = from[48 + i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15;
        block.codes[i] = static_cast<uint8_t>(low | (from[16 + i % 32] >> i / 32 & 1) << 4);
    }
}

void read_q6_k(const uint8_t* from, Block& block) {
    for (int i = 0; i < kSuper; ++i) {
        const int half = i / 128, quarter = i / 32 % 4;
        const int low = from[half * 64 + i % 64] >> quarter / 2 * 4 & 15;
        block.codes[i] = static_cast<uint8_t>(low | (from[128 + half * 32 + i % 32] >> quarter * 2 & 3) << 4);
    }
    std::memcpy(block.factors, from + 192, 16);
    block.scale = half_at(from + 208);
}

void read_iq4_xs(const uint8_t* from, Block& block) {
    block.scale = half_at(from);
    for (int group = 0; group < 8; ++group) {
        const int low = from[4 + group / 2] >> group % 2 * 4 & 15, high = half_at(from + 2) >> 2 * group & 3;
        block.factors[group] = static_cast<uint8_t>((low | high << 4) - 32);
        read_nibbles(from + 8 + 16 * group, block.codes + kGroup * group);
    }
}

void read_block(Format format, const uint8_t* from, Block& block) {
    switch (format) {
        case Format::q8_0:
            for (int i = 0; i < kGroup; ++i) block.codes[i] = from[2 + i] ^ 0x80;
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
    block.scale = format == Format::mxfp4 ? from[0] : half_at(from);
    block.minimum = static_cast<uint16_t>(half_at(from + 2) ^ 0x8000);  // these files add what others subtract
}

// One lane's 32 codes. The panel was zero before.
void put_codes(int bits, uint8_t* group, int lane, const uint8_t* codes) {
    const auto place = [&](int vector, uint32_t word) {
        uint32_t there;
        uint8_t* at = group + vector * kLine + lane * 4;
        std::memcpy(&there, at, 4);
        there |= word;
        std::memcpy(at, &there, 4);
    };
    for (int k = 0; k < 8; ++k) {
        uint32_t word;
        std::memcpy(&word, codes + 4 * k, 4);
        if (bits == 8) {
            place(k, word);
            continue;
        }
        place(k % 4, (word & 0x0F0F0F0Fu) << k / 4 * 4);
        if (bits == 5) place(4, (word >> 4 & 0x01010101u) << k);
        if (bits == 6) place(4 + k / 4, (word >> 4 & 0x03030303u) << k % 4 * 2);
    }
}

void put_half(uint8_t* at, int lane, uint16_t number) { std::memcpy(at + 2 * lane, &number, 2); }

void put_scales(Scales scales, uint8_t* at, int lane, const Block& block) {
    if (scales == Scales::power) {
        at[lane] = static_cast<uint8_t>(block.scale);
        return;
    }
    put_half(at, lane, block.scale);
    at += 2 * kWidth;
    if (scales == Scales::half_minimum || scales == Scales::super_minimum) {
        put_half(at, lane, block.minimum);
        at += 2 * kWidth;
    }
    if (!is_super(scales)) return;
    const int num_factors = scales == Scales::super_halves ? 16 : 8;
    for (int i = 0; i < num_factors; ++i) at[i * kWidth + lane] = block.factors[i];
    if (scales == Scales::super_minimum)
        for (int i = 0; i < 8; ++i) at[(8 + i) * kWidth + lane] = block.minima[i];
}

void pack_coded(const PanelShape& shape, const uint8_t* row, uint8_t* panel, int lane) {
    const FormatTraits& traits = shape.traits();
    Block block = {};
    for (int64_t at = 0; at < shape.num_in / traits.file_inputs; ++at) {
        read_block(shape.format, row + at * traits.file_bytes, block);
        put_scales(traits.scales, panel + at * scale_step(traits.scales), lane, block);
        const int64_t first = at * (traits.file_inputs / kGroup);
        for (int group = 0; group < traits.file_inputs / kGroup; ++group)
            put_codes(traits.code_bits, panel + shape.codes_at() + (first + group) * shape.group_bytes(), lane,
                      block.codes + group * kGroup);
    }
}

void pack_dense(const PanelShape& shape, const uint8_t* row, uint8_t* panel, int lane) {
    const int64_t size = shape.traits().file_bytes;
    uint8_t* to = panel + shape.codes_at() + lane * size;
    for (int64_t i = 0; i < shape.num_in; ++i) std::memcpy(to + i * kWidth * size, row + i * size, static_cast<size_t>(size));
}

void pack_given(const PanelShape& shape, const GivenScales& given, int64_t output, uint8_t* panel, int lane) {
    const int64_t num_scales = shape.num_scales();
    for (int64_t at = 0; at < num_scales; ++at) {
        std::memcpy(panel + (at * kWidth + lane) * 4, given.scales + output * num_scales + at, 4);
        if (shape.traits().scales == Scales::given_zero)
            panel[(4 * num_scales + at) * kWidth + lane] = given.zeros[output * num_scales + at];
    }
}

// One output into its lane; the file of a given format has one code a byte.
void pack_row(const PanelPackCall& call, int64_t output, uint8_t* panel, int lane) {
    const PanelShape& shape = call.shape;
    const uint8_t* row = call.rows + output * call.row_bytes;
    if (is_given(shape.traits().scales)) pack_given(shape, call.given, output, panel, lane);
    if (!is_coded(shape.format)) return pack_dense(shape, row, panel, lane);
    if (shape.traits().file_inputs > 1) return pack_coded(shape, row, panel, lane);
    for (int64_t group = 0; group < shape.num_in / kGroup; ++group)
        put_codes(shape.traits().code_bits, panel + shape.codes_at() + group * shape.group_bytes(), lane,
                  row + group * kGroup);
}

}  // namespace

void pack_panels(const PanelPackCall& call) {
    const PanelShape& shape = call.shape;
#pragma omp parallel for schedule(static) num_threads(call.num_threads)
    for (int64_t at = 0; at < shape.num_panels(); ++at) {
        uint8_t* panel = call.panels + at * shape.panel_bytes();
        std::memset(panel, 0, static_cast<size_t>(shape.panel_bytes()));
        const int64_t left = shape.num_out - at * kWidth;
        for (int lane = 0; lane < kWidth && lane < left; ++lane) pack_row(call, at * kWidth + lane, panel, lane);
    }
}

}  // namespace quire
