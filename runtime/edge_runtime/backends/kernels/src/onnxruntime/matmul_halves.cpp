// onnxruntime's operator edge.mtp::MatMulHalves: rows times the transposed matrix of float16 weights, which are not packed.
#include <stdlib.h>

#include "onnxruntime/product.h"

namespace edge {
namespace {

using namespace ort;

constexpr int64_t kChunk = 4 * kTile;  // outputs that a thread computes at a time

struct Halves {
    Table api;
    const Variant* variant;
};

struct HalvesProduct {
    const Variant& variant;
    FloatProduct product;
    int64_t outputs;
};

void multiply_chunk(void* data, size_t chunk) {
    const HalvesProduct& job = *static_cast<HalvesProduct*>(data);
    const int64_t first = static_cast<int64_t>(chunk) * kChunk, last = first + kChunk;
    job.variant.multiply_floats(job.product, first, last < job.outputs ? last : job.outputs);
}

Status* create(const Op*, Table api, const KernelInfo*, void** out) {
    Halves* halves = static_cast<Halves*>(malloc(sizeof(Halves)));
    if (!halves) return create_status(api, kFail, "out of memory");
    *halves = {api, chosen_variant()};
    *out = halves;
    return nullptr;
}

Status* compute(void* kernel, KernelContext* context) {
    const Halves& halves = *static_cast<Halves*>(kernel);
    const Table api = halves.api;
    Shape shape;
    const char* weights = nullptr;
    EDGE_TRY(read_input(api, context, 1, shape, &weights));
    if (shape.rank != 2 || shape.sizes[0] < 1 || shape.sizes[1] < 1 || !halves.variant)
        return create_status(api, kFail, "MatMulHalves: weights must be a matrix, and this processor must have kernels");
    const int64_t outputs = shape.sizes[0], columns = shape.sizes[1];
    InputRows input;
    EDGE_TRY(read_rows(api, context, columns, outputs, input));
    if (input.rows == 0) return nullptr;
    const FloatProduct product = {FloatType::kF16, weights, static_cast<size_t>(columns) * 2, columns, reinterpret_cast<const char*>(input.values),
                                  static_cast<size_t>(columns) * 4, input.rows, input.out, outputs};
    HalvesProduct job = {*halves.variant, product, outputs};
    return parallel_for(api, context, multiply_chunk, static_cast<size_t>((outputs + kChunk - 1) / kChunk), 0, &job);
}

const char* op_name(const Op*) { return "MatMulHalves"; }
size_t inputs(const Op*) { return 2; }
Type input_type(const Op*, size_t index) { return index ? kHalf : kFloat; }

}  // namespace

constexpr Op ort::kMatMulHalves = operator_of({op_name, inputs, input_type, one_output, create, compute, free});

}  // namespace edge
