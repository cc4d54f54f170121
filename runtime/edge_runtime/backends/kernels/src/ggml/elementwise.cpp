#include "elementwise.h"

namespace edge::ggml {
namespace {

constexpr int64_t kValues = kLine / sizeof(float);  // threads take whole cache lines, so that no two write to the same one

struct Row {
    int64_t second, third, fourth;
};

const float* values_of(const Tensor& t, const Row& row) {
    return reinterpret_cast<const float*>(static_cast<const char*>(t.data) + static_cast<size_t>(row.second) * t.nb[1] +
                                          static_cast<size_t>(row.third) * t.nb[2] + static_cast<size_t>(row.fourth) * t.nb[3]);
}

bool rows_of_floats(const Tensor* t) { return t && t->type == kF32 && t->nb[0] == 4 && t->nb[1] % 4 == 0 && t->nb[2] % 4 == 0 && t->nb[3] % 4 == 0; }

bool same_rows(const Tensor& one, const Tensor& other) {
    return one.ne[1] == other.ne[1] && one.ne[2] == other.ne[2] && one.ne[3] == other.ne[3];
}

bool is_gate(const Tensor& op) {
    if (op.op != kGlu || op.op_params[0] != kGeglu || !rows_of_floats(&op) || !rows_of_floats(op.src[0]) || !same_rows(op, *op.src[0])) return false;
    const Tensor* values = op.src[1];
    if (!values) return op.src[0]->ne[0] == 2 * op.ne[0];
    return rows_of_floats(values) && same_rows(op, *values) && op.src[0]->ne[0] == op.ne[0] && values->ne[0] == op.ne[0];
}

bool is_tanh(const Tensor& op) {
    return op.op == kUnary && op.op_params[0] == kTanh && rows_of_floats(&op) && rows_of_floats(op.src[0]) && same_rows(op, *op.src[0]) &&
           op.src[0]->ne[0] == op.ne[0];
}

void compute_row(const Variant& variant, const Tensor& op, const Row& row, int64_t first, int64_t count) {
    float* out = const_cast<float*>(values_of(op, row)) + first;
    const float* from = values_of(*op.src[0], row) + first;
    if (op.op == kUnary) return variant.tanh(from, out, count);
    if (op.src[1]) return variant.gate(from, values_of(*op.src[1], row) + first, out, count);
    const bool swapped = op.op_params[1] != 0;
    variant.gate(from + (swapped ? op.ne[0] : 0), from + (swapped ? 0 : op.ne[0]), out, count);
}

}  // namespace

bool is_elementwise(const Tensor& op) { return is_gate(op) || is_tanh(op); }

void compute_elementwise(const Variant& variant, const Work& work, const Tensor& op) {
    const int64_t lines = (op.ne[0] + kValues - 1) / kValues, end = lines * (work.thread + 1) / work.threads * kValues;
    const int64_t first = lines * work.thread / work.threads * kValues, last = end < op.ne[0] ? end : op.ne[0];
    if (first >= last) return;
    for (int64_t fourth = 0; fourth < op.ne[3]; fourth++)
        for (int64_t third = 0; third < op.ne[2]; third++)
            for (int64_t second = 0; second < op.ne[1]; second++) compute_row(variant, op, {second, third, fourth}, first, last - first);
}

}  // namespace edge::ggml
