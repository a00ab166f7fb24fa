#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#define PAGODA_LANES 16
#define PAGODA_REGISTERS 32
#define PAGODA_AVX512 1
#include "ops.h"
#include "simd.h"

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
