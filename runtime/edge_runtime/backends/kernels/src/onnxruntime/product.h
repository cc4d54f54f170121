// Common code of operators with packed weights: the weights, which are packed once when the graph is opened, and their product with rows of
// activations, whose tiles the session's threads share.
#pragma once
#include "onnxruntime/operators.h"
#include "variants.h"

namespace edge::ort {

struct Weights {
    Table api;
    const Variant* variant;
    PackedMatrix matrix;
    float cap = 0;  // results become cap * tanh(result); 0: they do not
};

// Where a node has its weights: the names of its attributes, and the index of the input with the levels. The next input has the scales.
struct WeightNames {
    const char *inputs, *outputs, *bits, *block;
    size_t levels;
};
constexpr WeightNames kOwnWeights = {"K", "N", "bits", "block_size", 1};

// Packs a node's weights, or maps them from this thread's packed file (pack.h, pack_named). `static_scale` of activations; 0: they have their own scales.
Status* create_weights(Table api, const KernelInfo* info, const WeightNames& names, Weights& weights, float static_scale = 0);

// The rows of a node's first input, and the memory of its output.
struct InputRows {
    const float* values;
    float* out;
    int64_t rows;
};
// A row of the first input has `inputs` values, one of the output `outputs`. If there are no rows, there is no memory.
Status* read_rows(Table api, KernelContext* context, int64_t inputs, int64_t outputs, InputRows& out);

// A running product; any thread may multiply any tile.
struct Product {
    const Weights& weights;
    RoundedRows rows;
    float* out;
};
Status* round_all(const Product& product, const float* values, KernelContext* context);
Status* multiply_all(const Product& product, KernelContext* context);

inline Type product_input(const Op*, size_t index) { return index % 2 ? kUint8 : kFloat; }

}  // namespace edge::ort
