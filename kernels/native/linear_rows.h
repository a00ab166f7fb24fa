// The common part of all products: reading rows, sharing panels of outputs among threads, and storing results.
// No include guard: each instruction set compiles its own copy.

constexpr int64_t VECTORS = 2;  // of outputs in a panel
constexpr int64_t PANEL = VECTORS * LANES;
constexpr int64_t AHEAD_BYTES = 8192;  // more than memory delivers within its latency

// A row of a product's input.
template <typename T>
struct Row {
    const T* x;

    Floats operator()(int64_t i) const { return load(x + i); }
    float at(int64_t i) const { return to_float(x[i]); }
};

// Calls prepare(number, row) for every row of the input, in which an activation was computed in float32.
template <typename T, typename Prepare>
void for_each_row(ThreadPool& pool, const LinearArgs& args, const Prepare& prepare) {
    const T* x = static_cast<const T*>(args.x);
    int64_t width = args.activation.width() * args.in, rows_a_part = rows_per_part(args.rows, 2 * width);
    pool.run(static_cast<int>(ceil_div(args.rows, rows_a_part)), [&](int part) {
        thread_local std::vector<float> activated;  // which the next product reuses
        int64_t end = std::min(args.rows, (part + 1) * rows_a_part);
        bool is_plain = args.activation.function == Function::none;
        if (!is_plain) activated.resize(std::max<size_t>(activated.size(), args.in));
        for (int64_t row = part * rows_a_part; row < end; row++) {
            const T* from = x + (args.experts.sources ? args.experts.sources[row] : row) * width;
            if (is_plain) {
                prepare(row, Row<T>{from});
            } else {
                activate_row(from, args.activation, args.in, activated.data());
                prepare(row, Row<float>{activated.data()});
            }
        }
    });
}

// Stores LANES outputs of a row, from `column` of their panel on. Outputs beyond the panel's `columns` are padding.
template <typename T, typename Out>
PAGODA_INLINE void store_outputs(Floats sums, int64_t column, int64_t columns, const T* bias, Out* out) {
    if (column + LANES <= columns) {
        store(out + column, bias ? sums + load(bias + column) : sums);
    } else {
        for (int64_t lane = 0; column + lane < columns; lane++)
            round_to(&out[column + lane], bias ? sums[lane] + to_float(bias[column + lane]) : sums[lane]);
    }
}

template <typename Vector, int ROWS>
PAGODA_INLINE void clear(Vector (&sums)[ROWS][VECTORS]) {
    PAGODA_UNROLL
    for (int row = 0; row < ROWS; row++)
        PAGODA_UNROLL
        for (int i = 0; i < VECTORS; i++) sums[row][i] = Vector{};
}

// Fetches weights into the cache, some lines at every step through a panel.
struct Ahead {
    const uint8_t* bytes;
    int64_t lines_a_step;

    void fetch() {
        for (int64_t i = 0; i < lines_a_step; i++, bytes += 64) __builtin_prefetch(bytes, 0, 2);
    }
};

// Adjacent rows that one weight multiplies, in blocks that stay in the second level of cache.
struct Span {
    int64_t expert, first, end, blocks, block_rows;
    int64_t first_part;
};

// Multiplies all rows by every panel of their weight, TILE_ROWS at a time.
//
// weight       panels of panel_bytes each, which a tile reads in `steps` steps; those of experts are adjacent
// CACHED_ROWS  rows that stay in the second level of cache
// multiply     (rows: an integral_constant, first row, panel, Ahead&, sums: Floats [rows][VECTORS], written)
template <int TILE_ROWS, int CACHED_ROWS, typename T, typename Multiply>
void multiply_panels(ThreadPool& pool, const LinearArgs& args, const void* weight, int64_t panel_bytes, int64_t steps,
                     const Multiply& multiply) {
    static std::vector<Span> spans;  // one op runs at a time
    spans.clear();
    int64_t panels = ceil_div(args.out_size, PANEL), blocks = 0;
    auto add_span = [&](int64_t expert, int64_t first, int64_t end) {
        if (first == end) return;
        int64_t of_span = ceil_div(end - first, CACHED_ROWS);
        spans.push_back({expert, first, end, of_span, ceil_div(ceil_div(end - first, of_span), TILE_ROWS) * TILE_ROWS, 0});
        blocks += of_span;
    };
    if (!args.experts.count) add_span(0, 0, args.rows);
    for (int64_t expert = 0; expert < args.experts.count; expert++)
        add_span(expert, args.experts.starts[expert], args.experts.starts[expert + 1]);
    int64_t count = static_cast<int64_t>(spans.size()), expert_panels = args.experts.weight_bytes / panel_bytes;
    // Few rows take little time, so a part is several panels.
    int64_t few = ceil_div(count * panels, pool.size() * ceil_div(ceil_div(args.rows, std::max<int64_t>(count, 1)) + 8, 4));
    int64_t panels_a_part = blocks > count ? 1 : std::max<int64_t>(1, std::min(panels, few)), parts = 0;
    for (Span& span : spans) {
        span.first_part = parts;
        parts += ceil_div(panels, panels_a_part) * span.blocks;
    }
    auto multiply_part = [&](const Span& span, int64_t panel, int64_t block) {
        int64_t first = span.first + block * span.block_rows, end = std::min(span.end, first + span.block_rows);
        const T* bias = args.bias ? static_cast<const T*>(args.bias) + span.expert * args.out_size + panel * PANEL : nullptr;
        int64_t columns = std::min(PANEL, args.out_size - panel * PANEL), packed_panel = span.expert * expert_panels + panel;
        // While it computes with one panel it prefetches the next, each tile of rows a share; a single tile prefetches what
        // it needs soon. Panels are adjacent in memory; prefetching beyond the last is harmless.
        int64_t tiles = ceil_div(end - first, TILE_ROWS);
        const uint8_t* bytes = static_cast<const uint8_t*>(weight) + packed_panel * panel_bytes;
        Ahead ahead{bytes + (tiles > 1 ? panel_bytes : AHEAD_BYTES), ceil_div(panel_bytes, 64 * steps * tiles)};
        auto tile = [&](auto rows, int64_t row) {
            Floats sums[rows.value][VECTORS];
            multiply(rows, row, packed_panel, ahead, sums);
            auto save = [&](auto* out) {
                out += row * args.out_stride + panel * PANEL;
                for (int r = 0; r < rows.value; r++, out += args.out_stride)
                    for (int i = 0; i < VECTORS; i++) store_outputs(sums[r][i], i * LANES, columns, bias, out);
            };
            if (args.out_dtype == Dtype::float32)
                save(static_cast<float*>(args.out));
            else
                save(static_cast<bf16*>(args.out));
        };
        int64_t row = first;
        for (; row + TILE_ROWS <= end; row += TILE_ROWS) tile(std::integral_constant<int, TILE_ROWS>{}, row);
        with_count<TILE_ROWS - 1>(end - row, [&](auto rows) { tile(rows, row); });
    };
    pool.run(static_cast<int>(parts), [&](int part) {
        auto is_later = [](int64_t part, const Span& span) { return part < span.first_part; };
        const Span& span = *(std::upper_bound(spans.begin(), spans.end(), part, is_later) - 1);
        int64_t of_span = part - span.first_part;
        int64_t first = of_span / span.blocks * panels_a_part, end = std::min(panels, first + panels_a_part);
        for (int64_t panel = first; panel < end; panel++) multiply_part(span, panel, of_span % span.blocks);
    });
}
