// Products of int8 activations and int8 weights. No include guard: each instruction set compiles its own copy.
//
// Both sides have one scale for every GROUP elements along the input, the weights for each output, the activations for
// each row: one large element then costs its own group precision, and no other row. Activations are counted in steps of
// their group's scale from its least: x = scale * q + least, q in 0…255. The products of a group are summed as integers,
// exactly; what `least` contributes is least times the group's sum of weights; the groups are added in float32, in the
// same order whatever rows are computed together.
//
// Weights lie in panels of PANEL outputs, as the instruction wants them: [panel][in / 4][PANEL][4] as bytes, and beside
// them [panel][in / GROUP][2][PANEL], their scales and their sums.

constexpr int64_t GROUP = 64;
constexpr int64_t PANEL = 32;
constexpr int64_t AHEAD_BYTES = 8192;  // what memory delivers in the time that it takes to answer, with room to spare

template <typename T>
void pack_int8(ThreadPool& pool, const T* weight, int8_t* packed, float* scales, int64_t in, int64_t out) {
    int64_t groups = ceil_div(in, GROUP);
    pool.run(static_cast<int>(ceil_div(out, PANEL)), [&](int panel) {
        int8_t* bytes = packed + panel * groups * GROUP * PANEL;
        float* panel_scales = scales + panel * groups * 2 * PANEL;
        for (int64_t column = 0; column < PANEL; column++) {
            int64_t row = panel * PANEL + column;
            for (int64_t group = 0; group < groups; group++) {
                float values[GROUP] = {}, most = 0;
                for (int64_t i = 0; i < GROUP && row < out && group * GROUP + i < in; i++) {
                    values[i] = to_float(weight[row * in + group * GROUP + i]);
                    most = std::max(most, std::fabs(values[i]));
                }
                float scale = most / 127.0f, total = 0;
                float inverse = most > 0 ? 127.0f / most : 0.0f;
                for (int64_t i = 0; i < GROUP; i++) {
                    int64_t at = ((group * GROUP + i) / 4 * PANEL + column) * 4 + i % 4;
                    float whole = std::nearbyint(values[i] * inverse);
                    bytes[at] = static_cast<int8_t>(whole);
                    total += whole;
                }
                panel_scales[2 * group * PANEL + column] = scale;
                panel_scales[(2 * group + 1) * PANEL + column] = scale * total;
            }
        }
    });
}

#if defined(PAGODA_VNNI)

// Rows as bytes, with the scale and the least element of each group.
struct QuantizedRows {
    uint8_t* values;  // [rows, groups * GROUP]
    float* scales;    // [rows, groups]
    float* least;     // [rows, groups]
};

template <typename Row>
void quantize_row(const Row& x, int64_t in, uint8_t* values, float* scales, float* least) {
    constexpr float MAGIC = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer, kept in the low bits
    constexpr int VECTORS = GROUP / LANES;
    for (int64_t first = 0; first < in; first += GROUP) {
        f32x16 part[VECTORS], most = broadcast(-INFINITY), negative_least = most, poison{};
        float rest[GROUP] = {};
        bool is_whole = in - first >= GROUP;
        for (int64_t i = first; i < in && !is_whole; i++) rest[i - first] = x.at(i);
        for (int i = 0; i < VECTORS; i++) {
            part[i] = is_whole ? x(first + i * LANES) : load(rest + i * LANES);
            most = max(part[i], most);
            negative_least = max(-part[i], negative_least);
            poison += part[i] * 0.0f;  // NaN or infinity in a group makes its products NaN
        }
        float low = -greatest(negative_least), range = greatest(most) - low;
        float inverse = range > 0 ? 255.0f / range : 0.0f;
        for (int i = 0; i < VECTORS; i++) {
            i32x16 whole = (i32x16)((part[i] - low) * inverse + MAGIC) - 0x4b400000;
            _mm_storeu_si128((__m128i*)(values + first + i * LANES), _mm512_cvtepi32_epi8((__m512i)whole));
        }
        *scales++ = range / 255.0f + sum(poison);
        *least++ = low;
    }
}

// Weights to fetch into the cache, some lines with each group.
struct Ahead {
    const int8_t* bytes;
    int64_t lines_a_group;
};

// ROWS rows times one panel.
template <int ROWS, typename T>
void multiply_tile(const QuantizedRows& rows, int64_t first_row, const int8_t* bytes, const float* scales, int64_t groups,
                   Ahead& ahead, const T* bias, T* out, int64_t out_stride, int64_t columns) {
    constexpr int VECTORS = PANEL / LANES;
    const uint8_t* x = rows.values + first_row * groups * GROUP;
    f32x16 sums[ROWS][VECTORS] = {};
    for (int64_t group = 0; group < groups; group++) {
        for (int64_t i = 0; i < ahead.lines_a_group; i++, ahead.bytes += 64) __builtin_prefetch(ahead.bytes, 0, 2);
        __m512i products[ROWS][VECTORS] = {};
#pragma GCC unroll 16  // whole: else GCC copies every sum in every round
        for (int64_t k = 0; k < GROUP; k += 4) {
            __m512i w[VECTORS];
            for (int i = 0; i < VECTORS; i++) w[i] = _mm512_loadu_si512(bytes + 64 * i);
            bytes += 4 * PANEL;
            for (int row = 0; row < ROWS; row++) {
                int32_t four;
                std::memcpy(&four, x + row * groups * GROUP + group * GROUP + k, sizeof four);
                __m512i a = _mm512_set1_epi32(four);
                for (int i = 0; i < VECTORS; i++) products[row][i] = _mm512_dpbusd_epi32(products[row][i], a, w[i]);
            }
        }
        for (int i = 0; i < VECTORS; i++) {
            f32x16 scale = load(scales + 2 * group * PANEL + i * LANES);
            f32x16 total = load(scales + (2 * group + 1) * PANEL + i * LANES);
            for (int row = 0; row < ROWS; row++) {
                int64_t at = (first_row + row) * groups + group;
                sums[row][i] += (f32x16)_mm512_cvtepi32_ps(products[row][i]) * (scale * broadcast(rows.scales[at]));
                sums[row][i] += total * broadcast(rows.least[at]);
            }
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < VECTORS; i++)
            store_outputs(sums[row][i], i * LANES, columns, bias, out + (first_row + row) * out_stride);
}

template <typename T, typename Row>
void linear_int8_of(ThreadPool& pool, const LinearArgs& args) {
    constexpr int64_t TILE_ROWS = 8;    // with PANEL columns, all sums stay in registers
    constexpr int64_t BLOCK_ROWS = 96;  // of int8, stay in the second level of cache
    static std::vector<uint8_t> values;  // one op runs at a time
    static std::vector<float> scales, least;
    if (args.rows == 0) return;
    int64_t groups = ceil_div(args.in, GROUP);
    values.resize(std::max<size_t>(values.size(), args.rows * groups * GROUP));
    scales.resize(std::max<size_t>(scales.size(), args.rows * groups));
    least.resize(std::max<size_t>(least.size(), args.rows * groups));
    QuantizedRows rows{values.data(), scales.data(), least.data()};

    const T* x = static_cast<const T*>(args.x);
    int64_t rows_a_part = rows_per_part(args.rows, 2 * Row::WIDTH * args.in);
    pool.run(ceil_div(args.rows, rows_a_part), [&](int part) {
        int64_t end = std::min(args.rows, (part + 1) * rows_a_part);
        for (int64_t row = part * rows_a_part; row < end; row++)
            quantize_row(Row(x + row * Row::WIDTH * args.in, args.in), args.in, rows.values + row * groups * GROUP, rows.scales + row * groups,
                         rows.least + row * groups);
    });

    int64_t blocks = ceil_div(args.rows, BLOCK_ROWS);
    int64_t block_rows = ceil_div(ceil_div(args.rows, blocks), TILE_ROWS) * TILE_ROWS;
    int64_t panels = ceil_div(args.out_size, PANEL);
    // Few rows take little time: then a part is several panels.
    int64_t panels_a_part = blocks > 1 ? 1 : ceil_div(panels, pool.size() * ceil_div(args.rows + 8, 4));
    auto multiply_panel = [&](int64_t panel, int64_t block) {
        int64_t end = std::min(args.rows, (block + 1) * block_rows);
        const int8_t* bytes = args.weight + panel * groups * GROUP * PANEL;
        const float* panel_scales = args.scales + panel * groups * 2 * PANEL;
        const T* bias = args.bias ? static_cast<const T*>(args.bias) + panel * PANEL : nullptr;
        T* out = static_cast<T*>(args.out) + panel * PANEL;
        int64_t columns = std::min(PANEL, args.out_size - panel * PANEL);
        // While it computes with one panel it fetches the next, each tile of rows its share; a single tile what it will
        // need soon. Panels follow each other in memory; beyond the last, asking for memory does no harm.
        int64_t tiles = ceil_div(end - block * block_rows, TILE_ROWS);
        Ahead ahead{bytes + (tiles > 1 ? groups * GROUP * PANEL : AHEAD_BYTES), ceil_div(GROUP * PANEL / 64, tiles)};
        auto multiply = [&](auto count, int64_t row) {
            multiply_tile<count.value, T>(rows, row, bytes, panel_scales, groups, ahead, bias, out, args.out_size, columns);
        };
        int64_t row = block * block_rows;
        for (; row + TILE_ROWS <= end; row += TILE_ROWS) multiply(std::integral_constant<int, TILE_ROWS>{}, row);
        switch (end - row) {
            case 7: multiply(std::integral_constant<int, 7>{}, row); break;
            case 6: multiply(std::integral_constant<int, 6>{}, row); break;
            case 5: multiply(std::integral_constant<int, 5>{}, row); break;
            case 4: multiply(std::integral_constant<int, 4>{}, row); break;
            case 3: multiply(std::integral_constant<int, 3>{}, row); break;
            case 2: multiply(std::integral_constant<int, 2>{}, row); break;
            case 1: multiply(std::integral_constant<int, 1>{}, row); break;
        }
    };
    pool.run(static_cast<int>(ceil_div(panels, panels_a_part) * blocks), [&](int part) {
        int64_t first = part / blocks * panels_a_part, end = std::min(panels, first + panels_a_part);
        for (int64_t panel = first; panel < end; panel++) multiply_panel(panel, part % blocks);
    });
}

template <typename T>
void linear_int8(ThreadPool& pool, const LinearArgs& args) {
    if (args.is_gated)
        linear_int8_of<T, Gated<T>>(pool, args);
    else
        linear_int8_of<T, Plain<T>>(pool, args);
}

#endif
