// The kernels between a step's matrix products, each in one pass: residual and norm, RoPE and the write to the KV
// store, gated activation, argmax of logits. Each kernel writes only the outputs named in its call.
//
// Sums over a row run in a fixed order for any number of rows. Remainders are computed like full vectors.
#include "common/row_math.isa.hpp"

namespace quire::QUIRE_ISA {
namespace {

// Iterates over the heads of a row, normalized by a HeadNorm. The factor of a span is computed at its first head.
class NormedHeads {
  public:
    QUIRE_INLINE NormedHeads(const HeadNorm& norm, const float* heads, int size, float eps)
        : norm_(norm), heads_(heads), size_(size), eps_(eps) {}

    QUIRE_INLINE const float* next() {
        const float* head = heads_ + offset_;
        const int64_t weight_index = norm_.span == 0 ? offset_ : offset_ % norm_.span;
        offset_ += size_;
        if (norm_.weight == nullptr) return head;
        if (weight_index == 0 && norm_.span > 0) factor_ = norm_factor(head, norm_.span, eps_);
        for (int i = 0; i < size_; ++i) normed_[i] = norm_.weight[weight_index + i] * (head[i] * factor_);
        return normed_;
    }

  private:
    const HeadNorm& norm_;
    const float* heads_;
    int size_;
    float eps_, factor_ = 1.0f;
    int64_t offset_ = 0;
    float normed_[kMaxHeadSize];
};

// RoPE: rotates a head by the angles of its position.
QUIRE_INLINE void rotate_head(const float* head, const float* cos, const float* sin, int size, float* out) {
    const int half = size / 2;
    for (int i = 0; i < half; ++i) out[i] = head[i] * cos[i] - head[i + half] * sin[i];
    for (int i = half; i < size; ++i) out[i] = head[i] * cos[i] + head[i - half] * sin[i];
}

// Quantizes one head to codes with stride `stride`, so that the largest magnitude becomes 127, and writes the scale.
// Codes are rounded to nearest, ties to even. If a value is not finite, the scale is NaN.
QUIRE_INLINE void write_codes(const float* numbers, int size, int8_t* codes, int64_t stride, char* scale_out) {
    float max_magnitude = 0.0f, differences = 0.0f;
    for (int i = 0; i < size; ++i) {
        const float magnitude = numbers[i] < 0.0f ? -numbers[i] : numbers[i];
        max_magnitude = magnitude > max_magnitude ? magnitude : max_magnitude;
        differences += numbers[i] - numbers[i];
    }
    const bool is_nonzero = max_magnitude > 1e-30f && differences == 0.0f;
    const float factor = is_nonzero ? 127.0f / max_magnitude : 0.0f, round = 12582912.0f;
    const float scale = differences == 0.0f ? (is_nonzero ? max_magnitude / 127.0f : 0.0f) : __builtin_nanf("");
    for (int i = 0; i < size; ++i)
        codes[i * stride] = is_nonzero ? static_cast<int8_t>((numbers[i] * factor + round) - round) : int8_t{0};
    __builtin_memcpy(scale_out, &scale, sizeof scale);
}

// `write_row` for int8: the codes of a head are followed by one scale per slot.
QUIRE_INLINE void write_coded_row(const RopeCall& call, int64_t row, const float* qkv, const float* cos,
                                  const float* sin) {
    const int64_t slot = call.slots[row], size = call.block_size;
    int8_t* keys = static_cast<int8_t*>(call.keys) + call.blocks[row] * call.key_block_stride;
    int8_t* values = static_cast<int8_t*>(call.values) + call.blocks[row] * call.value_block_stride;
    NormedHeads key_heads(call.key_norm, qkv + int64_t{call.num_heads} * call.key_size, call.key_size, call.eps);
    NormedHeads value_heads(call.value_norm, qkv + call.value_offset, call.value_size, call.eps);
    for (int head = 0; head < call.num_kv_heads; ++head) {
        float rotated[kMaxHeadSize];
        rotate_head(key_heads.next(), cos, sin, call.key_size, rotated);
        const float* value = value_heads.next();
        char* key_scales = reinterpret_cast<char*>(keys + size * call.key_size);
        char* value_scales = reinterpret_cast<char*>(values + size * call.value_size);
        write_codes(rotated, call.key_size, keys + slot, size, key_scales + 4 * slot);
        write_codes(value, call.value_size, values + slot * call.value_size, 1, value_scales + 4 * slot);
        keys += size * (call.key_size + 4);
        values += size * (call.value_size + 4);
    }
}

template <typename T>
QUIRE_INLINE void write_row(const RopeCall& call, int64_t row, const float* qkv, const float* cos, const float* sin) {
    const int64_t slot = call.slots[row], size = call.block_size;
    T* keys = static_cast<T*>(call.keys) + call.blocks[row] * call.key_block_stride + slot;
    T* values = static_cast<T*>(call.values) + call.blocks[row] * call.value_block_stride + slot * call.value_size;
    NormedHeads key_heads(call.key_norm, qkv + int64_t{call.num_heads} * call.key_size, call.key_size, call.eps);
    NormedHeads value_heads(call.value_norm, qkv + call.value_offset, call.value_size, call.eps);
    for (int head = 0; head < call.num_kv_heads; ++head) {
        float rotated[kMaxHeadSize];
        rotate_head(key_heads.next(), cos, sin, call.key_size, rotated);
        const float* value = value_heads.next();
        for (int i = 0; i < call.key_size; ++i) put(keys + (int64_t{head} * call.key_size + i) * size, rotated[i]);
        for (int i = 0; i < call.value_size; ++i)
            put(values + head * size * call.value_size + i, value[i]);
    }
}

// Prefetches the keys' memory of a row before its queries are rotated, because this memory is not in the cache and each
// element of a key is in a separate cache line. Attention reads these lines soon after.
QUIRE_INLINE void prefetch_kv_row(const RopeCall& call, int64_t row) {
    const int64_t bytes = call.kv_type == KVType::float32 ? 4 : call.kv_type == KVType::bfloat16 ? 2 : 1;
    const int64_t size = call.block_size, scale_rows = bytes == 1 ? 4 : 0;
    const char* keys = static_cast<const char*>(call.keys) + call.blocks[row] * call.key_block_stride * bytes;
    const int64_t num_keys = call.num_kv_heads * (call.key_size + scale_rows);
    for (int64_t i = 0; i < num_keys; ++i) __builtin_prefetch(keys + (i * size + call.slots[row]) * bytes, 1, 2);
}

// The gated activation function; see Gate.
template <Gate Kind>
QUIRE_INLINE F activation(F x, F up) {
    if constexpr (Kind == Gate::silu) return x * sigmoid(x) * up;
    if constexpr (Kind == Gate::gelu_tanh)
        return x * sigmoid(1.5957691216057308f * fma_of(x * x * x, splat<kLanes>(0.044715f), x)) * up;
    const F limit = splat<kLanes>(7.0f);
    const F clamped = x > limit ? limit : x;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return clamped * sigmoid(1.702f * clamped) * (1.0f + up);
}

template <Gate Kind>
QUIRE_INLINE void gate_elements(const float* gate, const float* up, float* out, int64_t first, int64_t end) {
    int64_t i = first;
    for (; i + kLanes <= end; i += kLanes)
        store(out + i, activation<Kind>(load<kLanes>(gate + i), load<kLanes>(up + i)));
    if (i < end) {
        const int64_t n = end - i;
        store_part(out + i, activation<Kind>(load_part<kLanes>(gate + i, n), load_part<kLanes>(up + i, n)), n);
    }
}

// tanh(x) = 2 sigmoid(2x) - 1. The absolute error of a few 1e-8 is small enough for logits.
QUIRE_INLINE F tanh_of(F x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }

// Returns the largest of some logits; `differences` stays zero if all are finite.
QUIRE_INLINE float max_of_logits(const float* logits, int64_t size, F& differences) {
    F max_lane_values = splat<kLanes>(-__builtin_inff());
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const F v = load<kLanes>(logits + i);
        max_lane_values = v > max_lane_values ? v : max_lane_values;
        differences = differences + (v - v);
    }
    float max_value = max_lanes<kLanes>(max_lane_values);
    for (; i < size; ++i) {
        max_value = logits[i] > max_value ? logits[i] : max_value;
        differences = differences + (logits[i] - logits[i]);
    }
    return max_value;
}

}  // namespace

void norm_row(const NormCall& call, int64_t row) {
    float* residual = call.residual + row * call.size;
    float* out = call.out + row * call.size;
    if (call.delta != nullptr) {
        const float* delta = call.delta + row * call.size;
        for (int64_t i = 0; i < call.size; ++i) residual[i] += delta[i];
    }
    if (call.weight == nullptr) {
        for (int64_t i = 0; i < call.size; ++i) out[i] = residual[i];
        return;
    }
    const float factor = norm_factor(residual, call.size, call.eps);
    for (int64_t i = 0; i < call.size; ++i) out[i] = call.weight[i] * (residual[i] * factor);
}

void add_residual_row(const ResidualCall& call, int64_t row) {
    float* delta = call.delta + row * call.size;
    float* residual = call.residual + row * call.size;
    if (call.weight != nullptr) {
        const float factor = norm_factor(delta, call.size, call.eps);
        for (int64_t i = 0; i < call.size; ++i) delta[i] = call.weight[i] * (delta[i] * factor);
    }
    for (int64_t i = 0; i < call.size; ++i) residual[i] = (residual[i] + delta[i] * call.delta_scale) * call.scale;
}

void rope_row(const RopeCall& call, int64_t row) {
    if (call.blocks[row] != 0 && (row == 0 || call.blocks[row] != call.blocks[row - 1])) prefetch_kv_row(call, row);
    const float* qkv = call.qkv + row * call.qkv_stride;
    const float* cos = call.cos + row * call.angle_stride;
    const float* sin = call.sin + row * call.angle_stride;
    float* queries = call.queries + row * call.num_heads * call.key_size;
    NormedHeads heads(call.query_norm, qkv, call.key_size, call.eps);
    for (int64_t head = 0; head < call.num_heads; ++head)
        rotate_head(heads.next(), cos, sin, call.key_size, queries + head * call.key_size);
    if (call.query_scales != nullptr)
        for (int64_t i = 0; i < int64_t{call.num_heads} * call.key_size; ++i) queries[i] *= call.query_scales[row];
    if (call.blocks[row] == 0) return;  // all padding rows have the same slot, so threads would race
    if (call.kv_type == KVType::float32)
        write_row<float>(call, row, qkv, cos, sin);
    else if (call.kv_type == KVType::bfloat16)
        write_row<bf16>(call, row, qkv, cos, sin);
    else
        write_coded_row(call, row, qkv, cos, sin);
}

void gate_part(const GateCall& call, int64_t row, int64_t first, int64_t end) {
    const float *gate = call.gate + row * call.stride, *up = call.up + row * call.up_stride;
    float* out = call.out + row * call.size;
    switch (call.kind) {
        case Gate::silu: return gate_elements<Gate::silu>(gate, up, out, first, end);
        case Gate::gelu_tanh: return gate_elements<Gate::gelu_tanh>(gate, up, out, first, end);
        case Gate::clamped_silu: return gate_elements<Gate::clamped_silu>(gate, up, out, first, end);
    }
}

void weighted_sum(const WeightedSumCall& call) {
    for (int64_t i = 0; i < call.size; ++i) call.out[i] = 0.0f;
    for (int64_t index = 0; index < call.count; ++index) {
        const float* part = call.parts + call.indices[index] * call.size;
        const float weight = call.weights[index];
        for (int64_t i = 0; i < call.size; ++i) call.out[i] += weight * part[i];
    }
}

void logit_part(const LogitCall& call, int64_t row, int64_t first, int64_t end) {
    float* logits = call.logits + row * call.size;
    for (int64_t i = first; i < end; i += kLanes) {
        const int64_t remaining = end - i < kLanes ? end - i : kLanes;
        F v = load_part<kLanes>(logits + i, remaining) * call.scale;
        if (call.cap > 0.0f) v = tanh_of(v / call.cap) * call.cap;
        store_part(logits + i, v, remaining);
    }
}

// Finds the first part of the row with the largest value, then searches only this part for its index.
void argmax_row(const ArgmaxCall& call, int64_t row) {
    constexpr int64_t part = 512;
    const float* logits = call.logits + row * call.stride;
    F differences = {};
    float max_value = -__builtin_inff();
    int64_t index = 0;
    for (int64_t first = 0; first < call.size; first += part) {
        const int64_t count = call.size - first < part ? call.size - first : part;
        const float part_max = max_of_logits(logits + first, count, differences);
        if (part_max > max_value) max_value = part_max, index = first;
    }
    const int64_t end = index + part < call.size ? index + part : call.size;
    int64_t position = index;
    while (position < end && !(logits[position] == max_value)) ++position;
    call.out[row] = position < end ? position : index;
    call.is_finite[row] = sum_lanes<kLanes>(differences) == 0.0f;
}

void exp(const float* in, float* out, int64_t size) {
    for (int64_t i = 0; i < size; i += kLanes) {
        const int64_t remaining = size - i < kLanes ? size - i : kLanes;
        store_part(out + i, exp_of<kLanes>(load_part<kLanes>(in + i, remaining)), remaining);
    }
}

}  // namespace quire::QUIRE_ISA
