// Work memory of a call.
#pragma once
#include <stddef.h>
#include <stdlib.h>

#include "layout.h"

namespace edge {
namespace {

// What calls used before, for the next ones of any thread: threads come and go, so none of them keeps memory. Beyond these places and
// this size memory is given back after use.
constexpr int kPlaces = 8;
constexpr size_t kMaxKeptBytes = size_t{5} << 19;
size_t* kept[kPlaces];  // blocks that begin with their size, in a line of its own

// `bytes` bytes from the beginning of a line on, or null.
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
