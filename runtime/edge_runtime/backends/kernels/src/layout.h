// The layout of packed weights, and the interface of a kernel. Everything else in this folder is based on this header.
//
// A matrix [outputs, inputs] is cut into tiles of 16 outputs and into blocks of `block` inputs that share a scale. Levels are unsigned with
// the zero point 2^(bits-1). A tile is a sequence of 64-byte lines; dword n of a line belongs to output n of the tile:
//   4 bits: a line holds 8 inputs; byte j of dword n is level[n][8g+j] in its low half, level[n][8g+4+j] in its high half
//   8 bits: a line holds 4 inputs; byte j of dword n is level[n][4g+j]
//   2 bits: a line holds 16 inputs; bits 2p of byte j of dword n are level[n][16g+4p+j]
//   5 bits: five lines hold 32 inputs: four with the low 4 bits as above, one whose bit p of byte j of dword n is the fifth of level[n][32g+4p+j]
// Scales are stored after all levels: for each tile and block 16 of them, as float32, or as float16 if all of them are exact in float16. Types
// with minimums (q4_1 and q5_1 of GGUF files; float16) have 16 minimums after these, and the zero point 0: weight = scale * level + minimum.
//
// Activations are rounded to int8 for each row and block: q = round(a / s), s = max|a| / 127, to nearest even. The result of a block is the
// exact integer sum((level - zero) * q). Blocks are added in order: acc = fma(float(sum), weight_scale * s, acc), and with minimums then
// acc = fma(minimum, s * float(sum of q), acc). So the results of a row do not depend on the other rows of the batch, on the number of threads,
// or on the instruction set.
//
// With a static scale s, which is fixed in training, activations are rounded to q = clamp(round(a / s), -128, 127). Then a row of weights is a
// single block, with one scale per output, and its integers are added over the whole row: out = float(sum) * (weight_scale * s).
//
// A block of 256 inputs is a super-block, as in q4_K, q5_K and q6_K of GGUF files: its parts have integer scales. Instead of the scales above,
// there are for each tile and super-block (each item for 16 outputs side by side):
//   4 and 5 bits: 8 scales and 8 minimums (int8), each for 32 inputs; a factor of the scales and one of the minimums (float16);
//           weight = factor * scale * level - factor of minimums * minimum
//   6 bits: 16 scales (int8), each for 16 inputs; a factor (float16); weight = factor * scale * (level - 32). Three lines have 16 inputs: two
//           with the low 4 bits as above, one with the high 2 bits as above
// Parts are added in order to the result of the super-block: part = fma(float(sum), factor * scale, part), and with minimums then
// part = fma(factor of minimums * minimum, float(-sum of q), part). Finally acc = fma(part, s, acc).
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace edge {

constexpr int64_t kTile = 16;
constexpr int64_t kLine = 64;
constexpr int64_t kTilesAtOnce = 4;  // twice as many as a kernel multiplies at once; matrices are padded with tiles of zeros to whole groups
constexpr int64_t kOctet = 8;  // rounded inputs of a row that are contiguous: an octet
constexpr int64_t kSuper = 256;  // inputs of a super-block
constexpr int64_t kMaxPart = 128;  // the most inputs of a row that are rounded together by a static scale
constexpr int64_t kMaxStaticInputs = int64_t{1} << 16;  // the most inputs of a row, so that sums of products fit 32 bits
constexpr int64_t kStarts = 16, kSums = 8;  // parts of a super-block of 6 bits, and of 4 or 5 bits
constexpr int64_t kMinimums = kSums * kTile, kFactors = 2 * kMinimums;  // offsets of minimums and factors from a super-block's scales
constexpr int kMaxRows = 12;  // the most rows that a kernel keeps in registers, and the most rows of a panel
// How many bytes ahead of their use weights are prefetched into the first and second level caches, and scales into the first.
constexpr int64_t kAhead = 2048, kFarAhead = 8192, kAheadScales = 512;

struct PackedMatrix {
    int64_t outputs, inputs;
    int bits, block;
    bool half_scales;
    const uint8_t* levels;
    const void* scales;
    bool minimums = false;  // after the scales of blocks; super-blocks of 4 and 5 bits always have minimums
    float static_scale = 0;  // of activations; 0: each row and block has its own scale
    bool mapped = false;     // memory is mapped from a file (packed_file.h)

    bool super() const { return block == kSuper && static_scale == 0; }
    int64_t blocks() const { return inputs / block; }
    int64_t tiles() const { return (outputs + kTile * kTilesAtOnce - 1) / (kTile * kTilesAtOnce) * kTilesAtOnce; }
    int64_t tile_bytes() const { return inputs * kTile * bits / 8; }
    // Bytes of the levels of a block in a tile, and of its scales.
    int64_t block_bytes() const { return block * kTile * bits / 8; }
    int64_t scale_bytes() const {
        if (super()) return kFactors + kTile * (bits == 6 ? 2 : 4);
        return kTile * (half_scales ? 2 : 4) * (minimums ? 2 : 1);
    }
    // The zero point. The sums of a row start from minus this times the sum of the row's levels.
    int32_t zero() const { return minimums || (super() && bits != 6) ? 0 : 1 << (bits - 1); }
    size_t level_bytes() const { return static_cast<size_t>(tiles() * tile_bytes()); }
    size_t bytes() const { return level_bytes() + static_cast<size_t>(tiles() * blocks() * scale_bytes()); }
};

// Rounded rows of activations:
//   levels [blocks, block / kOctet, rows, kOctet]: inputs that are multiplied with the same weights are side by side, at fixed distances
//   scales [blocks, rows]
//   starts [blocks, rows], in super-blocks [blocks, rows, kStarts] (one per 16 inputs): from what a sum of products starts, minus the zero
//           point times the sum of levels
//   sums: in super-blocks [blocks, rows, kSums], minus the sum of each 32 levels; for blocks with minimums [blocks, rows], the sum of levels
//           times the scale
// More than kMaxRows rows are cut into panels of nearly the same size, one after the other, each with this layout. Otherwise the octets of rows
// that are multiplied at once would compete for few sets of the first level cache.
struct RoundedRows {
    int8_t* levels;
    float* scales;
    int32_t* starts;
    float* sums;
    int64_t rows;

    int64_t panels() const { return (rows + kMaxRows - 1) / kMaxRows; }
    int64_t first_row(int64_t panel) const { return panel * rows / panels(); }
    RoundedRows panel(const PackedMatrix& m, int64_t number) const {
        const int64_t first = first_row(number);
        RoundedRows part = *this;
        part.rows = first_row(number + 1) - first;
        part.levels += first * m.inputs, part.scales += first * m.blocks();
        part.starts += first * m.blocks() * starts_of_block(m), part.sums += first * m.blocks() * sums_of_block(m);
        return part;
    }

    // `memory` begins at a cache line.
    RoundedRows(const PackedMatrix& m, int64_t count, void* memory) : levels(static_cast<int8_t*>(memory)), rows(count) {
        scales = reinterpret_cast<float*>(levels + level_bytes(m, rows));
        starts = reinterpret_cast<int32_t*>(scales + m.blocks() * rows);
        sums = reinterpret_cast<float*>(starts + m.blocks() * rows * starts_of_block(m));
    }
    // In a panel: the first octet of a block, from row `row` on; and the bytes to the next octet.
    int8_t* octets(const PackedMatrix& m, int64_t block, int64_t row) const { return levels + block * m.block * rows + row * kOctet; }
    int64_t pitch() const { return rows * kOctet; }
    static size_t level_bytes(const PackedMatrix& m, int64_t rows) { return (static_cast<size_t>(rows * m.inputs) + kLine - 1) / kLine * kLine; }
    static int64_t starts_of_block(const PackedMatrix& m) { return m.super() ? kStarts : 1; }
    static int64_t sums_of_block(const PackedMatrix& m) { return m.super() ? kSums : m.minimums ? 1 : 0; }
    // The bytes of memory that `rows` rows need.
    static size_t bytes(const PackedMatrix& m, int64_t rows) {
        return level_bytes(m, rows) + static_cast<size_t>(rows * m.blocks() * (1 + starts_of_block(m) + sums_of_block(m))) * 4;
    }
};

// Where results are written: row r of tile `first` at to + r * stride, followed by the next tiles. Padding beyond the matrix's outputs is left out.
struct Products {
    float* to;
    int64_t stride, first;

    // For all outputs of a matrix.
    Products(const PackedMatrix& m, float* out) : to(out), stride(m.outputs), first(0) {}
    // For some tiles.
    Products(float* out, int64_t row_values, int64_t first_tile) : to(out), stride(row_values), first(first_tile) {}
    float* at(int64_t row, int64_t output) const { return to + row * stride + (output - first * kTile); }
    Products from_row(int64_t row) const { return {to + row * stride, stride, first}; }
};

// Multiplies all panels with the tiles [first, last).
using MultiplyTiles = void (*)(const PackedMatrix&, const RoundedRows&, int64_t first, int64_t last, const Products& out);
// Rounds the blocks [first, last) of row `row` in a panel; the first of these blocks begins at `values`.
using RoundRow = void (*)(const float* values, const PackedMatrix&, int64_t first, int64_t last, int64_t row, const RoundedRows& to);

// Attention of query rows [queries, dim] to the keys and values of one K/V head, whose rows have the positions from `origin` on: `past` older
// rows, then `fresh` new ones. All new rows except the first `skipped` have `heads` queries each. A query attends to rows up to its own one; with
// a window, only to the last `window` of these.
// Sums are computed over spans of kSpan positions, which are merged in order. So the result of a query depends only on its position and on the
// rows that it attends to, not on the rest of its batch.
constexpr int64_t kSpan = 256;
constexpr int64_t kMaxQueries = 64;  // the most queries of a call

// How many keys of this width fit into the first level cache while all queries of a call are multiplied with them: a multiple of 4.
constexpr int64_t kMaxNearKeys = 64;
constexpr int64_t near_keys(int64_t dim) {
    constexpr int64_t kFloats = 4096, kFew = 4;
    const int64_t keys = kFloats / dim / kFew * kFew;
    return keys < kFew ? kFew : keys < kMaxNearKeys ? keys : kMaxNearKeys;
}

struct Attention {
    const float *queries, *past_keys, *past_values, *new_keys, *new_values;
    int64_t past, fresh, heads, dim, origin, window, skipped;  // a window of 0 means no window

    // Positions that a query attends to.
    int64_t end(int64_t query) const { return origin + past + skipped + query / heads + 1; }
    int64_t begin(int64_t query) const { return window && end(query) - window > origin ? end(query) - window : origin; }
    int64_t first_span(int64_t query) const { return begin(query) / kSpan; }
    int64_t last_span(int64_t query) const { return (end(query) - 1) / kSpan; }
    // The size in floats of a query's state: the weighted sum of values, the greatest score, the sum of weights, and padding to whole lines.
    int64_t state() const { return (dim + 2 + kTile - 1) / kTile * kTile; }
    // Computes a query's result from its final state: the weighted mean of values [dim].
    void result(const float* state, float* out) const {
        for (int64_t i = 0; i < dim; i++) out[i] = state[i] / state[dim + 1];
    }
};

struct Attend {
    // Attends from `count` queries, from `query` on, to one span. A query that attends to no row of it gets a state with a weight sum of 0.
    void (*span)(const Attention&, int64_t query, int64_t count, int64_t span, float* states);
    // Merges the state of the next span into the merged state of those before it.
    void (*merge)(int64_t dim, float* state, const float* next);

    // Attends from `count` queries to all spans that any of them attends to, in order. `next` has room for as many states as `states`.
    void all_spans(const Attention& a, int64_t query, int64_t count, float* states, float* next) const {
        const int64_t first = a.first_span(query), last = a.last_span(query + count - 1);
        span(a, query, count, first, states);
        for (int64_t at = first + 1; at <= last; at++) {
            span(a, query, count, at, next);
            for (int64_t r = 0; r < count; r++) merge(a.dim, states + r * a.state(), next + r * a.state());
        }
    }
};

struct CellAttention;  // cells.h
struct CellMemory;
struct Team;
struct DraftSteps;     // draft/steps.h

// Rows of floats times the transposed matrix [outputs, inputs] of float weights, which are not packed: out[row * stride + output]. A sum has 16
// lanes: each adds up every 16th product in the order of the inputs, then the lanes are added. So the results of a row do not depend on the batch.
enum class FloatType { kF32, kF16, kBf16 };
struct FloatProduct {
    FloatType type;
    const char* weights;
    size_t weight_bytes;  // from the weights of an output to those of the next
    int64_t inputs;
    const char* values;
    size_t value_bytes;  // from row to row
    int64_t rows;
    float* out;
    int64_t stride;
};

struct Variant {
    const char* name;
    MultiplyTiles multiply;
    RoundRow round;
    Attend attend;
    // Must be called by all threads of a team, with the same attention and memory.
    void (*attend_cells)(const CellAttention&, const CellMemory&, const Team&);
    // out = gelu(gates) * values, and out = tanh(values), for `count` values.
    void (*gate)(const float* gates, const float* values, float* out, int64_t count);
    void (*tanh)(const float* values, float* out, int64_t count);
    // Rounds each value to the nearest multiple of `scale`, from -128 to 127 times it.
    void (*round_levels)(float* values, int64_t count, float scale);
    // Computes the outputs [first, last) of all rows.
    void (*multiply_floats)(const FloatProduct&, int64_t first, int64_t last);
    const DraftSteps* draft;

    // Rounds the blocks [first, last) of all rows; row r begins at row_at(r). A few blocks are rounded for all rows of a panel before the next
    // ones, because their octets are side by side.
    template <class RowAt>
    void round_rows(const PackedMatrix& m, int64_t first, int64_t last, const RoundedRows& to, RowAt row_at) const {
        constexpr int64_t kBlocksAtOnce = 4;
        for (int64_t number = 0; number < to.panels(); number++) {
            const RoundedRows panel = to.panel(m, number);
            const int64_t above = to.first_row(number);
            for (int64_t block = first; block < last; block += kBlocksAtOnce) {
                const int64_t end = block + kBlocksAtOnce < last ? block + kBlocksAtOnce : last;
                for (int64_t row = 0; row < panel.rows; row++) round(row_at(above + row) + block * m.block, m, block, end, row, panel);
            }
        }
    }
};

}  // namespace edge
