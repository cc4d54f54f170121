// The operations of a draft step besides its matrix products. Each file that includes this header compiles it for its own instruction set; the results
// are the same on all.
#pragma once
#include "draft/steps.h"
#include "per_isa/attend_cells.h"
#include "per_isa/gate.h"
#include "per_isa/stored_rows.h"

namespace edge {
namespace {

float inverse_root(const float* x, int64_t count, float epsilon) {
    Floats16 sum = 0;
    each_lanes(count, [&](int64_t at, int64_t lanes) {
        const Floats16 value = load_lanes(x + at, lanes);
        sum = __builtin_elementwise_fma(value, value, sum);
    });
    return 1.0f / __builtin_sqrtf(total(sum) / static_cast<float>(count) + epsilon);
}

void draft_norm(const float* x, const float* weight, int64_t count, float epsilon, float* out) {
    const float scale = inverse_root(x, count, epsilon);
    each_lanes(count, [&](int64_t at, int64_t lanes) { store16(out + at, load_lanes(x + at, lanes) * scale * load_lanes(weight + at, lanes), lanes); });
}

void draft_add_norm(float* x, const float* y, const float* weight, int64_t count, float epsilon, float factor) {
    const float scale = inverse_root(y, count, epsilon);
    each_lanes(count, [&](int64_t at, int64_t lanes) {
        const Floats16 normed = load_lanes(y + at, lanes) * scale * load_lanes(weight + at, lanes);
        store16(x + at, (load_lanes(x + at, lanes) + normed) * factor, lanes);
    });
}

void draft_rotate(float* x, int64_t dim, const float* cosine, const float* sine) {
    const int64_t half = dim / 2;
    each_lanes(half, [&](int64_t at, int64_t lanes) {
        const Floats16 a = load_lanes(x + at, lanes), b = load_lanes(x + half + at, lanes);
        const Floats16 c = load_lanes(cosine + at, lanes), s = load_lanes(sine + at, lanes);
        store16(x + at, a * c - b * s, lanes);
        store16(x + half + at, b * c + a * s, lanes);
    });
}

// How many queries' scores are added up at once; a draft has few queries.
constexpr int kDraftBlock = kScoreQueries < kDraftQueries ? 2 : kDraftQueries;
constexpr int64_t kDraftRows = 16;  // how many values are added up at once
constexpr int64_t kKeysAhead = 8;   // how many keys ahead of their use keys are prefetched

// Prefetches some rows into the first level cache.
template <RowType kType>
[[gnu::always_inline]] inline void fetch_draft_rows(const char* const* rows, int64_t first, int64_t last, int64_t dim) {
    const int64_t bytes = dim / values_of_unit(kType) * static_cast<int64_t>(bytes_of_unit(kType));
    for (int64_t j = first; j < last && j < kDraftSpan; j++)
        for (int64_t byte = 0; byte < bytes; byte += kLine) __builtin_prefetch(rows[j] + byte);
}

template <RowType kType, int kQueries>
void draft_span(const VisibleRows& rows, const float* queries, int64_t first, int64_t count, float* states) {
    const int64_t stride = rows.dim + 2;
    const char *keys[kDraftSpan], *values[kDraftSpan];
    const float* query_at[kQueries];
    for (int64_t j = 0; j < kDraftSpan; j++) {
        const int64_t number = first + (j < count ? j : count - 1);  // repeats the last key, since scores are computed for several keys at once
        const size_t row = static_cast<size_t>(rows.cells ? rows.cells[number] : number);
        keys[j] = rows.keys + row * rows.key_step, values[j] = rows.values + row * rows.value_step;
    }
    for (int r = 0; r < kQueries; r++) query_at[r] = queries + r * rows.dim;
    alignas(kLine) float shares[kQueries * kDraftSpan];
    for (int64_t j = 0; j < count; j += kScoreKeys) {
        fetch_draft_rows<kType>(keys, j + kKeysAhead, j + kKeysAhead + kScoreKeys, rows.dim);
        each_block<kDraftBlock>(kQueries, [&]<int kBlock>(int64_t r) {
            const auto load = [&](int k, int64_t at, auto...) __attribute__((always_inline)) { return load_values<kType, kWidth>(keys[j + k], at); };
            score_block<kBlock>(query_at + r, rows.dim, shares + r * kDraftSpan + j, kDraftSpan, kScoreKeys, load);
        });
    }
    for (int r = 0; r < kQueries; r++) {
        for (int64_t i = 0; i < rows.dim; i++) states[r * stride + i] = 0;
        share(shares + r * kDraftSpan, count, states[r * stride + rows.dim], states[r * stride + rows.dim + 1]);
    }
    for (int64_t j = 0; j < count; j += kDraftRows)
        for (int64_t at = 0; at < rows.dim; at += kPanel) {
            const int64_t ahead = j + kDraftRows;
            fetch_draft_rows<kType>(values, ahead + at * kDraftRows / rows.dim, ahead + (at + kPanel) * kDraftRows / rows.dim, rows.dim);
            const auto add = [&]<int kVectors>() {
                sum_block<kQueries, kVectors>(shares + j, kDraftSpan, count - j < kDraftRows ? count - j : kDraftRows, states + at, stride, kVectors * kWidth,
                    [&](int64_t row, int v) __attribute__((always_inline)) { return load_values<kType, kWidth>(values[j + row], at + v * kWidth); });
            };
            if (at + kPanel <= rows.dim) add.template operator()<kSumVectors>();
            else add.template operator()<1>();
        }
}

template <RowType kType, int kQueries>
void draft_spans(const VisibleRows& rows, const float* queries, int64_t first, int64_t last, float* states, float* next) {
    for (int64_t at = first; at < last; at += kDraftSpan) {
        draft_span<kType, kQueries>(rows, queries, at, last - at < kDraftSpan ? last - at : kDraftSpan, at == first ? states : next);
        for (int r = 0; at != first && r < kQueries; r++) merge_spans(rows.dim, states + r * (rows.dim + 2), next + r * (rows.dim + 2));
    }
}

// `states` begins with the states of the queries, followed by the same number of states as work memory.
template <RowType kType>
void draft_attend_type(const VisibleRows& rows, const float* queries, int64_t count, int64_t first, int64_t last, float* states) {
    float* next = states + count * (rows.dim + 2);
    switch (count) {
        case 1: return draft_spans<kType, 1>(rows, queries, first, last, states, next);
        case 2: return draft_spans<kType, 2>(rows, queries, first, last, states, next);
        case 3: return draft_spans<kType, 3>(rows, queries, first, last, states, next);
        case 4: return draft_spans<kType, 4>(rows, queries, first, last, states, next);
    }
}

void draft_attend(const VisibleRows& rows, const float* queries, int64_t count, int64_t first, int64_t last, float* states) {
    switch (rows.type) {
        case RowType::kFloat: return draft_attend_type<RowType::kFloat>(rows, queries, count, first, last, states);
        case RowType::kHalf: return draft_attend_type<RowType::kHalf>(rows, queries, count, first, last, states);
        case RowType::kQ8: return draft_attend_type<RowType::kQ8>(rows, queries, count, first, last, states);
        case RowType::kQ4: return draft_attend_type<RowType::kQ4>(rows, queries, count, first, last, states);
        case RowType::kInt8: return draft_attend_type<RowType::kInt8>(rows, queries, count, first, last, states);
    }
}

constexpr float kLeast = -__builtin_inff();

// Returns the greatest value of a line. NaN counts as the smallest value.
float greatest_of_line(const float* values) {
    const Floats16 line = load16(values);
    return __builtin_reduce_max(line == line ? line : Floats16(kLeast));
}

// Returns the first index in a line with this value, or 16.
int64_t place_in_line(const float* values, float value) {
    int64_t at = 0;
    while (at < kLanes && values[at] != value) at++;
    return at;
}

void draft_greatest(float* values, int64_t count, int64_t top, float* maxima, int32_t* places) {
    const int64_t lines = (count + kLanes - 1) / kLanes, whole_lines = (lines + kLanes - 1) / kLanes * kLanes;
    for (int64_t at = count; at < lines * kLanes; at++) values[at] = kLeast;
    for (int64_t line = 0; line < whole_lines; line++) maxima[line] = line < lines ? greatest_of_line(values + line * kLanes) : kLeast;
    for (int64_t n = 0; n < top; n++) {
        Floats16 lanes = load16(maxima);
        for (int64_t line = kLanes; line < whole_lines; line += kLanes) lanes = __builtin_elementwise_max(lanes, load16(maxima + line));
        const float greatest = __builtin_reduce_max(lanes);
        int64_t place = 0;
        if (greatest > kLeast) {
            int64_t line = 0;
            while (maxima[line] != greatest) line++;
            place = line * kLanes + place_in_line(values + line * kLanes, greatest);
            values[place] = kLeast;
            maxima[line] = greatest_of_line(values + line * kLanes);
        } else {  // only NaN are left: takes the first indices that were not chosen yet
            for (int64_t other = 0; other < n; other++)
                if (places[other] == place) place++, other = -1;
        }
        places[n] = static_cast<int32_t>(place);
    }
}

void draft_softmax(const float* values, int64_t count, float& greatest, float& sum) {
    Floats16 lanes = kLeast;
    each_lanes(count, [&](int64_t at, int64_t some) {
        Floats16 line = load_lanes(values + at, some);
        for (int64_t i = some; i < kLanes; i++) line[i] = kLeast;
        lanes = __builtin_elementwise_max(lanes, line == line ? line : Floats16(kLeast));
    });
    greatest = __builtin_reduce_max(lanes);
    Floats16 sums = 0;
    each_lanes(count, [&](int64_t at, int64_t some) {
        Floats16 powers = exp16(load_lanes(values + at, some) - greatest);
        for (int64_t i = some; i < kLanes; i++) powers[i] = 0;
        sums += powers;
    });
    sum = total(sums);
}

int64_t draft_find(const float* values, int64_t count, float value, int64_t from) {
    while (from < count && from % kLanes && values[from] != value) from++;
    if (from < count && values[from] == value) return from;
    for (; from + kLanes <= count; from += kLanes)
        if (__builtin_reduce_or(load16(values + from) == Floats16(value)) != 0) return from + place_in_line(values + from, value);
    while (from < count && values[from] != value) from++;
    return from;
}

constexpr DraftSteps kDraftSteps = {draft_norm, draft_add_norm, draft_rotate, draft_attend, draft_greatest, draft_softmax, draft_find};

}  // namespace
}  // namespace edge
