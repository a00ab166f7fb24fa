// Rounding of weights to 4 bits in groups, as a GroupedWeight has them. No include guard: each instruction set compiles its
// own copy.
//
// Several ranges are tried, some shorter and some longer than from a group's least to its greatest value. Each gives codes,
// and least squares gives the scale and the minimum that fit them best. The range with the least error is kept: one that
// leaves an outlier out may serve the other values better.

constexpr int64_t NIBBLES_GROUP = 32;
// How many steps longer than 15 each range is. None puts a group's least or greatest value halfway between two codes.
constexpr float RANGES[] = {0, -0.5f, 0.5f, -0.9f, 1, -1.5f, -2.5f};

// Rounds to 0…15, ties to even.
PAGODA_INLINE Floats nearest_nibble(Floats x) {
    constexpr float MAGIC = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer
    x = max(x, Floats{});
    return (x < 15.0f ? x : broadcast(15.0f)) + MAGIC - MAGIC;
}

template <typename T>
void quantize_int4(ThreadPool& pool, const T* weight, uint8_t* values, uint16_t* scales, uint16_t* minimums, int64_t groups) {
    constexpr int COUNT = NIBBLES_GROUP / LANES;
    constexpr float SIZE = NIBBLES_GROUP;
    constexpr int64_t GROUPS_A_PART = 256;
    pool.run(static_cast<int>(ceil_div(groups, GROUPS_A_PART)), [&](int part) {
        int64_t end = std::min(groups, (part + 1) * GROUPS_A_PART);
        for (int64_t group = part * GROUPS_A_PART; group < end; group++) {
            Floats w[COUNT], most = broadcast(-INFINITY), most_negated = most, sums{}, squares{};
            for (int i = 0; i < COUNT; i++) {
                w[i] = load(weight + group * NIBBLES_GROUP + i * LANES);
                most = max(w[i], most);
                most_negated = max(-w[i], most_negated);
            }
            float low = -greatest(most_negated), range = greatest(most) - low;
            for (int i = 0; i < COUNT; i++) {  // counted from the least, so that sums of squares lose little
                w[i] -= low;
                sums += w[i];
                squares += w[i] * w[i];
            }
            float w_sum = sum(sums), w_squares = sum(squares), scale = 0, minimum = low, fewest = INFINITY;
            for (float more : RANGES) {
                // A longer or shorter range is moved so that its middle stays.
                float inverse = range > 0 ? (15 + more) / range : 0, start = -more / 2;
                Floats q_sums{}, q_squares{}, products{};
                for (int i = 0; i < COUNT; i++) {
                    Floats q = nearest_nibble(w[i] * inverse + start);
                    q_sums += q;
                    q_squares += q * q;
                    products += q * w[i];
                }
                float q_sum = sum(q_sums), q_square = sum(q_squares), product = sum(products);
                float spread = SIZE * q_square - q_sum * q_sum;
                if (!(spread > 0)) continue;
                float step = (SIZE * product - q_sum * w_sum) / spread, offset = (w_sum - step * q_sum) / SIZE;
                float error = w_squares - step * product - offset * w_sum;
                if (error < fewest) fewest = error, scale = step, minimum = low + offset;
            }
            scales[group] = to_fp16(scale);
            minimums[group] = to_fp16(minimum);
            scale = from_fp16(scales[group]);
            float inverse = scale > 0 ? 1 / scale : 0, start = (low - from_fp16(minimums[group])) * inverse;
            float codes[NIBBLES_GROUP];
            for (int i = 0; i < COUNT; i++) store(codes + i * LANES, nearest_nibble(w[i] * inverse + start));
            uint8_t* to = values + group * NIBBLES_GROUP / 2;
            for (int64_t i = 0; i < NIBBLES_GROUP / 2; i++)
                to[i] = static_cast<uint8_t>(static_cast<int>(codes[i]) | static_cast<int>(codes[NIBBLES_GROUP / 2 + i]) << 4);
        }
    });
}
