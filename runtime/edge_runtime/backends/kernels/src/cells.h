// Attention over cells: rows of keys and values in any order, as llama.cpp's memory holds those of several sequences. A query attends to the
// cells that its mask admits.
//
// Its numbers depend on which rows those are, not on where they lie, nor on what lies between them: the greatest score is the same in every
// order, and sums are exact. That of the shares rounds each of them to multiples of kShareUnit and counts these. That of the values is a double
// which begins with kAnchor: its steps are 2^-38, and each weighted value is rounded to them as it is added. Rounding would depend on the sum so far
// only where a product lies in the middle between two steps, which none does: shares are odd multiples of kShareStep, and the values' lowest
// bits are at most 2^12, so that the lowest bit of a product is below the middle's. So any order, batch, division among threads and instruction
// set has the same sum. Shares add up to at most 1: no sum leaves the range of these steps, and they are fine enough for float32.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "layout.h"

namespace edge {

constexpr double kShareUnit = 0x1p-34;
// A double this large has steps of kShareUnit: what is added to it is rounded to them, and its bits count them.
constexpr double kShareAnchor = 0x1.8p52 * kShareUnit;
constexpr double kAnchor = 0x1.8p52 * 0x1p-38;
constexpr double kShareStep = 0x1p-52;
// A larger value counts as no number. Gemma 4 normalizes values: none exceeds the square root of their number, 23.
constexpr float kGreatestValue = 4096;
constexpr int64_t kCellsAtOnce = 32;

// How a row is stored: float16, or blocks of 32 with a float16 scale, as q8_0 and q4_0 of GGUF files.
enum class CellType { kHalf, kQ8, kQ4 };
constexpr int64_t values_of_block(CellType type) { return type == CellType::kHalf ? 1 : 32; }
constexpr size_t bytes_of_block(CellType type) { return type == CellType::kHalf ? 2 : type == CellType::kQ8 ? 34 : 18; }

// One head's rows, `step` bytes apart.
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
    int64_t queries;  // at most kMaxQueries, and those of the memory
    const float* query[kMaxQueries];  // [keys.dim]
    const uint16_t* mask[kMaxQueries];  // float16 [cells], added to scaled scores; minus infinity leaves a cell out
    float* out[kMaxQueries];  // [values.dim]; zeros where no cell is admitted
};

inline int64_t whole(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// The threads that attend together; `wait` returns when all of them have called it.
struct Team {
    int64_t thread, threads;
    void (*wait)(void*);
    void* pool;

    void meet() const {
        if (threads > 1) wait(pool);
    }
    // The first of `count` parts that thread number `of` takes; the next one's first ends them.
    int64_t first(int64_t count, int64_t of) const { return count * of / threads; }
};

constexpr int64_t kDimsAtOnce = 32;  // of values: a thread takes whole blocks of them

// What the kernel needs beside: memory from a line on, of which `bytes` are common to all threads, and `own` more belong to each.
struct CellMemory {
    // scores [queries, stride], what shares add up to [queries], and for each of the cells whether its values are no numbers, and whether any are.
    float* scores;
    int64_t* totals;
    uint8_t* bad;
    int32_t* any_bad;
    int64_t stride;
    struct Own {
        float *rows, *tile;  // some keys, and their scores
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
        stride = (whole(cells, kCellsAtOnce) / kTile | 1) * kTile;  // an odd number of lines: rows of scores lie in different sets of a cache
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
