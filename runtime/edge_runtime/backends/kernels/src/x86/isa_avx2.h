// Common code of the 256-bit variants, which have 8 outputs per register. They differ in how four products are added up.
#pragma once
#include <immintrin.h>

#include "per_isa/multiply.h"

namespace edge {
namespace {

struct Avx2Base {
    static constexpr int width = 8;
    static constexpr bool kSigned8 = false;
    using Ints = __m256i;
    using Floats = __m256;
    static constexpr bool fetches_ahead(int) { return true; }
    static constexpr bool kFetchesScales = false;
    static constexpr int64_t ahead() { return kAhead; }
    // The 16 registers hold the sums and results of a few rows. With sums in 16 bits there is no room for results, which stay in the first level cache.
    static constexpr int rows(bool adds_short) { return adds_short ? 8 : 6; }
    static constexpr int vectors(int rows, bool adds_short) { return rows <= 1 ? 4 : rows <= (adds_short ? 5 : 2) ? 2 : 1; }

    template <int kBits>
    struct Weights {
        Ints part[Group<kBits>::parts];
        void load(const uint8_t* line) {
            const Ints raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line));
            const Ints mask = _mm256_set1_epi8(static_cast<char>(kBits == 6 ? 15 : (1 << kBits) - 1));
            if constexpr (kBits == 8) part[0] = raw, part[1] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + kLine));
            else if constexpr (kBits == 6) load_six(line, raw, mask);
            else if constexpr (kBits == 5) load_five(line);
            else
                for (int p = 0; p < 8 / kBits; p++) part[p] = _mm256_and_si256(_mm256_srli_epi16(raw, p * kBits), mask);
        }
        void load_five(const uint8_t* line) {
            const Ints fifths = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + 4 * kLine)), low = _mm256_set1_epi8(15), bit = _mm256_set1_epi8(16);
            for (int p = 0; p < Group<kBits>::parts; p++) {
                const Ints raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + p / 2 * kLine));
                const Ints fifth = p < 4 ? _mm256_slli_epi16(fifths, 4 - p) : _mm256_srli_epi16(fifths, p - 4);
                part[p] = _mm256_and_si256(_mm256_srli_epi16(raw, p % 2 * 4), low) | _mm256_and_si256(fifth, bit);
            }
        }
        void load_six(const uint8_t* line, Ints low, Ints mask) {
            const Ints next = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + kLine)), two = _mm256_set1_epi8(0x30);
            const Ints high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + 2 * kLine));
            part[0] = _mm256_and_si256(low, mask) | _mm256_and_si256(_mm256_slli_epi16(high, 4), two);
            part[1] = _mm256_and_si256(_mm256_srli_epi16(low, 4), mask) | _mm256_and_si256(_mm256_slli_epi16(high, 2), two);
            part[2] = _mm256_and_si256(next, mask) | _mm256_and_si256(high, two);
            part[3] = _mm256_and_si256(_mm256_srli_epi16(next, 4), mask) | _mm256_and_si256(_mm256_srli_epi16(high, 2), two);
        }
    };
    static Ints four(const int8_t* x) {
        int32_t inputs;
        __builtin_memcpy(&inputs, x, 4);
        return _mm256_set1_epi32(inputs);
    }
    static Floats zero() { return _mm256_setzero_ps(); }
    static Ints set(int32_t value) { return _mm256_set1_epi32(value); }
    static Floats splat(float value) { return _mm256_set1_ps(value); }
    static Floats load_float(const uint8_t* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
    static Floats load_half(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
    static Floats load_bytes(const uint8_t* p) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
    }
    static Floats convert(Ints value) { return _mm256_cvtepi32_ps(value); }
    static Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static Floats load(const float* from, int64_t count) {
        if (count == 8) return _mm256_loadu_ps(from);
        float all[8] = {};
        for (int64_t i = 0; i < count; i++) all[i] = from[i];
        return _mm256_loadu_ps(all);
    }
    static void store(float* out, Floats value, int64_t count) {
        if (count == 8) return _mm256_storeu_ps(out, value);
        float all[8];
        _mm256_storeu_ps(all, value);
        for (int64_t i = 0; i < count; i++) out[i] = all[i];
    }
};

}  // namespace
}  // namespace edge
