// Attention of some query rows to a span of positions, and the merging of spans. Each file that includes it compiles it for its own
// instruction set. Sums run over 16 lanes and over positions in one order, so the numbers are the same on all.
#pragma once
#include "layout.h"
#include "per_isa/floats16.h"

namespace edge {
namespace {

constexpr int kQueriesAtOnce = 4, kKeysAtOnce = 4;

// scores[r * kSpan + j] = query r times key j.
template <int kQueries, int kKeys>
void score(const float* queries, const float* keys, int64_t dim, float* scores) {
    Floats16 sum[kQueries][kKeys];
    for (auto& row : sum)
        for (auto& value : row) value = 0;
    const auto add = [&](int64_t at, auto... count) {
        Floats16 query[kQueries];
        for (int r = 0; r < kQueries; r++) query[r] = load16(queries + r * dim + at, count...);
        for (int j = 0; j < kKeys; j++) {
            const Floats16 key = load16(keys + j * dim + at, count...);
            for (int r = 0; r < kQueries; r++) sum[r][j] = __builtin_elementwise_fma(key, query[r], sum[r][j]);
        }
    };
    int64_t at = 0;
    for (; at + kLanes <= dim; at += kLanes) add(at);
    if (at < dim) add(at, dim - at);
    for (int r = 0; r < kQueries; r++)
        for (int j = 0; j < kKeys; j++) scores[r * kSpan + j] = total(sum[r][j]);
}

// out[r * stride + i] += share of query r in value j, for all j in order.
template <int kQueries, int kKeys>
void gather(const float* shares, const float* values, int64_t dim, int64_t stride, float* out) {
    const auto add = [&](int64_t at, auto... count) {
        Floats16 value[kKeys];
        for (int j = 0; j < kKeys; j++) value[j] = load16(values + j * dim + at, count...);
        for (int r = 0; r < kQueries; r++) {
            Floats16 sum = load16(out + r * stride + at, count...);
            for (int j = 0; j < kKeys; j++) sum = __builtin_elementwise_fma(value[j], Floats16(shares[r * kSpan + j]), sum);
            store16(out + r * stride + at, sum, count...);
        }
    };
    int64_t at = 0;
    for (; at + kLanes <= dim; at += kLanes) add(at);
    if (at < dim) add(at, dim - at);
}

// Calls `part` with (rows of the matrix, position of the first, how many) for the positions [first, last): older ones, then new ones.
template <class Part>
void each_part(const float* past, const float* fresh, const Attention& a, int64_t first, int64_t last, Part part) {
    const int64_t border = a.origin + a.past, middle = first > border ? first : last < border ? last : border;
    if (first < middle) part(past + (first - a.origin) * a.dim, first, middle - first);
    if (middle < last) part(fresh + (middle - border) * a.dim, middle, last - middle);
}

template <int kQueries>
void score_keys(const float* queries, const float* keys, int64_t count, int64_t dim, float* scores) {
    int64_t j = 0;
    for (; j + kKeysAtOnce <= count; j += kKeysAtOnce) score<kQueries, kKeysAtOnce>(queries, keys + j * dim, dim, scores + j);
    for (; j < count; j++) score<kQueries, 1>(queries, keys + j * dim, dim, scores + j);
}

template <int kQueries>
void gather_values(const float* shares, const float* values, int64_t count, int64_t dim, int64_t stride, float* out) {
    int64_t j = 0;
    for (; j + kKeysAtOnce <= count; j += kKeysAtOnce) gather<kQueries, kKeysAtOnce>(shares + j, values + j * dim, dim, stride, out);
    for (; j < count; j++) gather<kQueries, 1>(shares + j, values + j * dim, dim, stride, out);
}

// Makes scores shares: e^(score - greatest). Returns greatest and total.
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

// Calls `work` for all of `count` rows, several at once where there are.
template <class Work>
void rows_at_once(int64_t count, Work work) {
    int64_t r = 0;
    for (; r + kQueriesAtOnce <= count; r += kQueriesAtOnce) work.template operator()<kQueriesAtOnce>(r);
    for (; r + 2 <= count; r += 2) work.template operator()<2>(r);
    for (; r < count; r++) work.template operator()<1>(r);
}

void attend_span(const Attention& a, int64_t query, int64_t count, int64_t span, float* states) {
    const int64_t start = span * kSpan, stride = a.state();
    float scores[kMaxQueries * kSpan];
    const auto within = [&](int64_t position) { return position < start ? start : position < start + kSpan ? position : start + kSpan; };
    const auto begin = [&](int64_t r) { return within(a.begin(query + r)); };
    const auto end = [&](int64_t r) { return within(a.end(query + r)); };
    each_part(a.past_keys, a.new_keys, a, begin(0), end(count - 1), [&](const float* keys, int64_t position, int64_t there) {
        for (int64_t j = 0; j < there; j += kKeysAtOnce * 4) {
            const int64_t width = there - j < kKeysAtOnce * 4 ? there - j : kKeysAtOnce * 4;
            rows_at_once(count, [&]<int kQueries>(int64_t r) {
                score_keys<kQueries>(a.queries + (query + r) * a.dim, keys + j * a.dim, width, a.dim, scores + r * kSpan + position + j - start);
            });
        }
    });
    for (int64_t r = 0; r < count; r++) {
        float* state = states + r * stride;
        for (int64_t i = 0; i < a.dim; i++) state[i] = 0;
        state[a.dim] = -__builtin_inff(), state[a.dim + 1] = 0;
        if (end(r) > begin(r)) share(scores + r * kSpan + begin(r) - start, end(r) - begin(r), state[a.dim], state[a.dim + 1]);
    }
    const auto gather_rows = [&](int64_t first, int64_t last, auto add) {
        each_part(a.past_values, a.new_values, a, first, last, [&](const float* values, int64_t position, int64_t there) {
            for (int64_t j = 0; j < there; j += kKeysAtOnce)
                add(values + j * a.dim, position + j - start, there - j < kKeysAtOnce ? there - j : kKeysAtOnce);
        });
    };
    // What only earlier queries attend to, what all do, what only later ones do: for each query in the order of positions.
    const int64_t common = begin(count - 1) < end(0) ? begin(count - 1) : end(0);
    const auto single = [&](int64_t r, int64_t first, int64_t last) {
        gather_rows(first, last, [&](const float* values, int64_t at, int64_t width) {
            gather_values<1>(scores + r * kSpan + at, values, width, a.dim, stride, states + r * stride);
        });
    };
    for (int64_t r = 0; r < count; r++) single(r, begin(r), common);
    gather_rows(common, end(0), [&](const float* values, int64_t at, int64_t width) {
        rows_at_once(count, [&]<int kQueries>(int64_t r) {
            gather_values<kQueries>(scores + r * kSpan + at, values, width, a.dim, stride, states + r * stride);
        });
    });
    for (int64_t r = 0; r < count; r++) single(r, begin(r) > end(0) ? begin(r) : end(0), end(r));
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
