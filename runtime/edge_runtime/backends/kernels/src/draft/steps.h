// What a draft step does between its products, compiled for each instruction set (per_isa/draft_steps.h).
#pragma once
#include "layout.h"

namespace edge {

// How a target stores its K/V rows: floats, float16, blocks of 8 or 4 bits as in GGUF files, or int8 with a scale for each channel.
enum class RowType : int64_t { kFloat, kHalf, kQ8, kQ4, kInt8 };
constexpr int64_t kRowTypes = 5;
constexpr int64_t values_of_unit(RowType type) { return type == RowType::kQ8 || type == RowType::kQ4 ? 32 : 1; }
constexpr int64_t bytes_of_unit(RowType type) {
    return type == RowType::kFloat ? 4 : type == RowType::kHalf ? 2 : type == RowType::kQ8 ? 34 : type == RowType::kQ4 ? 18 : 1;
}

// The rows of one K/V head that a draft attends to: all `count` from the first on, or those that `cells` numbers.
struct VisibleRows {
    RowType type;
    const char *keys, *values;
    size_t key_step, value_step;  // bytes from row to row
    const int32_t* cells;
    int64_t count, dim;  // a multiple of 16
};

constexpr int64_t kDraftQueries = 4;  // of one call
constexpr int64_t kDraftSpan = 128;   // rows whose sums are merged in order

struct DraftSteps {
    // out = x * weight / sqrt(mean(x^2) + epsilon); `out` may be x.
    void (*norm)(const float* x, const float* weight, int64_t count, float epsilon, float* out);
    // x = (x + norm(y)) * factor
    void (*add_norm)(float* x, const float* y, const float* weight, int64_t count, float epsilon, float factor);
    // Turns the pairs (i, i + dim / 2).
    void (*rotate)(float* x, int64_t dim, const float* cosine, const float* sine);
    // Attends from up to kDraftQueries queries [dim] to the rows [first, last), of which there is one at least; states as those of Attention.
    // Sums run in another order than a verify's: a draft needs no exactness, only the same numbers on all instruction sets.
    void (*attend)(const VisibleRows&, const float* queries, int64_t count, int64_t first, int64_t last, float* states);
    // The places of the `top` greatest of `count` values in descending order, each once; `values` are lost. There is room for whole lines of
    // `values`, and for one of `maxima` for each 16 of them.
    void (*greatest)(float* values, int64_t count, int64_t top, float* maxima, int32_t* places);
    // The greatest of `count` values, and the sum of e^(value - greatest).
    void (*softmax)(const float* values, int64_t count, float& greatest, float& sum);
    // The first place from `from` on that holds `value`; `count` where none does.
    int64_t (*find)(const float* values, int64_t count, float value, int64_t from);
};

}  // namespace edge
