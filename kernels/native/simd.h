// Sixteen floats at a time. Compilers lower these types to whatever the instruction set has: one register of AVX-512,
// two of AVX2, four of SSE or NEON. Included once per instruction set, inside its namespace.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace pagoda {

struct bf16 {
    uint16_t bits;
};

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

constexpr int LANES = 16;

}  // namespace pagoda

#define PAGODA_INLINE static inline __attribute__((always_inline))
