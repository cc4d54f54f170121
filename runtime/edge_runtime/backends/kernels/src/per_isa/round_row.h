// Rounds one row's blocks to int8. Each file that includes it compiles it for its own instruction set; the numbers are the same.
#pragma once
#include <math.h>

#include "layout.h"

namespace edge {
namespace {

void round_row(const float* values, int64_t inputs, int block, int64_t row, int64_t rows, int8_t* levels, float* scales, int32_t* sums) {
    levels += row * block;
    for (int64_t b = 0; b < inputs / block; b++, values += block, levels += rows * block) {
        // Magnitudes compare like their bits, and NaN is above all of them: its scale makes the row's results NaN.
        uint32_t greatest = 0;
        for (int i = 0; i < block; i++) {
            uint32_t bits;
            __builtin_memcpy(&bits, &values[i], 4);
            bits &= 0x7fffffffu;
            greatest = bits > greatest ? bits : greatest;
        }
        float most;
        __builtin_memcpy(&most, &greatest, 4);
        const float scale = most / 127.0f;
        const float inverse = most > 0 ? 127.0f / most : 0.0f;
        int32_t sum = 0;
        for (int i = 0; i < block; i++) {
            // Adding 1.5 * 2^23 rounds to the nearest even integer, which then stands in the low bits.
            const float shifted = values[i] * inverse + 12582912.0f;
            int32_t bits;
            __builtin_memcpy(&bits, &shifted, 4);
            const int32_t level = static_cast<int8_t>(bits & 0xff);
            levels[i] = static_cast<int8_t>(level);
            sum += level;
        }
        scales[b * rows + row] = scale;
        sums[b * rows + row] = sum;
    }
}

}  // namespace
}  // namespace edge
