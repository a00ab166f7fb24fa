// Attention of a chunk of queries in bfloat16 by the matrix unit of AMX, for attention.h. The unit computes scores and
// weighted sums of values; the softmax between them is in float32. A weight is split in two bfloat16: the rounded weight and
// the rounding error. So an output is as exact as a decode's, and a sequence that continues from cached tokens gets the same
// result as if it had computed them. Numbers of int8 are exact in bfloat16; their scales multiply scores and weights.

// The buffers for one tile of queries; rows are (query, head) pairs. The unit's right operands have two inputs side by side:
// two dimensions of a key, or one dimension of two values.
template <int V>
struct MatrixTile {
    static constexpr int64_t HEAD_DIM = V * LANES, DEPTH_STEPS = (HEAD_DIM + DEPTH - 1) / DEPTH;
    alignas(64) bf16 queries[ROW_TILE][DEPTH_STEPS * DEPTH];
    alignas(64) uint16_t keys[DEPTH_STEPS][KEY_TILE / TILE][DEPTH / 2][TILE][2];
    alignas(64) uint16_t values[KEY_TILE / DEPTH][V][DEPTH / 2][TILE][2];
    alignas(64) float scores[BATCH][KEY_TILE];
    alignas(64) bf16 weights[2][BATCH][KEY_TILE];
    alignas(64) float out[ROW_TILE][HEAD_DIM];
    float tops[ROW_TILE], totals[ROW_TILE];
};

// Loads the keys and values of these tokens, and zeros for unseen ones and up to the next multiple of DEPTH: the content of
// other slots must not reach a product.
template <int V, typename P>
void load_keys(MatrixTile<V>& tile, const P* keys, const P* values, const TokenOffsets& tokens) {
    constexpr int64_t HEAD_DIM = V * LANES;
    auto load_dims = [&](const P* from, int64_t token, int64_t d) {
        if (token < tokens.unseen || token >= tokens.count) return _mm512_setzero_si512();
        __mmask32 inside = HEAD_DIM - d >= DEPTH ? 0xffffffff : 0xffff;
        from += tokens.at[token] + d;
        if constexpr (std::is_same_v<P, bf16>) {
            return _mm512_maskz_loadu_epi16(inside, from);
        } else {
            __m256i bytes = _mm256_maskz_loadu_epi8(inside, from);
            auto widen = [](__m128i half) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(half)); };
            return (__m512i)_mm512_cvtne2ps_pbh(widen(_mm256_extracti128_si256(bytes, 1)), widen(_mm256_castsi256_si128(bytes)));
        }
    };
    // The elements of two vectors in turn, from their lower halves and from their upper halves.
    alignas(64) static constexpr uint16_t LOWER[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    __m512i lower = _mm512_load_si512(LOWER), upper = _mm512_add_epi16(lower, _mm512_set1_epi16(16));
    int64_t end = ceil_div(tokens.count, DEPTH) * DEPTH;
    for (int64_t d = 0; d < HEAD_DIM; d += DEPTH) {
        for (int64_t first = 0; first < end; first += TILE) {
            Floats pairs[TILE];
            PAGODA_UNROLL
            for (int64_t i = 0; i < TILE; i++) pairs[i] = (Floats)load_dims(keys, first + i, d);
            transpose(pairs);
            PAGODA_UNROLL
            for (int64_t i = 0; i < TILE; i++)
                _mm512_store_si512(tile.keys[d / DEPTH][first / TILE][i], (__m512i)pairs[i]);
        }
        for (int64_t token = 0; token < end; token += 2) {
            __m512i one = load_dims(values, token, d), two = load_dims(values, token + 1, d);
            auto* to = tile.values[token / DEPTH];
            int64_t pair = token % DEPTH / 2;
            _mm512_store_si512(to[d / TILE][pair], _mm512_permutex2var_epi16(one, lower, two));
            if (d + TILE < HEAD_DIM) _mm512_store_si512(to[d / TILE + 1][pair], _mm512_permutex2var_epi16(one, upper, two));
        }
    }
}

// scores = queries · keys of the tile's first `width` tokens, a multiple of DEPTH.
template <int V>
void score_batch(MatrixTile<V>& tile, int64_t row, int64_t width) {
    using Tile = MatrixTile<V>;
    for (int64_t key = 0; key < width; key += 2 * TILE) {
        clear_sums();
        add_products<2, 2>(tile.queries[row], Tile::DEPTH_STEPS * DEPTH, tile.keys[0][key / TILE][0][0], KEY_TILE * DEPTH,
                           Tile::DEPTH_STEPS, [] {});
        save_sums<2>(tile.scores[0] + key, KEY_TILE);
    }
}

// out += weights · values, likewise.
template <int V>
void add_values(MatrixTile<V>& tile, int64_t row, int64_t width) {
    constexpr int64_t HEAD_DIM = V * LANES;
    float* out = tile.out[row];
    int column = 0;
    auto add = [&](auto columns) {
        for (auto& part : tile.weights)
            add_products<2, columns.value>(part[0], KEY_TILE, tile.values[0][column][0][0], V * TILE * DEPTH, width / DEPTH, [] {});
    };
    written_for_unit();
    for (; column + 2 <= V; column += 2) {
        load_sums<2>(out + column * TILE, HEAD_DIM);
        add(std::integral_constant<int, 2>{});
        save_sums<2>(out + column * TILE, HEAD_DIM);
    }
    if (column == V) return;
    _tile_loadd(0, out + column * TILE, 4 * HEAD_DIM);
    _tile_loadd(2, out + TILE * HEAD_DIM + column * TILE, 4 * HEAD_DIM);
    add(std::integral_constant<int, 1>{});
    _tile_stored(0, out + column * TILE, 4 * HEAD_DIM);
    _tile_stored(2, out + TILE * HEAD_DIM + column * TILE, 4 * HEAD_DIM);
}

// Attends at most ROW_TILE rows.
template <int V, typename P>
void attend_tile(const TileRows& rows, const P* keys, const P* values) {
    constexpr int64_t HEAD_DIM = V * LANES;
    static thread_local std::vector<MatrixTile<V>> room(1);
    MatrixTile<V>& tile = room[0];
    int64_t padded_rows = ceil_div(rows.count, BATCH) * BATCH;
    float scale = 1.0f / std::sqrt(static_cast<float>(HEAD_DIM)), softcap = rows.args.softcap;
    auto* queries = static_cast<const bf16*>(rows.args.queries);
    std::memset(tile.queries, 0, padded_rows * sizeof tile.queries[0]);
    std::memset(tile.out, 0, padded_rows * sizeof tile.out[0]);
    for (int64_t row = 0; row < rows.count; row++) {
        std::memcpy(tile.queries[row], queries + rows.element(row), HEAD_DIM * sizeof(bf16));
        tile.tops[row] = -INFINITY;
        tile.totals[row] = 0;
    }
    MatrixUnit unit;
    unit.shape_for(BATCH);
    for (int64_t begin = rows.begin(); begin < rows.end; begin += KEY_TILE) {
        TokenOffsets tokens = rows.tokens(begin);
        int64_t width = ceil_div(tokens.count, DEPTH) * DEPTH;
        load_keys(tile, keys, values, tokens);
        const TokenScales<V, P> scales(rows.args, tokens, rows.kv_head());
        for (int64_t batch = 0; batch < padded_rows; batch += BATCH) {
            int64_t batch_end = std::min(batch + BATCH, rows.count);
            if (rows.position(batch_end - 1) < begin) continue;  // these queries come before the keys
            score_batch(tile, batch, width);
            for (int64_t row = batch; row < batch_end; row++) {
                float* scores = tile.scores[row - batch];
                int64_t seen = rows.position(row) + 1 - begin;
                for (int64_t i = 0; i < width; i += LANES) store(scores + i, load(scores + i) * scale);
                scales.scale_scores(scores);
                if (softcap != 0) cap_scores(scores, width, softcap);
                soften_row<V>(scores, width, seen - rows.window, seen, tile.tops[row], tile.totals[row], tile.out[row]);
                scales.scale_weights(scores);
                for (int64_t i = 0; i < width; i += LANES) {
                    Floats weight = load(scores + i), near = rounded(weight);
                    store(tile.weights[0][row - batch] + i, near);
                    store(tile.weights[1][row - batch] + i, weight - near);
                }
            }
            add_values(tile, batch, width);
        }
    }
    for (int64_t row = 0; row < rows.count; row++) {
        float total = rows.total(row, tile.tops[row], tile.totals[row]);
        for (int64_t d = 0; d < HEAD_DIM; d += LANES)
            store(static_cast<bf16*>(rows.args.out) + rows.element(row) + d, load(tile.out[row] + d) / total);
    }
}
