// Products with unquantized weights, in float32 or in bfloat16 that is widened in registers, for processors on which torch has
// no fast ones. Sums are float32. No include guard: each instruction set compiles its own copy.
//
// Weights are stored in panels of PANEL outputs: [panel][in][PANEL].

template <typename T>
void pack_whole(ThreadPool& pool, const T* weight, T* packed, int64_t in, int64_t out) {
    pool.run(static_cast<int>(ceil_div(out, PANEL)), [&](int panel) {
        for (int64_t column = 0; column < PANEL; column++) {
            int64_t row = panel * PANEL + column;
            for (int64_t i = 0; i < in; i++) packed[(panel * in + i) * PANEL + column] = row < out ? weight[row * in + i] : T{};
        }
    });
}

// ROWS rows times one panel.
template <int ROWS, typename T>
PAGODA_APART void multiply_whole(const float* x, int64_t in, const T* weight, Ahead& ahead, Floats (*out)[VECTORS]) {
    Floats sums[ROWS][VECTORS];
    clear(sums);
    for (int64_t k = 0; k < in; k++, weight += PANEL) {
        ahead.fetch();
        Floats w[VECTORS];
        PAGODA_UNROLL
        for (int i = 0; i < VECTORS; i++) w[i] = load(weight + i * LANES);
        PAGODA_UNROLL
        for (int row = 0; row < ROWS; row++) {
            Floats a = broadcast(x[row * in + k]);
            PAGODA_UNROLL
            for (int i = 0; i < VECTORS; i++) {
                sums[row][i] += a * w[i];
                if (REGISTERS == 16) PAGODA_KEEP(sums[row][i]);
            }
        }
    }
    PAGODA_UNROLL
    for (int row = 0; row < ROWS; row++)
        PAGODA_UNROLL
        for (int i = 0; i < VECTORS; i++) out[row][i] = sums[row][i];
}

template <typename T>
void linear_whole(ThreadPool& pool, const LinearArgs& args) {
    constexpr int TILE_ROWS = REGISTERS == 32 ? 12 : 6;
    static std::vector<float> rows;  // one op runs at a time
    if (args.rows == 0) return;
    rows.resize(std::max<size_t>(rows.size(), args.rows * args.in));
    for_each_row<T>(pool, args, [&](int64_t number, const auto& row) {
        float* to = rows.data() + number * args.in;
        int64_t i = 0;
        for (; i + LANES <= args.in; i += LANES) store(to + i, row(i));
        for (; i < args.in; i++) to[i] = row.at(i);
    });
    const T* weight = static_cast<const T*>(args.weight);
    multiply_panels<TILE_ROWS, 48, T>(pool, args, weight, args.in * PANEL * sizeof(T), args.in,
                                      [&](auto count, int64_t row, int64_t panel, Ahead& ahead, auto* sums) {
                                          multiply_whole<count.value>(rows.data() + row * args.in, args.in,
                                                                      weight + panel * args.in * PANEL, ahead, sums);
                                      });
}
