#include "weights.h"

#include <string.h>

#include "pack.h"

namespace edge::ggml {
namespace {

// One block of 32 inputs of one output.
struct Q4 {
    _Float16 scale;
    uint8_t levels[16];  // input j in the low half of byte j, input j + 16 in its high half
};
struct Q4Minimum {
    _Float16 scale, minimum;
    uint8_t levels[16];
};
struct Q5 {
    _Float16 scale;
    uint8_t fifths[4];  // bit j is that of input j
    uint8_t levels[16];
};
struct Q5Minimum {
    _Float16 scale, minimum;
    uint8_t fifths[4], levels[16];
};
struct Q8 {
    _Float16 scale;
    int8_t levels[32];
};
// 256 inputs, scales and minimums of 6 bits for each 32.
struct Q4K {
    _Float16 factors[2];
    uint8_t scales[12];
    uint8_t levels[128];  // of each 64 inputs, input j in the low half of byte j, input j + 32 in its high half
};
struct Q5K {
    _Float16 factors[2];
    uint8_t scales[12];
    uint8_t fifths[32];  // bit i of byte j is that of input 32i + j
    uint8_t levels[128];
};
// 256 inputs in two halves: 4 bits, 2 bits, and a scale of 8 bits for each 16.
struct Q6K {
    uint8_t low[128], high[64];
    int8_t scales[16];
    _Float16 scale;
};
static_assert(sizeof(Q4) == 18 && sizeof(Q4Minimum) == 20 && sizeof(Q5) == 22 && sizeof(Q5Minimum) == 24 && sizeof(Q8) == 34);
static_assert(sizeof(Q4K) == 144 && sizeof(Q5K) == 176 && sizeof(Q6K) == 210);

// How the kernels take a type.
struct Format {
    int bits, block;
    size_t bytes;  // of a block in a file
    bool minimums = false;  // one in each block
};

Format format_of(int type) {
    switch (type) {
        case kQ4_0: return {4, 32, sizeof(Q4)};
        case kQ4_1: return {4, 32, sizeof(Q4Minimum), true};
        case kQ5_0: return {5, 32, sizeof(Q5)};
        case kQ5_1: return {5, 32, sizeof(Q5Minimum), true};
        case kQ8_0: return {8, 32, sizeof(Q8)};
        case kQ4_K: return {4, kSuper, sizeof(Q4K)};
        case kQ5_K: return {5, kSuper, sizeof(Q5K)};
        case kQ6_K: return {6, kSuper, sizeof(Q6K)};
    }
    return {};
}

// Where a block of one output goes: its dword of the first line, the scales of the tile's block, and its number among the tile's outputs.
struct Target {
    uint8_t *levels, *scales;
    int64_t output;
};

void put(uint8_t* to, uint32_t dword) { memcpy(to, &dword, 4); }

uint32_t dword_at(const void* from) {
    uint32_t value;
    memcpy(&value, from, 4);
    return value;
}

void put_scale(_Float16 scale, uint8_t* of_tile, Target to) { memcpy(of_tile + 2 * to.output, &scale, 2); }

// Four lines: the low 4 bits of 32 inputs.
void put_nibbles(const uint8_t (&levels)[16], uint8_t* lines) {
    uint32_t raw[4];
    memcpy(raw, levels, 16);
    constexpr uint32_t low = 0x0f0f0f0f, high = 0xf0f0f0f0;
    put(lines, (raw[0] & low) | (raw[1] & low) << 4);
    put(lines + kLine, (raw[2] & low) | (raw[3] & low) << 4);
    put(lines + 2 * kLine, (raw[0] >> 4 & low) | (raw[1] & high));
    put(lines + 3 * kLine, (raw[2] >> 4 & low) | (raw[3] & high));
}

// The line behind them.
void put_fifths(const uint8_t (&fifths)[4], uint8_t* lines) {
    const uint32_t raw = dword_at(fifths);
    uint32_t bits = 0;
    for (int p = 0; p < 8; p++) bits |= ((raw >> 4 * p & 15) * 0x00204081u & 0x01010101u) << p;  // four bits, one to a byte
    put(lines + 4 * kLine, bits);
}

void pack_block(const Q4& from, Target to) {
    put_nibbles(from.levels, to.levels);
    put_scale(from.scale, to.scales, to);
}

void pack_block(const Q4Minimum& from, Target to) {
    put_nibbles(from.levels, to.levels);
    put_scale(from.scale, to.scales, to);
    put_scale(from.minimum, to.scales + 2 * kTile, to);
}

void pack_block(const Q5& from, Target to) {
    put_nibbles(from.levels, to.levels);
    put_fifths(from.fifths, to.levels);
    put_scale(from.scale, to.scales, to);
}

void pack_block(const Q5Minimum& from, Target to) {
    put_nibbles(from.levels, to.levels);
    put_fifths(from.fifths, to.levels);
    put_scale(from.scale, to.scales, to);
    put_scale(from.minimum, to.scales + 2 * kTile, to);
}

void pack_block(const Q8& from, Target to) {
    for (int i = 0; i < 8; i++) put(to.levels + i * kLine, dword_at(from.levels + 4 * i) ^ 0x80808080u);
    put_scale(from.scale, to.scales, to);
}

// Four of the lines of each 32 inputs, which are `lines_of_part` lines.
void put_nibbles(const uint8_t (&levels)[128], uint8_t* lines, int64_t lines_of_part) {
    for (int i = 0; i < 32; i++) {
        const int part = i / 4, at = part / 2 * 32 + i % 4 * 8, shift = part % 2 * 4;
        constexpr uint32_t low = 0x0f0f0f0f;
        put(lines + (part * lines_of_part + i % 4) * kLine, (dword_at(levels + at) >> shift & low) | (dword_at(levels + at + 4) >> shift & low) << 4);
    }
}

void put_scales(const uint8_t (&q)[12], const _Float16 (&factors)[2], Target to) {
    for (int i = 0; i < kSums; i++) {
        to.scales[i * kTile + to.output] = i < 4 ? q[i] & 63 : (q[i + 4] & 15) | q[i - 4] >> 6 << 4;
        to.scales[kMinimums + i * kTile + to.output] = i < 4 ? q[i + 4] & 63 : q[i + 4] >> 4 | q[i] >> 6 << 4;
    }
    put_scale(factors[0], to.scales + kFactors, to);
    put_scale(factors[1], to.scales + kFactors + 2 * kTile, to);
}

void pack_block(const Q4K& from, Target to) {
    put_nibbles(from.levels, to.levels, 4);
    put_scales(from.scales, from.factors, to);
}

void pack_block(const Q5K& from, Target to) {
    put_nibbles(from.levels, to.levels, 5);
    for (int part = 0; part < kSums; part++) {
        uint32_t bits = 0;
        for (int p = 0; p < 8; p++) bits |= (dword_at(from.fifths + 4 * p) >> part & 0x01010101u) << p;
        put(to.levels + (5 * part + 4) * kLine, bits);
    }
    put_scales(from.scales, from.factors, to);
}

void pack_block(const Q6K& from, Target to) {
    for (int g = 0; g < 16; g++) {  // 16 inputs each
        uint32_t fours[4], twos = 0;
        for (int p = 0; p < 4; p++) {
            const int i = 4 * g + p, half = i / 32, quarter = i / 8 % 4, at = i % 8 * 4;
            fours[p] = dword_at(from.low + half * 64 + quarter % 2 * 32 + at) >> quarter / 2 * 4 & 0x0f0f0f0fu;
            twos |= (dword_at(from.high + half * 32 + at) >> 2 * quarter & 0x03030303u) << 2 * p;
        }
        uint8_t* lines = to.levels + 3 * g * kLine;
        put(lines, fours[0] | fours[1] << 4);
        put(lines + kLine, fours[2] | fours[3] << 4);
        put(lines + 2 * kLine, twos);
    }
    for (int i = 0; i < kStarts; i++) to.scales[i * kTile + to.output] = static_cast<uint8_t>(from.scales[i]);
    put_scale(from.scale, to.scales + kFactors, to);
}

struct Source {
    const PackedMatrix& matrix;
    const void* data;
};

template <class Block>
void pack_tiles(void* argument, int64_t first, int64_t last) {
    const auto& [m, data] = *static_cast<const Source*>(argument);
    const int64_t blocks = m.blocks(), block_bytes = m.tile_bytes() / blocks, scale_bytes = m.scale_bytes();
    uint8_t *levels = const_cast<uint8_t*>(m.levels), *scales = static_cast<uint8_t*>(const_cast<void*>(m.scales));
    for (int64_t tile = first; tile < last; tile++)
        for (int64_t n = 0; n < kTile; n++) {
            const int64_t output = tile * kTile + n;
            if (output >= m.outputs) break;
            const Block* from = static_cast<const Block*>(data) + output * blocks;
            for (int64_t b = 0, at = tile * blocks; b < blocks; b++, at++)
                pack_block(from[b], {levels + at * block_bytes + n * 4, scales + at * scale_bytes, n});
        }
}

template <class Block>
void pack_all(const PackedMatrix& m, const void* data) {
    Source source = {m, data};
    for_all_tiles(m.tiles(), m.bytes(), pack_tiles<Block>, &source);
}

}  // namespace

bool packs(const Tensor& w) {
    if (w.ne[2] != 1 || w.ne[3] != 1 || w.view_src) return false;
    const Format format = format_of(w.type);
    return format.block && fits(w.ne[1], w.ne[0], 8, 32) && w.ne[0] % format.block == 0 &&
           w.nb[1] == static_cast<size_t>(w.ne[0] / format.block) * format.bytes;
}

PackedMatrix packed_matrix(const Tensor& w) {
    const Format format = format_of(w.type);
    PackedMatrix m = {w.ne[1], w.ne[0], format.bits, format.block, true, static_cast<const uint8_t*>(w.data), nullptr, format.minimums};
    m.scales = m.levels + m.level_bytes();
    return m;
}

size_t packed_bytes(const Tensor& w) {
    return packed_matrix(w).bytes();
}

void pack_weights(const Tensor& w, const void* data, void* memory) {
    Tensor at = w;
    at.data = memory;
    const PackedMatrix m = packed_matrix(at);
    if (m.outputs != m.tiles() * kTile) memset(memory, 0, m.bytes());
    switch (w.type) {
        case kQ4_0: return pack_all<Q4>(m, data);
        case kQ4_1: return pack_all<Q4Minimum>(m, data);
        case kQ5_0: return pack_all<Q5>(m, data);
        case kQ5_1: return pack_all<Q5Minimum>(m, data);
        case kQ8_0: return pack_all<Q8>(m, data);
        case kQ4_K: return pack_all<Q4K>(m, data);
        case kQ5_K: return pack_all<Q5K>(m, data);
        case kQ6_K: return pack_all<Q6K>(m, data);
    }
}

}  // namespace edge::ggml
