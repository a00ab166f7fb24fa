// Vectors of LANES floats, one register each. An instruction set's file defines PAGODA_LANES and PAGODA_REGISTERS before it
// includes this; compilers turn wider types into moves between lanes instead of several registers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace pagoda {

struct bf16 {
    uint16_t bits;
};

constexpr int LANES = PAGODA_LANES;
constexpr int REGISTERS = PAGODA_REGISTERS;  // of such vectors

typedef float Floats __attribute__((vector_size(4 * PAGODA_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * PAGODA_LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * PAGODA_LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * PAGODA_LANES)));
typedef int8_t SmallInts __attribute__((vector_size(PAGODA_LANES)));

}  // namespace pagoda

#define PAGODA_INLINE static inline __attribute__((always_inline))
#define PAGODA_INLINE_LAMBDA __attribute__((always_inline))

#define PAGODA_APART __attribute__((noinline))  // so that it has all registers to itself

// GCC keeps an array of vectors in registers only if every loop over it is unrolled. PAGODA_KEEP makes it compute a value
// here and keep it in a register; otherwise GCC may move the inputs about until 16 registers are not enough.
#define PAGODA_UNROLL _Pragma("GCC unroll 32")
#if defined(__x86_64__)
#define PAGODA_KEEP(VALUE) asm volatile("" : "+v"(VALUE))
#elif defined(__aarch64__)
#define PAGODA_KEEP(VALUE) asm volatile("" : "+w"(VALUE))
#else
#define PAGODA_KEEP(VALUE) (void)(VALUE)
#endif
