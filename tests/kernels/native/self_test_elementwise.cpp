// Tests of the ops that read each element once or twice.
#include "self_test.h"

Findings test_norm(const Subject& on) {
    Findings found(2e-6 + on.rounding());
    Random random(1);
    constexpr float EPS = 1e-5f;
    enum class Input { x, x_and_residual, x_and_wide_residual, wide_residual };
    for (int64_t size : {1, 3, 16, 31, 64, 100, 576})
        for (int64_t rows : {1, 5, 40})
            for (Input input : {Input::x, Input::x_and_residual, Input::x_and_wide_residual, Input::wide_residual}) {
                bool is_centred = (rows + size) % 2, has_bias = is_centred && rows != 5;
                bool has_x = input != Input::wide_residual, has_residual = input != Input::x;
                Dtype wide = input == Input::x_and_residual ? on.dtype : Dtype::float32;
                Tensor x(on.dtype, rows * size, random), weight(on.dtype, size, random), bias(on.dtype, size, random), out(on.dtype, rows * size);
                Tensor residual(wide, rows * size, random), sum(has_residual ? wide : on.dtype, rows * size);
                for (int64_t i = 0; i < rows * size; i++)
                    sum.set(i, (has_x ? x.at(i) : 0) + (has_residual ? residual.at(i) : 0));
                on.ops.norm(on.pool, on.dtype,
                            {has_x ? x.data() : nullptr, weight.data(), has_bias ? bias.data() : nullptr,
                             has_residual ? residual.data() : nullptr, wide, out.data(), rows, size, EPS, is_centred});
                for (int64_t row = 0; row < rows; row++) {
                    double mean = 0, squares = 0;
                    for (int64_t i = row * size; i < (row + 1) * size; i++) mean += sum.at(i) / static_cast<double>(size);
                    double centre = is_centred ? mean : 0;
                    for (int64_t i = row * size; i < (row + 1) * size; i++) squares += (sum.at(i) - centre) * (sum.at(i) - centre);
                    double scale = 1 / std::sqrt(squares / static_cast<double>(size) + EPS);
                    for (int64_t i = 0; i < size; i++) {
                        double added = has_bias ? bias.at(i) : 0, value = sum.at(row * size + i);
                        double magnitude = (std::fabs(value) + std::fabs(centre)) * scale * std::fabs(weight.at(i)) + std::fabs(added);
                        found.compare(out.at(row * size + i), (value - centre) * scale * weight.at(i) + added, magnitude);
                    }
                }
                if (has_residual) found.require(residual.has_bits_of(sum, 0, rows * size), "residual is not the rounded sum");
                found.require_guards(out);
                found.require_guards(residual);
            }
    return found;
}

Findings test_activate(const Subject& on) {
    Findings found(1e-6 + on.rounding());
    Random random(2);
    for (int64_t size : {1, 7, 16, 33, 250})
        for (int64_t rows : {1, 2, 17})
            for (int number = 1; number <= FUNCTIONS; number++) {
                Activation by = activation(static_cast<Function>(number), (number + rows) % 3 != 0);
                bool is_exact = by.function == Function::silu;  // the exponents of others are rounded, too
                int64_t width = by.width() * size;
                Tensor x(on.dtype, rows * width, random, 20.0), out(on.dtype, rows * size);
                for (int64_t row = 0; row < rows; row++) {  // over the range of e^x and beyond
                    x.set(row * width, row % 2 ? 200.0 : -200.0);
                    if (size > 20) x.set(row * width + 20, std::nan(""));
                }
                on.ops.activate(on.pool, on.dtype, x.data(), out.data(), rows, size, by);
                for (int64_t row = 0; row < rows; row++)
                    for (int64_t i = 0; i < size; i++) {
                        double got = out.at(row * size + i), want = activate(by, size, i, [&](int64_t at) { return x.at(row * width + at); });
                        double up = by.is_gated ? x.at(row * width + size + i) : 1, magnitude = std::fabs(want);
                        if (by.function == Function::xielu) magnitude += std::fabs(up);  // it has a zero between -2 and -0.5
                        if (std::isnan(want))
                            found.require(std::isnan(got), "lost a NaN");
                        else
                            found.compare(got, want, magnitude * (is_exact ? 1 : 16));
                    }
                found.require_guards(out);
            }
    return found;
}

Findings test_rope_and_store_kv(const Subject& on) {
    Findings found(3e-7 + on.rounding());
    Random random(3);
    for (int64_t head_dim : {16, 32, 64, 80, 96, 128, 256})
        for (int64_t tokens : {1, 9}) {
            constexpr int64_t HEADS = 6, KV_HEADS = 2, SLOTS = 32;
            int64_t half = head_dim / 2, kv_size = KV_HEADS * head_dim;
            Tensor qkv(on.dtype, tokens * (HEADS + 2 * KV_HEADS) * head_dim, random), queries(on.dtype, tokens * HEADS * head_dim);
            Tensor keys(on.dtype, SLOTS * kv_size), values(on.dtype, SLOTS * kv_size);
            std::vector<float> cosines(tokens * half), sines(tokens * half);
            std::vector<int64_t> slots(tokens), token_of(SLOTS, -1);
            for (int64_t i = 0; i < tokens * half; i++) {
                double angle = random.normal();
                cosines[i] = static_cast<float>(std::cos(angle));
                sines[i] = static_cast<float>(std::sin(angle));
            }
            for (int64_t token = 0; token < tokens; token++) {
                slots[token] = token == 4 ? -1 : (7 * token + 3) % SLOTS;
                if (slots[token] >= 0) token_of[slots[token]] = token;
            }
            RopeArgs args{};
            args.qkv = qkv.data();
            args.cosines = cosines.data();
            args.sines = sines.data();
            args.slots = slots.data();
            args.keys = keys.data();
            args.values = values.data();
            args.queries = queries.data();
            args.num_tokens = tokens;
            args.num_heads = HEADS;
            args.num_kv_heads = KV_HEADS;
            args.head_dim = head_dim;
            on.ops.rope_and_store_kv(on.pool, on.dtype, args);
            Room<int8_t> small_keys(keys.size(), 1), small_values(keys.size(), 1);
            Room<float> key_scales(SLOTS * KV_HEADS, 1), value_scales(SLOTS * KV_HEADS, 1);
            Tensor mixed_queries(on.dtype, queries.size());
            std::vector<float> centre(kv_size);
            for (float& each : centre) each = static_cast<float>(10 * random.normal());
            args.keys = small_keys.data();
            args.values = small_values.data();
            args.key_scales = key_scales.data();
            args.value_scales = value_scales.data();
            args.centre = centre.data();
            args.queries = mixed_queries.data();
            on.ops.rope_and_store_kv(on.pool, on.dtype, args);
            auto at = [&](int64_t token, int64_t head, int64_t i) {
                return qkv.at((token * (HEADS + 2 * KV_HEADS) + head) * head_dim + i);
            };
            auto rotated = [&](int64_t token, int64_t head) {
                std::vector<double> to(head_dim);
                for (int64_t i = 0; i < head_dim; i++) {
                    double cosine = cosines[token * half + i % half], sine = sines[token * half + i % half];
                    to[i] = at(token, head, i) * cosine + at(token, head, (i + half) % head_dim) * (i < half ? -sine : sine);
                }
                return to;
            };
            // By the definition of `mix` in rope_and_store_kv.py.
            auto mixed = [&](const std::vector<double>& head) {
                int64_t width = half & -half;
                std::vector<double> to(head_dim, 0);
                for (int64_t i = 0; i < head_dim; i++)
                    for (int64_t j = 0; j < head_dim; j++) {
                        if (i % half / width != j % half / width) continue;
                        int64_t common = (i % width & j % width) | (i / half & j / half) << 32;
                        bool is_odd = false;
                        for (; common; common &= common - 1) is_odd = !is_odd;
                        to[i] += is_odd ? -head[j] : head[j];
                    }
                for (double& each : to) each /= std::sqrt(2.0 * static_cast<double>(width));
                return to;
            };
            auto size_of = [](const std::vector<double>& head) {
                double squares = 0;
                for (double each : head) squares += each * each;
                return std::sqrt(squares);
            };
            for (int64_t token = 0; token < tokens; token++)
                for (int64_t head = 0; head < HEADS; head++) {
                    auto expected = mixed(rotated(token, head));
                    for (int64_t i = 0; i < head_dim; i++)
                        found.compare(mixed_queries.at((token * HEADS + head) * head_dim + i), expected[i], size_of(expected));
                }
            // Numbers of int8 are at most half a step away, and what float32 rounds.
            auto compare_rounded = [&](const std::vector<double>& exact, const Room<int8_t>& small, const Room<float>& scales, int64_t head) {
                float scale = scales.data()[head];
                double greatest = 0, size = size_of(exact);
                for (int64_t i = 0; i < head_dim; i++) {
                    greatest = std::max(greatest, std::fabs(exact[i]));
                    double error = std::fabs(exact[i] - double{scale} * small.data()[head * head_dim + i]);
                    found.require(error <= scale * 0.50001 + size * 1e-6, "a number of int8 is further away than half a step");
                }
                found.require(std::fabs(scale * 127 - greatest) <= size * 1e-6, "a scale is not that of the greatest");
            };
            for (int64_t head = 0; head < SLOTS * KV_HEADS; head++)
                if (int64_t token = token_of[head / KV_HEADS]; token >= 0) {
                    auto key = rotated(token, HEADS + head % KV_HEADS);
                    for (int64_t i = 0; i < head_dim; i++) key[i] -= centre[head % KV_HEADS * head_dim + i];
                    std::vector<double> value(head_dim);
                    for (int64_t i = 0; i < head_dim; i++) value[i] = at(token, HEADS + KV_HEADS + head % KV_HEADS, i);
                    compare_rounded(mixed(key), small_keys, key_scales, head);
                    compare_rounded(value, small_values, value_scales, head);
                } else {
                    found.require(key_scales.is_poison(head) && value_scales.is_poison(head) && small_keys.is_poison(head * head_dim) &&
                                      small_values.is_poison(head * head_dim), "wrote a slot that no token has");
                }
            found.require(small_keys.has_whole_guards() && small_values.has_whole_guards() && key_scales.has_whole_guards() &&
                              value_scales.has_whole_guards(), "wrote beyond its output");
            auto compare_head = [&](const Tensor& got, int64_t from, int64_t token, int64_t head) {
                for (int64_t i = 0; i < head_dim; i++) {
                    double cosine = cosines[token * half + i % half], sine = sines[token * half + i % half];
                    double other = at(token, head, (i + half) % head_dim) * (i < half ? -sine : sine), own = at(token, head, i) * cosine;
                    found.compare(got.at(from + i), own + other, std::fabs(own) + std::fabs(other));
                }
            };
            for (int64_t token = 0; token < tokens; token++)
                for (int64_t head = 0; head < HEADS; head++)
                    compare_head(queries, (token * HEADS + head) * head_dim, token, head);
            for (int64_t slot = 0; slot < SLOTS; slot++)
                for (int64_t head = 0; head < KV_HEADS; head++) {
                    int64_t from = slot * kv_size + head * head_dim, token = token_of[slot];
                    if (token >= 0) compare_head(keys, from, token, HEADS + head);
                    for (int64_t i = 0; i < head_dim; i++)
                        if (token < 0)
                            found.require(keys.is_poison(from + i) && values.is_poison(from + i), "wrote a slot that no token has");
                        else
                            found.require(values.at(from + i) == at(token, HEADS + KV_HEADS + head, i), "a value is not a copy");
                }
            for (const Tensor* written : {&queries, &keys, &values}) found.require_guards(*written);
        }
    return found;
}

Findings test_argmax(const Subject& on) {
    Findings found(0);
    Random random(5);
    for (int64_t size : {1, 5, 16, 47, 1000}) {
        constexpr int64_t ROWS = 9;
        Tensor x(on.dtype, ROWS * size, random);
        int64_t last = size - 1;
        x.set(1 * size + last, 50.0);
        x.set(2 * size + size / 2, 50.0);
        x.set(2 * size + last, 50.0);  // the first of equal maxima
        x.set(3 * size + last, std::nan(""));
        x.set(4 * size, std::nan(""));
        x.set(5 * size + last, INFINITY);
        for (int64_t i = 0; i < size; i++) x.set(6 * size + i, -INFINITY);
        for (int64_t i = 0; i < size; i++) x.set(7 * size + i, i == last ? -1e30 : -INFINITY);
        for (int64_t i = 0; i < size; i++) x.set(8 * size + i, -0.5);
        Room<int64_t> out(ROWS, 0);
        on.ops.argmax(on.pool, on.dtype, x.data(), nullptr, nullptr, out.data(), ROWS, size);
        for (int64_t row = 0; row < ROWS; row++) {
            int64_t want = 0;
            for (int64_t i = 0; i < size; i++)
                if (x.at(row * size + i) > x.at(row * size + want)) want = i;
            if (row >= 3 && row <= 6) want = -1;
            found.require(out.data()[row] == want, "not the first of the greatest");
        }
        found.require(out.has_whole_guards(), "wrote beyond its output");
    }
    return found;
}

namespace {

// Masks of so many rows: of nothing, of one element, of few, of most and of all, in turn. Bits beyond a row are set.
Room<uint32_t> random_masks(int64_t rows, int64_t size, Random& random) {
    int64_t words = ceil_div(size, 32);
    Room<uint32_t> masks(rows * words, 1);
    for (int64_t row = 0; row < rows; row++) {
        int64_t chosen = random.below(size);
        for (int64_t i = 0; i < 32 * words; i++) {
            bool is_allowed[] = {false, i == chosen, random.below(40) == 0, random.below(10) != 0, true};
            uint32_t bit = uint32_t{i >= size || is_allowed[row % 5]} << i % 32;
            uint32_t& word = masks.data()[row * words + i / 32];
            word = (i % 32 ? word : 0) | bit;
        }
    }
    return masks;
}

bool allows(const Room<uint32_t>& masks, int64_t row, int64_t size, int64_t i) {
    return masks.data()[row * ceil_div(size, 32) + i / 32] >> i % 32 & 1;
}

constexpr int64_t MASKED = 15, NUM_ROWS = 18;

// Out of order, and without some rows.
Room<int64_t> masked_rows() {
    Room<int64_t> rows(MASKED, 1);
    for (int64_t i = 0; i < MASKED; i++) rows.data()[i] = (7 * i + 3) % NUM_ROWS;
    return rows;
}

}  // namespace

Findings test_argmax_of_masked_rows(const Subject& on) {
    Findings found(0);
    Random random(6);
    Room<int64_t> rows = masked_rows();
    for (int64_t size : {1, 5, 31, 32, 33, 64, 75, 1000})
        for (double special : {0.0, std::nan(""), static_cast<double>(INFINITY), -static_cast<double>(INFINITY)}) {
            Tensor x(on.dtype, NUM_ROWS * size, random);
            for (int64_t i = 0; i < NUM_ROWS * size; i++)
                x.set(i, std::round(x.at(i)));  // many are equal
            if (special != 0)
                for (int64_t row = 0; row < NUM_ROWS; row++) x.set(row * size + random.below(size), special);
            Room<uint32_t> masks = random_masks(MASKED, size, random);
            Room<int64_t> out(MASKED, 0);
            on.ops.argmax(on.pool, on.dtype, x.data(), rows.data(), masks.data(), out.data(), MASKED, size);
            for (int64_t at = 0; at < MASKED; at++) {
                int64_t want = -1;
                bool broken = false;
                for (int64_t i = 0; i < size; i++) {
                    if (!allows(masks, at, size, i)) continue;
                    double value = x.at(rows.data()[at] * size + i);
                    broken |= std::isnan(value) || value == INFINITY;
                    if (value > (want < 0 ? -static_cast<double>(INFINITY) : x.at(rows.data()[at] * size + want))) want = i;
                }
                found.require(out.data()[at] == (broken ? -1 : want), "not the first of the greatest that are allowed");
            }
            found.require(out.has_whole_guards(), "wrote beyond its output");
        }
    return found;
}

Findings test_mask_rows(const Subject& on) {
    Findings found(0);
    Random random(7);
    Room<int64_t> rows = masked_rows();
    for (int64_t size : {1, 5, 31, 32, 33, 64, 75, 1000}) {
        Tensor before(Dtype::float32, NUM_ROWS * size, random);
        before.set(rows.data()[3] * size, std::nan(""));
        Tensor x(Dtype::float32, NUM_ROWS * size);
        std::memcpy(x.data(), before.data(), NUM_ROWS * size * sizeof(float));
        Room<uint32_t> masks = random_masks(MASKED, size, random);
        on.ops.mask_rows(on.pool, static_cast<float*>(x.data()), rows.data(), masks.data(), MASKED, size);
        for (int64_t at = 0; at < MASKED; at++)
            for (int64_t i = 0; i < size; i++)
                if (int64_t from = rows.data()[at] * size + i; !allows(masks, at, size, i)) {
                    found.require(x.at(from) == -INFINITY, "left what the mask does not allow");
                    before.set(from, -INFINITY);
                }
        found.require(x.has_bits_of(before, 0, NUM_ROWS * size), "changed what the mask allows, or another row");
        found.require_guards(x);
    }
    return found;
}
