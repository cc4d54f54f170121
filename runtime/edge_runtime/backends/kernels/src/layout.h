// The layout of packed weights, and what a kernel is. Everything else in this folder follows from this header.
//
// A matrix [outputs, inputs] is cut into tiles of 16 outputs and into blocks of `block` inputs that share a scale. Levels are unsigned with
// the zero point 2^(bits-1). A tile is a run of 64-byte lines; dword n of a line belongs to output n of the tile:
//   4 bits: a line holds 8 inputs; byte j of dword n is level[n][8g+j] in its low half, level[n][8g+4+j] in its high half
//   8 bits: a line holds 4 inputs; byte j of dword n is level[n][4g+j]
//   2 bits: a line holds 16 inputs; bits 2p of byte j of dword n are level[n][16g+4p+j]
// Scales lie apart: for each tile and block 16 of them, float32, or float16 where all of them are float16 numbers.
//
// Activations are rounded to int8 for each row and block: q = round(a / s), s = max|a| / 127, to nearest even. A block's result is the exact
// integer sum((level - zero) * q); blocks are added in order, acc = fma(float(sum), weight_scale * s, acc). So a row's numbers depend on
// nothing else in its batch, on no number of threads, and on no instruction set.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace edge {

constexpr int64_t kTile = 16;
constexpr int64_t kLine = 64;
constexpr int64_t kTilesAtOnce = 4;  // the most that a kernel takes; matrices are filled up to whole groups with tiles of zeros
constexpr int kMaxRows = 12;  // rows that a kernel keeps in registers
constexpr int64_t kAhead = 2048;  // bytes that weights are fetched ahead of their use

struct PackedMatrix {
    int64_t outputs, inputs;
    int bits, block;
    bool half_scales;
    const uint8_t* levels;
    const void* scales;

    int64_t blocks() const { return inputs / block; }
    int64_t tiles() const { return (outputs + kTile * kTilesAtOnce - 1) / (kTile * kTilesAtOnce) * kTilesAtOnce; }
    int64_t tile_bytes() const { return inputs * kTile * bits / 8; }
    int64_t scale_bytes() const { return half_scales ? 2 : 4; }
};

// Rounded rows: levels [blocks, rows, block], and [blocks, rows] the scales and the sums of levels. All rows of a block lie together: rows
// that are 4096 bytes apart would fall on the same lines of the nearest cache.
struct RoundedRows {
    const int8_t* levels;
    const float* scales;
    const int32_t* sums;
    int64_t rows;
};

// Multiplies all rows with the tiles [first, last) into out [rows, outputs].
using MultiplyTiles = void (*)(const PackedMatrix&, const RoundedRows&, int64_t first, int64_t last, float* out);
// Rounds row number `row` of `rows` into the arrays of a RoundedRows.
using RoundRow = void (*)(const float* values, int64_t inputs, int block, int64_t row, int64_t rows, int8_t* levels, float* scales, int32_t* sums);

// Attention of query rows [queries, dim] to the keys and values of one K/V head. Its rows are positions from `origin` on: `past` older ones,
// then `fresh` ones, each with `heads` queries, which attend to what lies up to their own row and, with a window, at most `window` rows back.
// Sums run over spans of kSpan positions, which are merged in order: a query's numbers depend on its position and on what it attends to, on
// nothing else in its batch.
constexpr int64_t kSpan = 128;
constexpr int64_t kMostQueries = 16;  // of one call

struct Attention {
    const float *queries, *past_keys, *past_values, *new_keys, *new_values;
    int64_t past, fresh, heads, dim, origin, window;  // a window of 0 is none

    // Positions that a query attends to.
    int64_t end(int64_t query) const { return origin + past + query / heads + 1; }
    int64_t begin(int64_t query) const { return window && end(query) - window > origin ? end(query) - window : origin; }
    int64_t first_span(int64_t query) const { return begin(query) / kSpan; }
    int64_t last_span(int64_t query) const { return (end(query) - 1) / kSpan; }
    // Floats of a query's state: the weighted sum of values, the greatest score, the sum of weights.
    int64_t state() const { return dim + 2; }
};

struct Attend {
    // Attends from `count` queries, `query` and the following, to one span; a query that sees none of it gets a state without weights.
    void (*span)(const Attention&, int64_t query, int64_t count, int64_t span, float* states);
    // Merges the state of the next span into that of those before it.
    void (*merge)(int64_t dim, float* state, const float* next);
};

struct Variant {
    const char* name;
    MultiplyTiles multiply;
    RoundRow round;
    Attend attend;
};

}  // namespace edge
