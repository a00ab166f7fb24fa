// The ops on bytes, compiled for the instruction set that the including file chooses. No include guard.

namespace pagoda {
namespace {

#include "simd_ops.h"

#include "activate.h"
#include "bytes.h"
#include "linear_rows.h"
#include "quantized_rows.h"

#include "linear_grouped.h"
#include "linear_int8.h"

constexpr void set_byte_ops(Ops& ops) {
    ops.pairs_are_limited = PAIRS_ARE_LIMITED;
    ops.pack_int8 = pack_int8;
    ops.linear_int8 = [](ThreadPool& pool, Dtype dtype, const LinearArgs& args) {
        with_type(dtype, [&](auto type) { linear_int8<decltype(type)>(pool, args); });
    };
    ops.embedding_int8 = [](ThreadPool& pool, Dtype dtype, const int64_t* ids, const int8_t* packed, const float* scales, void* out,
                         int64_t count, int64_t in) {
        with_type(dtype, [&](auto type) { embedding_int8(pool, ids, packed, scales, static_cast<decltype(type)*>(out), count, in); });
    };
    ops.grouped_bytes = [](Grouped format, int64_t in, int64_t out) {
        return with_codes(format, [&](auto codes) { return GroupedPanels<decltype(codes)>(in).bytes(out); });
    };
    ops.pack_grouped = [](ThreadPool& pool, Grouped format, const GroupRows& rows, const int8_t* table, uint8_t* packed) {
        with_codes(format, [&](auto codes) { pack_grouped<decltype(codes)>(pool, rows, table, packed); });
    };
    ops.linear_grouped = [](ThreadPool& pool, Dtype dtype, Grouped format, const LinearArgs& args) {
        with_type(dtype, [&](auto type) {
            with_codes(format, [&](auto codes) { linear_grouped<decltype(codes), decltype(type)>(pool, args); });
        });
    };
    ops.embedding_grouped = [](ThreadPool& pool, Dtype dtype, Grouped format, const int64_t* ids, const uint8_t* packed, void* out,
                               int64_t count, int64_t in, int64_t out_size) {
        with_type(dtype, [&](auto type) {
            with_codes(format, [&](auto codes) {
                embedding_grouped<decltype(codes)>(pool, ids, packed, static_cast<decltype(type)*>(out), count, in, out_size);
            });
        });
    };
}

}  // namespace
}  // namespace pagoda
