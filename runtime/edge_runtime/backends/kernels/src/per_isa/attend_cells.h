// Attention over cells. Each file that includes it compiles it for its own instruction set; numbers are the same on all.
#pragma once
#include "cells.h"
#include "per_isa/attend.h"

namespace edge {
namespace {

using Doubles8 = double __attribute__((ext_vector_type(8)));
using Counts8 = uint64_t __attribute__((ext_vector_type(8)));
using Signed8 = int64_t __attribute__((ext_vector_type(8)));
using Halves16 = _Float16 __attribute__((ext_vector_type(16)));
using Bytes16 = int8_t __attribute__((ext_vector_type(16)));
using Raw16 = uint8_t __attribute__((ext_vector_type(16)));

template <class Vector, class From>
Vector load_as(const From* from) {
    Vector value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

float half_at(const char* from) {
    _Float16 value;
    __builtin_memcpy(&value, from, sizeof value);
    return static_cast<float>(value);
}

// A row as floats, with zeros up to a multiple of 16.
void load_row(const Cells& c, int64_t cell, float* to) {
    constexpr int64_t kBlock = values_of_block(CellType::kQ8);
    const char* from = c.data + static_cast<size_t>(cell) * c.step;
    if (c.type == CellType::kHalf) {
        int64_t at = 0;
        for (; at + kLanes <= c.dim; at += kLanes) store16(to + at, __builtin_convertvector(load_as<Halves16>(from + at * 2), Floats16));
        if (at == c.dim) return;
        Halves16 last = 0;
        __builtin_memcpy(&last, from + at * 2, static_cast<size_t>(c.dim - at) * 2);
        store16(to + at, __builtin_convertvector(last, Floats16));
    } else if (c.type == CellType::kQ8) {
        for (int64_t at = 0; at < c.dim; at += kBlock, from += bytes_of_block(c.type)) {
            const float scale = half_at(from);
            store16(to + at, __builtin_convertvector(load_as<Bytes16>(from + 2), Floats16) * scale);
            store16(to + at + 16, __builtin_convertvector(load_as<Bytes16>(from + 18), Floats16) * scale);
        }
    } else {
        for (int64_t at = 0; at < c.dim; at += kBlock, from += bytes_of_block(c.type)) {
            const float scale = half_at(from);
            const Raw16 raw = load_as<Raw16>(from + 2);
            store16(to + at, (__builtin_convertvector(raw & 15, Floats16) - 8.0f) * scale);
            store16(to + at + 16, (__builtin_convertvector(raw >> 4, Floats16) - 8.0f) * scale);
        }
    }
}

// Whether a row of values has something that is no number, or too large for a unit.
bool is_bad(const float* row, int64_t dim) {
    Ints16 good = -1;
    for (int64_t at = 0; at < dim; at += kLanes) good &= __builtin_elementwise_abs(load16(row + at)) <= Floats16(kGreatestValue);
    return __builtin_reduce_and(good) == 0;
}

using Masks32 = uint16_t __attribute__((ext_vector_type(32)));
constexpr uint16_t kLeftOut = 0xfc00;  // minus infinity
static_assert(kCellsAtOnce == 32 && kCellsAtOnce <= kSpan);

// The cells that any query of the call attends to.
int64_t list_cells(const CellAttention& a, int32_t* list) {
    const uint16_t* masks[kMaxQueries];  // heads of a row share a mask
    int64_t rows = 0, count = 0;
    for (int64_t r = 0; r < a.queries; r++)
        if (!rows || masks[rows - 1] != a.mask[r]) masks[rows++] = a.mask[r];
    for (int64_t first = 0; first < a.cells; first += kCellsAtOnce) {
        const int64_t chunk = a.cells - first < kCellsAtOnce ? a.cells - first : kCellsAtOnce;
        Masks32 any = 0;
        for (int64_t r = 0; r < rows; r++) {
            Masks32 mask = kLeftOut;
            __builtin_memcpy(&mask, masks[r] + first, static_cast<size_t>(chunk) * 2);
            any |= mask ^ kLeftOut;
        }
        if (__builtin_reduce_or(any) == 0) continue;
        for (int64_t j = 0; j < chunk; j++) {
            list[count] = static_cast<int32_t>(first + j);
            count += any[j] != 0;
        }
    }
    return count;
}

// The masks of some listed cells as floats; minus infinity behind them.
void load_masks(const uint16_t* mask, const int32_t* list, int64_t count, float* to) {
    for (int64_t j = 0; j < kCellsAtOnce; j++) to[j] = j < count ? static_cast<float>(__builtin_bit_cast(_Float16, mask[list[j]])) : -__builtin_inff();
}

void score_cells(const CellAttention& a, const CellMemory& m, int64_t count, int64_t stride) {
    const int64_t dim = whole(a.keys.dim, kLanes);
    for (int64_t r = 0; r < a.queries; r++) {
        for (int64_t i = a.keys.dim; i < dim; i++) m.queries[r * dim + i] = 0;
        __builtin_memcpy(m.queries + r * dim, a.query[r], static_cast<size_t>(a.keys.dim) * 4);
    }
    for (int64_t first = 0; first < count; first += kCellsAtOnce) {
        const int64_t chunk = count - first < kCellsAtOnce ? count - first : kCellsAtOnce;
        for (int64_t j = 0; j < chunk; j++) load_row(a.keys, m.list[first + j], m.rows + j * dim);
        for (int64_t j = 0; j < chunk; j += kKeysAtOnce) {
            const int64_t width = chunk - j < kKeysAtOnce ? chunk - j : kKeysAtOnce;
            rows_at_once(a.queries, [&]<int kQueries>(int64_t r) {
                score_keys<kQueries>(m.queries + r * dim, m.rows + j * dim, width, dim, m.tile + r * kSpan + j);
            });
        }
        float masks[kCellsAtOnce];
        for (int64_t r = 0; r < a.queries; r++) {
            if (!r || a.mask[r] != a.mask[r - 1]) load_masks(a.mask[r], m.list + first, chunk, masks);
            for (int64_t j = 0; j < chunk; j += kLanes) {
                const Floats16 mask = load16(masks + j), score = load16(m.tile + r * kSpan + j) * a.scale + mask;
                store16(m.scores + r * stride + first + j, mask == -__builtin_inff() ? mask : score);
            }
        }
    }
}

// The units in a number that was added to the anchor `times` times, as a count.
Signed8 units(Counts8 sum, int64_t times) {
    return __builtin_bit_cast(Signed8, sum - static_cast<uint64_t>(times) * __builtin_bit_cast(uint64_t, kAnchor));
}

Counts8 counted(Doubles8 value, Doubles8 share) { return __builtin_bit_cast(Counts8, __builtin_elementwise_fma(value, share, Doubles8(kAnchor))); }

// Makes scores [stride] shares: e^(score - greatest). Returns their sum in units; 0 where no cell is admitted, less where a score is no number.
// Shares of cells that are left out are e^-87, far less than half a unit of any value.
int64_t share_cells(float* scores, int64_t stride) {
    Floats16 maxima = -__builtin_inff();
    Ints16 numbers = -1;
    for (int64_t i = 0; i < stride; i += kLanes) {
        const Floats16 score = load16(scores + i);
        numbers &= score == score;
        maxima = score > maxima ? score : maxima;
    }
    const float greatest = __builtin_reduce_max(maxima);
    if (__builtin_reduce_and(numbers) == 0 || greatest == __builtin_inff()) return -1;
    if (greatest == -__builtin_inff()) return 0;
    Counts8 sum = 0;
    for (int64_t i = 0; i < stride; i += kLanes) {
        const Floats16 shares = exp16(load16(scores + i) - greatest);
        store16(scores + i, shares);
        sum += counted(__builtin_convertvector(shares.lo, Doubles8), 1.0) + counted(__builtin_convertvector(shares.hi, Doubles8), 1.0);
    }
    return __builtin_reduce_add(units(sum, stride / 8));
}

// sums[r * stride + i] += share of query r in value j, for all j.
template <int kQueries>
void gather_cells(const double* shares, const float* values, int64_t count, int64_t stride, uint64_t* sums) {
    for (int64_t at = 0; at < stride; at += 8) {
        Counts8 sum[kQueries];
        for (int r = 0; r < kQueries; r++) sum[r] = load_as<Counts8>(sums + r * stride + at);
        for (int64_t j = 0; j < count; j++) {
            const Doubles8 value = __builtin_convertvector(load_as<Floats8>(values + j * stride + at), Doubles8);
            for (int r = 0; r < kQueries; r++) sum[r] += counted(value, Doubles8(shares[r * kCellsAtOnce + j]));
        }
        for (int r = 0; r < kQueries; r++) __builtin_memcpy(sums + r * stride + at, &sum[r], sizeof sum[r]);
    }
}

// Adds up all values; returns how many of the cells are bad, and puts them into the memory's list.
int64_t gather_all(const CellAttention& a, const CellMemory& m, int64_t count, int64_t stride) {
    const int64_t dim = whole(a.values.dim, kLanes);
    int64_t bad = 0;
    __builtin_memset(m.sums, 0, static_cast<size_t>(a.queries * dim) * sizeof *m.sums);
    for (int64_t first = 0; first < count; first += kCellsAtOnce) {
        const int64_t chunk = count - first < kCellsAtOnce ? count - first : kCellsAtOnce;
        for (int64_t j = 0; j < chunk; j++) {
            float* row = m.rows + j * dim;
            load_row(a.values, m.list[first + j], row);
            if (!is_bad(row, dim)) continue;
            m.bad[bad++] = m.list[first + j];
            __builtin_memset(row, 0, static_cast<size_t>(dim) * sizeof *row);
        }
        for (int64_t r = 0; r < a.queries; r++)
            for (int64_t j = 0; j < chunk; j += 8) {
                const Doubles8 shares = __builtin_convertvector(load_as<Floats8>(m.scores + r * stride + first + j), Doubles8);
                __builtin_memcpy(m.shares + r * kCellsAtOnce + j, &shares, sizeof shares);
            }
        rows_at_once(a.queries, [&]<int kQueries>(int64_t r) {
            gather_cells<kQueries>(m.shares + r * kCellsAtOnce, m.rows, chunk, dim, m.sums + r * dim);
        });
    }
    return bad;
}

void write_result(const uint64_t* sums, int64_t count, double factor, float* out, int64_t dim) {
    for (int64_t at = 0; at < dim; at += 8) {
        const Floats8 values = __builtin_convertvector(__builtin_convertvector(units(load_as<Counts8>(sums + at), count), Doubles8) * factor, Floats8);
        __builtin_memcpy(out + at, &values, static_cast<size_t>(dim - at < 8 ? dim - at : 8) * 4);
    }
}

void attend_cells(const CellAttention& a, void* memory) {
    const CellMemory m(a.cells, a.keys.dim, a.values.dim, memory);
    const int64_t count = list_cells(a, m.list), stride = whole(count, kLanes), dim = whole(a.values.dim, kLanes);
    int64_t totals[kMaxQueries];
    score_cells(a, m, count, stride);
    for (int64_t r = 0; r < a.queries; r++) totals[r] = share_cells(m.scores + r * stride, stride);
    const int64_t bad = gather_all(a, m, count, stride);
    for (int64_t r = 0; r < a.queries; r++) {
        bool number = totals[r] >= 0;
        for (int64_t i = 0; i < bad; i++) number &= a.mask[r][m.bad[i]] == kLeftOut;
        if (number && totals[r]) write_result(m.sums + r * dim, count, 1.0 / static_cast<double>(totals[r]), a.out[r], a.values.dim);
        else
            for (int64_t i = 0; i < a.values.dim; i++) a.out[r][i] = number ? 0.0f : __builtin_nanf("");
    }
}

}  // namespace
}  // namespace edge
