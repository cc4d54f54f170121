// onnxruntime's operator edge.mtp::MatMulRows: MatMulNBits without zero points, by the kernels of this library.
#include "onnxruntime/product.h"

namespace edge {
namespace {

using namespace ort;

void multiply_chunk(void* data, size_t chunk) {
    const Product& product = *static_cast<Product*>(data);
    const int64_t first = static_cast<int64_t>(chunk) * kTilesAtOnce;
    product.weights.variant->multiply(product.weights.matrix, product.rows, first, first + kTilesAtOnce, {product.weights.matrix, product.out});
}

Status* create(const Op*, Table api, const KernelInfo* info, void** out) { return create_weights(api, info, out); }

Status* compute(void* kernel, KernelContext* context) {
    const Weights& weights = *static_cast<Weights*>(kernel);
    return multiply_input(weights, context, weights.matrix.outputs, weights.matrix.tiles() / kTilesAtOnce, multiply_chunk);
}

const char* op_name(const Op*) { return "MatMulRows"; }

}  // namespace

constexpr Op ort::kMatMulRows = operator_of({op_name, product_inputs, product_input, one_output, create, compute, destroy_weights});

}  // namespace edge
