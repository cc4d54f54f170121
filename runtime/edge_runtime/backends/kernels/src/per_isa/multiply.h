// The multiplication, written once over the vectors of an instruction set. An `Isa` has `width` lanes (16, 8 or 4) of int32 and float32.
#pragma once
#include "layout.h"

namespace edge {

template <class Isa, int kBits, int kRows, int kVectors>
[[gnu::always_inline]] inline void multiply_vectors(const PackedMatrix& m, const RoundedRows& a, int64_t row, int64_t vector, float* out) {
    constexpr int kParts = kTile / Isa::width;
    constexpr int kGroup = 32 / kBits;  // inputs of a line
    constexpr int kZero = Isa::kSigned8 && kBits == 8 ? 0 : 1 << (kBits - 1);
    const int64_t blocks = m.blocks(), lines = m.block / kGroup, stride = m.tile_bytes(), scale_bytes = m.scale_bytes();
    const bool half = m.half_scales;
    const uint8_t* weights[kVectors];
    const uint8_t* scales[kVectors];
    for (int v = 0; v < kVectors; v++) {
        const int64_t tile = (vector + v) / kParts, part = (vector + v) % kParts;
        weights[v] = m.levels + tile * stride + part * Isa::width * 4;
        scales[v] = static_cast<const uint8_t*>(m.scales) + (tile * blocks * kTile + part * Isa::width) * scale_bytes;
    }
    typename Isa::Floats result[kRows][kVectors];
    for (int r = 0; r < kRows; r++)
        for (int v = 0; v < kVectors; v++) result[r][v] = Isa::zero();
    const int8_t* levels = a.levels + row * m.block;
    for (int64_t b = 0; b < blocks; b++) {
        typename Isa::Ints sum[kRows][kVectors];
        for (int r = 0; r < kRows; r++) {
            const typename Isa::Ints start = Isa::set(-kZero * a.sums[b * a.rows + row + r]);
            for (int v = 0; v < kVectors; v++) sum[r][v] = start;
        }
        for (int64_t line = 0; line < lines; line++) {
            typename Isa::template Weights<kBits> w[kVectors];
            for (int v = 0; v < kVectors; v++) {
                w[v].load(weights[v] + line * kLine);
                // One or two rows wait for memory anyway, which the processor fetches ahead by itself.
                if constexpr (kRows > 2) __builtin_prefetch(weights[v] + line * kLine + kAhead, 0, 3);
            }
            for (int r = 0; r < kRows; r++) {
                typename Isa::template Inputs<kBits> x;
                x.load(levels + r * m.block + line * kGroup);
                for (int v = 0; v < kVectors; v++) sum[r][v] = Isa::dot(sum[r][v], w[v], x);
            }
        }
        for (int v = 0; v < kVectors; v++) {
            const typename Isa::Floats scale = half ? Isa::load_half(scales[v]) : Isa::load_float(scales[v]);
            for (int r = 0; r < kRows; r++)
                result[r][v] = Isa::fma(Isa::convert(sum[r][v]), Isa::mul(scale, Isa::splat(a.scales[b * a.rows + row + r])), result[r][v]);
            weights[v] += lines * kLine;
            scales[v] += kTile * scale_bytes;
        }
        levels += a.rows * m.block;
    }
    for (int r = 0; r < kRows; r++)
        for (int v = 0; v < kVectors; v++) {
            const int64_t at = (vector + v) * Isa::width, left = m.outputs - at;
            if (left > 0) Isa::store(out + (row + r) * m.outputs + at, result[r][v], left < Isa::width ? left : Isa::width);
        }
}

// As many vectors at once as registers hold beside the sums of these rows; whole tiles come in groups of so many.
template <class Isa, int kBits, int kRows>
void multiply_rows(const PackedMatrix& m, const RoundedRows& a, int64_t row, int64_t first, int64_t last, float* out) {
    constexpr int kVectors = Isa::vectors(kRows);
    for (int64_t v = first; v < last; v += kVectors) multiply_vectors<Isa, kBits, kRows, kVectors>(m, a, row, v, out);
}

template <class Isa, int kBits, int kRows = kMaxRows>
void multiply_some(int64_t rows, const PackedMatrix& m, const RoundedRows& a, int64_t row, int64_t first, int64_t last, float* out) {
    if (rows == kRows) return multiply_rows<Isa, kBits, kRows>(m, a, row, first, last, out);
    if constexpr (kRows > 1) multiply_some<Isa, kBits, kRows - 1>(rows, m, a, row, first, last, out);
}

template <class Isa, int kBits>
void multiply_all(const PackedMatrix& m, const RoundedRows& a, int64_t first, int64_t last, float* out) {
    constexpr int64_t kParts = kTile / Isa::width;
    if (a.rows <= Isa::kRows) return multiply_some<Isa, kBits>(a.rows, m, a, 0, first * kParts, last * kParts, out);
    // Rows in groups of nearly the same size, over few tiles at a time, which then stay in the nearest cache.
    const bool many = a.rows > 2 * Isa::kRows;
    const int64_t limit = many ? Isa::kManyRows : Isa::kRows;
    const int64_t groups = (a.rows + limit - 1) / limit;
    const int64_t step = 2;
    for (int64_t tile = first; tile < last; tile += step) {
        const int64_t end = tile + step < last ? tile + step : last;
        for (int64_t g = 0, row = 0; g < groups; g++) {
            const int64_t next = (g + 1) * a.rows / groups;
            multiply_some<Isa, kBits>(next - row, m, a, row, tile * kParts, end * kParts, out);
            row = next;
        }
    }
}

template <class Isa>
void multiply(const PackedMatrix& m, const RoundedRows& a, int64_t first, int64_t last, float* out) {
    switch (m.bits) {
        case 2: return multiply_all<Isa, 2>(m, a, first, last, out);
        case 4: return multiply_all<Isa, 4>(m, a, first, last, out);
        case 8: return multiply_all<Isa, 8>(m, a, first, last, out);
    }
}

}  // namespace edge
