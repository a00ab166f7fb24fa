#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#define PAGODA_LANES 8
#define PAGODA_REGISTERS 16
#define PAGODA_AVX2 1
#include "ops.h"
#include "simd.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "isa.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

extern constexpr pagoda::Ops pagoda::avx2_ops = pagoda::make_ops("avx2");

#endif
