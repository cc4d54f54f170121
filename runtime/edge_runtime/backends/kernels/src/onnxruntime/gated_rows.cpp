// onnxruntime's operator edge.mtp::GatedRows: gelu(gates) * values, where [gates, values] are the two halves of a MatMulRows. Neither half is
// ever in memory as a whole: for wide layers that traffic costs more than the products.
#include <stdlib.h>

#include "onnxruntime/product.h"

namespace edge {
namespace {

using namespace ort;

constexpr int64_t kWidth = kTilesAtOnce * kTile;

// Some outputs of both halves.
void gate_chunk(void* data, size_t chunk) {
    Product& product = *static_cast<Product*>(data);
    const Weights& weights = product.weights;
    const int64_t rows = product.rows.rows, first = static_cast<int64_t>(chunk) * kTilesAtOnce, other = first + product.outputs / kTile;
    float* out = product.out + first * kTile;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < kWidth; i += kTile) __builtin_prefetch(out + r * product.outputs + i, 1, 3);
    alignas(kLine) float few[2 * kFewRows * kWidth];
    float* gates = rows <= kFewRows ? few : static_cast<float*>(malloc(static_cast<size_t>(2 * rows * kWidth) * sizeof(float)));
    if (!gates) {
        __atomic_store_n(&product.failed, true, __ATOMIC_RELAXED);
        return;
    }
    float* values = gates + rows * kWidth;
    weights.variant->multiply(weights.matrix, product.rows, first, first + kTilesAtOnce, {gates, kWidth, first});
    weights.variant->multiply(weights.matrix, product.rows, other, other + kTilesAtOnce, {values, kWidth, other});
    for (int64_t r = 0; r < rows; r++) weights.variant->gate(gates + r * kWidth, values + r * kWidth, out + r * product.outputs, kWidth);
    if (gates != few) free(gates);
}

Status* create(const Op*, Table api, const KernelInfo* info, void** out) {
    void* made = nullptr;
    EDGE_TRY(create_weights(api, info, &made));
    if (static_cast<Weights*>(made)->matrix.outputs % (2 * kWidth)) {
        destroy_weights(made);
        return create_status(api, kFail, "GatedRows: N must be a multiple of 128");
    }
    *out = made;
    return nullptr;
}

Status* compute(void* kernel, KernelContext* context) {
    const Weights& weights = *static_cast<Weights*>(kernel);
    const int64_t outputs = weights.matrix.outputs / 2;
    return multiply_input(weights, context, outputs, outputs / kWidth, gate_chunk);
}

const char* op_name(const Op*) { return "GatedRows"; }

}  // namespace

constexpr Op ort::kGatedRows = operator_of({op_name, product_inputs, product_input, one_output, create, compute, destroy_weights});

}  // namespace edge
