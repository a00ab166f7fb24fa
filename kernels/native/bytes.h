// An instruction set's operations on bytes: products of activations (0…255) and weights (-128…127), four to a lane, and
// conversions from and to floats. No include guard: each instruction set compiles its own copy.
//
// dot4        sums + the four products of each lane.
// dot4_small  the same for small weights, at most a few times from zero; `total` then gives the sums. AVX2 adds them in 16
//             bits, in which 8 · 2 · 255 · 8 fits: eight times weights in -8…7, four times -16…16, twice -32…31.
// dot4_codes  the same for weights that are not negative, eight times 0…15 or four times 0…31. Except on NEON the activations are
//             the signed factor: a stored 0 is then in the middle of their range, so that `least` and its rounding error are small.
// look_up     the bytes of a table of 16, which every 128 bits of `table` hold, by codes in the bytes of `codes`.
//
// If the processor multiplies only signed bytes, ACTIVATION_SHIFT is subtracted from stored activations. Those that
// dot4_codes multiplies are less by CODES_SHIFT.

constexpr int ACTIVATION_SHIFT =
#if defined(PAGODA_NEON) && !defined(PAGODA_I8MM)
    128;
#else
    0;
#endif

// AVX2 adds the products of two neighbours in 16 bits and saturates, so int8 weights are packed with |w0 + w1| ≤ 128. Weights
// of opposite signs need no limit, since activations are not negative.
constexpr bool PAIRS_ARE_LIMITED =
#if defined(PAGODA_AVX2) && !defined(PAGODA_VNNI)
    true;
#else
    false;
#endif

PAGODA_INLINE Ints load_ints(const void* from) {
    Ints value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// Activations come in vectors of QUADS times four inputs; dot4<QUAD> multiplies four of them by every lane's weights.
#if defined(PAGODA_NEON)
constexpr int QUADS = 4;

PAGODA_INLINE Ints load_activations(const uint8_t* from) { return load_ints(from); }
#else
constexpr int QUADS = 1;

PAGODA_INLINE Ints load_activations(const uint8_t* from) {
    int32_t four;
    std::memcpy(&four, from, sizeof four);
    return four - Ints{};
}
#endif

constexpr int CODES_SHIFT = QUADS == 1 ? 128 : ACTIVATION_SHIFT;

constexpr bool KEEPS_SUMS = REGISTERS == 16 || QUADS > 1;  // otherwise GCC moves so many loads ahead that it runs out of registers

#if defined(PAGODA_AVX512)

template <int QUAD>
PAGODA_INLINE Ints dot4(Ints sums, Ints activations, Ints weights) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)activations, (__m512i)weights);
}

PAGODA_INLINE void store_bytes(uint8_t* to, Ints value) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)value)); }

PAGODA_INLINE Floats to_floats(Ints value) { return (Floats)_mm512_cvtepi32_ps((__m512i)value); }

PAGODA_INLINE Floats load_fp16(const uint16_t* from) { return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }

#elif defined(PAGODA_AVX2)

#if defined(PAGODA_VNNI)
template <int QUAD>
PAGODA_INLINE Ints dot4(Ints sums, Ints activations, Ints weights) {
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)activations, (__m256i)weights);
}
#else
template <int QUAD>
PAGODA_INLINE Ints dot4(Ints sums, Ints activations, Ints weights) {
    __m256i pairs = _mm256_maddubs_epi16((__m256i)activations, (__m256i)weights);
    return sums + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

template <int QUAD>
PAGODA_INLINE Ints dot4_small(Ints sums, Ints activations, Ints weights) {
    return (Ints)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)activations, (__m256i)weights));
}

PAGODA_INLINE Ints total(Ints sums) { return (Ints)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)); }
#endif

PAGODA_INLINE void store_bytes(uint8_t* to, Ints value) {
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)value), _mm256_extracti128_si256((__m256i)value, 1));
    _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(words, words));
}

PAGODA_INLINE Floats to_floats(Ints value) { return (Floats)_mm256_cvtepi32_ps((__m256i)value); }

PAGODA_INLINE Floats load_fp16(const uint16_t* from) { return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }

#elif defined(PAGODA_NEON)

template <int QUAD>
PAGODA_INLINE Ints dot4(Ints sums, Ints activations, Ints weights) {
#if defined(PAGODA_I8MM)
    return (Ints)vsudotq_laneq_s32((int32x4_t)sums, (int8x16_t)weights, (uint8x16_t)activations, QUAD);
#else
    return (Ints)vdotq_laneq_s32((int32x4_t)sums, (int8x16_t)weights, (int8x16_t)activations, QUAD);
#endif
}

PAGODA_INLINE void store_bytes(uint8_t* to, Ints value) {
    uint16x4_t words = vmovn_u32((uint32x4_t)value);
    uint8x8_t bytes = vmovn_u16(vcombine_u16(words, words));
    std::memcpy(to, &bytes, LANES);
}

PAGODA_INLINE Floats to_floats(Ints value) { return (Floats)vcvtq_f32_s32((int32x4_t)value); }

PAGODA_INLINE Floats load_fp16(const uint16_t* from) { return (Floats)vcvt_f32_f16(vld1_f16((const float16_t*)from)); }

#else

template <int QUAD>
PAGODA_INLINE Ints dot4(Ints sums, Ints activations, Ints weights) {
    for (int shift = 0; shift < 32; shift += 8)
        sums += (Ints)((Words)activations >> shift & 255) * ((Ints)((Words)weights << (24 - shift)) >> 24);
    return sums;
}

PAGODA_INLINE void store_bytes(uint8_t* to, Ints value) {
    for (int lane = 0; lane < LANES; lane++) to[lane] = static_cast<uint8_t>(value[lane]);
}

PAGODA_INLINE Floats to_floats(Ints value) { return __builtin_convertvector(value, Floats); }

// Moves exponent and fraction to their places in a float, where the exponent is then 112 too small.
PAGODA_INLINE Floats load_fp16(const uint16_t* from) {
    Words bits;
    for (int lane = 0; lane < LANES; lane++) bits[lane] = from[lane];
    Floats magnitude = (Floats)((bits & 0x7fff) << 13) * 0x1p112f;
    return (Floats)((Words)magnitude | (bits & 0x8000) << 16);
}

#endif

#if !defined(PAGODA_AVX2) || defined(PAGODA_VNNI)
template <int QUAD>
PAGODA_INLINE Ints dot4_small(Ints sums, Ints activations, Ints weights) { return dot4<QUAD>(sums, activations, weights); }

PAGODA_INLINE Ints total(Ints sums) { return sums; }
#endif

template <int QUAD>
PAGODA_INLINE Ints dot4_codes(Ints sums, Ints activations, Ints codes) {
    return QUADS == 1 ? dot4_small<QUAD>(sums, codes, activations) : dot4_small<QUAD>(sums, activations, codes);
}

PAGODA_INLINE Ints look_up(Ints table, Ints codes) {
#if defined(PAGODA_AVX512)
    return (Ints)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif defined(PAGODA_AVX2)
    return (Ints)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
#elif defined(PAGODA_NEON)
    return (Ints)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)codes);
#else
    uint8_t bytes[sizeof table], from[sizeof table];
    std::memcpy(bytes, &table, sizeof table);
    std::memcpy(from, &codes, sizeof codes);
    for (uint8_t& byte : from) byte = bytes[byte];
    std::memcpy(&table, from, sizeof table);
    return table;
#endif
}

// Makes tables for `look_up` of 16 values, or two tables of their lower and their higher digits: value = 16 * high + low.
template <int DIGITS>
PAGODA_INLINE void load_table(const uint8_t* values, Ints (&tables)[DIGITS]) {
    int8_t bytes[DIGITS][sizeof(Ints)];
    for (size_t i = 0; i < sizeof(Ints); i++) {
        auto value = static_cast<int8_t>(values[i % 16]);
        bytes[0][i] = DIGITS == 1 ? value : value & 15;
        if (DIGITS == 2) bytes[DIGITS - 1][i] = static_cast<int8_t>(value >> 4);
    }
    std::memcpy(tables, bytes, sizeof bytes);
}

// Calls op with 0 to QUADS - 1 as constants.
template <int QUAD = 0, typename Op>
PAGODA_INLINE void for_each_quad(const Op& op) {
    op(std::integral_constant<int, QUAD>{});
    if constexpr (QUAD + 1 < QUADS) for_each_quad<QUAD + 1>(op);
}

#include "fp16.h"
