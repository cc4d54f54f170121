// The operations of a draft step besides its matrix products, compiled for each instruction set (per_isa/draft_steps.h).
#pragma once
#include "layout.h"

namespace edge {

// How a target stores its K/V rows: float32, float16, blocks of 8 or 4 bits as in GGUF files, or int8 with a scale per channel.
enum class RowType : int64_t { kFloat, kHalf, kQ8, kQ4, kInt8 };
constexpr int64_t kRowTypes = 5;
constexpr int64_t values_of_unit(RowType type) { return type == RowType::kQ8 || type == RowType::kQ4 ? 32 : 1; }
constexpr int64_t bytes_of_unit(RowType type) {
    return type == RowType::kFloat ? 4 : type == RowType::kHalf ? 2 : type == RowType::kQ8 ? 34 : type == RowType::kQ4 ? 18 : 1;
}

// The rows of one K/V head that a draft attends to: the first `count` rows, or those whose numbers are in `cells`.
struct VisibleRows {
    RowType type;
    const char *keys, *values;
    size_t key_step, value_step;  // bytes from row to row
    const int32_t* cells;
    int64_t count, dim;  // dim is a multiple of 16
};

constexpr int64_t kDraftQueries = 4;  // the most queries of a call
constexpr int64_t kDraftSpan = 128;   // rows of a span; the sums of spans are merged in order

struct DraftSteps {
    // out = x * weight / sqrt(mean(x^2) + epsilon); `out` may be x.
    void (*norm)(const float* x, const float* weight, int64_t count, float epsilon, float* out);
    // x = (x + norm(y)) * factor
    void (*add_norm)(float* x, const float* y, const float* weight, int64_t count, float epsilon, float factor);
    // Rotates the pairs (i, i + dim / 2).
    void (*rotate)(float* x, int64_t dim, const float* cosine, const float* sine);
    // Attends from up to kDraftQueries queries [dim] to the rows [first, last), at least one row. States are as in Attention. The order of sums
    // is not a verify's: drafts need not be exact, they only need the same numbers on all instruction sets.
    void (*attend)(const VisibleRows&, const float* queries, int64_t count, int64_t first, int64_t last, float* states);
    // Writes the indices of the `top` greatest of `count` values in descending order, each once. Overwrites `values`, which must have room for
    // whole lines; `maxima` needs room for one value per 16.
    void (*greatest)(float* values, int64_t count, int64_t top, float* maxima, int32_t* places);
    // Computes the greatest of `count` values, and the sum of e^(value - greatest).
    void (*softmax)(const float* values, int64_t count, float& greatest, float& sum);
    // Returns the first index from `from` on with this value, or `count`.
    int64_t (*find)(const float* values, int64_t count, float value, int64_t from);
};

}  // namespace edge
