// Attention of some query rows to a span of positions, and the merging of spans. Each file that includes this header compiles it for its own
// instruction set. The order of sums, over 16 lanes and over positions, is fixed, so the results are the same on all of them.
#pragma once
#include "layout.h"
#include "per_isa/register_blocks.h"

namespace edge {
namespace {

constexpr int64_t kPanel = kSumVectors * kWidth;  // dimensions of values that are added up at once
// kValues values are added up at a time, so that copies of their panels stay in the first level cache for all queries. For up to kFewQueries queries,
// values are read without a copy, kFewValues rows at a time. The next rows are prefetched.
constexpr int64_t kValues = 64, kFewValues = 16, kFewQueries = 8;

// Returns the row of a position: one of the older rows, or one of the new ones.
inline const float* row_at(const float* past, const float* fresh, const Attention& a, int64_t position) {
    const int64_t row = position - a.origin;
    return row < a.past ? past + row * a.dim : fresh + (row - a.past) * a.dim;
}

// scores[r * stride + k] = query r times key k, for `count` queries and `keys` of the keys, at most kMaxNearKeys.
inline void score_near(const float* const* queries, int64_t count, const float** key, int64_t keys, int64_t dim, float* scores, int64_t stride) {
    for (int64_t k = keys; k % kScoreKeys; k++) key[k] = key[keys - 1];
    each_block<kScoreQueries>(count, [&]<int kQueries>(int64_t r) {
        for (int64_t first = 0; first < keys; first += kScoreKeys) {
            const float* const* from = key + first;
            const auto load = [&](int k, int64_t at, auto... lanes) __attribute__((always_inline)) { return load_register(from[k] + at, lanes...); };
            score_block<kQueries>(queries + r, dim, scores + r * stride + first, stride, keys - first < kScoreKeys ? keys - first : kScoreKeys, load);
        }
    });
}

// Adds up the values at the positions [first, last) for `count` queries. `shares` begins with the share of the first position.
inline void gather_values(const Attention& a, int64_t first, int64_t last, const float* shares, int64_t count, float* states) {
    const int64_t stride = a.state(), whole = a.dim / kPanel * kPanel;
    const bool few = count <= kFewQueries;
    const int64_t most = few ? kFewValues : kValues;
    alignas(kLine) float packed[kValues * kPanel];
    const float* rows[kValues];
    for (; first < last; first += most, shares += most) {
        const int64_t there = last - first < most ? last - first : most, later = last - first - there < most ? last - first - there : most;
        for (int64_t j = 0; j < there; j++) rows[j] = row_at(a.past_values, a.new_values, a, first + j);
        const auto fetch_next = [&](int64_t at) {
            for (int64_t j = 0; j < later; j++)
                for (int64_t i = at; i < at + kPanel; i += kLine / 4) __builtin_prefetch(row_at(a.past_values, a.new_values, a, first + there + j) + i);
        };
        for (int64_t at = 0; few && at < whole; at += kPanel) {
            fetch_next(at);
            each_block<kFewBlock>(count, [&]<int kQueries>(int64_t r) {
                sum_block<kQueries, kSumVectors>(shares + r * kSpan, kSpan, there, states + r * stride + at, stride, kPanel,
                    [&](int64_t j, int v) __attribute__((always_inline)) { return load_register(rows[j] + at + v * kWidth); });
            });
        }
        for (int64_t at = few ? whole : 0; at < a.dim; at += kPanel) {
            const int64_t lanes = a.dim - at < kPanel ? a.dim - at : kPanel;
            fetch_next(at);
            for (int64_t j = 0; j < there; j++)
                for (int v = 0; v < kSumVectors; v++) store_register(packed + j * kPanel + v * kWidth, load_register(rows[j] + at + v * kWidth, lanes - v * kWidth));
            each_block<kSumQueries>(count, [&]<int kQueries>(int64_t r) {
                sum_block<kQueries, kSumVectors>(shares + r * kSpan, kSpan, there, states + r * stride + at, stride, lanes,
                    [&](int64_t j, int v) __attribute__((always_inline)) { return load_register(packed + j * kPanel + v * kWidth); });
            });
        }
    }
}

// Turns scores into shares, e^(score - greatest). Returns the greatest score and the sum of shares.
void share(float* scores, int64_t count, float& greatest, float& sum) {
    greatest = scores[0];
    for (int64_t j = 1; j < count; j++) greatest = scores[j] > greatest ? scores[j] : greatest;
    Floats16 sums = 0;
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) {
        const Floats16 shares = exp16(load16(scores + j) - greatest);
        store16(scores + j, shares);
        sums += shares;
    }
    if (j < count) {
        store16(scores + j, exp16(load16(scores + j, count - j) - greatest), count - j);
        sums += load16(scores + j, count - j);
    }
    sum = total(sums);
}

void attend_span(const Attention& a, int64_t query, int64_t count, int64_t span, float* states) {
    const int64_t start = span * kSpan, stride = a.state();
    alignas(kLine) float scores[kMaxQueries * kSpan];
    const auto within = [&](int64_t position) { return position < start ? start : position < start + kSpan ? position : start + kSpan; };
    const auto begin = [&](int64_t r) { return within(a.begin(query + r)); };
    const auto end = [&](int64_t r) { return within(a.end(query + r)); };
    const int64_t near = near_keys(a.dim), all = end(count - 1);
    const float *keys[kMaxNearKeys], *queries[kMaxQueries];
    for (int64_t r = 0; r < count; r++) queries[r] = a.queries + (query + r) * a.dim;
    for (int64_t position = begin(0); position < all; position += near) {
        const int64_t there = all - position < near ? all - position : near;
        for (int64_t k = 0; k < there; k++) keys[k] = row_at(a.past_keys, a.new_keys, a, position + k);
        for (int64_t next = position + near; next < position + 2 * near && next < all; next++)
            for (int64_t i = 0; i < a.dim; i += kLine / 4) __builtin_prefetch(row_at(a.past_keys, a.new_keys, a, next) + i);
        score_near(queries, count, keys, there, a.dim, scores + position - start, kSpan);
    }
    for (int64_t r = 0; r < count; r++) {
        float* state = states + r * stride;
        for (int64_t i = 0; i < a.dim; i++) state[i] = 0;
        state[a.dim] = -__builtin_inff(), state[a.dim + 1] = 0;
        if (end(r) > begin(r)) share(scores + r * kSpan + begin(r) - start, end(r) - begin(r), state[a.dim], state[a.dim + 1]);
    }
    // Positions that only earlier queries attend to, then those that all attend to, then those of later queries only. So each query adds up its values
    // in the order of positions.
    const int64_t common = begin(count - 1) < end(0) ? begin(count - 1) : end(0);
    const auto gather = [&](int64_t r, int64_t rows, int64_t first, int64_t last) {
        if (first < last) gather_values(a, first, last, scores + r * kSpan + first - start, rows, states + r * stride);
    };
    for (int64_t r = 0; r < count; r++) gather(r, 1, begin(r), common);
    gather(0, count, common, end(0));
    for (int64_t r = 0; r < count; r++) gather(r, 1, begin(r) > end(0) ? begin(r) : end(0), end(r));
}

void merge_spans(int64_t dim, float* state, const float* next) {
    if (next[dim + 1] == 0) return;
    const float greatest = next[dim] > state[dim] ? next[dim] : state[dim];
    const Floats16 factors = exp16(Floats16{state[dim], next[dim]} - greatest);
    for (int64_t i = 0; i < dim; i++) state[i] = __builtin_fmaf(next[i], factors.y, state[i] * factors.x);
    state[dim] = greatest;
    state[dim + 1] = __builtin_fmaf(next[dim + 1], factors.y, state[dim + 1] * factors.x);
}

}  // namespace
}  // namespace edge
