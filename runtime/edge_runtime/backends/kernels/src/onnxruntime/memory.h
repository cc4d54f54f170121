// Work memory of a call.
#pragma once
#include <stddef.h>
#include <stdlib.h>

#include "layout.h"

namespace edge {
namespace {

// Memory of earlier calls, which later calls of any thread use again; threads may end, so they keep none themselves. At most kPlaces blocks of at most
// kMaxKeptBytes are kept; other memory is freed after use.
constexpr int kPlaces = 8;
constexpr size_t kMaxKeptBytes = size_t{5} << 19;
size_t* kept[kPlaces];  // each block begins with its size, in a cache line of its own

// Returns `bytes` bytes that begin at a cache line, or null.
char* scratch(size_t bytes) {
    size_t* block = nullptr;
    for (int i = 0; i < kPlaces && !block; i++) block = __atomic_exchange_n(&kept[i], nullptr, __ATOMIC_ACQUIRE);
    if (block && *block < bytes) {
        free(block);
        block = nullptr;
    }
    if (!block) {
        if (bytes > SIZE_MAX - 2 * kLine) return nullptr;
        const size_t size = (bytes + kLine - 1) / kLine * kLine;
        block = static_cast<size_t*>(aligned_alloc(kLine, kLine + size));
        if (!block) return nullptr;
        *block = size;
    }
    return reinterpret_cast<char*>(block) + kLine;
}

void give_back_scratch(char* memory) {
    size_t* block = reinterpret_cast<size_t*>(memory - kLine);
    for (int i = 0; i < kPlaces && *block <= kMaxKeptBytes; i++) {
        size_t* empty = nullptr;
        if (__atomic_compare_exchange_n(&kept[i], &empty, block, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) return;
    }
    free(block);
}

}  // namespace
}  // namespace edge
