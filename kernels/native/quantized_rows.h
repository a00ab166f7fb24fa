// Activations as bytes. No include guard: each instruction set compiles its own copy.
//
// Each GROUP elements of a row have a scale, so one large element costs precision only in its own group, and in no other row.
// Elements are counted in steps of that scale from the group's least: x = scale * q + least, with q in 0…255.

constexpr int64_t GROUP = 64;

// The rows of a group lie together: a product reads those of a tile at constant distances from one address. Their number is
// padded to an odd one, because groups at a distance of some powers of two would displace each other from the cache.
struct QuantizedRows {
    uint8_t* values;  // [groups, padded_rows, GROUP], minus the product's shift
    float* scales;    // [groups, padded_rows]
    float* least;     // [groups, padded_rows], what a stored value of 0 means
    float* counts;    // [groups, padded_rows, 2], the sums of the first and the last GROUP / 2 stored values; null: not needed
    int64_t padded_rows, groups;

    int64_t at(int64_t row, int64_t group) const { return group * padded_rows + row; }
};

template <typename Row>
void quantize_row(const Row& x, int64_t in, int64_t row, int shift, const QuantizedRows& to) {
    constexpr float MAGIC = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer, kept in the low bits
    constexpr int VECTORS = GROUP / LANES;
    for (int64_t group = 0; group < to.groups; group++) {
        int64_t first = group * GROUP, at = to.at(row, group);
        Floats part[VECTORS], most = broadcast(-INFINITY), negative_least = most, poison{};
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
        float inverse = range > 0 ? 255.0f / range : 0.0f, scale = range / 255.0f + sum(poison);
        Words counted[2] = {};  // which may overflow in a group that has no numbers
        for (int i = 0; i < VECTORS; i++) {
            Ints whole = (Ints)((part[i] - low) * inverse + MAGIC) - 0x4b400000;
            counted[i / (VECTORS / 2)] += (Words)whole;
            store_bytes(to.values + at * GROUP + i * LANES, whole ^ shift);
        }
        to.scales[at] = scale;
        to.least[at] = low + static_cast<float>(shift) * scale;
        for (int half = 0; half < 2 && to.counts; half++)
            to.counts[2 * at + half] = sum(to_floats((Ints)counted[half])) - static_cast<float>(GROUP / 2 * shift);
    }
}

// Quantizes the rows of a product into memory that the next product reuses.
template <typename T>
QuantizedRows quantize_rows(ThreadPool& pool, const LinearArgs& args, int shift, bool wants_counts) {
    static std::vector<uint8_t> values;  // one op runs at a time
    static std::vector<float> numbers;
    int64_t groups = ceil_div(args.in, GROUP), padded_rows = args.rows | 1, count = padded_rows * groups;
    values.resize(std::max<size_t>(values.size(), count * GROUP));
    numbers.resize(std::max<size_t>(numbers.size(), 4 * count));
    float* counts = wants_counts ? numbers.data() + 2 * count : nullptr;
    QuantizedRows rows{values.data(), numbers.data(), numbers.data() + count, counts, padded_rows, groups};
    for_each_row<T>(pool, args, [&](int64_t number, const auto& row) { quantize_row(row, args.in, number, shift, rows); });
    return rows;
}
