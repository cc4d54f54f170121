// AVX-VNNI: client processors without AVX-512.
#include "x86/isa_avx2.h"
#include "per_isa/attend_cells.h"
#include "per_isa/round_row.h"
#include "variants.h"

namespace edge {
namespace {

struct AvxVnni : Avx2Base {
    template <int kBits>
    static Ints dot(Ints sum, const Weights<kBits>& w, const Inputs<kBits>& x) {
        for (int p = 0; p < Group<kBits>::parts; p++) sum = _mm256_dpbusd_avx_epi32(sum, w.part[p], x.part[p]);
        return sum;
    }
};

}  // namespace

const Variant kAvxVnni = {"avxvnni", multiply<AvxVnni>, round_row<AvxVnni>, {attend_span, merge_spans}, attend_cells};

}  // namespace edge
