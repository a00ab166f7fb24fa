// Products of int8 activations and weights in groups, which keep their file's values: weight = scale * value, or
// scale * value + minimum, with scales and minimums in fp16 for every SIZE inputs of an output. No include guard: each
// instruction set compiles its own copy.
//
// A value is a code of BITS bits minus MIDDLE, or what a table has for the code. Activations are a * q + least. Then a group
// contributes
//
//   a * Σ (scale * dot + minimum * count) + least * total
//
// where the sum is over its parts of SIZE inputs, dot is a part's sum of q · value and count that of q, both exact, and total
// is the sum of the group's weights, which is stored. Groups are added in float32, in an order that does not depend on which
// rows are computed together.
//
// Weights are stored in panels of PANEL outputs, group by group. A quad is four inputs, a byte each, of PANEL outputs.
// Of a group there are
//
//   [GROUP / 8][PANEL][4]  the lower four bits of two quads, in the halves of each byte; in 8 bits the codes themselves
//   [...][PANEL][4]        in 5 and 6 bits the upper bits of 8 or 4 quads, from the lowest bits of a byte on
//   fp16 [...][PANEL]      scales, minimums if there are any, and totals
//
// Behind the last panel stands the table, if there is one.

typedef int8_t Bytes __attribute__((vector_size(sizeof(Ints))));

enum class Look { nowhere, in_small_table, in_table };  // small: of values from -16 to 16

template <int BITS_, int64_t SIZE_, bool HAS_MINIMUM_ = false, Look LOOK = Look::nowhere>
struct Codes {
    static constexpr int BITS = BITS_;
    static constexpr int64_t SIZE = SIZE_;
    static constexpr bool HAS_MINIMUM = HAS_MINIMUM_, HAS_TABLE = LOOK != Look::nowhere;
    static constexpr int MIDDLE = HAS_TABLE || HAS_MINIMUM ? 0 : 1 << (BITS - 1);
    static constexpr int SHIFT = HAS_MINIMUM ? CODES_SHIFT : ACTIVATION_SHIFT;
    static constexpr int64_t PARTS = GROUP / SIZE, NUMBERS = PARTS * (HAS_MINIMUM ? 2 : 1) + 1;
    static constexpr int64_t CODE_BYTES = GROUP * BITS / 8, GROUP_BYTES = (CODE_BYTES + 2 * NUMBERS) * PANEL;

    // AVX2 adds products of neighbours in 16 bits, RUN inputs of an output at most. Values that are too large for that are
    // 16 * a high digit + a low one, which are multiplied one after the other.
    static constexpr int DIGITS = PAIRS_ARE_LIMITED && (BITS == 8 || LOOK == Look::in_table) ? 2 : 1;
    static constexpr int64_t RUN = !PAIRS_ARE_LIMITED ? SIZE : DIGITS == 2 || HAS_TABLE ? 16 : 32 >> (BITS - 4);

    static constexpr bool IS_ONE_RUN = DIGITS == 1 && RUN == SIZE;

    static constexpr int EXTRA = BITS - 4, FIELDS = EXTRA ? 8 / EXTRA : 1;  // upper bits, and how many of them are in a byte
    static constexpr uint32_t LOW = 0x0f0f0f0f, HIGH = ((1u << EXTRA) - 1) * 0x10101010;

    // A quad's codes: of an output as uint32_t, or of LANES outputs as Words.
    template <typename Word>
    PAGODA_INLINE Word codes(const uint8_t* from, int64_t quad) {
        Word code, upper;
        std::memcpy(&code, from + (BITS == 8 ? quad : quad / 2) * 4 * PANEL, sizeof code);
        if constexpr (BITS == 8) return code;
        code = (quad % 2 ? code >> 4 : code) & LOW;
        if constexpr (BITS > 4 && BITS < 8) {
            std::memcpy(&upper, from + (GROUP / 2 + quad / FIELDS * 4) * PANEL, sizeof upper);
            int shift = static_cast<int>(quad % FIELDS) * EXTRA - 4;
            code |= (shift < 0 ? upper << -shift : upper >> shift) & HIGH;
        }
        return code;
    }

    // Writes what codes() of LANES outputs finds: SIZE inputs, from the quad `first` on.
    PAGODA_INLINE void set(uint8_t* to, int64_t first, const Words (&quads)[SIZE / 4]) {
        auto put = [=](int64_t place, Words word) { std::memcpy(to + place * 4 * PANEL, &word, sizeof word); };
        constexpr int64_t COUNT = SIZE / 4;
        if constexpr (BITS == 8) {
            for (int64_t i = 0; i < COUNT; i++) put(first + i, quads[i]);
        } else {
            for (int64_t i = 0; i < COUNT; i += 2) put((first + i) / 2, (quads[i] & LOW) | (quads[i + 1] & LOW) << 4);
            if constexpr (BITS > 4)
                for (int64_t i = 0; i < COUNT; i += FIELDS) {
                    Words upper{};
                    for (int field = 0; field < FIELDS; field++) upper |= (quads[i + field] & HIGH) >> 4 << field * EXTRA;
                    put(GROUP / 8 + (first + i) / FIELDS, upper);
                }
        }
    }

    // The codes of SIZE inputs of LANES rows, of which `place` counts such parts, and the sums of their values.
    PAGODA_INLINE Ints read(const GroupRow* rows, int64_t place, Ints table, Words (&quads)[SIZE / 4]) {
        constexpr int64_t COUNT = SIZE / 4, STORED = BITS == 4 ? COUNT / 2 : COUNT;
        constexpr uint32_t BYTES = 0x01010101, EVEN = 0x00ff00ff;
        for (int64_t i = 0; i < STORED; i++) {
            Words word;
            for (int lane = 0; lane < LANES; lane++) {
                uint32_t four;
                std::memcpy(&four, rows[lane].values + 4 * (place * STORED + i), sizeof four);
                word[lane] = four;
            }
            if constexpr (BITS == 4) quads[i + STORED] = word >> 4 & LOW;
            if constexpr (BITS == 4) word &= LOW;
            if constexpr (BITS > 4 && !HAS_MINIMUM)  // adding MIDDLE to a value of BITS bits inverts the uppermost
                word = (word ^ MIDDLE * BYTES) & ((1 << BITS) - 1) * BYTES;
            quads[i] = word;
        }
        Words pairs{};
        for (Words word : quads) {
            if constexpr (HAS_TABLE) word = (Words)look_up(table, (Ints)word) ^ 128 * BYTES;  // not negative
            pairs += (word & EVEN) + (word >> 8 & EVEN);
        }
        return (Ints)((pairs & 0xffff) + (pairs >> 16)) - (HAS_TABLE ? 128 : MIDDLE) * static_cast<int>(SIZE);
    }

    // The values of a quad of LANES outputs, or their digit.
    PAGODA_INLINE Ints values(const uint8_t* from, int64_t quad, int digit, const Ints* tables) {
        Words code = codes<Words>(from, quad);
        if constexpr (HAS_TABLE) return look_up(tables[digit], (Ints)code);
        if constexpr (MIDDLE == 0) return (Ints)code;
        if constexpr (DIGITS == 1) return (Ints)((Bytes)code - static_cast<int8_t>(MIDDLE));
        return (Ints)(digit ? (Words)((Bytes)(code >> 4 & LOW) - int8_t{8}) : code & LOW);
    }
};

template <typename C>
struct GroupedPanels {
    int64_t groups;

    explicit GroupedPanels(int64_t in) : groups(ceil_div(in, GROUP)) {}
    int64_t panel_bytes() const { return groups * C::GROUP_BYTES; }
    int64_t table_offset(int64_t out) const { return ceil_div(out, PANEL) * panel_bytes(); }
    // Room for one more panel, because the weights of experts are adjacent and their panels are counted.
    int64_t bytes(int64_t out) const { return table_offset(out) + (C::HAS_TABLE ? panel_bytes() : 0); }
};

// Packs LANES outputs at a time, so a panel's rows are read before the first of their groups is written. Columns of the last
// panel that no row has get rows of zeros.
template <typename C>
void pack_grouped(ThreadPool& pool, const GroupRows& rows, const int8_t* table, uint8_t* packed) {
    GroupedPanels<C> panels(rows.in);
    int64_t sizes = rows.in / C::SIZE, row_bytes = GroupRows::buffer_bytes(rows.in);
    if (C::HAS_TABLE) std::memcpy(packed + panels.table_offset(rows.out), table, 16);
    pool.run(static_cast<int>(ceil_div(rows.out, PANEL)), [&](int panel) {
        thread_local std::vector<uint8_t> buffer;  // which the next panel reuses
        buffer.resize(std::max<size_t>(buffer.size(), PANEL * row_bytes));
        uint8_t* bytes = packed + panel * panels.panel_bytes();
        if (sizes % C::PARTS) std::memset(bytes + (panels.groups - 1) * C::GROUP_BYTES, 0, C::GROUP_BYTES);
        GroupRow of_column[PANEL];
        for (int64_t column = 0; column < PANEL; column++) {
            uint8_t* room = buffer.data() + column * row_bytes;
            if (int64_t row = panel * PANEL + column; row < rows.out) {
                of_column[column] = rows.read(rows.weight, row, room);
            } else {
                std::memset(room, 0, row_bytes);
                auto* numbers = reinterpret_cast<uint16_t*>(room);
                of_column[column] = {room + row_bytes - rows.in, numbers, numbers};
            }
        }
        Ints tables[1] = {};
        if constexpr (C::HAS_TABLE) load_table(reinterpret_cast<const uint8_t*>(table), tables);
        for (int64_t group = 0; group < panels.groups; group++, bytes += C::GROUP_BYTES) {
            int64_t parts = std::min(C::PARTS, sizes - group * C::PARTS);
            for (int64_t first = 0; first < PANEL; first += LANES) {
                const GroupRow* row = of_column + first;
                auto* numbers = reinterpret_cast<uint16_t*>(bytes + C::CODE_BYTES * PANEL) + first;
                Floats weights{};
                auto put = [&](int64_t place, Halves halves) {
                    std::memcpy(numbers + place * PANEL, &halves, sizeof halves);
                    return load_fp16(numbers + place * PANEL);
                };
                for (int64_t part = 0; part < parts; part++) {
                    int64_t place = group * C::PARTS + part;
                    Words quads[C::SIZE / 4];
                    Ints sum = C::read(row, place, tables[0], quads);
                    C::set(bytes + 4 * first, part * C::SIZE / 4, quads);
                    Halves scale, minimum{};
                    for (int lane = 0; lane < LANES; lane++) {
                        scale[lane] = row[lane].scales[place];
                        if (C::HAS_MINIMUM) minimum[lane] = row[lane].minimums[place];
                    }
                    weights += put(part, scale) * to_floats(sum);
                    if (C::HAS_MINIMUM) weights += put(C::PARTS + part, minimum) * static_cast<float>(C::SIZE);
                }
                for (int lane = 0; lane < LANES; lane++) numbers[(C::NUMBERS - 1) * PANEL + lane] = to_fp16(weights[lane]);
            }
        }
    });
}

// ROWS rows times one panel.
template <typename C, int ROWS>
PAGODA_APART void multiply_grouped(const QuantizedRows& rows, int64_t first_row, const uint8_t* bytes, const uint8_t* table, Ahead& ahead,
                                   Floats (*out)[VECTORS]) {
    Floats sums[ROWS][VECTORS];
    clear(sums);
    Ints tables[C::DIGITS];
    if constexpr (C::HAS_TABLE) load_table(table, tables);
    for (int64_t group = 0; group < rows.groups; group++, bytes += C::GROUP_BYTES) {
        ahead.fetch();
        int64_t at = rows.at(first_row, group);
        const uint8_t* x = rows.values + at * GROUP;
        const auto* numbers = reinterpret_cast<const uint16_t*>(bytes + C::CODE_BYTES * PANEL);
        Floats scaled[ROWS][VECTORS];
        PAGODA_UNROLL
        for (int part = 0; part < C::PARTS; part++) {
            Ints whole[ROWS][VECTORS];
            PAGODA_UNROLL
            for (int digit = C::DIGITS - 1; digit >= 0; digit--)
                PAGODA_UNROLL
                for (int64_t first = part * C::SIZE; first < (part + 1) * C::SIZE; first += C::RUN) {
                    Ints products[ROWS][VECTORS];
                    clear(products);
                    PAGODA_UNROLL
                    for (int64_t k = first; k < first + C::RUN; k += 4 * QUADS) {
                        Ints w[QUADS][VECTORS];
                        PAGODA_UNROLL
                        for (int i = 0; i < QUADS * VECTORS; i++)
                            w[i / VECTORS][i % VECTORS] = C::values(bytes + 4 * LANES * (i % VECTORS), k / 4 + i / VECTORS, digit, tables);
                        PAGODA_UNROLL
                        for (int row = 0; row < ROWS; row++)
                            for_each_quad([&, a = load_activations(x + row * GROUP + k)](auto quad) PAGODA_INLINE_LAMBDA {
                                PAGODA_UNROLL
                                for (int i = 0; i < VECTORS; i++) {
                                    Ints &sum = products[row][i], weights = w[quad.value][i];
                                    sum = C::HAS_MINIMUM ? dot4_codes<quad.value>(sum, a, weights) : dot4_small<quad.value>(sum, a, weights);
                                    if (KEEPS_SUMS) PAGODA_KEEP(sum);
                                }
                            });
                    }
                    bool is_first = digit == C::DIGITS - 1 && first == part * C::SIZE;
                    PAGODA_UNROLL
                    for (int row = 0; row < ROWS; row++)
                        PAGODA_UNROLL
                        for (int i = 0; i < VECTORS; i++) {
                            Ints sum = C::IS_ONE_RUN ? products[row][i] : total(products[row][i]) << 4 * digit;
                            whole[row][i] = is_first ? sum : whole[row][i] + sum;
                        }
                }
            PAGODA_UNROLL
            for (int i = 0; i < VECTORS; i++) {
                Floats scale = load_fp16(numbers + part * PANEL + i * LANES), minimum{};
                if constexpr (C::HAS_MINIMUM) minimum = load_fp16(numbers + (C::PARTS + part) * PANEL + i * LANES);
                PAGODA_UNROLL
                for (int row = 0; row < ROWS; row++) {
                    Floats dot = to_floats(C::IS_ONE_RUN ? total(whole[row][i]) : whole[row][i]);
                    scaled[row][i] = part == 0 ? dot * scale : scaled[row][i] + dot * scale;
                    if constexpr (C::HAS_MINIMUM) scaled[row][i] += minimum * broadcast(rows.counts[2 * (at + row) + part]);
                }
            }
        }
        PAGODA_UNROLL
        for (int i = 0; i < VECTORS; i++) {
            Floats weights = load_fp16(numbers + (C::NUMBERS - 1) * PANEL + i * LANES);
            PAGODA_UNROLL
            for (int row = 0; row < ROWS; row++) {
                sums[row][i] += weights * broadcast(rows.least[at + row]);
                sums[row][i] += scaled[row][i] * broadcast(rows.scales[at + row]);
            }
        }
    }
    PAGODA_UNROLL
    for (int row = 0; row < ROWS; row++)
        PAGODA_UNROLL
        for (int i = 0; i < VECTORS; i++) out[row][i] = sums[row][i];
}

template <typename C, typename T>
void linear_grouped(ThreadPool& pool, const LinearArgs& args) {
    static_assert(!C::HAS_MINIMUM || C::SIZE == GROUP / 2);  // quantized rows have counts of halves
    constexpr int TILE_ROWS = REGISTERS == 32 ? 8 : 4;  // all sums of a group stay in registers
    if (args.rows == 0) return;
    QuantizedRows rows = quantize_rows<T>(pool, args, C::SHIFT, C::HAS_MINIMUM);
    const uint8_t* weight = static_cast<const uint8_t*>(args.weight);
    GroupedPanels<C> panels(args.in);
    int64_t panel_bytes = panels.panel_bytes();
    const uint8_t* table = weight + panels.table_offset(args.out_size);
    multiply_panels<TILE_ROWS, 96, T>(pool, args, weight, panel_bytes, rows.groups,
                                      [&](auto count, int64_t row, int64_t panel, Ahead& ahead, auto* sums) {
                                          multiply_grouped<C, count.value>(rows, row, weight + panel * panel_bytes, table, ahead, sums);
                                      });
}

// Reads rows of the weight, an output's inputs each, as T: embeddings of tokens where the table is also the head.
template <typename C, typename T>
void embedding_grouped(ThreadPool& pool, const int64_t* ids, const uint8_t* packed, T* out, int64_t count, int64_t in, int64_t out_size) {
    GroupedPanels<C> panels(in);
    auto* table = reinterpret_cast<const int8_t*>(packed + panels.table_offset(out_size));
    int64_t rows_a_part = rows_per_part(count, in);
    pool.run(static_cast<int>(ceil_div(count, rows_a_part)), [&](int share) {
        int64_t end = std::min(count, (share + 1) * rows_a_part);
        for (int64_t row = share * rows_a_part; row < end; row++) {
            int64_t column = ids[row] % PANEL;
            const uint8_t* bytes = packed + ids[row] / PANEL * panels.panel_bytes();
            for (int64_t first = 0; first < in; first += 4) {
                if (first && first % GROUP == 0) bytes += C::GROUP_BYTES;
                auto* numbers = reinterpret_cast<const uint16_t*>(bytes + C::CODE_BYTES * PANEL) + first % GROUP / C::SIZE * PANEL + column;
                float scale = from_fp16(*numbers), minimum = C::HAS_MINIMUM ? from_fp16(numbers[C::PARTS * PANEL]) : 0.0f;
                uint32_t codes = C::template codes<uint32_t>(bytes + 4 * column, first % GROUP / 4);
                for (int64_t i = first; i < first + 4; i++, codes >>= 8) {
                    int code = codes & 255, value = C::HAS_TABLE ? table[code] : code - C::MIDDLE;
                    round_to(out + row * in + i, scale * static_cast<float>(value) + minimum);
                }
            }
        }
    });
}

// Calls op with the Codes of a format.
template <typename Op>
auto with_codes(Grouped format, const Op& op) {
    constexpr Look SMALL = PAIRS_ARE_LIMITED ? Look::in_small_table : Look::in_table;  // elsewhere they are the same
    switch (format) {
        case Grouped::nibbles_above_minimum: return op(Codes<4, 32, true>{});
        case Grouped::nibbles: return op(Codes<4, 32>{});
        case Grouped::small_table: return op(Codes<4, 32, false, SMALL>{});
        case Grouped::table: return op(Codes<4, 32, false, Look::in_table>{});
        case Grouped::five_bits: return op(Codes<5, 32>{});
        case Grouped::five_bits_above_minimum: return op(Codes<5, 32, true>{});
        case Grouped::six_bits: return op(Codes<6, 16>{});
        case Grouped::bytes: break;
    }
    return op(Codes<8, 32>{});
}
