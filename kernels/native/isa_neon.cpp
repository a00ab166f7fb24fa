// NEON with the dot product of Armv8.2, of four signed bytes: only products of bytes differ from generic code.
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
#include "ops.h"
#include "simd.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

#include "isa_bytes.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

pagoda::Ops pagoda::make_neon_ops() {
    Ops ops = generic_ops;
    ops.name = "neon";
    set_byte_ops(ops);
    return ops;
}

#endif
