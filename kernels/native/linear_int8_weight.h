// Products of int8 weights and bfloat16 activations by the matrix unit of AMX. The unit can also multiply int8 by int8, but
// int8 activations need a scale for every few inputs, and rescaling its sums takes longer than the products themselves. Every
// int8 is exact in bfloat16, so weights are widened on their way from memory, once for all rows; sums stay in the unit from
// the first input to the last, and each output has one scale, which is applied at the end.
//
// Weights are stored in panels of PANEL outputs: [panel][in][PANEL], with zeros up to a multiple of DEPTH inputs.

static_assert(PANEL == 2 * TILE);      // a batch of rows then has four tiles of sums
constexpr int64_t BLOCK_ROWS = 256;    // rows of 1,500 inputs that stay in the second-level cache
constexpr int64_t CHUNK = 9;           // steps whose weights are widened at once, to stay in the first-level cache
constexpr int64_t CHUNK_OF_ONE = 2;    // the same for a single batch, so that memory does not wait for the unit
constexpr int64_t FEW_ROWS = 2;        // are faster without the unit

// Stores 16 rows of 16 bytes as columns. Each of four passes puts a bit of the row's number behind those of the column's.
PAGODA_INLINE void transpose(const int8_t* from, int64_t from_stride, int8_t* to, int64_t to_stride) {
    __m128i rows[TILE], next[TILE];
    for (int64_t i = 0; i < TILE; i++) rows[i] = _mm_loadu_si128((const __m128i*)(from + i * from_stride));
    PAGODA_UNROLL
    for (int pass = 0; pass < 4; pass++) {
        PAGODA_UNROLL
        for (int64_t i = 0; i < TILE / 2; i++) {
            next[2 * i] = _mm_unpacklo_epi8(rows[i], rows[i + TILE / 2]);
            next[2 * i + 1] = _mm_unpackhi_epi8(rows[i], rows[i + TILE / 2]);
        }
        PAGODA_UNROLL
        for (int64_t i = 0; i < TILE; i++) rows[i] = next[i];
    }
    for (int64_t i = 0; i < TILE; i++) _mm_storeu_si128((__m128i*)(to + i * to_stride), rows[i]);
}

// Rounds a row of `depth` numbers in steps of the scale that it returns. It is not finite where a number is not.
inline float round_to_steps(const float* row, int64_t depth, int8_t* to) {
    Floats most{}, poison{};
    for (int64_t i = 0; i < depth; i += LANES) {
        Floats part = load(row + i);
        most = max(max(part, -part), most);
        poison += part * 0.0f;
    }
    float limit = greatest(most), scale = limit > 0 ? limit / 127.0f : 1.0f;
    for (int64_t i = 0; i < depth; i += LANES) store(to + i, load(row + i) / scale);
    return scale + sum(poison);
}

void pack_int8_weight(ThreadPool& pool, const WeightRows& rows, int8_t* packed, float* scales) {
    int64_t depth = ceil_div(rows.in, DEPTH) * DEPTH;
    pool.run(static_cast<int>(ceil_div(rows.out, PANEL)), [&](int panel) {
        std::vector<float> row(depth);
        std::vector<int8_t> rounded(PANEL * depth);
        for (int64_t column = 0; column < PANEL; column++) {
            rows(panel * PANEL + column, row.data());
            scales[panel * PANEL + column] = round_to_steps(row.data(), depth, rounded.data() + column * depth);
        }
        for (int64_t i = 0; i < depth; i += TILE)
            for (int64_t column = 0; column < PANEL; column += TILE)
                transpose(rounded.data() + column * depth + i, depth, packed + (panel * depth + i) * PANEL + column, PANEL);
    });
}

PAGODA_INLINE Floats to_floats(const int8_t* from) {
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
}

// Two inputs of TILE outputs as the unit reads them, those of one output side by side. The lower half of a float that was an
// int8 is zero.
PAGODA_INLINE void widen(const int8_t* bytes, uint16_t* to) {
    auto first = (__m512i)to_floats(bytes), second = (__m512i)to_floats(bytes + PANEL);
    _mm512_store_si512(to, _mm512_or_si512(second, _mm512_srli_epi32(first, 16)));
}

// Widens some steps of a panel to [steps][2][DEPTH / 2][TILE][2]. If asked to, prefetches the weights AHEAD_BYTES further on.
void widen_steps(const int8_t* bytes, int64_t steps, uint16_t* to, bool fetches) {
    for (int64_t step = 0; step < steps; step++, to += DEPTH * PANEL)
        for (int64_t i = 0; i < DEPTH; i += 2, bytes += 2 * PANEL) {
            if (fetches) __builtin_prefetch(bytes + AHEAD_BYTES, 0, 2);
            widen(bytes, to + i * TILE);
            widen(bytes + TILE, to + (DEPTH + i) * TILE);
        }
}

// Rows of bfloat16, and a panel of weights with its outputs.
template <typename T>
struct Panel {
    const bf16* x;
    int64_t x_stride, steps;
    const int8_t* bytes;
    const float* scales;
    const T* bias;
    T* out;
    int64_t out_stride, columns;
};

template <typename T>
void store_batch(const Panel<T>& panel, const float* sums, int64_t row, int64_t rows) {
    Floats scales[2] = {load(panel.scales), load(panel.scales + LANES)};
    T* out = panel.out + row * panel.out_stride;
    if (panel.columns == PANEL && !panel.bias) {
        for (int64_t i = 0; i < rows; i++, out += panel.out_stride, sums += PANEL) {
            store(out, load(sums) * scales[0]);
            store(out + LANES, load(sums + LANES) * scales[1]);
        }
        return;
    }
    for (int64_t i = 0; i < rows; i++, out += panel.out_stride, sums += PANEL)
        for (int part = 0; part < 2; part++)
            store_outputs(load(sums + part * LANES) * scales[part], part * LANES, panel.columns, panel.bias, out);
}

// Multiplies rows first to last (exclusive), at most BLOCK_ROWS, by a panel. Weights are widened some steps at a time, so that
// they are cached when each batch of rows uses them. The unit keeps the sums of one batch; those of several are in memory. The
// next weights are prefetched while the unit works, or all the time for a single batch, which memory limits.
template <typename T>
void multiply_panel(MatrixUnit& unit, const Panel<T>& panel, int64_t first, int64_t last) {
    constexpr int64_t LINES = DEPTH * PANEL / 64;  // of a step
    alignas(64) uint16_t room[CHUNK * DEPTH * PANEL];
    alignas(64) float sums[BLOCK_ROWS * PANEL];
    int64_t batches = ceil_div(last - first, BATCH), chunk = batches == 1 ? CHUNK_OF_ONE : CHUNK;
    for (int64_t step = 0; step < panel.steps; step += chunk) {
        int64_t steps = std::min(chunk, panel.steps - step);
        bool is_first = step == 0, is_last = step + steps == panel.steps;
        const int8_t* bytes = panel.bytes + step * DEPTH * PANEL;
        Ahead ahead{reinterpret_cast<const uint8_t*>(bytes) + steps * DEPTH * PANEL, batches == 1 ? 0 : ceil_div(LINES, batches)};
        widen_steps(bytes, steps, room, batches == 1);
        for (int64_t row = first; row < last; row += BATCH) {
            int64_t rows = std::min(BATCH, last - row);
            float* of_batch = sums + (row - first) * PANEL;
            const bf16* x = panel.x + row * panel.x_stride + step * DEPTH;
            auto multiply = [&](auto tiles) {
                if (!is_first && batches > 1) load_sums<tiles.value>(of_batch, PANEL);
                add_products<tiles.value, 2>(x, panel.x_stride, room, DEPTH * PANEL, steps, [&] { ahead.fetch(); });
                if (is_last || batches > 1) save_sums<tiles.value>(of_batch, PANEL);
            };
            unit.shape_for(rows);
            if (is_first) clear_sums();
            if (rows > TILE)
                multiply(std::integral_constant<int, 2>{});
            else
                multiply(std::integral_constant<int, 1>{});
            if (is_last) store_batch(panel, of_batch, row, rows);
        }
    }
}

// Multiplies ROWS rows without the unit but in its order: a step's even inputs, its odd inputs, then their sum. So a row's
// product does not depend on the number of rows, except for numbers below 1e-38, which the unit takes as 0.
template <int ROWS, typename T>
void multiply_few(const Panel<T>& panel, const float* x) {
    int64_t depth = panel.steps * DEPTH;
    Floats sums[ROWS][2] = {};
    const int8_t* bytes = panel.bytes;
    for (int64_t step = 0; step < depth; step += DEPTH) {
        Floats halves[ROWS][2][2] = {};
        for (int64_t i = 0; i < DEPTH; i += 2, bytes += 2 * PANEL) {
            __builtin_prefetch(bytes + AHEAD_BYTES, 0, 2);
            PAGODA_UNROLL
            for (int odd = 0; odd < 2; odd++)
                PAGODA_UNROLL
                for (int column = 0; column < 2; column++) {
                    Floats weight = to_floats(bytes + odd * PANEL + column * TILE);
                    PAGODA_UNROLL
                    for (int row = 0; row < ROWS; row++)
                        halves[row][column][odd] += weight * broadcast(x[row * depth + step + i + odd]);
                }
        }
        PAGODA_UNROLL
        for (int row = 0; row < ROWS; row++)
            PAGODA_UNROLL
            for (int column = 0; column < 2; column++) sums[row][column] += halves[row][column][0] + halves[row][column][1];
    }
    alignas(64) float of_batch[ROWS * PANEL];
    PAGODA_UNROLL
    for (int row = 0; row < ROWS; row++)
        PAGODA_UNROLL
        for (int column = 0; column < 2; column++) store(of_batch + row * PANEL + column * LANES, sums[row][column]);
    store_batch(panel, of_batch, 0, ROWS);
}

template <typename T>
void multiply_few(const Panel<T>& panel, const float* x, int64_t rows) {
    switch (rows) {
        case 1: return multiply_few<1>(panel, x);
        case 2: return multiply_few<2>(panel, x);
    }
}

// Writes rows as bfloat16, with zeros up to `depth` inputs, each to an element of `to`.
template <typename Row, typename Element>
void round_row(const Row& row, int64_t in, int64_t depth, Element* to) {
    int64_t i = 0;
    for (; i + LANES <= in; i += LANES) store(to + i, rounded(row(i)));
    for (; i < depth; i++) round_to(to + i, i < in ? rounded(broadcast(row.at(i)))[0] : 0.0f);
}

template <typename T>
void linear_int8_weight(ThreadPool& pool, const LinearArgs& args);

// Multiplies the rows of one expert after the other, copied side by side.
template <typename T>
void linear_int8_weight_of_experts(ThreadPool& pool, const LinearArgs& args) {
    static std::vector<T> room;  // one op runs at a time
    const ExpertRows& experts = args.experts;
    int64_t width = args.activation.width() * args.in;
    const T* x = static_cast<const T*>(args.x);
    if (experts.sources) {
        room.resize(std::max<size_t>(room.size(), args.rows * width));
        for (int64_t row = 0; row < args.rows; row++)
            std::memcpy(room.data() + row * width, x + experts.sources[row] * width, width * sizeof(T));
        x = room.data();
    }
    for (int64_t expert = 0; expert < experts.count; expert++) {
        int64_t first = experts.starts[expert];
        LinearArgs one = args;
        one.experts = {};
        one.rows = experts.starts[expert + 1] - first;
        one.x = x + first * width;
        one.weight = static_cast<const int8_t*>(args.weight) + expert * experts.weight_bytes;
        one.scales = args.scales + expert * experts.num_scales;
        if (args.bias) one.bias = static_cast<const T*>(args.bias) + expert * args.out_size;
        one.out = static_cast<T*>(args.out) + first * args.out_size;
        linear_int8_weight<T>(pool, one);
    }
}

template <typename T>
void linear_int8_weight(ThreadPool& pool, const LinearArgs& args) {
    if (args.experts.count) return linear_int8_weight_of_experts<T>(pool, args);
    static std::vector<bf16> narrow;  // one op runs at a time
    static std::vector<float> wide;
    if (args.rows == 0) return;
    int64_t steps = ceil_div(args.in, DEPTH), depth = steps * DEPTH;
    bool is_few = args.rows <= FEW_ROWS;
    const void* rows = args.x;
    auto prepare = [&](auto& room) {
        room.resize(std::max<size_t>(room.size(), args.rows * depth));
        rows = room.data();
        for_each_row<T>(pool, args, [&](int64_t number, const auto& row) { round_row(row, args.in, depth, room.data() + number * depth); });
    };
    if (is_few)
        prepare(wide);
    else if (!std::is_same_v<T, bf16> || args.activation.function != Function::none || depth != args.in)
        prepare(narrow);

    int64_t panels = ceil_div(args.out_size, PANEL), wanted = 4 * pool.size();
    int64_t blocks = std::max(ceil_div(args.rows, BLOCK_ROWS), std::min(ceil_div(args.rows, 2 * BATCH), ceil_div(wanted, panels)));
    int64_t block_rows = ceil_div(ceil_div(args.rows, blocks), BATCH) * BATCH;
    blocks = ceil_div(args.rows, block_rows);  // fewer if whole batches cover more rows
    // Few rows take little time, so a part is several panels.
    int64_t panels_a_part = blocks > 1 ? 1 : ceil_div(panels, pool.size() * ceil_div(args.rows + 8, 4));
    auto panel = [&](int64_t at) {
        return Panel<T>{static_cast<const bf16*>(rows),
                        depth,
                        steps,
                        static_cast<const int8_t*>(args.weight) + at * depth * PANEL,
                        args.scales + at * PANEL,
                        args.bias ? static_cast<const T*>(args.bias) + at * PANEL : nullptr,
                        static_cast<T*>(args.out) + at * PANEL,
                        args.out_stride,
                        std::min(PANEL, args.out_size - at * PANEL)};
    };
    pool.run(static_cast<int>(ceil_div(panels, panels_a_part) * blocks), [&](int part) {
        int64_t first = part / blocks * panels_a_part, end = std::min(panels, first + panels_a_part);
        if (is_few) {
            for (int64_t at = first; at < end; at++) multiply_few(panel(at), static_cast<const float*>(rows), args.rows);
            return;
        }
        MatrixUnit unit;
        int64_t row = part % blocks * block_rows, last = std::min(args.rows, row + block_rows);
        for (int64_t at = first; at < end; at++) multiply_panel(unit, panel(at), row, last);
    });
}
