// The multiplication, written once for all instruction sets. The vectors of an `Isa` have `width` lanes (16, 8 or 4) of int32 or float32.
#pragma once
#include "layout.h"

namespace edge {

// A group is what is unpacked at once: some lines. They become registers of bytes ("parts"), each with four inputs of every output.
template <int kBits>
struct Group {
    static constexpr int lines = kBits == 5 ? 5 : kBits == 6 ? 3 : kBits == 8 ? 2 : 1;
    static constexpr int parts = kBits == 5 ? 8 : kBits == 6 || kBits == 2 ? 4 : 2, octets = parts / 2;
    static constexpr int inputs = octets * kOctet;
};

// How many groups of products are added up in 16 bits before they are added to 32 bits, on an instruction set without dot products; 0 if none are.
template <class Isa, int kBits>
constexpr int short_groups() {
    if constexpr (requires { Isa::template kShortGroups<kBits>; }) return Isa::template kShortGroups<kBits>;
    return 0;
}
// Whether products are added up in 16 bits first. For few rows, an instruction set may add them in 32 bits at once.
template <class Isa, int kBits>
constexpr bool adds_short(int rows) {
    if constexpr (short_groups<Isa, kBits>() > 0) return rows > Isa::kLongRows;
    return false;
}

// Does what add_products does, but adds in 16 bits first; the sums of this many groups cannot overflow.
template <class Isa, int kBits, int kRows, int kVectors>
[[gnu::always_inline]] inline void add_short_products(const uint8_t* const (&weights)[kVectors], int64_t count, const int8_t* levels, int64_t pitch,
                                                      typename Isa::Ints (&sum)[kRows][kVectors]) {
    using Each = Group<kBits>;
    for (int64_t g = 0; g < count;) {
        typename Isa::Shorts few[kRows][kVectors] = {};
        const int64_t end = g + short_groups<Isa, kBits>() < count ? g + short_groups<Isa, kBits>() : count;
#pragma clang loop unroll(disable)
        for (; g < end; g++, levels += Each::octets * pitch) {
            typename Isa::template Weights<kBits> w[kVectors];
            for (int v = 0; v < kVectors; v++) {
                const uint8_t* line = weights[v] + g * Each::lines * kLine;
                w[v].load(line);
                if constexpr (Isa::fetches_ahead(kRows)) {
                    __builtin_prefetch(line + kAhead, 0, 3);
                    __builtin_prefetch(line + kFarAhead, 0, 2);
                }
            }
            for (int p = 0; p < Each::parts; p += Isa::kPartsAtOnce)
                for (int r = 0; r < kRows; r++) {
                    const auto x = Isa::short_inputs(levels + p / 2 * pitch + r * kOctet + p % 2 * 4);
                    for (int q = 0; q < Isa::kPartsAtOnce; q++)
                        for (int v = 0; v < kVectors; v++) few[r][v] = Isa::add_short(few[r][v], w[v].part[p + q], x, q);
                }
        }
        for (int r = 0; r < kRows; r++)
            for (int v = 0; v < kVectors; v++) sum[r][v] = Isa::widen(sum[r][v], few[r][v]);
    }
}

// Adds to `sum` the products of `count` groups of weights, which begin at `weights`, and of rounded inputs. Row r of the inputs begins at
// levels + r * kOctet, and its octets are `pitch` bytes apart.
template <class Isa, int kBits, int kRows, int kVectors>
[[gnu::always_inline]] inline void add_products(const uint8_t* const (&weights)[kVectors], int64_t count, const int8_t* levels, int64_t pitch,
                                                typename Isa::Ints (&sum)[kRows][kVectors]) {
    using Each = Group<kBits>;
    if constexpr (adds_short<Isa, kBits>(kRows)) return add_short_products<Isa, kBits, kRows, kVectors>(weights, count, levels, pitch, sum);
    // Without this limit, a constant count would be unrolled completely and the groups interleaved, which needs more sums than there are registers.
#pragma clang loop unroll_count(kRows * kVectors <= 4 ? 2 : 1)
    for (int64_t g = 0; g < count; g++, levels += Each::octets * pitch) {
        typename Isa::template Weights<kBits> w[kVectors];
        for (int v = 0; v < kVectors; v++) {
            const uint8_t* line = weights[v] + g * Each::lines * kLine;
            w[v].load(line);
            if constexpr (Isa::fetches_ahead(kRows))
                for (int l = 0; l < Each::lines; l++) {
                    __builtin_prefetch(line + l * kLine + Isa::ahead(), 0, 3);
                    __builtin_prefetch(line + l * kLine + kFarAhead, 0, 2);
                }
        }
        if constexpr (Isa::kByPart) {
            // All rows of a part come before the next part, so that a sum need not wait for its previous product.
            for (int p = 0; p < Each::parts; p++)
                for (int r = 0; r < kRows; r++) {
                    const typename Isa::Ints x = Isa::four(levels + p / 2 * pitch + r * kOctet + p % 2 * 4);
                    for (int v = 0; v < kVectors; v++) sum[r][v] = Isa::dot(sum[r][v], w[v].part[p], x);
                }
        } else {
            for (int r = 0; r < kRows; r++) {
                typename Isa::template Inputs<kBits> x;
                x.load(levels + r * kOctet, pitch);
                for (int v = 0; v < kVectors; v++) sum[r][v] = Isa::dot(sum[r][v], w[v], x);
            }
        }
    }
}

// A range of blocks of the inputs. The results of earlier blocks are read from the memory of the products.
struct Blocks {
    int64_t first, last;
};

// The addresses of the weights and scales of several vectors, from a block on; and their results.
template <class Isa, int kRows, int kVectors>
struct Vectors {
    const uint8_t* weights[kVectors];
    const uint8_t* scales[kVectors];
    int64_t lane[kVectors];  // the vector's first output within the tile
    typename Isa::Floats result[kRows][kVectors];

    [[gnu::always_inline]] Vectors(const PackedMatrix& m, int64_t vector, int64_t block) {
        constexpr int kParts = kTile / Isa::width;
        for (int v = 0; v < kVectors; v++) {
            const int64_t tile = (vector + v) / kParts;
            lane[v] = (vector + v) % kParts * Isa::width;
            weights[v] = m.levels + tile * m.tile_bytes() + block * m.block_bytes() + lane[v] * 4;
            scales[v] = static_cast<const uint8_t*>(m.scales) + (tile * m.blocks() + block) * m.scale_bytes();
            for (int r = 0; r < kRows; r++) result[r][v] = Isa::zero();
        }
    }
    // Calls `use` with the results of each of `rows` rows, the address of its outputs, and their number.
    template <class Use>
    [[gnu::always_inline]] void each_result(const PackedMatrix& m, int64_t rows, int64_t row, int64_t vector, const Products& out, Use use) {
        for (int v = 0; v < kVectors; v++) {
            const int64_t at = (vector + v) * Isa::width, left = m.outputs - at;
            if (left <= 0) return;
            for (int r = 0; r < kRows; r++)
                if (r < rows) use(result[r][v], out.at(row + r, at), left < Isa::width ? left : Isa::width);
        }
    }
    // Loads the results of earlier blocks.
    [[gnu::always_inline]] void load(const PackedMatrix& m, int64_t rows, int64_t row, int64_t vector, const Products& out) {
        each_result(m, rows, row, vector, out, [](typename Isa::Floats& value, const float* from, int64_t count) { value = Isa::load(from, count); });
    }
    [[gnu::always_inline]] void store(const PackedMatrix& m, int64_t rows, int64_t row, int64_t vector, const Products& out) {
        each_result(m, rows, row, vector, out, [](typename Isa::Floats& value, float* to, int64_t count) { Isa::store(to, value, count); });
    }
};

// `kBlock`: how many inputs share a scale, if that is known at compile time, else 0.
template <class Isa, int kBits, int kBlock, int kRows, int kVectors>
[[gnu::always_inline]] inline void multiply_blocks(const PackedMatrix& m, const RoundedRows& a, int64_t row, int64_t vector, Blocks part, const Products& out) {
    const int64_t groups = (kBlock ? kBlock : m.block) / Group<kBits>::inputs, scale_bytes = m.scale_bytes();
    const bool half = m.half_scales;
    Vectors<Isa, kRows, kVectors> at(m, vector, part.first);
    if (part.first) at.load(m, kRows, row, vector, out);
    for (int64_t b = part.first, entry = part.first * a.rows + row; b < part.last; b++, entry += a.rows) {
        typename Isa::Ints sum[kRows][kVectors];
        for (int r = 0; r < kRows; r++)
            for (int v = 0; v < kVectors; v++) sum[r][v] = Isa::set(a.starts[entry + r]);
        add_products<Isa, kBits, kRows, kVectors>(at.weights, groups, a.octets(m, b, row), a.pitch(), sum);
        for (int v = 0; v < kVectors; v++) {
            const uint8_t* scales = at.scales[v] + at.lane[v] * (half ? 2 : 4);
            const typename Isa::Floats scale = half ? Isa::load_half(scales) : Isa::load_float(scales);
            for (int r = 0; r < kRows; r++)
                at.result[r][v] = Isa::fma(Isa::convert(sum[r][v]), Isa::mul(scale, Isa::splat(a.scales[entry + r])), at.result[r][v]);
            if constexpr ((kBits == 4 || kBits == 5) && kBlock == 32)
                if (m.minimums) {
                    const typename Isa::Floats minimum = Isa::load_half(scales + 2 * kTile);
                    for (int r = 0; r < kRows; r++) at.result[r][v] = Isa::fma(minimum, Isa::splat(a.sums[entry + r]), at.result[r][v]);
                }
            at.weights[v] += groups * Group<kBits>::lines * kLine;
            at.scales[v] += scale_bytes;
            __builtin_prefetch(at.scales[v] + kAheadScales, 0, 3);
        }
    }
    at.store(m, kRows, row, vector, out);
}

template <class Isa, int kBits, int kRows, int kVectors>
[[gnu::always_inline]] inline void multiply_supers(const PackedMatrix& m, const RoundedRows& a, int64_t row, int64_t vector, Blocks part, const Products& out) {
    constexpr bool kMinimumParts = kBits != 6;
    constexpr int64_t kParts = kMinimumParts ? kSums : kStarts, kInputs = kSuper / kParts, kGroups = kInputs / Group<kBits>::inputs;
    const int64_t scale_bytes = m.scale_bytes();
    Vectors<Isa, kRows, kVectors> at(m, vector, part.first);
    if (part.first) at.load(m, kRows, row, vector, out);
    for (int64_t b = part.first, entry = part.first * a.rows + row; b < part.last; b++, entry += a.rows) {
        typename Isa::Floats total[kRows][kVectors], factor[kVectors], minimum_factor[kVectors];
        for (int v = 0; v < kVectors; v++) {
            factor[v] = Isa::load_half(at.scales[v] + kFactors + at.lane[v] * 2);
            if constexpr (kMinimumParts) minimum_factor[v] = Isa::load_half(at.scales[v] + kFactors + kTile * 2 + at.lane[v] * 2);
            for (int r = 0; r < kRows; r++) total[r][v] = Isa::zero();
        }
        for (int64_t p = 0; p < kParts; p++) {
            typename Isa::Ints sum[kRows][kVectors];
            for (int r = 0; r < kRows; r++)
                for (int v = 0; v < kVectors; v++) sum[r][v] = Isa::set(kMinimumParts ? 0 : a.starts[(entry + r) * kStarts + p]);
            add_products<Isa, kBits, kRows, kVectors>(at.weights, kGroups, a.octets(m, b, row) + p * kInputs / kOctet * a.pitch(), a.pitch(), sum);
            for (int v = 0; v < kVectors; v++) {
                const uint8_t* scales = at.scales[v] + p * kTile + at.lane[v];
                const typename Isa::Floats scale = Isa::mul(factor[v], Isa::load_bytes(scales));
                for (int r = 0; r < kRows; r++) total[r][v] = Isa::fma(Isa::convert(sum[r][v]), scale, total[r][v]);
                if constexpr (kMinimumParts) {
                    const typename Isa::Floats minimum = Isa::mul(minimum_factor[v], Isa::load_bytes(scales + kMinimums));
                    for (int r = 0; r < kRows; r++) total[r][v] = Isa::fma(minimum, Isa::splat(a.sums[(entry + r) * kSums + p]), total[r][v]);
                }
                at.weights[v] += kGroups * Group<kBits>::lines * kLine;
            }
        }
        for (int v = 0; v < kVectors; v++) {
            for (int r = 0; r < kRows; r++) at.result[r][v] = Isa::fma(total[r][v], Isa::splat(a.scales[entry + r]), at.result[r][v]);
            at.scales[v] += scale_bytes;
            if constexpr (Isa::kFetchesScales)
                for (int64_t line = 0; line < scale_bytes; line += kLine) __builtin_prefetch(at.scales[v] + kAheadScales + line, 0, 3);
        }
    }
    at.store(m, kRows, row, vector, out);
}

// Some rows of a panel.
struct RowGroup {
    const RoundedRows& panel;
    int64_t first, count;
};

// Multiplies as many vectors at once as there are registers for, given this number of rows; tiles are padded to whole groups of vectors.
template <class Isa, int kBits, int kBlock, int kRows>
void multiply_rows(const PackedMatrix& m, const RowGroup& rows, int64_t first, int64_t last, Blocks part, const Products& out) {
    constexpr int kVectors = Isa::vectors(kRows, adds_short<Isa, kBits>(kRows));
    for (int64_t v = first; v < last; v += kVectors)
        if constexpr (kBlock == kSuper) multiply_supers<Isa, kBits, kRows, kVectors>(m, rows.panel, rows.first, v, part, out);
        else multiply_blocks<Isa, kBits, kBlock, kRows, kVectors>(m, rows.panel, rows.first, v, part, out);
}

template <class Isa, int kBits, int kBlock, int kRows = Isa::rows(short_groups<Isa, kBits>())>
void multiply_few_rows(const PackedMatrix& m, const RowGroup& rows, int64_t first, int64_t last, Blocks part, const Products& out) {
    if (rows.count == kRows) return multiply_rows<Isa, kBits, kBlock, kRows>(m, rows, first, last, part, out);
    if constexpr (kRows > 1) multiply_few_rows<Isa, kBits, kBlock, kRows - 1>(m, rows, first, last, part, out);
}

// Calls `use` with a range of blocks, some tiles, at most `limit` rows of a panel, and where their products go. Ranges are so large that the weights of
// two tiles stay in the first level cache, and all panels in the second.
template <class Use>
[[gnu::always_inline]] inline void each_group(const PackedMatrix& m, const RoundedRows& a, int64_t limit, int64_t first, int64_t last, const Products& out, Use use) {
    constexpr int64_t kInputs = 1024, kTiles = 2;
    const int64_t blocks = m.blocks(), step = m.block < kInputs ? kInputs / m.block : 1;
    for (int64_t b = 0; b < blocks; b += step)
        for (int64_t tile = first; tile < last; tile += kTiles)
            for (int64_t p = 0; p < a.panels(); p++) {
                const RoundedRows panel = a.panel(m, p);
                const int64_t groups = (panel.rows + limit - 1) / limit;
                for (int64_t g = 0; g < groups; g++) {
                    const int64_t row = g * panel.rows / groups;
                    use(Blocks{b, b + step < blocks ? b + step : blocks}, tile, tile + kTiles < last ? tile + kTiles : last,
                        RowGroup{panel, row, (g + 1) * panel.rows / groups - row}, out.from_row(a.first_row(p)));
                }
            }
}

template <class Isa, int kBits, int kBlock>
void multiply_all(const PackedMatrix& m, const RoundedRows& a, int64_t first, int64_t last, const Products& out) {
    constexpr int64_t kParts = kTile / Isa::width;
    constexpr int kRows = Isa::rows(short_groups<Isa, kBits>());
    if (a.rows <= kRows) return multiply_few_rows<Isa, kBits, kBlock>(m, {a, 0, a.rows}, first * kParts, last * kParts, {0, m.blocks()}, out);
    each_group(m, a, kRows, first, last, out, [&](Blocks part, int64_t tile, int64_t end, const RowGroup& rows, const Products& to) {
        multiply_few_rows<Isa, kBits, kBlock>(m, rows, tile * kParts, end * kParts, part, to);
    });
}

template <class Isa, int kBits>
void multiply_bits(const PackedMatrix& m, const RoundedRows& a, int64_t first, int64_t last, const Products& out) {
    switch (m.block) {
        case 32: return multiply_all<Isa, kBits, 32>(m, a, first, last, out);
        case 64: return multiply_all<Isa, kBits, 64>(m, a, first, last, out);
        case 128: return multiply_all<Isa, kBits, 128>(m, a, first, last, out);
        default: return multiply_all<Isa, kBits, 0>(m, a, first, last, out);
    }
}

template <class Isa>
void multiply(const PackedMatrix& m, const RoundedRows& a, int64_t first, int64_t last, const Products& out) {
    switch (m.super() ? -m.bits : m.bits) {
        case -4: return multiply_all<Isa, 4, kSuper>(m, a, first, last, out);
        case -5: return multiply_all<Isa, 5, kSuper>(m, a, first, last, out);
        case -6: return multiply_all<Isa, 6, kSuper>(m, a, first, last, out);
        case 2: return multiply_all<Isa, 2, 0>(m, a, first, last, out);
        case 4: return multiply_bits<Isa, 4>(m, a, first, last, out);
        case 5: return multiply_all<Isa, 5, 32>(m, a, first, last, out);
        case 8: return multiply_bits<Isa, 8>(m, a, first, last, out);
    }
}

}  // namespace edge
