#include "weights.h"

#include <string.h>

#include "pack.h"

namespace edge::ggml {
namespace {

constexpr int64_t kSuper = 256;  // inputs of a block of q6_K

// One block of 32 inputs of one output.
struct Q4 {
    _Float16 scale;
    uint8_t levels[16];  // input j in the low half of byte j, input j + 16 in its high half
};
struct Q8 {
    _Float16 scale;
    int8_t levels[32];
};
// 256 inputs in two halves: 4 bits, 2 bits, and a scale of 8 bits for each 16.
struct Q6 {
    uint8_t low[128], high[64];
    int8_t scales[16];
    _Float16 scale;
};
static_assert(sizeof(Q4) == 18 && sizeof(Q8) == 34 && sizeof(Q6) == 210);

struct Target {
    uint8_t* levels;
    uint8_t* scales;
};

void put(uint8_t* to, uint32_t dword) { memcpy(to, &dword, 4); }

uint32_t dword_at(const void* from) {
    uint32_t value;
    memcpy(&value, from, 4);
    return value;
}

void pack_block(const Q4& from, Target to) {
    uint32_t raw[4];
    memcpy(raw, from.levels, 16);
    constexpr uint32_t low = 0x0f0f0f0f, high = 0xf0f0f0f0;
    put(to.levels, (raw[0] & low) | (raw[1] & low) << 4);
    put(to.levels + kLine, (raw[2] & low) | (raw[3] & low) << 4);
    put(to.levels + 2 * kLine, (raw[0] >> 4 & low) | (raw[1] & high));
    put(to.levels + 3 * kLine, (raw[2] >> 4 & low) | (raw[3] & high));
    memcpy(to.scales, &from.scale, 2);
}

void pack_block(const Q8& from, Target to) {
    for (int i = 0; i < 8; i++) put(to.levels + i * kLine, dword_at(from.levels + 4 * i) ^ 0x80808080u);
    memcpy(to.scales, &from.scale, 2);
}

void pack_block(const Q6& from, Target to) {
    const float scale = static_cast<float>(from.scale);
    for (int i = 0; i < 64; i++) {  // four inputs each
        const int half = i / 32, quarter = i / 8 % 4, at = i % 8 * 4;
        const uint32_t low = dword_at(from.low + half * 64 + quarter % 2 * 32 + at) >> quarter / 2 * 4 & 0x0f0f0f0fu;
        const uint32_t high = dword_at(from.high + half * 32 + at) >> 2 * quarter & 0x03030303u;
        put(to.levels + i * kLine, (low | high << 4) + 0x60606060u);  // zero from 32 to 128
    }
    for (int i = 0; i < 16; i++) {
        const float product = scale * from.scales[i];
        memcpy(to.scales + i * kTile * 4, &product, 4);
    }
}

template <class Block>
void pack_all(const PackedMatrix& m, int64_t inputs, const void* data, int64_t per_block, int64_t scales_per_block, int scale_bytes) {
    const int64_t blocks = m.inputs / inputs;
    uint8_t *levels = const_cast<uint8_t*>(m.levels), *scales = static_cast<uint8_t*>(const_cast<void*>(m.scales));
    for (int64_t tile = 0; tile < m.tiles(); tile++)
        for (int64_t n = 0; n < kTile; n++) {
            const int64_t output = tile * kTile + n;
            if (output >= m.outputs) break;
            const Block* from = static_cast<const Block*>(data) + output * blocks;
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t at = tile * blocks + b;
                pack_block(from[b], {levels + at * per_block + n * 4, scales + (at * scales_per_block * kTile + n) * scale_bytes});
            }
        }
}

}  // namespace

bool packs(const Tensor& w) {
    if (w.ne[2] != 1 || w.ne[3] != 1 || w.view_src) return false;
    switch (w.type) {
        case kQ4_0: return fits(w.ne[1], w.ne[0], 4, 32) && w.nb[1] == static_cast<size_t>(w.ne[0]) / 32 * sizeof(Q4);
        case kQ8_0: return fits(w.ne[1], w.ne[0], 8, 32) && w.nb[1] == static_cast<size_t>(w.ne[0]) / 32 * sizeof(Q8);
        case kQ6_K: return fits(w.ne[1], w.ne[0], 8, 16) && w.ne[0] % kSuper == 0 && w.nb[1] == static_cast<size_t>(w.ne[0]) / kSuper * sizeof(Q6);
        case kBf16: return fits(w.ne[1], w.ne[0], 8, 16) && w.nb[1] == static_cast<size_t>(w.ne[0]) * 2;
    }
    return false;
}

PackedMatrix packed_matrix(const Tensor& w) {
    const bool q6 = w.type == kQ6_K;
    PackedMatrix m = {w.ne[1], w.ne[0], w.type == kQ4_0 ? 4 : 8, q6 ? 16 : 32, !q6, static_cast<const uint8_t*>(w.data), nullptr};
    m.scales = m.levels + m.tiles() * m.tile_bytes();
    return m;
}

size_t packed_bytes(const Tensor& w) {
    if (w.type == kBf16) return static_cast<size_t>(w.ne[0] * w.ne[1]) * 2;
    const PackedMatrix m = packed_matrix(w);
    return static_cast<size_t>(m.tiles() * (m.tile_bytes() + m.blocks() * kTile * m.scale_bytes()));
}

void pack_weights(const Tensor& w, const void* data, void* memory) {
    if (w.type == kBf16) return static_cast<void>(memcpy(memory, data, packed_bytes(w)));
    Tensor at = w;
    at.data = memory;
    const PackedMatrix m = packed_matrix(at);
    if (m.outputs != m.tiles() * kTile) memset(memory, 0, packed_bytes(w));
    switch (w.type) {
        case kQ4_0: return pack_all<Q4>(m, 32, data, 4 * kLine, 1, 2);
        case kQ8_0: return pack_all<Q8>(m, 32, data, 8 * kLine, 1, 2);
        case kQ6_K: return pack_all<Q6>(m, kSuper, data, 64 * kLine, 16, 4);
    }
}

}  // namespace edge::ggml
