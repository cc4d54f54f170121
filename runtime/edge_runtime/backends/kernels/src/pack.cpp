#include "pack.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "packed_file.h"

namespace edge {
namespace {

constexpr int64_t kMaxSize = int64_t{1} << 31;  // outputs or inputs
constexpr int64_t kMaxLevels = int64_t{1} << 40;

// Spreads nibbles 0 to 3 to one byte each.
uint32_t spread(uint32_t nibbles) {
    uint32_t pairs = (nibbles | nibbles << 8) & 0x00ff00ffu;
    return (pairs | pairs << 4) & 0x0f0f0f0fu;
}

uint32_t packed_dword(const uint8_t* row, int bits, int64_t line) {
    uint32_t raw;
    memcpy(&raw, row + line * 4, 4);
    if (bits == 8) return raw;
    if (bits == 4) return spread(raw & 0xffff) | spread(raw >> 16) << 4;
    uint32_t out = 0;
    for (int p = 0; p < 4; p++)
        for (int j = 0; j < 4; j++) out |= (raw >> (8 * p + 2 * j) & 3u) << (8 * j + 2 * p);
    return out;
}

// Whether all blocks of each output have the same scale.
bool has_row_scales(int64_t outputs, int64_t blocks, const float* scales) {
    for (int64_t i = 0; i < outputs * blocks; i++)
        if (scales[i] != scales[i - i % blocks]) return false;
    return true;
}

bool is_half(float value) {
    const _Float16 half = static_cast<_Float16>(value);
    return static_cast<float>(half) == value;
}

// The pieces of a matrix. Threads take them one by one, so that none waits for a thread whose processor is busy.
struct Pieces {
    int64_t tiles, next;
    void (*part)(void*, int64_t, int64_t);
    void* data;
};

constexpr int64_t kTilesOfPiece = 16;
constexpr int kMaxThreads = 4;  // more would only wait for memory
constexpr size_t kWorthThreads = size_t{1} << 20;

void* take_pieces(void* argument) {
    Pieces& pieces = *static_cast<Pieces*>(argument);
    for (;;) {
        const int64_t first = __atomic_fetch_add(&pieces.next, kTilesOfPiece, __ATOMIC_RELAXED), end = first + kTilesOfPiece;
        if (first >= pieces.tiles) return nullptr;
        pieces.part(pieces.data, first, end < pieces.tiles ? end : pieces.tiles);
    }
}

// The arguments of packing.
struct Packing {
    const PackedMatrix& matrix;
    int64_t stored_blocks;
    const uint8_t* levels;
    const float* scales;
    uint8_t* memory;
};

void pack_tiles(void* argument, int64_t first, int64_t last) {
    const auto& [m, stored_blocks, levels, scales, memory] = *static_cast<const Packing*>(argument);
    const int64_t blocks = m.blocks(), row_bytes = m.inputs * m.bits / 8, lines = row_bytes / 4;
    uint8_t* packed_scales = memory + m.level_bytes();
    for (int64_t tile = first; tile < last; tile++) {
        uint8_t* to = memory + tile * m.tile_bytes();
        for (int64_t n = 0; n < kTile; n++) {
            const int64_t output = tile * kTile + n;
            const uint8_t* row = levels + output * row_bytes;
            for (int64_t line = 0; line < lines; line++) {
                const uint32_t dword = output < m.outputs ? packed_dword(row, m.bits, line) : 0;
                memcpy(to + line * kLine + n * 4, &dword, 4);
            }
            for (int64_t b = 0; b < blocks; b++) {
                const float scale = output < m.outputs ? scales[output * stored_blocks + b] : 0.0f;
                const int64_t at = (tile * blocks + b) * kTile + n;
                if (m.half_scales) reinterpret_cast<_Float16*>(packed_scales)[at] = static_cast<_Float16>(scale);
                else reinterpret_cast<float*>(packed_scales)[at] = scale;
            }
        }
    }
}

}  // namespace

void for_all_tiles(int64_t tiles, size_t bytes, void (*part)(void*, int64_t, int64_t), void* data) {
    Pieces pieces = {tiles, 0, part, data};
    pthread_t threads[kMaxThreads];
    const long processors = bytes < kWorthThreads ? 1 : sysconf(_SC_NPROCESSORS_ONLN);
    int others = 0;
    while (others + 1 < processors && others + 1 < kMaxThreads && pthread_create(&threads[others], nullptr, take_pieces, &pieces) == 0) others++;
    take_pieces(&pieces);
    while (others) pthread_join(threads[--others], nullptr);
}

bool fits(int64_t outputs, int64_t inputs, int64_t bits, int64_t block) {
    return (bits == 2 || bits == 4 || bits == 8) && (block == 16 || block == 32 || block == 64 || block == 128) && outputs > 0 &&
           outputs < kMaxSize && inputs > 0 && inputs < kMaxSize && inputs % block == 0 && outputs <= kMaxLevels / inputs;
}

void* memory_for_weights(size_t size) {
    void* memory = nullptr;
    if (posix_memalign(&memory, size < kLargePage ? kLine : kLargePage, size)) return nullptr;
#if defined(__linux__)
    if (size >= kLargePage) madvise(memory, size / kLargePage * kLargePage, MADV_HUGEPAGE);
#endif
    return memory;
}

namespace {

// With a file in pages that can be added to it.
bool pack_in(PackedMatrix& m, int64_t outputs, int64_t inputs, int bits, int block, const uint8_t* levels, const float* scales, float static_scale, const PackedFile* file) {
    if (!fits(outputs, inputs, bits, block)) return false;
    m = {outputs, inputs, bits, block, true, nullptr, nullptr};
    const int64_t stored_blocks = m.blocks(), count = outputs * stored_blocks;
    if (static_scale > 0) {
        if (inputs > kMaxStaticInputs || !has_row_scales(outputs, stored_blocks, scales)) return false;
        m.block = static_cast<int>(inputs), m.static_scale = static_scale;
    }
    for (int64_t i = 0; i < count && m.half_scales; i++) m.half_scales = is_half(scales[i]);
    const size_t level_bytes = m.level_bytes();
    m.mapped = file != nullptr;
    uint8_t* memory = static_cast<uint8_t*>(file ? file->pages(m.bytes()) : memory_for_weights(m.bytes()));
    if (!memory) return false;
    Packing packing = {m, stored_blocks, levels, scales, memory};
    for_all_tiles(m.tiles(), m.bytes(), pack_tiles, &packing);
    m.levels = memory;
    m.scales = memory + level_bytes;
    return true;
}

}  // namespace

bool pack(PackedMatrix& m, int64_t outputs, int64_t inputs, int bits, int block, const uint8_t* levels, const float* scales, float static_scale) {
    return pack_in(m, outputs, inputs, bits, block, levels, scales, static_scale, nullptr);
}

bool pack_named(const char* name, PackedMatrix& m, int64_t outputs, int64_t inputs, int bits, int block, const uint8_t* levels, const float* scales, float static_scale) {
    if (!fits(outputs, inputs, bits, block)) return false;
    PackedFile* file = packed_file();
    m = {outputs, inputs, bits, static_scale > 0 ? static_cast<int>(inputs) : block, true, nullptr, nullptr, false, static_scale};
    if (file && file->take(name, m)) return true;
    if (file && file->reads()) file = nullptr;
    if (!pack_in(m, outputs, inputs, bits, block, levels, scales, static_scale, file)) return false;
    if (file) file->add(name, m);
    return true;
}

void release(PackedMatrix& m) {
    if (m.mapped) return unmap(m);
    free(const_cast<uint8_t*>(m.levels));
    m.levels = nullptr;
}

}  // namespace edge
