// The compiled instruction sets that this processor can run.
#include "ops.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#if defined(__x86_64__)
namespace {

// In older clangs, __builtin_cpu_supports rejects these two names.
bool has_f16c() {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx >> 29 & 1);
}

bool has_avxvnni() {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}

}  // namespace
#elif defined(__aarch64__)
namespace {

struct Feature {
    unsigned long capabilities, bit;  // of Linux's capability words; numbers, because older headers lack the names
    const char* of_apple;
};

constexpr Feature DOT_PRODUCT{16, 1 << 20, "hw.optional.arm.FEAT_DotProd"};  // AT_HWCAP, HWCAP_ASIMDDP
constexpr Feature INT8_PRODUCT{26, 1 << 13, "hw.optional.arm.FEAT_I8MM"};    // AT_HWCAP2, HWCAP2_I8MM

bool has([[maybe_unused]] const Feature& feature) {
#if defined(__linux__)
    return getauxval(feature.capabilities) & feature.bit;
#elif defined(__APPLE__)
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(feature.of_apple, &value, &size, nullptr, 0) == 0 && value != 0;
#else
    return false;
#endif
}

}  // namespace
#endif

std::vector<const pagoda::Ops*> pagoda::usable_ops() {
    std::vector<const Ops*> usable;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
#if defined(PAGODA_HAS_AMX)
        static const Ops amx_ops = [] {
            Ops ops = avx512_ops;
            ops.name = "amx";
            ops.paged_attention = paged_attention_amx;
            return ops;
        }();
        if (may_use_amx()) usable.push_back(&amx_ops);
#endif
        usable.push_back(&avx512_ops);
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) {
        static const Ops avxvnni_ops = make_avxvnni_ops();
        if (has_avxvnni()) usable.push_back(&avxvnni_ops);
        usable.push_back(&avx2_ops);
    }
#elif defined(__aarch64__)
    static const Ops neon_ops = make_neon_ops(), neon_i8mm_ops = make_neon_i8mm_ops();
    if (has(DOT_PRODUCT)) {
        if (has(INT8_PRODUCT)) usable.push_back(&neon_i8mm_ops);
        usable.push_back(&neon_ops);
    }
#endif
    usable.push_back(&generic_ops);
    return usable;
}
