// What the NEON variants share: 4 outputs to a register.
#pragma once
#include <arm_neon.h>

#include "per_isa/multiply.h"

namespace edge {
namespace {

struct NeonBase {
    static constexpr int width = 4, kRows = 12, kManyRows = 8;
    static constexpr bool kSigned8 = true;
    using Ints = int32x4_t;
    using Floats = float32x4_t;
    // 32 registers; a line is 4 of them wide.
    static constexpr int vectors(int rows) { return rows <= 3 ? 4 : rows <= 6 ? 2 : 1; }

    static Floats zero() { return vdupq_n_f32(0); }
    static Ints set(int32_t value) { return vdupq_n_s32(value); }
    static Floats splat(float value) { return vdupq_n_f32(value); }
    static Floats load_float(const uint8_t* p) { return vld1q_f32(reinterpret_cast<const float*>(p)); }
    static Floats load_half(const uint8_t* p) { return vcvt_f32_f16(vld1_f16(reinterpret_cast<const __fp16*>(p))); }
    static Floats convert(Ints value) { return vcvtq_f32_s32(value); }
    static Floats mul(Floats a, Floats b) { return vmulq_f32(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
    static void store(float* out, Floats value, int64_t count) {
        if (count == 4) return vst1q_f32(out, value);
        float all[4];
        vst1q_f32(all, value);
        for (int64_t i = 0; i < count; i++) out[i] = all[i];
    }
};

}  // namespace
}  // namespace edge
