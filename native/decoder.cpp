// See decoder.hpp. Which kernels run is dispatch.cpp's choice; in which order is here.
#include "decoder.hpp"

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "dispatch.hpp"
#include "tiles.hpp"

namespace quire {
namespace {

struct Freed {
    void operator()(char* memory) const { std::free(memory); }
};
typedef std::unique_ptr<char, Freed> Memory;

Memory taken(int64_t num_bytes) {
    if (num_bytes == 0) return nullptr;
    Memory memory(static_cast<char*>(std::aligned_alloc(4096, static_cast<size_t>((num_bytes + 4095) / 4096 * 4096))));
    if (!memory) throw std::bad_alloc();
    return memory;
}

const Products& products_of(const Linear& linear) { return chosen_products(static_cast<WeightType>(linear.type)); }

// A chunk of rows: the first, and how many.
struct Rows {
    int64_t first, count;
};

class Step {
  public:
    explicit Step(const DecoderCall& call)
        : call_(call), kernels_(chosen_kernels()), attention_(attention_call(call)),
          attention_scratch_(taken(call.num_threads * attention_.scratch_bytes)),
          product_scratch_(taken(largest_scratch(call))) {
        attention_.scratch = attention_scratch_.get();
    }

    void run() {
        for (int64_t at = 0; at < call_.num_layers; ++at) {
            for_chunks([&](Rows rows) { ask(at, rows); });
            attend(at);
            for_chunks([&](Rows rows) { answer(at, rows); });
        }
        for_chunks([&](Rows rows) { norm(call_.added, call_.norm, rows); });
        for (int64_t row = 0; row < call_.num_rows; ++row) call_.is_finite[row] = is_finite(row);
    }

  private:
    template <typename Do>
    void for_chunks(Do each) {
        for (int64_t first = 0; first < call_.num_rows; first += call_.chunk_rows)
            each(Rows{first, std::min(call_.chunk_rows, call_.num_rows - first)});
    }

    // Norm, queries, keys and values; the latter two into the store.
    void ask(int64_t at, Rows rows) {
        const Layer& layer = call_.layers[at];
        const LayerStore& store = call_.stores[at];
        norm(at == 0 ? nullptr : call_.added, layer.input_norm, rows);
        const int64_t width = (call_.num_heads + 2 * call_.num_kv_heads) * call_.head_size;
        const float* normed = call_.hidden + rows.first * call_.hidden_size;
        products(kQkv, layer.qkv, normed, call_.qkv, width, rows.count);
        const RopeCall rope = {call_.qkv, width, call_.cos + rows.first * call_.head_size,
                             call_.sin + rows.first * call_.head_size, layer.query_norm, layer.key_norm, eps(),
                             store.keys, call_.key_block_stride, store.values, call_.value_block_stride, kv_type(),
                             call_.blocks + rows.first, call_.slots + rows.first,
                             call_.queries + rows.first * query_size(), rows.count, int(call_.num_heads),
                             int(call_.num_kv_heads), int(call_.head_size), int(call_.head_size),
                             int(call_.block_size), num_threads()};
        timed(kRopeWrite, [&] { kernels_.rope_write(rope); });
    }

    void attend(int64_t at) {
        attention_.keys = call_.stores[at].keys;
        attention_.values = call_.stores[at].values;
        attention_.window = int(call_.layers[at].window);
        timed(kAttention, [&] { kernels_.attention(attention_); });
    }

    // What attention found, and the gated part.
    void answer(int64_t at, Rows rows) {
        const Layer& layer = call_.layers[at];
        float* added = call_.added + rows.first * call_.hidden_size;
        product(kOut, layer.out, call_.answers + rows.first * query_size(), added, call_.hidden_size, rows.count);
        norm(call_.added, layer.post_norm, rows);
        products(kGateUp, layer.gate_up, call_.hidden + rows.first * call_.hidden_size, call_.gate_up,
                 2 * call_.intermediate_size, rows.count);
        const SiluCall silu = {call_.gate_up, call_.gated, rows.count, call_.intermediate_size, num_threads()};
        timed(kSilu, [&] { kernels_.silu_mul(silu); });
        product(kDown, layer.down, call_.gated, added, call_.hidden_size, rows.count);
    }

    void norm(const float* added, const float* weight, Rows rows) {
        const int64_t first = rows.first * call_.hidden_size;
        const NormCall norm = {added == nullptr ? nullptr : added + first, call_.residual + first, weight,
                               call_.hidden + first, rows.count, call_.hidden_size, eps(), num_threads()};
        timed(kNorm, [&] { kernels_.add_rms_norm(norm); });
    }

    // Weights whose outputs stand side by side in rows of `width`.
    template <size_t N>
    void products(Part part, const Linear (&linears)[N], const float* rows, float* out, int64_t width,
                  int64_t num_rows) {
        for (const Linear& linear : linears) {
            if (linear.num_out > 0) product(part, linear, rows, out, width, num_rows);
            out += linear.num_out;
        }
    }

    void product(Part part, const Linear& linear, const float* rows, float* out, int64_t width, int64_t num_rows) {
        const ProductCall product = {rows, linear.num_in, linear.packed, linear.bias, out, width, num_rows,
                                     linear.num_in, linear.num_out, num_threads(), product_scratch_.get()};
        timed(part, [&] { products_of(linear).product(product); });
    }

    template <typename Do>
    void timed(Part part, Do work) {
        if (call_.seconds == nullptr) return work();
        const double started_s = omp_get_wtime();
        work();
        call_.seconds[part] += omp_get_wtime() - started_s;
    }

    bool is_finite(int64_t row) const {
        const float* hidden = call_.hidden + row * call_.hidden_size;
        float differences = 0.0f;
        for (int64_t at = 0; at < call_.hidden_size; ++at) differences += hidden[at] - hidden[at];
        return differences == 0.0f;
    }

    static AttentionCall attention_call(const DecoderCall& call) {
        const int64_t size = call.num_heads * call.head_size;
        AttentionCall attention = {
            call.queries, size, call.answers, size, nullptr, call.key_block_stride, nullptr, call.value_block_stride,
            static_cast<KVType>(call.kv_type), int(call.num_heads), int(call.num_kv_heads), int(call.head_size),
            int(call.head_size), int(call.block_size), call.tables, call.members, call.tiles, call.num_tiles,
            call.num_rows, call.num_rows, -1, static_cast<float>(call.scale), 0.0f, int(call.num_threads), nullptr, 0};
        attention.scratch_bytes = scratch_bytes(attention);
        return attention;
    }

    static int64_t largest_scratch(const DecoderCall& call) {
        int64_t largest = 0;
        const int64_t num_rows = std::min(call.chunk_rows, call.num_rows);
        const auto meet = [&](const Linear& one) {
            largest = std::max(largest, products_of(one).scratch_bytes(num_rows, one.num_in));
        };
        for (int64_t at = 0; at < call.num_layers; ++at) {
            for (const Linear& one : call.layers[at].qkv) meet(one);
            for (const Linear& one : call.layers[at].gate_up) meet(one);
            meet(call.layers[at].out);
            meet(call.layers[at].down);
        }
        return largest;
    }

    float eps() const { return static_cast<float>(call_.eps); }
    KVType kv_type() const { return static_cast<KVType>(call_.kv_type); }
    int num_threads() const { return int(call_.num_threads); }
    int64_t query_size() const { return call_.num_heads * call_.head_size; }

    const DecoderCall& call_;
    const Kernels& kernels_;
    AttentionCall attention_;
    Memory attention_scratch_, product_scratch_;
};

}  // namespace

void compute_layers(const DecoderCall& call) { Step(call).run(); }

}  // namespace quire
