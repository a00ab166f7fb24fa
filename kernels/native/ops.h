// The table of ops that each instruction set fills, and their arguments. The Python file of an op's name documents it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "thread_pool.h"

namespace pagoda {

enum class Dtype { float32 = 0, bfloat16 = 1 };

// Up to so many queries of a sequence are attended in the order of a decode's sums. With more, tiles of attention_prefill.h
// are faster, whose sums have another order.
constexpr int64_t FEW_QUERIES = 6;

// Without x nothing is added to the residual; without out it is not normalized.
struct NormArgs {
    const void* x;                  // [rows, size], or null
    const void *weight, *bias;      // [size]; bias may be null
    void* residual;                 // like x, or null
    Dtype residual_dtype;           // that of the rest, or float32
    void* out;                      // like x, or null
    int64_t rows, size;
    float eps;
    bool is_centred;                // the mean of a row is subtracted from it
};

struct RopeArgs {
    const void* qkv;                // [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    const float *cosines, *sines;   // [num_tokens, head_dim / 2]
    const int64_t* slots;           // [num_tokens]
    void *keys, *values;            // the pages of one layer: of int8 if they have scales, else of the dtype of qkv
    float *key_scales, *value_scales;  // [num_blocks, block_size, num_kv_heads], or null
    const float* centre;            // [num_kv_heads, head_dim], subtracted from keys that get scales; or null
    void* queries;                  // [num_tokens, num_heads, head_dim], written
    int64_t num_tokens, num_heads, num_kv_heads, head_dim;
};

struct AttentionArgs {
    Dtype dtype;                    // of the queries, the result, and pages without scales
    const void* queries;            // [num_tokens, num_heads, head_dim]
    const void *keys, *values;      // [num_blocks, block_size, num_kv_heads, head_dim], of int8 if they have scales
    const float *key_scales, *value_scales;  // [num_blocks, block_size, num_kv_heads], or null
    const int32_t* query_start;     // [num_seqs + 1]
    const int32_t* context_len;     // [num_seqs]
    const int32_t* block_table;     // [num_seqs, max_blocks]
    void* out;                      // like queries
    int64_t num_seqs, max_blocks, block_size, num_heads, num_kv_heads, head_dim;
    int64_t sliding_window;         // 0: none
    const float* sinks;             // [num_heads], a logit that is in the softmax's denominator alone; or null
    float softcap;                  // scores become softcap · tanh(score / softcap); 0: they stay
};

constexpr int64_t UNSURE_DRAW = -2;
constexpr int64_t MOST_TOP_K = 256;

struct DrawArgs {
    const void* x;                  // logits, `size` a row
    const int64_t* rows;            // [count], which rows draw
    const float* temperature;       // [count], as all parameters
    const int64_t *seed, *positions;  // of the noise
    const int64_t* top_k;
    const float* top_p;
    const float* lowest;            // the least scaled logit that another rule keeps; not positive
    int64_t* tokens;                // [num_rows], the index of each row's maximum, or -1 in a broken row; of rows that draw
                                    // it becomes the drawn one, or UNSURE_DRAW where other code must draw
    int64_t count, size;
    bool only_likeliest;            // -1 instead of any other token that is drawn
};

// A weight [out, in] of which several threads read rows as float32, whatever form they have in memory.
struct WeightRows {
    void (*read)(const void* weight, int64_t row, float* to);
    const void* weight;
    int64_t in, out;

    // Writes a row's `in` numbers; zeros beyond the last row.
    void operator()(int64_t row, float* to) const {
        if (row < out)
            read(weight, row, to);
        else
            std::fill(to, to + in, 0.0f);
    }
};

enum class Function { none, silu, gelu_tanh, gelu, relu, relu2, clamped_silu, xielu };  // FUNCTIONS in activate.py

struct Activation {
    Function function;
    bool is_gated;                  // function(first half of a row) · second half
    float parameters[2];

    int64_t width() const { return is_gated ? 2 : 1; }
};

// Rows that several weights of one size, those of experts, multiply: first the rows of expert 0, then those of expert 1, …
struct ExpertRows {
    const int32_t* starts;          // [count + 1], rows starts[e] to starts[e + 1] (exclusive) are those of expert e
    const int32_t* sources;         // [rows], which row of x each is; null: its own
    int64_t count = 0;              // of experts; 0: one weight multiplies all rows
    int64_t weight_bytes, num_scales;  // of one expert's packed weight; the experts' are adjacent, as their biases are
};

struct LinearArgs {
    const void* x;                  // [rows, in], or [rows, 2 * in] if the activation is gated
    const void* weight;             // as the op's pack function has packed it
    const float* scales;            // of int8 weights, likewise
    const void* bias;               // [out] of x's dtype, or null
    void* out;                      // [rows, out], each row out_stride elements behind the previous
    Dtype out_dtype;                // x's, or float32; linear_int8_weight_amx writes x's in any case
    int64_t rows, in, out_size, out_stride;
    Activation activation;          // of the rows before they are multiplied
    ExpertRows experts;
};

constexpr int64_t LOW_RANK_PADDING = 64;  // inputs and outputs of an adapter's weights are padded to a multiple of it

// What an adapter adds to adjacent outputs of a product.
struct LowRankPart {
    int64_t column, size;           // the first output, and how many there are
    int64_t rank;
    const void* up;                 // [panels, rank, LOW_RANK_PADDING]

    int64_t panels() const { return (size + LOW_RANK_PADDING - 1) / LOW_RANK_PADDING; }
};

// What an adapter adds to a product. kernels/low_rank.py writes it as an array of int64.
struct LowRankEntry {
    const void* down;               // [ranks, in], padded: those of the first part, then those of the next
    int64_t ranks;                  // of all parts; 0: it adds nothing
    int64_t num_parts;
    LowRankPart parts[3];

    int64_t panels() const {
        int64_t sum = 0;
        for (int64_t part = 0; part < num_parts; part++) sum += parts[part].panels();
        return sum;
    }
};
static_assert(sizeof(LowRankEntry) == 15 * sizeof(int64_t), "kernels/low_rank.py has the same layout");

struct LowRankArgs {
    const void* x;                  // [rows, width * in]
    void* out;                      // [rows, out_stride] of x's dtype, as the weights are
    const int32_t* slots;           // [rows], which entry of the table is a row's; -1: none
    const LowRankEntry* table;
    int64_t rows, in, out_stride;
    Activation activation;          // of the rows before they are multiplied
};

struct WeighArgs {
    const void* x;                  // [rows * chosen, size]
    const int32_t* places;          // [rows, chosen], which row of x is that of a choice
    const float* weights;           // [rows, chosen]
    const void* shared;             // [rows, size], or null
    const float* gates;             // [rows], shared is multiplied by their sigmoid; or null
    void* out;                      // [rows, size]
    int64_t rows, chosen, size;
};

// The formats of weights in groups that there are products for; kernels/linear_grouped.py has the same order. Scales are those
// of 32 inputs, except in six bits of 16. Nibbles alone mean -8…7, and the values of a small table are from -16 to 16.
enum class Grouped { nibbles_above_minimum, nibbles, small_table, table, five_bits, five_bits_above_minimum, six_bits, bytes };

// A row of a weight in groups, as a GroupedWeight has it: in 4 bits two codes a byte, else a value a byte. Scales and
// minimums are in fp16; `minimums` is null if the format has none.
struct GroupRow {
    const uint8_t* values;
    const uint16_t *scales, *minimums;
};

// A weight [out, in] in groups of which several threads read rows, whatever form they have in memory.
struct GroupRows {
    // Returns a row, for which `buffer` may be used: buffer_bytes(in), aligned for scales.
    GroupRow (*read)(const void* weight, int64_t row, uint8_t* buffer);
    const void* weight;
    int64_t in, out;

    // Room for `in` values, and for scales and minimums of 16 inputs or more.
    static constexpr int64_t buffer_bytes(int64_t in) { return in + in / 16 * 4; }
};

// A GroupedWeight.
struct StoredGroups {
    const void* values;
    const uint16_t* scales;         // [out, groups], fp16
    const uint16_t* minimums;       // likewise, if the format has any
    int64_t row_bytes, groups;      // of the values of a row; and how many groups it has

    static GroupRow read(const void* weight, int64_t row, uint8_t*) {
        auto& self = *static_cast<const StoredGroups*>(weight);
        return {static_cast<const uint8_t*>(self.values) + row * self.row_bytes, self.scales + row * self.groups,
                self.minimums ? self.minimums + row * self.groups : nullptr};
    }
};

struct Ops {
    const char* name;
    bool pairs_are_limited;         // int8 weights of neighbouring inputs have |w0 + w1| <= 128
    void (*norm)(ThreadPool&, Dtype, const NormArgs&);
    void (*activate)(ThreadPool&, Dtype, const void* x, void* out, int64_t rows, int64_t size, const Activation&);
    void (*cap)(ThreadPool&, Dtype, void* x, int64_t count, float softcap);
    void (*rope_and_store_kv)(ThreadPool&, Dtype, const RopeArgs&);
    void (*paged_attention)(ThreadPool&, const AttentionArgs&);
    // A mask has ceil(size / 32) words; bit i of word w allows element 32 * w + i. `rows` names the row of each mask. Without
    // rows and masks argmax takes the first `count` rows whole.
    void (*argmax)(ThreadPool&, Dtype, const void* x, const int64_t* rows, const uint32_t* masks, int64_t* out, int64_t count, int64_t size);
    void (*mask_rows)(ThreadPool&, float* x, const int64_t* rows, const uint32_t* masks, int64_t count, int64_t size);
    // Unsure are draws that the rounding of a logarithm or of a sum may decide, and those of a top_k beyond MOST_TOP_K.
    void (*draw)(ThreadPool&, Dtype, const DrawArgs&);
    // A scale is not finite where a weight is not.
    void (*pack_int8)(ThreadPool&, const WeightRows&, int8_t* packed, float* scales);
    void (*linear_int8)(ThreadPool&, Dtype, const LinearArgs&);
    void (*embedding_int8)(ThreadPool&, Dtype, const int64_t* ids, const int8_t* packed, const float* scales, void* out, int64_t count, int64_t in);
    int64_t (*grouped_bytes)(Grouped, int64_t in, int64_t out);
    // `packed` has grouped_bytes(in, out). `table` [16], if the format has one, is put behind the last panel.
    void (*pack_grouped)(ThreadPool&, Grouped, const GroupRows&, const int8_t* table, uint8_t* packed);
    void (*linear_grouped)(ThreadPool&, Dtype, Grouped, const LinearArgs&);
    void (*embedding_grouped)(ThreadPool&, Dtype, Grouped, const int64_t* ids, const uint8_t* packed, void* out, int64_t count, int64_t in, int64_t out_size);
    // Rounds groups of 32 weights to 4 bits above a minimum, as a GroupedWeight has them.
    void (*quantize_int4)(ThreadPool&, Dtype, const void* weight, uint8_t* values, uint16_t* scales, uint16_t* minimums, int64_t groups);
    void (*pack_whole)(ThreadPool&, Dtype, const void* weight, void* packed, int64_t in, int64_t out);
    void (*linear_whole)(ThreadPool&, Dtype, const LinearArgs&);
    void (*weigh_experts)(ThreadPool&, Dtype, const WeighArgs&);
    void (*add_low_rank)(ThreadPool&, Dtype, const LowRankArgs&);
};

extern const Ops generic_ops, avx2_ops, avx512_ops;
Ops make_avxvnni_ops();
Ops make_neon_ops();
Ops make_neon_i8mm_ops();

// The tables that this processor can run, the fastest first.
std::vector<const Ops*> usable_ops();

// The ops that use the matrix unit of AMX. They replace or complement those of AVX-512, and pack their weights themselves.
#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define PAGODA_HAS_AMX 1
bool may_use_amx();
void paged_attention_amx(ThreadPool&, const AttentionArgs&);
void pack_int8_weight_amx(ThreadPool&, const WeightRows&, int8_t* packed, float* scales);
void linear_int8_weight_amx(ThreadPool&, Dtype, const LinearArgs&);
#endif

template <typename A, typename B>
constexpr int64_t ceil_div(A a, B b) {
    return (static_cast<int64_t>(a) + static_cast<int64_t>(b) - 1) / static_cast<int64_t>(b);
}

// How many rows a part has so that it is worth sharing among threads: some thousand elements.
inline int64_t rows_per_part(int64_t rows, int64_t row_elements) {
    constexpr int64_t ELEMENTS = 8192;
    return std::max<int64_t>(1, std::min(rows, ceil_div(ELEMENTS, row_elements)));
}

}  // namespace pagoda
