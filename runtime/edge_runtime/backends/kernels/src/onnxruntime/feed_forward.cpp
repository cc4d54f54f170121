// onnxruntime's operator edge.mtp::FeedForwardRows: the product with [gates, values], gelu(gates) * values, and the product of that. The values
// between the products are never in main memory as floats: a thread rounds outputs of the first product to inputs of the second while they are in
// the first level cache. In wide layers, writing and reading them would cost more than the products.
#include <stdlib.h>

#include "gated.h"
#include "onnxruntime/memory.h"
#include "onnxruntime/product.h"
#include "pack.h"
#include "pieces.h"

namespace edge {
namespace {

using namespace ort;

constexpr WeightNames kSecond = {"second_K", "second_N", "second_bits", "second_block_size", 3};

struct FeedForward {
    Weights gated, second;

    int64_t width() const { return gated_width(second.matrix.block); }
    int64_t chunks() const { return second.matrix.inputs / width(); }
    // The number of chunks in a piece.
    int64_t chunks_at_once() const { return parts_of_piece(chunks(), 2 * width() / kTile * gated.matrix.tile_bytes()); }
};

struct Gating {
    const FeedForward& layer;
    RoundedRows rows, hidden;
};

// Computes and rounds some outputs of both halves.
void gate_piece(void* data, size_t piece) {
    const Gating& job = *static_cast<Gating*>(data);
    const PackedMatrix &m = job.layer.gated.matrix, &next = job.layer.second.matrix;
    const Variant& variant = *job.layer.gated.variant;
    const int64_t width = job.layer.width(), step = job.layer.chunks_at_once(), begin = static_cast<int64_t>(piece) * step;
    for (int64_t chunk = begin; chunk < begin + step && chunk < job.layer.chunks(); chunk++) {
        const int64_t first = chunk * width / kTile;
        each_gated_panel(variant, {m, m, next.inputs / kTile}, job.rows, first, width, [&](int64_t p, const float* gated) {
            round_gated(variant, gated, first, width, next, job.hidden.panel(next, p));
        });
    }
}

void destroy(void* kernel) {
    FeedForward* layer = static_cast<FeedForward*>(kernel);
    release(layer->gated.matrix);
    release(layer->second.matrix);
    free(layer);
}

Status* create_both(Table api, const KernelInfo* info, FeedForward& layer) {
    EDGE_TRY(create_weights(api, info, kOwnWeights, layer.gated));
    EDGE_TRY(create_weights(api, info, kSecond, layer.second));
    const int64_t hidden = layer.second.matrix.inputs;
    if (layer.gated.matrix.outputs != 2 * hidden || hidden % layer.width()) return create_status(api, kFail, "FeedForwardRows: second_K must be half of N, and a multiple of 64");
    return nullptr;
}

Status* create(const Op*, Table api, const KernelInfo* info, void** out) {
    FeedForward* layer = static_cast<FeedForward*>(calloc(1, sizeof(FeedForward)));
    if (!layer) return create_status(api, kFail, "out of memory");
    Status* status = create_both(api, info, *layer);
    if (status) destroy(layer);
    else *out = layer;
    return status;
}

Status* compute(void* kernel, KernelContext* context) {
    const FeedForward& layer = *static_cast<FeedForward*>(kernel);
    const Table api = layer.gated.api;
    const PackedMatrix &m = layer.gated.matrix, &next = layer.second.matrix;
    InputRows input;
    EDGE_TRY(read_rows(api, context, m.inputs, next.outputs, input));
    if (input.rows == 0) return nullptr;
    const size_t bytes = (RoundedRows::bytes(m, input.rows) + kLine - 1) / kLine * kLine;
    char* memory = scratch(bytes + RoundedRows::bytes(next, input.rows));
    if (!memory) return create_status(api, kFail, "out of memory");
    const Product gated = {layer.gated, {m, input.rows, memory}, nullptr}, second = {layer.second, {next, input.rows, memory + bytes}, input.out};
    Gating job = {layer, gated.rows, second.rows};
    Status* status = round_all(gated, input.values, context);
    const int64_t step = layer.chunks_at_once(), pieces = (layer.chunks() + step - 1) / step;
    if (!status) status = parallel_for(api, context, gate_piece, static_cast<size_t>(pieces), 0, &job);
    if (!status) status = multiply_all(second, context);
    give_back_scratch(memory);
    return status;
}

const char* op_name(const Op*) { return "FeedForwardRows"; }
size_t inputs(const Op*) { return 5; }

}  // namespace

constexpr Op ort::kFeedForwardRows = operator_of({op_name, inputs, product_input, one_output, create, compute, destroy});

}  // namespace edge
