// Attention over cells: rows of keys and values in any order, as llama.cpp's memory holds those of several sequences. A query attends to the
// cells that its mask admits.
//
// Its numbers depend on which rows those are, not on where they lie, nor on what lies between them: the greatest score is the same in every
// order, and weighted values are rounded to multiples of kUnit, one by one, and added up as integers. That is exact, so any order, batch,
// division among threads and instruction set has the same sum. Units are fine enough for float32: a weight is at most 1.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "layout.h"

namespace edge {

constexpr double kUnit = 0x1p-34;
// A double this large has steps of kUnit: what is added to it is rounded to them, and its bits count them.
constexpr double kAnchor = 0x1.8p52 * kUnit;
// A larger value counts as no number, so that sums of 2^17 of them fit 64 bits. Gemma 4 normalizes values: none exceeds the square root of
// their number, 23.
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
    int64_t queries;  // at most kMaxQueries
    const float* query[kMaxQueries];  // [keys.dim]
    const uint16_t* mask[kMaxQueries];  // float16 [cells], added to scaled scores; minus infinity leaves a cell out
    float* out[kMaxQueries];  // [values.dim]; zeros where no cell is admitted
};

inline int64_t whole(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// What the kernel needs beside: memory for one thread, from a line on.
struct CellMemory {
    float *queries, *rows, *scores, *tile;  // rows: some keys, then some values
    double* shares;
    uint64_t* sums;
    int32_t *list, *bad;
    size_t bytes;

    CellMemory(int64_t cells, int64_t key_dim, int64_t value_dim, void* memory) : bytes(0) {
        char* const begin = static_cast<char*>(memory);
        const auto take = [&]<class Type>(Type*& to, int64_t count) {
            to = begin ? reinterpret_cast<Type*>(begin + bytes) : nullptr;
            bytes += static_cast<size_t>(whole(count * static_cast<int64_t>(sizeof(Type)), kLine));
        };
        const int64_t keys_wide = whole(key_dim, kTile), values_wide = whole(value_dim, kTile);
        take(queries, kMaxQueries * keys_wide);
        take(rows, kCellsAtOnce * (keys_wide > values_wide ? keys_wide : values_wide));
        take(scores, kMaxQueries * whole(cells, kTile));
        take(tile, kMaxQueries * kSpan);
        take(shares, kMaxQueries * kCellsAtOnce);
        take(sums, kMaxQueries * values_wide);
        take(list, cells);
        take(bad, cells);
    }
};

}  // namespace edge
