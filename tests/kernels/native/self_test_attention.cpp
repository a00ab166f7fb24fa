// Tests of attention over paged keys and values.
#include <numeric>

#include "self_test.h"

namespace {

struct Sequence {
    int64_t queries, context;
};

struct AttentionCase {
    int64_t head_dim, heads, kv_heads, block_size, window;
    std::vector<Sequence> sequences;
    float softcap = 0;
    std::vector<float> sinks = {};  // of the heads; empty: they have none
    int64_t shared = 0;             // the first tokens of a sequence lie in the blocks of another one
    int64_t families = 1;           // sequence i shares with sequence i % families
    bool has_scales = false;        // pages are of int8
};

// Keys and values of each sequence, in shuffled blocks. Slots without a token hold poison.
class AttentionInput {
public:
    AttentionInput(const AttentionCase& shape, Dtype dtype, Random& random)
        : shape_(shape), queries_(dtype, tokens() * query_size(), random, 2.0), keys_(dtype, num_blocks() * block_elements()),
          values_(dtype, num_blocks() * block_elements()), small_keys_(keys_.size(), 1), small_values_(keys_.size(), 1),
          key_scales_(keys_.size() / shape.head_dim, 1), value_scales_(keys_.size() / shape.head_dim, 1),
          out_(dtype, tokens() * query_size()), block_table_(shape.sequences.size() * max_blocks(), -1) {
        std::vector<int32_t> order(num_blocks());
        std::iota(order.begin(), order.end(), 0);
        for (size_t i = order.size() - 1; i > 0; i--) std::swap(order[i], order[random.below(static_cast<int64_t>(i) + 1)]);
        size_t taken = 0;
        query_start_.push_back(0);
        for (size_t seq = 0; seq < shape.sequences.size(); seq++) {
            const Sequence& sequence = shape.sequences[seq];
            query_start_.push_back(query_start_.back() + static_cast<int32_t>(sequence.queries));
            context_len_.push_back(static_cast<int32_t>(sequence.context));
            int64_t shared = static_cast<int64_t>(seq) < shape.families ? 0 : shape.shared / shape.block_size;
            const int32_t* sharing = block_table_.data() + static_cast<int64_t>(seq) % shape.families * max_blocks();
            std::copy(sharing, sharing + shared, block_table_.data() + seq * max_blocks());
            for (int64_t token = shared * shape.block_size; token < sequence.context; token++) {
                if (token % shape.block_size == 0) block_table_[seq * max_blocks() + token / shape.block_size] = order[taken++];
                int64_t first = element(seq, token, 0);
                for (int64_t i = first; i < first + shape.kv_heads * shape.head_dim; i++) {
                    keys_.set(i, random.normal());
                    values_.set(i, random.normal());
                    small_keys_.data()[i] = static_cast<int8_t>(random.below(255) - 127);
                    small_values_.data()[i] = static_cast<int8_t>(random.below(255) - 127);
                    key_scales_.data()[i / shape.head_dim] = static_cast<float>(0.005 + std::fabs(random.normal()) / 100);
                    value_scales_.data()[i / shape.head_dim] = static_cast<float>(0.005 + std::fabs(random.normal()) / 100);
                }
            }
        }
    }

    Tensor& run(const Ops& ops, ThreadPool& pool, Dtype dtype) {
        call(ops, pool, dtype, 0, static_cast<int64_t>(shape_.sequences.size()), out_.data());
        return out_;
    }

    // One sequence alone.
    Tensor run_alone(const Ops& ops, ThreadPool& pool, Dtype dtype, int64_t seq) {
        Tensor out(dtype, shape_.sequences[seq].queries * query_size());
        call(ops, pool, dtype, seq, 1, out.data());
        return out;
    }

    void compare(const Tensor& got, Findings& found) const {
        int64_t group = shape_.heads / shape_.kv_heads, head_dim = shape_.head_dim;
        for (size_t seq = 0; seq < shape_.sequences.size(); seq++) {
            const Sequence& sequence = shape_.sequences[seq];
            for (int64_t query = 0; query < sequence.queries; query++)
                for (int64_t head = 0; head < shape_.heads; head++) {
                    int64_t at = (query_start_[seq] + query) * query_size() + head * head_dim;
                    int64_t end = sequence.context - sequence.queries + query + 1;
                    int64_t begin = shape_.window ? std::max<int64_t>(0, end - shape_.window) : 0;
                    std::vector<double> weights, sums(head_dim), magnitudes(head_dim);
                    double top = -INFINITY, total = 0;
                    for (int64_t token = begin; token < end; token++) {
                        double score = 0;
                        for (int64_t i = 0; i < head_dim; i++)
                            score += queries_.at(at + i) * key(element(seq, token, head / group) + i);
                        score /= std::sqrt(static_cast<double>(head_dim));
                        weights.push_back(shape_.softcap != 0 ? shape_.softcap * std::tanh(score / shape_.softcap) : score);
                        top = std::max(top, weights.back());
                    }
                    for (double& weight : weights) total += weight = std::exp(weight - top);
                    if (!shape_.sinks.empty()) total += std::exp(shape_.sinks[head] - top);
                    for (int64_t token = begin; token < end; token++)
                        for (int64_t i = 0; i < head_dim; i++) {
                            double part = weights[token - begin] / total * value(element(seq, token, head / group) + i);
                            sums[i] += part;
                            magnitudes[i] += std::fabs(part);
                        }
                    for (int64_t i = 0; i < head_dim; i++) found.compare(got.at(at + i), sums[i], magnitudes[i]);
                }
        }
    }

    int64_t first_element(int64_t seq) const { return query_start_[seq] * query_size(); }

private:
    int64_t query_size() const { return shape_.heads * shape_.head_dim; }
    int64_t block_elements() const { return shape_.block_size * shape_.kv_heads * shape_.head_dim; }

    int64_t tokens() const {
        int64_t count = 0;
        for (const Sequence& sequence : shape_.sequences) count += sequence.queries;
        return count;
    }

    int64_t num_blocks() const {
        int64_t count = 3;
        for (const Sequence& sequence : shape_.sequences) count += ceil_div(sequence.context, shape_.block_size);
        return count;
    }

    int64_t max_blocks() const {
        int64_t most = 0;
        for (const Sequence& sequence : shape_.sequences) most = std::max(most, ceil_div(sequence.context, shape_.block_size));
        return most + 1;
    }

    double key(int64_t i) const {
        return shape_.has_scales ? double{key_scales_.data()[i / shape_.head_dim]} * small_keys_.data()[i] : keys_.at(i);
    }
    double value(int64_t i) const {
        return shape_.has_scales ? double{value_scales_.data()[i / shape_.head_dim]} * small_values_.data()[i] : values_.at(i);
    }

    int64_t element(size_t seq, int64_t token, int64_t kv_head) const {
        int64_t block = block_table_[seq * max_blocks() + token / shape_.block_size];
        return ((block * shape_.block_size + token % shape_.block_size) * shape_.kv_heads + kv_head) * shape_.head_dim;
    }

    void call(const Ops& ops, ThreadPool& pool, Dtype dtype, int64_t seq, int64_t num_seqs, void* out) {
        std::vector<int32_t> query_start;
        for (int64_t i = seq; i <= seq + num_seqs; i++) query_start.push_back(query_start_[i] - query_start_[seq]);
        AttentionArgs args{};
        args.dtype = dtype;
        args.queries = queries_.data(query_start_[seq] * query_size());
        args.keys = keys_.data();
        args.values = values_.data();
        if (shape_.has_scales) {
            args.keys = small_keys_.data();
            args.values = small_values_.data();
            args.key_scales = key_scales_.data();
            args.value_scales = value_scales_.data();
        }
        args.query_start = query_start.data();
        args.context_len = context_len_.data() + seq;
        args.block_table = block_table_.data() + seq * max_blocks();
        args.out = out;
        args.num_seqs = num_seqs;
        args.max_blocks = max_blocks();
        args.block_size = shape_.block_size;
        args.num_heads = shape_.heads;
        args.num_kv_heads = shape_.kv_heads;
        args.head_dim = shape_.head_dim;
        args.sliding_window = shape_.window;
        args.softcap = shape_.softcap;
        args.sinks = shape_.sinks.empty() ? nullptr : shape_.sinks.data();
        ops.paged_attention(pool, args);
    }

    const AttentionCase& shape_;
    Tensor queries_, keys_, values_;
    Room<int8_t> small_keys_, small_values_;
    Room<float> key_scales_, value_scales_;
    Tensor out_;
    std::vector<int32_t> query_start_, context_len_, block_table_;
};

Findings test_attention(const Subject& on, std::vector<AttentionCase> cases) {
    // The matrix unit multiplies queries and weights that are rounded to bfloat16.
    Findings found(on.has_matrix_unit() && on.dtype == Dtype::bfloat16 ? 0.03 : 5e-6 + on.rounding());
    Random random(4);
    for (size_t i = 0, count = cases.size(); i < count; i++) {
        cases.push_back(cases[i]);
        cases.back().has_scales = true;
    }
    for (const AttentionCase& shape : cases) {
        AttentionInput input(shape, on.dtype, random);
        const Tensor& out = input.run(on.ops, on.pool, on.dtype);
        input.compare(out, found);
        found.require_guards(out);
        for (size_t seq = 0; seq < shape.sequences.size(); seq++) {
            auto number = static_cast<int64_t>(seq);
            Tensor one = input.run_alone(on.ops, on.alone, on.dtype, number);
            found.require(one.has_bits_of(out, input.first_element(number), one.size()), "a sequence alone has other bits than in a batch");
            found.require_guards(one);
        }
    }
    return found;
}

}  // namespace

Findings test_decode_attention(const Subject& on) {
    std::vector<AttentionCase> cases{
        {64, 6, 2, 16, 0, {{1, 1}, {1, 16}, {1, 257}, {1, 600}}},  // one split, several
        {64, 6, 2, 16, 40, {{1, 5}, {1, 300}, {1, 512}}},
        {128, 4, 1, 8, 0, {{1, 33}, {1, 100}}},
        {64, 9, 3, 5, 300, {{1, 700}, {4, 531}}},
        {64, 2, 2, 1, 0, {{1, 20}, {2, 2}}},
        {64, 1, 1, 16, 0, std::vector<Sequence>(23, {1, 19})},  // runs of parts on one thread
        {64, 4, 2, 16, 0, {{1, 19}, {1, 300}, {3, 33}}, 1.5f, {-2.0f, 0.5f, 3.0f, -100.0f}},
    };
    for (int64_t head_dim : {16, 32, 80, 96, 256}) cases.push_back({head_dim, 5, 1, 16, 0, {{1, 37}}});
    return test_attention(on, cases);
}

Findings test_attention_of_shared_blocks(const Subject& on) {
    std::vector<Sequence> alike{{1, 300}, {1, 257}, {2, 290}, {6, 270}, {1, 512}};
    std::vector<AttentionCase> cases{
        {64, 9, 3, 16, 0, alike, 0, {}, 256},                                                // a whole split
        {64, 9, 3, 16, 0, {{1, 240}, {1, 256}, {1, 225}, {1, 224}}, 0, {}, 224},             // the start of the only split
        {64, 8, 2, 5, 270, {{1, 345}, {1, 345}, {1, 345}, {3, 345}, {6, 300}}, 0, {}, 300},  // behind a window's start
        {64, 4, 1, 16, 0, alike, 1.5f, {-2.0f, 0.5f, 3.0f, -100.0f}, 208},
        {32, 6, 2, 1, 0, std::vector<Sequence>(70, {2, 131}), 0, {}, 128, 2},  // several groups, of several tiles
        {64, 9, 3, 16, 0, {{1, 100}, {1, 99}, {1, 97}, {1, 98}}, 0, {}, 48},   // too few tokens
    };
    for (int64_t head_dim : {16, 80, 96, 128, 256}) cases.push_back({head_dim, 6, 1, 16, 0, {{1, 84}, {1, 70}, {1, 64}}, 0, {}, 64});
    return test_attention(on, cases);
}

Findings test_attention_of_few_queries(const Subject& on) {
    std::vector<AttentionCase> cases{{64, 6, 2, 16, 0, {{2, 2}, {6, 300}, {3, 258}}}, {32, 6, 2, 4, 30, {{5, 5}, {6, 290}}}};
    for (int64_t head_dim : {16, 80, 96, 128, 256}) cases.push_back({head_dim, 2, 1, 16, 0, {{4, 21}}});
    return test_attention(on, cases);
}

Findings test_prefill_attention(const Subject& on) {
    std::vector<AttentionCase> cases{
        {64, 6, 2, 16, 0, {{7, 7}, {40, 40}, {65, 130}, {1, 9}}},
        {32, 4, 1, 16, 20, {{90, 90}, {33, 170}}},
        {16, 100, 1, 3, 0, {{8, 11}}},  // more heads than a tile has rows
        {64, 4, 2, 16, 30, {{40, 40}, {17, 130}}, 1.5f, {-2.0f, 0.5f, 3.0f, -100.0f}},
    };
    for (int64_t head_dim : {80, 96, 128, 256}) cases.push_back({head_dim, 2, 1, 16, 0, {{17, 70}}});
    return test_attention(on, cases);
}
