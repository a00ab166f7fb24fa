// Which of the instruction sets that were compiled this processor can run.
#include "ops.h"

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
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        static const Ops avxvnni_ops = make_avxvnni_ops();
        if (__builtin_cpu_supports("avxvnni")) usable.push_back(&avxvnni_ops);
        usable.push_back(&avx2_ops);
    }
#endif
    usable.push_back(&generic_ops);
    return usable;
}
