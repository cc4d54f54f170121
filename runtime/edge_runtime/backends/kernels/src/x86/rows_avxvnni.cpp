// AVX-VNNI: client processors without AVX-512.
#include "x86/isa_avx2.h"
#include "per_isa/attend_cells.h"
#include "per_isa/draft_steps.h"
#include "per_isa/gate.h"
#include "per_isa/multiply_floats.h"
#include "per_isa/round_row.h"
#include "variants.h"

namespace edge {
namespace {

struct AvxVnni : Avx2Base {
    static constexpr bool kByPart = true;
    static Ints dot(Ints sum, Ints weights, Ints inputs) { return _mm256_dpbusd_avx_epi32(sum, weights, inputs); }
};

}  // namespace

const Variant kAvxVnni = {"avxvnni", multiply<AvxVnni>, round_row<AvxVnni>, {attend_span, merge_spans}, attend_cells, gate, tanh_of, round_levels, FloatKernels<1>::multiply, &kDraftSteps};

}  // namespace edge
