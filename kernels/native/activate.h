// The activations of feed-forward layers. No include guard: each instruction set compiles its own copy.

template <Function FUNCTION>
PAGODA_INLINE Floats apply(Floats x, const float* parameters) {
    if constexpr (FUNCTION == Function::silu) return x / (1.0f + exponential(-x));
    // gelu by tanh is x / (1 + exp(-y)) with y = 2 sqrt(2 / pi) (x + 0.044715 x^3).
    if constexpr (FUNCTION == Function::gelu_tanh) return x / (1.0f + exponential(-1.5957691216f * (x + 0.044715f * x * x * x)));
    if constexpr (FUNCTION == Function::gelu) {
        // x Φ(x). With z = |x| / sqrt(2), the tail of the distribution is erfc(z) / 2 = t p(t) exp(-z^2), t = 1 / (1 + z / 2).
        // The polynomial p was fitted to that by least squares; its relative error is below 1e-8.
        constexpr float SERIES[] = {0.0219805592f, -0.119207358f, 0.250545977f, -0.231480618f, 0.0685412615f, -0.0304054376f,
                                    0.0468093591f, 0.0876896751f, 0.123431044f, 0.141048196f,  0.141047346f};
        Floats t = 1.0f / (1.0f + 0.3535533906f * max(x, -x)), p = broadcast(SERIES[0]);
        PAGODA_UNROLL
        for (int i = 1; i < 11; i++) p = p * t + SERIES[i];
        Floats tail = t * p * exponential_of_negative(-0.5f * x * x);
        return x * (x < 0.0f ? tail : 1.0f - tail);
    }
    if constexpr (FUNCTION == Function::relu) return x < 0.0f ? broadcast(0.0f) : x;
    if constexpr (FUNCTION == Function::relu2) return x < 0.0f ? broadcast(0.0f) : x * x;
    if constexpr (FUNCTION == Function::clamped_silu) {
        x = x > parameters[0] ? broadcast(parameters[0]) : x;
        return x / (1.0f + exponential(-1.702f * x));
    }
    if constexpr (FUNCTION == Function::xielu) {
        Floats below = exponential(x > -1e-6f ? broadcast(-1e-6f) : x) - 1.0f - x;
        return (x > 0.0f ? parameters[0] * x * x : parameters[1] * below) + 0.5f * x;
    }
}

// What the result of a gate is multiplied by.
template <Function FUNCTION>
PAGODA_INLINE Floats factor(Floats up, const float* parameters) {
    if constexpr (FUNCTION != Function::clamped_silu) return up;
    up = up > parameters[0] ? broadcast(parameters[0]) : up;
    return (up < -parameters[0] ? broadcast(-parameters[0]) : up) + 1.0f;
}

template <Function FUNCTION, typename T, typename Out>
void activate_row(const T* x, const Activation& by, int64_t size, Out* out) {
    const float* parameters = by.parameters;
    auto each = [&](const auto& value) PAGODA_INLINE_LAMBDA {
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) store(out + i, value([&](const T* from) { return load(from + i); }));
        for (; i < size; i++) round_to(out + i, value([&](const T* from) { return broadcast(to_float(from[i])); })[0]);
    };
    if (by.is_gated)
        each([&](const auto& read) { return apply<FUNCTION>(read(x), parameters) * factor<FUNCTION>(read(x + size), parameters); });
    else
        each([&](const auto& read) { return apply<FUNCTION>(read(x), parameters); });
}

// Writes `size` numbers of a row.
template <typename T, typename Out>
void activate_row(const T* x, const Activation& by, int64_t size, Out* out) {
    switch (by.function) {
        case Function::none: return;
        case Function::silu: return activate_row<Function::silu>(x, by, size, out);
        case Function::gelu_tanh: return activate_row<Function::gelu_tanh>(x, by, size, out);
        case Function::gelu: return activate_row<Function::gelu>(x, by, size, out);
        case Function::relu: return activate_row<Function::relu>(x, by, size, out);
        case Function::relu2: return activate_row<Function::relu2>(x, by, size, out);
        case Function::clamped_silu: return activate_row<Function::clamped_silu>(x, by, size, out);
        case Function::xielu: return activate_row<Function::xielu>(x, by, size, out);
    }
}

template <typename T>
void activate(ThreadPool& pool, const T* x, T* out, int64_t rows, int64_t size, const Activation& by) {
    int64_t rows_a_part = rows_per_part(rows, 4 * size);
    pool.run(static_cast<int>(ceil_div(rows, rows_a_part)), [&](int part) {
        int64_t end = std::min(rows, (part + 1) * rows_a_part);
        for (int64_t row = part * rows_a_part; row < end; row++) activate_row(x + row * by.width() * size, by, size, out + row * size);
    });
}
