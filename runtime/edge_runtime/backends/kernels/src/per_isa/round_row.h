// Rounds one row's blocks to int8. Each file that includes it compiles it for its own instruction set; the numbers are the same.
#pragma once
#include "layout.h"
#include "per_isa/floats16.h"

namespace edge {
namespace {

using Counts16 = uint32_t __attribute__((ext_vector_type(16)));
using Levels16 = int8_t __attribute__((ext_vector_type(16)));

// Of a multiple of 16 values. Magnitudes compare like their bits, and NaN is above all of them: its scale makes the row's results NaN.
float greatest_of(const float* values, int64_t count) {
    Counts16 greatest = 0;
    for (int64_t i = 0; i < count; i += kLanes)
        greatest = __builtin_elementwise_max(greatest, __builtin_bit_cast(Counts16, load16(values + i)) & 0x7fffffffu);
    return __builtin_bit_cast(float, __builtin_reduce_max(greatest));
}

// A multiple of 16 values; their octets go `pitch` bytes apart. Returns the sum of levels.
int32_t round_values(const float* values, int64_t count, float inverse, int8_t* octets, int64_t pitch) {
    Ints16 sum = 0;
    for (int64_t i = 0; i < count; i += kLanes, octets += 2 * pitch) {
        // Adding 1.5 * 2^23 rounds to the nearest even integer, which then stands in the low bits.
        const Floats16 shifted = load16(values + i) * inverse + 12582912.0f;
        const Levels16 levels = __builtin_convertvector(__builtin_bit_cast(Ints16, shifted), Levels16);
        sum += __builtin_convertvector(levels, Ints16);
        __builtin_memcpy(octets, &levels, kOctet);
        __builtin_memcpy(octets + pitch, reinterpret_cast<const char*>(&levels) + kOctet, kOctet);
    }
    return __builtin_reduce_add(sum);
}

// `Isa` says which zero point its 8-bit levels have.
template <class Isa>
void round_row(const float* values, const PackedMatrix& m, int64_t first, int64_t last, int64_t row, const RoundedRows& to) {
    const int32_t zero = m.bits == 8 && Isa::kSigned8 ? 0 : m.zero();
    for (int64_t b = first; b < last; b++, values += m.block) {
        const int64_t at = b * to.rows + row;
        const float greatest = greatest_of(values, m.block), inverse = greatest > 0 ? 127.0f / greatest : 0.0f;
        int8_t* octets = to.octets(m, b, row);
        to.scales[at] = greatest / 127.0f;
        if (!m.super()) {
            const int32_t sum = round_values(values, m.block, inverse, octets, to.pitch());
            to.starts[at] = -zero * sum;
            if (m.minimums) to.sums[at] = to.scales[at] * static_cast<float>(sum);
            continue;
        }
        for (int64_t part = 0; part < kSums; part++) {
            const int64_t i = part * kSuper / kSums;
            int32_t sums[2];
            for (int64_t half = 0; half < 2; half++) {
                const int64_t from = i + half * kSuper / kStarts;
                sums[half] = round_values(values + from, kSuper / kStarts, inverse, octets + from / kOctet * to.pitch(), to.pitch());
                to.starts[at * kStarts + 2 * part + half] = -zero * sums[half];
            }
            to.sums[at * kSums + part] = static_cast<float>(-sums[0] - sums[1]);
        }
    }
}

}  // namespace
}  // namespace edge
