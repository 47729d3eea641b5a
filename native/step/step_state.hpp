// State shared by the threads of a step: the products of each layer and chunk of rows, and scratch memory.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "layers/moe_routing.hpp"
#include "attention/query_tiles.hpp"

namespace quire {

struct FreeDeleter {
    void operator()(char* memory) const { std::free(memory); }
};
typedef std::unique_ptr<char, FreeDeleter> Memory;

inline Memory allocate(int64_t num_bytes) {
    if (num_bytes == 0) return nullptr;
    Memory memory(static_cast<char*>(std::aligned_alloc(4096, static_cast<size_t>((num_bytes + 4095) / 4096 * 4096))));
    if (!memory) throw std::bad_alloc();
    return memory;
}

// Steps with fewer multiplications run on one thread, because waking threads costs more than it saves.
constexpr int64_t kMinMultiplications = 1 << 20;

// A chunk of rows.
struct Rows {
    int64_t first, count;
};

// Scratch memory of mixtures of experts: buffers for the pairs (expert, row) of a chunk.
struct MixtureScratch {
    Memory memory;
    float *router_rows = nullptr, *scores = nullptr, *expert_rows = nullptr, *mixed = nullptr;
    ExpertBuffers buffers = {};

    MixtureScratch(const ForwardCall& call, int64_t num_rows) {
        int64_t pairs = 0, num_gated = 0, experts = 0, scratch_bytes = 0;
        for (const Layer* layer = call.layers; layer < call.layers + call.num_layers; ++layer) {
            const MoE& mixture = layer->mixture;
            if (mixture.num_experts == 0) continue;
            pairs = std::max(pairs, num_rows * mixture.num_used);
            num_gated = std::max(num_gated, num_rows * mixture.num_used * mixture.intermediate_size);
            experts = std::max(experts, mixture.num_experts);
            scratch_bytes = std::max(scratch_bytes, max_expert_scratch(mixture, num_rows, call.hidden_size));
        }
        if (experts == 0) return;
        const int64_t sizes[] = {num_rows * call.hidden_size, num_rows * experts, num_rows * call.hidden_size,
                                 num_rows * call.hidden_size, pairs * call.hidden_size, 2 * num_gated, num_gated,
                                 pairs * call.hidden_size};
        int64_t num_bytes = scratch_bytes;
        for (const int64_t size : sizes) num_bytes += pad_to_line(4 * size);
        memory = allocate(num_bytes);
        float** const parts[] = {&router_rows, &scores, &expert_rows, &mixed,
                                 &buffers.rows, &buffers.gate_up, &buffers.gated, &buffers.out};
        char* address = memory.get();
        for (int part = 0; part < 8; ++part) {
            *parts[part] = reinterpret_cast<float*>(address);
            address += pad_to_line(4 * sizes[part]);
        }
        buffers.scratch = address;
    }
};

// State shared by the threads of a step.
struct StepState {
    const ForwardCall& call;
    AttentionCall attention;
    AttentionScratch attention_scratch;
    Memory scratch, routings;
    MixtureScratch mixture;

    explicit StepState(const ForwardCall& forward)
        : call(forward), attention(attention_call(forward)), attention_scratch(attention),
          mixture(forward, std::min(forward.chunk_rows, forward.num_rows)) {
        scratch = allocate(max_scratch_bytes());
        routings = allocate(call.num_layers * layer_routing_bytes());
    }

    int64_t query_size(const Layer& layer) const { return call.num_heads * layer.head_size; }

    // Size of the output of attention or of a recurrent layer, per row.
    int64_t attention_out_size(const Layer& layer) const {
        return layer.recurrent.kind == RecurrentKind::none ? query_size(layer) : layer.recurrent.out_size;
    }

    int64_t qkv_size(const Layer& layer) const {
        if (layer.recurrent.kind != RecurrentKind::none) return layer.recurrent.in_size;
        return (1 + layer.has_gate) * query_size(layer) + layer.has_kv * (1 + layer.has_values) * layer.num_kv_heads * layer.head_size;
    }

    ProjectionSet qkv(const Layer& layer, Rows rows) const {
        return {layer.qkv, 4, hidden(rows), call.qkv, qkv_size(layer), rows.count, scratch.get()};
    }

    ProjectionSet out(const Layer& layer, Rows rows) const {
        return {&layer.out, 1, call.answers + rows.first * attention_out_size(layer), added(rows), call.hidden_size, rows.count,
                scratch.get()};
    }

    ProjectionSet gate_up(const Layer& layer, Rows rows) const {
        return {layer.gate_up, 2, hidden(rows), call.gate_up, 2 * layer.intermediate_size, rows.count, scratch.get()};
    }

    ProjectionSet down(const Layer& layer, Rows rows) const {
        return {&layer.down, 1, call.gated, added(rows), call.hidden_size, rows.count, scratch.get()};
    }

    ProjectionSet router(const MoE& moe, Rows rows) const {
        const float* input = moe.router_norm == nullptr ? hidden(rows) : mixture.router_rows;
        return {&moe.router, 1, input, mixture.scores, moe.num_experts, rows.count, scratch.get()};
    }

    ProjectionSet per_layer_gate(const PerLayer& weights, Rows rows) const {
        return {&weights.gate, 1, call.residual + rows.first * call.hidden_size, call.gate_up, call.per_layer_size,
                rows.count, scratch.get()};
    }

    ProjectionSet per_layer_project(const PerLayer& weights, Rows rows) const {
        return {&weights.project, 1, call.gated, added(rows), call.hidden_size, rows.count, scratch.get()};
    }

    // The projection of embedded rows to the per-layer inputs of all layers.
    ProjectionSet per_layer_projection(Rows rows) const {
        const int64_t width = call.num_all_layers * call.per_layer_size;
        return {&call.per_layer_projection, 1, call.residual + rows.first * call.hidden_size,
                call.per_layer + rows.first * width, width, rows.count, scratch.get()};
    }

    // The LM head; `rows` counts wanted rows.
    ProjectionSet head(Rows rows) const {
        return {&call.head, 1, call.picked + rows.first * call.hidden_size,
                call.logits + rows.first * call.head.num_out, call.head.num_out, rows.count, scratch.get()};
    }

    // Each layer and chunk has a separate routing, so that no thread overwrites what a delayed thread still reads.
    Routing routing(int64_t layer, Rows rows) const {
        const MoE& moe = call.layers[layer].mixture;
        const int64_t offset = layer * layer_routing_bytes() + rows.first / call.chunk_rows * chunk_routing_bytes();
        return {routings.get() + offset, moe, rows.count};
    }

    int num_threads() const {
        int64_t num_multiplications = 0;
        for (int64_t index = 0; index < call.num_layers; ++index) {
            const Layer& layer = call.layers[index];
            for (const Linear& linear : layer.qkv) num_multiplications += size_of(linear);
            for (const Linear& linear : layer.gate_up) num_multiplications += size_of(linear);
            num_multiplications += size_of(layer.out) + size_of(layer.down);
            num_multiplications += 3 * layer.mixture.num_used * layer.mixture.intermediate_size * call.hidden_size;
        }
        num_multiplications = call.num_rows * num_multiplications + call.num_wanted * size_of(call.head);
        return num_multiplications >= kMinMultiplications ? int(call.num_threads) : 1;
    }

  private:
    static int64_t size_of(const Linear& linear) { return linear.num_in * linear.num_out; }

    float* hidden(Rows rows) const { return call.hidden + rows.first * call.hidden_size; }
    float* added(Rows rows) const { return call.added + rows.first * call.hidden_size; }

    int64_t chunk_routing_bytes() const {
        int64_t bytes = 0;
        for (const Layer* layer = call.layers; layer < call.layers + call.num_layers; ++layer)
            if (layer->mixture.num_experts > 0)
                bytes = std::max(bytes, Routing::num_bytes(layer->mixture, std::min(call.chunk_rows, call.num_rows)));
        return bytes;
    }

    int64_t layer_routing_bytes() const {
        return chunk_routing_bytes() * ((call.num_rows + call.chunk_rows - 1) / call.chunk_rows);
    }

    int64_t max_scratch_bytes() const {
        const Rows rows = {0, std::min(call.chunk_rows, call.num_rows)};
        int64_t max_bytes = head({0, std::min(call.chunk_rows, call.num_wanted)}).scratch_bytes();
        if (call.per_layer_size > 0) max_bytes = std::max(max_bytes, per_layer_projection(rows).scratch_bytes());
        for (const Layer* layer = call.layers; layer < call.layers + call.num_layers; ++layer)
            for (const ProjectionSet& projections :
                 {qkv(*layer, rows), out(*layer, rows), gate_up(*layer, rows), down(*layer, rows),
                  router(layer->mixture, rows), per_layer_gate(layer->per_layer, rows),
                  per_layer_project(layer->per_layer, rows)})
                max_bytes = std::max(max_bytes, projections.scratch_bytes());
        return max_bytes;
    }

    // The attention call without the fields of a layer. Sizes are maxima over all layers, for the allocation of memory.
    static AttentionCall attention_call(const ForwardCall& call) {
        return {call.queries, 0, call.answers, 0, nullptr, 0, nullptr, 0, static_cast<KVType>(call.kv_type),
                int(call.num_heads), int(call.num_heads / call.max_group_size), int(call.max_head_size),
                int(call.max_head_size), int(call.block_size), call.tables, call.members, call.tiles, call.num_tiles,
                call.num_rows, call.num_rows, -1, static_cast<float>(call.scale), static_cast<float>(call.softcap),
                int(call.num_threads)};
    }
};

}  // namespace quire
