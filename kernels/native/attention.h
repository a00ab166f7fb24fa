// Attention of a step, which reads the pages of the KV cache where they lie: its parts, and how threads share them. No
// include guard: each instruction set compiles its own copy.

#include "token_offsets.h"

#include "attention_decode.h"
#include "attention_prefill.h"

struct AttentionPart {
    int32_t seq, first, last;  // of its queries, or of its context if it has one query
    int32_t split;             // where its partial results go; -1: it is the whole context
};

template <int V, typename T>
void paged_attention_of(ThreadPool& pool, const AttentionArgs& args) {
    constexpr int64_t HEAD_DIM = V * LANES;
    int64_t group = args.num_heads / args.num_kv_heads;
    static std::vector<AttentionPart> decodes, prefills;  // one op runs at a time
    static std::vector<float> partial;
    decodes.clear();
    prefills.clear();
    int32_t num_splits = 0;
    for (int32_t seq = 0; seq < args.num_seqs; seq++) {
        int32_t num_queries = args.query_start[seq + 1] - args.query_start[seq], end = args.context_len[seq];
        if (num_queries == 1) {
            int32_t window = static_cast<int32_t>(args.sliding_window);
            int32_t begin = window ? std::max(0, end - window) : 0;
            bool is_whole = begin / SPLIT == (end - 1) / SPLIT;
            while (begin < end) {
                int32_t next = static_cast<int32_t>(std::min<int64_t>(end, (begin / SPLIT + 1) * SPLIT));
                decodes.push_back({seq, begin, next, is_whole ? -1 : num_splits++});
                begin = next;
            }
        } else {
            int32_t tile = static_cast<int32_t>(std::max<int64_t>(1, ROW_TILE / group));
            for (int32_t first = 0; first < num_queries; first += tile)
                prefills.push_back({seq, first, std::min(first + tile, num_queries), -1});
        }
    }
    // Partial results: [split, num_heads, head_dim], then the greatest score and the total of each head.
    int64_t split_size = args.num_heads * (HEAD_DIM + 2);
    partial.resize(std::max<size_t>(partial.size(), num_splits * split_size));

    float scale = 1.0f / std::sqrt(static_cast<float>(HEAD_DIM));
    int64_t stride = args.num_kv_heads * HEAD_DIM;
    const T *all_keys = static_cast<const T*>(args.keys), *all_values = static_cast<const T*>(args.values);
    auto locate = [&](const AttentionPart& part) {
        return TokenOffsets(args.block_table + part.seq * args.max_blocks, args.block_size, stride, part.first, part.last);
    };
    auto decode = [&](const AttentionPart& part, const TokenOffsets& split, int64_t kv_head, Prefetch<T>& prefetch) {
        static thread_local std::vector<float> room;
        room.resize(std::max<size_t>(room.size(), group * (2 * HEAD_DIM + 2)));
        const T *keys = all_keys + kv_head * HEAD_DIM, *values = all_values + kv_head * HEAD_DIM;
        float* queries = room.data();
        int64_t element = (args.query_start[part.seq] * args.num_heads + kv_head * group) * HEAD_DIM;
        for (int64_t i = 0; i < group * HEAD_DIM; i += LANES)
            store(queries + i, load(static_cast<const T*>(args.queries) + element + i) * scale);
        if (part.split < 0) {
            float *out = queries + group * HEAD_DIM, *tops = out + group * HEAD_DIM, *totals = tops + group;
            attend_split<V>(queries, group, keys, values, split, prefetch, tops, totals, out);
            for (int64_t i = 0; i < group * HEAD_DIM; i += LANES)
                store(static_cast<T*>(args.out) + element + i, load(out + i) / totals[i / HEAD_DIM]);
        } else {
            float* out = partial.data() + part.split * split_size;
            float* tops = out + args.num_heads * HEAD_DIM + kv_head * group;
            attend_split<V>(queries, group, keys, values, split, prefetch, tops, tops + args.num_heads,
                            out + kv_head * group * HEAD_DIM);
        }
    };
    // With work enough, a thread takes several parts and all their heads, and fetches the next while it computes one. Nobody
    // fetches the first of a run, so runs are long: two a thread, in case another process has taken a core.
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
            int64_t steps = heads_a_part * ceil_div(group, 4) * split.count;
            Prefetch<T> prefetch;
            if (at + 1 < end) {
                splits[(at + 1) % 2] = locate(decodes[at + 1]);
                prefetch = {splits[(at + 1) % 2], all_keys, all_values, stride, steps};
            } else {  // the last of a run: its own values, which are wanted when its scores are known
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
        attend_tile<V>(args, part.seq, kv_head * group + head, std::min(ROW_TILE, group - head), part.first, part.last,
                       all_keys + kv_head * HEAD_DIM, all_values + kv_head * HEAD_DIM);
    };
    int64_t prefill_parts = static_cast<int64_t>(prefills.size()) * args.num_kv_heads * head_tiles;
    pool.run(static_cast<int>(prefill_parts + decode_runs), [&](int number) {
        if (number < prefill_parts)
            prefill(number);
        else
            decode_run(number - prefill_parts);
    });
    if (num_splits == 0) return;

    for (size_t at = 0; at < decodes.size();) {  // few and short: not worth another round of the threads
        size_t next = at + 1;
        if (decodes[at].split >= 0) {
            while (next < decodes.size() && decodes[next].seq == decodes[at].seq) next++;
            for (int64_t head = 0; head < args.num_heads; head++) {
                auto split = [&](size_t i) { return partial.data() + decodes[i].split * split_size; };
                int64_t top_at = args.num_heads * HEAD_DIM + head, total_at = top_at + args.num_heads;
                float top = -INFINITY, total = 0;
                for (size_t i = at; i < next; i++) top = std::max(top, split(i)[top_at]);
                f32x16 sums[V] = {};
                for (size_t i = at; i < next; i++) {
                    float shrink = exponential_of_negative(broadcast(split(i)[top_at] - top))[0];
                    total += split(i)[total_at] * shrink;
                    for (int j = 0; j < V; j++) sums[j] += load(split(i) + head * HEAD_DIM + j * LANES) * shrink;
                }
                T* out = static_cast<T*>(args.out) + (args.query_start[decodes[at].seq] * args.num_heads + head) * HEAD_DIM;
                for (int j = 0; j < V; j++) store(out + j * LANES, sums[j] / total);
            }
        }
        at = next;
    }
}

template <typename T>
void paged_attention(ThreadPool& pool, const AttentionArgs& args) {
    switch (args.head_dim / LANES) {
        case 1: return paged_attention_of<1, T>(pool, args);
        case 2: return paged_attention_of<2, T>(pool, args);
        case 4: return paged_attention_of<4, T>(pool, args);
        case 5: return paged_attention_of<5, T>(pool, args);
        case 6: return paged_attention_of<6, T>(pool, args);
        case 8: return paged_attention_of<8, T>(pool, args);
        case 16: return paged_attention_of<16, T>(pool, args);
    }
}
