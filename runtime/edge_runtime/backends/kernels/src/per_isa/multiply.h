// The multiplication, written once over the vectors of an instruction set. An `Isa` has `width` lanes (16, 8 or 4) of int32 and float32.
#pragma once
#include "layout.h"

namespace edge {

// What is unpacked at once: lines, the registers of bytes that they become, each with four inputs, and the octets of inputs in them.
template <int kBits>
struct Group {
    static constexpr int lines = kBits == 5 ? 5 : kBits == 6 ? 3 : kBits == 8 ? 2 : 1;
    static constexpr int parts = kBits == 5 ? 8 : kBits == 6 || kBits == 2 ? 4 : 2, octets = parts / 2;
    static constexpr int inputs = octets * kOctet;
};

// Weights from line `line` of a tile, which begins at `weights`, by `count` groups of rounded inputs: row r begins at levels + r * kOctet, and its
// octets are `pitch` bytes apart.
template <class Isa, int kBits, int kRows, int kVectors>
[[gnu::always_inline]] inline void add_products(const uint8_t* const (&weights)[kVectors], int64_t count, const int8_t* levels, int64_t pitch,
                                                typename Isa::Ints (&sum)[kRows][kVectors]) {
    using Each = Group<kBits>;
    for (int64_t g = 0; g < count; g++, levels += Each::octets * pitch) {
        typename Isa::template Weights<kBits> w[kVectors];
        for (int v = 0; v < kVectors; v++) {
            const uint8_t* line = weights[v] + g * Each::lines * kLine;
            w[v].load(line);
            if constexpr (Isa::fetches_ahead(kRows))
                for (int l = 0; l < Each::lines; l++) {
                    __builtin_prefetch(line + l * kLine + kAhead, 0, 3);
                    __builtin_prefetch(line + l * kLine + kFarAhead, 0, 2);
                }
        }
        if constexpr (Isa::kByPart) {
            // All rows before the next part: a sum waits for its last product meanwhile.
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

// Where the weights and scales of several vectors lie, and their results.
template <class Isa, int kRows, int kVectors>
struct Vectors {
    const uint8_t* weights[kVectors];
    const uint8_t* scales[kVectors];
    int64_t lane[kVectors];  // the first of the tile's outputs
    typename Isa::Floats result[kRows][kVectors];

    Vectors(const PackedMatrix& m, int64_t vector) {
        constexpr int kParts = kTile / Isa::width;
        for (int v = 0; v < kVectors; v++) {
            const int64_t tile = (vector + v) / kParts;
            lane[v] = (vector + v) % kParts * Isa::width;
            weights[v] = m.levels + tile * m.tile_bytes() + lane[v] * 4;
            scales[v] = static_cast<const uint8_t*>(m.scales) + tile * m.blocks() * m.scale_bytes();
            for (int r = 0; r < kRows; r++) result[r][v] = Isa::zero();
        }
    }
    void store(const PackedMatrix& m, int64_t row, int64_t vector, const Products& out) const {
        for (int r = 0; r < kRows; r++)
            for (int v = 0; v < kVectors; v++) {
                const int64_t at = (vector + v) * Isa::width, left = m.outputs - at;
                if (left > 0) Isa::store(out.at(row + r, at), result[r][v], left < Isa::width ? left : Isa::width);
            }
    }
};

template <class Isa, int kBits, int kRows, int kVectors>
[[gnu::always_inline]] inline void multiply_blocks(const PackedMatrix& m, const RoundedRows& a, int64_t row, int64_t vector, const Products& out) {
    const int64_t blocks = m.blocks(), groups = m.block / Group<kBits>::inputs, scale_bytes = m.scale_bytes();
    const bool half = m.half_scales;
    Vectors<Isa, kRows, kVectors> at(m, vector);
    for (int64_t b = 0, entry = row; b < blocks; b++, entry += a.rows) {
        typename Isa::Ints sum[kRows][kVectors];
        for (int r = 0; r < kRows; r++)
            for (int v = 0; v < kVectors; v++) sum[r][v] = Isa::set(a.starts[entry + r]);
        add_products<Isa, kBits, kRows, kVectors>(at.weights, groups, a.octets(m, b, row), a.pitch(), sum);
        for (int v = 0; v < kVectors; v++) {
            const uint8_t* scales = at.scales[v] + at.lane[v] * (half ? 2 : 4);
            const typename Isa::Floats scale = half ? Isa::load_half(scales) : Isa::load_float(scales);
            for (int r = 0; r < kRows; r++)
                at.result[r][v] = Isa::fma(Isa::convert(sum[r][v]), Isa::mul(scale, Isa::splat(a.scales[entry + r])), at.result[r][v]);
            if constexpr (kBits == 4 || kBits == 5)
                if (m.minimums) {
                    const typename Isa::Floats minimum = Isa::load_half(scales + 2 * kTile);
                    for (int r = 0; r < kRows; r++) at.result[r][v] = Isa::fma(minimum, Isa::splat(a.sums[entry + r]), at.result[r][v]);
                }
            at.weights[v] += groups * Group<kBits>::lines * kLine;
            at.scales[v] += scale_bytes;
            __builtin_prefetch(at.scales[v] + kAheadScales, 0, 3);
        }
    }
    at.store(m, row, vector, out);
}

template <class Isa, int kBits, int kRows, int kVectors>
[[gnu::always_inline]] inline void multiply_supers(const PackedMatrix& m, const RoundedRows& a, int64_t row, int64_t vector, const Products& out) {
    constexpr bool kMinimumParts = kBits != 6;
    constexpr int64_t kParts = kMinimumParts ? kSums : kStarts, kInputs = kSuper / kParts, kGroups = kInputs / Group<kBits>::inputs;
    const int64_t blocks = m.blocks(), scale_bytes = m.scale_bytes();
    Vectors<Isa, kRows, kVectors> at(m, vector);
    for (int64_t b = 0, entry = row; b < blocks; b++, entry += a.rows) {
        typename Isa::Floats total[kRows][kVectors], factor[kVectors], minimum_factor[kVectors];
        for (int v = 0; v < kVectors; v++) {
            factor[v] = Isa::load_half(at.scales[v] + kFactors + at.lane[v] * 2);
            if constexpr (kMinimumParts) minimum_factor[v] = Isa::load_half(at.scales[v] + kFactors + kTile * 2 + at.lane[v] * 2);
            for (int r = 0; r < kRows; r++) total[r][v] = Isa::zero();
        }
        for (int64_t part = 0; part < kParts; part++) {
            typename Isa::Ints sum[kRows][kVectors];
            for (int r = 0; r < kRows; r++)
                for (int v = 0; v < kVectors; v++) sum[r][v] = Isa::set(kMinimumParts ? 0 : a.starts[(entry + r) * kStarts + part]);
            add_products<Isa, kBits, kRows, kVectors>(at.weights, kGroups, a.octets(m, b, row) + part * kInputs / kOctet * a.pitch(), a.pitch(), sum);
            for (int v = 0; v < kVectors; v++) {
                const uint8_t* scales = at.scales[v] + part * kTile + at.lane[v];
                const typename Isa::Floats scale = Isa::mul(factor[v], Isa::load_bytes(scales));
                for (int r = 0; r < kRows; r++) total[r][v] = Isa::fma(Isa::convert(sum[r][v]), scale, total[r][v]);
                if constexpr (kMinimumParts) {
                    const typename Isa::Floats minimum = Isa::mul(minimum_factor[v], Isa::load_bytes(scales + kMinimums));
                    for (int r = 0; r < kRows; r++) total[r][v] = Isa::fma(minimum, Isa::splat(a.sums[(entry + r) * kSums + part]), total[r][v]);
                }
                at.weights[v] += kGroups * Group<kBits>::lines * kLine;
            }
        }
        for (int v = 0; v < kVectors; v++) {
            for (int r = 0; r < kRows; r++) at.result[r][v] = Isa::fma(total[r][v], Isa::splat(a.scales[entry + r]), at.result[r][v]);
            at.scales[v] += scale_bytes;
        }
    }
    at.store(m, row, vector, out);
}

// As many vectors at once as registers hold beside the sums of these rows; whole tiles come in groups of so many.
template <class Isa, int kBits, bool kSupers, int kRows>
void multiply_rows(const PackedMatrix& m, const RoundedRows& a, int64_t row, int64_t first, int64_t last, const Products& out) {
    constexpr int kVectors = Isa::vectors(kRows);
    for (int64_t v = first; v < last; v += kVectors)
        if constexpr (kSupers) multiply_supers<Isa, kBits, kRows, kVectors>(m, a, row, v, out);
        else multiply_blocks<Isa, kBits, kRows, kVectors>(m, a, row, v, out);
}

template <class Isa, int kBits, bool kSupers, int kRows = kMaxRows>
void multiply_few_rows(int64_t rows, const PackedMatrix& m, const RoundedRows& a, int64_t row, int64_t first, int64_t last, const Products& out) {
    if (rows == kRows) return multiply_rows<Isa, kBits, kSupers, kRows>(m, a, row, first, last, out);
    if constexpr (kRows > 1) multiply_few_rows<Isa, kBits, kSupers, kRows - 1>(rows, m, a, row, first, last, out);
}

template <class Isa, int kBits, bool kSupers = false>
void multiply_all(const PackedMatrix& m, const RoundedRows& a, int64_t first, int64_t last, const Products& out) {
    constexpr int64_t kParts = kTile / Isa::width;
    if (a.rows <= Isa::kRows) return multiply_few_rows<Isa, kBits, kSupers>(a.rows, m, a, 0, first * kParts, last * kParts, out);
    // Rows in groups of nearly the same size, over few tiles at a time, which then stay in the nearest cache.
    const bool many = a.rows > 2 * Isa::kRows;
    const int64_t limit = many ? Isa::kManyRows : Isa::kRows;
    const int64_t groups = (a.rows + limit - 1) / limit;
    const int64_t step = 2;
    for (int64_t tile = first; tile < last; tile += step) {
        const int64_t end = tile + step < last ? tile + step : last;
        for (int64_t g = 0, row = 0; g < groups; g++) {
            const int64_t next = (g + 1) * a.rows / groups;
            multiply_few_rows<Isa, kBits, kSupers>(next - row, m, a, row, tile * kParts, end * kParts, out);
            row = next;
        }
    }
}

template <class Isa>
void multiply(const PackedMatrix& m, const RoundedRows& a, int64_t first, int64_t last, const Products& out) {
    switch (m.super() ? -m.bits : m.bits) {
        case -4: return multiply_all<Isa, 4, true>(m, a, first, last, out);
        case -5: return multiply_all<Isa, 5, true>(m, a, first, last, out);
        case -6: return multiply_all<Isa, 6, true>(m, a, first, last, out);
        case 2: return multiply_all<Isa, 2>(m, a, first, last, out);
        case 4: return multiply_all<Isa, 4>(m, a, first, last, out);
        case 5: return multiply_all<Isa, 5>(m, a, first, last, out);
        case 8: return multiply_all<Isa, 8>(m, a, first, last, out);
    }
}

}  // namespace edge
