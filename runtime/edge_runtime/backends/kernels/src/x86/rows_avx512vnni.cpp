// AVX-512 with VNNI: 16 outputs per register, and four products per lane in one instruction.
#include <immintrin.h>

#include "per_isa/attend_cells.h"
#include "per_isa/draft_steps.h"
#include "per_isa/gate.h"
#include "per_isa/multiply_floats.h"
#include "per_isa/round_row.h"
#include "per_isa/multiply.h"
#include "variants.h"

namespace edge {
namespace {

struct Avx512Vnni {
    static constexpr int width = 16;
    static constexpr bool kSigned8 = false, kByPart = true, kFetchesScales = true;
    using Ints = __m512i;
    using Floats = __m512;
    static constexpr bool fetches_ahead(int) { return true; }
    static int64_t ahead() { return bytes_ahead; }
    // One or two rows take one tile at a time: that is a single stream of memory, which the processor also prefetches by itself. 3 to 5 rows take two
    // tiles, since with twice as many sums, dot products wait less for each other. More rows have enough sums.
    static constexpr int rows(bool) { return kMaxRows; }
    static constexpr int vectors(int rows, bool) { return rows > 2 && rows <= 5 ? 2 : 1; }

    // The weights of a group for 16 outputs, as registers of bytes.
    template <int kBits>
    struct Weights {
        Ints part[Group<kBits>::parts];
        void load(const uint8_t* line) {
            const Ints raw = _mm512_loadu_si512(line), mask = _mm512_set1_epi8(static_cast<char>(kBits == 6 ? 15 : (1 << kBits) - 1));
            if constexpr (kBits == 8) part[0] = raw, part[1] = _mm512_loadu_si512(line + kLine);
            else if constexpr (kBits == 6) load_six(line, raw, mask);
            else if constexpr (kBits == 5) load_five(line);
            else
                for (int p = 0; p < 8 / kBits; p++) part[p] = _mm512_and_si512(_mm512_srli_epi16(raw, p * kBits), mask);
        }
        void load_five(const uint8_t* line) {
            const Ints fifths = _mm512_loadu_si512(line + 4 * kLine), low = _mm512_set1_epi8(15), bit = _mm512_set1_epi8(16);
            for (int p = 0; p < Group<kBits>::parts; p++) {
                const Ints raw = _mm512_loadu_si512(line + p / 2 * kLine);
                const Ints fifth = p < 4 ? _mm512_slli_epi16(fifths, 4 - p) : _mm512_srli_epi16(fifths, p - 4);
                part[p] = _mm512_and_si512(_mm512_srli_epi16(raw, p % 2 * 4), low) | _mm512_and_si512(fifth, bit);
            }
        }
        void load_six(const uint8_t* line, Ints low, Ints mask) {
            const Ints next = _mm512_loadu_si512(line + kLine), high = _mm512_loadu_si512(line + 2 * kLine), two = _mm512_set1_epi8(0x30);
            part[0] = _mm512_and_si512(low, mask) | _mm512_and_si512(_mm512_slli_epi16(high, 4), two);
            part[1] = _mm512_and_si512(_mm512_srli_epi16(low, 4), mask) | _mm512_and_si512(_mm512_slli_epi16(high, 2), two);
            part[2] = _mm512_and_si512(next, mask) | _mm512_and_si512(high, two);
            part[3] = _mm512_and_si512(_mm512_srli_epi16(next, 4), mask) | _mm512_and_si512(_mm512_srli_epi16(high, 2), two);
        }
    };
    static Ints four(const int8_t* x) {
        int32_t inputs;
        __builtin_memcpy(&inputs, x, 4);
        return _mm512_set1_epi32(inputs);
    }
    static Ints dot(Ints sum, Ints weights, Ints inputs) { return _mm512_dpbusd_epi32(sum, weights, inputs); }
    static Floats zero() { return _mm512_setzero_ps(); }
    static Ints set(int32_t value) { return _mm512_set1_epi32(value); }
    static Floats splat(float value) { return _mm512_set1_ps(value); }
    static Floats load_float(const uint8_t* p) { return _mm512_loadu_ps(reinterpret_cast<const float*>(p)); }
    static Floats load_half(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
    static Floats load_bytes(const uint8_t* p) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    }
    static Floats convert(Ints value) { return _mm512_cvtepi32_ps(value); }
    static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static __mmask16 lanes(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
    static Floats load(const float* from, int64_t count) { return _mm512_maskz_loadu_ps(lanes(count), from); }
    static void store(float* out, Floats value, int64_t count) { _mm512_mask_storeu_ps(out, lanes(count), value); }
};

}  // namespace

const Variant kAvx512Vnni = {"avx512vnni", multiply<Avx512Vnni>, round_row<Avx512Vnni>, {attend_span, merge_spans}, attend_cells, gate, tanh_of, round_levels, FloatKernels<4>::multiply, &kDraftSteps};

}  // namespace edge
