// Operations on sixteen lanes. No include guard: each instruction set compiles its own copy.

// Not 0 + value, which is an operation: it turns -0 into 0.
PAGODA_INLINE f32x16 broadcast(float value) { return value - f32x16{}; }

PAGODA_INLINE f32x16 load(const float* from) {
    f32x16 value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

PAGODA_INLINE void store(float* to, f32x16 value) { std::memcpy(to, &value, sizeof value); }

PAGODA_INLINE f32x16 load(const bf16* from) {
    u16x16 half;
    std::memcpy(&half, from, sizeof half);
    return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
}

// To the nearest, ties to even.
PAGODA_INLINE void store(bf16* to, f32x16 value) {
#if defined(PAGODA_BF16)
    auto half = (__m256i)_mm512_cvtneps_pbh((__m512)value);  // what would be a denormal becomes 0
#else
    u32x16 bits = (u32x16)value;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u16x16 half = __builtin_convertvector(bits, u16x16);
#endif
    std::memcpy(to, &half, sizeof half);
}

PAGODA_INLINE float to_float(float value) { return value; }

PAGODA_INLINE float to_float(bf16 value) {
    uint32_t bits = uint32_t{value.bits} << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

PAGODA_INLINE f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }

// a[i] + a[i + 1] of each pair of both, interleaved: the rungs of a ladder that sums the lanes of sixteen vectors.
#define PAGODA_RUNG(NAME, EVEN, ODD)                                              \
    PAGODA_INLINE f32x16 NAME(f32x16 a, f32x16 b) {                               \
        return __builtin_shufflevector(a, b, EVEN) + __builtin_shufflevector(a, b, ODD); \
    }
#define PAGODA_LIST(...) __VA_ARGS__
PAGODA_RUNG(add_by_1, PAGODA_LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
            PAGODA_LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
PAGODA_RUNG(add_by_2, PAGODA_LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
            PAGODA_LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
PAGODA_RUNG(add_by_4, PAGODA_LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
            PAGODA_LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
PAGODA_RUNG(add_by_8, PAGODA_LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
            PAGODA_LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))

// Lane i of the result is the sum of the lanes of rows[i].
PAGODA_INLINE f32x16 sum_each(const f32x16* rows) {
    f32x16 by_1[8], by_2[4], by_4[2];
    for (int i = 0; i < 8; i++) by_1[i] = add_by_1(rows[2 * i], rows[2 * i + 1]);
    for (int i = 0; i < 4; i++) by_2[i] = add_by_2(by_1[2 * i], by_1[2 * i + 1]);
    for (int i = 0; i < 2; i++) by_4[i] = add_by_4(by_2[2 * i], by_2[2 * i + 1]);
    return add_by_8(by_4[0], by_4[1]);
}

PAGODA_INLINE float sum(f32x16 a) {
    a = add_by_8(a, a);
    a = add_by_4(a, a);
    a = add_by_2(a, a);
    return a[0] + a[1];
}

PAGODA_INLINE float greatest(f32x16 a) {
    a = max(a, __builtin_shufflevector(a, a, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    a = max(a, __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    a = max(a, __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return a[0] > a[1] ? a[0] : a[1];
}

// rows[i][j] and rows[j][i] change places: in each round those i and j that differ in one bit.
PAGODA_INLINE void transpose(f32x16* rows) {
    f32x16 by_1[16], by_2[16], by_4[16];
    for (int i = 0; i < 16; i += 2) {
        f32x16 a = rows[i], b = rows[i + 1];
        by_1[i] = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        by_1[i + 1] = __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
    for (int i = 0; i < 16; i++) {
        if (i & 2) continue;
        f32x16 a = by_1[i], b = by_1[i + 2];
        by_2[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        by_2[i + 2] = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    for (int i = 0; i < 16; i++) {
        if (i & 4) continue;
        f32x16 a = by_2[i], b = by_2[i + 4];
        by_4[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        by_4[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
    for (int i = 0; i < 8; i++) {
        f32x16 a = by_4[i], b = by_4[i + 8];
        rows[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        rows[i + 8] = __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
}

// e^x is series · 2^power. Cody–Waite reduction, Taylor polynomial.
struct Exponential {
    f32x16 series;
    i32x16 power;
};

PAGODA_INLINE Exponential split_exponential(f32x16 x) {
    constexpr float MAGIC = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer, kept in the low bits
    f32x16 shifted = x * 1.44269504f + MAGIC;
    f32x16 whole = shifted - MAGIC;
    f32x16 rest = x - whole * 0.693359375f;
    rest = rest - whole * -2.12194440e-4f;
    f32x16 series = rest * (1.0f / 720) + (1.0f / 120);
    series = series * rest + (1.0f / 24);
    series = series * rest + (1.0f / 6);
    series = series * rest + 0.5f;
    series = series * rest + 1.0f;
    series = series * rest + 1.0f;
    return {series, (i32x16)shifted - 0x4b400000};
}

// e^x to about 2 ulp; 0 below -87, infinity above 88.7, NaN for NaN.
PAGODA_INLINE f32x16 exponential(f32x16 x) {
    f32x16 clamped = x > 88.7f ? broadcast(88.7f) : x;
    clamped = clamped < -87.3f ? broadcast(-87.3f) : clamped;
    auto [series, power] = split_exponential(clamped);
    // 2^power by its exponent bits, in two factors because 2^128 alone would be infinite.
    i32x16 half = power >> 1;
    series = series * (f32x16)((half + 127) << 23) * (f32x16)((power - half + 127) << 23);
    series = x > 88.7f ? broadcast(INFINITY) : series;
    series = x < -87.3f ? broadcast(0.0f) : series;
    return x == x ? series : x;
}

// The same of what is not positive, as scores less the greatest of them are: two thirds of the operations.
PAGODA_INLINE f32x16 exponential_of_negative(f32x16 x) {
    auto [series, power] = split_exponential(x < -87.3f ? broadcast(-87.3f) : x);
    return x < -87.3f ? broadcast(0.0f) : series * (f32x16)((power + 127) << 23);
}

PAGODA_INLINE void round_to(float* to, float value) { *to = value; }

PAGODA_INLINE void round_to(bf16* to, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    to->bits = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Calls op<float> or op<bf16>.
template <typename Op>
void with_type(Dtype dtype, const Op& op) {
    if (dtype == Dtype::float32)
        op(float{});
    else
        op(bf16{});
}
