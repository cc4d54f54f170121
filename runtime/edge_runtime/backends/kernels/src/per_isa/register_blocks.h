// Sums of products that stay in registers, for attention. Each file that includes this header compiles it for its own instruction set. These differ in
// how many sums fit into registers, but the results are the same.
#pragma once
#include "per_isa/floats16.h"

namespace edge {
namespace {

// The lanes of a register (kWidth); how many queries and keys are multiplied at once for scores; and how many queries and registers of values for sums
// of values. A block of eight queries is cut into equal parts.
#if defined(__AVX512F__)
constexpr int kWidth = 16, kScoreQueries = 4, kSumQueries = 8, kFewBlock = 8;
#elif defined(__AVX2__)
constexpr int kWidth = 8, kScoreQueries = 3, kSumQueries = 6, kFewBlock = 4;
#else
constexpr int kWidth = 4, kScoreQueries = 4, kSumQueries = 8, kFewBlock = 8;
#endif
constexpr int kScoreKeys = 4, kSumVectors = 2;
constexpr int kGroups = kLanes / kWidth;  // how many registers make 16 lanes

using Register = float __attribute__((ext_vector_type(kWidth)));

[[gnu::always_inline]] inline Register load_register(const float* from) {
    Register value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

[[gnu::always_inline]] inline Register load_register(const float* from, int64_t count) {
    if (count >= kWidth) return load_register(from);
    Register value = 0;
    if (count > 0) __builtin_memcpy(&value, from, static_cast<size_t>(count) * sizeof(float));
    return value;
}

[[gnu::always_inline]] inline void store_register(float* to, Register value, int64_t count = kWidth) {
    if (count >= kWidth) __builtin_memcpy(to, &value, sizeof value);
    else if (count > 0) __builtin_memcpy(to, &value, static_cast<size_t>(count) * sizeof(float));
}

// each_block calls `work` with blocks of kMost of `count` rows, and last_block with the remaining rows as one smaller block.
template <int kMost, class Work>
[[gnu::always_inline]] inline void last_block(int64_t row, int64_t count, Work& work) {
    if constexpr (kMost > 0) {
        if (count == kMost) work.template operator()<kMost>(row);
        else last_block<kMost - 1>(row, count, work);
    }
}
template <int kMost, class Work>
void each_block(int64_t count, Work work) {
    int64_t row = 0;
    for (; row + kMost <= count; row += kMost) work.template operator()<kMost>(row);
    last_block<kMost - 1>(row, count - row, work);
}

// Does what `total` does, for the 16 lanes of each of four keys. Register g has the lanes from g * kWidth on.
[[gnu::always_inline]] inline Floats4 totals(const Register (&sums)[kGroups][kScoreKeys]) {
    Floats8 first, second;  // four lanes of the first and second key, and of the third and fourth
#if defined(__AVX512F__)
    const auto halves = [](Floats16 one, Floats16 other) {
        return __builtin_shufflevector(one, other, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(one, other, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    };
    const Floats16 a = halves(sums[0][0], sums[0][1]), b = halves(sums[0][2], sums[0][3]);
    const Floats16 quarters = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                              __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    first = quarters.lo, second = quarters.hi;
#elif defined(__AVX2__)
    const auto halves = [](Floats8 one, Floats8 other) {
        return __builtin_shufflevector(one, other, 0, 1, 2, 3, 8, 9, 10, 11) + __builtin_shufflevector(one, other, 4, 5, 6, 7, 12, 13, 14, 15);
    };
    first = halves(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]);
    second = halves(sums[0][2] + sums[1][2], sums[0][3] + sums[1][3]);
#else
    Floats4 of[kScoreKeys];
    for (int k = 0; k < kScoreKeys; k++) of[k] = (sums[0][k] + sums[2][k]) + (sums[1][k] + sums[3][k]);
    first = __builtin_shufflevector(of[0], of[1], 0, 1, 2, 3, 4, 5, 6, 7), second = __builtin_shufflevector(of[2], of[3], 0, 1, 2, 3, 4, 5, 6, 7);
#endif
    // Adds lanes 0 and 2, and lanes 1 and 3, of each key; the keys are in the order 0, 2, 1, 3.
    const Floats8 pairs = __builtin_shufflevector(first, second, 0, 1, 8, 9, 4, 5, 12, 13) + __builtin_shufflevector(first, second, 2, 3, 10, 11, 6, 7, 14, 15);
    return __builtin_shufflevector(pairs, pairs, 0, 4, 2, 6) + __builtin_shufflevector(pairs, pairs, 1, 5, 3, 7);
}

#if defined(__AVX512F__)
// The same for four queries and four keys at once, in the order of queries, which takes fewer steps per query.
[[gnu::always_inline]] inline Floats16 all_totals(const Register (&sums)[4][kGroups][kScoreKeys]) {
    const auto halves = [](Floats16 one, Floats16 other) {
        return __builtin_shufflevector(one, other, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(one, other, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    };
    Floats16 quarters[4];  // four lanes of each key
    for (int r = 0; r < 4; r++) {
        const Floats16 a = halves(sums[r][0][0], sums[r][0][1]), b = halves(sums[r][0][2], sums[r][0][3]);
        quarters[r] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                      __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
    const auto pairs = [](Floats16 one, Floats16 other) {
        return __builtin_shufflevector(one, other, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               __builtin_shufflevector(one, other, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    };
    const Floats16 a = pairs(quarters[0], quarters[1]), b = pairs(quarters[2], quarters[3]);
    const Floats16 by_key = __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
                            __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
    return __builtin_shufflevector(by_key, by_key, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
}
#endif

// Writes the first `keys` of four scores.
[[gnu::always_inline]] inline void store_scores(float* to, Floats4 scores, int64_t keys) {
    if (keys == kScoreKeys) __builtin_memcpy(to, &scores, sizeof scores);
    else
        for (int64_t k = 0; k < keys; k++) to[k] = scores[k];
}

// scores[r * stride + k] = query r times key k, for `keys` keys, at most kScoreKeys. load(k, at) loads the lanes of key k from `at` on, and must work for
// all kScoreKeys; load(k, at, count) loads `count` of them, and zeros. A score is the sum of 16 lanes, each of which adds up every 16th product, so it
// does not depend on what else is computed with it.
template <int kQueries, class Load>
[[gnu::always_inline]] inline void score_block(const float* const* query_at, int64_t dim, float* scores, int64_t stride, int64_t keys, Load load) {
    Register sums[kQueries][kGroups][kScoreKeys];
    for (int g = 0; g < kGroups; g++) {
        Register sum[kQueries][kScoreKeys];
        for (auto& of_query : sum)
            for (auto& value : of_query) value = 0;
        const auto add = [&](int64_t at, auto... count) __attribute__((always_inline)) {
            Register query[kQueries];
            for (int r = 0; r < kQueries; r++) query[r] = load_register(query_at[r] + at, count...);
            for (int k = 0; k < kScoreKeys; k++) {
                const Register values = load(k, at, count...);
                for (int r = 0; r < kQueries; r++) sum[r][k] = __builtin_elementwise_fma(values, query[r], sum[r][k]);
            }
        };
        int64_t at = g * kWidth;
        for (; at + kWidth <= dim; at += kLanes) add(at);
        if (at < dim) add(at, dim - at);
        for (int r = 0; r < kQueries; r++)
            for (int k = 0; k < kScoreKeys; k++) sums[r][g][k] = sum[r][k];
    }
#if defined(__AVX512F__)
    if constexpr (kQueries == 4) {
        const Floats16 all = all_totals(sums);
        store_scores(scores, all.lo.lo, keys), store_scores(scores + stride, all.lo.hi, keys);
        store_scores(scores + 2 * stride, all.hi.lo, keys), store_scores(scores + 3 * stride, all.hi.hi, keys);
        return;
    }
#endif
    for (int r = 0; r < kQueries; r++) store_scores(scores + r * stride, totals(sums[r]), keys);
}

// out[r * out_stride + i] += share of query r and value j times value j, for `count` values in order, and i below `lanes`, at most kVectors registers.
// load(j, v) loads register v of value j.
template <int kQueries, int kVectors, class Load>
[[gnu::always_inline]] inline void sum_block(const float* shares, int64_t share_stride, int64_t count, float* out, int64_t out_stride, int64_t lanes, Load load) {
    Register sum[kQueries][kVectors];
    for (int r = 0; r < kQueries; r++)
        for (int v = 0; v < kVectors; v++) sum[r][v] = load_register(out + r * out_stride + v * kWidth, lanes - v * kWidth);
    for (int64_t j = 0; j < count; j++) {
        Register value[kVectors];
        for (int v = 0; v < kVectors; v++) value[v] = load(j, v);
        for (int r = 0; r < kQueries; r++) {
            const Register share = shares[r * share_stride + j];
            for (int v = 0; v < kVectors; v++) sum[r][v] = __builtin_elementwise_fma(value[v], share, sum[r][v]);
        }
    }
    for (int r = 0; r < kQueries; r++)
        for (int v = 0; v < kVectors; v++) store_register(out + r * out_stride + v * kWidth, sum[r][v], lanes - v * kWidth);
}

}  // namespace
}  // namespace edge
