// NEON with matrix products (i8mm: Cortex-A510, A710, X2, Neoverse N2 and later, Apple M2 and later). One instruction multiplies two rows and two
// outputs with eight inputs each. A single row uses dot products.
#include "arm/isa_neon.h"
#include "per_isa/attend_cells.h"
#include "per_isa/draft_steps.h"
#include "per_isa/gate.h"
#include "per_isa/multiply_floats.h"
#include "per_isa/round_row.h"
#include "variants.h"

namespace edge {
namespace {

constexpr int kPairs = kMaxRows / 2;

// Eight inputs of four outputs: `low` has those of outputs 0 and 1, `high` those of 2 and 3. With 8 bits they come from two lines.
struct Eight {
    int8x16_t low, high;
    Eight(int8x16_t first, int8x16_t second)
        : low(vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(first), vreinterpretq_s32_s8(second)))),
          high(vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(first), vreinterpretq_s32_s8(second)))) {}
};

// Calls `use` with the index of the octet and an Eight, for all inputs of a group that begins at `line`.
template <int kBits, class Use>
[[gnu::always_inline]] inline void each_eight(const uint8_t* line, Use use) {
    if constexpr (kBits == 8) {
        const uint8x16_t sign = vdupq_n_u8(0x80);
        use(0, Eight(vreinterpretq_s8_u8(veorq_u8(vld1q_u8(line), sign)), vreinterpretq_s8_u8(veorq_u8(vld1q_u8(line + kLine), sign))));
    } else if constexpr (kBits == 6) {
        const SixBits six(line);
        for (int h = 0; h < 2; h++) use(h, Eight(vreinterpretq_s8_u8(six.part[2 * h]), vreinterpretq_s8_u8(six.part[2 * h + 1])));
    } else if constexpr (kBits == 5) {
        const FiveBits five(line);
        for (int h = 0; h < 4; h++) use(h, Eight(vreinterpretq_s8_u8(five.part[2 * h]), vreinterpretq_s8_u8(five.part[2 * h + 1])));
    } else {
        const uint8x16_t raw = vld1q_u8(line), mask = vdupq_n_u8((1 << kBits) - 1);
        for (int h = 0; h < 4 / kBits; h++) {
            const int8x16_t shift = vdupq_n_s8(static_cast<int8_t>(-2 * h * kBits)), next = vdupq_n_s8(static_cast<int8_t>(-(2 * h + 1) * kBits));
            use(h, Eight(vreinterpretq_s8_u8(vandq_u8(vshlq_u8(raw, shift), mask)), vreinterpretq_s8_u8(vandq_u8(vshlq_u8(raw, next), mask))));
        }
    }
}

// The sums of pairs of rows and four outputs. If the number of rows is odd, the sums of the last pair's second row are not used.
template <int kRowPairs>
struct Pairs {
    int64_t at[2 * kRowPairs];
    int32x4_t sum[kRowPairs][2];

    explicit Pairs(int64_t rows) {
        for (int r = 0; r < 2 * kRowPairs; r++) at[r] = r < rows ? r : rows - 1;
    }
    // The sums of row r start from starts[r * stride].
    void begin(const int32_t* starts, int64_t stride) {
        for (int p = 0; p < kRowPairs; p++)
            sum[p][0] = sum[p][1] = vcombine_s32(vdup_n_s32(starts[at[2 * p] * stride]), vdup_n_s32(starts[at[2 * p + 1] * stride]));
    }
    void begin() {
        for (int p = 0; p < kRowPairs; p++) sum[p][0] = sum[p][1] = vdupq_n_s32(0);
    }
    // Row r begins at levels + r * kOctet, and its octets are `pitch` bytes apart. After an odd last row, whatever follows is read, but not used.
    // Returns the address after the weights.
    template <int kBits>
    [[gnu::always_inline]] const uint8_t* add(const uint8_t* weights, int64_t inputs, const int8_t* levels, int64_t pitch) {
        for (int64_t i = 0; i < inputs; i += Group<kBits>::inputs, weights += Group<kBits>::lines * kLine, levels += Group<kBits>::octets * pitch)
            each_eight<kBits>(weights, [&](int octet, const Eight& w) {
                for (int p = 0; p < kRowPairs; p++) {
                    const int8x16_t pair = vld1q_s8(levels + octet * pitch + p * 2 * kOctet);
                    sum[p][0] = vmmlaq_s32(sum[p][0], pair, w.low);
                    sum[p][1] = vmmlaq_s32(sum[p][1], pair, w.high);
                }
            });
        return weights;
    }
    // Returns the sums of row r.
    float32x4_t row(int r) const {
        const int64x2_t low = vreinterpretq_s64_s32(sum[r / 2][0]), high = vreinterpretq_s64_s32(sum[r / 2][1]);
        return vcvtq_f32_s32(vreinterpretq_s32_s64(r % 2 ? vuzp2q_s64(low, high) : vuzp1q_s64(low, high)));
    }
};

template <int kBits, bool kSupers, int kRowPairs>
void multiply_pairs(const PackedMatrix& m, const RowGroup& group, int64_t vector, Blocks part, const Products& out) {
    constexpr int kRows = 2 * kRowPairs;
    constexpr bool kMinimumParts = kBits != 6;
    constexpr int64_t kParts = kMinimumParts ? kSums : kStarts, kInputs = kSuper / kParts;
    const RoundedRows& a = group.panel;
    Vectors<NeonBase, kRows, 1> at(m, vector, part.first);
    if (part.first) at.load(m, group.count, group.first, vector, out);
    Pairs<kRowPairs> pairs(group.count);
    const uint8_t* weights = at.weights[0];
    for (int64_t b = part.first, entry = part.first * a.rows + group.first; b < part.last; b++, entry += a.rows) {
        const uint8_t* scales = at.scales[0];
        const int64_t lane = at.lane[0];
        const int8_t* levels = a.octets(m, b, group.first);
        if constexpr (!kSupers) {
            pairs.begin(a.starts + entry, 1);
            weights = pairs.template add<kBits>(weights, m.block, levels, a.pitch());
            const float32x4_t scale = m.half_scales ? NeonBase::load_half(scales + lane * 2) : NeonBase::load_float(scales + lane * 4);
            for (int r = 0; r < kRows; r++) {
                const float32x4_t factor = vmulq_f32(scale, vdupq_n_f32(a.scales[entry + pairs.at[r]]));
                at.result[r][0] = vfmaq_f32(at.result[r][0], pairs.row(r), factor);
            }
            if constexpr (kBits == 4 || kBits == 5)
                if (m.minimums) {
                    const float32x4_t minimum = NeonBase::load_half(scales + 2 * kTile + lane * 2);
                    for (int r = 0; r < kRows; r++) at.result[r][0] = vfmaq_f32(at.result[r][0], minimum, vdupq_n_f32(a.sums[entry + pairs.at[r]]));
                }
        } else {
            const float32x4_t factor = NeonBase::load_half(scales + kFactors + lane * 2);
            const float32x4_t least = kMinimumParts ? NeonBase::load_half(scales + kFactors + kTile * 2 + lane * 2) : vdupq_n_f32(0);
            float32x4_t total[kRows];
            for (int r = 0; r < kRows; r++) total[r] = vdupq_n_f32(0);
            for (int64_t p = 0; p < kParts; p++) {
                if constexpr (kMinimumParts) pairs.begin();
                else pairs.begin(a.starts + entry * kStarts + p, kStarts);
                weights = pairs.template add<kBits>(weights, kInputs, levels + p * kInputs / kOctet * a.pitch(), a.pitch());
                const uint8_t* bytes = scales + p * kTile + lane;
                const float32x4_t scale = vmulq_f32(factor, NeonBase::load_bytes(bytes));
                for (int r = 0; r < kRows; r++) total[r] = vfmaq_f32(total[r], pairs.row(r), scale);
                if constexpr (kMinimumParts) {
                    const float32x4_t minimum = vmulq_f32(least, NeonBase::load_bytes(bytes + kMinimums));
                    for (int r = 0; r < kRows; r++)
                        total[r] = vfmaq_f32(total[r], minimum, vdupq_n_f32(a.sums[(entry + pairs.at[r]) * kSums + p]));
                }
            }
            for (int r = 0; r < kRows; r++) at.result[r][0] = vfmaq_f32(at.result[r][0], total[r], vdupq_n_f32(a.scales[entry + pairs.at[r]]));
        }
        at.scales[0] += m.scale_bytes();
    }
    at.store(m, group.count, group.first, vector, out);
}

template <int kBits, bool kSupers, int kRowPairs = kPairs>
void multiply_some_pairs(const PackedMatrix& m, const RowGroup& rows, int64_t first, int64_t last, Blocks part, const Products& out) {
    if ((rows.count + 1) / 2 == kRowPairs) {
        for (int64_t v = first; v < last; v++) multiply_pairs<kBits, kSupers, kRowPairs>(m, rows, v, part, out);
        return;
    }
    if constexpr (kRowPairs > 1) multiply_some_pairs<kBits, kSupers, kRowPairs - 1>(m, rows, first, last, part, out);
}

template <int kBits, bool kSupers = false>
void multiply_groups(const PackedMatrix& m, const RoundedRows& a, int64_t first, int64_t last, const Products& out) {
    constexpr int64_t kParts = kTile / NeonBase::width;
    if (a.panels() == 1) return multiply_some_pairs<kBits, kSupers>(m, {a, 0, a.rows}, first * kParts, last * kParts, {0, m.blocks()}, out);
    each_group(m, a, kMaxRows, first, last, out, [&](Blocks part, int64_t tile, int64_t end, const RowGroup& rows, const Products& to) {
        multiply_some_pairs<kBits, kSupers>(m, rows, tile * kParts, end * kParts, part, to);
    });
}

void multiply_i8mm(const PackedMatrix& m, const RoundedRows& a, int64_t first, int64_t last, const Products& out) {
    if (a.rows == 1) return kDotprod.multiply(m, a, first, last, out);
    switch (m.super() ? -m.bits : m.bits) {
        case -4: return multiply_groups<4, true>(m, a, first, last, out);
        case -5: return multiply_groups<5, true>(m, a, first, last, out);
        case -6: return multiply_groups<6, true>(m, a, first, last, out);
        case 2: return multiply_groups<2>(m, a, first, last, out);
        case 4: return multiply_groups<4>(m, a, first, last, out);
        case 5: return multiply_groups<5>(m, a, first, last, out);
        case 8: return multiply_groups<8>(m, a, first, last, out);
    }
}

}  // namespace

const Variant kI8mm = {"i8mm", multiply_i8mm, round_row<NeonBase>, {attend_span, merge_spans}, attend_cells, gate, tanh_of, round_levels, FloatKernels<1>::multiply, &kDraftSteps};

}  // namespace edge
