// Tests of the ops that read each element once or twice.
#include "self_test.h"

Findings test_rms_norm(const Subject& on) {
    Findings found(1e-6 + on.rounding());
    Random random(1);
    constexpr float EPS = 1e-5f;
    enum class Input { x, x_and_residual, x_and_wide_residual, wide_residual };
    for (int64_t size : {1, 3, 16, 31, 64, 100, 576})
        for (int64_t rows : {1, 5, 40})
            for (Input input : {Input::x, Input::x_and_residual, Input::x_and_wide_residual, Input::wide_residual}) {
                bool has_x = input != Input::wide_residual, has_residual = input != Input::x;
                Dtype wide = input == Input::x_and_residual ? on.dtype : Dtype::float32;
                Tensor x(on.dtype, rows * size, random), weight(on.dtype, size, random), out(on.dtype, rows * size);
                Tensor residual(wide, rows * size, random), sum(has_residual ? wide : on.dtype, rows * size);
                for (int64_t i = 0; i < rows * size; i++)
                    sum.set(i, (has_x ? x.at(i) : 0) + (has_residual ? residual.at(i) : 0));
                on.ops.rms_norm(on.pool, on.dtype, has_x ? x.data() : nullptr, weight.data(), has_residual ? residual.data() : nullptr,
                                wide, out.data(), rows, size, EPS);
                for (int64_t row = 0; row < rows; row++) {
                    double squares = 0;
                    for (int64_t i = row * size; i < (row + 1) * size; i++) squares += sum.at(i) * sum.at(i);
                    double scale = 1 / std::sqrt(squares / static_cast<double>(size) + EPS);
                    for (int64_t i = 0; i < size; i++) {
                        double want = sum.at(row * size + i) * scale * weight.at(i);
                        found.compare(out.at(row * size + i), want, std::fabs(want));
                    }
                }
                if (has_residual) found.require(residual.has_bits_of(sum, 0, rows * size), "residual is not the rounded sum");
                found.require_guards(out);
                found.require_guards(residual);
            }
    return found;
}

Findings test_silu_and_mul(const Subject& on) {
    Findings found(1e-6 + on.rounding());
    Random random(2);
    for (int64_t size : {1, 7, 16, 33, 250})
        for (int64_t rows : {1, 17}) {
            Tensor gate_up(on.dtype, rows * 2 * size, random, 20.0), out(on.dtype, rows * size);
            for (int64_t row = 0; row < rows; row++) {  // over the range of e^x and beyond
                gate_up.set(row * 2 * size, row % 2 ? 200.0 : -200.0);
                if (size > 20) gate_up.set(row * 2 * size + 20, std::nan(""));
            }
            on.ops.silu_and_mul(on.pool, on.dtype, gate_up.data(), out.data(), rows, size);
            for (int64_t row = 0; row < rows; row++)
                for (int64_t i = 0; i < size; i++) {
                    double got = out.at(row * size + i), want = silu(gate_up.at(row * 2 * size + i)) * gate_up.at((row * 2 + 1) * size + i);
                    if (std::isnan(want))
                        found.require(std::isnan(got), "lost a NaN");
                    else
                        found.compare(got, want, std::fabs(want));
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
            auto at = [&](int64_t token, int64_t head, int64_t i) {
                return qkv.at((token * (HEADS + 2 * KV_HEADS) + head) * head_dim + i);
            };
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
        on.ops.argmax(on.pool, on.dtype, x.data(), out.data(), ROWS, size);
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
