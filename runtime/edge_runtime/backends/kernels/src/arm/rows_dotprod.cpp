// NEON with dot products (Cortex-A55, A75, A76 and later). Levels of up to 6 bits are unsigned, those of 8 bits are made signed.
#include "arm/isa_neon.h"
#include "per_isa/attend_cells.h"
#include "per_isa/draft_steps.h"
#include "per_isa/gate.h"
#include "per_isa/multiply_floats.h"
#include "per_isa/round_row.h"
#include "variants.h"

namespace edge {
namespace {

struct Dotprod : NeonBase {
    template <int kBits>
    struct Inputs {
        static constexpr int kOctets = Group<kBits>::octets;
        int8x16_t pair[(kOctets + 1) / 2];  // pairs of octets
        void load(const int8_t* x, int64_t pitch) {
            for (int o = 0; o < kOctets; o += 2)
                pair[o / 2] = vcombine_s8(vld1_s8(x + o * pitch), kOctets > 1 ? vld1_s8(x + (o + 1) * pitch) : vdup_n_s8(0));
        }
    };
    template <int kBits>
    static Ints dot(Ints sum, const Weights<kBits>& w, const Inputs<kBits>& x) {
        for (int p = 0; p < Group<kBits>::parts; p += 4) {
            const int8x16_t inputs = x.pair[p / 4];
            sum = vdotq_laneq_s32(vdotq_laneq_s32(sum, w.part[p], inputs, 0), w.part[p + 1], inputs, 1);
            if constexpr (Group<kBits>::parts > 2) sum = vdotq_laneq_s32(vdotq_laneq_s32(sum, w.part[p + 2], inputs, 2), w.part[p + 3], inputs, 3);
        }
        return sum;
    }
};

}  // namespace

const Variant kDotprod = {"dotprod", multiply<Dotprod>, round_row<Dotprod>, {attend_span, merge_spans}, attend_cells, gate, tanh_of, round_levels, FloatKernels<1>::multiply, &kDraftSteps};

}  // namespace edge
