// Decodes of sequences that share blocks: n > 1, several continuations of one prompt, one system prompt before many. No
// include guard: each instruction set compiles its own copy.
//
// The parts of several sequences whose first tokens lie in the same blocks are attended together. Those tokens' keys and
// values are widened and transposed once for up to SHARED_ROWS rows; the tokens behind them are read as a sequence that is alone
// reads them. Each row's sums have the order of attention_decode.h, so its result has the same bits.

constexpr int64_t SHARED_KEYS = 2 * LANES;
constexpr int64_t SHARED_ROWS = 96;  // a multiple of ROW_STEP
constexpr int64_t FEWEST_SHARED_ROWS = 12, FEWEST_SHARED_TOKENS = 64;  // with fewer, sequences alone are as fast
constexpr int64_t SHARED_STEP = 32;  // tokens, which every loop over scores and scales ends within
constexpr int MOST_TRIED_GROUPS = 8;  // for one part, so that the time to find groups is linear

// Finds which of a step's parts start with the same blocks. It looks at each part once, and compares the blocks of those whose
// first block is the same.
class SharedParts {
public:
    // The rows that are attended together, from a row of a part on: it may be in the middle of the part.
    struct Tile {
        int32_t part;
        int64_t row, num_rows, tokens;  // tokens that the parts share
    };
    std::vector<Tile> tiles;
    std::vector<int32_t> next;   // of each part, the next one that shares its tokens; -1: it is the last
    std::vector<int32_t> alone;  // the parts that share nothing

    // rows_of: how many rows a part has for a KV head
    template <typename RowsOf>
    void find(const AttentionArgs& args, const std::vector<AttentionPart>& parts, const RowsOf& rows_of) {
        auto count = static_cast<int32_t>(parts.size());
        groups_.clear();
        tiles.clear();
        alone.clear();
        next.assign(count, -1);
        int bits = 1;
        while ((int64_t{1} << bits) < 2 * count) bits++;
        buckets_.assign(size_t{1} << bits, -1);
        for (int32_t i = 0; i < count; i++) {
            const AttentionPart& part = parts[i];
            if (part.last - part.first < FEWEST_SHARED_TOKENS) {
                alone.push_back(i);
                continue;
            }
            uint64_t key = uint64_t(blocks(args, part)[part.first / args.block_size]) << 32 | static_cast<uint32_t>(part.first);
            int32_t& bucket = buckets_[key * 0x9e3779b97f4a7c15 >> (64 - bits)];
            int32_t group = bucket, tries = MOST_TRIED_GROUPS;
            while (group >= 0 && tries-- > 0 && !join(args, parts, groups_[group], i)) group = groups_[group].next_group;
            if (group >= 0 && tries >= 0) continue;
            groups_.push_back({i, i, bucket});
            bucket = static_cast<int32_t>(groups_.size()) - 1;
        }
        for (const Group& group : groups_) {
            int64_t num_rows = 0;
            for (int32_t i = group.leader; i >= 0; i = next[i]) num_rows += rows_of(parts[i]);
            if (group.num_parts > 1 && num_rows >= FEWEST_SHARED_ROWS)
                cut(parts, group, num_rows, rows_of);
            else
                for (int32_t i = group.leader; i >= 0; i = next[i]) alone.push_back(i);
        }
        std::sort(alone.begin(), alone.end());
    }

private:
    struct Group {
        int32_t leader, last, next_group;  // its first and its last part; a group of the same bucket, or -1
        int64_t num_parts = 1, tokens = 0;
    };

    // Cuts a group's rows into tiles of about the same size.
    template <typename RowsOf>
    void cut(const std::vector<AttentionPart>& parts, const Group& group, int64_t num_rows, const RowsOf& rows_of) {
        int64_t size = ceil_div(ceil_div(num_rows, ceil_div(num_rows, SHARED_ROWS)), ROW_STEP) * ROW_STEP, room = 0;
        for (int32_t i = group.leader; i >= 0; i = next[i])
            for (int64_t row = 0, end = rows_of(parts[i]); row < end;) {
                if (room == 0) {
                    room = std::min(size, num_rows);
                    tiles.push_back({i, row, room, group.tokens});
                    num_rows -= room;
                }
                int64_t count = std::min(room, end - row);
                row += count;
                room -= count;
            }
    }

    static const int32_t* blocks(const AttentionArgs& args, const AttentionPart& part) {
        return args.block_table + part.seq * args.max_blocks;
    }

    // The second part of a group decides how many tokens the group shares, and a part that shares fewer does not join. Nor
    // does a part if more than a quarter of its tokens are its own: the kernel without groups reads those faster, because it
    // takes all heads of a token together.
    bool join(const AttentionArgs& args, const std::vector<AttentionPart>& parts, Group& group, int32_t i) {
        const AttentionPart &leader = parts[group.leader], &part = parts[i];
        if (leader.first != part.first) return false;
        int32_t last = std::min(leader.last, part.last);
        int64_t block = part.first / args.block_size, end = ceil_div(last, args.block_size);
        const int32_t *one = blocks(args, leader), *two = blocks(args, part);
        while (block < end && one[block] == two[block]) block++;
        int64_t tokens = std::min<int64_t>(last, block * args.block_size) - part.first;
        tokens -= tokens % SHARED_STEP;
        int64_t shared = group.num_parts == 1 ? tokens : group.tokens;
        int64_t longest = std::max(leader.last, part.last) - part.first;
        if (tokens < shared || shared < FEWEST_SHARED_TOKENS || 4 * shared < 3 * longest) return false;
        group.tokens = shared;
        next[group.last] = i;
        group.last = i;
        group.num_parts++;
        return true;
    }

    std::vector<int32_t> buckets_;  // of hashes, each with its newest group
    std::vector<Group> groups_;
};

// Scores of ROWS queries and SHARED_KEYS keys, with sums in the order of `score`: of lane i those of the dimensions i,
// i + LANES, …, then of neighbouring lanes. Vectors hold a number of LANES keys each, so that nothing moves between lanes.
template <int ROWS, int V>
PAGODA_APART void score_transposed(const float* queries, const float* keys, float* scores) {
    constexpr int64_t HEAD_DIM = V * LANES;
    constexpr int COLUMNS = SHARED_KEYS / LANES;
    constexpr int AT_ONCE = REGISTERS == 32 ? 4 : 2;  // lanes whose sums stay in registers together
    auto add = [](Floats (&to)[ROWS][COLUMNS], const Floats (&other)[ROWS][COLUMNS]) PAGODA_INLINE_LAMBDA {
        PAGODA_UNROLL
        for (int row = 0; row < ROWS; row++)
            PAGODA_UNROLL
            for (int i = 0; i < COLUMNS; i++) to[row][i] += other[row][i];
    };
    auto sum_lane = [&](int lane, Floats (&sums)[ROWS][COLUMNS]) PAGODA_INLINE_LAMBDA {
        PAGODA_UNROLL
        for (int part = 0; part < V; part++) {
            Floats key[COLUMNS];
            PAGODA_UNROLL
            for (int i = 0; i < COLUMNS; i++) {
                key[i] = load(keys + (lane + part * LANES) * SHARED_KEYS + i * LANES);
                PAGODA_KEEP(key[i]);
            }
            PAGODA_UNROLL
            for (int row = 0; row < ROWS; row++) {
                Floats query = broadcast(queries[row * HEAD_DIM + lane + part * LANES]);
                PAGODA_UNROLL
                for (int i = 0; i < COLUMNS; i++) {
                    if (part == 0)
                        sums[row][i] = query * key[i];
                    else
                        sums[row][i] += query * key[i];
                    if (V == 1) PAGODA_KEEP(sums[row][i]);  // lest the next addition becomes part of the product
                }
            }
        }
    };
    Floats sums[LANES / AT_ONCE][ROWS][COLUMNS];
    for (int step = 0; step < LANES / AT_ONCE; step++) {
        Floats one[ROWS][COLUMNS], two[ROWS][COLUMNS];
        sum_lane(step * AT_ONCE, one);
        sum_lane(step * AT_ONCE + 1, two);
        add(one, two);
        if constexpr (AT_ONCE == 4) {
            Floats three[ROWS][COLUMNS];
            sum_lane(step * AT_ONCE + 2, two);
            sum_lane(step * AT_ONCE + 3, three);
            add(two, three);
            add(one, two);
        }
        std::memcpy(sums[step], one, sizeof one);
    }
    PAGODA_UNROLL
    for (int step = 1; step < LANES / AT_ONCE; step *= 2)
        PAGODA_UNROLL
        for (int i = 0; i < LANES / AT_ONCE; i += 2 * step) add(sums[i], sums[i + step]);
    PAGODA_UNROLL
    for (int row = 0; row < ROWS; row++)
        PAGODA_UNROLL
        for (int i = 0; i < COLUMNS; i++) store(scores + row * SPLIT + i * LANES, sums[0][row][i]);
}

// The buffers for some rows of a group.
template <int V>
struct SharedTile {
    static constexpr int64_t HEAD_DIM = V * LANES;
    alignas(64) float queries[SHARED_ROWS * HEAD_DIM];
    alignas(64) float keys[HEAD_DIM * SHARED_KEYS];  // transposed
    alignas(64) float values[KEY_TILE * HEAD_DIM];
    alignas(64) float scores[SHARED_ROWS * SPLIT];
    alignas(64) float out[SHARED_ROWS * HEAD_DIM];
    float tops[SHARED_ROWS], totals[SHARED_ROWS];
};

// Attends up to SHARED_ROWS rows of parts that share their first `tokens` tokens; rows of a part are adjacent.
template <int V, typename T>
void attend_shared(const std::vector<PartRow>& rows, int64_t tokens, const T* keys, const T* values, float* partial) {
    constexpr int64_t HEAD_DIM = V * LANES, ROWS = ROW_STEP / 2;
    static thread_local std::vector<SharedTile<V>> room(1);
    SharedTile<V>& tile = room[0];
    const PartRows& first = rows[0].of;
    const AttentionArgs& args = first.args;
    auto count = static_cast<int64_t>(rows.size()), padded_rows = ceil_div(count, ROW_STEP) * ROW_STEP;
    auto locate = [&](const AttentionPart& part, int64_t begin, int64_t end) {  // tokens of the part
        return TokenOffsets(args.block_table + part.seq * args.max_blocks, args.block_size, args.num_kv_heads * HEAD_DIM,
                            part.first + begin, part.first + end);
    };
    for (int64_t row = 0; row < count; row++) rows[row].template load_scaled<T>(tile.queries + row * HEAD_DIM);
    std::fill(tile.queries + count * HEAD_DIM, tile.queries + padded_rows * HEAD_DIM, 0.0f);
    std::fill(tile.out, tile.out + padded_rows * HEAD_DIM, 0.0f);

    const TokenOffsets shared = locate(first.part, 0, tokens);
    const TokenScales<V, T> scales(args, shared, first.kv_head);
    const TokenScales<V, float> none(args, shared, first.kv_head);  // those of `scales` multiply scores and weights
    for (int64_t begin = 0; begin < tokens; begin += SHARED_KEYS) {
        load_keys<V, SHARED_KEYS>(tile.keys, keys, locate(first.part, begin, begin + SHARED_KEYS), none);
        for (int64_t row = 0; row < padded_rows; row += ROWS)
            score_transposed<ROWS, V>(tile.queries + row * HEAD_DIM, tile.keys, tile.scores + row * SPLIT + begin);
    }

    // Calls op with the rows of each part, its tokens behind the shared ones, and a prefetch of those of the next part.
    auto for_each_part = [&](const auto& op) {
        auto end_of = [&](int64_t row) {
            int64_t end = row + 1;
            while (end < count && &rows[end].of.part == &rows[row].of.part) end++;
            return end;
        };
        auto own_of = [&](int64_t row) {
            const AttentionPart& part = rows[row].of.part;
            return locate(part, tokens, part.last - part.first);
        };
        TokenOffsets owns[2];
        owns[0] = own_of(0);
        int64_t row = 0, end = end_of(0);
        for (int64_t number = 0; row < count; number++) {
            const TokenOffsets& own = owns[number % 2];
            TokenOffsets& next_own = owns[(number + 1) % 2];
            Prefetch<V, T> prefetch;
            if (end < count) {
                next_own = own_of(end);
                int64_t steps = ceil_div(end - row, rows_at_once(V)) * own.count;
                if (steps > 0) prefetch = {&args, next_own, keys, values, HEAD_DIM, steps};
            }
            op(row, end, own, prefetch);
            row = end;
            if (row < count) end = end_of(row);
        }
    };
    auto for_some_rows = [](int64_t row, int64_t end, const auto& op) {
        while (row < end)
            with_count<rows_at_once(V)>(std::min<int64_t>(end - row, rows_at_once(V)), [&](auto some) {
                op(some, row);
                row += some.value;
            });
    };
    for_each_part([&](int64_t begin, int64_t end, const TokenOffsets& own, Prefetch<V, T>& prefetch) {
        const TokenScales<V, T> own_scales(args, own, first.kv_head);
        if (own.count > 0)
            for_some_rows(begin, end, [&](auto some, int64_t row) {
                score<some.value, V>(tile.queries + row * HEAD_DIM, keys, own, prefetch, tile.scores + row * SPLIT + tokens);
            });
        for (int64_t row = begin; row < end; row++) {
            float* scores = tile.scores + row * SPLIT;
            scales.scale_scores(scores);
            own_scales.scale_scores(scores + tokens);
            if (args.softcap != 0) cap_scores(scores, ceil_div(tokens + own.count, LANES) * LANES, args.softcap);
            soften(scores, tokens + own.count, rows[row].of.seen(rows[row].query), &tile.tops[row], &tile.totals[row]);
            scales.scale_weights(scores);
            own_scales.scale_weights(scores + tokens);
        }
    });
    for (int64_t begin = 0; begin < tokens; begin += KEY_TILE) {
        const TokenOffsets some = locate(first.part, begin, std::min(begin + KEY_TILE, tokens));
        load_values<V>(tile.values, values, some, none);
        multiply_add<V>(tile.scores + begin, SPLIT, tile.values, tile.out, padded_rows, some.count, V);
    }
    for_each_part([&](int64_t begin, int64_t end, const TokenOffsets& own, Prefetch<V, T>&) {
        if (own.count > 0)
            for_some_rows(begin, end, [&](auto some, int64_t row) {
                weigh<some.value, V, true>(tile.scores + row * SPLIT + tokens, values, own, tile.out + row * HEAD_DIM);
            });
    });
    for (int64_t row = 0; row < count; row++) {
        const PartRows& of = rows[row].of;
        const float* out = tile.out + row * HEAD_DIM;
        if (of.part.split < 0) {
            rows[row].template finish<T>(tile.tops[row], tile.totals[row], out);
        } else {
            std::copy(out, out + HEAD_DIM, partial + of.sums() + rows[row].row * HEAD_DIM);
            partial[of.tops() + rows[row].row] = tile.tops[row];
            partial[of.totals() + rows[row].row] = tile.totals[row];
        }
    }
}
