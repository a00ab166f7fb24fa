// Products of int8 activations and int8 weights. No include guard: each instruction set compiles its own copy.
//
// Both sides have one scale for every GROUP elements along the input, the weights for each output, the activations for
// each row: one large element then costs its own group precision, and no other row. The products of a group are summed
// as integers, exactly; the sums of the groups in float32, in the same order whatever rows are computed together.
//
// Weights lie in panels of PANEL outputs, as the instruction wants them: [panel][in / 4][PANEL][4] as bytes, 128 added,
// and their scales as [panel][in / GROUP][PANEL].

constexpr int64_t GROUP = 64;
constexpr int64_t PANEL = 32;
constexpr int64_t AHEAD_BYTES = 8192;  // what memory delivers in the time that it takes to answer, with room to spare

template <typename T>
void pack_int8(ThreadPool& pool, const T* weight, uint8_t* packed, float* scales, int64_t in, int64_t out) {
    int64_t groups = ceil_div(in, GROUP);
    pool.run(static_cast<int>(ceil_div(out, PANEL)), [&](int panel) {
        uint8_t* bytes = packed + panel * groups * GROUP * PANEL;
        float* panel_scales = scales + panel * groups * PANEL;
        for (int64_t column = 0; column < PANEL; column++) {
            int64_t row = panel * PANEL + column;
            for (int64_t group = 0; group < groups; group++) {
                float values[GROUP] = {}, most = 0;
                for (int64_t i = 0; i < GROUP && row < out && group * GROUP + i < in; i++) {
                    values[i] = to_float(weight[row * in + group * GROUP + i]);
                    most = std::max(most, std::fabs(values[i]));
                }
                panel_scales[group * PANEL + column] = most / 127.0f;
                float inverse = most > 0 ? 127.0f / most : 0.0f;
                for (int64_t i = 0; i < GROUP; i++) {
                    int64_t at = ((group * GROUP + i) / 4 * PANEL + column) * 4 + i % 4;
                    bytes[at] = static_cast<uint8_t>(std::nearbyint(values[i] * inverse) + 128.0f);
                }
            }
        }
    });
}

#if defined(PAGODA_VNNI)

// Rows as int8 with a scale for each group, and what the 128 added to the weights adds to a group's sum.
struct Int8Rows {
    int8_t* values;    // [rows, groups * GROUP]
    float* scales;     // [rows, groups]
    int32_t* offsets;  // [rows, groups]
};

// A row as it is.
template <typename T>
struct Plain {
    static constexpr int64_t WIDTH = 1;
    const T* x;

    Plain(const T* row, int64_t) : x(row) {}
    f32x16 operator()(int64_t i) const { return load(x + i); }
    float at(int64_t i) const { return to_float(x[i]); }
};

// A row of gate and up, as silu(gate) · up.
template <typename T>
struct Gated {
    static constexpr int64_t WIDTH = 2;
    const T *gate, *up;

    Gated(const T* row, int64_t in) : gate(row), up(row + in) {}
    f32x16 operator()(int64_t i) const { return gated(load(gate + i), load(up + i)); }
    float at(int64_t i) const { return gated(broadcast(to_float(gate[i])), broadcast(to_float(up[i])))[0]; }
    static f32x16 gated(f32x16 gate, f32x16 up) { return gate / (1.0f + exponential(-gate)) * up; }
};

template <typename Row>
void quantize_row(const Row& x, int64_t in, int8_t* values, float* scales, int32_t* offsets) {
    constexpr float MAGIC = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer, kept in the low bits
    constexpr int VECTORS = GROUP / LANES;
    for (int64_t first = 0; first < in; first += GROUP) {
        f32x16 part[VECTORS], most{}, poison{};
        float rest[GROUP] = {};
        bool is_whole = in - first >= GROUP;
        for (int64_t i = first; i < in && !is_whole; i++) rest[i - first] = x.at(i);
        for (int i = 0; i < VECTORS; i++) {
            part[i] = is_whole ? x(first + i * LANES) : load(rest + i * LANES);
            most = max(absolute(part[i]), most);
            poison += part[i] * 0.0f;  // NaN or infinity in a group makes its products NaN
        }
        float top = greatest(most);
        float inverse = top > 0 ? 127.0f / top : 0.0f;
        i32x16 total{};
        for (int i = 0; i < VECTORS; i++) {
            i32x16 whole = (i32x16)(part[i] * inverse + MAGIC) - 0x4b400000;
            total += whole;
            _mm_storeu_si128((__m128i*)(values + first + i * LANES), _mm512_cvtepi32_epi8((__m512i)whole));
        }
        *scales++ = top / 127.0f + sum(poison);
        *offsets++ = -128 * _mm512_reduce_add_epi32((__m512i)total);
    }
}

// Weights to fetch into the cache, some lines with each group.
struct Ahead {
    const uint8_t* bytes;
    int64_t lines_a_group;
};

// ROWS rows times one panel.
template <int ROWS, typename T>
void multiply_tile(const Int8Rows& rows, int64_t first_row, const uint8_t* bytes, const float* scales, int64_t groups,
                   Ahead& ahead, const T* bias, T* out, int64_t out_stride, int64_t columns) {
    constexpr int VECTORS = PANEL / LANES;
    const int8_t* x = rows.values + first_row * groups * GROUP;
    f32x16 sums[ROWS][VECTORS] = {};
    for (int64_t group = 0; group < groups; group++) {
        for (int64_t i = 0; i < ahead.lines_a_group; i++, ahead.bytes += 64) __builtin_prefetch(ahead.bytes, 0, 2);
        __m512i products[ROWS][VECTORS];
        for (int row = 0; row < ROWS; row++)
            for (int i = 0; i < VECTORS; i++)
                products[row][i] = _mm512_set1_epi32(rows.offsets[(first_row + row) * groups + group]);
#pragma GCC unroll 16  // whole: else GCC copies every sum in every round
        for (int64_t k = 0; k < GROUP; k += 4) {
            __m512i w[VECTORS];
            for (int i = 0; i < VECTORS; i++) w[i] = _mm512_loadu_si512(bytes + 64 * i);
            bytes += 4 * PANEL;
            for (int row = 0; row < ROWS; row++) {
                int32_t four;
                std::memcpy(&four, x + row * groups * GROUP + group * GROUP + k, sizeof four);
                __m512i a = _mm512_set1_epi32(four);
                for (int i = 0; i < VECTORS; i++) products[row][i] = _mm512_dpbusd_epi32(products[row][i], w[i], a);
            }
        }
        for (int i = 0; i < VECTORS; i++) {
            f32x16 scale = load(scales + group * PANEL + i * LANES);
            for (int row = 0; row < ROWS; row++) {
                f32x16 row_scale = broadcast(rows.scales[(first_row + row) * groups + group]);
                sums[row][i] += (f32x16)_mm512_cvtepi32_ps(products[row][i]) * (scale * row_scale);
            }
        }
    }
    for (int row = 0; row < ROWS; row++) {
        for (int i = 0; i < VECTORS; i++) {
            int64_t column = i * LANES;
            T* to = out + (first_row + row) * out_stride + column;
            if (column + LANES <= columns) {
                store(to, bias ? sums[row][i] + load(bias + column) : sums[row][i]);
            } else {
                for (int64_t lane = 0; column + lane < columns; lane++)
                    round_to(&to[lane], bias ? sums[row][i][lane] + to_float(bias[column + lane]) : sums[row][i][lane]);
            }
        }
    }
}

template <typename T, typename Row>
void linear_int8_of(ThreadPool& pool, const LinearArgs& args) {
    constexpr int64_t TILE_ROWS = 8;    // with PANEL columns, all sums stay in registers
    constexpr int64_t BLOCK_ROWS = 96;  // of int8, stay in the second level of cache
    static std::vector<int8_t> values;  // one op runs at a time
    static std::vector<float> scales;
    static std::vector<int32_t> offsets;
    if (args.rows == 0) return;
    int64_t groups = ceil_div(args.in, GROUP);
    values.resize(std::max<size_t>(values.size(), args.rows * groups * GROUP));
    scales.resize(std::max<size_t>(scales.size(), args.rows * groups));
    offsets.resize(std::max<size_t>(offsets.size(), args.rows * groups));
    Int8Rows rows{values.data(), scales.data(), offsets.data()};

    const T* x = static_cast<const T*>(args.x);
    int64_t rows_a_part = rows_per_part(args.rows, 2 * Row::WIDTH * args.in);
    pool.run(ceil_div(args.rows, rows_a_part), [&](int part) {
        int64_t end = std::min(args.rows, (part + 1) * rows_a_part);
        for (int64_t row = part * rows_a_part; row < end; row++)
            quantize_row(Row(x + row * Row::WIDTH * args.in, args.in), args.in, rows.values + row * groups * GROUP, rows.scales + row * groups,
                         rows.offsets + row * groups);
    });

    int64_t blocks = ceil_div(args.rows, BLOCK_ROWS);
    int64_t block_rows = ceil_div(ceil_div(args.rows, blocks), TILE_ROWS) * TILE_ROWS;
    int64_t panels = ceil_div(args.out_size, PANEL);
    // Few rows take little time: then a part is several panels.
    int64_t panels_a_part = blocks > 1 ? 1 : ceil_div(panels, pool.size() * ceil_div(args.rows + 8, 4));
    auto multiply_panel = [&](int64_t panel, int64_t block) {
        int64_t end = std::min(args.rows, (block + 1) * block_rows);
        const uint8_t* bytes = args.weight + panel * groups * GROUP * PANEL;
        const float* panel_scales = args.scales + panel * groups * PANEL;
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
