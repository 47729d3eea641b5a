// See decoder.hpp. Which kernels run is dispatch.cpp's choice; in which order is here.
#include "decoder.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "dispatch.hpp"
#include "team.hpp"
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

// Below so many multiplications of a whole step, waking threads costs more than they give.
constexpr int64_t kWorthMultiplications = 1 << 20;

constexpr int64_t lines(int64_t num_bytes) { return (num_bytes + 63) / 64 * 64; }

// Some rows times a weight, whoever packed it.
class Product {
  public:
    Product() = default;

    Product(const Linear& linear, const float* rows, float* out, int64_t width, int64_t num_rows, char* scratch)
        : is_panels_(linear.packing == kPanels), is_integer_(linear.arithmetic == int64_t(Arithmetic::integer)),
          panels_(chosen_kernels().panels),
          products_(is_panels_ ? nullptr : &chosen_products(static_cast<WeightType>(linear.packing))),
          panel_call_{{static_cast<Format>(linear.format), linear.num_out, linear.num_in, linear.group},
                      static_cast<const uint8_t*>(linear.packed), rows, linear.num_in, linear.bias, out, width,
                      num_rows, scratch},
          call_{rows, linear.num_in, linear.packed, linear.bias, out, width, num_rows, linear.num_in, linear.num_out,
                scratch} {}

    int64_t scratch_bytes() const {
        if (!is_panels_) return products_->scratch_bytes(call_.num_rows, call_.num_in);
        const Arithmetic arithmetic = is_integer_ ? Arithmetic::integer : Arithmetic::floating;
        return panels_->scratch_bytes(arithmetic, call_.num_rows, call_.num_in);
    }

    // Rows that must be made ready, those behind the last among them.
    int64_t num_ready_rows() const {
        if (is_panels_) return is_integer_ ? call_.num_rows : 0;
        return products_->num_ready_rows(call_);
    }

    void make_ready(int64_t row, int64_t first, int64_t end) const {
        if (is_panels_)
            panels_->make_ready(panel_call_, row, first, end);
        else
            products_->make_ready(call_, row, first, end);
    }

    void multiply(TeamThread& thread) const {
        if (is_panels_)
            (is_integer_ ? panels_->integer : panels_->floating)(panel_call_, thread);
        else
            products_->multiply(call_, thread);
    }

  private:
    bool is_panels_ = false, is_integer_ = false;
    const PanelProducts* panels_ = nullptr;
    const Products* products_ = nullptr;
    PanelCall panel_call_ = {};
    ProductCall call_ = {};
};

// Products with the same rows; their outputs stand side by side in rows of `width`.
class Group {
  public:
    template <size_t N>
    Group(const Linear (&linears)[N], const float* rows, float* out, int64_t width, int64_t num_rows, char* scratch) {
        for (const Linear& linear : linears) {
            if (linear.num_out == 0) continue;
            char* own = scratch == nullptr ? nullptr : scratch + scratch_bytes_;
            products_[count_] = {linear, rows, out, width, num_rows, own};
            out += linear.num_out;
            scratch_bytes_ += lines(products_[count_].scratch_bytes());
            num_ready_rows_ = std::max(num_ready_rows_, products_[count_++].num_ready_rows());
        }
    }

    int64_t scratch_bytes() const { return scratch_bytes_; }

    int64_t num_ready_rows() const { return num_ready_rows_; }

    void make_ready(int64_t row, int64_t first, int64_t end) const {
        for (int at = 0; at < count_; ++at)
            if (row < products_[at].num_ready_rows()) products_[at].make_ready(row, first, end);
    }

    void multiply(TeamThread& thread) const {
        for (int at = 0; at < count_; ++at) products_[at].multiply(thread);
        thread.wait();
    }

  private:
    Product products_[3];
    int count_ = 0;
    int64_t scratch_bytes_ = 0, num_ready_rows_ = 0;
};

// A chunk of rows: the first, and how many.
struct Rows {
    int64_t first, count;
};

// What threads share of a step.
struct StepState {
    const DecoderCall& call;
    AttentionCall attention;
    AttentionMemory attention_memory;
    Memory scratch;

    explicit StepState(const DecoderCall& given)
        : call(given), attention(attention_call(given)), attention_memory(attention) {
        scratch = taken(most_scratch());
    }

    int64_t query_size() const { return call.num_heads * call.head_size; }
    int64_t qkv_size() const { return (call.num_heads + 2 * call.num_kv_heads) * call.head_size; }

    Group qkv(const Layer& layer, Rows rows) const {
        return {layer.qkv, call.hidden + rows.first * call.hidden_size, call.qkv, qkv_size(), rows.count,
                scratch.get()};
    }

    Group out(const Layer& layer, Rows rows) const {
        const Linear linears[] = {layer.out};
        return {linears, call.answers + rows.first * query_size(), call.added + rows.first * call.hidden_size,
                call.hidden_size, rows.count, scratch.get()};
    }

    Group gate_up(const Layer& layer, Rows rows) const {
        return {layer.gate_up, call.hidden + rows.first * call.hidden_size, call.gate_up, 2 * call.intermediate_size,
                rows.count, scratch.get()};
    }

    Group down(const Layer& layer, Rows rows) const {
        const Linear linears[] = {layer.down};
        return {linears, call.gated, call.added + rows.first * call.hidden_size, call.hidden_size, rows.count,
                scratch.get()};
    }

    // Rows of what is wanted.
    Group head(Rows rows) const {
        const Linear linears[] = {call.head};
        return {linears, call.picked + rows.first * call.hidden_size, call.logits + rows.first * call.head.num_out,
                call.head.num_out, rows.count, scratch.get()};
    }

    int num_threads() const {
        int64_t weights = 0;
        for (int64_t at = 0; at < call.num_layers; ++at) {
            const Layer& layer = call.layers[at];
            for (const Linear& one : layer.qkv) weights += one.num_in * one.num_out;
            for (const Linear& one : layer.gate_up) weights += one.num_in * one.num_out;
            weights += layer.out.num_in * layer.out.num_out + layer.down.num_in * layer.down.num_out;
        }
        weights = call.num_rows * weights + call.num_wanted * call.head.num_in * call.head.num_out;
        return weights >= kWorthMultiplications ? int(call.num_threads) : 1;
    }

  private:
    int64_t most_scratch() const {
        const Rows rows = {0, std::min(call.chunk_rows, call.num_rows)};
        int64_t most = head({0, std::min(call.chunk_rows, call.num_wanted)}).scratch_bytes();
        for (const Layer* layer = call.layers; layer < call.layers + call.num_layers; ++layer)
            for (const Group& group : {qkv(*layer, rows), out(*layer, rows), gate_up(*layer, rows), down(*layer, rows)})
                most = std::max(most, group.scratch_bytes());
        return most;
    }

    static AttentionCall attention_call(const DecoderCall& call) {
        const int64_t size = call.num_heads * call.head_size;
        return {
            call.queries, size, call.answers, size, nullptr, call.key_block_stride, nullptr, call.value_block_stride,
            static_cast<KVType>(call.kv_type), int(call.num_heads), int(call.num_kv_heads), int(call.head_size),
            int(call.head_size), int(call.block_size), call.tables, call.members, call.tiles, call.num_tiles,
            call.num_rows, call.num_rows, -1, static_cast<float>(call.scale), 0.0f, int(call.num_threads)};
    }
};

// One thread's way through a step. A phase begins when the tasks of the one before are done; rows are made ready for a
// product by whoever makes them, where that is one row at a time.
class Step {
  public:
    Step(const StepState& state, TeamThread& thread)
        : state_(state), call_(state.call), kernels_(chosen_kernels()), thread_(thread), attention_(state.attention) {}

    void run() {
        timed(kEmbed, [&] {
            thread_.share(call_.num_rows, [&](int64_t row) {
                embed(row);
                turn(row);
            });
        });
        for (int64_t at = 0; at < call_.num_layers; ++at) {
            for_chunks(call_.num_rows, [&](Rows rows) { ask(at, rows); });
            attend(at);
            const bool is_last = at + 1 == call_.num_layers;
            if (is_last) draw_together();
            for_chunks(is_last ? call_.num_needed : call_.num_rows,
                       [&](Rows rows) { answer(call_.layers[at], rows); });
        }
        finish();
        spread_out();
        for_chunks(call_.num_wanted, [&](Rows rows) { tell(rows); });
        const ArgmaxCall argmax = {call_.logits, call_.head.num_out, call_.likeliest, call_.is_sound, call_.num_sampled,
                                   call_.head.num_out};
        timed(kArgmax, [&] {
            thread_.share(call_.num_sampled, [&](int64_t row) { kernels_.argmax_row(argmax, row); });
        });
    }

  private:
    template <typename Do>
    void for_chunks(int64_t num_rows, Do each) {
        for (int64_t first = 0; first < num_rows; first += call_.chunk_rows)
            each(Rows{first, std::min(call_.chunk_rows, num_rows - first)});
    }

    void embed(int64_t row) {
        const Linear& from = call_.embedding;
        float* to = call_.residual + row * call_.hidden_size;
        if (from.packing == kPanels)
            kernels_.panels->unpack({{static_cast<Format>(from.format), from.num_out, from.num_in, from.group},
                                     static_cast<const uint8_t*>(from.packed), to}, call_.tokens[row]);
        else
            chosen_products(static_cast<WeightType>(from.packing))
                .rows({from.packed, from.num_out, from.num_in, call_.tokens + row, 1, to});
    }

    // Cosines and sines of a row's position. An angle is a float, as models are trained; its cosine is that of a
    // double, rounded.
    void turn(int64_t row) {
        const int64_t half = call_.head_size / 2, first = row * call_.head_size;
        const float position = static_cast<float>(call_.positions[row]);
        const float scaling = static_cast<float>(call_.rope_scaling);
        for (int64_t pair = 0; pair < half; ++pair) {
            const double angle = static_cast<double>(position * call_.frequencies[pair]);
            float* cos = call_.cos + first + pair;
            float* sin = call_.sin + first + pair;
            cos[0] = cos[half] = static_cast<float>(std::cos(angle)) * scaling;
            sin[0] = sin[half] = static_cast<float>(std::sin(angle)) * scaling;
        }
    }

    // Nobody asks what the last layer makes of most rows of a prompt: all they leave behind are keys and values. Rows
    // that are needed move to the front, in order, which never overwrites one that is still to move:
    //
    //     rows     0 1 2 3 4 5 6 7         needed   2 5 7
    //     front    2 5 7                   and back where they were, in `spread_out`
    //
    // The others are done. What a row attended to shows whether what it wrote can be used.
    void draw_together() {
        if (is_every_needed()) return;
        timed(kNorm, [&] {
            thread_.share(call_.num_rows, [&](int64_t row) {
                call_.is_finite[row] = is_finite(call_.answers + row * state_.query_size(), state_.query_size());
            });
            thread_.share(1, [&](int64_t) {
                for (int64_t at = 0; at < call_.num_needed; ++at) {
                    move(call_.answers, state_.query_size(), call_.needed[at], at);
                    move(call_.residual, call_.hidden_size, call_.needed[at], at);
                }
            });
        });
    }

    void spread_out() {
        if (is_every_needed()) return;
        timed(kNorm, [&] {
            thread_.share(1, [&](int64_t) {
                for (int64_t at = call_.num_needed - 1; at >= 0; --at)
                    move(call_.hidden, call_.hidden_size, at, call_.needed[at]);
            });
        });
    }

    bool is_every_needed() const { return call_.num_needed == call_.num_rows; }

    static void move(float* rows, int64_t size, int64_t from, int64_t to) {
        if (from != to) std::copy(rows + from * size, rows + (from + 1) * size, rows + to * size);
    }

    // The last norm, and whether a row's numbers are any.
    void finish() {
        const NormCall last = norm_call(call_.added, call_.norm, {0, call_.num_needed});
        timed(kNorm, [&] {
            thread_.share(call_.num_needed, [&](int64_t at) {
                kernels_.norm_row(last, at);
                const int64_t row = is_every_needed() ? at : call_.needed[at];
                call_.is_finite[row] = is_finite(call_.hidden + at * call_.hidden_size, call_.hidden_size);
            });
        });
    }

    // The logits of rows that are wanted.
    void tell(Rows rows) {
        const Group head = state_.head(rows);
        timed(kHead, [&] {
            thread_.share(std::max(rows.count, head.num_ready_rows()), [&](int64_t row) {
                if (row < rows.count) pick(rows.first + row);
                head.make_ready(row, 0, call_.hidden_size);
            });
            head.multiply(thread_);
        });
    }

    void pick(int64_t at) {
        const float* from = call_.hidden + call_.wanted[at] * call_.hidden_size;
        std::copy(from, from + call_.hidden_size, call_.picked + at * call_.hidden_size);
    }

    // Norm, queries, keys and values; the latter two into the store.
    void ask(int64_t at, Rows rows) {
        const Layer& layer = call_.layers[at];
        const LayerStore& store = call_.stores[at];
        const Group qkv = state_.qkv(layer, rows);
        norm(at == 0 ? nullptr : call_.added, layer.input_norm, rows, qkv);
        timed(kQkv, [&] { qkv.multiply(thread_); });
        const RopeCall rope = {call_.qkv, state_.qkv_size(), call_.cos + rows.first * call_.head_size,
                               call_.sin + rows.first * call_.head_size, layer.query_norm, layer.key_norm, eps(),
                               store.keys, call_.key_block_stride, store.values, call_.value_block_stride,
                               static_cast<KVType>(call_.kv_type), call_.blocks + rows.first, call_.slots + rows.first,
                               call_.queries + rows.first * state_.query_size(), rows.count, int(call_.num_heads),
                               int(call_.num_kv_heads), int(call_.head_size), int(call_.head_size),
                               int(call_.block_size)};
        timed(kRopeWrite, [&] { thread_.share(rows.count, [&](int64_t row) { kernels_.rope_row(rope, row); }); });
    }

    void attend(int64_t at) {
        attention_.keys = call_.stores[at].keys;
        attention_.values = call_.stores[at].values;
        attention_.window = int(call_.layers[at].window);
        timed(kAttention, [&] {
            kernels_.attention(attention_, thread_);
            thread_.wait();
        });
    }

    // What attention found, and the gated part.
    void answer(const Layer& layer, Rows rows) {
        const Group out = state_.out(layer, rows);
        const Group gate_up = state_.gate_up(layer, rows);
        const Group down = state_.down(layer, rows);
        timed(kOut, [&] {
            const auto ready = [&](int64_t row, int64_t first, int64_t end) { out.make_ready(row, first, end); };
            if (out.num_ready_rows() > 0) thread_.share_parts(out.num_ready_rows(), state_.query_size(), ready);
            out.multiply(thread_);
        });
        norm(call_.added, layer.post_norm, rows, gate_up);
        timed(kGateUp, [&] { gate_up.multiply(thread_); });
        silu(rows, down);
        timed(kDown, [&] { down.multiply(thread_); });
    }

    void norm(const float* added, const float* weight, Rows rows, const Group& next) {
        const NormCall norm = norm_call(added, weight, rows);
        timed(kNorm, [&] {
            thread_.share(std::max(rows.count, next.num_ready_rows()), [&](int64_t row) {
                if (row < rows.count) kernels_.norm_row(norm, row);
                next.make_ready(row, 0, call_.hidden_size);
            });
        });
    }

    void silu(Rows rows, const Group& next) {
        const SiluCall silu = {call_.gate_up, call_.gated, rows.count, call_.intermediate_size};
        timed(kSilu, [&] {
            const int64_t num_rows = std::max(rows.count, next.num_ready_rows());
            thread_.share_parts(num_rows, call_.intermediate_size, [&](int64_t row, int64_t first, int64_t end) {
                if (row < rows.count) kernels_.silu_part(silu, row, first, end);
                next.make_ready(row, first, end);
            });
        });
    }

    NormCall norm_call(const float* added, const float* weight, Rows rows) const {
        const int64_t first = rows.first * call_.hidden_size;
        return {added == nullptr ? nullptr : added + first, call_.residual + first, weight, call_.hidden + first,
                rows.count, call_.hidden_size, eps()};
    }

    template <typename Do>
    void timed(Part part, Do work) {
        if (call_.seconds == nullptr || thread_.number() > 0) return work();
        const double started_s = omp_get_wtime();
        work();
        call_.seconds[part] += omp_get_wtime() - started_s;
    }

    static bool is_finite(const float* numbers, int64_t size) {
        float differences = 0.0f;
        for (int64_t at = 0; at < size; ++at) differences += numbers[at] - numbers[at];
        return differences == 0.0f;
    }

    float eps() const { return static_cast<float>(call_.eps); }

    const StepState& state_;
    const DecoderCall& call_;
    const Kernels& kernels_;
    TeamThread& thread_;
    AttentionCall attention_;
};

void check(const int64_t* indices, int64_t count, int64_t size, const char* what) {
    for (int64_t at = 0; at < count; ++at)
        if (indices[at] < 0 || indices[at] >= size)
            throw std::out_of_range(std::string(what) + " must be between 0 and " + std::to_string(size - 1) + ", " +
                                    std::to_string(indices[at]) + " given");
}

// Upwards, and each once: rows are moved by that.
void check_needed(const DecoderCall& call) {
    if (call.num_needed == call.num_rows) return;
    check(call.needed, call.num_needed, call.num_rows, "needed rows");
    for (int64_t at = 1; at < call.num_needed; ++at)
        if (call.needed[at] <= call.needed[at - 1]) throw std::out_of_range("needed rows must be in order, each once");
    for (int64_t at = 0; at < call.num_wanted; ++at)
        if (!std::binary_search(call.needed, call.needed + call.num_needed, call.wanted[at]))
            throw std::out_of_range("row " + std::to_string(call.wanted[at]) + " is wanted and not needed");
}

}  // namespace

void compute_step(const DecoderCall& call) {
    check(call.tokens, call.num_rows, call.embedding.num_out, "tokens");
    check(call.wanted, call.num_wanted, call.num_rows, "wanted rows");
    check_needed(call);
    const StepState state(call);
    in_team(state.num_threads(), [&](TeamThread& thread) { Step(state, thread).run(); });
}

}  // namespace quire
