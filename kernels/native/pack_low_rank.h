// Packs what an adapter adds to adjacent outputs of a product, as low_rank.h reads it. Like the decoding of blocks this is
// compiled once, for the least processor: compilers vectorize its loops, and memory bounds them.
#pragma once

#include <limits>
#include <type_traits>
#include <vector>

#include "gguf_blocks.h"

namespace pagoda {
namespace {

enum class Stored { float32 = 0, bfloat16 = 1, float16 = 2 };  // dtypes of a file

struct PackLowRankArgs {
    Stored down_dtype, up_dtype;
    const void* down;               // [rank, in], whose rows are `down_stride` elements apart
    const void* up;                 // [size, rank]
    void *packed_down, *packed_up;  // [rank, in] with zeros up to a multiple of LOW_RANK_PADDING; [panels, rank, LOW_RANK_PADDING]
    int64_t rank, in, size, down_stride;
    float scale;                    // what `up` is multiplied by
};

struct StoredBf16 {
    uint16_t bits;
};

struct StoredFp16 {
    uint8_t bytes[2];
};

inline float widened(float value) { return value; }
inline float widened(StoredFp16 value) { return load_half(value.bytes); }
inline float widened(StoredBf16 value) {
    uint32_t bits = uint32_t{value.bits} << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// How bits of float32 are rounded: to the nearest, ties to even. From the magnitude LIMIT on the result is not finite.
struct ToFloat32 {
    using Element = uint32_t;
    using Same = float;  // what a file has that is not changed by it
    static constexpr int32_t LIMIT = 0x7f800000;
    static Element round(uint32_t bits) { return bits; }
};

struct ToBf16 {
    using Element = uint16_t;
    using Same = StoredBf16;
    static constexpr int32_t LIMIT = 0x7f7f8000;
    static Element round(uint32_t bits) { return static_cast<Element>((bits + 0x7fff + (bits >> 16 & 1)) >> 16); }
};

// Writes scale · from, rounded, and returns the bits of the greatest magnitude, which are in the order of magnitudes.
template <typename To, typename From>
int32_t scale_values(const From* from, int64_t count, float scale, typename To::Element* __restrict to) {
    int32_t greatest = 0;
    for (int64_t i = 0; i < count; i++) {
        float value = widened(from[i]) * scale;
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        to[i] = To::round(bits);
        greatest = std::max(greatest, static_cast<int32_t>(bits & 0x7fffffff));
    }
    return greatest;
}

// The same for values that need no rounding.
template <typename To>
int32_t copy_values(const typename To::Same* from, int64_t count, typename To::Element* to) {
    using Signed = std::make_signed_t<typename To::Element>;
    std::memcpy(to, from, count * sizeof *to);
    Signed greatest = 0;
    for (int64_t i = 0; i < count; i++)
        greatest = std::max(greatest, static_cast<Signed>(to[i] & std::numeric_limits<Signed>::max()));
    return greatest << 8 * (sizeof(float) - sizeof greatest);
}

template <typename To, typename From>
int32_t pack_down(const PackLowRankArgs& args) {
    auto* from = static_cast<const From*>(args.down);
    auto* to = static_cast<typename To::Element*>(args.packed_down);
    int64_t padded = (args.in + LOW_RANK_PADDING - 1) / LOW_RANK_PADDING * LOW_RANK_PADDING;
    int32_t greatest = 0;
    for (int64_t rank = 0; rank < args.rank; rank++, from += args.down_stride, to += padded) {
        if constexpr (std::is_same_v<From, typename To::Same>)
            greatest = std::max(greatest, copy_values<To>(from, args.in, to));
        else
            greatest = std::max(greatest, scale_values<To>(from, args.in, 1.0f, to));
        std::fill(to + args.in, to + padded, 0);
    }
    return greatest;
}

template <typename To, typename From>
int32_t pack_up(const PackLowRankArgs& args) {
    auto* from = static_cast<const From*>(args.up);
    auto* to = static_cast<typename To::Element*>(args.packed_up);
    std::vector<typename To::Element> panel(LOW_RANK_PADDING * args.rank);  // before it is transposed
    int32_t greatest = 0;
    for (int64_t first = 0; first < args.size; first += LOW_RANK_PADDING, to += panel.size()) {
        int64_t count = std::min(LOW_RANK_PADDING, args.size - first) * args.rank;
        greatest = std::max(greatest, scale_values<To>(from + first * args.rank, count, args.scale, panel.data()));
        std::fill(panel.begin() + count, panel.end(), 0);
        for (int64_t rank = 0; rank < args.rank; rank++)
            for (int64_t row = 0; row < LOW_RANK_PADDING; row++) to[rank * LOW_RANK_PADDING + row] = panel[row * args.rank + rank];
    }
    return greatest;
}

template <typename Use>
int32_t with_stored(Stored dtype, const Use& use) {
    if (dtype == Stored::float32) return use(float{});
    return dtype == Stored::bfloat16 ? use(StoredBf16{}) : use(StoredFp16{});
}

// Returns whether all values are finite when they are packed.
template <typename To>
bool pack_low_rank(const PackLowRankArgs& args) {
    int32_t down = with_stored(args.down_dtype, [&](auto type) { return pack_down<To, decltype(type)>(args); });
    int32_t up = with_stored(args.up_dtype, [&](auto type) { return pack_up<To, decltype(type)>(args); });
    return std::max(down, up) < To::LIMIT;
}

}  // namespace
}  // namespace pagoda
