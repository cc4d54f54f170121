// NormRows(x [..., n * width], weight [width]): x / sqrt(mean(x^2) + epsilon) * weight, for each `width` values. ResidualRows(x, y, weight, factor,
// next weight): sum = (x + norm of y) * factor, and the norm of that sum; the factor [1] and the next weight are optional. For few rows, calling
// several of onnxruntime's own operators costs more than their arithmetic.
#include <stdlib.h>
#include <string.h>

#include "draft/steps.h"
#include "onnxruntime/operators.h"
#include "variants.h"

namespace edge {
namespace {

using namespace ort;

constexpr int64_t kValues = 1 << 14;  // values that a thread takes at a time

struct Norm {
    Table api;
    const DraftSteps* steps;
    float epsilon;
    int64_t width;  // size of the last dimension
};

struct Rows {
    const Norm& norm;
    const float *x = nullptr, *y = nullptr, *weight = nullptr, *next = nullptr;
    float factor = 1;
    int64_t width = 0, count = 0;
    float *sum = nullptr, *normed = nullptr;

    int64_t each() const { return width < kValues ? kValues / width : 1; }
};

void some_rows(void* data, size_t piece) {
    const Rows& rows = *static_cast<Rows*>(data);
    const DraftSteps& steps = *rows.norm.steps;
    const int64_t width = rows.width, first = static_cast<int64_t>(piece) * rows.each(), end = first + rows.each();
    for (int64_t at = first * width; at < (end < rows.count ? end : rows.count) * width; at += width) {
        if (rows.y) {
            memcpy(rows.sum + at, rows.x + at, static_cast<size_t>(width) * sizeof(float));
            steps.add_norm(rows.sum + at, rows.y + at, rows.weight, width, rows.norm.epsilon, rows.factor);
        }
        if (rows.normed) steps.norm((rows.y ? rows.sum : rows.x) + at, rows.y ? rows.next : rows.weight, width, rows.norm.epsilon, rows.normed + at);
    }
}

Status* run(Rows& rows, KernelContext* context) {
    const int64_t pieces = (rows.count + rows.each() - 1) / rows.each();
    if (rows.count > kFewRows && pieces > 1) return parallel_for(rows.norm.api, context, some_rows, static_cast<size_t>(pieces), 0, &rows);
    for (int64_t piece = 0; piece < pieces; piece++) some_rows(&rows, static_cast<size_t>(piece));
    return nullptr;
}

Status* create(const Op*, Table api, const KernelInfo* info, void** out) {
    float epsilon;
    int64_t width;
    EDGE_TRY(attribute(api, info, "epsilon", &epsilon));
    EDGE_TRY(attribute(api, info, "width", &width));
    Norm* norm = static_cast<Norm*>(malloc(sizeof(Norm)));
    if (!norm || !chosen_variant()) {
        free(norm);
        return create_status(api, kFail, "norms: out of memory, or no kernel for this processor");
    }
    *norm = {api, chosen_variant()->draft, epsilon, width};
    *out = norm;
    return nullptr;
}

Status* output_like(const Norm& norm, KernelContext* context, size_t index, const Shape& shape, float** out) {
    Value* value = nullptr;
    void* data = nullptr;
    EDGE_TRY(output(norm.api, context, index, shape.sizes, shape.rank, &value));
    if (!value) return create_status(norm.api, kFail, "norms: an output has no name");
    EDGE_TRY(tensor_data(norm.api, value, &data));
    *out = static_cast<float*>(data);
    return nullptr;
}

// Gets an input of `count` values; null if the node omits it.
Status* few_values(const Norm& norm, KernelContext* context, size_t index, int64_t count, const float** out) {
    const Value* value = nullptr;
    EDGE_TRY(input(norm.api, context, index, &value));
    if (!value) return nullptr;
    Shape shape;
    EDGE_TRY(read_input(norm.api, context, index, shape, out));
    return shape.count() == count ? nullptr : create_status(norm.api, kFail, "norms: a weight has as many values as a row, a factor has one");
}

Status* normalize(void* kernel, KernelContext* context) {
    const Norm& norm = *static_cast<Norm*>(kernel);
    Shape shape, weight;
    Rows rows = {norm};
    EDGE_TRY(read_input(norm.api, context, 0, shape, &rows.x));
    EDGE_TRY(read_input(norm.api, context, 1, weight, &rows.weight));
    rows.width = weight.count();
    // If a row contains several heads, the shape must have three dimensions.
    if (rows.width < 1 || shape.rank < 1 || shape.sizes[shape.rank - 1] != norm.width || norm.width % rows.width || (norm.width != rows.width && shape.rank != 3))
        return create_status(norm.api, kFail, "NormRows: the last dimension must be `width`, and hold whole weights");
    rows.count = shape.count() / rows.width;
    EDGE_TRY(output_like(norm, context, 0, shape, &rows.normed));
    return run(rows, context);
}

Status* add(void* kernel, KernelContext* context) {
    const Norm& norm = *static_cast<Norm*>(kernel);
    Shape shape, other;
    Rows rows = {norm};
    EDGE_TRY(read_input(norm.api, context, 0, shape, &rows.x));
    EDGE_TRY(read_input(norm.api, context, 1, other, &rows.y));
    rows.width = norm.width;
    if (rows.width < 1 || shape.rank < 1 || shape.sizes[shape.rank - 1] != rows.width || other.rank != shape.rank || memcmp(other.sizes, shape.sizes, shape.rank * sizeof(int64_t)))
        return create_status(norm.api, kFail, "ResidualRows: both inputs must have the same shape, with rows of `width`");
    const float* factor = nullptr;
    EDGE_TRY(few_values(norm, context, 2, rows.width, &rows.weight));
    EDGE_TRY(few_values(norm, context, 3, 1, &factor));
    EDGE_TRY(few_values(norm, context, 4, rows.width, &rows.next));
    size_t outputs;
    EDGE_TRY(output_count(norm.api, context, &outputs));
    if ((outputs > 1) != (rows.next != nullptr)) return create_status(norm.api, kFail, "ResidualRows: a second output goes with a second weight");
    if (factor) rows.factor = *factor;
    rows.count = shape.count() / rows.width;
    EDGE_TRY(output_like(norm, context, 0, shape, &rows.sum));
    if (rows.next) EDGE_TRY(output_like(norm, context, 1, shape, &rows.normed));
    return run(rows, context);
}

const char* norm_name(const Op*) { return "NormRows"; }
const char* residual_name(const Op*) { return "ResidualRows"; }
size_t two(const Op*) { return 2; }
size_t five(const Op*) { return 5; }
int may_lack(const Op*, size_t index) { return index > 2; }
int second_may_lack(const Op*, size_t index) { return index > 0; }

constexpr Op residual_of() {
    Op op = operator_of({residual_name, five, float_type, two, create, add, free});
    op.input_kind = may_lack, op.output_kind = second_may_lack;
    return op;
}

}  // namespace

constexpr Op ort::kNormRows = operator_of({norm_name, two, float_type, one_output, create, normalize, free});
constexpr Op ort::kResidualRows = residual_of();

}  // namespace edge
