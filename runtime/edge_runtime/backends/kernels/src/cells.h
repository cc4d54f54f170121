// Attention over cells: rows of keys and values in any order, as in llama.cpp's KV cache, which holds rows of several sequences. A query
// attends to the cells that its mask admits.
//
// The result depends only on which rows these are, not on where they are or on what is between them. The greatest score is the same in every
// order, and sums are made exact, so that they are the same in every order too. (A share is e^(score - greatest score).)
//
// - The sum of shares: each share is rounded to a multiple of kShareUnit, and the units are counted as integers.
// - The sum of weighted values: a double that starts at kAnchor, where the distance between doubles is 2^-38. So each weighted value is rounded
//   to a multiple of 2^-38 when it is added. This rounding could depend on the sum so far only for a tie, a product exactly between two
//   multiples. There are no ties: shares are odd multiples of kShareStep, and the lowest bit of a value is at most 2^12, so the lowest bit of
//   a product is below that of a tie.
//
// So the sum is the same for any order, batch, division among threads and instruction set. Shares add up to at most 1, so no sum leaves the
// range in which doubles have this distance, and the distance is fine enough for float32.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "layout.h"

namespace edge {

constexpr double kShareUnit = 0x1p-34;
// Neighbours of a double this large are kShareUnit apart: a number that is added to it is rounded to units, and its low bits count the units.
constexpr double kShareAnchor = 0x1.8p52 * kShareUnit;
constexpr double kAnchor = 0x1.8p52 * 0x1p-38;
constexpr double kShareStep = 0x1p-52;
// A larger value counts as NaN. Gemma 4 normalizes values, so none exceeds the square root of the head width, 23.
constexpr float kGreatestValue = 4096;
constexpr int64_t kCellsAtOnce = 32;

// How a row is stored: float16, or blocks of 32 with a float16 scale, as q8_0 and q4_0 in GGUF files.
enum class CellType { kHalf, kQ8, kQ4 };
constexpr int64_t values_of_block(CellType type) { return type == CellType::kHalf ? 1 : 32; }
constexpr size_t bytes_of_block(CellType type) { return type == CellType::kHalf ? 2 : type == CellType::kQ8 ? 34 : 18; }

// The rows of one head, `step` bytes apart.
struct Cells {
    CellType type;
    const char* data;
    size_t step;
    int64_t dim;
};

struct CellAttention {
    Cells keys, values;
    int64_t cells;
    float scale;  // of scores
    int64_t queries;  // at most kMaxQueries, and at most as many as the memory was made for
    const float* query[kMaxQueries];  // [keys.dim]
    const uint16_t* mask[kMaxQueries];  // float16 [cells], added to scaled scores; minus infinity excludes a cell
    float* out[kMaxQueries];  // [values.dim]; zeros if no cell is admitted
};

inline int64_t whole(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// The threads that attend together; `wait` is a barrier for all of them.
struct Team {
    int64_t thread, threads;
    void (*wait)(void*);
    void* pool;

    void meet() const {
        if (threads > 1) wait(pool);
    }
    // The first of `count` parts that thread number `of` takes; its parts end where those of the next thread begin.
    int64_t first(int64_t count, int64_t of) const { return count * of / threads; }
};

constexpr int64_t kDimsAtOnce = 32;  // dimensions of values; a thread takes whole blocks of them

// The kernel's work memory, which begins at a cache line. All threads share the first `bytes`; each has `own` more bytes.
struct CellMemory {
    // scores [queries, stride]; sums of shares [queries]; for each cell, whether its values are not numbers; and whether there is such a cell.
    float* scores;
    int64_t* totals;
    uint8_t* bad;
    int32_t* any_bad;
    int64_t stride;
    struct Own {
        float *rows, *tile;  // copies of some keys, and their scores
        double *values, *shares, *sums;
        int32_t* list;
    } first;
    size_t bytes = 0, own = 0;

    CellMemory(int64_t cells, int64_t key_dim, int64_t value_dim, int64_t queries, void* memory) {
        char* const begin = static_cast<char*>(memory);
        size_t used = 0;
        const auto take = [&]<class Type>(Type*& to, int64_t count) {
            to = begin ? reinterpret_cast<Type*>(begin + used) : nullptr;
            used += static_cast<size_t>(whole(count * static_cast<int64_t>(sizeof(Type)), kLine));
        };
        const int64_t near = near_keys(key_dim), wide = whole(value_dim, kDimsAtOnce);
        stride = (whole(cells, kCellsAtOnce) / kTile | 1) * kTile;  // an odd number of lines, so that rows of scores use different cache sets
        take(scores, queries * stride), take(totals, queries), take(bad, cells), take(any_bad, 1);
        bytes = used;
        take(first.rows, near * whole(key_dim, kTile)), take(first.tile, queries * near), take(first.values, kCellsAtOnce * wide);
        take(first.shares, queries * kCellsAtOnce), take(first.sums, queries * wide), take(first.list, cells);
        own = used - bytes;
    }
    Own of(int64_t thread) const {
        const auto moved = [&]<class Type>(Type* from) { return reinterpret_cast<Type*>(reinterpret_cast<char*>(from) + static_cast<size_t>(thread) * own); };
        return {moved(first.rows), moved(first.tile), moved(first.values), moved(first.shares), moved(first.sums), moved(first.list)};
    }
    size_t size(int64_t threads) const { return bytes + own * static_cast<size_t>(threads); }
};

}  // namespace edge
