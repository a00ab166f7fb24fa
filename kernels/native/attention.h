// Attention of a step, which reads the pages of the KV cache in place: its parts, and how threads share them. No include
// guard: each instruction set compiles its own copy.

constexpr int64_t SPLIT = 256;             // the most tokens that are attended together
constexpr int64_t PARTIAL_ROOM = 4 << 20;  // floats of partial results at a time, unless one sequence needs more

// The offset in the pages, in elements, of each of a run of tokens: found once, used for the keys and values of every head.
// Access through it takes the same time for any block size.
struct TokenOffsets {
    int64_t count = 0;
    int64_t unseen = 0;  // the first ones, which lie before the windows of all queries: they must not be read
    int64_t at[SPLIT];

    TokenOffsets() = default;

    // Tokens begin to end (exclusive) of the sequence that has these blocks; `stride`: elements of a token.
    TokenOffsets(const int32_t* blocks, int64_t block_size, int64_t stride, int64_t begin, int64_t end) : count(end - begin) {
        int64_t block = begin / block_size, within = begin % block_size;
        for (int64_t i = 0; i < count; i++) {
            at[i] = (blocks[block] * block_size + within) * stride;
            if (++within == block_size) within = 0, block++;
        }
    }

    bool has(int64_t i) const { return i >= unseen && i < count; }
};

// The scales of a run of tokens for one KV head, gathered for the keys and values of all its queries. Pages of floats have none.
template <int V, typename P>
struct TokenScales {
    TokenScales(const AttentionArgs&, const TokenOffsets&, int64_t) {}

    void scale_scores(float*) const {}
    void scale_weights(float*) const {}
    Floats key(Floats read, int64_t) const { return read; }
    Floats value(Floats read, int64_t) const { return read; }
};

template <int V>
struct TokenScales<V, int8_t> {
    static constexpr int64_t STEP = 32;  // tokens that every loop over scores ends within
    int64_t count;
    alignas(64) float keys[SPLIT], values[SPLIT];  // zeros for unseen tokens and up to the next multiple of STEP

    TokenScales(const AttentionArgs& args, const TokenOffsets& tokens, int64_t kv_head)
        : count(ceil_div(tokens.count, STEP) * STEP) {
        for (int64_t i = 0; i < count; i++) {
            bool is_key = tokens.has(i);
            int64_t at = is_key ? tokens.at[i] / (V * LANES) + kv_head : 0;
            keys[i] = is_key ? args.key_scales[at] : 0;
            values[i] = is_key ? args.value_scales[at] : 0;
        }
    }

    void scale_scores(float* scores) const { multiply(scores, keys); }
    void scale_weights(float* weights) const { multiply(weights, values); }
    Floats key(Floats read, int64_t token) const { return read * keys[token]; }
    Floats value(Floats read, int64_t token) const { return read * values[token]; }

private:
    void multiply(float* row, const float* scales) const {
        for (int64_t i = 0; i < count; i += LANES) store(row + i, load(row + i) * load(scales + i));
    }
};

// Elements of the queries and of the result, which have the dtype of pages of floats.
template <typename P>
Floats load_query(const AttentionArgs& args, int64_t at) {
    if constexpr (!std::is_same_v<P, int8_t>)
        return load(static_cast<const P*>(args.queries) + at);
    else if (args.dtype == Dtype::float32)
        return load(static_cast<const float*>(args.queries) + at);
    else
        return load(static_cast<const bf16*>(args.queries) + at);
}

template <typename P>
void store_result(const AttentionArgs& args, int64_t at, Floats value) {
    if constexpr (!std::is_same_v<P, int8_t>)
        store(static_cast<P*>(args.out) + at, value);
    else if (args.dtype == Dtype::float32)
        store(static_cast<float*>(args.out) + at, value);
    else
        store(static_cast<bf16*>(args.out) + at, value);
}

// What a query's sum of weighted values is divided by: the sum of its weights, and its head's sink if heads have one.
// A sink far above the greatest score makes it infinite, and the result 0.
inline float divisor(const AttentionArgs& args, int64_t head, float top, float total) {
    return args.sinks ? total + exponential(broadcast(args.sinks[head] - top))[0] : total;
}
#include "attention_decode.h"
#include "attention_prefill.h"
#if defined(PAGODA_AMX)
#include "attention_prefill_amx.h"
#endif
#include "attention_shared.h"

template <int V, typename P>
void paged_attention_of(ThreadPool& pool, const AttentionArgs& args) {
    constexpr int64_t HEAD_DIM = V * LANES;
    int64_t group = args.num_heads / args.num_kv_heads;
    static std::vector<AttentionPart> decodes, prefills;  // one op runs at a time; decodes include chunks of few queries
    static std::vector<size_t> merged;                    // the first part of each sequence that has several in `decodes`
    static std::vector<float> partial;
    static SharedParts shared;
    prefills.clear();
    auto queries_of = [&](int32_t seq) { return args.query_start[seq + 1] - args.query_start[seq]; };
    for (int32_t seq = 0; seq < args.num_seqs; seq++) {
        int32_t num_queries = queries_of(seq), tile = static_cast<int32_t>(std::max<int64_t>(1, ROW_TILE / group));
        if (num_queries <= FEW_QUERIES) continue;
        for (int32_t first = 0; first < num_queries; first += tile)
            prefills.push_back({seq, first, std::min(first + tile, num_queries), -1});
    }
    // Partial results: [num_kv_heads, queries * group, head_dim], then the greatest score and the total of each row.
    auto split_size = [&](int32_t seq) { return queries_of(seq) * args.num_heads * (HEAD_DIM + 2); };
    // Collects the parts of sequences from `seq` on, as far as there is room for partial results, and of one at least.
    // Returns the first sequence that is left.
    int64_t partial_size = 0;
    auto collect_decodes = [&](int32_t seq) {
        decodes.clear();
        merged.clear();
        partial_size = 0;
        for (; seq < args.num_seqs; seq++) {
            int32_t num_queries = queries_of(seq), end = args.context_len[seq];
            if (num_queries > FEW_QUERIES) continue;
            int32_t window = static_cast<int32_t>(args.sliding_window);
            int32_t begin = window ? std::max(0, end - num_queries + 1 - window) : 0;
            int64_t num_splits = begin < end ? (end - 1) / SPLIT - begin / SPLIT + 1 : 0;
            if (num_splits > 1) {
                if (partial_size > 0 && partial_size + num_splits * split_size(seq) > PARTIAL_ROOM) break;
                merged.push_back(decodes.size());
            }
            while (begin < end) {
                int32_t next = static_cast<int32_t>(std::min<int64_t>(end, (begin / SPLIT + 1) * SPLIT));
                decodes.push_back({seq, begin, next, num_splits > 1 ? partial_size : -1});
                if (num_splits > 1) partial_size += split_size(seq);
                begin = next;
            }
        }
        partial.resize(std::max<size_t>(partial.size(), partial_size));
        return seq;
    };

    int64_t stride = args.num_kv_heads * HEAD_DIM;
    const P *all_keys = static_cast<const P*>(args.keys), *all_values = static_cast<const P*>(args.values);
    auto locate = [&](const AttentionPart& part) {
        return TokenOffsets(args.block_table + part.seq * args.max_blocks, args.block_size, stride, part.first, part.last);
    };
    auto decode = [&](const AttentionPart& part, const TokenOffsets& split, int64_t kv_head, Prefetch<V, P>& prefetch) {
        static thread_local std::vector<float> room;
        PartRows rows{args, part, kv_head};
        room.resize(std::max<size_t>(room.size(), rows.count * (2 * HEAD_DIM + 2)));
        const P *keys = all_keys + kv_head * HEAD_DIM, *values = all_values + kv_head * HEAD_DIM;
        const TokenScales<V, P> scales(args, split, kv_head);
        float* queries = room.data();
        for (int64_t row = 0; row < rows.count; row++) PartRow{rows, row}.template load_scaled<P>(queries + row * HEAD_DIM);
        auto seen = [&](int64_t row) { return rows.seen(row / rows.group); };
        if (part.split < 0) {
            float *out = queries + rows.count * HEAD_DIM, *tops = out + rows.count * HEAD_DIM, *totals = tops + rows.count;
            attend_split<V>(queries, rows.count, keys, values, split, scales, args.softcap, seen, prefetch, tops, totals, out);
            for (int64_t row = 0; row < rows.count; row++)
                PartRow{rows, row}.template finish<P>(tops[row], totals[row], out + row * HEAD_DIM);
        } else {
            float* results = partial.data();
            attend_split<V>(queries, rows.count, keys, values, split, scales, args.softcap, seen, prefetch, results + rows.tops(),
                            results + rows.totals(), results + rows.sums());
        }
    };
    auto decode_shared = [&](int64_t number) {
        static thread_local std::vector<PartRow> rows;
        int64_t kv_head = number % args.num_kv_heads;
        const SharedParts::Tile& tile = shared.tiles[number / args.num_kv_heads];
        rows.clear();
        for (int32_t i = tile.part; static_cast<int64_t>(rows.size()) < tile.num_rows; i = shared.next[i]) {
            PartRows part{args, decodes[i], kv_head};
            int64_t first = i == tile.part ? tile.row : 0, left = tile.num_rows - static_cast<int64_t>(rows.size());
            for (int64_t row = first; row < std::min(part.count, first + left); row++) rows.push_back({part, row});
        }
        attend_shared<V>(rows, tile.tokens, all_keys + kv_head * HEAD_DIM, all_values + kv_head * HEAD_DIM, partial.data());
    };
    int64_t num_decodes = 0, run_length = 0, heads_a_part = 0;
    // With enough work, a thread takes a run of parts with all their heads, and prefetches the next part while it computes
    // one. The first of a run is not prefetched, so runs are long: two a thread, in case another process takes a core.
    auto share_decodes = [&] {
        shared.find(args, decodes, [&](const AttentionPart& part) { return queries_of(part.seq) * group; });
        num_decodes = static_cast<int64_t>(shared.alone.size());
        bool is_plenty = num_decodes >= 4 * pool.size();
        run_length = is_plenty ? std::max<int64_t>(2, ceil_div(num_decodes, 2 * pool.size())) : 1;
        heads_a_part = is_plenty ? args.num_kv_heads : 1;
        return ceil_div(num_decodes, run_length) * (args.num_kv_heads / heads_a_part);
    };
    auto decode_run = [&](int64_t number) {
        int64_t head_parts = args.num_kv_heads / heads_a_part;
        int64_t first_head = number % head_parts * heads_a_part, at = number / head_parts * run_length;
        int64_t end = std::min(num_decodes, at + run_length);
        TokenOffsets splits[2];
        auto part_at = [&](int64_t i) -> const AttentionPart& { return decodes[shared.alone[i]]; };
        splits[at % 2] = locate(part_at(at));
        for (; at < end; at++) {
            const TokenOffsets& split = splits[at % 2];
            int64_t steps = heads_a_part * ceil_div(queries_of(part_at(at).seq) * group, 4) * split.count;
            Prefetch<V, P> prefetch;
            if (at + 1 < end) {
                splits[(at + 1) % 2] = locate(part_at(at + 1));
                prefetch = {&args, splits[(at + 1) % 2], all_keys, all_values, stride, steps};
            } else {  // the last of a run: prefetch its own values, which are needed after its scores
                const P* values = all_values + first_head * HEAD_DIM;
                prefetch = {nullptr, split, values, values, heads_a_part * HEAD_DIM, ceil_div(steps, heads_a_part)};
            }
            for (int64_t kv_head = first_head; kv_head < first_head + heads_a_part; kv_head++)
                decode(part_at(at), split, kv_head, prefetch);
        }
    };
    int64_t head_tiles = ceil_div(group, ROW_TILE);  // of a KV head
    auto prefill = [&](int64_t number) {
        const AttentionPart& part = prefills[number / (args.num_kv_heads * head_tiles)];
        int64_t kv_head = number / head_tiles % args.num_kv_heads, head = number % head_tiles * ROW_TILE;
        TileRows rows{args, part.seq, kv_head * group + head, std::min(ROW_TILE, group - head), part.first, part.last};
        attend_tile<V>(rows, all_keys + kv_head * HEAD_DIM, all_values + kv_head * HEAD_DIM);
    };
    auto merge = [&](size_t first) {
        size_t end = first + 1;
        int32_t seq = decodes[first].seq;
        while (end < decodes.size() && decodes[end].seq == seq) end++;
        int64_t rows = queries_of(seq) * group, all_rows = rows * args.num_kv_heads;
        for (int64_t row = 0; row < all_rows; row++) {
            auto split = [&](size_t i) { return partial.data() + decodes[i].split; };
            int64_t top_at = all_rows * HEAD_DIM + row, total_at = top_at + all_rows;
            float top = -INFINITY, total = 0;
            for (size_t i = first; i < end; i++) top = std::max(top, split(i)[top_at]);
            Floats sums[V] = {};
            for (size_t i = first; i < end; i++) {
                float shrink = exponential_of_negative(broadcast(split(i)[top_at] - top))[0];
                total += split(i)[total_at] * shrink;
                for (int j = 0; j < V; j++) sums[j] += load(split(i) + row * HEAD_DIM + j * LANES) * shrink;
            }
            int64_t kv_head = row / rows, query = row % rows / group, head = kv_head * group + row % group;
            int64_t at = ((args.query_start[seq] + query) * args.num_heads + head) * HEAD_DIM;
            total = divisor(args, head, top, total);
            for (int j = 0; j < V; j++) store_result<P>(args, at + j * LANES, sums[j] / total);
        }
    };
    int64_t prefill_parts = static_cast<int64_t>(prefills.size()) * args.num_kv_heads * head_tiles;
    for (int32_t next = 0; next < args.num_seqs; prefill_parts = 0) {
        next = collect_decodes(next);
        int64_t decode_runs = share_decodes(), shared_tiles = static_cast<int64_t>(shared.tiles.size()) * args.num_kv_heads;
        pool.run(static_cast<int>(prefill_parts + shared_tiles + decode_runs), [&](int number) {
            if (number < prefill_parts)
                prefill(number);
            else if (number < prefill_parts + shared_tiles)
                decode_shared(number - prefill_parts);
            else
                decode_run(number - prefill_parts - shared_tiles);
        });
        int64_t merges = static_cast<int64_t>(merged.size());
        if (merges == 0) continue;
        int64_t merges_a_part = rows_per_part(merges, ceil_div(partial_size, merges));
        pool.run(static_cast<int>(ceil_div(merges, merges_a_part)), [&](int part) {
            int64_t end = std::min(merges, (part + 1) * merges_a_part);
            for (int64_t at = part * merges_a_part; at < end; at++) merge(merged[at]);
        });
    }
}

// P: the type of the pages' elements
template <typename P>
void paged_attention(ThreadPool& pool, const AttentionArgs& args) {
    switch (args.head_dim) {
        case 16: return paged_attention_of<16 / LANES, P>(pool, args);
        case 32: return paged_attention_of<32 / LANES, P>(pool, args);
        case 64: return paged_attention_of<64 / LANES, P>(pool, args);
        case 80: return paged_attention_of<80 / LANES, P>(pool, args);
        case 96: return paged_attention_of<96 / LANES, P>(pool, args);
        case 128: return paged_attention_of<128 / LANES, P>(pool, args);
        case 256: return paged_attention_of<256 / LANES, P>(pool, args);
    }
}
