// See forward.hpp. This file defines the order of kernels; dispatch.cpp selects their build.
#include "step/forward.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>

#include "step/step_state.hpp"
#include "team/team.hpp"

namespace quire {
namespace {

constexpr int64_t kChannels = 512;  // channels of a recurrent layer per task

std::atomic<uint64_t*> layer_counter{nullptr};  // one per process; read by another process

// Parameters of a layer output that has not been added to the residual yet.
struct PendingResidual {
    const float* after_norm = nullptr;
    float scale = 1.0f;
};

// A step, as each thread of the team runs it. A phase begins when the tasks of the previous phase are done. A task that
// computes an input row of a product also converts it, where possible.
class Step {
  public:
    Step(const StepState& state, TeamThread& thread)
        : state_(state), call_(state.call), kernels_(active_kernels()), thread_(thread), attention_(state.attention) {}

    void run() {
        embed_rows();
        PendingResidual pending;
        for (int64_t index = 0; index < call_.num_layers; ++index) {
            const Layer& layer = call_.layers[index];
            const bool is_recurrent = layer.recurrent.kind != RecurrentKind::none;
            for_chunks(call_.num_rows, [&](Rows rows) {
                const ProjectionSet qkv = state_.qkv(layer, rows);
                norm(layer.input_norm, index == 0 ? nullptr : &pending, rows, qkv);
                timed(kQkv, [&] { multiply(qkv); });
                is_recurrent ? run_recurrent(layer, rows) : rope_and_write_kv(index, rows);
            });
            if (!is_recurrent) attend(index);
            const bool is_last = index + 1 == call_.num_layers;
            if (is_last) compact_needed_rows(layer);
            for_chunks(is_last ? call_.num_needed : call_.num_rows, [&](Rows rows) { finish_layer(index, rows); });
            const bool has_per_layer = call_.per_layer_size > 0;
            pending = {has_per_layer ? layer.per_layer.after_norm : layer.after_norm, static_cast<float>(layer.scale)};
            if (thread_.number() == 0) count_layer();
        }
        apply_last_norm(pending);
        scatter_needed_rows();
        for_chunks(call_.num_wanted, [&](Rows rows) { compute_logits(rows); });
        const ArgmaxCall argmax = {call_.logits, call_.head.num_out, call_.argmax_tokens, call_.are_logits_finite, call_.num_sampled,
                                   call_.head.num_out};
        timed(kArgmax, [&] {
            thread_.share(call_.num_sampled, [&](int64_t row) { kernels_.argmax_row(argmax, row); });
        });
    }

  private:
    static void count_layer() {
        uint64_t* counter = layer_counter.load(std::memory_order_relaxed);
        if (counter != nullptr) std::atomic_ref<uint64_t>(*counter).fetch_add(1, std::memory_order_relaxed);
    }

    template <typename Function>
    void for_chunks(int64_t num_rows, Function function) {
        for (int64_t first = 0; first < num_rows; first += call_.chunk_rows)
            function(Rows{first, std::min(call_.chunk_rows, num_rows - first)});
    }

    // Computes the embeddings of rows, their RoPE angles, and the per-layer embeddings.
    void embed_rows() {
        timed(kEmbed, [&] {
            thread_.share(call_.num_rows, [&](int64_t row) {
                embed(call_.embedding, row, call_.residual + row * call_.hidden_size, call_.embedding_scale);
                compute_angles(row);
            });
        });
        if (call_.per_layer_size == 0) return;
        timed(kPerLayer, [&] {
            for_chunks(call_.num_rows, [&](Rows rows) {
                const ProjectionSet projection = state_.per_layer_projection(rows);
                convert_input_row(projection, call_.hidden_size);
                multiply(projection);
            });
            thread_.share(call_.num_rows, [&](int64_t row) { combine_per_layer_inputs(row); });
        });
    }

    void embed(const Linear& weight, int64_t row, float* out, double scale) const {
        if (weight.packing == kPanels)
            kernels_.panels->unpack({{static_cast<Format>(weight.format), weight.num_out, weight.num_in, weight.group},
                                     static_cast<const uint8_t*>(weight.packed), out}, call_.tokens[row]);
        else
            active_matmul(static_cast<WeightType>(weight.packing))
                .rows({weight.packed, weight.num_out, weight.num_in, call_.tokens + row, 1, out});
        if (scale != 1.0)
            for (int64_t i = 0; i < weight.num_in; ++i) out[i] *= static_cast<float>(scale);
    }

    // Computes the per-layer inputs of a row: (norm(projection of the row's embedding) + per-layer embedding) x scale.
    void combine_per_layer_inputs(int64_t row) const {
        const int64_t size = call_.per_layer_size, width = call_.num_all_layers * size;
        float* projected = call_.per_layer + row * width;
        const std::unique_ptr<float[]> embedding(new float[width]);
        embed(call_.per_layer_embedding, row, embedding.get(), call_.per_layer_scale);
        for (int64_t i = 0; i < width; ++i) projected[i] *= static_cast<float>(call_.projection_scale);
        const NormCall norm = {nullptr, projected, call_.per_layer_norm, projected, call_.num_all_layers, size, eps()};
        for (int64_t layer = 0; layer < call_.num_all_layers; ++layer) kernels_.norm_row(norm, layer);
        for (int64_t i = 0; i < width; ++i)
            projected[i] = (projected[i] + embedding[i]) * static_cast<float>(call_.per_layer_sum_scale);
    }

    // Computes cosines and sines for the position of a row. Angles are rounded to float, as in training; cosines and
    // sines are computed in double precision, then rounded.
    void compute_angles(int64_t row) const {
        const float position = static_cast<float>(call_.positions[row]);
        for (const RopeRule* rope = call_.ropes; rope < call_.ropes + call_.num_ropes; ++rope) {
            const int64_t half = rope->head_size / 2, first = row * call_.angles_size + rope->first;
            const float scaling = static_cast<float>(rope->scaling);
            for (int64_t pair = 0; pair < half; ++pair) {
                const double angle = static_cast<double>(position * rope->frequencies[pair]);
                float* cos = call_.cos + first + pair;
                float* sin = call_.sin + first + pair;
                cos[0] = cos[half] = static_cast<float>(std::cos(angle)) * scaling;
                sin[0] = sin[half] = static_cast<float>(std::sin(angle)) * scaling;
            }
        }
        if (call_.query_beta != 0.0) {
            const double turns = std::floor(static_cast<double>(call_.positions[row]) / call_.query_origin);
            call_.query_scales[row] = static_cast<float>(1.0 + call_.query_beta * std::log1p(turns));
        }
    }

    // The last layer's output is needed only for rows whose logits or hidden states were requested. The other rows have
    // written their KV and are finished. Needed rows move to the front in order, so none is overwritten before it
    // moves:
    //
    //     rows     0 1 2 3 4 5 6 7         needed   2 5 7
    //     front    2 5 7                   `scatter_needed_rows` moves their hidden states back
    //
    // For finished rows, the attention output shows whether their KV is finite.
    void compact_needed_rows(const Layer& last) {
        if (needs_every_row()) return;
        const int64_t size = state_.attention_out_size(last);
        timed(kNorm, [&] {
            thread_.share(call_.num_rows, [&](int64_t row) {
                call_.is_finite[row] = is_finite(call_.answers + row * size, size);
            });
            thread_.share(1, [&](int64_t) {
                for (int64_t i = 0; i < call_.num_needed; ++i) {
                    copy_row(call_.answers, size, call_.needed[i], i);
                    copy_row(call_.residual, call_.hidden_size, call_.needed[i], i);
                }
            });
        });
    }

    void scatter_needed_rows() {
        if (needs_every_row()) return;
        timed(kNorm, [&] {
            thread_.share(1, [&](int64_t) {
                for (int64_t i = call_.num_needed - 1; i >= 0; --i)
                    copy_row(call_.hidden, call_.hidden_size, i, call_.needed[i]);
            });
        });
    }

    bool needs_every_row() const { return call_.num_needed == call_.num_rows; }

    static void copy_row(float* rows, int64_t size, int64_t from, int64_t to) {
        if (from != to) std::copy(rows + from * size, rows + (from + 1) * size, rows + to * size);
    }

    // Computes the last norm, and whether the hidden state of each row is finite.
    void apply_last_norm(const PendingResidual& pending) {
        const NormCall last = norm_call(call_.norm, {0, call_.num_needed});
        timed(kNorm, [&] {
            thread_.share(call_.num_needed, [&](int64_t i) {
                add_residual_and_norm(last, pending, i);
                const int64_t row = needs_every_row() ? i : call_.needed[i];
                call_.is_finite[row] = is_finite(call_.hidden + i * call_.hidden_size, call_.hidden_size);
            });
        });
    }

    // Computes the logits of wanted rows.
    void compute_logits(Rows rows) {
        const ProjectionSet head = state_.head(rows);
        const LogitCall logits = {call_.logits + rows.first * call_.head.num_out, call_.head.num_out,
                                  static_cast<float>(call_.logit_scale), static_cast<float>(call_.logit_cap)};
        timed(kHead, [&] {
            thread_.share(std::max(rows.count, head.num_converted_rows()), [&](int64_t row) {
                if (row < rows.count) copy_logit_input(rows.first + row);
                head.convert_input_row(row, 0, call_.hidden_size);
            });
            multiply(head);
            if (logits.scale == 1.0f && logits.cap == 0.0f) return;
            thread_.for_each_chunk(rows.count, logits.size, [&](int64_t row, int64_t first, int64_t end) {
                kernels_.logit_part(logits, row, first, end);
            });
        });
    }

    void copy_logit_input(int64_t index) {
        const float* from = call_.hidden + call_.wanted[index] * call_.hidden_size;
        std::copy(from, from + call_.hidden_size, call_.picked + index * call_.hidden_size);
    }

    // Applies RoPE to queries and keys, and writes keys and values to the KV store.
    void rope_and_write_kv(int64_t index, Rows rows) {
        const Layer& layer = call_.layers[index];
        const LayerStore& store = call_.stores[index];
        const int64_t angles = rows.first * call_.angles_size + call_.ropes[layer.rope].first;
        const int64_t head = layer.head_size, queries = state_.query_size(layer), keys = layer.num_kv_heads * head;
        const RopeCall rope = {
            call_.qkv, state_.qkv_size(layer), queries + layer.has_values * keys, call_.cos + angles,
            call_.sin + angles, call_.angles_size,
            {layer.query_norm, layer.query_span}, {layer.key_norm, layer.key_span}, {layer.value_norm, head}, call_.query_beta == 0.0 ? nullptr : call_.query_scales + rows.first, eps(),
            store.keys, store.key_block_stride, store.values, store.value_block_stride,
            static_cast<KVType>(call_.kv_type), call_.blocks + rows.first, call_.slots + rows.first,
            call_.queries + rows.first * queries, rows.count, int(call_.num_heads),
            layer.has_kv ? int(layer.num_kv_heads) : 0, int(head), int(head), int(call_.block_size)};
        timed(kRopeWrite, [&] {
            thread_.share(rows.count, [&](int64_t row) {
                kernels_.rope_row(rope, row);
                if (!layer.has_gate) return;
                const float* gates = call_.qkv + (row + 1) * rope.qkv_stride - queries;
                std::copy(gates, gates + queries, call_.gates + (rows.first + row) * queries);
            });
        });
    }

    // Computes a recurrent layer: the rows of a sequence in order; sequences, channels and columns in parallel.
    void run_recurrent(const Layer& layer, Rows rows) {
        const Recurrent& recurrent = layer.recurrent;
        const RecurrentCall call = {
            &recurrent, call_.qkv, call_.mixed, call_.rates, call_.answers + rows.first * recurrent.out_size,
            call_.states, call_.slot_size, call_.run_rows, call_.run_slots, rows.first, rows.count, eps()};
        const int64_t* runs_end = call_.run_rows + call_.num_runs;
        const int64_t first = std::upper_bound(call_.run_rows, runs_end, rows.first) - call_.run_rows - 1;
        const int64_t end = std::lower_bound(call_.run_rows, runs_end, rows.first + rows.count) - call_.run_rows;
        const int64_t parts = (recurrent.num_channels + kChannels - 1) / kChannels;
        timed(kMix, [&] {
            thread_.share((end - first) * parts, [&](int64_t task) {
                const int64_t i = task % parts * kChannels;
                kernels_.conv1d(call, first + task / parts, i, std::min(i + kChannels, recurrent.num_channels));
            });
            if (recurrent.kind == RecurrentKind::convolution) return;
            thread_.share(rows.count, [&](int64_t row) { kernels_.compute_decays(call, row); });
        });
        if (recurrent.kind == RecurrentKind::convolution) return;
        timed(kScan, [&] {
            const int64_t blocks = num_state_blocks(recurrent), tasks_per_run = recurrent.num_heads * blocks;
            thread_.share((end - first) * tasks_per_run, [&](int64_t task) {
                kernels_.scan_run(call, first + task / tasks_per_run, task % tasks_per_run / blocks, task % blocks);
            });
            thread_.share(rows.count, [&](int64_t row) { kernels_.norm_and_gate_row(call, row); });
        });
    }

    void attend(int64_t index) {
        const Layer& layer = call_.layers[index];
        const LayerStore& store = call_.stores[index];
        attention_.query_stride = attention_.out_stride = state_.query_size(layer);
        attention_.keys = store.keys;
        attention_.values = store.values;
        attention_.key_block_stride = store.key_block_stride;
        attention_.value_block_stride = store.value_block_stride;
        attention_.num_kv_heads = int(layer.num_kv_heads);
        attention_.key_size = attention_.value_size = int(layer.head_size);
        attention_.window = int(layer.window);
        attention_.sinks = layer.sinks;
        timed(kAttention, [&] {
            kernels_.attention(attention_, thread_);
            thread_.wait();
            if (!layer.has_gate) return;
            const int64_t size = state_.query_size(layer);
            thread_.share(call_.num_rows, [&](int64_t row) {
                kernels_.apply_output_gate(call_.gates + row * size, call_.answers + row * size, size);
            });
        });
    }

    // Computes the part of a layer after attention: output projection, MLP, experts, per-layer embedding.
    void finish_layer(int64_t index, Rows rows) {
        const Layer& layer = call_.layers[index];
        const ProjectionSet out = state_.out(layer, rows);
        timed(kOut, [&] {
            convert_input_row(out, state_.attention_out_size(layer));
            multiply(out);
        });
        const PendingResidual attention_output = {layer.attention_norm, 1.0f};
        const bool has_dense = layer.intermediate_size > 0;
        norm(layer.mlp_norm, &attention_output, rows, has_dense ? state_.gate_up(layer, rows) : ProjectionSet());
        if (has_dense) run_mlp(layer, rows);
        if (layer.mixture.num_experts > 0) run_experts(index, rows);
        if (call_.per_layer_size > 0) add_per_layer_embedding(index, rows);
    }

    void run_mlp(const Layer& layer, Rows rows) {
        const ProjectionSet gate_up = state_.gate_up(layer, rows), down = state_.down(layer, rows);
        timed(kGateUp, [&] { multiply(gate_up); });
        const int64_t size = layer.intermediate_size;
        gate({call_.gate_up, call_.gate_up + size, 2 * size, 2 * size, call_.gated, rows.count, size, kind()}, down);
        timed(kDown, [&] { multiply(down); });
    }

    void run_experts(int64_t index, Rows rows) {
        const Layer& layer = call_.layers[index];
        const MoE& mixture = layer.mixture;
        const ExpertBuffers& buffers = state_.mixture.buffers;
        const Routing routing = state_.routing(index, rows);
        const int64_t hidden = call_.hidden_size;
        timed(kRouter, [&] { route(mixture, rows, routing); });
        timed(kExperts, [&] {
            const float* inputs = mixture.input_norm == nullptr ? call_.hidden + rows.first * hidden
                                                              : state_.mixture.expert_rows;
            thread_.share(rows.count * mixture.num_used, [&](int64_t pair) {
                const float* row = inputs + routing.pair_rows[pair] * hidden;
                std::copy(row, row + hidden, buffers.rows + pair * hidden);
                const ExpertBatch& batch = routing.batches[routing.pair_batches[pair]];
                convert_pair(expert_gate_up(mixture, buffers, batch, hidden), pair - batch.first, batch.count, hidden);
            });
            thread_.share(routing.counts->num_tasks[0], [&](int64_t task) {
                const ExpertBatch& batch = batch_of_task(routing, 0, task);
                expert_gate_up(mixture, buffers, batch, hidden).multiply(task - batch.first_task[0]);
            });
            const int64_t size = mixture.intermediate_size;
            const GateCall gate = {buffers.gate_up, buffers.gate_up + size, 2 * size, 2 * size, buffers.gated, 0, size,
                                   kind()};
            thread_.share(rows.count * mixture.num_used, [&](int64_t pair) {
                kernels_.gate_part(gate, pair, 0, size);
                const ExpertBatch& batch = routing.batches[routing.pair_batches[pair]];
                convert_pair(expert_down(mixture, buffers, batch, hidden), pair - batch.first, batch.count, size);
            });
            thread_.share(routing.counts->num_tasks[1], [&](int64_t task) {
                const ExpertBatch& batch = batch_of_task(routing, 1, task);
                expert_down(mixture, buffers, batch, hidden).multiply(task - batch.first_task[1]);
            });
            thread_.share(rows.count, [&](int64_t row) { combine_experts(layer, rows, routing, row); });
        });
    }

    // The task that converts the last row of an expert also converts its padding rows.
    static void convert_pair(const ProjectionSet& projections, int64_t row, int64_t count, int64_t size) {
        const int64_t end = row + 1 == count ? std::max(count, projections.num_converted_rows()) : row + 1;
        for (; row < end; ++row) projections.convert_input_row(row, 0, size);
    }

    // Computes the routing of rows to experts.
    void route(const MoE& mixture, Rows rows, const Routing& routing) {
        const ProjectionSet router = state_.router(mixture, rows);
        thread_.share(std::max(rows.count, router.num_converted_rows()), [&](int64_t row) {
            if (row < rows.count) {
                norm_for_mixture(mixture.router_norm, rows, state_.mixture.router_rows, row);
                norm_for_mixture(mixture.input_norm, rows, state_.mixture.expert_rows, row);
            }
            router.convert_input_row(row, 0, call_.hidden_size);
        });
        multiply(router);
        thread_.share(rows.count, [&](int64_t row) {
            choose_experts(mixture, state_.mixture.scores + row * mixture.num_experts, row, routing);
        });
        thread_.share(1, [&](int64_t) { sort_by_expert(mixture, rows.count, call_.hidden_size, routing); });
    }

    void norm_for_mixture(const float* weight, Rows rows, float* out, int64_t row) const {
        if (weight == nullptr) return;
        float* residual = call_.residual + rows.first * call_.hidden_size;
        kernels_.norm_row({nullptr, residual, weight, out, rows.count, call_.hidden_size, eps()}, row);
    }

    // Sums the outputs of a row's experts in their order, and adds the dense part if there is one.
    void combine_experts(const Layer& layer, Rows rows, const Routing& routing, int64_t row) const {
        const MoE& mixture = layer.mixture;
        const int64_t size = call_.hidden_size, first = row * mixture.num_used;
        float* added = call_.added + (rows.first + row) * size;
        float* mixed = layer.intermediate_size > 0 ? state_.mixture.mixed + row * size : added;
        kernels_.weighted_sum({state_.mixture.buffers.out, routing.row_pairs + first, routing.weights + first,
                      mixture.num_used, size, mixed});
        if (mixture.after_norm != nullptr)
            kernels_.norm_row({nullptr, mixed, mixture.after_norm, mixed, 1, size, eps()}, 0);
        if (layer.intermediate_size == 0) return;
        if (mixture.dense_norm != nullptr)
            kernels_.norm_row({nullptr, added, mixture.dense_norm, added, 1, size, eps()}, 0);
        if (mixture.shared_expert_gate != nullptr) {
            const float* hidden = call_.hidden + (rows.first + row) * size;
            const float gate = static_cast<float>(sigmoid_of(dot_product(hidden, mixture.shared_expert_gate, size)));
            for (int64_t i = 0; i < size; ++i) added[i] *= gate;
        }
        for (int64_t i = 0; i < size; ++i) added[i] += mixed[i];
    }

    // Adds this layer's per-layer embedding to the residual, gated by the residual after the layer's other outputs.
    void add_per_layer_embedding(int64_t index, Rows rows) {
        const Layer& layer = call_.layers[index];
        const ProjectionSet gate_projection = state_.per_layer_gate(layer.per_layer, rows);
        const ProjectionSet project = state_.per_layer_project(layer.per_layer, rows);
        const int64_t size = call_.per_layer_size, width = call_.num_all_layers * size;
        const ResidualCall residual = residual_call({layer.after_norm, 1.0f}, rows);
        timed(kPerLayer, [&] {
            thread_.share(std::max(rows.count, gate_projection.num_converted_rows()), [&](int64_t row) {
                if (row < rows.count) kernels_.add_residual_row(residual, row);
                gate_projection.convert_input_row(row, 0, call_.hidden_size);
            });
            multiply(gate_projection);
            const bool is_packed = index + 1 == call_.num_layers && !needs_every_row();
            thread_.share(std::max(rows.count, project.num_converted_rows()), [&](int64_t row) {
                const int64_t input = is_packed && row < rows.count ? call_.needed[rows.first + row] : rows.first + row;
                const float* embedding = call_.per_layer + input * width + layer.number * size;
                if (row < rows.count)
                    kernels_.gate_part({call_.gate_up + row * size, embedding, 0, 0, call_.gated + row * size, 1, size, kind()},
                                       0, 0, size);
                project.convert_input_row(row, 0, size);
            });
            multiply(project);
        });
    }

    // Adds the pending output to the residual, unless it is null; then normalizes, and converts rows for `next`.
    void norm(const float* weight, const PendingResidual* pending, Rows rows, const ProjectionSet& next) {
        const NormCall norm = norm_call(weight, rows);
        timed(kNorm, [&] {
            thread_.share(std::max(rows.count, next.num_converted_rows()), [&](int64_t row) {
                if (row < rows.count) {
                    if (pending == nullptr)
                        kernels_.norm_row({nullptr, norm.residual, weight, norm.out, norm.num_rows, norm.size, eps()}, row);
                    else
                        add_residual_and_norm(norm, *pending, row);
                }
                next.convert_input_row(row, 0, call_.hidden_size);
            });
        });
    }

    void add_residual_and_norm(const NormCall& norm, const PendingResidual& pending, int64_t row) const {
        if (pending.after_norm == nullptr && pending.scale == 1.0f && call_.added_scale == 1.0)
            return kernels_.norm_row(norm, row);
        kernels_.add_residual_row({const_cast<float*>(norm.delta), norm.residual, pending.after_norm, norm.size, eps(),
                             static_cast<float>(call_.added_scale), pending.scale}, row);
        kernels_.norm_row({nullptr, norm.residual, norm.weight, norm.out, norm.num_rows, norm.size, eps()}, row);
    }

    ResidualCall residual_call(const PendingResidual& pending, Rows rows) const {
        const int64_t first = rows.first * call_.hidden_size;
        return {call_.added + first, call_.residual + first, pending.after_norm, call_.hidden_size, eps(),
                static_cast<float>(call_.added_scale), pending.scale};
    }

    void gate(const GateCall& gate, const ProjectionSet& next) {
        timed(kGated, [&] {
            const int64_t num_rows = std::max(gate.num_rows, next.num_converted_rows());
            thread_.for_each_chunk(num_rows, gate.size, [&](int64_t row, int64_t first, int64_t end) {
                if (row < gate.num_rows) kernels_.gate_part(gate, row, first, end);
                next.convert_input_row(row, first, end);
            });
        });
    }

    void convert_input_row(const ProjectionSet& set, int64_t size) {
        if (set.num_converted_rows() == 0) return;
        thread_.for_each_chunk(set.num_converted_rows(), size,
                            [&](int64_t row, int64_t first, int64_t end) { set.convert_input_row(row, first, end); });
    }

    void multiply(const ProjectionSet& projections) {
        thread_.share(projections.num_tasks(), [&](int64_t task) { projections.multiply(task); });
    }

    NormCall norm_call(const float* weight, Rows rows) const {
        const int64_t first = rows.first * call_.hidden_size;
        return {call_.added + first, call_.residual + first, weight, call_.hidden + first, rows.count,
                call_.hidden_size, eps()};
    }

    template <typename Function>
    void timed(Part part, Function work) {
        if (call_.seconds == nullptr || thread_.number() > 0) return work();
        const double start_s = omp_get_wtime();
        work();
        call_.seconds[part] += omp_get_wtime() - start_s;
    }

    // Dot product with sixteen parallel sums, so that compilers vectorize it with equal results on all builds.
    static float dot_product(const float* a, const float* b, int64_t size) {
        float sums[16] = {}, sum = 0.0f;
        int64_t i = 0;
        for (; i + 16 <= size; i += 16)
            for (int64_t lane = 0; lane < 16; ++lane) sums[lane] += a[i + lane] * b[i + lane];
        for (; i < size; ++i) sums[i % 16] += a[i] * b[i];
        for (const float part : sums) sum += part;
        return sum;
    }

    static bool is_finite(const float* numbers, int64_t size) {
        float differences = 0.0f;
        for (int64_t i = 0; i < size; ++i) differences += numbers[i] - numbers[i];
        return differences == 0.0f;
    }

    float eps() const { return static_cast<float>(call_.eps); }
    Gate kind() const { return static_cast<Gate>(call_.gate); }

    const StepState& state_;
    const ForwardCall& call_;
    const Kernels& kernels_;
    TeamThread& thread_;
    AttentionCall attention_;
};

void check_indices(const int64_t* indices, int64_t count, int64_t size, const char* what) {
    for (int64_t i = 0; i < count; ++i)
        if (indices[i] < 0 || indices[i] >= size)
            throw std::out_of_range("expected " + std::string(what) + " from 0 to " + std::to_string(size - 1) +
                                    ", got " + std::to_string(indices[i]));
}

// Needed rows must be ascending and distinct, because compact_needed_rows relies on it.
void check_needed(const ForwardCall& call) {
    if (call.num_needed == call.num_rows) return;
    check_indices(call.needed, call.num_needed, call.num_rows, "needed rows");
    for (int64_t i = 1; i < call.num_needed; ++i)
        if (call.needed[i] <= call.needed[i - 1]) throw std::out_of_range("needed rows must be in order, each once");
    for (int64_t i = 0; i < call.num_wanted; ++i)
        if (!std::binary_search(call.needed, call.needed + call.num_needed, call.wanted[i]))
            throw std::out_of_range("row " + std::to_string(call.wanted[i]) + " is wanted and not needed");
}

}  // namespace

void compute_step(const ForwardCall& call) {
    check_indices(call.tokens, call.num_rows, call.embedding.num_out, "tokens");
    check_indices(call.wanted, call.num_wanted, call.num_rows, "wanted rows");
    check_needed(call);
    const StepState state(call);
    run_team(state.num_threads(), [&](TeamThread& thread) { Step(state, thread).run(); });
}

void set_layer_counter(uint64_t* counter) { layer_counter.store(counter, std::memory_order_relaxed); }

}  // namespace quire
