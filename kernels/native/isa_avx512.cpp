#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "ops.h"
#include "simd.h"

#define PAGODA_VNNI 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")
#endif

#include "isa.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

extern constexpr pagoda::Ops pagoda::avx512_ops = pagoda::make_ops("avx512");

#endif
