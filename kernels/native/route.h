// Which experts a row's router chooses, and the rows of each expert.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops.h"

namespace pagoda {

struct RouteArgs {
    const float* logits;            // [rows, experts]
    const float* correction;        // [experts], added to scores for the choice alone; or null
    int32_t* experts;               // [rows, chosen], written
    float* weights;                 // likewise
    int64_t rows, num_experts, chosen, groups, chosen_groups;
    bool is_sigmoid, is_normalized;
    float scale, least_sum;
};

// Takes the `count` greatest, the first of equal ones first. NaN is taken last. What is taken becomes NaN.
inline void take_greatest(float* values, int64_t size, int64_t count, int32_t* taken) {
    for (int64_t rank = 0; rank < count; rank++) {
        int64_t best = -1;
        for (int64_t i = 0; i < size; i++)
            if (!std::isnan(values[i]) && (best < 0 || values[i] > values[best])) best = i;
        auto is_taken = [&](int64_t i) { return std::find(taken, taken + rank, static_cast<int32_t>(i)) != taken + rank; };
        if (best < 0)
            for (best = 0; is_taken(best);) best++;
        taken[rank] = static_cast<int32_t>(best);
        values[best] = std::numeric_limits<float>::quiet_NaN();
    }
}

// Leaves the experts of the groups whose two greatest scores have the greatest sums; the others get -inf.
inline void keep_groups(float* scores, float* room, const RouteArgs& args) {
    int64_t size = args.num_experts / args.groups;
    std::vector<int32_t> kept(args.chosen_groups);
    for (int64_t group = 0; group < args.groups; group++) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t i = group * size; i < (group + 1) * size; i++) {
            second = std::max(second, std::min(first, scores[i]));
            first = std::max(first, scores[i]);
        }
        room[group] = size > 1 ? first + second : first;
    }
    take_greatest(room, args.groups, args.chosen_groups, kept.data());
    for (int64_t group = 0; group < args.groups; group++)
        if (std::find(kept.begin(), kept.end(), group) == kept.end())
            std::fill(scores + group * size, scores + (group + 1) * size, -INFINITY);
}

inline void route(ThreadPool& pool, const RouteArgs& args) {
    int64_t count = args.num_experts, rows_a_part = rows_per_part(args.rows, 8 * count);
    pool.run(static_cast<int>(ceil_div(args.rows, rows_a_part)), [&](int part) {
        std::vector<float> room(3 * count);
        float *scores = room.data(), *choice = scores + count, *of_groups = choice + count;
        int64_t end = std::min(args.rows, (part + 1) * rows_a_part);
        for (int64_t row = part * rows_a_part; row < end; row++) {
            const float* logits = args.logits + row * count;
            float most = *std::max_element(logits, logits + count), total = 0;
            for (int64_t i = 0; i < count; i++) {
                scores[i] = args.is_sigmoid ? 1 / (1 + std::exp(-logits[i])) : std::exp(logits[i] - most);
                total += scores[i];
            }
            for (int64_t i = 0; i < count; i++) {
                if (!args.is_sigmoid) scores[i] /= total;
                choice[i] = args.correction ? scores[i] + args.correction[i] : scores[i];
            }
            if (args.chosen_groups < args.groups) keep_groups(choice, of_groups, args);
            int32_t* experts = args.experts + row * args.chosen;
            take_greatest(choice, count, args.chosen, experts);
            float sum = 0, *weights = args.weights + row * args.chosen;
            for (int64_t rank = 0; rank < args.chosen; rank++) sum += weights[rank] = scores[experts[rank]];
            float factor = args.is_normalized ? args.scale / std::max(sum, args.least_sum) : args.scale;
            for (int64_t rank = 0; rank < args.chosen; rank++) weights[rank] *= factor;
        }
    });
}

// Sorts the choices of all rows by expert, those of one expert by row.
struct GroupArgs {
    const int32_t* experts;         // [rows, chosen]
    int32_t* starts;                // [num_experts + 1], written, as in ExpertRows
    int32_t* sources;               // [rows * chosen], likewise
    int32_t* places;                // [rows, chosen], where each choice is among the sources
    int64_t rows, chosen, num_experts;
};

inline void group_rows(const GroupArgs& args) {
    int64_t choices = args.rows * args.chosen;
    std::fill(args.starts, args.starts + args.num_experts + 1, 0);
    for (int64_t i = 0; i < choices; i++) args.starts[args.experts[i] + 1]++;
    for (int64_t expert = 0; expert < args.num_experts; expert++) args.starts[expert + 1] += args.starts[expert];
    // Each start moves to its expert's end, which is the next expert's start.
    for (int64_t i = 0; i < choices; i++) {
        args.places[i] = args.starts[args.experts[i]]++;
        args.sources[args.places[i]] = static_cast<int32_t>(i / args.chosen);
    }
    std::copy_backward(args.starts, args.starts + args.num_experts, args.starts + args.num_experts + 1);
    args.starts[0] = 0;
}

}  // namespace pagoda
