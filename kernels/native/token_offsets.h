// Where tokens lie in the pages of a KV cache. No include guard: each instruction set compiles its own copy.

constexpr int64_t SPLIT = 256;  // tokens that are attended together at most

// Elements from the start of the pages to each of a run of tokens: found once, used for keys and values of every head.
// Whatever reads through it takes the same time for any block size.
struct TokenOffsets {
    int64_t count = 0;
    int64_t at[SPLIT];

    TokenOffsets() = default;

    // Tokens begin to end (exclusive) of the sequence that has these blocks; `stride`: elements of a token.
    TokenOffsets(const int32_t* blocks, int64_t block_size, int64_t stride, int64_t begin, int64_t end) : count(end - begin) {
        int64_t block = begin / block_size, within = begin % block_size;
        for (int64_t i = 0; i < count; i++) {
            at[i] = (blocks[block] * block_size + within) * stride;
            if (++within == block_size) within = 0, block++;
        }
    }
};
