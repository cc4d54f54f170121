// AVX-512 with VNNI: 16 outputs to a register, four multiplications to a lane.
#include <immintrin.h>

#include "per_isa/attend.h"
#include "per_isa/round_row.h"
#include "per_isa/multiply.h"
#include "variants.h"

namespace edge {
namespace {

struct Avx512Vnni {
    static constexpr int width = 16, kRows = 12, kManyRows = 6;
    static constexpr bool kSigned8 = false;
    using Ints = __m512i;
    using Floats = __m512;
    // One tile at a time is one stream of memory, which the processor fetches ahead by itself: a row takes 13.3 ms so, four tiles 19.2.
    static constexpr int vectors(int) { return 1; }

    // 32 / kBits inputs of 16 outputs, as 8 / kBits registers of bytes.
    template <int kBits>
    struct Weights {
        Ints part[8 / kBits];
        void load(const uint8_t* line) {
            const Ints raw = _mm512_loadu_si512(line), mask = _mm512_set1_epi8(static_cast<char>((1 << kBits) - 1));
            if constexpr (kBits == 8) part[0] = raw;
            else
                for (int p = 0; p < 8 / kBits; p++) part[p] = _mm512_and_si512(_mm512_srli_epi16(raw, p * kBits), mask);
        }
    };
    template <int kBits>
    struct Inputs {
        Ints part[8 / kBits];
        void load(const int8_t* x) {
            for (int p = 0; p < 8 / kBits; p++) part[p] = _mm512_set1_epi32(reinterpret_cast<const int32_t*>(x)[p]);
        }
    };
    template <int kBits>
    static Ints dot(Ints sum, const Weights<kBits>& w, const Inputs<kBits>& x) {
        for (int p = 0; p < 8 / kBits; p++) sum = _mm512_dpbusd_epi32(sum, w.part[p], x.part[p]);
        return sum;
    }
    static Floats zero() { return _mm512_setzero_ps(); }
    static Ints set(int32_t value) { return _mm512_set1_epi32(value); }
    static Floats splat(float value) { return _mm512_set1_ps(value); }
    static Floats load_float(const uint8_t* p) { return _mm512_loadu_ps(reinterpret_cast<const float*>(p)); }
    static Floats load_half(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
    static Floats convert(Ints value) { return _mm512_cvtepi32_ps(value); }
    static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static void store(float* out, Floats value, int64_t count) { _mm512_mask_storeu_ps(out, static_cast<__mmask16>((1u << count) - 1), value); }
};

}  // namespace

const Variant kAvx512Vnni = {"avx512vnni", multiply<Avx512Vnni>, round_row, {attend_span, merge_spans}};

}  // namespace edge
