// Attention of one query, or of a few queries of a prompt. No include guard: each instruction set compiles its own copy.
//
// All rows (queries times the heads that share a KV head) are attended together while a split's keys are in the cache.
// Contexts are split every SPLIT tokens and the parts merged, so that one long sequence keeps every core busy. The splits
// depend only on the sequence, so its result is the same to the last bit in any batch, and a query's result is the same
// among others of its sequence, up to FEW_QUERIES, and alone.

// The tokens of a split that a row sees: first to last (exclusive).
struct Sight {
    int64_t first, last;

    bool is_empty() const { return first >= last; }
};

struct AttentionPart {
    int32_t seq, first, last;  // a range of the sequence's queries, or of its context if it has few queries
    int64_t split;             // where its partial results start; -1: the part is the whole context
};

// The rows of a part for one KV head: its queries, each with the heads that share the KV head.
struct PartRows {
    const AttentionArgs& args;
    const AttentionPart& part;
    int64_t kv_head;
    int64_t group = args.num_heads / args.num_kv_heads;
    int64_t num_queries = args.query_start[part.seq + 1] - args.query_start[part.seq];
    int64_t count = num_queries * group;

    int64_t element(int64_t query) const {  // of its heads, which lie together: of their queries, and of their output
        return ((args.query_start[part.seq] + query) * args.num_heads + kv_head * group) * args.head_dim;
    }

    Sight seen(int64_t query) const {
        int64_t last = args.context_len[part.seq] - num_queries + query + 1;
        int64_t first = args.sliding_window ? last - args.sliding_window : 0;
        return {std::max<int64_t>(0, first - part.first), std::min<int64_t>(part.last, last) - part.first};
    }

    // Where the first row's results are among the partial ones: [num_heads * num_queries, head_dim], then tops, then totals.
    int64_t sums() const { return part.split + count * kv_head * args.head_dim; }
    int64_t tops() const { return part.split + count * (args.num_kv_heads * args.head_dim + kv_head); }
    int64_t totals() const { return tops() + count * args.num_kv_heads; }
};

struct PartRow {
    PartRows of;
    int64_t row, query = static_cast<uint32_t>(row) / static_cast<uint32_t>(of.group), head = row - query * of.group;

    int64_t element() const { return of.element(query) + head * of.args.head_dim; }

    template <typename T>
    void load_scaled(float* to) const {
        float scale = 1.0f / std::sqrt(static_cast<float>(of.args.head_dim));
        int64_t from = element();
        for (int64_t d = 0; d < of.args.head_dim; d += LANES) store(to + d, load_query<T>(of.args, from + d) * scale);
    }

    // Stores the result of a part that is the whole context.
    template <typename T>
    void finish(float top, float total, const float* out) const {
        total = divisor(of.args, of.kv_head * of.group + head, top, total);
        int64_t to = element();
        for (int64_t d = 0; d < of.args.head_dim; d += LANES) store_result<T>(of.args, to + d, load(out + d) / total);
    }
};

// Fetches a split's keys and values into the cache, with their scales, a few lines at a time, while another split is computed:
// blocks are too far apart for the processor's own prefetching.
template <int V, typename T>
struct Prefetch {
    static constexpr int64_t LINE = 64 / sizeof(T);
    static constexpr bool HAS_SCALES = std::is_same_v<T, int8_t>;
    const TokenOffsets* split = nullptr;
    const T *keys = nullptr, *values = nullptr;
    const AttentionArgs* args = nullptr;  // where the scales are; null: they have been read
    int64_t size = 0;            // elements of each token
    int64_t lines_a_step = 0;    // of keys, and as many of values
    int64_t token = 0, element = 0;

    // Fetches everything within `steps` steps.
    Prefetch(const AttentionArgs* args, const TokenOffsets& split, const T* keys, const T* values, int64_t size, int64_t steps)
        : split(&split), keys(keys), values(values), args(args), size(size),
          lines_a_step(ceil_div(split.count * size / LINE, steps)) {}
    Prefetch() = default;

    void step() {
        for (int64_t i = 0; i < lines_a_step && token < split->count; i++) {
            __builtin_prefetch(keys + split->at[token] + element, 0, 2);
            __builtin_prefetch(values + split->at[token] + element, 0, 2);
            if (HAS_SCALES && args && element == 0) {
                int64_t at = split->at[token] / (V * LANES);
                __builtin_prefetch(args->key_scales + at, 0, 2);
                __builtin_prefetch(args->value_scales + at, 0, 2);
            }
            element += LINE;
            if (element >= size) element = 0, token++;
        }
    }
};

// Scores of ROWS queries [ROWS, V * LANES] and a split's keys; rows of `scores` are SPLIT apart.
template <int ROWS, int V, typename T>
void score(const float* queries, const T* keys, const TokenOffsets& split, Prefetch<V, T>& prefetch, float* scores) {
    constexpr int64_t HEAD_DIM = V * LANES;
    Floats q[ROWS][V];
    PAGODA_UNROLL
    for (int row = 0; row < ROWS; row++)
        PAGODA_UNROLL
        for (int i = 0; i < V; i++) q[row][i] = load(queries + row * HEAD_DIM + i * LANES);
    for (int64_t first = 0; first < split.count; first += LANES) {
        Floats parts[ROWS][LANES];
        for (int64_t lane = 0; lane < LANES; lane++) {
            int64_t token = std::min(first + lane, split.count - 1);
            const T* key = keys + split.at[token];
            prefetch.step();
            Floats k[V];
            PAGODA_UNROLL
            for (int i = 0; i < V; i++) k[i] = load(key + i * LANES);
            PAGODA_UNROLL
            for (int row = 0; row < ROWS; row++) {
                Floats part = q[row][0] * k[0];
                PAGODA_UNROLL
                for (int i = 1; i < V; i++) part += q[row][i] * k[i];
                parts[row][lane] = part;
            }
        }
        PAGODA_UNROLL
        for (int row = 0; row < ROWS; row++) store(scores + row * SPLIT + first, sum_each(parts[row]));
    }
}

// As many rows as have their queries in registers together; with 16 registers, as have their sums there.
constexpr int rows_at_once(int v) { return REGISTERS == 16 ? 4 : v <= 4 ? 4 : v <= 5 ? 3 : v <= 8 ? 2 : 1; }

// The most vectors of V that ROWS rows can sum at once in registers: a divisor of V.
constexpr int columns_at_once(int rows, int v) {
    int columns = std::min(v, std::max(1, (REGISTERS - REGISTERS / 4) / rows));
    while (v % columns) columns--;
    return columns;
}

// out [ROWS, V * LANES] = weights · values; or += if it has the sums of earlier tokens.
template <int ROWS, int V, bool ADDS = false, typename T>
void weigh(const float* weights, const T* values, const TokenOffsets& split, float* out) {
    constexpr int64_t HEAD_DIM = V * LANES;
    constexpr int COLUMNS = columns_at_once(ROWS, V);
    for (int64_t first = 0; first < HEAD_DIM; first += COLUMNS * LANES) {
        Floats sums[ROWS][COLUMNS] = {};
        if constexpr (ADDS)
            PAGODA_UNROLL
            for (int row = 0; row < ROWS; row++)
                PAGODA_UNROLL
                for (int i = 0; i < COLUMNS; i++) sums[row][i] = load(out + row * HEAD_DIM + first + i * LANES);
        for (int64_t token = 0; token < split.count; token++) {
            const T* value = values + split.at[token] + first;
            Floats weight[ROWS];
            PAGODA_UNROLL
            for (int row = 0; row < ROWS; row++) weight[row] = broadcast(weights[row * SPLIT + token]);
            PAGODA_UNROLL
            for (int i = 0; i < COLUMNS; i++) {
                Floats v = load(value + i * LANES);
                PAGODA_UNROLL
                for (int row = 0; row < ROWS; row++) sums[row][i] += weight[row] * v;
            }
        }
        PAGODA_UNROLL
        for (int row = 0; row < ROWS; row++)
            PAGODA_UNROLL
            for (int i = 0; i < COLUMNS; i++) store(out + row * HEAD_DIM + first + i * LANES, sums[row][i]);
    }
}

// Scores become softcap · tanh(score / softcap); `count` is a multiple of LANES.
inline void cap_scores(float* scores, int64_t count, float softcap) {
    for (int64_t i = 0; i < count; i += LANES)
        store(scores + i, hyperbolic_tangent(load(scores + i) / softcap) * softcap);
}

// Turns a split's scores into weights, in place; returns the greatest score that is seen and the sum of the weights.
inline void soften(float* scores, int64_t count, Sight seen, float* greatest_score, float* total) {
    int64_t padded = ceil_div(count, LANES) * LANES;
    if (seen.is_empty()) {
        std::memset(scores, 0, padded * sizeof(float));
        *greatest_score = -INFINITY;
        *total = 0;
        return;
    }
    for (int64_t i = 0; i < seen.first; i++) scores[i] = -INFINITY;
    for (int64_t i = seen.last; i < padded; i++) scores[i] = -INFINITY;
    Floats most = broadcast(-INFINITY), sums{};
    for (int64_t i = 0; i < padded; i += LANES) most = max(load(scores + i), most);
    float top = greatest(most);
    for (int64_t i = 0; i < padded; i += LANES) {
        Floats weight = exponential_of_negative(load(scores + i) - top);
        sums += weight;
        store(scores + i, weight);
    }
    *greatest_score = top;
    *total = sum(sums);
}

// Attends the rows of one KV head to one split: out [rows, head_dim], not yet divided by `totals`. A `softcap` of 0 is none.
// `seen` returns a row's Sight.
template <int V, typename T, typename Seen>
void attend_split(const float* queries, int64_t rows, const T* keys, const T* values, const TokenOffsets& split,
                  const TokenScales<V, T>& scales, float softcap, const Seen& seen, Prefetch<V, T>& prefetch, float* tops, float* totals, float* out) {
    constexpr int64_t HEAD_DIM = V * LANES;
    constexpr int MOST = rows_at_once(V);
    alignas(64) float scores[MOST * SPLIT];
    for (int64_t row = 0; row < rows;)
        with_count<MOST>(std::min<int64_t>(rows - row, MOST), [&](auto count) {
            score<count.value, V>(queries + row * HEAD_DIM, keys, split, prefetch, scores);
            for (int i = 0; i < count.value; i++) scales.scale_scores(scores + i * SPLIT);
            if (softcap != 0)
                for (int i = 0; i < count.value; i++)
                    cap_scores(scores + i * SPLIT, ceil_div(split.count, LANES) * LANES, softcap);
            for (int i = 0; i < count.value; i++)
                soften(scores + i * SPLIT, split.count, seen(row + i), &tops[row + i], &totals[row + i]);
            for (int i = 0; i < count.value; i++) scales.scale_weights(scores + i * SPLIT);
            weigh<count.value, V>(scores, values, split, out + row * HEAD_DIM);
            row += count.value;
        });
}
