// Elementwise functions between products. Each file that includes this header compiles it for its own instruction set; the results are the same on all.
#pragma once
#include "per_isa/floats16.h"

namespace edge {
namespace {

// 1 / x for 1 <= x <= 2: two Newton steps from the minimax parabola, whose error is a hundredth. Much cheaper than a division.
Floats16 inverse16(Floats16 x) {
    Floats16 y = __builtin_elementwise_fma(__builtin_elementwise_fma(x, Floats16(0.323231846f), Floats16(-1.45454395f)), x, Floats16(2.12121105f));
    for (int step = 0; step < 2; step++) y = __builtin_elementwise_fma(y, __builtin_elementwise_fma(-x, y, Floats16(1)), y);
    return y;
}

// 2^x for -126 <= x <= 0, by the minimax polynomial on [-1/2, 1/2]; its error is 9.3e-8.
Floats16 exp2_16(Floats16 x) {
    const Floats16 shifted = x + 12582912.0f, rest = x - (shifted - 12582912.0f);
    Floats16 sum = Floats16(1.34072592e-3f);
    constexpr float kFactors[] = {9.67187528e-3f, 5.55030853e-2f, 2.4022235e-1f, 6.93147242e-1f, 1.0f};
    for (const float factor : kFactors) sum = __builtin_elementwise_fma(sum, rest, Floats16(factor));
    return __builtin_bit_cast(Floats16, __builtin_bit_cast(Ints16, sum) + (__builtin_bit_cast(Ints16, shifted) << 23));
}

// tanh(x). Polynomial for small x: Cephes, tanhf.
Floats16 tanh16(Floats16 x) {
    const Floats16 size = __builtin_elementwise_abs(x), square = x * x, power = exp16(size * -2.0f);
    Floats16 sum = Floats16(-5.70498872745e-3f);
    constexpr float kFactors[] = {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f};
    for (const float factor : kFactors) sum = __builtin_elementwise_fma(sum, square, Floats16(factor));
    const Floats16 small = __builtin_elementwise_fma(sum * square, x, x), large = (1.0f - power) * inverse16(1.0f + power);
    return size < Floats16(0.625f) ? small : x < Floats16(0) ? -large : large;
}

// Gemma's GELU (arXiv 1606.08415): x / 2 * (1 + tanh(u)), u = sqrt(2 / pi) * (x + 0.044715 x^3). It is computed as x / (1 + e^-2u), which does not lose
// digits where tanh(u) is nearly -1. The power is one of 2: 2u * log2(e) = x * (2.3022082 + 0.10294324 x^2).
Floats16 gelu16(Floats16 x) {
    const Floats16 exponent = x * __builtin_elementwise_fma(x * x, Floats16(0.10294324f), Floats16(2.3022082f));
    const Floats16 size = -__builtin_elementwise_abs(exponent), least = -126.0f;
    const Floats16 power = exp2_16(size < least ? least : size) - 0x1p-126f;  // 0 at the smallest exponent
    return x * ((x < Floats16(0) ? power : Floats16(1)) * inverse16(1.0f + power));
}

// Calls `part` with the index and the number of up to 16 values at a time.
template <class Part>
void each_lanes(int64_t count, Part part) {
    int64_t at = 0;
    for (; at + kLanes <= count; at += kLanes) part(at, kLanes);
    if (at < count) part(at, count - at);
}

Floats16 load_lanes(const float* from, int64_t count) { return count == kLanes ? load16(from) : load16(from, count); }

// out = gelu(gates) * values; `out` may be one of them.
void gate(const float* gates, const float* values, float* out, int64_t count) {
    each_lanes(count, [&](int64_t at, int64_t lanes) {
        store16(out + at, gelu16(load_lanes(gates + at, lanes)) * load_lanes(values + at, lanes), lanes);
    });
}

void tanh_of(const float* values, float* out, int64_t count) {
    each_lanes(count, [&](int64_t at, int64_t lanes) { store16(out + at, tanh16(load_lanes(values + at, lanes)), lanes); });
}

}  // namespace
}  // namespace edge
