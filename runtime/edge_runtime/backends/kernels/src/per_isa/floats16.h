// Vectors of 16 floats, for any instruction set; the results are the same on all.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace edge {
namespace {

constexpr int kLanes = 16;
using Floats16 = float __attribute__((ext_vector_type(16)));
using Floats8 = float __attribute__((ext_vector_type(8)));
using Floats4 = float __attribute__((ext_vector_type(4)));
using Ints16 = int32_t __attribute__((ext_vector_type(16)));

Floats16 load16(const float* from) {
    Floats16 value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

// Loads `count` lanes; the others are 0.
Floats16 load16(const float* from, int64_t count) {
    Floats16 value = 0;
    __builtin_memcpy(&value, from, static_cast<size_t>(count) * 4);
    return value;
}

void store16(float* to, Floats16 value, int64_t count = kLanes) {
    if (count == kLanes) __builtin_memcpy(to, &value, sizeof value);
    else __builtin_memcpy(to, &value, static_cast<size_t>(count) * 4);
}

float total(Floats16 value) {
    const Floats8 eight = value.lo + value.hi;
    const Floats4 four = eight.lo + eight.hi;
    return (four.x + four.z) + (four.y + four.w);
}

// e^x for x <= 0. Below -87 the result is e^-87. NaN stays NaN, which is why a comparison is used and not a maximum. Polynomial: Cephes, expf.
Floats16 exp16(Floats16 x) {
    x = x < Floats16(-87.0f) ? Floats16(-87.0f) : x;
    const Floats16 shifted = __builtin_elementwise_fma(x, Floats16(1.44269504f), Floats16(12582912.0f));
    const Floats16 whole = shifted - 12582912.0f;
    Floats16 rest = __builtin_elementwise_fma(whole, Floats16(-0.693359375f), x);
    rest = __builtin_elementwise_fma(whole, Floats16(2.12194440e-4f), rest);
    Floats16 sum = Floats16(1.9875691500e-4f);
    constexpr float kFactors[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    for (const float factor : kFactors)
        sum = __builtin_elementwise_fma(sum, rest, Floats16(factor));
    sum = __builtin_elementwise_fma(sum, rest * rest, rest) + 1.0f;
    const Ints16 exponent = (__builtin_bit_cast(Ints16, shifted) - (0x4b400000 - 127)) << 23;
    return sum * __builtin_bit_cast(Floats16, exponent);
}

}  // namespace
}  // namespace edge
