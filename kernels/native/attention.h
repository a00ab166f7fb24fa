// Attention that reads the pages of the KV cache where they lie. No include guard: each instruction set compiles its
// own copy.
//
// A sequence with one query: the heads that share a KV head are attended together, so that a key is read once for all;
// contexts are split every SPLIT tokens, and the parts merged, so that one long sequence keeps every core busy. Where
// the splits lie depends on the sequence alone: its result is the same to the last bit in any batch.
// A chunk of queries: tiles of queries times tiles of keys with a running softmax (FlashAttention; Dao et al., 2022).

constexpr int64_t SPLIT = 256;      // tokens
constexpr int64_t KEY_TILE = 64;    // tokens
constexpr int64_t ROW_TILE = 96;    // queries × heads
constexpr int64_t ROW_STEP = 6;     // rows whose sums stay in registers together

// -- one query ----------------------------------------------------------------------------------------------------

// Where the tokens of one split lie in the pages: found once, used for keys and values of every head.
struct Split {
    int64_t count = 0;
    int64_t offsets[SPLIT];  // elements

    Split() = default;
    Split(const int32_t* blocks, int64_t block_size, int64_t stride, int64_t begin, int64_t end) : count(end - begin) {
        int64_t block = begin / block_size, within = begin % block_size;
        for (int64_t i = 0; i < count; i++) {
            offsets[i] = (blocks[block] * block_size + within) * stride;
            if (++within == block_size) within = 0, block++;
        }
    }
};

// Fetches a split's keys and values into the cache, a few lines at a time, while another is computed: blocks lie too far
// apart for the processor to foresee them.
template <typename T>
struct Prefetch {
    static constexpr int64_t LINE = 64 / sizeof(T);
    const Split* split = nullptr;
    const T *keys = nullptr, *values = nullptr;
    int64_t size = 0;            // elements of each token
    int64_t lines_a_step = 0;    // of keys, and as many of values
    int64_t token = 0, element = 0;

    // All of it within `steps` steps.
    Prefetch(const Split& split, const T* keys, const T* values, int64_t size, int64_t steps)
        : split(&split), keys(keys), values(values), size(size), lines_a_step(ceil_div(split.count * size / LINE, steps)) {}
    Prefetch() = default;

    void step() {
        for (int64_t i = 0; i < lines_a_step && token < split->count; i++) {
            __builtin_prefetch(keys + split->offsets[token] + element, 0, 2);
            __builtin_prefetch(values + split->offsets[token] + element, 0, 2);
            element += LINE;
            if (element >= size) element = 0, token++;
        }
    }
};

// Scores of HEADS queries [HEADS, V * LANES] and a split's keys; rows of `scores` are SPLIT apart.
template <int HEADS, int V, typename T>
void score(const float* queries, const T* keys, const Split& split, Prefetch<T>& prefetch, float* scores) {
    constexpr int64_t HEAD_DIM = V * LANES;
    f32x16 q[HEADS][V];
    for (int head = 0; head < HEADS; head++)
        for (int i = 0; i < V; i++) q[head][i] = load(queries + head * HEAD_DIM + i * LANES);
    for (int64_t first = 0; first < split.count; first += LANES) {
        f32x16 parts[HEADS][LANES];
        for (int64_t lane = 0; lane < LANES; lane++) {
            int64_t token = std::min(first + lane, split.count - 1);
            const T* key = keys + split.offsets[token];
            prefetch.step();
            f32x16 k[V];
            for (int i = 0; i < V; i++) k[i] = load(key + i * LANES);
            for (int head = 0; head < HEADS; head++) {
                f32x16 part = q[head][0] * k[0];
                for (int i = 1; i < V; i++) part += q[head][i] * k[i];
                parts[head][lane] = part;
            }
        }
        for (int head = 0; head < HEADS; head++) store(scores + head * SPLIT + first, sum_each(parts[head]));
    }
}

// out [HEADS, V * LANES] = weights · values.
template <int HEADS, int V, typename T>
void weigh(const float* weights, const T* values, const Split& split, float* out) {
    constexpr int64_t HEAD_DIM = V * LANES;
    f32x16 sums[HEADS][V] = {};
    for (int64_t token = 0; token < split.count; token++) {
        const T* value = values + split.offsets[token];
        f32x16 v[V];
        for (int i = 0; i < V; i++) v[i] = load(value + i * LANES);
        for (int head = 0; head < HEADS; head++) {
            f32x16 weight = broadcast(weights[head * SPLIT + token]);
            for (int i = 0; i < V; i++) sums[head][i] += weight * v[i];
        }
    }
    for (int head = 0; head < HEADS; head++)
        for (int i = 0; i < V; i++) store(out + head * HEAD_DIM + i * LANES, sums[head][i]);
}

// Makes weights of scores, in place; returns their greatest score and their sum.
inline void soften(float* scores, int64_t count, float* greatest_score, float* total) {
    int64_t padded = ceil_div(count, LANES) * LANES;
    for (int64_t i = count; i < padded; i++) scores[i] = -INFINITY;
    f32x16 most = broadcast(-INFINITY), sums{};
    for (int64_t i = 0; i < padded; i += LANES) most = max(load(scores + i), most);
    float top = greatest(most);
    for (int64_t i = 0; i < padded; i += LANES) {
        f32x16 weight = exponential(load(scores + i) - top);
        sums += weight;
        store(scores + i, weight);
    }
    *greatest_score = top;
    *total = sum(sums);
}

// One split of a context, of the heads that share a KV head: out [heads, head_dim], not yet divided by `totals`.
template <int V, typename T>
void attend_split(const float* queries, int64_t heads, const T* keys, const T* values, const Split& split,
                  Prefetch<T>& prefetch, float* tops, float* totals, float* out) {
    constexpr int64_t HEAD_DIM = V * LANES;
    constexpr int MOST = V <= 4 ? 4 : V <= 5 ? 3 : V <= 8 ? 2 : 1;  // whose queries, or sums, stay in registers
    alignas(64) float scores[MOST * SPLIT];
    for (int64_t head = 0; head < heads;) {
        auto attend = [&](auto count) {
            score<count.value, V>(queries + head * HEAD_DIM, keys, split, prefetch, scores);
            for (int i = 0; i < count.value; i++)
                soften(scores + i * SPLIT, split.count, &tops[head + i], &totals[head + i]);
            weigh<count.value, V>(scores, values, split, out + head * HEAD_DIM);
            head += count.value;
        };
        int64_t left = std::min<int64_t>(heads - head, MOST);
        if (left == 1) attend(std::integral_constant<int, 1>{});
        if constexpr (MOST >= 2)
            if (left == 2) attend(std::integral_constant<int, 2>{});
        if constexpr (MOST >= 3)
            if (left == 3) attend(std::integral_constant<int, 3>{});
        if constexpr (MOST >= 4)
            if (left == 4) attend(std::integral_constant<int, 4>{});
    }
}

// -- several queries ----------------------------------------------------------------------------------------------

// Where the tokens of one sequence and one KV head lie.
template <typename T>
struct Pages {
    const T* base;
    const int32_t* blocks;
    int64_t block_size, stride;  // stride: elements from a token to the next

    const T* at(int64_t token) const {
        return base + (blocks[token / block_size] * block_size + token % block_size) * stride;
    }
};

// c [rows, WIDE * LANES] += a [rows, depth] · b [depth, WIDE * LANES]; rows is a multiple of ROW_STEP.
template <int WIDE>
void multiply_add(const float* a, int64_t a_stride, const float* b, float* c, int64_t rows, int64_t depth) {
    constexpr int STEP = 4;  // columns of lanes whose sums stay in registers together
    for (int column = 0; column < WIDE; column += STEP) {
        constexpr int LAST = WIDE % STEP;
        auto multiply = [&](auto wide) {
            for (int64_t row = 0; row < rows; row += ROW_STEP) {
                f32x16 sums[ROW_STEP][wide.value];
                float* to = c + row * WIDE * LANES + column * LANES;
                for (int r = 0; r < ROW_STEP; r++)
                    for (int i = 0; i < wide.value; i++) sums[r][i] = load(to + r * WIDE * LANES + i * LANES);
                for (int64_t k = 0; k < depth; k++) {
                    f32x16 right[wide.value];
                    for (int i = 0; i < wide.value; i++) right[i] = load(b + k * WIDE * LANES + (column + i) * LANES);
                    for (int r = 0; r < ROW_STEP; r++) {
                        f32x16 left = broadcast(a[(row + r) * a_stride + k]);
                        for (int i = 0; i < wide.value; i++) sums[r][i] += left * right[i];
                    }
                }
                for (int r = 0; r < ROW_STEP; r++)
                    for (int i = 0; i < wide.value; i++) store(to + r * WIDE * LANES + i * LANES, sums[r][i]);
            }
        };
        if (column + STEP <= WIDE)
            multiply(std::integral_constant<int, STEP>{});
        else if constexpr (LAST > 0)
            multiply(std::integral_constant<int, LAST>{});
    }
}

// Room for one tile of queries; rows are (query, head) pairs.
template <int V>
struct Tile {
    alignas(64) float queries[ROW_TILE * V * LANES];
    alignas(64) float keys[V * LANES * KEY_TILE];    // transposed
    alignas(64) float values[KEY_TILE * V * LANES];
    alignas(64) float weights[ROW_TILE * KEY_TILE];
    alignas(64) float out[ROW_TILE * V * LANES];
    float tops[ROW_TILE], totals[ROW_TILE];
};

template <int V, typename T>
void load_keys(Tile<V>& tile, const Pages<T>& keys, const Pages<T>& values, int64_t begin, int64_t end) {
    constexpr int64_t HEAD_DIM = V * LANES;
    for (int64_t i = 0; i < KEY_TILE; i++) {
        if (begin + i >= end) {  // whatever such a slot holds must not reach a product
            for (int64_t d = 0; d < HEAD_DIM; d++) tile.keys[d * KEY_TILE + i] = tile.values[i * HEAD_DIM + d] = 0;
            continue;
        }
        const T *key = keys.at(begin + i), *value = values.at(begin + i);
        for (int64_t d = 0; d < HEAD_DIM; d++) tile.keys[d * KEY_TILE + i] = to_float(key[d]);
        for (int64_t d = 0; d < HEAD_DIM; d += LANES) store(tile.values + i * HEAD_DIM + d, load(value + d));
    }
}

// Takes one tile of keys into a row's running softmax. The row sees the tile's tokens first to last (exclusive).
template <int V>
void soften_row(Tile<V>& tile, int64_t row, int64_t first, int64_t last) {
    constexpr int64_t HEAD_DIM = V * LANES;
    float* weights = tile.weights + row * KEY_TILE;
    if (first >= KEY_TILE || last <= 0) {  // it sees none of them
        for (int64_t i = 0; i < KEY_TILE; i++) weights[i] = 0;
        return;
    }
    for (int64_t i = 0; i < first; i++) weights[i] = -INFINITY;
    for (int64_t i = last; i < KEY_TILE; i++) weights[i] = -INFINITY;
    f32x16 most = broadcast(tile.tops[row]);
    for (int64_t i = 0; i < KEY_TILE; i += LANES) most = max(load(weights + i), most);
    float top = greatest(most);
    f32x16 sums{};
    for (int64_t i = 0; i < KEY_TILE; i += LANES) {
        f32x16 weight = exponential(load(weights + i) - top);
        sums += weight;
        store(weights + i, weight);
    }
    if (top != tile.tops[row]) {
        float shrink = exponential(broadcast(tile.tops[row] - top))[0];
        tile.totals[row] *= shrink;
        float* out = tile.out + row * HEAD_DIM;
        for (int64_t d = 0; d < HEAD_DIM; d += LANES) store(out + d, load(out + d) * shrink);
        tile.tops[row] = top;
    }
    tile.totals[row] += sum(sums);
}

// Queries first to last (exclusive) of one sequence, of `heads` heads that share a KV head: ROW_TILE rows at most.
template <int V, typename T>
void attend_tile(const AttentionArgs& args, int64_t seq, int64_t first_head, int64_t heads, int64_t first, int64_t last,
                 const Pages<T>& keys, const Pages<T>& values) {
    constexpr int64_t HEAD_DIM = V * LANES;
    static thread_local std::vector<Tile<V>> room(1);
    Tile<V>& tile = room[0];
    int64_t rows = (last - first) * heads;
    int64_t padded_rows = ceil_div(rows, ROW_STEP) * ROW_STEP;
    int64_t offset = args.query_start[seq] + first;
    int64_t first_position = args.context_len[seq] - (args.query_start[seq + 1] - args.query_start[seq]) + first;
    int64_t window = args.sliding_window ? args.sliding_window : args.context_len[seq];
    float scale = 1.0f / std::sqrt(static_cast<float>(HEAD_DIM));

    auto element = [&](int64_t row) {
        return ((offset + row / heads) * args.num_heads + first_head + row % heads) * HEAD_DIM;
    };
    for (int64_t row = 0; row < padded_rows; row++) {
        for (int64_t d = 0; d < HEAD_DIM; d += LANES) {
            f32x16 query = row < rows ? load(static_cast<const T*>(args.queries) + element(row) + d) * scale : f32x16{};
            store(tile.queries + row * HEAD_DIM + d, query);
            store(tile.out + row * HEAD_DIM + d, f32x16{});
        }
        tile.tops[row] = -INFINITY;
        tile.totals[row] = 0;
    }
    int64_t end = first_position + (last - first);
    int64_t begin = std::max<int64_t>(0, first_position - window + 1) / KEY_TILE * KEY_TILE;
    for (; begin < end; begin += KEY_TILE) {
        load_keys(tile, keys, values, begin, std::min(begin + KEY_TILE, end));
        std::memset(tile.weights, 0, padded_rows * KEY_TILE * sizeof(float));
        multiply_add<KEY_TILE / LANES>(tile.queries, HEAD_DIM, tile.keys, tile.weights, padded_rows, HEAD_DIM);
        for (int64_t row = 0; row < rows; row++) {
            int64_t position = first_position + row / heads;
            soften_row(tile, row, position - window + 1 - begin, position + 1 - begin);
        }
        multiply_add<V>(tile.weights, KEY_TILE, tile.values, tile.out, padded_rows, KEY_TILE);
    }
    for (int64_t row = 0; row < rows; row++)
        for (int64_t d = 0; d < HEAD_DIM; d += LANES)
            store(static_cast<T*>(args.out) + element(row) + d, load(tile.out + row * HEAD_DIM + d) / tile.totals[row]);
}

// -- a step -------------------------------------------------------------------------------------------------------

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
        return Split(args.block_table + part.seq * args.max_blocks, args.block_size, stride, part.first, part.last);
    };
    auto decode = [&](const AttentionPart& part, const Split& split, int64_t kv_head, Prefetch<T>& prefetch) {
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
    // With work enough, a thread takes several parts and all their heads, and fetches the next while it computes one.
    int64_t num_decodes = static_cast<int64_t>(decodes.size());
    bool is_plenty = num_decodes >= 4 * pool.size();
    int64_t run_length = is_plenty ? std::max<int64_t>(2, num_decodes / (4 * pool.size())) : 1;
    int64_t heads_a_part = is_plenty ? args.num_kv_heads : 1;
    int64_t head_parts = args.num_kv_heads / heads_a_part, decode_runs = ceil_div(num_decodes, run_length) * head_parts;
    auto decode_run = [&](int64_t number) {
        int64_t first_head = number % head_parts * heads_a_part, at = number / head_parts * run_length;
        int64_t end = std::min(num_decodes, at + run_length);
        Split splits[2];
        splits[at % 2] = locate(decodes[at]);
        for (; at < end; at++) {
            const Split& split = splits[at % 2];
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
        const int32_t* blocks = args.block_table + part.seq * args.max_blocks;
        Pages<T> keys{all_keys + kv_head * HEAD_DIM, blocks, args.block_size, stride};
        Pages<T> values{all_values + kv_head * HEAD_DIM, blocks, args.block_size, stride};
        attend_tile<V>(args, part.seq, kv_head * group + head, std::min(ROW_TILE, group - head), part.first, part.last,
                       keys, values);
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
                    float shrink = exponential(broadcast(split(i)[top_at] - top))[0];
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
