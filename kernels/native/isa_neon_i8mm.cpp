// NEON with the int8 products of Armv8.6, of unsigned by signed bytes: only products of bytes differ from generic code.
#if defined(__aarch64__)

#include <arm_neon.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#define PAGODA_LANES 4
#define PAGODA_REGISTERS 32
#define PAGODA_NEON 1
#define PAGODA_I8MM 1
#include "ops.h"
#include "simd.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod,i8mm"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm")
#endif

#include "isa_bytes.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

pagoda::Ops pagoda::make_neon_i8mm_ops() {
    Ops ops = generic_ops;
    ops.name = "neon-i8mm";
    set_byte_ops(ops);
    return ops;
}

#endif
