// NEON of ARMv8.0, without dot products (Cortex-A53, A57, A72, A73). Products of bytes are added in 16 bits as long as they fit: 17 products with levels
// of at most 15, 85 with at most 3, 8 with at most 31, 4 with at most 63, and 2 with signed levels of 8 bits.
#include "arm/isa_neon.h"
#include "per_isa/attend_cells.h"
#include "per_isa/draft_steps.h"
#include "per_isa/gate.h"
#include "per_isa/multiply_floats.h"
#include "per_isa/round_row.h"
#include "variants.h"

namespace edge {
namespace {

struct Neon : NeonBase {
    // Each output has four lanes of 16 bits, or two of 32: outputs 0 and 1 in `low`, 2 and 3 in `high`. They are added at the end of a sum.
    struct Shorts {
        int16x8_t low, high;
    };
    struct Ints {
        int32x4_t low, high;
    };
    // A row and vector need two registers of sums, and others for products in 16 bits.
    static constexpr int rows(bool adds_short) { return adds_short ? 8 : 5; }
    static constexpr int vectors(int rows, bool) { return rows <= 2 ? 4 : rows <= 6 ? 2 : 1; }
    static constexpr int kLongRows = 0, kPartsAtOnce = 2;
    // In each group, a lane gets two products with 4 bits, four with 2 bits.
    template <int kBits>
    static constexpr int kShortGroups = kBits == 4 ? 8 : kBits == 2 ? 16 : 0;

    template <int kBits>
    struct Inputs {
        int8x8_t octet[Group<kBits>::octets];
        void load(const int8_t* x, int64_t pitch) {
            for (int o = 0; o < Group<kBits>::octets; o++) octet[o] = vld1_s8(x + o * pitch);
        }
    };
    template <int kBits>
    static Ints dot(Ints sum, const Weights<kBits>& w, const Inputs<kBits>& x) {
        constexpr int kParts = Group<kBits>::parts, kAtOnce = kBits == 6 ? 4 : kBits == 5 ? 8 : 2;
        for (int p = 0; p < kParts; p += kAtOnce) {
            Shorts few = products(w.part[p], x.octet[p / 2], p % 2);
            for (int q = p + 1; q < p + kAtOnce; q++) few = add_short(few, w.part[q], x.octet[q / 2], q % 2);
            sum = widen(sum, few);
        }
        return sum;
    }

    static int8x8_t short_inputs(const int8_t* x) { return vld1_s8(x); }
    // Multiplies the weights of four outputs with the first or the last four inputs of an octet.
    static Shorts products(int8x16_t weights, int8x8_t octet, int half) {
        const int8x16_t inputs = four_times(octet, half);
        return {vmull_s8(vget_low_s8(weights), vget_low_s8(inputs)), vmull_high_s8(weights, inputs)};
    }
    static Shorts add_short(Shorts few, int8x16_t weights, int8x8_t octet, int half) {
        const int8x16_t inputs = four_times(octet, half);
        return {vmlal_s8(few.low, vget_low_s8(weights), vget_low_s8(inputs)), vmlal_high_s8(few.high, weights, inputs)};
    }
    static Ints widen(Ints sum, Shorts few) { return {vpadalq_s16(sum.low, few.low), vpadalq_s16(sum.high, few.high)}; }
    static Ints set(int32_t value) {
        const int32x4_t first = vreinterpretq_s32_u64(vdupq_n_u64(static_cast<uint32_t>(value)));
        return {first, first};
    }
    static Floats convert(Ints value) { return vcvtq_f32_s32(vpaddq_s32(value.low, value.high)); }

private:
    static int8x16_t four_times(int8x8_t octet, int half) {
        const int32x2_t halves = vreinterpret_s32_s8(octet);
        return vreinterpretq_s8_s32(half ? vdupq_lane_s32(halves, 1) : vdupq_lane_s32(halves, 0));
    }
};

// Static scales can round to -128. Two products of -128 and levels of -128 do not fit 16 bits.
struct NeonStatic : Neon {
    template <int kBits>
    static Ints dot(Ints sum, const Weights<kBits>& w, const Inputs<kBits>& x) {
        for (int p = 0; p < Group<kBits>::parts; p++) sum = widen(sum, products(w.part[p], x.octet[p / 2], p % 2));
        return sum;
    }
};

void multiply_neon(const PackedMatrix& m, const RoundedRows& a, int64_t first, int64_t last, const Products& out) {
    if (m.static_scale > 0 && m.bits == 8) return multiply_all<NeonStatic, 8, 0>(m, a, first, last, out);
    return multiply<Neon>(m, a, first, last, out);
}

}  // namespace

const Variant kNeon = {"neon", multiply_neon, round_row<Neon>, {attend_span, merge_spans}, attend_cells, gate, tanh_of, round_levels, FloatKernels<1>::multiply, &kDraftSteps};

}  // namespace edge
