// AVX2 without VNNI. Pairs of products are added in 16 bits. With levels of at most 31, times 127, four products fit; with levels of at most 63, two.
// 8-bit levels are made signed, and their signs are moved to the activations, so that sums of two products fit too.
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
    using Shorts = Ints;
    // One or two rows are added in 32 bits at once: they wait for memory anyway, so the additional steps cost nothing.
    static constexpr int kLongRows = 2, kPartsAtOnce = 1;
    // 16 bits hold 16 products of 15 times 128, or 85 of 3 times 128 (static scales). A part has two products, and a group two or four parts.
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

    static Ints short_inputs(const int8_t* x) { return four(x); }
    static Ints add_short(Ints few, Ints weights, Ints inputs, int) { return _mm256_add_epi16(few, _mm256_maddubs_epi16(weights, inputs)); }
    static Ints widen(Ints sum, Ints few) { return _mm256_add_epi32(sum, _mm256_madd_epi16(few, _mm256_set1_epi16(1))); }

private:
    static Ints products_of_signed(Ints weights, Ints inputs) {
        const Ints level = _mm256_xor_si256(weights, _mm256_set1_epi8(static_cast<char>(0x80)));
        return _mm256_maddubs_epi16(_mm256_abs_epi8(level), _mm256_sign_epi8(inputs, level));
    }
};

// Static scales can round to -128. Two products of -128 and levels of -128 do not fit 16 bits, so bytes are widened to words first.
struct Avx2Static : Avx2 {
    template <int kBits>
    static Ints dot(Ints sum, const Weights<kBits>& w, const Inputs<kBits>& x) {
        for (int p = 0; p < Group<kBits>::parts; p++) {
            const Ints levels = _mm256_xor_si256(w.part[p], _mm256_set1_epi8(static_cast<char>(0x80)));
            const Ints first = _mm256_madd_epi16(even(levels), even(x.part[p])), second = _mm256_madd_epi16(odd(levels), odd(x.part[p]));
            sum = _mm256_add_epi32(sum, _mm256_add_epi32(first, second));
        }
        return sum;
    }

private:
    static Ints even(Ints bytes) { return odd(_mm256_slli_epi16(bytes, 8)); }
    static Ints odd(Ints bytes) { return _mm256_srai_epi16(bytes, 8); }
};

void multiply_avx2(const PackedMatrix& m, const RoundedRows& a, int64_t first, int64_t last, const Products& out) {
    if (m.static_scale > 0 && m.bits == 8) return multiply_all<Avx2Static, 8, 0>(m, a, first, last, out);
    return multiply<Avx2>(m, a, first, last, out);
}

}  // namespace

const Variant kAvx2 = {"avx2", multiply_avx2, round_row<Avx2>, {attend_span, merge_spans}, attend_cells, gate, tanh_of, round_levels, FloatKernels<1>::multiply, &kDraftSteps};

}  // namespace edge
