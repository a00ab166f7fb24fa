// The ops that read each element once or twice. No include guard: each instruction set compiles its own copy.

// Normalizes a row of `size` elements: x, or the residual if given, to which x (if given) is added first. A residual may have
// a wider type. Without `out` the row is added and not normalized.
template <bool IS_CENTRED, typename T, typename R>
void norm_row(const T* x, const T* weight, const T* bias, R* residual, T* out, int64_t size, float eps) {
    int64_t whole = size / LANES * LANES;
    // Adds up the squares of the row's distances from `mean`, or the row itself.
    auto add_up = [&](const auto* from, float mean, bool is_squared) {
        Floats sums{};
        float tail = 0;
        for (int64_t i = 0; i < whole; i += LANES) {
            Floats value = load(from + i) - mean;
            sums += is_squared ? value * value : value;
        }
        for (int64_t i = whole; i < size; i++) {
            float value = to_float(from[i]) - mean;
            tail += is_squared ? value * value : value;
        }
        return sum(sums) + tail;
    };
    if (residual && x) {
        for (int64_t i = 0; i < whole; i += LANES) store(residual + i, load(residual + i) + load(x + i));
        for (int64_t i = whole; i < size; i++) round_to(&residual[i], to_float(residual[i]) + to_float(x[i]));
    }
    if (!out) return;
    auto normalize = [&](const auto* from) {
        float mean = IS_CENTRED ? add_up(from, 0, false) / static_cast<float>(size) : 0;
        float scale = 1.0f / std::sqrt(add_up(from, mean, true) / static_cast<float>(size) + eps);
        auto scaled = [&](auto value, auto weight) {
            if constexpr (IS_CENTRED) value -= mean;
            return value * scale * weight;
        };
        for (int64_t i = 0; i < whole; i += LANES) {
            Floats value = scaled(load(from + i), load(weight + i));
            store(out + i, bias ? value + load(bias + i) : value);
        }
        for (int64_t i = whole; i < size; i++)
            round_to(&out[i], scaled(to_float(from[i]), to_float(weight[i])) + (bias ? to_float(bias[i]) : 0.0f));
    };
    if (residual)
        normalize(residual);
    else
        normalize(x);
}

template <typename T, typename R>
void norm(ThreadPool& pool, const NormArgs& args) {
    int64_t size = args.size, rows_a_part = rows_per_part(args.rows, size);
    const T *weight = static_cast<const T*>(args.weight), *bias = static_cast<const T*>(args.bias);
    pool.run(static_cast<int>(ceil_div(args.rows, rows_a_part)), [&](int part) {
        int64_t end = std::min(args.rows, (part + 1) * rows_a_part);
        for (int64_t row = part * rows_a_part; row < end; row++) {
            auto of_row = [&](auto* rows) { return rows ? rows + row * size : nullptr; };
            const T* x = of_row(static_cast<const T*>(args.x));
            T* out = of_row(static_cast<T*>(args.out));
            R* residual = of_row(static_cast<R*>(args.residual));
            if (args.is_centred)
                norm_row<true>(x, weight, bias, residual, out, size, args.eps);
            else
                norm_row<false>(x, weight, bias, residual, out, size, args.eps);
        }
    });
}

// Rotates one head, dimension i with i + half.
template <typename T, typename R>
void rotate(const T* from, const float* cosines, const float* sines, R* to, int64_t half) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        Floats first = load(from + i), second = load(from + half + i);
        Floats cosine = load(cosines + i), sine = load(sines + i);
        store(to + i, first * cosine - second * sine);
        store(to + half + i, second * cosine + first * sine);
    }
    for (; i < half; i++) {
        float first = to_float(from[i]), second = to_float(from[half + i]);
        round_to(&to[i], first * cosines[i] - second * sines[i]);
        round_to(&to[half + i], second * cosines[i] + first * sines[i]);
    }
}

// Replaces each two lanes that are STEP apart by their sum and their difference, for STEP and all smaller steps.
template <int STEP = LANES / 2, int... LANE>
PAGODA_INLINE Floats mix_lanes(Floats value, std::integer_sequence<int, LANE...> lanes) {
    const Floats signs{(LANE & STEP ? -1.0f : 1.0f)...};
    value = pick<STEP, 0>(value, value) + pick<STEP, 1>(value, value) * signs;
    if constexpr (STEP == 1)
        return value;
    else
        return mix_lanes<STEP / 2>(value, lanes);
}

// `mix` of one head, in place.
inline void mix_head(float* head, int64_t size) {
    int64_t half = size / 2, width = half & -half;
    auto mix_pairs = [&](int64_t first, int64_t step) {  // `step` dimensions with those behind them
        int64_t i = first, end = first + step;
        for (; i + LANES <= end; i += LANES) {
            Floats one = load(head + i), two = load(head + i + step);
            store(head + i, one + two);
            store(head + i + step, one - two);
        }
        for (; i < end; i++) {
            float one = head[i], two = head[i + step];
            head[i] = one + two;
            head[i + step] = one - two;
        }
    };
    mix_pairs(0, half);
    bool has_vectors = width % LANES == 0;
    for (int64_t step = width / 2; step >= (has_vectors ? LANES : 1); step /= 2)
        for (int64_t first = 0; first < size; first += 2 * step) mix_pairs(first, step);
    float scale = 1.0f / std::sqrt(2.0f * static_cast<float>(width));
    int64_t i = 0;
    if (has_vectors)
        for (; i < size; i += LANES) store(head + i, mix_lanes(load(head + i), std::make_integer_sequence<int, LANES>{}) * scale);
    for (; i < size; i++) head[i] *= scale;
}

// `quantize_heads` of one head. NaN or infinity makes its scale NaN.
template <typename T>
void quantize_head(const T* head, int8_t* to, float* scale, int64_t size) {
    constexpr float GREATEST = 127;
    int64_t whole = size / LANES * LANES;
    Floats most{}, spoiled{};
    for (int64_t i = 0; i < whole; i += LANES) {
        Floats value = load(head + i);
        most = max(max(value, -value), most);
        spoiled += value * 0.0f;
    }
    float top = greatest(most), broken = sum(spoiled);
    for (int64_t i = whole; i < size; i++) {
        float value = to_float(head[i]);
        top = std::max(top, std::fabs(value));
        broken += value * 0.0f;
    }
    float step = top / GREATEST + broken;
    if (step == 0) step = 1;
    *scale = step;
    if (step != step) {
        std::memset(to, 0, size);
        return;
    }
    // The scale of a head near the least float may be so inexact that a quotient exceeds the greatest.
    auto quotient = [&](Floats value) {
        value = max(value / step, broadcast(-GREATEST));
        return value < GREATEST ? value : broadcast(GREATEST);
    };
    for (int64_t i = 0; i < whole; i += LANES) store(to + i, quotient(load(head + i)));
    int8_t last[LANES];
    for (int64_t i = whole; i < size; i++) {
        store(last, quotient(broadcast(to_float(head[i]))));
        to[i] = last[0];
    }
}

template <typename T>
void rope_and_store_kv(ThreadPool& pool, const RopeArgs& args) {
    int64_t head_dim = args.head_dim, half = head_dim / 2;
    int64_t heads = args.num_heads + 2 * args.num_kv_heads;
    int64_t tokens_a_part = rows_per_part(args.num_tokens, heads * head_dim);
    pool.run(ceil_div(args.num_tokens, tokens_a_part), [&](int part) {
        int64_t end = std::min(args.num_tokens, (part + 1) * tokens_a_part);
        for (int64_t token = part * tokens_a_part; token < end; token++) {
            const T* from = static_cast<const T*>(args.qkv) + token * heads * head_dim;
            const float *cosines = args.cosines + token * half, *sines = args.sines + token * half;
            T* queries = static_cast<T*>(args.queries) + token * args.num_heads * head_dim;
            static thread_local std::vector<float> room;
            room.resize(std::max<size_t>(room.size(), head_dim));
            float* mixed = room.data();
            for (int64_t head = 0; head < args.num_heads; head++, queries += head_dim) {
                if (!args.key_scales) {
                    rotate(from + head * head_dim, cosines, sines, queries, half);
                    continue;
                }
                rotate(from + head * head_dim, cosines, sines, mixed, half);
                mix_head(mixed, head_dim);
                int64_t i = 0;
                for (; i + LANES <= head_dim; i += LANES) store(queries + i, load(mixed + i));
                for (; i < head_dim; i++) round_to(&queries[i], mixed[i]);
            }
            int64_t slot = args.slots[token];
            if (slot < 0) continue;
            from += args.num_heads * head_dim;
            const T* from_values = from + args.num_kv_heads * head_dim;
            int64_t place = slot * args.num_kv_heads, at = place * head_dim;
            if (!args.key_scales) {
                for (int64_t head = 0; head < args.num_kv_heads; head++)
                    rotate(from + head * head_dim, cosines, sines, static_cast<T*>(args.keys) + at + head * head_dim, half);
                std::memcpy(static_cast<T*>(args.values) + at, from_values, args.num_kv_heads * head_dim * sizeof(T));
                continue;
            }
            for (int64_t head = 0; head < args.num_kv_heads; head++, place++, at += head_dim) {
                rotate(from + head * head_dim, cosines, sines, mixed, half);
                if (args.centre)
                    for (int64_t i = 0; i < head_dim; i++) mixed[i] -= args.centre[head * head_dim + i];
                mix_head(mixed, head_dim);
                quantize_head(mixed, static_cast<int8_t*>(args.keys) + at, args.key_scales + place, head_dim);
                quantize_head(from_values + head * head_dim, static_cast<int8_t*>(args.values) + at, args.value_scales + place, head_dim);
            }
        }
    });
}

// The index of a row's first maximum among the elements that the mask allows; -1 if they hold NaN, or their maximum is
// infinite. Most masks allow few elements, so words without a bit are skipped.
template <bool IS_MASKED, typename T>
int64_t argmax_row(const T* row, const uint32_t* mask, int64_t size) {
    auto bits_of = [&](int64_t word) { return IS_MASKED ? mask[word] : UINT32_MAX; };
    Floats best = broadcast(-INFINITY);
    Ints word_of_best{}, is_nan{};
    int64_t whole = size / 32;
    for (int64_t word = 0; word < whole; word++) {
        uint32_t bits = bits_of(word);
        if (bits == 0) continue;
        Floats found = broadcast(-INFINITY);
        PAGODA_UNROLL
        for (int i = 0; i < 32; i += LANES) {
            Floats value = load(row + 32 * word + i);
            if constexpr (IS_MASKED) value = keep(bits >> i, value);
            found = max(found, value);
            is_nan |= value != value;
        }
        Ints is_better = found > best;
        best = is_better ? found : best;
        word_of_best = is_better ? static_cast<int32_t>(word) - Ints{} : word_of_best;
    }
    float top = greatest(best);
    bool broken = false;
    for (int lane = 0; lane < LANES; lane++) broken |= is_nan[lane] != 0;
    int64_t at = -1;
    for (int64_t i = 32 * whole; i < size; i++) {
        if (!(bits_of(whole) >> i % 32 & 1)) continue;
        float value = to_float(row[i]);
        broken |= value != value;
        if (value > top) {
            top = value;
            at = i;
        }
    }
    if (broken || !std::isfinite(top)) return -1;
    if (at >= 0) return at;
    int32_t word = INT32_MAX;  // each lane knows the first word that holds its maximum
    for (int lane = 0; lane < LANES; lane++)
        if (best[lane] == top) word = std::min(word, word_of_best[lane]);
    at = int64_t{32} * word;
    while (!(bits_of(word) >> at % 32 & 1) || to_float(row[at]) != top) at++;
    return at;
}

template <typename T>
void argmax(ThreadPool& pool, const T* x, const int64_t* rows, const uint32_t* masks, int64_t* out, int64_t count, int64_t size) {
    pool.run(static_cast<int>(count), [&](int part) {
        const T* row = x + (rows ? rows[part] : part) * size;
        out[part] = masks ? argmax_row<true>(row, masks + part * ceil_div(size, 32), size) : argmax_row<false>(row, nullptr, size);
    });
}

// Replaces what a row's mask does not allow by -inf.
inline void mask_rows(ThreadPool& pool, float* x, const int64_t* rows, const uint32_t* masks, int64_t count, int64_t size) {
    int64_t whole = size / 32;
    pool.run(static_cast<int>(count), [&](int part) {
        float* row = x + rows[part] * size;
        const uint32_t* mask = masks + part * ceil_div(size, 32);
        for (int64_t word = 0; word < whole; word++) {
            uint32_t bits = mask[word];
            if (bits == UINT32_MAX) continue;
            PAGODA_UNROLL
            for (int i = 0; i < 32; i += LANES) store(row + 32 * word + i, keep(bits >> i, load(row + 32 * word + i)));
        }
        for (int64_t i = 32 * whole; i < size; i++)
            if (!(mask[whole] >> i % 32 & 1)) row[i] = -INFINITY;
    });
}

// Each of `count` numbers becomes softcap · tanh(number / softcap).
template <typename T>
void cap(ThreadPool& pool, T* x, int64_t count, float softcap) {
    constexpr int64_t STEP = 1024;
    int64_t steps = ceil_div(count, STEP), steps_a_part = rows_per_part(steps, 4 * STEP);
    pool.run(static_cast<int>(ceil_div(steps, steps_a_part)), [&](int part) {
        int64_t i = part * steps_a_part * STEP, end = std::min(count, i + steps_a_part * STEP);
        for (; i + LANES <= end; i += LANES) store(x + i, hyperbolic_tangent(load(x + i) / softcap) * softcap);
        for (; i < end; i++) round_to(x + i, hyperbolic_tangent(broadcast(to_float(x[i]) / softcap))[0] * softcap);
    });
}
