// Rounds one row's blocks to int8. Each file that includes it compiles it for its own instruction set; the numbers are the same.
#pragma once
#include <math.h>

#include "layout.h"

namespace edge {
namespace {

// Magnitudes compare like their bits, and NaN is above all of them: its scale makes the row's results NaN.
float greatest_of(const float* values, int64_t count) {
    uint32_t greatest = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        __builtin_memcpy(&bits, &values[i], 4);
        bits &= 0x7fffffffu;
        greatest = bits > greatest ? bits : greatest;
    }
    float most;
    __builtin_memcpy(&most, &greatest, 4);
    return most;
}

// Returns the sum of levels.
int32_t round_values(const float* values, int64_t count, float inverse, int8_t* levels) {
    int32_t sum = 0;
    for (int64_t i = 0; i < count; i++) {
        // Adding 1.5 * 2^23 rounds to the nearest even integer, which then stands in the low bits.
        const float shifted = values[i] * inverse + 12582912.0f;
        int32_t bits;
        __builtin_memcpy(&bits, &shifted, 4);
        const int32_t level = static_cast<int8_t>(bits & 0xff);
        levels[i] = static_cast<int8_t>(level);
        sum += level;
    }
    return sum;
}

// `Isa` says which zero point its 8-bit levels have.
template <class Isa>
void round_row(const float* values, const PackedMatrix& m, int64_t first, int64_t last, int64_t row, const RoundedRows& to) {
    const int32_t zero = m.bits == 8 && Isa::kSigned8 ? 0 : 1 << (m.bits - 1);
    for (int64_t b = first; b < last; b++) {
        const int64_t at = b * to.rows + row;
        const float most = greatest_of(values + b * m.block, m.block), inverse = most > 0 ? 127.0f / most : 0.0f;
        to.scales[at] = most / 127.0f;
        if (!m.super()) {
            to.starts[at] = -zero * round_values(values + b * m.block, m.block, inverse, to.levels + at * m.block);
            continue;
        }
        for (int64_t part = 0; part < kSums; part++) {
            const int64_t i = part * kSuper / kSums;
            int32_t sums[2];
            for (int64_t half = 0; half < 2; half++) {
                const int64_t from = i + half * kSuper / kStarts;
                sums[half] = round_values(values + b * kSuper + from, kSuper / kStarts, inverse, to.levels + at * kSuper + from);
                to.starts[at * kStarts + 2 * part + half] = -zero * sums[half];
            }
            to.sums[at * kSums + part] = static_cast<float>(-sums[0] - sums[1]);
        }
    }
}

}  // namespace
}  // namespace edge
