// Float16 as bits, in plain code. No include guard: each instruction set compiles its own copy.

// To the nearest, ties to even; infinity beyond the greatest. Without branches, so that compilers vectorize a loop of it.
inline uint16_t to_fp16(float value) {
    uint32_t bits, small;
    std::memcpy(&bits, &value, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude += 0.5f;  // which rounds a denormal to steps of 2^-24 and leaves their number in the fraction
    std::memcpy(&small, &magnitude, sizeof small);
    uint32_t normal = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
    uint32_t is_small = -static_cast<uint32_t>(bits < 0x38800000), is_large = -static_cast<uint32_t>(bits >= 0x477ff000);
    uint32_t finite = ((small - 0x3f000000) & is_small) | (normal & ~is_small);
    return static_cast<uint16_t>(sign | (finite & ~is_large) | (0x7c00 & is_large));
}

inline float from_fp16(uint16_t value) {
    uint32_t bits = (value & 0x7fffu) << 13;
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude *= 0x1p112f;
    std::memcpy(&bits, &magnitude, sizeof bits);
    bits |= (value & 0x8000u) << 16;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    return magnitude;
}
