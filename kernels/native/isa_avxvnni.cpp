// AVX2 with VNNI, as client processors have it: only products of bytes differ.
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#define PAGODA_LANES 8
#define PAGODA_REGISTERS 16
#define PAGODA_AVX2 1
#define PAGODA_VNNI 1
#include "ops.h"
#include "simd.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif

#include "isa_bytes.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

pagoda::Ops pagoda::make_avxvnni_ops() {
    Ops ops = avx2_ops;
    ops.name = "avxvnni";
    set_byte_ops(ops);
    return ops;
}

#endif
