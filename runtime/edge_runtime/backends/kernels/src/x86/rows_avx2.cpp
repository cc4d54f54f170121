// AVX2 without VNNI. Pairs of products are added in 16 bits: levels of at most 31 times 127 leave room for four of them, of 63 for two; 8-bit
// levels are made signed, and their magnitudes take the products' signs from the activations, so that no sum leaves 16 bits either.
#include "x86/isa_avx2.h"
#include "per_isa/attend_cells.h"
#include "per_isa/draft_steps.h"
#include "per_isa/gate.h"
#include "per_isa/multiply_floats.h"
#include "per_isa/round_row.h"
#include "variants.h"

namespace edge {
namespace {

struct Avx2 : Avx2Base {
    static constexpr bool kSigned8 = true, kByPart = false;
    // 16 products of 15 times 127, or 86 of 3 times 127, fit 16 bits: two of them are a part's, and a group has two or four parts.
    template <int kBits>
    static constexpr int kShortGroups = kBits == 4 ? 4 : kBits == 2 ? 8 : 0;

    template <int kBits>
    struct Inputs {
        Ints part[Group<kBits>::parts];
        void load(const int8_t* x, int64_t pitch) {
            for (int p = 0; p < Group<kBits>::parts; p++) part[p] = four(x + p / 2 * pitch + p % 2 * 4);
        }
    };
    template <int kBits>
    static Ints dot(Ints sum, const Weights<kBits>& w, const Inputs<kBits>& x) {
        const Ints ones = _mm256_set1_epi16(1);
        if constexpr (kBits == 8) {
            const Ints first = products_of_signed(w.part[0], x.part[0]), second = products_of_signed(w.part[1], x.part[1]);
            return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(first, ones), _mm256_madd_epi16(second, ones)));
        } else {
            constexpr int kParts = Group<kBits>::parts, kAtOnce = kBits == 6 ? 2 : kBits == 5 ? 4 : kParts;
            for (int p = 0; p < kParts; p += kAtOnce) {
                Ints pairs = _mm256_maddubs_epi16(w.part[p], x.part[p]);
                for (int q = p + 1; q < p + kAtOnce; q++) pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w.part[q], x.part[q]));
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
            }
            return sum;
        }
    }

    static Ints add_short(Ints few, Ints weights, Ints inputs) { return _mm256_add_epi16(few, _mm256_maddubs_epi16(weights, inputs)); }
    static Ints widen(Ints sum, Ints few) { return _mm256_add_epi32(sum, _mm256_madd_epi16(few, _mm256_set1_epi16(1))); }

private:
    static Ints products_of_signed(Ints weights, Ints inputs) {
        const Ints level = _mm256_xor_si256(weights, _mm256_set1_epi8(static_cast<char>(0x80)));
        return _mm256_maddubs_epi16(_mm256_abs_epi8(level), _mm256_sign_epi8(inputs, level));
    }
};

}  // namespace

const Variant kAvx2 = {"avx2", multiply<Avx2>, round_row<Avx2>, {attend_span, merge_spans}, attend_cells, gate, tanh_of, FloatKernels<1>::multiply, &kDraftSteps};

}  // namespace edge
