// onnxruntime's operator edge.mtp::MatMulStatic: a product of weights with one scale per output, and activations that are rounded to int8 with a
// static scale, fixed in training. Results are rounded in the same way. Integers are added over a whole row, which is exact in any order.
#include <stdlib.h>

#include "onnxruntime/memory.h"
#include "onnxruntime/product.h"
#include "pack.h"
#include "pieces.h"
#include "static_rows.h"

namespace edge {
namespace {

using namespace ort;

struct StaticWeights {
    Weights weights;
    float output_scale;  // 0: results are not rounded
};

struct StaticProduct {
    const StaticWeights& node;
    StaticRows rows;
    float* out;
};

void multiply_piece(void* data, size_t piece) {
    const StaticProduct& job = *static_cast<StaticProduct*>(data);
    const Weights& weights = job.node.weights;
    const PackedMatrix& m = weights.matrix;
    const int64_t tiles = tiles_of_piece(m), first = static_cast<int64_t>(piece) * tiles, last = first + tiles < m.tiles() ? first + tiles : m.tiles();
    multiply_static(*weights.variant, m, job.rows, first, last, {m, job.out}, job.node.output_scale);
}

void destroy(void* kernel) {
    release(static_cast<StaticWeights*>(kernel)->weights.matrix);
    free(kernel);
}

Status* create_node(Table api, const KernelInfo* info, StaticWeights& node) {
    float scale;
    EDGE_TRY(attribute(api, info, "input_scale", &scale));
    EDGE_TRY(attribute(api, info, "output_scale", &node.output_scale));
    if (!(scale > 0) || !(node.output_scale >= 0)) return create_status(api, kFail, "MatMulStatic: scales of activations must be positive");
    return create_weights(api, info, kOwnWeights, node.weights, scale);
}

Status* create(const Op*, Table api, const KernelInfo* info, void** out) {
    StaticWeights* node = static_cast<StaticWeights*>(calloc(1, sizeof(StaticWeights)));
    if (!node) return create_status(api, kFail, "out of memory");
    Status* status = create_node(api, info, *node);
    if (status) destroy(node);
    else *out = node;
    return status;
}

Status* compute(void* kernel, KernelContext* context) {
    const StaticWeights& node = *static_cast<StaticWeights*>(kernel);
    const Table api = node.weights.api;
    const PackedMatrix& m = node.weights.matrix;
    InputRows input;
    EDGE_TRY(read_rows(api, context, m.inputs, m.outputs, input));
    if (input.rows == 0) return nullptr;
    char* memory = scratch(StaticRows::bytes(m, input.rows));
    if (!memory) return create_status(api, kFail, "out of memory");
    StaticProduct job = {node, {m, input.rows, memory}, input.out};
    const Weights in_parts = {api, node.weights.variant, job.rows.parts_of};
    Status* status = round_all({in_parts, job.rows.parts, nullptr}, input.values, context);
    if (!status) {
        job.rows.join(m);
        const int64_t tiles = tiles_of_piece(m), pieces = (m.tiles() + tiles - 1) / tiles;
        status = parallel_for(api, context, multiply_piece, static_cast<size_t>(pieces), 0, &job);
    }
    give_back_scratch(memory);
    return status;
}

const char* op_name(const Op*) { return "MatMulStatic"; }
size_t inputs(const Op*) { return 3; }

}  // namespace

constexpr Op ort::kMatMulStatic = operator_of({op_name, inputs, product_input, one_output, create, compute, destroy});

}  // namespace edge
