// Tests of what adapters add to products.
#include "self_test.h"

namespace {

constexpr int64_t PARTS = 3;

// An adapter of a product, packed as kernels/low_rank.py does it.
struct Adapter {
    LowRankEntry entry{};
    Tensor down;
    std::vector<Tensor> ups;
    int64_t padded;

    Adapter(Dtype dtype, int64_t in, const int64_t* sizes, const int64_t* ranks, Random& random)
        : down(dtype, (ranks[0] + ranks[1] + ranks[2]) * padding(in)), padded(padding(in)) {
        int64_t rank = 0, column = 0;
        ups.reserve(PARTS);  // so that none moves
        for (int64_t part = 0; part < PARTS; column += sizes[part++]) {
            if (!ranks[part]) continue;
            for (int64_t i = 0; i < ranks[part] * padded; i++)
                down.set(rank * padded + i, i % padded < in ? random.normal() : 0.0);
            rank += ranks[part];
            LowRankPart& to = entry.parts[entry.num_parts++];
            to = {column, sizes[part], ranks[part], nullptr};
            ups.emplace_back(dtype, to.panels() * to.rank * LOW_RANK_PADDING, random);
            to.up = ups.back().data();
        }
        entry.down = down.data();
        entry.ranks = rank;
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
                    adapters.emplace_back(on.dtype, in, sizes, ranks, random);
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
