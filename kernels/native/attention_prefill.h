// Attention of a chunk of queries: tiles of queries times tiles of keys, with a running softmax (FlashAttention; Dao et
// al., 2022). No include guard: each instruction set compiles its own copy.

constexpr int64_t KEY_TILE = 64;  // tokens
#if defined(PAGODA_AMX)
constexpr int64_t ROW_TILE = 192;  // queries × heads
#else
constexpr int64_t ROW_TILE = 96;  // queries × heads
#endif
constexpr int64_t ROW_STEP = 6;   // rows whose sums stay in registers together

// c += a [ROW_STEP, depth] · b [depth, COLUMNS * LANES]; rows of b and c are `stride` apart.
template <int COLUMNS>
PAGODA_APART void multiply_add_step(const float* a, int64_t a_stride, const float* b, float* c, int64_t stride, int64_t depth) {
    Floats sums[ROW_STEP][COLUMNS];
    PAGODA_UNROLL
    for (int r = 0; r < ROW_STEP; r++)
        PAGODA_UNROLL
        for (int i = 0; i < COLUMNS; i++) sums[r][i] = load(c + r * stride + i * LANES);
    for (int64_t k = 0; k < depth; k++) {
        Floats right[COLUMNS];
        PAGODA_UNROLL
        for (int i = 0; i < COLUMNS; i++) right[i] = load(b + k * stride + i * LANES);
        PAGODA_UNROLL
        for (int r = 0; r < ROW_STEP; r++) {
            Floats left = broadcast(a[r * a_stride + k]);
            PAGODA_UNROLL
            for (int i = 0; i < COLUMNS; i++) {
                sums[r][i] += left * right[i];
                if (REGISTERS == 16) PAGODA_KEEP(sums[r][i]);
            }
        }
    }
    PAGODA_UNROLL
    for (int r = 0; r < ROW_STEP; r++)
        PAGODA_UNROLL
        for (int i = 0; i < COLUMNS; i++) store(c + r * stride + i * LANES, sums[r][i]);
}

// c [rows, WIDE * LANES] += a [rows, depth] · b [depth, WIDE * LANES], of which the first `columns` times LANES columns;
// rows is a multiple of ROW_STEP.
template <int WIDE>
void multiply_add(const float* a, int64_t a_stride, const float* b, float* c, int64_t rows, int64_t depth, int columns) {
    constexpr int STEP = REGISTERS == 32 ? 4 : 2;  // columns of lanes whose sums stay in registers together
    for (int column = 0; column < columns; column += STEP)
        with_count<STEP>(std::min(STEP, columns - column), [&](auto count) {
            for (int64_t row = 0; row < rows; row += ROW_STEP)
                multiply_add_step<count.value>(a + row * a_stride, a_stride, b + column * LANES,
                                               c + (row * WIDE + column) * LANES, WIDE * LANES, depth);
        });
}

// The buffers for one tile of queries; rows are (query, head) pairs.
template <int V>
struct Tile {
    alignas(64) float queries[ROW_TILE * V * LANES];
    alignas(64) float keys[V * LANES * KEY_TILE];    // transposed
    alignas(64) float values[KEY_TILE * V * LANES];
    alignas(64) float weights[ROW_TILE * KEY_TILE];
    alignas(64) float out[ROW_TILE * V * LANES];
    float tops[ROW_TILE], totals[ROW_TILE];
};

// Loads the keys of these tokens, transposed into rows of WIDTH, and zeros for unseen ones and up to the next multiple of
// LANES: the content of other slots must not reach a product.
template <int V, int64_t WIDTH, typename T, typename Scales>
void load_keys(float* to, const T* keys, const TokenOffsets& tokens, const Scales& scales) {
    for (int64_t first = 0; first < tokens.count; first += LANES) {
        for (int64_t d = 0; d < V * LANES; d += LANES) {
            Floats rows[LANES];
            for (int64_t i = 0; i < LANES; i++)
                rows[i] = tokens.has(first + i) ? scales.key(load(keys + tokens.at[first + i] + d), first + i) : Floats{};
            transpose(rows);
            for (int64_t i = 0; i < LANES; i++) store(to + (d + i) * WIDTH + first, rows[i]);
        }
    }
}

// Loads their values likewise, in the order of the pages.
template <int V, typename T, typename Scales>
void load_values(float* to, const T* values, const TokenOffsets& tokens, const Scales& scales) {
    constexpr int64_t HEAD_DIM = V * LANES;
    for (int64_t i = 0; i < ceil_div(tokens.count, LANES) * LANES; i++)
        for (int64_t d = 0; d < HEAD_DIM; d += LANES)
            store(to + i * HEAD_DIM + d, tokens.has(i) ? scales.value(load(values + tokens.at[i] + d), i) : Floats{});
}

// Adds the scores of `width` keys to a row's running softmax: turns them into weights and scales down the row's sums. The
// row sees first to last (exclusive) of the keys.
template <int V>
void soften_row(float* weights, int64_t width, int64_t first, int64_t last, float& row_top, float& row_total, float* out) {
    constexpr int64_t HEAD_DIM = V * LANES;
    if (first >= width || last <= 0) {  // it sees none of them
        for (int64_t i = 0; i < width; i++) weights[i] = 0;
        return;
    }
    for (int64_t i = 0; i < first; i++) weights[i] = -INFINITY;
    for (int64_t i = last; i < width; i++) weights[i] = -INFINITY;
    Floats most = broadcast(row_top);
    for (int64_t i = 0; i < width; i += LANES) most = max(load(weights + i), most);
    float top = greatest(most);
    Floats sums{};
    for (int64_t i = 0; i < width; i += LANES) {
        Floats weight = exponential_of_negative(load(weights + i) - top);
        sums += weight;
        store(weights + i, weight);
    }
    if (top != row_top) {
        float shrink = exponential_of_negative(broadcast(row_top - top))[0];
        row_total *= shrink;
        for (int64_t d = 0; d < HEAD_DIM; d += LANES) store(out + d, load(out + d) * shrink);
        row_top = top;
    }
    row_total += sum(sums);
}

// The rows of a tile: queries first to last (exclusive) of one sequence, each for `heads` heads from `first_head` on.
struct TileRows {
    const AttentionArgs& args;
    int64_t seq, first_head, heads, first, last;
    int64_t count = (last - first) * heads;
    int64_t first_position = args.context_len[seq] - (args.query_start[seq + 1] - args.query_start[seq]) + first;
    int64_t end = first_position + (last - first);  // of the keys that some row sees
    int64_t window = args.sliding_window ? args.sliding_window : args.context_len[seq];

    float total(int64_t row, float top, float total) const { return divisor(args, first_head + row % heads, top, total); }

    int64_t position(int64_t row) const { return first_position + row / heads; }

    int64_t element(int64_t row) const {  // of its query, and of its output
        return ((args.query_start[seq] + first + row / heads) * args.num_heads + first_head + row % heads) * args.head_dim;
    }

    int64_t kv_head() const { return first_head * args.num_kv_heads / args.num_heads; }

    int64_t first_key() const { return std::max<int64_t>(0, first_position - window + 1); }

    // The first token of the first tile of keys that some row sees.
    int64_t begin() const { return first_key() / KEY_TILE * KEY_TILE; }

    TokenOffsets tokens(int64_t from) const {
        const int32_t* blocks = args.block_table + seq * args.max_blocks;
        TokenOffsets tokens(blocks, args.block_size, args.num_kv_heads * args.head_dim, from, std::min(from + KEY_TILE, end));
        tokens.unseen = first_key() - from;
        return tokens;
    }
};

#if !defined(PAGODA_AMX)  // its attend_tile is in attention_prefill_amx.h
// Attends at most ROW_TILE rows.
template <int V, typename T>
void attend_tile(const TileRows& rows, const T* keys, const T* values) {
    constexpr int64_t HEAD_DIM = V * LANES;
    static thread_local std::vector<Tile<V>> room(1);
    Tile<V>& tile = room[0];
    int64_t padded_rows = ceil_div(rows.count, ROW_STEP) * ROW_STEP;
    float scale = 1.0f / std::sqrt(static_cast<float>(HEAD_DIM)), softcap = rows.args.softcap;
    for (int64_t row = 0; row < padded_rows; row++) {
        for (int64_t d = 0; d < HEAD_DIM; d += LANES) {
            Floats query = row < rows.count ? load_query<T>(rows.args, rows.element(row) + d) * scale : Floats{};
            store(tile.queries + row * HEAD_DIM + d, query);
            store(tile.out + row * HEAD_DIM + d, Floats{});
        }
        tile.tops[row] = -INFINITY;
        tile.totals[row] = 0;
    }
    for (int64_t begin = rows.begin(); begin < rows.end; begin += KEY_TILE) {
        TokenOffsets tokens = rows.tokens(begin);
        int columns = static_cast<int>(ceil_div(tokens.count, LANES));
        const TokenScales<V, T> scales(rows.args, tokens, rows.kv_head());
        load_keys<V, KEY_TILE>(tile.keys, keys, tokens, scales);
        load_values<V>(tile.values, values, tokens, scales);
        std::memset(tile.weights, 0, padded_rows * KEY_TILE * sizeof(float));
        multiply_add<KEY_TILE / LANES>(tile.queries, HEAD_DIM, tile.keys, tile.weights, padded_rows, HEAD_DIM, columns);
        for (int64_t row = 0; row < rows.count; row++) {
            int64_t seen = rows.position(row) + 1 - begin;
            if (softcap != 0) cap_scores(tile.weights + row * KEY_TILE, columns * LANES, softcap);
            soften_row<V>(tile.weights + row * KEY_TILE, columns * LANES, seen - rows.window, seen, tile.tops[row],
                          tile.totals[row], tile.out + row * HEAD_DIM);
        }
        multiply_add<V>(tile.weights, KEY_TILE, tile.values, tile.out, padded_rows, tokens.count, V);
    }
    for (int64_t row = 0; row < rows.count; row++) {
        float total = rows.total(row, tile.tops[row], tile.totals[row]);
        for (int64_t d = 0; d < HEAD_DIM; d += LANES)
            store_result<T>(rows.args, rows.element(row) + d, load(tile.out + row * HEAD_DIM + d) / total);
    }
}
#endif
