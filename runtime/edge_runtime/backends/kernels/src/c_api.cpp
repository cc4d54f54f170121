// A plain C interface: what Python asks, and the tests.
#include <stdlib.h>
#include <string.h>

#include "pack.h"
#include "variants.h"

#define EDGE_EXPORT extern "C" __attribute__((visibility("default")))

using namespace edge;

// The names of the variants that this processor can run, best first, with a space after each.
EDGE_EXPORT void edge_rows_variants(char* names, size_t size) {
    size_t at = 0;
    for (const Variant* const* variant = usable_variants(); *variant && at + strlen((*variant)->name) + 2 <= size; variant++) {
        const size_t length = strlen((*variant)->name);
        memcpy(names + at, (*variant)->name, length);
        names[at + length] = ' ';
        at += length + 1;
    }
    if (size) names[at] = 0;
}

// The chosen variant's name, or null.
EDGE_EXPORT const char* edge_rows_chosen() { return chosen_variant() ? chosen_variant()->name : nullptr; }

// out [rows, outputs] = values [rows, inputs] times the transposed matrix, by the variant of this name, in one thread. `levels` and `scales`
// are as MatMulNBits stores them. Returns 0, or 1 for a name or a shape that cannot be, or without memory.
EDGE_EXPORT int edge_rows_multiply(const char* name, int64_t outputs, int64_t inputs, int bits, int block, const uint8_t* levels, const float* scales,
                                   const float* values, int64_t rows, float* out) {
    const Variant* const* variant = usable_variants();
    while (*variant && strcmp((*variant)->name, name) != 0) variant++;
    PackedMatrix matrix;
    if (!*variant || rows < 1 || !pack(matrix, outputs, inputs, bits, block, levels, scales)) return 1;
    const size_t entries = static_cast<size_t>(rows * matrix.blocks());
    int8_t* rounded = static_cast<int8_t*>(malloc(static_cast<size_t>(rows * inputs)));
    float* factors = static_cast<float*>(malloc(entries * sizeof(float)));
    int32_t* sums = static_cast<int32_t*>(malloc(entries * sizeof(int32_t)));
    const bool there = rounded && factors && sums;
    for (int64_t row = 0; there && row < rows; row++) (*variant)->round(values + row * inputs, inputs, block, row, rows, rounded, factors, sums);
    if (there) (*variant)->multiply(matrix, {rounded, factors, sums, rows}, 0, matrix.tiles(), out);
    free(rounded);
    free(factors);
    free(sums);
    release(matrix);
    return there ? 0 : 1;
}
