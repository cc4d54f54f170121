// The C interface of the library, for Python and the tests.
#include <stdlib.h>
#include <string.h>

#include "cells.h"
#include "draft/steps.h"
#include "export.h"
#include "ggml/weights.h"
#include "pack.h"
#include "static_rows.h"
#include "variants.h"

using namespace edge;

// Writes the names of the variants that this processor can run, best first, with a space after each.
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

static const Variant* variant_by_name(const char* name) {
    const Variant* const* variant = usable_variants();
    while (*variant && strcmp((*variant)->name, name) != 0) variant++;
    return *variant;
}

// Computes attention with the variant of this name, in one thread, `at_once` queries at a time: out [fresh x heads, dim]. Arrays are as in
// Attention. Returns 0, or 1 for an unknown name, an invalid shape, or without enough memory.
EDGE_EXPORT int edge_rows_attend(const char* name, const float* queries, const float* past_keys, const float* past_values, const float* new_keys,
                                 const float* new_values, int64_t past, int64_t fresh, int64_t heads, int64_t dim, int64_t origin, int64_t window, int64_t at_once,
                                 float* out) {
    const Variant* variant = variant_by_name(name);
    if (!variant || past < 0 || fresh < 1 || heads < 1 || dim < 1 || origin < 0 || window < 0 || at_once < 1 || at_once > kMaxQueries) return 1;
    const Attention a = {queries, past_keys, past_values, new_keys, new_values, past, fresh, heads, dim, origin, window, 0};
    float* states = static_cast<float*>(malloc(static_cast<size_t>(2 * kMaxQueries * a.state()) * sizeof(float)));
    if (!states) return 1;
    float* next = states + kMaxQueries * a.state();
    for (int64_t query = 0; query < fresh * heads; query += at_once) {
        const int64_t count = fresh * heads - query < at_once ? fresh * heads - query : at_once;
        variant->attend.all_spans(a, query, count, states, next);
        for (int64_t r = 0; r < count; r++) a.result(states + r * a.state(), out + (query + r) * dim);
    }
    free(states);
    return 0;
}

// Computes attention over cells with the variant of this name, in one thread, `at_once` queries at a time: out [rows x heads, value_dim]. Keys and
// values are [cells] rows of `type`: 0 float16, 1 blocks of 8 bits, 2 blocks of 4 bits. mask [rows, cells] is float16. Scores are not scaled.
// Returns 0, or 1 for an unknown name, an invalid shape, or without enough memory.
EDGE_EXPORT int edge_rows_attend_cells(const char* name, const float* queries, const char* keys, const char* values, const uint16_t* mask, int64_t type,
                                       int64_t cells, int64_t rows, int64_t heads, int64_t key_dim, int64_t value_dim, int64_t at_once, float* out) {
    const Variant* variant = variant_by_name(name);
    const auto fits = [](int64_t size) { return size >= 1 && size <= int64_t{1} << 31; };
    if (!variant || type < 0 || type > 2 || !fits(cells) || !fits(rows) || !fits(heads) || at_once < 1 || at_once > kMaxQueries) return 1;
    const CellType kind = static_cast<CellType>(type);
    const int64_t block = values_of_block(kind);
    if (!fits(key_dim) || !fits(value_dim) || key_dim % block || value_dim % block) return 1;
    void* memory = aligned_alloc(kLine, CellMemory(cells, key_dim, value_dim, at_once, nullptr).size(1));
    if (!memory) return 1;
    const CellMemory parts(cells, key_dim, value_dim, at_once, memory);
    const auto row_bytes = [&](int64_t dim) { return static_cast<size_t>(dim / block) * bytes_of_block(kind); };
    CellAttention a = {{kind, keys, row_bytes(key_dim), key_dim}, {kind, values, row_bytes(value_dim), value_dim}, cells, 1, 0, {}, {}, {}};
    for (int64_t query = 0; query < rows * heads; query++) {
        a.query[a.queries] = queries + query * key_dim;
        a.mask[a.queries] = mask + query / heads * cells;
        a.out[a.queries++] = out + query * value_dim;
        if (a.queries < at_once && query + 1 < rows * heads) continue;
        variant->attend_cells(a, parts, {0, 1, nullptr, nullptr});
        a.queries = 0;
    }
    free(memory);
    return 0;
}

// out [count] = gelu(gates) * values, with the variant of this name. Returns 0, or 1 for an unknown name or an invalid count.
EDGE_EXPORT int edge_rows_gate(const char* name, const float* gates, const float* values, int64_t count, float* out) {
    const Variant* variant = variant_by_name(name);
    if (!variant || count < 1) return 1;
    variant->gate(gates, values, out, count);
    return 0;
}

// out [count] = tanh(values), the same way.
EDGE_EXPORT int edge_rows_tanh(const char* name, const float* values, int64_t count, float* out) {
    const Variant* variant = variant_by_name(name);
    if (!variant || count < 1) return 1;
    variant->tanh(values, out, count);
    return 0;
}

// out [count] = values / sqrt(mean(values^2) + epsilon[0]) * weight, the same way.
EDGE_EXPORT int edge_rows_norm(const char* name, const float* values, const float* weight, const float* epsilon, int64_t count, float* out) {
    const Variant* variant = variant_by_name(name);
    if (!variant || count < 1) return 1;
    variant->draft->norm(values, weight, count, epsilon[0], out);
    return 0;
}

// Multiplies in one thread: out [rows, outputs]. Returns 0, or 1 without enough memory.
static int multiply_packed(const Variant& variant, const PackedMatrix& m, const float* values, int64_t rows, float* out) {
    void* memory = aligned_alloc(kLine, (RoundedRows::bytes(m, rows) + kLine - 1) / kLine * kLine);
    if (!memory) return 1;
    const RoundedRows rounded(m, rows, memory);
    variant.round_rows(m, 0, m.blocks(), rounded, [&](int64_t row) { return values + row * m.inputs; });
    variant.multiply(m, rounded, 0, m.tiles(), {m, out});
    free(memory);
    return 0;
}

// out [rows, outputs] = values [rows, inputs] times the transposed matrix, with the variant of this name, in one thread. `levels` and `scales`
// are in the format of MatMulNBits. Returns 0, or 1 for an unknown name, an invalid shape, or without enough memory.
EDGE_EXPORT int edge_rows_multiply(const char* name, int64_t outputs, int64_t inputs, int bits, int block, const uint8_t* levels, const float* scales,
                                   const float* values, int64_t rows, float* out) {
    const Variant* variant = variant_by_name(name);
    PackedMatrix matrix;
    if (!variant || rows < 1 || !pack(matrix, outputs, inputs, bits, block, levels, scales)) return 1;
    const int failed = multiply_packed(*variant, matrix, values, rows, out);
    release(matrix);
    return failed;
}

// The same with static scales: activations are rounded with steps[0], results with steps[1] (0: results are not rounded).
EDGE_EXPORT int edge_rows_multiply_static(const char* name, const uint8_t* levels, const float* scales, const float* steps, const float* values, int64_t outputs,
                                          int64_t inputs, int64_t bits, int64_t block, int64_t rows, float* out) {
    const Variant* variant = variant_by_name(name);
    PackedMatrix m;
    if (!variant || rows < 1 || !(steps[0] > 0) || !(steps[1] >= 0) || !fits(outputs, inputs, bits, block)) return 1;
    if (!pack(m, outputs, inputs, static_cast<int>(bits), static_cast<int>(block), levels, scales, steps[0])) return 1;
    void* memory = aligned_alloc(kLine, (StaticRows::bytes(m, rows) + kLine - 1) / kLine * kLine);
    if (memory) {
        const StaticRows rounded(m, rows, memory);
        variant->round_rows(rounded.parts_of, 0, rounded.parts_of.blocks(), rounded.parts, [&](int64_t row) { return values + row * m.inputs; });
        rounded.join(m);
        multiply_static(*variant, m, rounded, 0, m.tiles(), {m, out}, steps[1]);
        free(memory);
    }
    release(m);
    return !memory;
}

// The same with weights in a type of GGUF files, by its number in enum ggml_type; also returns 1 for a type that no kernel supports.
EDGE_EXPORT int edge_rows_multiply_gguf(const char* name, int type, int64_t outputs, int64_t inputs, size_t row_bytes, const void* data,
                                        const float* values, int64_t rows, float* out) {
    const Variant* variant = variant_by_name(name);
    ggml::Tensor weights = {};
    weights.type = type;
    weights.ne[0] = inputs, weights.ne[1] = outputs, weights.ne[2] = weights.ne[3] = 1;
    weights.nb[1] = row_bytes;
    if (!variant || rows < 1 || !ggml::packs(weights)) return 1;
    weights.data = aligned_alloc(kLine, (ggml::packed_bytes(weights) + kLine - 1) / kLine * kLine);
    if (!weights.data) return 1;
    ggml::pack_weights(weights, data, weights.data);
    const int failed = multiply_packed(*variant, ggml::packed_matrix(weights), values, rows, out);
    free(weights.data);
    return failed;
}

// out [rows, outputs] = values [rows, inputs] times the transposed float matrix [outputs, inputs], with the variant of this name, in one thread.
// `type`: 0 float32, 1 float16, 2 bfloat16. Returns 0, or 1 for an unknown name, or an invalid type or shape.
EDGE_EXPORT int edge_rows_multiply_floats(const char* name, const char* weights, const float* values, int64_t type, int64_t outputs, int64_t inputs,
                                          int64_t rows, float* out) {
    const Variant* variant = variant_by_name(name);
    const auto fits = [](int64_t size) { return size >= 1 && size <= int64_t{1} << 31; };
    if (!variant || type < 0 || type > 2 || !fits(outputs) || !fits(inputs) || !fits(rows)) return 1;
    const size_t size = type == 0 ? 4 : 2;
    const FloatProduct product = {static_cast<FloatType>(type), weights, static_cast<size_t>(inputs) * size, inputs,
                                  reinterpret_cast<const char*>(values), static_cast<size_t>(inputs) * 4, rows, out, outputs};
    variant->multiply_floats(product, 0, outputs);
    return 0;
}
