// Products of int8 activations and int8 weights. No include guard: each instruction set compiles its own copy.
//
// Weights have a scale for every WEIGHT_GROUP inputs of each output. The products of such a group are summed as integers,
// exactly. A row's `least` contributes least times the sum of the weights of its group. Groups are added in float32, in an
// order that does not depend on which rows are computed together.
//
// Weights are stored in panels of PANEL outputs, as dot4 reads them: bytes [panel][in / 4][PANEL][4], and separately their
// scales and sums, [panel][in / GROUP][SCALES + 1][PANEL].

// The limit on neighbours makes steps larger; shorter groups make up for it.
constexpr int64_t WEIGHT_GROUP = PAIRS_ARE_LIMITED ? GROUP / 2 : GROUP;
constexpr int64_t SCALES = GROUP / WEIGHT_GROUP;

// Packs one group of an output's inputs. Returns its scale times the sum of its values.
inline float pack_group(const float* values, int8_t* bytes, float* scale) {
    Floats most{}, poison{}, total{};
    for (int64_t i = 0; i < WEIGHT_GROUP; i += LANES) {
        Floats part = load(values + i);
        most = max(max(part, -part), most);
        poison += part * 0.0f;  // NaN or infinity
    }
    float limit = greatest(most);
    for (int64_t i = 0; PAIRS_ARE_LIMITED && i < WEIGHT_GROUP; i += 2)
        limit = std::max(limit, std::fabs(values[i] + values[i + 1]) * (127.0f / 127.99f));
    float inverse = limit > 0 ? 127.0f / limit : 0.0f;
    int8_t rounded[WEIGHT_GROUP];
    for (int64_t i = 0; i < WEIGHT_GROUP; i += LANES) {
        store(rounded + i, load(values + i) * inverse);
        total += load(rounded + i);
    }
    for (int64_t i = 0; i < WEIGHT_GROUP; i += 4) std::memcpy(bytes + i * PANEL, rounded + i, 4);
    *scale = limit / 127.0f + sum(poison);
    return *scale * sum(total);
}

void pack_int8(ThreadPool& pool, const WeightRows& rows, int8_t* packed, float* scales) {
    int64_t groups = ceil_div(rows.in, GROUP);
    pool.run(static_cast<int>(ceil_div(rows.out, PANEL)), [&](int panel) {
        std::vector<float> row(groups * GROUP);
        int8_t* bytes = packed + panel * groups * GROUP * PANEL;
        float* panel_scales = scales + panel * groups * (SCALES + 1) * PANEL;
        for (int64_t column = 0; column < PANEL; column++) {
            rows(panel * PANEL + column, row.data());
            for (int64_t group = 0; group < groups; group++) {
                float* to = panel_scales + group * (SCALES + 1) * PANEL + column;
                float sum = 0;
                for (int64_t part = 0; part < SCALES; part++) {
                    int64_t first = group * GROUP + part * WEIGHT_GROUP;
                    sum += pack_group(row.data() + first, bytes + first * PANEL + 4 * column, to + part * PANEL);
                }
                to[SCALES * PANEL] = sum;
            }
        }
    });
}

// ROWS rows times one panel.
template <int ROWS>
PAGODA_APART void multiply_int8(const QuantizedRows& rows, int64_t first_row, const int8_t* bytes, const float* scales, Ahead& ahead,
                   Floats (*out)[VECTORS]) {
    Floats sums[ROWS][VECTORS];
    clear(sums);
    for (int64_t group = 0; group < rows.groups; group++, scales += (SCALES + 1) * PANEL) {
        ahead.fetch();
        int64_t at = rows.at(first_row, group);
        const uint8_t* x = rows.values + at * GROUP;
        PAGODA_UNROLL
        for (int part = 0; part < SCALES; part++) {
            Ints products[ROWS][VECTORS];
            clear(products);
            PAGODA_UNROLL
            for (int64_t k = part * WEIGHT_GROUP; k < (part + 1) * WEIGHT_GROUP; k += 4 * QUADS, bytes += 4 * QUADS * PANEL) {
                Ints w[QUADS][VECTORS];
                PAGODA_UNROLL
                for (int i = 0; i < QUADS * VECTORS; i++) w[i / VECTORS][i % VECTORS] = load_ints(bytes + 4 * LANES * i);
                PAGODA_UNROLL
                for (int row = 0; row < ROWS; row++)
                    for_each_quad([&, a = load_activations(x + row * GROUP + k)](auto quad) PAGODA_INLINE_LAMBDA {
                        PAGODA_UNROLL
                        for (int i = 0; i < VECTORS; i++) {
                            products[row][i] = dot4<quad.value>(products[row][i], a, w[quad.value][i]);
                            if (KEEPS_SUMS) PAGODA_KEEP(products[row][i]);
                        }
                    });
            }
            PAGODA_UNROLL
            for (int i = 0; i < VECTORS; i++) {
                Floats scale = load(scales + part * PANEL + i * LANES);
                PAGODA_UNROLL
                for (int row = 0; row < ROWS; row++) {
                    float row_scale = rows.scales[at + row];
                    sums[row][i] += to_floats(products[row][i]) * (scale * broadcast(row_scale));
                }
            }
        }
        PAGODA_UNROLL
        for (int i = 0; i < VECTORS; i++) {
            Floats total = load(scales + SCALES * PANEL + i * LANES);
            PAGODA_UNROLL
            for (int row = 0; row < ROWS; row++)
                sums[row][i] += total * broadcast(rows.least[at + row]);
        }
    }
    PAGODA_UNROLL
    for (int row = 0; row < ROWS; row++)
        PAGODA_UNROLL
        for (int i = 0; i < VECTORS; i++) out[row][i] = sums[row][i];
}

template <typename T>
void linear_int8(ThreadPool& pool, const LinearArgs& args) {
    constexpr int TILE_ROWS = REGISTERS == 32 ? 8 : PAIRS_ARE_LIMITED ? 4 : 6;  // all sums of a group stay in registers
    if (args.rows == 0) return;
    QuantizedRows rows = quantize_rows<T>(pool, args, ACTIVATION_SHIFT, false);
    const int8_t* weight = static_cast<const int8_t*>(args.weight);
    int64_t panel_bytes = rows.groups * GROUP * PANEL;
    multiply_panels<TILE_ROWS, 96, T>(
        pool, args, weight, panel_bytes, rows.groups, [&](auto count, int64_t row, int64_t panel, Ahead& ahead, auto* sums) {
            multiply_int8<count.value>(rows, row, weight + panel * panel_bytes, args.scales + panel * rows.groups * (SCALES + 1) * PANEL,
                                       ahead, sums);
        });
}

// Reads row `id` of the weight (an output's inputs) as T: a token's embedding where the table is also the head.
template <typename T>
void embedding_int8(ThreadPool& pool, const int64_t* ids, const int8_t* packed, const float* scales, T* out, int64_t count, int64_t in) {
    int64_t groups = ceil_div(in, GROUP), rows_a_part = rows_per_part(count, in);
    pool.run(static_cast<int>(ceil_div(count, rows_a_part)), [&](int part) {
        int64_t end = std::min(count, (part + 1) * rows_a_part);
        for (int64_t row = part * rows_a_part; row < end; row++) {
            int64_t panel = ids[row] / PANEL, column = ids[row] % PANEL;
            const int8_t* bytes = packed + panel * groups * GROUP * PANEL + 4 * column;
            const float* panel_scales = scales + panel * groups * (SCALES + 1) * PANEL + column;
            for (int64_t i = 0; i < in; i++)
                round_to(out + row * in + i, panel_scales[(i / GROUP * (SCALES + 1) + i % GROUP / WEIGHT_GROUP) * PANEL] *
                                                 bytes[i / 4 * 4 * PANEL + i % 4]);
        }
    });
}
