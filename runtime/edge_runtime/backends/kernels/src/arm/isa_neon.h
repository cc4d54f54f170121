// Common code of the NEON variants, which have 4 outputs per register.
#pragma once
#include <arm_neon.h>

#include "per_isa/multiply.h"

namespace edge {
namespace {

// The weights of a group with 6 bits that begins at `line`: 16 inputs of four outputs. Each part has four inputs of each output.
struct SixBits {
    uint8x16_t part[4];
    explicit SixBits(const uint8_t* line) {
        const uint8x16_t low = vld1q_u8(line), next = vld1q_u8(line + kLine), high = vld1q_u8(line + 2 * kLine);
        const uint8x16_t mask = vdupq_n_u8(15), two = vdupq_n_u8(0x30);
        part[0] = vorrq_u8(vandq_u8(low, mask), vandq_u8(vshlq_n_u8(high, 4), two));
        part[1] = vorrq_u8(vshrq_n_u8(low, 4), vandq_u8(vshlq_n_u8(high, 2), two));
        part[2] = vorrq_u8(vandq_u8(next, mask), vandq_u8(high, two));
        part[3] = vorrq_u8(vshrq_n_u8(next, 4), vandq_u8(vshrq_n_u8(high, 2), two));
    }
};

// The same for the 32 inputs of a group with 5 bits.
struct FiveBits {
    uint8x16_t part[8];
    explicit FiveBits(const uint8_t* line) {
        const uint8x16_t mask = vdupq_n_u8(15), bit = vdupq_n_u8(16), fifths = vld1q_u8(line + 4 * kLine);
        for (int p = 0; p < 8; p++) {
            const uint8x16_t raw = vld1q_u8(line + p / 2 * kLine), low = p % 2 ? vshrq_n_u8(raw, 4) : vandq_u8(raw, mask);
            part[p] = vorrq_u8(low, vandq_u8(vshlq_u8(fifths, vdupq_n_s8(static_cast<int8_t>(4 - p))), bit));
        }
    }
};

struct NeonBase {
    static constexpr int width = 4;
    static constexpr bool kSigned8 = true, kByPart = false;
    using Ints = int32x4_t;
    using Floats = float32x4_t;
    // One or two rows are limited by memory, and the processor prefetches their single stream by itself.
    static constexpr bool fetches_ahead(int rows) { return rows > 2; }
    static constexpr bool kFetchesScales = false;
    static constexpr int64_t ahead() { return kAhead; }
    // There are 32 registers; a line takes 4 of them.
    static constexpr int rows(bool) { return kMaxRows; }
    static constexpr int vectors(int rows, bool) { return rows <= 3 ? 4 : rows <= 6 ? 2 : 1; }

    // The weights of a group for 4 outputs, as registers of bytes. Levels of up to 6 bits are unsigned, those of 8 bits are made signed.
    template <int kBits>
    struct Weights {
        int8x16_t part[Group<kBits>::parts];
        void load(const uint8_t* line) {
            const uint8x16_t raw = vld1q_u8(line);
            if constexpr (kBits == 6) {
                const SixBits six(line);
                for (int p = 0; p < 4; p++) part[p] = vreinterpretq_s8_u8(six.part[p]);
            } else if constexpr (kBits == 5) {
                const FiveBits five(line);
                for (int p = 0; p < 8; p++) part[p] = vreinterpretq_s8_u8(five.part[p]);
            } else if constexpr (kBits == 8) {
                part[0] = vreinterpretq_s8_u8(veorq_u8(raw, vdupq_n_u8(0x80)));
                part[1] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(line + kLine), vdupq_n_u8(0x80)));
            } else if constexpr (kBits == 4) {
                part[0] = vreinterpretq_s8_u8(vandq_u8(raw, vdupq_n_u8(15)));
                part[1] = vreinterpretq_s8_u8(vshrq_n_u8(raw, 4));
            } else {
                const uint8x16_t mask = vdupq_n_u8(3);
                part[0] = vreinterpretq_s8_u8(vandq_u8(raw, mask));
                part[1] = vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(raw, 2), mask));
                part[2] = vreinterpretq_s8_u8(vandq_u8(vshrq_n_u8(raw, 4), mask));
                part[3] = vreinterpretq_s8_u8(vshrq_n_u8(raw, 6));
            }
        }
    };
    static Floats zero() { return vdupq_n_f32(0); }
    static Ints set(int32_t value) { return vdupq_n_s32(value); }
    static Floats splat(float value) { return vdupq_n_f32(value); }
    static Floats load_float(const uint8_t* p) { return vld1q_f32(reinterpret_cast<const float*>(p)); }
    static Floats load_half(const uint8_t* p) { return vcvt_f32_f16(vld1_f16(reinterpret_cast<const __fp16*>(p))); }
    static Floats load_bytes(const uint8_t* p) {
        uint32_t four;
        __builtin_memcpy(&four, p, 4);
        return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four))))));
    }
    static Floats convert(Ints value) { return vcvtq_f32_s32(value); }
    static Floats mul(Floats a, Floats b) { return vmulq_f32(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
    static Floats load(const float* from, int64_t count) {
        if (count == 4) return vld1q_f32(from);
        float all[4] = {};
        for (int64_t i = 0; i < count; i++) all[i] = from[i];
        return vld1q_f32(all);
    }
    static void store(float* out, Floats value, int64_t count) {
        if (count == 4) return vst1q_f32(out, value);
        float all[4];
        vst1q_f32(all, value);
        for (int64_t i = 0; i < count; i++) out[i] = all[i];
    }
};

}  // namespace
}  // namespace edge
