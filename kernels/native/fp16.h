// Float16 as bits, in plain code. No include guard: each instruction set compiles its own copy.

inline uint16_t to_fp16(float value) {  // to the nearest, ties to even; infinity beyond the greatest
    uint32_t bits, sign;
    std::memcpy(&bits, &value, sizeof bits);
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
    if (bits < 0x38800000) {  // a denormal: counted in steps of 2^-24
        float magnitude;
        std::memcpy(&magnitude, &bits, sizeof magnitude);
        return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(magnitude * 0x1p24f)));
    }
    return static_cast<uint16_t>(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

inline float from_fp16(uint16_t value) {
    uint32_t bits = (value & 0x7fffu) << 13;
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude *= 0x1p112f;
    return value & 0x8000 ? -magnitude : magnitude;
}
