// Checks every op of every instruction set that this processor can run against plain loops in double precision. Needs
// neither Python nor a framework, so that it can be cross-compiled and run in an emulator. Prints one line for each
// instruction set, op and dtype; exits with 1 if an error exceeds its bound.
#include <chrono>
#include <cstdio>

#include "self_test.h"

namespace {

struct NamedTest {
    const char* name;
    Test* run;
};

// Every part of every job runs once, however many there are, and whether the workers spin or sleep when it comes.
bool thread_pool_is_right() {
    bool is_right = true;
    ThreadPool pool;
    for (int num_threads : {1, 2, 5, 3}) {
        pool.resize(num_threads);
        for (int job = 0; job < 300; job++) {
            std::vector<int> runs(job % 40, 0);  // not atomic: the pool orders its parts before and after the caller
            pool.run(job % 40, [&](int part) { runs[part] += job; });
            for (int count : runs) is_right &= count == job;
            if (job % 50 == 0) std::this_thread::sleep_for(std::chrono::nanoseconds(4 * ThreadPool::SPIN_NS));
        }
    }
    return is_right;
}

const NamedTest TESTS[] = {
    {"norm", test_norm},
    {"activate", test_activate},
    {"rope_and_store_kv", test_rope_and_store_kv},
    {"paged_attention, decode", test_decode_attention},
    {"paged_attention, few queries", test_attention_of_few_queries},
    {"paged_attention, shared blocks", test_attention_of_shared_blocks},
    {"paged_attention, prefill", test_prefill_attention},
    {"argmax", test_argmax},
    {"argmax, masked rows", test_argmax_of_masked_rows},
    {"mask_rows", test_mask_rows},
    {"draw", test_draw},
    {"draw, where it is unsure", test_unsure_draws},
    {"linear_int8, exact numbers", test_int8_exactly},
    {"linear_int8, deviations", test_int8},
    {"linear_int8, odd rows", test_int8_of_odd_rows},
    {"embedding_int8, steps", test_embedding_int8},
    {"linear_grouped, exact numbers", test_grouped_exactly},
    {"linear_grouped, deviations", test_grouped},
    {"embedding_grouped", test_embedding_grouped},
    {"quantize_int4", test_quantize_int4},
    {"linear_whole", test_whole},
    {"rows of experts", test_experts},
    {"weigh_experts", test_weigh_experts},
    {"pack and add_low_rank", test_low_rank},
    {"pack_low_rank, finite values", test_finite_low_rank},
};

}  // namespace

// Arguments, if any: the instruction sets that this processor is expected to have, the fastest first. Only the first, which a
// server would use, is tested; without arguments all are.
int main(int num_arguments, char** arguments) {
    std::vector<const Ops*> usable = usable_ops();
    if (num_arguments > 1) {
        std::vector<std::string> expected(arguments + 1, arguments + num_arguments), names;
        for (const Ops* ops : usable) names.emplace_back(ops->name);
        if (names != expected) {
            std::printf("This processor does not turn out to have %s", expected[0].c_str());
            for (size_t i = 1; i < expected.size(); i++) std::printf(", %s", expected[i].c_str());
            for (size_t i = 0; i < names.size(); i++) std::printf("%s%s", i ? ", " : " but ", names[i].c_str());
            std::puts(".");
            return 1;
        }
        usable.resize(1);
    }
    ThreadPool alone, pool;
    pool.resize(3);
    bool passed = thread_pool_is_right();
    std::printf("thread pool %s\n", passed ? "ok" : "FAILED");
    for (const Ops* ops : usable)
        for (const NamedTest& test : TESTS)
            for (Dtype dtype : {Dtype::float32, Dtype::bfloat16}) {
                Findings found = test.run({*ops, alone, pool, dtype});
                std::printf("%-10s %-30s %-9s error %8.2g, bound %8.2g  %s\n", ops->name, test.name,
                            dtype == Dtype::float32 ? "float32" : "bfloat16", found.greatest_error, found.bound, found.passed() ? "ok" : "FAILED");
                for (const std::string& fault : found.faults) std::printf("           %s\n", fault.c_str());
                std::fflush(stdout);
                passed &= found.passed();
            }
    std::puts(passed ? "All kernels are right." : "FAILED");
    return passed ? 0 : 1;
}
