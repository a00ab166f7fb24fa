// The choice of a token at random.
#include <functional>

#include "self_test.h"

namespace {

uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}

uint64_t splitmix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

uint64_t key_of(int64_t seed, int64_t position) {
    return splitmix(splitmix(static_cast<uint64_t>(seed)) ^ static_cast<uint64_t>(position));
}

double noise(uint64_t key, int64_t id) {
    uint32_t bits = mix(mix(static_cast<uint32_t>(id) ^ static_cast<uint32_t>(key)) ^ static_cast<uint32_t>(key >> 32));
    return -std::log(-std::log((bits >> 8 | 1) * 0x1p-24));
}

struct Rules {
    float temperature;
    int64_t top_k;
    float top_p, lowest;
};

// The index of the greatest score among the elements that the rules keep.
int64_t draw_plainly(const std::vector<float>& row, uint64_t key, const Rules& rules) {
    float top = *std::max_element(row.begin(), row.end());
    std::vector<float> scaled;
    for (float element : row) scaled.push_back((element - top) / rules.temperature);
    std::vector<float> order = scaled;
    std::sort(order.begin(), order.end(), std::greater<>());
    auto size = static_cast<int64_t>(row.size());
    float kth = rules.top_k > 0 && rules.top_k < size ? order[rules.top_k - 1] : -INFINITY, least = 0;
    double total = 0, mass = 0;
    for (float element : order) total += element >= kth ? std::exp(static_cast<double>(element)) : 0;
    for (float element : order) {
        if (element < kth || element < rules.lowest || (rules.top_p < 1 && mass >= rules.top_p * total)) break;
        mass += std::exp(static_cast<double>(element));
        least = element;
    }
    int64_t token = -1;
    double best = -INFINITY;
    for (int64_t i = 0; i < size; i++)
        if (double score = scaled[i] + noise(key, i); scaled[i] >= least && score > best) {
            token = i;
            best = score;
        }
    return token;
}

// Draws in some rows by the same rules. `tokens` holds the index of each row's maximum, and one more number.
Room<int64_t> draw_each(const Subject& on, Tensor& x, const std::vector<int64_t>& tokens, const std::vector<int64_t>& rows,
                        const std::vector<int64_t>& seeds, const std::vector<int64_t>& positions, const Rules& rules,
                        int64_t size, bool only_likeliest = false) {
    auto count = static_cast<int64_t>(rows.size());
    std::vector<float> temperature(count, rules.temperature), top_p(count, rules.top_p), lowest(count, rules.lowest);
    std::vector<int64_t> top_k(count, rules.top_k);
    Room<int64_t> drawn(static_cast<int64_t>(tokens.size()), 1);
    std::copy(tokens.begin(), tokens.end(), drawn.data());
    DrawArgs args{};
    args.x = x.data();
    args.rows = rows.data();
    args.temperature = temperature.data();
    args.seed = seeds.data();
    args.positions = positions.data();
    args.top_k = top_k.data();
    args.top_p = top_p.data();
    args.lowest = lowest.data();
    args.tokens = drawn.data();
    args.count = count;
    args.size = size;
    args.only_likeliest = only_likeliest;
    on.ops.draw(on.pool, on.dtype, args);
    return drawn;
}

std::vector<float> row_of(const Tensor& x, int64_t row, int64_t size) {
    std::vector<float> elements;
    for (int64_t i = 0; i < size; i++) elements.push_back(static_cast<float>(x.at(row * size + i)));
    return elements;
}

int64_t index_of_greatest(const std::vector<float>& row) { return std::max_element(row.begin(), row.end()) - row.begin(); }

}  // namespace

Findings test_draw(const Subject& on) {
    Findings found(0);
    Random random(8);
    const Rules all_rules[] = {
        {1, 0, 1, -INFINITY},         {0.6f, 0, 1, -INFINITY},      {100, 0, 1, -INFINITY},     {1e-10f, 0, 0.9f, -INFINITY},
        {1.2e-38f, 0, 1, -INFINITY},  {1, 1, 1, -INFINITY},         {1.5f, 40, 1, -INFINITY},   {1.5f, 40, 0.8f, -INFINITY},
        {5, MOST_TOP_K, 0.5f, -3},    {1, 0, 0.95f, -INFINITY},     {3, 0, 0.5f, -INFINITY},    {20, 0, 1e-6f, -INFINITY},
        {1, 0, 1, -2.5f},             {1, 0, 1, 0},                 {2, 0, 0.9f, -1.5f},        {1, MOST_TOP_K + 1, 1, -INFINITY},
    };
    constexpr int64_t ROWS = 4, TURNS = 27;
    for (int64_t size : {1, 5, 63, 64, 75, 1000}) {
        Tensor x(on.dtype, ROWS * size, random, 4);
        for (int64_t i = 0; i < size; i++) {
            x.set(size + i, std::round(x.at(size + i)));  // many are equal
            x.set(2 * size + i, i % 3 ? -INFINITY : 1000 + x.at(2 * size + i));
            x.set(3 * size + i, -0.5);
        }
        std::vector<std::vector<float>> elements;
        for (int64_t row = 0; row < ROWS; row++) elements.push_back(row_of(x, row, size));
        std::vector<int64_t> greatest;
        for (const std::vector<float>& row : elements) greatest.push_back(index_of_greatest(row));
        for (const Rules& rules : all_rules) {
            int64_t unsure = 0;
            for (int64_t turn = 0; turn < TURNS; turn++) {
                int64_t idle = turn % ROWS, is_broken = turn == 7;  // every other row draws, in another order each turn
                std::vector<int64_t> rows, seeds, positions;
                for (int64_t at = 1; at < ROWS; at++) {
                    rows.push_back((idle + at) % ROWS);
                    seeds.push_back(static_cast<int64_t>(random.bits() << 32 ^ random.bits()));
                    positions.push_back(static_cast<int64_t>(random.bits() >> 1));
                }
                std::vector<int64_t> tokens = greatest;
                if (is_broken) tokens[rows[0]] = -1;
                tokens.push_back(-7);
                Room<int64_t> drawn = draw_each(on, x, tokens, rows, seeds, positions, rules, size);
                Room<int64_t> likeliest = draw_each(on, x, tokens, rows, seeds, positions, rules, size, true);
                for (size_t at = 0; at < rows.size(); at++) {
                    int64_t row = rows[at], token = drawn.data()[row];
                    unsure += token == UNSURE_DRAW;
                    bool is_lost = is_broken && at == 0;
                    int64_t want = is_lost ? -1 : draw_plainly(elements[row], key_of(seeds[at], positions[at]), rules);
                    found.require(token == UNSURE_DRAW || token == want, "drew another element");
                    found.require(likeliest.data()[row] == (token == tokens[row] ? token : -1), "told of another element");
                }
                found.require(drawn.data()[idle] == tokens[idle] && drawn.data()[ROWS] == -7, "drew in a row that does not");
                found.require(drawn.has_whole_guards() && likeliest.has_whole_guards(), "wrote beyond its output");
            }
            bool is_beyond = rules.top_k > MOST_TOP_K && rules.top_k < size;
            found.require(is_beyond ? unsure == TURNS * (ROWS - 1) - 1 : unsure <= 2, "was sure of too much, or too seldom");
        }
    }
    return found;
}

// Elements that noise makes nearly equal, and masses that end where top-p does.
Findings test_unsure_draws(const Subject& on) {
    Findings found(0);
    constexpr int64_t SIZE = 300, SEEDS = 50;
    for (int64_t seed = 0; seed < SEEDS; seed++) {
        if (on.dtype == Dtype::bfloat16) break;  // it has too few digits to cancel noise
        Tensor x(on.dtype, SIZE);
        for (int64_t i = 0; i < SIZE; i++) x.set(i, -noise(key_of(seed, 3), i));
        std::vector<int64_t> tokens{index_of_greatest(row_of(x, 0, SIZE))};
        Room<int64_t> drawn = draw_each(on, x, tokens, {0}, {seed}, {3}, {1, 0, 1, -INFINITY}, SIZE);
        found.require(drawn.data()[0] == UNSURE_DRAW, "was sure of one of equal scores");
    }
    Tensor halves(Dtype::float32, 8);
    for (int64_t i = 0; i < 8; i++) halves.set(i, -std::log(2.0) * static_cast<double>(std::min<int64_t>(i + 1, 7)));
    Subject wide{on.ops, on.alone, on.pool, Dtype::float32};
    int64_t unsure = 0;
    for (int64_t seed = 0; seed < SEEDS; seed++) {
        Room<int64_t> drawn = draw_each(wide, halves, {0}, {0}, {seed}, {3}, {1, 0, 0.75f, -INFINITY}, 8);
        unsure += drawn.data()[0] == UNSURE_DRAW;
        found.require(drawn.data()[0] <= 1, "drew an element that top-p drops");
    }
    found.require(unsure > 0 && unsure < SEEDS / 2, "was sure of a mass that is as great as top-p");
    return found;
}
