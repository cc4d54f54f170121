// Attention over cells (cells.h). Each file that includes this header compiles it for its own instruction set; the results are the same on all.
#pragma once
#include "cells.h"
#include "per_isa/attend.h"
#include "per_isa/stored_rows.h"

namespace edge {
namespace {

using Doubles8 = double __attribute__((ext_vector_type(8)));
using Counts8 = uint64_t __attribute__((ext_vector_type(8)));
using Signed8 = int64_t __attribute__((ext_vector_type(8)));
using Words32 = uint16_t __attribute__((ext_vector_type(32)));
constexpr uint16_t kGreatestHalf = 0x6c00;  // the bits of kGreatestValue in float16; those of larger values and of NaN are larger

// How many queries, and how many registers of doubles, are added up at once; and up to how many queries float16 values are read without a copy.
#if defined(__AVX512F__)
constexpr int kCellQueries = 8, kFewCellQueries = 8, kCellVectors = 2;
#elif defined(__AVX2__)
constexpr int kCellQueries = 6, kFewCellQueries = 4, kCellVectors = 2;
#else
constexpr int kCellQueries = 6, kFewCellQueries = 4, kCellVectors = 4;
#endif
constexpr int64_t kMostFew = 8;
constexpr int kDoubles = kWidth / 2;
constexpr int64_t kCellPanel = kCellVectors * kDoubles;  // dimensions of values that are added up at once
using Doubles = double __attribute__((ext_vector_type(kDoubles)));
static_assert(kDimsAtOnce % kCellPanel == 0 && kCellPanel % 8 == 0);

// Calls `work` with the type of rows as a template argument.
template <class Work>
void with_type(CellType type, Work work) {
    switch (type) {
        case CellType::kHalf: return work.template operator()<RowType::kHalf>();
        case CellType::kQ8: return work.template operator()<RowType::kQ8>();
        case CellType::kQ4: return work.template operator()<RowType::kQ4>();
    }
}

inline const char* cell_at(const Cells& c, int64_t cell) { return c.data + static_cast<size_t>(cell) * c.step; }

constexpr uint16_t kLeftOut = 0xfc00;  // minus infinity
static_assert(kCellsAtOnce == 32);

// Lists the cells that any query of the call attends to; returns how many there are.
int64_t list_cells(const CellAttention& a, int32_t* list) {
    const uint16_t* masks[kMaxQueries];  // without repetitions, since the heads of a row share a mask
    int64_t rows = 0, count = 0;
    for (int64_t r = 0; r < a.queries; r++)
        if (!rows || masks[rows - 1] != a.mask[r]) masks[rows++] = a.mask[r];
    for (int64_t first = 0; first < a.cells; first += kCellsAtOnce) {
        const int64_t chunk = a.cells - first < kCellsAtOnce ? a.cells - first : kCellsAtOnce;
        Words32 any = 0;
        for (int64_t r = 0; r < rows; r++) {
            Words32 mask = kLeftOut;
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

// Converts the mask of some listed cells to floats.
void load_masks(const uint16_t* mask, const int32_t* list, int64_t count, float* to) {
    for (int64_t j = 0; j < count; j++) to[j] = static_cast<float>(__builtin_bit_cast(_Float16, mask[list[j]]));
}

// Prefetches part of some listed rows, `bytes` bytes from `at` on, into the first level cache. Cells may be anywhere, so the processor cannot
// predict their addresses.
[[gnu::always_inline]] inline void fetch_rows(const Cells& c, const int32_t* list, int64_t count, int64_t at, int64_t bytes) {
    for (int64_t k = 0; k < count; k++)
        for (int64_t byte = at; byte < at + bytes; byte += kLine) __builtin_prefetch(cell_at(c, list[k]) + byte);
}

// The bytes of `values` values of a row.
inline int64_t bytes_of(const Cells& c, int64_t values) { return values / values_of_block(c.type) * static_cast<int64_t>(bytes_of_block(c.type)); }

// Whether rows are read without a copy, once for each block of queries: if they are float16 and there are few queries.
inline bool reads_in_place(const CellAttention& a, const Cells& c) { return a.queries <= kMostFew && c.type == CellType::kHalf && c.dim % kLanes == 0; }

// Writes the scores of some listed cells to own.tile.
void score_in_place(const CellAttention& a, const CellMemory::Own& own, int64_t first, int64_t count, int64_t near) {
    const char* keys[kMaxNearKeys];
    for (int64_t k = 0; k < whole(count, kScoreKeys); k++) keys[k] = cell_at(a.keys, own.list[first + (k < count ? k : count - 1)]);
    for (int64_t k = 0; k < count; k += kScoreKeys)
        each_block<kScoreQueries>(a.queries, [&]<int kQueries>(int64_t r) {
            const auto load = [&](int key, int64_t at, auto...) __attribute__((always_inline)) { return load_values<RowType::kHalf, kWidth>(keys[k + key], at); };
            score_block<kQueries>(a.query + r, a.keys.dim, own.tile + r * near + k, near, count - k < kScoreKeys ? count - k : kScoreKeys, load);
        });
}

void score_copies(const CellAttention& a, const CellMemory::Own& own, int64_t first, int64_t count, int64_t near) {
    const int64_t dim = whole(a.keys.dim, kLanes);
    const float* keys[kMaxNearKeys];
    with_type(a.keys.type, [&]<RowType kType>() {
        for (int64_t k = 0; k < count; k++) {
            const char* row = cell_at(a.keys, own.list[first + k]);
            for (int64_t at = 0; at < dim; at += kLanes) store16(own.rows + k * dim + at, load_values<kType>(row, at, a.keys.dim));
        }
    });
    for (int64_t k = 0; k < count; k++) keys[k] = own.rows + k * dim;
    score_near(a.query, a.queries, keys, count, a.keys.dim, own.tile, near);
}

// Computes the scores of the listed cells [first, last).
void score_cells(const CellAttention& a, const CellMemory& m, const CellMemory::Own& own, int64_t first, int64_t last) {
    const int64_t near = near_keys(a.keys.dim);
    const auto score = reads_in_place(a, a.keys) ? score_in_place : score_copies;
    float masks[kMaxNearKeys];
    for (; first < last; first += near) {
        const int64_t chunk = last - first < near ? last - first : near;
        const int64_t next = last - first - chunk < near ? last - first - chunk : near;
        fetch_rows(a.keys, own.list + first + chunk, next, 0, bytes_of(a.keys, a.keys.dim));
        score(a, own, first, chunk, near);
        for (int64_t r = 0; r < a.queries; r++) {
            if (!r || a.mask[r] != a.mask[r - 1]) load_masks(a.mask[r], own.list + first, chunk, masks);
            const float* tile = own.tile + r * near;
            float* to = m.scores + r * m.stride + first;
            for (int64_t k = 0; k < chunk; k++) to[k] = masks[k] == -__builtin_inff() ? masks[k] : tile[k] * a.scale + masks[k];
        }
    }
}

// Returns how many units a sum has that started from the anchor; the anchor was added `times` times.
Signed8 units(Counts8 sum, int64_t times) {
    return __builtin_bit_cast(Signed8, sum - static_cast<uint64_t>(times) * __builtin_bit_cast(uint64_t, kShareAnchor));
}

Counts8 counted(Doubles8 share) { return __builtin_bit_cast(Counts8, share + kShareAnchor); }

// Turns scores [stride] into shares, e^(score - greatest). Returns their sum in units: 0 if no cell is admitted, negative if a score is NaN.
// The shares of cells that are not admitted are e^-87, which is far less than half a unit.
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
        sum += counted(__builtin_convertvector(shares.lo, Doubles8)) + counted(__builtin_convertvector(shares.hi, Doubles8));
    }
    return __builtin_reduce_add(units(sum, stride / 8));
}

// Multiplies the shares of some cells for one query with `factor`, a power of two, and rounds them to odd multiples of kShareStep.
void odd_shares(const float* shares, double factor, double* to) {
    constexpr double kTwoSteps = 0x1.8p52 * 2 * kShareStep;  // neighbours of this double are two kShareStep apart
    for (int64_t j = 0; j < kCellsAtOnce; j += 8) {
        const Doubles8 share = __builtin_convertvector(load_as<Floats8>(shares + j), Doubles8) * factor;
        const Doubles8 odd = (share + kTwoSteps) - kTwoSteps + kShareStep;
        __builtin_memcpy(to + j, &odd, sizeof odd);
    }
}

// Returns the smallest power of two that is at least the sum of shares.
inline double power_above(int64_t units) {
    double power = 1;
    while (power < static_cast<double>(units) * kShareUnit) power *= 2;
    return power;
}

// Converts the dims [first, last) of some listed cells to panels of doubles, [dims / kCellPanel, cells, kCellPanel]. A value that is not a number
// becomes 0, and its cell is marked as bad.
template <RowType kType>
void load_panels(const CellAttention& a, const CellMemory& m, const CellMemory::Own& own, int64_t cell, int64_t count, int64_t first, int64_t last) {
    for (int64_t j = 0; j < count; j++) {
        const char* row = cell_at(a.values, own.list[cell + j]);
        Ints16 good = -1;
        const auto each_eight = [&](auto store) {
            for (int64_t at = first; at < last; at += kLanes) {
                const Floats16 values = store(at);
                for (int half = 0; half < 2; half++) {
                    const int64_t dim = at - first + half * 8;
                    const Doubles8 eight = __builtin_convertvector(half ? values.hi : values.lo, Doubles8);
                    __builtin_memcpy(own.values + (dim / kCellPanel * kCellsAtOnce + j) * kCellPanel + dim % kCellPanel, &eight, sizeof eight);
                }
            }
        };
        each_eight([&](int64_t at) __attribute__((always_inline)) {
            const Floats16 values = load_values<kType>(row, at, a.values.dim);
            good &= __builtin_elementwise_abs(values) <= Floats16(kGreatestValue);
            return values;
        });
        if (__builtin_reduce_and(good) != 0) continue;
        each_eight([](int64_t) { return Floats16(0.0f); });
        __atomic_store_n(m.bad + cell + j, uint8_t{1}, __ATOMIC_RELAXED);
        __atomic_store_n(m.any_bad, 1, __ATOMIC_RELAXED);
    }
}

// sums[r * stride + i] += share of query r and value j times value j, for all j. load(j, value) reads a panel of value j.
template <int kQueries, class Load>
[[gnu::always_inline]] inline void sum_cells(const double* shares, int64_t count, int64_t stride, double* sums, Load load) {
    Doubles sum[kQueries][kCellVectors];
    for (int r = 0; r < kQueries; r++)
        for (int v = 0; v < kCellVectors; v++) sum[r][v] = load_as<Doubles>(sums + r * stride + v * kDoubles);
    for (int64_t j = 0; j < count; j++) {
        Doubles value[kCellVectors];
        load(j, value);
        for (int r = 0; r < kQueries; r++) {
            const Doubles share = shares[r * kCellsAtOnce + j];
            for (int v = 0; v < kCellVectors; v++) sum[r][v] = __builtin_elementwise_fma(value[v], share, sum[r][v]);
        }
    }
    for (int r = 0; r < kQueries; r++)
        for (int v = 0; v < kCellVectors; v++) __builtin_memcpy(sums + r * stride + v * kDoubles, &sum[r][v], sizeof(Doubles));
}

// The values whose dims [first, last) are prefetched next, divided into as many parts as the current values have panels.
struct Fetched {
    const Cells& cells;
    const int32_t* list;
    int64_t count, first, last;

    void part(int64_t at, int64_t dims) const {
        const int64_t row = at * count / dims, end = (at + kCellPanel) * count / dims;
        fetch_rows(cells, list + row, end - row, bytes_of(cells, first), bytes_of(cells, last - first));
    }
};

void sum_panels(const CellAttention& a, const CellMemory::Own& own, int64_t count, int64_t dims, const Fetched& next) {
    for (int64_t at = 0; at < dims; at += kCellPanel) {
        next.part(at, dims);
        each_block<kCellQueries>(a.queries, [&]<int kQueries>(int64_t r) {
            const double* panel = own.values + at * kCellsAtOnce;
            sum_cells<kQueries>(own.shares + r * kCellsAtOnce, count, dims, own.sums + r * dims + at, [&](int64_t j, Doubles* value) __attribute__((always_inline)) {
                for (int v = 0; v < kCellVectors; v++) value[v] = load_as<Doubles>(panel + j * kCellPanel + v * kDoubles);
            });
        });
    }
}

// Adds up these dims of the `count` values at `rows`, without a copy.
void sum_in_place(const CellAttention& a, const CellMemory::Own& own, const char* const* rows, int64_t count, const Fetched& next) {
    using Panel = float __attribute__((ext_vector_type(kCellPanel)));
    const int64_t first = next.first, dims = next.last - first;
    for (int64_t at = 0; at < dims; at += kCellPanel) {
        next.part(at, dims);
        each_block<kFewCellQueries>(a.queries, [&]<int kQueries>(int64_t r) {
            sum_cells<kQueries>(own.shares + r * kCellsAtOnce, count, dims, own.sums + r * dims + at, [&](int64_t j, Doubles* value) __attribute__((always_inline)) {
                using Wide = double __attribute__((ext_vector_type(kCellPanel)));
                const Panel narrow = load_values<RowType::kHalf, kCellPanel>(rows[j], first + at);
                const Wide wide = __builtin_convertvector(narrow, Wide);
                __builtin_memcpy(value, &wide, sizeof wide);
            });
        });
    }
}

// Whether the dims [first, last) of all these float16 values are numbers, and none exceeds kGreatestValue.
bool are_good(const char* const* rows, int64_t count, int64_t first, int64_t last) {
    Words32 greatest = 0;
    for (int64_t j = 0; j < count; j++)
        for (int64_t at = first; at < last; at += 32) greatest = __builtin_elementwise_max(greatest, load_as<Words32>(rows[j] + at * 2) & 0x7fff);
    return __builtin_reduce_max(greatest) <= kGreatestHalf;
}

// Adds up the dims [first, last) of all listed values.
void gather_cells(const CellAttention& a, const CellMemory& m, const CellMemory::Own& own, int64_t count, int64_t first, int64_t last) {
    const int64_t dims = last - first;
    const bool in_place = reads_in_place(a, a.values) && last <= a.values.dim;
    double factors[kMaxQueries];
    for (int64_t r = 0; r < a.queries; r++) factors[r] = 1 / power_above(m.totals[r]);
    for (int64_t i = 0; i < a.queries * dims; i++) own.sums[i] = kAnchor;
    for (int64_t cell = 0; cell < count; cell += kCellsAtOnce) {
        const int64_t chunk = count - cell < kCellsAtOnce ? count - cell : kCellsAtOnce;
        for (int64_t r = 0; r < a.queries; r++) odd_shares(m.scores + r * m.stride + cell, factors[r], own.shares + r * kCellsAtOnce);
        const char* rows[kCellsAtOnce];
        for (int64_t j = 0; j < chunk; j++) rows[j] = cell_at(a.values, own.list[cell + j]);
        const int64_t later = count - cell - chunk;
        const Fetched next = {a.values, own.list + cell + chunk, later < kCellsAtOnce ? later : kCellsAtOnce, first, last < a.values.dim ? last : a.values.dim};
        if (in_place && are_good(rows, chunk, first, last)) {
            sum_in_place(a, own, rows, chunk, next);
            continue;
        }
        with_type(a.values.type, [&]<RowType kType>() { load_panels<kType>(a, m, own, cell, chunk, first, last); });
        sum_panels(a, own, chunk, dims, next);
    }
    for (int64_t r = 0; r < a.queries; r++) {
        const double factor = 1 / (static_cast<double>(m.totals[r]) * kShareUnit * factors[r]);
        const int64_t end = last < a.values.dim ? last : a.values.dim;
        for (int64_t at = first; at < end; at++) a.out[r][at] = m.totals[r] > 0 ? static_cast<float>((own.sums[r * dims + at - first] - kAnchor) * factor) : 0;
    }
}

// Whether a query attends to a bad cell, which has a value that is not a number.
bool sees_bad(const CellAttention& a, const CellMemory& m, const int32_t* list, int64_t count, int64_t query) {
    for (int64_t cell = 0; cell < count; cell++)
        if (m.bad[cell] && a.mask[query][list[cell]] != kLeftOut) return true;
    return false;
}

void attend_cells(const CellAttention& a, const CellMemory& m, const Team& team) {
    const CellMemory::Own own = m.of(team.thread);
    const int64_t count = list_cells(a, own.list), stride = whole(count, kCellsAtOnce), blocks = whole(a.values.dim, kDimsAtOnce) / kDimsAtOnce;
    const auto mine = [&](int64_t parts, int64_t size, auto work) {
        const int64_t first = team.first(parts, team.thread), last = team.first(parts, team.thread + 1);
        if (first < last) work(first * size, last * size);
    };
    mine(stride / kLanes, kLanes, [&](int64_t first, int64_t last) {
        score_cells(a, m, own, first, last < count ? last : count);
        for (int64_t cell = first; cell < last && cell < count; cell++) m.bad[cell] = 0;
        for (int64_t r = 0; r < a.queries; r++)
            for (int64_t cell = first > count ? first : count; cell < last; cell++) m.scores[r * m.stride + cell] = -__builtin_inff();
    });
    if (team.thread == 0) *m.any_bad = 0;
    team.meet();
    mine(a.queries, 1, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++) m.totals[r] = share_cells(m.scores + r * m.stride, stride);
    });
    team.meet();
    mine(blocks, kDimsAtOnce, [&](int64_t first, int64_t last) { gather_cells(a, m, own, count, first, last); });
    team.meet();
    mine(a.queries, 1, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++) {
            const bool number = m.totals[r] >= 0 && !(*m.any_bad && sees_bad(a, m, own.list, count, r));
            for (int64_t i = 0; !number && i < a.values.dim; i++) a.out[r][i] = __builtin_nanf("");
        }
    });
    team.meet();
}

}  // namespace
}  // namespace edge
