// Attention of a step, which reads the pages of the KV cache in place: its parts, and how threads share them. No include
// guard: each instruction set compiles its own copy.

constexpr int64_t SPLIT = 256;  // the most tokens that are attended together

// The offset in the pages, in elements, of each of a run of tokens: found once, used for the keys and values of every head.
// Access through it takes the same time for any block size.
struct TokenOffsets {
    int64_t count = 0;
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
};
#include "attention_decode.h"
#include "attention_prefill.h"
#if defined(PAGODA_AMX)
#include "attention_prefill_amx.h"
#endif

struct AttentionPart {
    int32_t seq, first, last;  // a range of the sequence's queries, or of its context if it has few queries
    int64_t split;             // where its partial results start; -1: the part is the whole context
};

template <int V, typename T>
void paged_attention_of(ThreadPool& pool, const AttentionArgs& args) {
    constexpr int64_t HEAD_DIM = V * LANES;
    int64_t group = args.num_heads / args.num_kv_heads;
    static std::vector<AttentionPart> decodes, prefills;  // one op runs at a time; decodes include chunks of few queries
    static std::vector<float> partial;
    decodes.clear();
    prefills.clear();
    auto queries_of = [&](int32_t seq) { return args.query_start[seq + 1] - args.query_start[seq]; };
    // Partial results: [num_kv_heads, queries * group, head_dim], then the greatest score and the total of each row.
    auto split_size = [&](int32_t seq) { return queries_of(seq) * args.num_heads * (HEAD_DIM + 2); };
    int64_t partial_size = 0;
    for (int32_t seq = 0; seq < args.num_seqs; seq++) {
        int32_t num_queries = queries_of(seq), end = args.context_len[seq];
        if (num_queries <= FEW_QUERIES) {
            int32_t window = static_cast<int32_t>(args.sliding_window);
            int32_t begin = window ? std::max(0, end - num_queries + 1 - window) : 0;
            bool is_whole = begin / SPLIT == (end - 1) / SPLIT;
            while (begin < end) {
                int32_t next = static_cast<int32_t>(std::min<int64_t>(end, (begin / SPLIT + 1) * SPLIT));
                decodes.push_back({seq, begin, next, is_whole ? -1 : partial_size});
                if (!is_whole) partial_size += split_size(seq);
                begin = next;
            }
        } else {
            int32_t tile = static_cast<int32_t>(std::max<int64_t>(1, ROW_TILE / group));
            for (int32_t first = 0; first < num_queries; first += tile)
                prefills.push_back({seq, first, std::min(first + tile, num_queries), -1});
        }
    }
    partial.resize(std::max<size_t>(partial.size(), partial_size));

    float scale = 1.0f / std::sqrt(static_cast<float>(HEAD_DIM));
    int64_t stride = args.num_kv_heads * HEAD_DIM;
    const T *all_keys = static_cast<const T*>(args.keys), *all_values = static_cast<const T*>(args.values);
    auto locate = [&](const AttentionPart& part) {
        return TokenOffsets(args.block_table + part.seq * args.max_blocks, args.block_size, stride, part.first, part.last);
    };
    auto decode = [&](const AttentionPart& part, const TokenOffsets& split, int64_t kv_head, Prefetch<T>& prefetch) {
        static thread_local std::vector<float> room;
        int64_t num_queries = queries_of(part.seq), rows = num_queries * group;
        room.resize(std::max<size_t>(room.size(), rows * (2 * HEAD_DIM + 2)));
        const T *keys = all_keys + kv_head * HEAD_DIM, *values = all_values + kv_head * HEAD_DIM;
        float* queries = room.data();
        auto element = [&](int64_t query) {  // of a query's heads, which lie together
            return ((args.query_start[part.seq] + query) * args.num_heads + kv_head * group) * HEAD_DIM;
        };
        for (int64_t query = 0; query < num_queries; query++)
            for (int64_t i = 0; i < group * HEAD_DIM; i += LANES)
                store(queries + query * group * HEAD_DIM + i,
                      load(static_cast<const T*>(args.queries) + element(query) + i) * scale);
        auto seen = [&](int64_t row) {
            int64_t last = args.context_len[part.seq] - num_queries + row / group + 1;
            int64_t first = args.sliding_window ? last - args.sliding_window : 0;
            return Sight{std::max<int64_t>(0, first - part.first), std::min<int64_t>(split.count, last - part.first)};
        };
        if (part.split < 0) {
            float *out = queries + rows * HEAD_DIM, *tops = out + rows * HEAD_DIM, *totals = tops + rows;
            attend_split<V>(queries, rows, keys, values, split, seen, prefetch, tops, totals, out);
            for (int64_t row = 0; row < rows; row++)
                for (int64_t d = 0; d < HEAD_DIM; d += LANES)
                    store(static_cast<T*>(args.out) + element(row / group) + row % group * HEAD_DIM + d,
                          load(out + row * HEAD_DIM + d) / totals[row]);
        } else {
            int64_t all_rows = rows * args.num_kv_heads, first_row = rows * kv_head;
            float *out = partial.data() + part.split, *tops = out + all_rows * HEAD_DIM + first_row;
            attend_split<V>(queries, rows, keys, values, split, seen, prefetch, tops, tops + all_rows,
                            out + first_row * HEAD_DIM);
        }
    };
    // With enough work, a thread takes a run of parts with all their heads, and prefetches the next part while it computes
    // one. The first of a run is not prefetched, so runs are long: two a thread, in case another process takes a core.
    int64_t num_decodes = static_cast<int64_t>(decodes.size());
    bool is_plenty = num_decodes >= 4 * pool.size();
    int64_t run_length = is_plenty ? std::max<int64_t>(2, ceil_div(num_decodes, 2 * pool.size())) : 1;
    int64_t heads_a_part = is_plenty ? args.num_kv_heads : 1;
    int64_t head_parts = args.num_kv_heads / heads_a_part, decode_runs = ceil_div(num_decodes, run_length) * head_parts;
    auto decode_run = [&](int64_t number) {
        int64_t first_head = number % head_parts * heads_a_part, at = number / head_parts * run_length;
        int64_t end = std::min(num_decodes, at + run_length);
        TokenOffsets splits[2];
        splits[at % 2] = locate(decodes[at]);
        for (; at < end; at++) {
            const TokenOffsets& split = splits[at % 2];
            int64_t steps = heads_a_part * ceil_div(queries_of(decodes[at].seq) * group, 4) * split.count;
            Prefetch<T> prefetch;
            if (at + 1 < end) {
                splits[(at + 1) % 2] = locate(decodes[at + 1]);
                prefetch = {splits[(at + 1) % 2], all_keys, all_values, stride, steps};
            } else {  // the last of a run: prefetch its own values, which are needed after its scores
                const T* values = all_values + first_head * HEAD_DIM;
                prefetch = {split, values, values, heads_a_part * HEAD_DIM, ceil_div(steps, heads_a_part)};
            }
            for (int64_t kv_head = first_head; kv_head < first_head + heads_a_part; kv_head++)
                decode(decodes[at], split, kv_head, prefetch);
        }
    };
    int64_t head_tiles = ceil_div(group, ROW_TILE);  // of a KV head
    auto prefill = [&](int64_t number) {
        const AttentionPart& part = prefills[number / (args.num_kv_heads * head_tiles)];
        int64_t kv_head = number / head_tiles % args.num_kv_heads, head = number % head_tiles * ROW_TILE;
        TileRows rows{args, part.seq, kv_head * group + head, std::min(ROW_TILE, group - head), part.first, part.last};
        attend_tile<V>(rows, all_keys + kv_head * HEAD_DIM, all_values + kv_head * HEAD_DIM);
    };
    int64_t prefill_parts = static_cast<int64_t>(prefills.size()) * args.num_kv_heads * head_tiles;
    pool.run(static_cast<int>(prefill_parts + decode_runs), [&](int number) {
        if (number < prefill_parts)
            prefill(number);
        else
            decode_run(number - prefill_parts);
    });
    if (partial_size == 0) return;

    for (size_t at = 0, next; at < decodes.size(); at = next) {  // too little work to share among threads
        next = at + 1;
        if (decodes[at].split < 0) continue;
        int32_t seq = decodes[at].seq;
        while (next < decodes.size() && decodes[next].seq == seq) next++;
        int64_t rows = queries_of(seq) * group, all_rows = rows * args.num_kv_heads;
        for (int64_t row = 0; row < all_rows; row++) {
            auto split = [&](size_t i) { return partial.data() + decodes[i].split; };
            int64_t top_at = all_rows * HEAD_DIM + row, total_at = top_at + all_rows;
            float top = -INFINITY, total = 0;
            for (size_t i = at; i < next; i++) top = std::max(top, split(i)[top_at]);
            Floats sums[V] = {};
            for (size_t i = at; i < next; i++) {
                float shrink = exponential_of_negative(broadcast(split(i)[top_at] - top))[0];
                total += split(i)[total_at] * shrink;
                for (int j = 0; j < V; j++) sums[j] += load(split(i) + row * HEAD_DIM + j * LANES) * shrink;
            }
            int64_t kv_head = row / rows, query = row % rows / group, head = kv_head * group + row % group;
            T* out = static_cast<T*>(args.out) + ((args.query_start[seq] + query) * args.num_heads + head) * HEAD_DIM;
            for (int j = 0; j < V; j++) store(out + j * LANES, sums[j] / total);
        }
    }
}

template <typename T>
void paged_attention(ThreadPool& pool, const AttentionArgs& args) {
    switch (args.head_dim) {
        case 16: return paged_attention_of<16 / LANES, T>(pool, args);
        case 32: return paged_attention_of<32 / LANES, T>(pool, args);
        case 64: return paged_attention_of<64 / LANES, T>(pool, args);
        case 80: return paged_attention_of<80 / LANES, T>(pool, args);
        case 96: return paged_attention_of<96 / LANES, T>(pool, args);
        case 128: return paged_attention_of<128 / LANES, T>(pool, args);
        case 256: return paged_attention_of<256 / LANES, T>(pool, args);
    }
}
