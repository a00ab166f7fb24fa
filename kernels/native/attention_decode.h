// Attention of one query. No include guard: each instruction set compiles its own copy.
//
// The heads that share a KV head are attended together, so that a key is read once for all; contexts are split every
// SPLIT tokens, and the parts merged, so that one long sequence keeps every core busy. Where the splits lie depends on
// the sequence alone: its result is the same to the last bit in any batch.

// Fetches a split's keys and values into the cache, a few lines at a time, while another is computed: blocks lie too far
// apart for the processor to foresee them.
template <typename T>
struct Prefetch {
    static constexpr int64_t LINE = 64 / sizeof(T);
    const TokenOffsets* split = nullptr;
    const T *keys = nullptr, *values = nullptr;
    int64_t size = 0;            // elements of each token
    int64_t lines_a_step = 0;    // of keys, and as many of values
    int64_t token = 0, element = 0;

    // All of it within `steps` steps.
    Prefetch(const TokenOffsets& split, const T* keys, const T* values, int64_t size, int64_t steps)
        : split(&split), keys(keys), values(values), size(size), lines_a_step(ceil_div(split.count * size / LINE, steps)) {}
    Prefetch() = default;

    void step() {
        for (int64_t i = 0; i < lines_a_step && token < split->count; i++) {
            __builtin_prefetch(keys + split->at[token] + element, 0, 2);
            __builtin_prefetch(values + split->at[token] + element, 0, 2);
            element += LINE;
            if (element >= size) element = 0, token++;
        }
    }
};

// Scores of HEADS queries [HEADS, V * LANES] and a split's keys; rows of `scores` are SPLIT apart.
template <int HEADS, int V, typename T>
void score(const float* queries, const T* keys, const TokenOffsets& split, Prefetch<T>& prefetch, float* scores) {
    constexpr int64_t HEAD_DIM = V * LANES;
    f32x16 q[HEADS][V];
    for (int head = 0; head < HEADS; head++)
        for (int i = 0; i < V; i++) q[head][i] = load(queries + head * HEAD_DIM + i * LANES);
    for (int64_t first = 0; first < split.count; first += LANES) {
        f32x16 parts[HEADS][LANES];
        for (int64_t lane = 0; lane < LANES; lane++) {
            int64_t token = std::min(first + lane, split.count - 1);
            const T* key = keys + split.at[token];
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
void weigh(const float* weights, const T* values, const TokenOffsets& split, float* out) {
    constexpr int64_t HEAD_DIM = V * LANES;
    f32x16 sums[HEADS][V] = {};
    for (int64_t token = 0; token < split.count; token++) {
        const T* value = values + split.at[token];
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
        f32x16 weight = exponential_of_negative(load(scores + i) - top);
        sums += weight;
        store(scores + i, weight);
    }
    *greatest_score = top;
    *total = sum(sums);
}

// One split of a context, of the heads that share a KV head: out [heads, head_dim], not yet divided by `totals`.
template <int V, typename T>
void attend_split(const float* queries, int64_t heads, const T* keys, const T* values, const TokenOffsets& split,
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
