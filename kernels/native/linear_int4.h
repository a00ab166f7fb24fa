// Products of int8 activations and 4-bit weights, which keep their file's values: a scale and a minimum in fp16 for every
// HALF inputs of an output, weight = scale * value + minimum. No include guard: each instruction set compiles its own copy.
//
// Products use value - 8, so that AVX2 can add them in 16 bits. Activations are a * q + least; `sum` is the sum of a half's
// quantized activations. Then a half contributes
//
//   scale * (a * dot + least * Σ(value - 8)) + (minimum + 8 * scale) * sum
//
// where dot, the sum of q · (value - 8), is exact. `least` is the same for both halves of a group, so their sums of
// scale * Σ(value - 8) are stored as one number, the offset. Groups are added in float32, in an order that does not depend on
// which rows are computed together.
//
// Weights are stored in panels of PANEL outputs, group by group: [GROUP / 8][PANEL][4] bytes, whose lower halves are four
// inputs of an output and whose upper halves are the next four; then in fp16 two [PANEL] of scales, two of minimums, and the
// offsets.

constexpr int64_t HALF = GROUP / 2;
constexpr int64_t INT4_GROUP_BYTES = (GROUP / 2 + 5 * 2) * PANEL;

inline void pack_int4(ThreadPool& pool, const Int4Args& args) {
    int64_t halves = ceil_div(args.in, HALF), groups = ceil_div(args.in, GROUP);
    pool.run(static_cast<int>(ceil_div(args.out, PANEL)), [&](int panel) {
        for (int64_t group = 0; group < groups; group++) {
            uint8_t* bytes = args.packed + (panel * groups + group) * INT4_GROUP_BYTES;
            auto* numbers = reinterpret_cast<uint16_t*>(bytes + GROUP / 2 * PANEL);
            std::memset(bytes, 0x88, GROUP / 2 * PANEL);
            std::memset(numbers, 0, 5 * 2 * PANEL);
            for (int64_t column = 0; column < PANEL && panel * PANEL + column < args.out; column++) {
                float offset = 0;
                for (int64_t half = 0; half < 2 && 2 * group + half < halves; half++) {
                    int64_t at = (panel * PANEL + column) * halves + 2 * group + half;
                    uint8_t* to = bytes + half * HALF / 2 * PANEL + 4 * column;
                    int sum = 0;
                    for (int64_t i = 0; i < HALF; i++) {
                        int value = args.values[at * HALF / 2 + i % (HALF / 2)] >> (i / (HALF / 2) * 4) & 15;
                        uint8_t& byte = to[i / 8 * 4 * PANEL + i % 4];
                        byte = i % 8 < 4 ? (byte & 0xf0) | value : (byte & 0x0f) | value << 4;
                        sum += value - 8;
                    }
                    float scale = from_fp16(args.scales[at]);
                    numbers[half * PANEL + column] = args.scales[at];
                    numbers[(2 + half) * PANEL + column] = args.minimums[at];
                    offset += scale * static_cast<float>(sum);
                }
                numbers[4 * PANEL + column] = to_fp16(offset);
            }
        }
    });
}

// ROWS rows times one panel.
template <int ROWS>
PAGODA_APART void multiply_int4(const QuantizedRows& rows, int64_t first_row, const uint8_t* bytes, Ahead& ahead, Floats (*out)[VECTORS]) {
    Floats sums[ROWS][VECTORS];
    clear(sums);
    for (int64_t group = 0; group < rows.groups; group++, bytes += INT4_GROUP_BYTES) {
        ahead.fetch();
        const uint8_t* x = rows.group(first_row, group);
        const auto* numbers = reinterpret_cast<const uint16_t*>(bytes + GROUP / 2 * PANEL);
        PAGODA_UNROLL
        for (int half = 0; half < 2; half++) {
            Ints products[ROWS][VECTORS];
            clear(products);
            PAGODA_UNROLL
            for (int64_t k = half * HALF; k < (half + 1) * HALF; k += 4 * QUADS) {
                Ints w[QUADS][VECTORS];
                PAGODA_UNROLL
                for (int i = 0; i < QUADS * VECTORS; i++) {
                    int64_t quad = k / 4 + i / VECTORS;
                    Ints both = load_ints(bytes + quad / 2 * 4 * PANEL + 4 * LANES * (i % VECTORS));
                    w[i / VECTORS][i % VECTORS] = quad % 2 ? upper_nibbles(both) : lower_nibbles(both);
                }
                PAGODA_UNROLL
                for (int row = 0; row < ROWS; row++)
                    for_each_quad([&, a = load_activations(x + row * rows.groups * GROUP + k)](auto quad) PAGODA_INLINE_LAMBDA {
                        PAGODA_UNROLL
                        for (int i = 0; i < VECTORS; i++) {
                            products[row][i] = dot4_small<quad.value>(products[row][i], a, w[quad.value][i]);
                            if (KEEPS_SUMS) PAGODA_KEEP(products[row][i]);
                        }
                    });
            }
            PAGODA_UNROLL
            for (int i = 0; i < VECTORS; i++) {
                Floats scale = load_fp16(numbers + half * PANEL + i * LANES);
                Floats middle = load_fp16(numbers + (2 + half) * PANEL + i * LANES) + 8.0f * scale;  // the weight of value 8
                PAGODA_UNROLL
                for (int row = 0; row < ROWS; row++) {
                    int64_t at = (first_row + row) * rows.groups + group;
                    sums[row][i] += to_floats(total(products[row][i])) * (scale * broadcast(rows.scales[at]));
                    sums[row][i] += middle * broadcast(rows.halves[2 * at + half]);
                }
            }
        }
        PAGODA_UNROLL
        for (int i = 0; i < VECTORS; i++) {
            Floats offset = load_fp16(numbers + 4 * PANEL + i * LANES);
            PAGODA_UNROLL
            for (int row = 0; row < ROWS; row++)
                sums[row][i] += offset * broadcast(rows.least[(first_row + row) * rows.groups + group]);
        }
    }
    PAGODA_UNROLL
    for (int row = 0; row < ROWS; row++)
        PAGODA_UNROLL
        for (int i = 0; i < VECTORS; i++) out[row][i] = sums[row][i];
}

template <typename T>
void linear_int4(ThreadPool& pool, const LinearArgs& args) {
    constexpr int TILE_ROWS = REGISTERS == 32 ? 8 : 4;  // all sums of a group stay in registers
    if (args.rows == 0) return;
    QuantizedRows rows = quantize_rows<T>(pool, args, true);
    const uint8_t* weight = static_cast<const uint8_t*>(args.weight);
    int64_t panel_bytes = rows.groups * INT4_GROUP_BYTES;
    multiply_panels<TILE_ROWS, 96, T>(pool, args, weight, panel_bytes, rows.groups,
                                      [&](auto count, int64_t row, int64_t panel, Ahead& ahead, auto* sums) {
                                          multiply_int4<count.value>(rows, row, weight + panel * panel_bytes, ahead, sums);
                                      });
}
