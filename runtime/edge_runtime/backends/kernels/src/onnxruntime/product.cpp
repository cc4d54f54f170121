#include "onnxruntime/product.h"

#include <stdlib.h>
#include <string.h>

#include "pack.h"
#include "packed_file.h"
#include "pieces.h"
#include "source_pages.h"

namespace edge::ort {
namespace {

constexpr int64_t kPiece = 1 << 14;  // activations that a thread rounds at a time

Status* failed(Table api, const char* message) { return create_status(api, kFail, message); }

Status* constant_of(Table api, const KernelInfo* info, size_t index, size_t wanted, const void** out) {
    int constant = 0;
    const Value* value = nullptr;
    EDGE_TRY(constant_input(api, info, index, &constant, &value));
    if (!constant || !value) return failed(api, "weights and scales must be constants");
    ShapeInfo* shape = nullptr;
    EDGE_TRY(shape_of(api, value, &shape));
    size_t count = 0;
    Status* status = element_count(api, shape, &count);
    release_shape(api, shape);
    if (status) return status;
    if (count != wanted) return failed(api, "weights or scales have another size than K, N, bits and block_size say");
    void* data = nullptr;
    EDGE_TRY(tensor_data(api, const_cast<Value*>(value), &data));
    *out = data;
    return nullptr;
}

// Joins the names of the inputs for levels and for scales, which identify the weights in a graph; "" if that is too long for a packed file.
void name_of(Table api, const KernelInfo* info, size_t levels, char (&name)[kMaxPackedName + 1]) {
    size_t size = sizeof name;
    Status* status = input_name(api, info, levels, name, &size);
    if (!status) {
        const size_t used = strlen(name);
        name[used] = ' ';
        size = sizeof name - used - 1;
        if (size) status = input_name(api, info, levels + 1, name + used + 1, &size);
        if (size && !status) return;
    }
    if (status) release_status(api, status);
    name[0] = 0;
}

// Rounds some blocks of all rows.
struct Rounding {
    const Product& product;
    const float* values;
    int64_t pieces;
};

void round_piece(void* data, size_t piece) {
    const Rounding& job = *static_cast<Rounding*>(data);
    const PackedMatrix& m = job.product.weights.matrix;
    const int64_t at = static_cast<int64_t>(piece), first = m.blocks() * at / job.pieces, last = m.blocks() * (at + 1) / job.pieces;
    job.product.weights.variant->round_rows(m, first, last, job.product.rows, [&](int64_t row) { return job.values + row * m.inputs; });
}

void multiply_piece(void* data, size_t piece) {
    const Product& product = *static_cast<Product*>(data);
    const PackedMatrix& m = product.weights.matrix;
    const int64_t tiles = tiles_of_piece(m), first = static_cast<int64_t>(piece) * tiles, last = first + tiles < m.tiles() ? first + tiles : m.tiles();
    product.weights.variant->multiply(m, product.rows, first, last, {m, product.out});
    if (first * kTile >= m.outputs) return;  // only padding
    const float cap = product.weights.cap;
    const int64_t end = last * kTile, count = (end < m.outputs ? end : m.outputs) - first * kTile;
    for (int64_t row = 0; row < product.rows.rows && cap > 0; row++) {  // here, while the results are in the first level cache
        float* results = product.out + row * m.outputs + first * kTile;
        product.weights.variant->tanh(results, results, count);
        for (int64_t i = 0; i < count; i++) results[i] *= cap;
    }
}

}  // namespace

Status* create_weights(Table api, const KernelInfo* info, const WeightNames& names, Weights& weights, float static_scale) {
    int64_t inputs, outputs, bits, block;
    EDGE_TRY(attribute(api, info, names.inputs, &inputs));
    EDGE_TRY(attribute(api, info, names.outputs, &outputs));
    EDGE_TRY(attribute(api, info, names.bits, &bits));
    EDGE_TRY(attribute(api, info, names.block, &block));
    if (!fits(outputs, inputs, bits, block)) return failed(api, "no kernel takes K, N, bits or block_size");
    const size_t bytes = static_cast<size_t>(outputs * (inputs * bits / 8));
    const void *levels, *scales;
    EDGE_TRY(constant_of(api, info, names.levels, bytes, &levels));
    EDGE_TRY(constant_of(api, info, names.levels + 1, static_cast<size_t>(outputs * (inputs / block)), &scales));
    weights = {api, chosen_variant(), {}};
    char name[kMaxPackedName + 1];
    name_of(api, info, names.levels, name);
    if (!weights.variant || !pack_named(name, weights.matrix, outputs, inputs, static_cast<int>(bits), static_cast<int>(block), static_cast<const uint8_t*>(levels), static_cast<const float*>(scales), static_scale))
        return failed(api, "out of memory, no kernel for this processor, or more than a scale for each output");
    give_back(levels, bytes);  // released, not freed: the embedding may share these levels with the head, and is still looked up in them
    return nullptr;
}

Status* read_rows(Table api, KernelContext* context, int64_t inputs, int64_t outputs, InputRows& out) {
    Shape shape;
    EDGE_TRY(read_input(api, context, 0, shape, &out.values));
    if (shape.rank < 1) return failed(api, "the input is a scalar");
    int64_t& last = shape.sizes[shape.rank - 1];
    if (last != inputs) return failed(api, "the input's last dimension is not K");
    out.rows = 1;
    for (size_t i = 0; i + 1 < shape.rank; i++) out.rows *= shape.sizes[i];
    last = outputs;
    Value* result = nullptr;
    EDGE_TRY(output(api, context, 0, shape.sizes, shape.rank, &result));
    if (out.rows == 0) return nullptr;
    void* to = nullptr;
    EDGE_TRY(tensor_data(api, result, &to));
    out.out = static_cast<float*>(to);
    return nullptr;
}

Status* round_all(const Product& product, const float* values, KernelContext* context) {
    const int64_t most = product.weights.matrix.blocks(), wanted = product.rows.rows * product.weights.matrix.inputs / kPiece;
    Rounding job = {product, values, wanted < 1 ? 1 : wanted < most ? wanted : most};
    if (job.pieces > 1) return parallel_for(product.weights.api, context, round_piece, static_cast<size_t>(job.pieces), 0, &job);
    round_piece(&job, 0);
    return nullptr;
}

Status* multiply_all(const Product& product, KernelContext* context) {
    const int64_t tiles = tiles_of_piece(product.weights.matrix), pieces = (product.weights.matrix.tiles() + tiles - 1) / tiles;
    return parallel_for(product.weights.api, context, multiply_piece, static_cast<size_t>(pieces), 0, const_cast<Product*>(&product));
}

}  // namespace edge::ort
