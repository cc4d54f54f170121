// Work memory of a call, on the thread that makes it.
#pragma once
#include <stdlib.h>

namespace edge {
namespace {

struct Scratch {
    char* memory;
    size_t size;
};
// Used again by the thread's next call; it stays until the process ends. More than that is given back after use.
thread_local Scratch kept = {nullptr, 0};
constexpr size_t kMostKept = size_t{1} << 20;

char* scratch(size_t wanted) {
    if (wanted > kMostKept) return static_cast<char*>(malloc(wanted));
    if (wanted > kept.size) {
        free(kept.memory);
        kept.memory = static_cast<char*>(malloc(wanted));
        kept.size = kept.memory ? wanted : 0;
    }
    return kept.memory;
}

void give_back_scratch(char* memory) {
    if (memory != kept.memory) free(memory);
}

}  // namespace
}  // namespace edge
