// AVX-512 with the matrix unit of AMX: the ops that gain from its products of bfloat16.
#include "ops.h"

#if defined(PAGODA_HAS_AMX)

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#define PAGODA_LANES 16
#define PAGODA_REGISTERS 32
#include "simd.h"

#define PAGODA_BF16 1
#define PAGODA_AMX 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c,amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c,amx-tile,amx-bf16")
#endif

namespace pagoda {
namespace {

#include "simd_ops.h"

#include "matrix_unit.h"

#include "activate.h"
#include "attention.h"
#include "linear_rows.h"

#include "linear_int8_weight.h"

}  // namespace

void pack_int8_weight_amx(ThreadPool& pool, const WeightRows& rows, int8_t* packed, float* scales) {
    pack_int8_weight(pool, rows, packed, scales);
}

void linear_int8_weight_amx(ThreadPool& pool, Dtype dtype, const LinearArgs& args) {
    with_type(dtype, [&](auto type) { linear_int8_weight<decltype(type)>(pool, args); });
}

void paged_attention_amx(ThreadPool& pool, const AttentionArgs& args) {
    if (args.dtype == Dtype::float32)
        avx512_ops.paged_attention(pool, args);
    else if (args.key_scales)
        paged_attention<int8_t>(pool, args);
    else
        paged_attention<bf16>(pool, args);
}

}  // namespace pagoda

#if defined(__clang__)
#pragma clang attribute pop
#endif

// Linux saves the unit's registers only for a process that has asked for it.
bool pagoda::may_use_amx() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    bool has_bf16 = edx >> 22 & 1, has_tiles = edx >> 24 & 1;
    return has_bf16 && has_tiles && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

#endif
