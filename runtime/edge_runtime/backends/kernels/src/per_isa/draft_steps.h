// What a draft step does between its products. Each file that includes it compiles it for its own instruction set; numbers are the same on all.
#pragma once
#include "draft/steps.h"
#include "per_isa/attend_cells.h"
#include "per_isa/gate.h"

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

// 16 values of a row, from a multiple of 16 on.
template <RowType kType>
[[gnu::always_inline]] inline Floats16 load_values(const char* row, int64_t at) {
    if constexpr (kType == RowType::kFloat) return load_as<Floats16>(row + at * 4);
    else if constexpr (kType == RowType::kHalf) return __builtin_convertvector(load_as<Halves16>(row + at * 2), Floats16);
    else if constexpr (kType == RowType::kInt8) return __builtin_convertvector(load_as<Bytes16>(row + at), Floats16);
    else {
        const char* block = row + at / 32 * bytes_of_unit(kType);
        const float scale = half_at(block);
        if constexpr (kType == RowType::kQ8) return __builtin_convertvector(load_as<Bytes16>(block + 2 + at % 32), Floats16) * scale;
        else {
            const Raw16 raw = load_as<Raw16>(block + 2);
            return (__builtin_convertvector(at % 32 ? raw >> 4 : raw & 15, Floats16) - 8.0f) * scale;
        }
    }
}

// How many keys, and how many times 16 values, have sums in registers beside four queries.
#if defined(__AVX512F__)
constexpr int kDraftKeys = 4, kDraftVectors = 4;
#else
constexpr int kDraftKeys = 1, kDraftVectors = 1;
#endif

template <RowType kType, int kQueries, int kKeys>
[[gnu::always_inline]] inline void draft_scores(const float* queries, const char* const* keys, int64_t dim, float* scores) {
    Floats16 sum[kQueries][kKeys];
    for (auto& of_query : sum)
        for (auto& of_key : of_query) of_key = 0;
    for (int64_t at = 0; at < dim; at += kLanes)
        for (int j = 0; j < kKeys; j++) {
            const Floats16 key = load_values<kType>(keys[j], at);
            for (int r = 0; r < kQueries; r++) sum[r][j] = __builtin_elementwise_fma(key, load16(queries + r * dim + at), sum[r][j]);
        }
    for (int r = 0; r < kQueries; r++)
        for (int j = 0; j < kKeys; j++) scores[r * kSpan + j] = total(sum[r][j]);
}

// The weighted sums of kVectors times 16 values from `at` on.
template <RowType kType, int kQueries, int kVectors>
[[gnu::always_inline]] inline void draft_sums(const float* shares, const char* const* values, int64_t count, int64_t at, int64_t stride, float* states) {
    Floats16 sum[kQueries][kVectors];
    for (auto& of_query : sum)
        for (auto& vector : of_query) vector = 0;
    for (int64_t j = 0; j < count; j++)
        for (int v = 0; v < kVectors; v++) {
            const Floats16 value = load_values<kType>(values[j], at + v * kLanes);
            for (int r = 0; r < kQueries; r++) sum[r][v] = __builtin_elementwise_fma(value, Floats16(shares[r * kSpan + j]), sum[r][v]);
        }
    for (int r = 0; r < kQueries; r++)
        for (int v = 0; v < kVectors; v++) store16(states + r * stride + at + v * kLanes, sum[r][v]);
}

template <RowType kType, int kQueries>
void draft_span(const VisibleRows& rows, const float* queries, int64_t first, int64_t count, float* states) {
    const int64_t stride = rows.dim + 2;
    const char *keys[kSpan], *values[kSpan];
    for (int64_t j = 0; j < count; j++) {
        const size_t row = static_cast<size_t>(rows.cells ? rows.cells[first + j] : first + j);
        keys[j] = rows.keys + row * rows.key_step, values[j] = rows.values + row * rows.value_step;
    }
    alignas(kLine) float shares[kQueries * kSpan];
    int64_t j = 0;
    for (; j + kDraftKeys <= count; j += kDraftKeys) draft_scores<kType, kQueries, kDraftKeys>(queries, keys + j, rows.dim, shares + j);
    for (; j < count; j++) draft_scores<kType, kQueries, 1>(queries, keys + j, rows.dim, shares + j);
    for (int r = 0; r < kQueries; r++) share(shares + r * kSpan, count, states[r * stride + rows.dim], states[r * stride + rows.dim + 1]);
    int64_t at = 0;
    for (; at + kDraftVectors * kLanes <= rows.dim; at += kDraftVectors * kLanes)
        draft_sums<kType, kQueries, kDraftVectors>(shares, values, count, at, stride, states);
    for (; at < rows.dim; at += kLanes) draft_sums<kType, kQueries, 1>(shares, values, count, at, stride, states);
}

template <RowType kType, int kQueries>
void draft_spans(const VisibleRows& rows, const float* queries, int64_t first, int64_t last, float* states, float* next) {
    for (int64_t at = first; at < last; at += kSpan) {
        draft_span<kType, kQueries>(rows, queries, at, last - at < kSpan ? last - at : kSpan, at == first ? states : next);
        for (int r = 0; at != first && r < kQueries; r++) merge_spans(rows.dim, states + r * (rows.dim + 2), next + r * (rows.dim + 2));
    }
}

// The states of the queries lie in front of as many that are work memory.
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

// NaN counts as the least.
float greatest_of_line(const float* values) {
    const Floats16 line = load16(values);
    return __builtin_reduce_max(line == line ? line : Floats16(kLeast));
}

// The first of a line that equals `value`; 16 where none does.
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
        } else {  // only values that are no numbers are left: the first places that were not chosen
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
