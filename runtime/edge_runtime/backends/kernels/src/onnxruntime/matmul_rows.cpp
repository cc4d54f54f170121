// onnxruntime's operators edge.mtp::MatMulRows, which is MatMulNBits without zero points, and MatMulCapRows, which is cap * tanh of that product.
#include <stdlib.h>

#include "onnxruntime/memory.h"
#include "onnxruntime/product.h"
#include "pack.h"

namespace edge {
namespace {

using namespace ort;

void destroy(void* kernel) {
    release(static_cast<Weights*>(kernel)->matrix);
    free(kernel);
}

Status* create(const Op*, Table api, const KernelInfo* info, void** out) {
    Weights* weights = static_cast<Weights*>(calloc(1, sizeof(Weights)));
    if (!weights) return create_status(api, kFail, "out of memory");
    Status* status = create_weights(api, info, kOwnWeights, *weights);
    if (status) destroy(weights);
    else *out = weights;
    return status;
}

Status* create_capped(const Op* op, Table api, const KernelInfo* info, void** out) {
    float cap;
    EDGE_TRY(attribute(api, info, "cap", &cap));
    if (!(cap > 0)) return create_status(api, kFail, "MatMulCapRows: cap must be positive");
    EDGE_TRY(create(op, api, info, out));
    static_cast<Weights*>(*out)->cap = cap;
    return nullptr;
}

Status* compute(void* kernel, KernelContext* context) {
    const Weights& weights = *static_cast<Weights*>(kernel);
    const PackedMatrix& m = weights.matrix;
    InputRows input;
    EDGE_TRY(read_rows(weights.api, context, m.inputs, m.outputs, input));
    if (input.rows == 0) return nullptr;
    char* memory = scratch(RoundedRows::bytes(m, input.rows));
    if (!memory) return create_status(weights.api, kFail, "out of memory");
    const Product product = {weights, {m, input.rows, memory}, input.out};
    Status* status = round_all(product, input.values, context);
    if (!status) status = multiply_all(product, context);
    give_back_scratch(memory);
    return status;
}

const char* op_name(const Op*) { return "MatMulRows"; }
const char* capped_name(const Op*) { return "MatMulCapRows"; }
size_t inputs(const Op*) { return 3; }

}  // namespace

constexpr Op ort::kMatMulRows = operator_of({op_name, inputs, product_input, one_output, create, compute, destroy});
constexpr Op ort::kMatMulCapRows = operator_of({capped_name, inputs, product_input, one_output, create_capped, compute, destroy});

}  // namespace edge
