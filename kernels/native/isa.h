// The table of all ops, compiled for the instruction set that the including file chooses. No include guard.

#include "isa_bytes.h"

namespace pagoda {
namespace {  // each file has its own copy

#include "attention.h"
#include "draws.h"
#include "elementwise.h"
#include "experts.h"
#include "linear_whole.h"
#include "low_rank.h"
#include "quantize_int4.h"

constexpr Ops make_ops(const char* name) {
    Ops ops{};
    ops.name = name;
    ops.norm = [](ThreadPool& pool, Dtype dtype, const NormArgs& args) {
        with_type(dtype, [&](auto type) {
            using T = decltype(type);
            if (args.residual_dtype == dtype)
                norm<T, T>(pool, args);
            else
                norm<T, float>(pool, args);
        });
    };
    ops.activate = [](ThreadPool& pool, Dtype dtype, const void* x, void* out, int64_t rows, int64_t size, const Activation& by) {
        with_type(dtype, [&](auto type) {
            using T = decltype(type);
            activate(pool, static_cast<const T*>(x), static_cast<T*>(out), rows, size, by);
        });
    };
    ops.cap = [](ThreadPool& pool, Dtype dtype, void* x, int64_t count, float softcap) {
        with_type(dtype, [&](auto type) { cap(pool, static_cast<decltype(type)*>(x), count, softcap); });
    };
    ops.rope_and_store_kv = [](ThreadPool& pool, Dtype dtype, const RopeArgs& args) {
        with_type(dtype, [&](auto type) { rope_and_store_kv<decltype(type)>(pool, args); });
    };
    ops.paged_attention = [](ThreadPool& pool, const AttentionArgs& args) {
        if (args.key_scales)
            paged_attention<int8_t>(pool, args);
        else
            with_type(args.dtype, [&](auto type) { paged_attention<decltype(type)>(pool, args); });
    };
    ops.argmax = [](ThreadPool& pool, Dtype dtype, const void* x, const int64_t* rows, const uint32_t* masks, int64_t* out,
                    int64_t count, int64_t size) {
        with_type(dtype, [&](auto type) { argmax(pool, static_cast<const decltype(type)*>(x), rows, masks, out, count, size); });
    };
    ops.mask_rows = mask_rows;
    ops.draw = [](ThreadPool& pool, Dtype dtype, const DrawArgs& args) {
        with_type(dtype, [&](auto type) { draw<decltype(type)>(pool, args); });
    };
    ops.quantize_int4 = [](ThreadPool& pool, Dtype dtype, const void* weight, uint8_t* values, uint16_t* scales,
                           uint16_t* minimums, int64_t groups) {
        with_type(dtype, [&](auto type) {
            quantize_int4(pool, static_cast<const decltype(type)*>(weight), values, scales, minimums, groups);
        });
    };
    set_byte_ops(ops);
    ops.pack_whole = [](ThreadPool& pool, Dtype dtype, const void* weight, void* packed, int64_t in, int64_t out) {
        with_type(dtype, [&](auto type) {
            using T = decltype(type);
            pack_whole(pool, static_cast<const T*>(weight), static_cast<T*>(packed), in, out);
        });
    };
    ops.linear_whole = [](ThreadPool& pool, Dtype dtype, const LinearArgs& args) {
        with_type(dtype, [&](auto type) { linear_whole<decltype(type)>(pool, args); });
    };
    ops.weigh_experts = [](ThreadPool& pool, Dtype dtype, const WeighArgs& args) {
        with_type(dtype, [&](auto type) { weigh_experts<decltype(type)>(pool, args); });
    };
    ops.add_low_rank = [](ThreadPool& pool, Dtype dtype, const LowRankArgs& args) {
        with_type(dtype, [&](auto type) { add_low_rank<decltype(type)>(pool, args); });
    };
    return ops;
}

}  // namespace
}  // namespace pagoda
