// NEON with matrix products (i8mm: Cortex-A510, A710, X2, Neoverse N2 and later, Apple M2 and later): two rows by two outputs by eight inputs
// to an instruction. A single row goes through the dot products.
#include "arm/isa_neon.h"
#include "per_isa/attend.h"
#include "per_isa/round_row.h"
#include "variants.h"

namespace edge {
namespace {

constexpr int kPairs = 6;

// Eight inputs of four outputs: of outputs 0 and 1, and of 2 and 3. 8 bits take them from two lines.
struct Eight {
    int8x16_t low, high;
    Eight(int8x16_t first, int8x16_t second)
        : low(vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(first), vreinterpretq_s32_s8(second)))),
          high(vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(first), vreinterpretq_s32_s8(second)))) {}
};

template <int kBits>
Eight load(const uint8_t* line, int part) {
    if constexpr (kBits == 8) {
        const uint8x16_t sign = vdupq_n_u8(0x80);
        return {vreinterpretq_s8_u8(veorq_u8(vld1q_u8(line), sign)), vreinterpretq_s8_u8(veorq_u8(vld1q_u8(line + kLine), sign))};
    } else {
        const uint8x16_t raw = vld1q_u8(line), mask = vdupq_n_u8((1 << kBits) - 1);
        const int8x16_t shift = vdupq_n_s8(static_cast<int8_t>(-2 * part * kBits)), next = vdupq_n_s8(static_cast<int8_t>(-(2 * part + 1) * kBits));
        return {vreinterpretq_s8_u8(vandq_u8(vshlq_u8(raw, shift), mask)), vreinterpretq_s8_u8(vandq_u8(vshlq_u8(raw, next), mask))};
    }
}

template <int kBits, int kRowPairs>
void multiply_pairs(const PackedMatrix& m, const RoundedRows& a, int64_t row, int64_t rows, int64_t vector, float* out) {
    constexpr int64_t kParts = kTile / NeonBase::width, kInputs = kBits == 2 ? 16 : 8, kLines = kBits == 8 ? 2 : 1;
    constexpr int kZero = kBits == 8 ? 0 : 1 << (kBits - 1);
    const int64_t tile = vector / kParts, part = vector % kParts, blocks = m.blocks();
    const uint8_t* weights = m.levels + tile * m.tile_bytes() + part * 16;
    const uint8_t* scales = static_cast<const uint8_t*>(m.scales) + (tile * blocks * kTile + part * 4) * m.scale_bytes();
    const int8_t* levels = a.levels + row * m.block;
    int64_t at[2 * kRowPairs];  // an odd last row is computed twice
    for (int r = 0; r < 2 * kRowPairs; r++) at[r] = r < rows ? r : rows - 1;
    float32x4_t result[2 * kRowPairs];
    for (int r = 0; r < 2 * kRowPairs; r++) result[r] = vdupq_n_f32(0);
    for (int64_t b = 0; b < blocks; b++) {
        int32x4_t sum[kRowPairs][2];
        for (int p = 0; p < kRowPairs; p++) {
            const int32_t *sums = a.sums + b * a.rows + row;
            const int32x2_t even = vdup_n_s32(-kZero * sums[at[2 * p]]), odd = vdup_n_s32(-kZero * sums[at[2 * p + 1]]);
            sum[p][0] = sum[p][1] = vcombine_s32(even, odd);
        }
        for (int64_t i = 0; i < m.block; i += kInputs, weights += kLines * kLine)
            for (int half = 0; half < kInputs / 8; half++) {
                const Eight w = load<kBits>(weights, half);
                for (int p = 0; p < kRowPairs; p++) {
                    const int8_t* x = levels + i + 8 * half;
                    const int8x16_t pair = vcombine_s8(vld1_s8(x + at[2 * p] * m.block), vld1_s8(x + at[2 * p + 1] * m.block));
                    sum[p][0] = vmmlaq_s32(sum[p][0], pair, w.low);
                    sum[p][1] = vmmlaq_s32(sum[p][1], pair, w.high);
                }
            }
        const float32x4_t scale = m.half_scales ? NeonBase::load_half(scales) : NeonBase::load_float(scales);
        for (int p = 0; p < kRowPairs; p++) {
            const int64x2_t low = vreinterpretq_s64_s32(sum[p][0]), high = vreinterpretq_s64_s32(sum[p][1]);
            const int32x4_t of[2] = {vreinterpretq_s32_s64(vuzp1q_s64(low, high)), vreinterpretq_s32_s64(vuzp2q_s64(low, high))};
            for (int r = 0; r < 2; r++) {
                const float factor = a.scales[b * a.rows + row + at[2 * p + r]];
                result[2 * p + r] = vfmaq_f32(result[2 * p + r], vcvtq_f32_s32(of[r]), vmulq_f32(scale, vdupq_n_f32(factor)));
            }
        }
        scales += kTile * m.scale_bytes();
        levels += a.rows * m.block;
    }
    const int64_t output = vector * 4, left = m.outputs - output;
    for (int64_t r = 0; left > 0 && r < rows; r++) NeonBase::store(out + (row + r) * m.outputs + output, result[r], left < 4 ? left : 4);
}

template <int kBits, int kRowPairs = kPairs>
void multiply_some_pairs(const PackedMatrix& m, const RoundedRows& a, int64_t row, int64_t rows, int64_t first, int64_t last, float* out) {
    if ((rows + 1) / 2 == kRowPairs) {
        for (int64_t v = first; v < last; v++) multiply_pairs<kBits, kRowPairs>(m, a, row, rows, v, out);
        return;
    }
    if constexpr (kRowPairs > 1) multiply_some_pairs<kBits, kRowPairs - 1>(m, a, row, rows, first, last, out);
}

template <int kBits>
void multiply_groups(const PackedMatrix& m, const RoundedRows& a, int64_t first, int64_t last, float* out) {
    constexpr int64_t kParts = kTile / NeonBase::width;
    const int64_t groups = (a.rows + 2 * kPairs - 1) / (2 * kPairs);
    for (int64_t tile = first; tile < last; tile++)
        for (int64_t g = 0, row = 0; g < groups; g++) {
            const int64_t next = (g + 1) * a.rows / groups;
            multiply_some_pairs<kBits>(m, a, row, next - row, tile * kParts, (tile + 1) * kParts, out);
            row = next;
        }
}

void multiply_i8mm(const PackedMatrix& m, const RoundedRows& a, int64_t first, int64_t last, float* out) {
    if (a.rows == 1) return kDotprod.multiply(m, a, first, last, out);
    switch (m.bits) {
        case 2: return multiply_groups<2>(m, a, first, last, out);
        case 4: return multiply_groups<4>(m, a, first, last, out);
        case 8: return multiply_groups<8>(m, a, first, last, out);
    }
}

}  // namespace

const Variant kI8mm = {"i8mm", multiply_i8mm, round_row, {attend_span, merge_spans}};

}  // namespace edge
