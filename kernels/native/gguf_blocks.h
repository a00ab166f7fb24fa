// Decodes the blocks of GGUF tensors. checkpoints/gguf_blocks.py is the reference, and names the source of the layouts.
// Loading is bound by memory once a loop is vectorized at all, so this is compiled once, for the least processor.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "ops.h"

namespace pagoda {
namespace {

#include "fp16.h"

// In the order of KINDS in gguf_blocks.py.
enum class Blocks { q4_0, q4_1, q4_k, q5_0, q5_1, q5_k, q6_k, q8_0, iq4_nl, iq4_xs, mxfp4, count };

inline uint16_t load_word(const uint8_t* from) {
    uint16_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

inline float load_half(const uint8_t* from) {
    uint16_t bits = load_word(from);
    return (bits & 0x7c00) == 0x7c00 ? NAN : from_fp16(bits);  // a file with such numbers is refused when it is checked
}

// What a block consists of, and where its numbers go: `values` [GROUPS, GROUP] int8, or in 4 bits [GROUPS, GROUP / 2] bytes
// whose low nibbles are the first half; `scales` and `minimums` [GROUPS] fp16.
template <int BYTES_, int GROUPS_, int BITS_, bool HAS_MINIMUM_, int GROUP_ = 32>
struct Layout {
    static constexpr int BYTES = BYTES_, GROUPS = GROUPS_, BITS = BITS_, GROUP = GROUP_, SIZE = GROUPS * GROUP;
    static constexpr int VALUE_BYTES = BITS == 4 ? SIZE / 2 : SIZE;
    static constexpr bool HAS_MINIMUM = HAS_MINIMUM_;
};

struct Q4_0 : Layout<18, 1, 4, true> {
    static void read(const uint8_t* block, uint8_t* values, uint16_t* scales, uint16_t* minimums) {
        std::memcpy(values, block + 2, 16);
        *scales = load_word(block);
        *minimums = to_fp16(-8 * load_half(block));
    }
};

struct Q4_1 : Layout<20, 1, 4, true> {
    static void read(const uint8_t* block, uint8_t* values, uint16_t* scales, uint16_t* minimums) {
        std::memcpy(values, block + 4, 16);
        *scales = load_word(block);
        *minimums = load_word(block + 2);
    }
};

struct Iq4Nl : Layout<18, 1, 4, false> {
    static void read(const uint8_t* block, uint8_t* values, uint16_t* scales, uint16_t*) {
        std::memcpy(values, block + 2, 16);
        *scales = load_word(block);
    }
};

struct Mxfp4 : Layout<17, 1, 4, false> {
    static void read(const uint8_t* block, uint8_t* values, uint16_t* scales, uint16_t*) {
        std::memcpy(values, block + 1, 16);
        uint32_t bits = (*block ? *block - 1u : 0u) << 23;  // of 2 ** (*block - 128), the least two of which are zero in fp16
        float scale;
        std::memcpy(&scale, &bits, sizeof scale);
        *scales = to_fp16(scale);
    }
};

struct Q8_0 : Layout<34, 1, 8, false> {
    static void read(const uint8_t* block, uint8_t* values, uint16_t* scales, uint16_t*) {
        std::memcpy(values, block + 2, 32);
        *scales = load_word(block);
    }
};

// Sixteen bytes of a block, which compilers keep in one register of every instruction set.
typedef uint8_t Sixteen __attribute__((vector_size(16)));

inline Sixteen load_sixteen(const uint8_t* from) {
    Sixteen bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return bytes;
}

inline void store_sixteen(uint8_t* to, Sixteen bytes) { std::memcpy(to, &bytes, sizeof bytes); }

// A group's 32 nibbles with a fifth bit each, less `offset` (0 or 16). Eight bytes of a word are worked on at a time: compilers
// do not vectorize the spreading of bits.
template <int OFFSET>
inline void read_five_bits(const uint8_t* fifth, const uint8_t* nibbles, uint8_t* values) {
    constexpr uint64_t ONES = 0x0101010101010101;
    for (int i = 0; i < 4; i++) {
        uint64_t word, bits = fifth[i] * ONES & 0x8040201008040201;  // byte j has bit j alone
        std::memcpy(&word, nibbles + 8 * (i % 2), sizeof word);
        word = (i < 2 ? word : word >> 4) & 15 * ONES;
        word |= (bits + 127 * ONES) >> 3 & 16 * ONES;  // no byte carries: a bit is at most 128
        if (OFFSET) word = ((word | 128 * ONES) - OFFSET * ONES) ^ 128 * ONES;
        std::memcpy(values + 8 * i, &word, sizeof word);
    }
}

struct Q5_0 : Layout<22, 1, 5, false> {
    static void read(const uint8_t* block, uint8_t* values, uint16_t* scales, uint16_t*) {
        read_five_bits<16>(block + 2, block + 6, values);
        *scales = load_word(block);
    }
};

struct Q5_1 : Layout<24, 1, 5, true> {
    static void read(const uint8_t* block, uint8_t* values, uint16_t* scales, uint16_t* minimums) {
        read_five_bits<0>(block + 4, block + 8, values);
        *scales = load_word(block);
        *minimums = load_word(block + 2);
    }
};

// Eight scales and minimums of 6 bits each, and a factor of all. A minimum makes up for its scale's rounding to fp16 where
// codes are in the middle.
inline void read_k_scales(const uint8_t* block, float middle_code, uint16_t* scales, uint16_t* minimums) {
    uint32_t words[3], codes[4];
    std::memcpy(words, block + 4, sizeof words);
    for (int kind = 0; kind < 2; kind++) {  // scales, then minimums
        codes[2 * kind] = words[kind] & 0x3f3f3f3f;
        codes[2 * kind + 1] = (words[2] >> 4 * kind & 0x0f0f0f0f) | (words[kind] >> 2 & 0x30303030);
    }
    uint8_t six_bits[16];
    std::memcpy(six_bits, codes, sizeof six_bits);
    float factor = load_half(block), factor_of_minimums = load_half(block + 2);
    uint16_t found[16];  // which nothing else can refer to, so that compilers vectorize the loop
    for (int group = 0; group < 8; group++) {
        float exact = factor * static_cast<float>(six_bits[group]);
        float least = factor_of_minimums * static_cast<float>(six_bits[8 + group]);
        found[group] = to_fp16(exact);
        found[8 + group] = to_fp16((exact - from_fp16(found[group])) * middle_code - least);
    }
    std::memcpy(scales, found, 16);
    std::memcpy(minimums, found + 8, 16);
}

struct Q4_K : Layout<144, 8, 4, true> {
    static void read(const uint8_t* block, uint8_t* values, uint16_t* scales, uint16_t* minimums) {
        read_k_scales(block, 7.5f, scales, minimums);
        for (int pair = 0; pair < 4; pair++) {  // of groups: the first has the low nibbles
            Sixteen first = load_sixteen(block + 16 + 32 * pair), second = load_sixteen(block + 32 + 32 * pair);
            store_sixteen(values + 32 * pair, (first & 15) | second << 4);
            store_sixteen(values + 32 * pair + 16, first >> 4 | (second & 240));
        }
    }
};

struct Q5_K : Layout<176, 8, 5, true> {
    static void read(const uint8_t* block, uint8_t* values, uint16_t* scales, uint16_t* minimums) {
        read_k_scales(block, 15.5f, scales, minimums);
        for (int half = 0; half < 2; half++) {  // of each group
            Sixteen fifth = load_sixteen(block + 16 + 16 * half);
            for (int pair = 0; pair < 4; pair++, fifth >>= 2) {
                Sixteen codes = load_sixteen(block + 48 + 32 * pair + 16 * half);
                uint8_t* to = values + 64 * pair + 16 * half;
                store_sixteen(to, (codes & 15) | (fifth & 1) << 4);
                store_sixteen(to + 32, codes >> 4 | (fifth & 2) << 3);
            }
        }
    }
};

struct Q6_K : Layout<210, 16, 6, false, 16> {
    static void read(const uint8_t* block, uint8_t* values, uint16_t* scales, uint16_t*) {
        float factor = load_half(block + 208);
        for (int group = 0; group < 16; group++)
            scales[group] = to_fp16(factor * static_cast<float>(static_cast<int8_t>(block[192 + group])));
        for (int run = 0; run < 4; run++) {  // of 16 bytes: two in each half, which four groups share
            Sixteen high = load_sixteen(block + 128 + 16 * run);
            const uint8_t* low = block + run / 2 * 64 + run % 2 * 16;
            uint8_t* to = values + run / 2 * 128 + run % 2 * 16;
            for (int part = 0; part < 4; part++, high >>= 2) {
                Sixteen nibbles = load_sixteen(low + part % 2 * 32);
                store_sixteen(to + 32 * part, ((part < 2 ? nibbles & 15 : nibbles >> 4) | (high & 3) << 4) - 32);
            }
        }
    }
};

struct Iq4Xs : Layout<136, 8, 4, false> {
    static void read(const uint8_t* block, uint8_t* values, uint16_t* scales, uint16_t*) {
        std::memcpy(values, block + 8, 128);
        float factor = load_half(block);
        int high = load_word(block + 2);
        for (int group = 0; group < 8; group++) {
            int scale = (block[4 + group / 2] >> group % 2 * 4 & 15) | (high >> 2 * group & 3) << 4;
            scales[group] = to_fp16(factor * static_cast<float>(scale - 32));
        }
    }
};

// Calls op with the layout of a kind of block.
template <typename Op>
auto with_layout(Blocks kind, const Op& op) {
    switch (kind) {
        case Blocks::q4_0: return op(Q4_0{});
        case Blocks::q4_1: return op(Q4_1{});
        case Blocks::q4_k: return op(Q4_K{});
        case Blocks::q5_0: return op(Q5_0{});
        case Blocks::q5_1: return op(Q5_1{});
        case Blocks::q5_k: return op(Q5_K{});
        case Blocks::q6_k: return op(Q6_K{});
        case Blocks::q8_0: return op(Q8_0{});
        case Blocks::iq4_nl: return op(Iq4Nl{});
        case Blocks::iq4_xs: return op(Iq4Xs{});
        default: return op(Mxfp4{});
    }
}

// Reads `count` blocks as codes, scales and minimums.
inline void read_groups(Blocks kind, const uint8_t* blocks, int64_t count, uint8_t* values, uint16_t* scales, uint16_t* minimums) {
    with_layout(kind, [=](auto layout) {
        using L = decltype(layout);
        for (int64_t i = 0; i < count; i++)
            L::read(blocks + i * L::BYTES, values + i * L::VALUE_BYTES, scales + i * L::GROUPS,
                    L::HAS_MINIMUM ? minimums + i * L::GROUPS : nullptr);
    });
}

// Reads `count` blocks as the numbers that they stand for. `table` [16]: what 4-bit codes stand for; null: they are numbers.
inline void read_values(Blocks kind, const uint8_t* blocks, int64_t count, const int8_t* table, float* out) {
    with_layout(kind, [=](auto layout) {
        using L = decltype(layout);
        constexpr int HALF = L::GROUP / 2;
        for (int64_t i = 0; i < count; i++) {
            uint8_t values[L::VALUE_BYTES];
            int8_t whole[L::GROUP];
            uint16_t scales[L::GROUPS], minimums[L::GROUPS];
            L::read(blocks + i * L::BYTES, values, scales, minimums);
            for (int group = 0; group < L::GROUPS; group++) {
                float scale = load_half(reinterpret_cast<const uint8_t*>(scales + group)), minimum = 0;
                if constexpr (L::HAS_MINIMUM) minimum = load_half(reinterpret_cast<const uint8_t*>(minimums + group));
                if constexpr (L::BITS == 4) {
                    const uint8_t* codes = values + group * HALF;
                    for (int j = 0; j < HALF; j++) {
                        whole[j] = static_cast<int8_t>(table ? table[codes[j] & 15] : codes[j] & 15);
                        whole[j + HALF] = static_cast<int8_t>(table ? table[codes[j] >> 4] : codes[j] >> 4);
                    }
                } else {
                    std::memcpy(whole, values + group * L::GROUP, L::GROUP);
                }
                float* to = out + i * L::SIZE + group * L::GROUP;
                for (int j = 0; j < L::GROUP; j++) to[j] = static_cast<float>(whole[j]) * scale + minimum;
            }
        }
    });
}

}  // namespace
}  // namespace pagoda
