// Norms of queries and keys, by the instruction set's norm.
#pragma once

#include <cstring>

#include "ops.h"

namespace pagoda {

struct HeadNormArgs {
    const void* qkv;                 // [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    const void *query, *key;         // [query_size], [key_size]: head_dim to normalize each head, or all heads of a token at once; no query: copied
    void* out;                       // like qkv: values are copied
    int64_t num_tokens, num_heads, num_kv_heads, head_dim, query_size, key_size;
    float eps;
};

inline void head_norms(ThreadPool& pool, const Ops& ops, Dtype dtype, const HeadNormArgs& args) {
    static ThreadPool& alone = *new ThreadPool;  // a part of an op cannot use the pool again
    int64_t head_bytes = args.head_dim * (dtype == Dtype::float32 ? 4 : 2);
    int64_t token_bytes = (args.num_heads + 2 * args.num_kv_heads) * head_bytes;
    int64_t tokens_a_part = rows_per_part(args.num_tokens, token_bytes / 2);
    pool.run(static_cast<int>(ceil_div(args.num_tokens, tokens_a_part)), [&](int part) {
        int64_t end = std::min(args.num_tokens, (part + 1) * tokens_a_part);
        for (int64_t token = part * tokens_a_part; token < end; token++) {
            const char* from = static_cast<const char*>(args.qkv) + token * token_bytes;
            char* to = static_cast<char*>(args.out) + token * token_bytes;
            if (args.query) {
                int64_t query_rows = args.num_heads * args.head_dim / args.query_size;
                ops.norm(alone, dtype, {from, args.query, nullptr, nullptr, dtype, to, query_rows, args.query_size, args.eps, false});
            } else {
                std::memcpy(to, from, args.num_heads * head_bytes);
            }
            from += args.num_heads * head_bytes;
            to += args.num_heads * head_bytes;
            int64_t key_rows = args.num_kv_heads * args.head_dim / args.key_size;
            ops.norm(alone, dtype, {from, args.key, nullptr, nullptr, dtype, to, key_rows, args.key_size, args.eps, false});
            int64_t key_bytes = args.num_kv_heads * head_bytes;
            std::memcpy(to + key_bytes, from + key_bytes, key_bytes);
        }
    });
}

}  // namespace pagoda
