// Tests of what adapters add to products, and of how their weights are packed.
#include "../../../kernels/native/pack_low_rank.h"

#include "self_test.h"

namespace {

constexpr int64_t PARTS = 3;

// A matrix of a file in one of its dtypes. The elements between its rows are NaN.
struct StoredMatrix {
    Stored dtype;
    int64_t rows, columns, stride;
    std::vector<uint8_t> bytes;

    StoredMatrix(Stored dtype, int64_t rows, int64_t columns, int64_t stride, Random& random)
        : dtype(dtype), rows(rows), columns(columns), stride(stride), bytes(rows * stride * element_bytes(), 0xff) {
        for (int64_t row = 0; row < rows; row++)
            for (int64_t column = 0; column < columns; column++) set(row, column, static_cast<float>(random.normal()));
    }

    size_t element_bytes() const { return dtype == Stored::float32 ? 4 : 2; }

    void set(int64_t row, int64_t column, float value) {
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        uint16_t half = dtype == Stored::float16 ? to_fp16(value) : static_cast<uint16_t>(bits >> 16);
        uint8_t* to = bytes.data() + (row * stride + column) * element_bytes();
        std::memcpy(to, dtype == Stored::float32 ? static_cast<void*>(&bits) : &half, element_bytes());
    }

    float at(int64_t row, int64_t column) const {
        const uint8_t* from = bytes.data() + (row * stride + column) * element_bytes();
        if (dtype == Stored::float16) return from_fp16(load_word(from));
        uint32_t bits = dtype == Stored::float32 ? load_word(from) | uint32_t{load_word(from + 2)} << 16 : uint32_t{load_word(from)} << 16;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
};

bool pack(Dtype dtype, const StoredMatrix& down, const StoredMatrix& up, float scale, void* packed_down, void* packed_up) {
    PackLowRankArgs args{down.dtype, up.dtype, down.bytes.data(), up.bytes.data(), packed_down, packed_up,
                         down.rows,  down.columns, up.rows, down.stride, scale};
    return dtype == Dtype::float32 ? pack_low_rank<ToFloat32>(args) : pack_low_rank<ToBf16>(args);
}

// An adapter of a product, packed as a server packs it, from dtypes that its parts take in turn.
struct Adapter {
    LowRankEntry entry{};
    Tensor down;
    std::vector<Tensor> ups;
    int64_t padded;

    Adapter(Dtype dtype, int64_t in, const int64_t* sizes, const int64_t* ranks, Random& random, Findings& found)
        : down(dtype, (ranks[0] + ranks[1] + ranks[2]) * padding(in)), padded(padding(in)) {
        constexpr Stored DTYPES[] = {Stored::float32, Stored::bfloat16, Stored::float16};
        int64_t rank = 0, column = 0;
        ups.reserve(PARTS);  // so that none moves
        for (int64_t part = 0; part < PARTS; column += sizes[part++]) {
            if (!ranks[part]) continue;
            StoredMatrix of_down(DTYPES[random.below(3)], ranks[part], in, in + random.below(4), random);
            StoredMatrix of_up(DTYPES[random.below(3)], sizes[part], ranks[part], ranks[part], random);
            LowRankPart& to = entry.parts[entry.num_parts++];
            to = {column, sizes[part], ranks[part], nullptr};
            ups.emplace_back(dtype, to.panels() * to.rank * LOW_RANK_PADDING);
            to.up = ups.back().data();
            auto scale = static_cast<float>(0.3 + std::fabs(random.normal()));
            found.require(pack(dtype, of_down, of_up, scale, down.data(rank * padded), ups.back().data()), "packed values are not finite");
            require_packed(dtype, of_down, of_up, scale, rank, found);
            rank += ranks[part];
        }
        found.require_guards(down);
        entry.down = down.data();
        entry.ranks = rank;
    }

    // The part that was packed last has the file's values, scaled and rounded once, and zeros behind them.
    void require_packed(Dtype dtype, const StoredMatrix& of_down, const StoredMatrix& of_up, float scale, int64_t rank, Findings& found) {
        Tensor& up = ups.back();
        Tensor want_down(dtype, of_down.rows * padded), want_up(dtype, up.size());
        for (int64_t row = 0; row < of_down.rows; row++)
            for (int64_t i = 0; i < padded; i++) want_down.set(row * padded + i, i < of_down.columns ? of_down.at(row, i) : 0.0f);
        for (int64_t i = 0; i < up.size(); i++) {
            int64_t panel = i / (of_up.columns * LOW_RANK_PADDING), column = i / LOW_RANK_PADDING % of_up.columns;
            int64_t row = panel * LOW_RANK_PADDING + i % LOW_RANK_PADDING;
            want_up.set(i, row < of_up.rows ? scale * of_up.at(row, column) : 0.0f);
        }
        found.require(want_down.has_bits_of(down, rank * padded, want_down.size()), "packed `down` has other bits");
        found.require(want_up.has_bits_of(up, 0, up.size()), "packed `up` has other bits");
        found.require_guards(up);
    }

    static int64_t padding(int64_t in) { return (in + LOW_RANK_PADDING - 1) / LOW_RANK_PADDING * LOW_RANK_PADDING; }

    // Adds to out [out] what it makes of x(i), and to magnitudes the sum of the magnitudes.
    template <typename Element>
    void add(int64_t in, const Element& x, std::vector<double>& out, std::vector<double>& magnitudes) const {
        int64_t first = 0;
        for (int64_t part = 0; part < entry.num_parts; part++) {
            const LowRankPart& of = entry.parts[part];
            for (int64_t rank = 0; rank < of.rank; rank++) {
                double hidden = 0, size = 0;
                for (int64_t i = 0; i < in; i++) {
                    double product = down.at((first + rank) * padded + i) * x(i);
                    hidden += product;
                    size += std::fabs(product);
                }
                for (int64_t i = 0; i < of.size; i++) {
                    int64_t panel = i / LOW_RANK_PADDING;
                    double up = ups[part].at((panel * of.rank + rank) * LOW_RANK_PADDING + i % LOW_RANK_PADDING);
                    out[of.column + i] += up * hidden;
                    magnitudes[of.column + i] += std::fabs(up) * size;
                }
            }
            first += of.rank;
        }
    }
};

}  // namespace

Findings test_low_rank(const Subject& on) {
    Findings found(3e-6 + on.rounding());
    Random random(11);
    constexpr int64_t RANKS[][PARTS] = {{3, 16, 1}, {0, 5, 0}, {40, 17, 33}};
    for (int64_t in : {1, 31, 64, 75, 300})
        for (int64_t size : {1, 33, 64, 150})
            for (Function function : {Function::none, Function::silu, Function::gelu}) {
                int64_t sizes[] = {size, 20, 2 * size + 1}, out_size = 3 * size + 21, rows = 1 + (in + size) % 9;
                Activation by = activation(function, function == Function::silu);
                int64_t width = by.width() * in;
                std::vector<Adapter> adapters;
                std::vector<LowRankEntry> table;
                adapters.reserve(3);
                for (const auto& ranks : RANKS) {
                    adapters.emplace_back(on.dtype, in, sizes, ranks, random, found);
                    table.push_back(adapters.back().entry);
                }
                table.emplace_back();  // of a slot that holds nothing for this product
                Tensor x(on.dtype, rows * width, random), out(on.dtype, rows * out_size, random), before(on.dtype, rows * out_size);
                std::memcpy(before.data(), out.data(), rows * out_size * (on.dtype == Dtype::float32 ? 4 : 2));
                std::vector<int32_t> slots(rows);
                for (int32_t& slot : slots) slot = static_cast<int32_t>(random.below(5)) - 1;
                on.ops.add_low_rank(on.pool, on.dtype, {x.data(), out.data(), slots.data(), table.data(), rows, in, out_size, by});
                for (int64_t row = 0; row < rows; row++) {
                    std::vector<double> want(out_size), magnitudes(out_size);
                    for (int64_t i = 0; i < out_size; i++) magnitudes[i] = std::fabs(want[i] = before.at(row * out_size + i));
                    Tensor alone(on.dtype, out_size);
                    for (int64_t i = 0; i < out_size; i++) alone.set(i, before.at(row * out_size + i));
                    if (slots[row] >= 0 && slots[row] < 3)
                        adapters[slots[row]].add(
                            in, [&](int64_t i) { return activate(by, in, i, [&](int64_t at) { return x.at(row * width + at); }); }, want, magnitudes);
                    for (int64_t i = 0; i < out_size; i++) found.compare(out.at(row * out_size + i), want[i], magnitudes[i]);
                    on.ops.add_low_rank(on.alone, on.dtype,
                                        {x.data(row * width), alone.data(), slots.data() + row, table.data(), 1, in, out_size, by});
                    found.require(alone.has_bits_of(out, row * out_size, out_size), "a row depends on those beside it");
                    found.require_guards(alone);
                }
                found.require_guards(out);
            }
    return found;
}

// One value that is not finite in the model's dtype, wherever it is, is found.
Findings test_finite_low_rank(const Subject& on) {
    Findings found(0);
    Random random(12);
    constexpr int64_t RANK = 3, IN = 70, SIZE = 66;
    Tensor packed_down(on.dtype, RANK * Adapter::padding(IN)), packed_up(on.dtype, Adapter::padding(SIZE) * RANK);
    for (Stored dtype : {Stored::float32, Stored::bfloat16, Stored::float16})
        for (float value : {INFINITY, -INFINITY, NAN, -NAN, std::numeric_limits<float>::max(), 1.0f})
            for (bool is_in_up : {false, true}) {
                if (std::isnan(value) && dtype == Stored::float16) continue;  // the test's rounding makes no such number
                StoredMatrix down(dtype, RANK, IN, IN, random), up(dtype, SIZE, RANK, RANK, random);
                StoredMatrix& changed = is_in_up ? up : down;
                changed.set(random.below(changed.rows), random.below(changed.columns), value);
                // The greatest float32 is rounded down as a stored bfloat16, to infinity as float16 or for such a model.
                bool is_finite = value == 1.0f || (std::isfinite(value) && !is_in_up &&
                                                   (dtype == Stored::bfloat16 || (dtype == Stored::float32 && on.dtype == Dtype::float32)));
                found.require(pack(on.dtype, down, up, 1.5f, packed_down.data(), packed_up.data()) == is_finite, "finite values are misjudged");
            }
    found.require_guards(packed_down);
    found.require_guards(packed_up);
    return found;
}
