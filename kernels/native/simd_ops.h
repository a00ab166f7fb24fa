// Operations on LANES lanes. No include guard: each instruction set compiles its own copy.

// Unlike 0 + value, this needs no instruction and keeps -0.
PAGODA_INLINE Floats broadcast(float value) { return value - Floats{}; }

PAGODA_INLINE Floats load(const float* from) {
    Floats value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

PAGODA_INLINE void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

PAGODA_INLINE Floats load(const bf16* from) {
#if PAGODA_LANES == 16  // GCC 12 widens the two halves one by one, as it does those of 8 lanes
    return (Floats)((Words)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256((const __m256i*)from)) << 16);
#elif defined(PAGODA_AVX2)
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
#else
    Halves half;
    std::memcpy(&half, from, sizeof half);
    return (Floats)(__builtin_convertvector(half, Words) << 16);
#endif
}

PAGODA_INLINE Floats load(const int8_t* from) {
#if PAGODA_LANES == 16
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(PAGODA_AVX2)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    SmallInts bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
#endif
}

// Rounds numbers from -127 to 127, ties to even.
PAGODA_INLINE void store(int8_t* to, Floats value) {
    SmallInts bytes = __builtin_convertvector((Ints)(value + 12582912.0f) - 0x4b400000, SmallInts);
    std::memcpy(to, &bytes, sizeof bytes);
}

// Rounds to the nearest, ties to even.
PAGODA_INLINE void store(bf16* to, Floats value) {
#if defined(PAGODA_BF16)
    auto half = (__m256i)_mm512_cvtneps_pbh((__m512)value);  // denormals become 0
#elif defined(PAGODA_AVX2)
    Words bits = (Words)value;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    __m128i half = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)bits), _mm256_extracti128_si256((__m256i)bits, 1));
#else
    Words bits = (Words)value;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Halves half = __builtin_convertvector(bits, Halves);
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

PAGODA_INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }

// Whether a lane is not 0. The lanes are those of a comparison, or counts.
PAGODA_INLINE bool any(Ints lanes) {
#if defined(PAGODA_AVX512)
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#elif defined(PAGODA_AVX2)
    return !_mm256_testz_si256((__m256i)lanes, (__m256i)lanes);
#else
    uint64_t pairs[sizeof lanes / 8], seen = 0;
    std::memcpy(pairs, &lanes, sizeof lanes);
    for (uint64_t pair : pairs) seen |= pair;
    return seen != 0;
#endif
}

template <int... LANE>
PAGODA_INLINE Words one_bit_each(std::integer_sequence<int, LANE...>) {
    return Words{(1u << LANE)...};
}

// The lanes whose bits are set, the lowest bit's first; -inf in the others.
PAGODA_INLINE Floats keep(uint32_t bits, Floats value) {
#if defined(PAGODA_AVX512)
    return (Floats)_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), static_cast<__mmask16>(bits), (__m512)value);
#else
    return (bits & one_bit_each(std::make_integer_sequence<int, LANES>{})) != 0 ? value : broadcast(-INFINITY);
#endif
}

// Blocks of STEP lanes, alternately from two vectors, the even or the odd ones of each: {a0, b0, a2, b2, …} for 1.
template <int STEP, int IS_ODD, int... LANE>
PAGODA_INLINE Floats pick(Floats a, Floats b, std::integer_sequence<int, LANE...>) {
    return __builtin_shufflevector(a, b, ((LANE & STEP ? LANES + LANE - STEP : LANE) + IS_ODD * STEP)...);
}

template <int STEP, int IS_ODD>
PAGODA_INLINE Floats pick(Floats a, Floats b) {
    return pick<STEP, IS_ODD>(a, b, std::make_integer_sequence<int, LANES>{});
}

// Lane i of the result is the sum of the lanes of rows[i]. Each recursion adds neighbours that are STEP lanes apart and
// makes one vector of two.
template <int STEP = 1>
PAGODA_INLINE Floats sum_each(const Floats* rows) {
    if constexpr (STEP == LANES) {
        return rows[0];
    } else {
        Floats half[LANES / STEP / 2];
        PAGODA_UNROLL
        for (int i = 0; i < LANES / STEP / 2; i++)
            half[i] = pick<STEP, 0>(rows[2 * i], rows[2 * i + 1]) + pick<STEP, 1>(rows[2 * i], rows[2 * i + 1]);
        return sum_each<2 * STEP>(half);
    }
}

template <int STEP = LANES / 2>
PAGODA_INLINE float sum(Floats a) {
    a = pick<STEP, 0>(a, a) + pick<STEP, 1>(a, a);
    if constexpr (STEP == 1)
        return a[0];
    else
        return sum<STEP / 2>(a);
}

template <int STEP = LANES / 2>
PAGODA_INLINE float greatest(Floats a) {
    a = max(pick<STEP, 0>(a, a), pick<STEP, 1>(a, a));
    if constexpr (STEP == 1)
        return a[0];
    else
        return greatest<STEP / 2>(a);
}

// Swaps rows[i][j] and rows[j][i]; each recursion handles one bit of i and j.
template <int STEP = 1>
PAGODA_INLINE void transpose(Floats* rows) {
    PAGODA_UNROLL
    for (int i = 0; i < LANES; i++) {
        if (i & STEP) continue;
        Floats a = rows[i], b = rows[i + STEP];
        rows[i] = pick<STEP, 0>(a, b);
        rows[i + STEP] = pick<STEP, 1>(a, b);
    }
    if constexpr (2 * STEP < LANES) transpose<2 * STEP>(rows);
}

// e^x is series · 2^power. Cody–Waite reduction, Taylor polynomial.
struct Exponential {
    Floats series;
    Ints power;
};

PAGODA_INLINE Exponential split_exponential(Floats x) {
    constexpr float MAGIC = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer, kept in the low bits
    Floats shifted = x * 1.44269504f + MAGIC;
    Floats whole = shifted - MAGIC;
    Floats rest = x - whole * 0.693359375f;
    rest = rest - whole * -2.12194440e-4f;
    Floats series = rest * (1.0f / 720) + (1.0f / 120);
    series = series * rest + (1.0f / 24);
    series = series * rest + (1.0f / 6);
    series = series * rest + 0.5f;
    series = series * rest + 1.0f;
    series = series * rest + 1.0f;
    return {series, (Ints)shifted - 0x4b400000};
}

// e^x to about 2 ulp; 0 below -87, infinity above 88.7, NaN for NaN.
PAGODA_INLINE Floats exponential(Floats x) {
    Floats clamped = x > 88.7f ? broadcast(88.7f) : x;
    clamped = clamped < -87.3f ? broadcast(-87.3f) : clamped;
    auto [series, power] = split_exponential(clamped);
    // 2^power by its exponent bits, in two factors because 2^128 alone would be infinite.
    Ints half = power >> 1;
    series = series * (Floats)((half + 127) << 23) * (Floats)((power - half + 127) << 23);
    series = x > 88.7f ? broadcast(INFINITY) : series;
    series = x < -87.3f ? broadcast(0.0f) : series;
    return x == x ? series : x;
}

// The same for x that is not positive, such as scores minus their maximum, with two thirds of the operations.
PAGODA_INLINE Floats exponential_of_negative(Floats x) {
    auto [series, power] = split_exponential(x < -87.3f ? broadcast(-87.3f) : x);
    return x < -87.3f ? broadcast(0.0f) : series * (Floats)((power + 127) << 23);
}

// tanh(x) to a few ulp.
PAGODA_INLINE Floats hyperbolic_tangent(Floats x) {
    Floats square = x * x;
    Floats far = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);  // which would lose digits near 0
    Floats series = square * (62.0f / 2835) - 17.0f / 315;
    series = series * square + 2.0f / 15;
    series = series * square - 1.0f / 3;
    return square < 0.0625f ? x + x * square * series : far;
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

template <typename T>
struct TypeOf {
    using type = T;
};

// Calls op with a count of 1 to MOST as a constant.
template <int MOST, typename Op>
void with_count(int64_t count, const Op& op) {
    if constexpr (MOST > 0) {
        if (count == MOST)
            op(std::integral_constant<int, MOST>{});
        else
            with_count<MOST - 1>(count, op);
    }
}
