// Rounds the blocks of a row to int8. Each file that includes this header compiles it for its own instruction set; the results are the same on all.
#pragma once
#include "layout.h"
#include "per_isa/floats16.h"

namespace edge {
namespace {

using Counts16 = uint32_t __attribute__((ext_vector_type(16)));
using Levels16 = int8_t __attribute__((ext_vector_type(16)));

// Returns the greatest magnitude of a multiple of 16 values. Magnitudes are compared by their bits; NaN is the greatest, and makes the row's results NaN.
float greatest_of(const float* values, int64_t count) {
    Counts16 greatest = 0;
    for (int64_t i = 0; i < count; i += kLanes)
        greatest = __builtin_elementwise_max(greatest, __builtin_bit_cast(Counts16, load16(values + i)) & 0x7fffffffu);
    return __builtin_bit_cast(float, __builtin_reduce_max(greatest));
}

// Adding 1.5 * 2^23 rounds to the nearest integer, ties to even; the integer is then in the low bits.
constexpr float kShift = 12582912.0f;

// Rounds a multiple of 16 values, which `scaled` divides by the scale, to levels; writes them as octets `pitch` bytes apart. Returns the sum of levels.
template <class Scaled>
int32_t round_values(const float* values, int64_t count, int8_t* octets, int64_t pitch, Scaled scaled) {
    Ints16 sum = 0;
    for (int64_t i = 0; i < count; i += kLanes, octets += 2 * pitch) {
        const Floats16 shifted = scaled(load16(values + i)) + kShift;
        const Levels16 levels = __builtin_convertvector(__builtin_bit_cast(Ints16, shifted), Levels16);
        sum += __builtin_convertvector(levels, Ints16);
        __builtin_memcpy(octets, &levels, kOctet);
        __builtin_memcpy(octets + pitch, reinterpret_cast<const char*>(&levels) + kOctet, kOctet);
    }
    return __builtin_reduce_add(sum);
}

// Divides by a static scale and clamps to -128 and 127. NaN stays NaN.
Floats16 static_levels(Floats16 values, float scale) {
    Floats16 levels = values / scale;
    levels = levels < Floats16(-128) ? Floats16(-128) : levels;
    return levels > Floats16(127) ? Floats16(127) : levels;
}

void round_levels(float* values, int64_t count, float scale) {
    for (int64_t at = 0; at < count; at += kLanes) {
        const int64_t lanes = count - at < kLanes ? count - at : kLanes;
        const Floats16 levels = static_levels(lanes == kLanes ? load16(values + at) : load16(values + at, lanes), scale);
        store16(values + at, (levels + kShift - kShift) * scale, lanes);
    }
}

// Some instruction sets use signed 8-bit levels, whose zero point is 0 (`Isa::kSigned8`).
template <class Isa>
void round_row(const float* values, const PackedMatrix& m, int64_t first, int64_t last, int64_t row, const RoundedRows& to) {
    const int32_t zero = m.bits == 8 && Isa::kSigned8 ? 0 : m.zero();
    for (int64_t b = first; b < last; b++, values += m.block) {
        const int64_t at = b * to.rows + row;
        const float greatest = greatest_of(values, m.block), inverse = greatest > 0 ? 127.0f / greatest : 0.0f;
        int8_t* octets = to.octets(m, b, row);
        if (m.static_scale > 0) {
            to.scales[at] = greatest == greatest ? m.static_scale : greatest;
            to.starts[at] = -zero * round_values(values, m.block, octets, to.pitch(), [&](Floats16 x) { return static_levels(x, m.static_scale); });
            continue;
        }
        const auto scaled = [&](Floats16 x) { return x * inverse; };
        to.scales[at] = greatest / 127.0f;
        if (!m.super()) {
            const int32_t sum = round_values(values, m.block, octets, to.pitch(), scaled);
            to.starts[at] = -zero * sum;
            if (m.minimums) to.sums[at] = to.scales[at] * static_cast<float>(sum);
            continue;
        }
        for (int64_t part = 0; part < kSums; part++) {
            const int64_t i = part * kSuper / kSums;
            int32_t sums[2];
            for (int64_t half = 0; half < 2; half++) {
                const int64_t from = i + half * kSuper / kStarts;
                sums[half] = round_values(values + from, kSuper / kStarts, octets + from / kOctet * to.pitch(), to.pitch(), scaled);
                to.starts[at * kStarts + 2 * part + half] = -zero * sums[half];
            }
            to.sums[at * kSums + part] = static_cast<float>(-sums[0] - sums[1]);
        }
    }
}

}  // namespace
}  // namespace edge
