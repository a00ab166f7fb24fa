// What LoRA adapters add to products: rows of different adapters side by side, each with two small products of its own. Sums are
// float32, and the order of a row's sums does not depend on other rows. No include guard: each instruction set compiles its own
// copy.
//
// pack_low_rank.h packs the weights: `down` row by row, padded with zeros to LOW_RANK_PADDING inputs; `up` in panels of as
// many outputs, [panel][rank][LOW_RANK_PADDING].

constexpr int64_t LOW_RANK_TILE = REGISTERS == 32 ? 4 : 2;  // rows of one adapter that read its weights together
constexpr int64_t RANKS_TOGETHER = 4;
constexpr int64_t LEAST_PRODUCTS = 16384;  // of a part, so that sharing it among threads pays

// Rows of one adapter, by their numbers among those that have any.
struct LowRankTile {
    const LowRankEntry* entry;
    int64_t first, count;
};

// hidden[row][rank] = down[rank] · x[row] for some ranks.
template <int ROWS, typename T>
PAGODA_APART void multiply_down(const float* x, int64_t padded, const T* down, int64_t ranks, float* hidden, int64_t stride) {
    for (int64_t rank = 0; rank < ranks; rank += RANKS_TOGETHER) {
        // Beyond the last rank the last one is read again, and what comes of it is not stored.
        const T* rows[RANKS_TOGETHER];
        for (int64_t j = 0; j < RANKS_TOGETHER; j++) rows[j] = down + std::min(rank + j, ranks - 1) * padded;
        Floats sums[ROWS][RANKS_TOGETHER];
        PAGODA_UNROLL
        for (int row = 0; row < ROWS; row++)
            PAGODA_UNROLL
            for (int j = 0; j < RANKS_TOGETHER; j++) sums[row][j] = Floats{};
        for (int64_t i = 0; i < padded; i += LANES) {
            Floats w[RANKS_TOGETHER];
            PAGODA_UNROLL
            for (int j = 0; j < RANKS_TOGETHER; j++) w[j] = load(rows[j] + i);
            PAGODA_UNROLL
            for (int row = 0; row < ROWS; row++) {
                Floats a = load(x + row * padded + i);
                PAGODA_UNROLL
                for (int j = 0; j < RANKS_TOGETHER; j++) sums[row][j] += a * w[j];
            }
        }
        for (int row = 0; row < ROWS; row++)
            for (int64_t j = 0; j < std::min(RANKS_TOGETHER, ranks - rank); j++) hidden[row * stride + rank + j] = sum(sums[row][j]);
    }
}

// out[row] += hidden[row] · up for the outputs of one panel.
template <int ROWS, typename T>
PAGODA_APART void multiply_up(const float* hidden, int64_t stride, const T* up, int64_t rank, T* const* out, int64_t columns) {
    constexpr int VECTORS_TOGETHER = 4;
    for (int64_t column = 0; column < columns; column += VECTORS_TOGETHER * LANES) {
        Floats sums[ROWS][VECTORS_TOGETHER];
        PAGODA_UNROLL
        for (int row = 0; row < ROWS; row++)
            PAGODA_UNROLL
            for (int i = 0; i < VECTORS_TOGETHER; i++) sums[row][i] = Floats{};
        for (int64_t k = 0; k < rank; k++) {
            Floats w[VECTORS_TOGETHER];
            PAGODA_UNROLL
            for (int i = 0; i < VECTORS_TOGETHER; i++) w[i] = load(up + k * LOW_RANK_PADDING + column + i * LANES);
            PAGODA_UNROLL
            for (int row = 0; row < ROWS; row++) {
                Floats a = broadcast(hidden[row * stride + k]);
                PAGODA_UNROLL
                for (int i = 0; i < VECTORS_TOGETHER; i++) sums[row][i] += a * w[i];
            }
        }
        for (int row = 0; row < ROWS; row++)
            for (int i = 0; i < VECTORS_TOGETHER; i++) {
                int64_t start = column + i * LANES;
                T* to = out[row] + start;
                if (start + LANES <= columns)
                    store(to, load(to) + sums[row][i]);
                else
                    for (int64_t lane = 0; start + lane < columns; lane++) round_to(to + lane, to_float(to[lane]) + sums[row][i][lane]);
            }
    }
}

// Shares `count` steps of each tile, of `products` a row and step, among threads: body(tile, first step, end).
template <typename Steps, typename Body>
void for_each_step(ThreadPool& pool, const std::vector<LowRankTile>& tiles, int64_t most_steps, int64_t together, int64_t products,
                   const Steps& steps, const Body& body) {
    int64_t a_part = ceil_div(ceil_div(LEAST_PRODUCTS, std::max<int64_t>(1, products)), together) * together;
    int64_t parts_a_tile = ceil_div(most_steps, a_part);
    pool.run(static_cast<int>(parts_a_tile * static_cast<int64_t>(tiles.size())), [&](int part) {
        const LowRankTile& tile = tiles[part / parts_a_tile];
        int64_t first = part % parts_a_tile * a_part, end = std::min(steps(tile), first + a_part);
        if (first < end) body(tile, first, end);
    });
}

// The rows that have an adapter, by adapter, and how they are computed together.
struct LowRankRows {
    std::vector<int64_t> rows;
    std::vector<LowRankTile> tiles;
    std::vector<float> inputs, hidden;  // [rows, padded], [rows, most_ranks]
    int64_t padded, most_ranks, most_panels;

    void collect(const LowRankArgs& args) {
        rows.clear();
        tiles.clear();
        most_ranks = most_panels = 0;
        for (int64_t row = 0; row < args.rows; row++)
            if (args.slots[row] >= 0 && args.table[args.slots[row]].ranks) rows.push_back(row);
        std::stable_sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) { return args.slots[a] < args.slots[b]; });
        for (int64_t number = 0; number < count(); number++) {
            const LowRankEntry* entry = args.table + args.slots[rows[number]];
            if (tiles.empty() || tiles.back().entry != entry || tiles.back().count == LOW_RANK_TILE) {
                tiles.push_back({entry, number, 0});
                most_ranks = std::max(most_ranks, entry->ranks);
                most_panels = std::max(most_panels, entry->panels());
            }
            tiles.back().count++;
        }
        padded = ceil_div(args.in, LOW_RANK_PADDING) * LOW_RANK_PADDING;
        inputs.resize(std::max<size_t>(inputs.size(), count() * padded));
        hidden.resize(std::max<size_t>(hidden.size(), count() * most_ranks));
    }

    int64_t count() const { return static_cast<int64_t>(rows.size()); }
};

// Writes the rows in float32, activated, with zeros behind them.
template <typename T>
void read_inputs(ThreadPool& pool, const LowRankArgs& args, LowRankRows& of) {
    int64_t width = args.activation.width() * args.in, rows_a_part = rows_per_part(of.count(), 2 * width);
    pool.run(static_cast<int>(ceil_div(of.count(), rows_a_part)), [&](int part) {
        for (int64_t number = part * rows_a_part; number < std::min(of.count(), (part + 1) * rows_a_part); number++) {
            const T* from = static_cast<const T*>(args.x) + of.rows[number] * width;
            float* to = of.inputs.data() + number * of.padded;
            if (args.activation.function == Function::none)
                for (int64_t i = 0; i < args.in; i++) to[i] = to_float(from[i]);
            else
                activate_row(from, args.activation, args.in, to);
            std::fill(to + args.in, to + of.padded, 0.0f);
        }
    });
}

// Adds to some panels of a tile's outputs, counted over all parts of its product.
template <typename T>
void add_panels(const LowRankArgs& args, const LowRankRows& of, const LowRankTile& tile, int64_t panel, int64_t end) {
    int64_t ranks_before = 0, panels_before = 0;
    for (int64_t number = 0; number < tile.entry->num_parts; number++) {
        const LowRankPart& part = tile.entry->parts[number];
        for (; panel < end && panel < panels_before + part.panels(); panel++) {
            int64_t of_part = panel - panels_before, column = of_part * LOW_RANK_PADDING;
            const T* up = static_cast<const T*>(part.up) + of_part * part.rank * LOW_RANK_PADDING;
            T* out[LOW_RANK_TILE];
            for (int64_t row = 0; row < tile.count; row++)
                out[row] = static_cast<T*>(args.out) + of.rows[tile.first + row] * args.out_stride + part.column + column;
            with_count<LOW_RANK_TILE>(tile.count, [&](auto rows) {
                multiply_up<rows.value>(of.hidden.data() + tile.first * of.most_ranks + ranks_before, of.most_ranks, up, part.rank,
                                        out, std::min(LOW_RANK_PADDING, part.size - column));
            });
        }
        ranks_before += part.rank;
        panels_before += part.panels();
    }
}

template <typename T>
void add_low_rank(ThreadPool& pool, const LowRankArgs& args) {
    static LowRankRows of;  // one op runs at a time
    of.collect(args);
    if (of.rows.empty()) return;
    read_inputs<T>(pool, args, of);
    int64_t rows = of.tiles[0].count;
    for_each_step(pool, of.tiles, of.most_ranks, RANKS_TOGETHER, of.padded * rows, [](const LowRankTile& tile) { return tile.entry->ranks; },
                  [&](const LowRankTile& tile, int64_t first, int64_t end) {
                      with_count<LOW_RANK_TILE>(tile.count, [&](auto count) {
                          multiply_down<count.value>(of.inputs.data() + tile.first * of.padded, of.padded,
                                                     static_cast<const T*>(tile.entry->down) + first * of.padded, end - first,
                                                     of.hidden.data() + tile.first * of.most_ranks + first, of.most_ranks);
                      });
                  });
    for_each_step(pool, of.tiles, of.most_panels, 1, LOW_RANK_PADDING * of.tiles[0].entry->parts[0].rank * rows,
                  [](const LowRankTile& tile) { return tile.entry->panels(); },
                  [&](const LowRankTile& tile, int64_t first, int64_t end) { add_panels<T>(args, of, tile, first, end); });
}
