// What operators on packed weights share: the weights, packed once when the graph is opened, and their product with rows of activations, whose
// tiles the session's own threads share.
#pragma once
#include "onnxruntime/operators.h"
#include "variants.h"

namespace edge::ort {

struct Weights {
    Table api;
    const Variant* variant;
    PackedMatrix matrix;
    float cap = 0;  // of the results: cap * tanh(result); 0: none
};

// Where a node has weights: the names of its attributes, and the input with the levels, behind which come the scales.
struct WeightNames {
    const char *inputs, *outputs, *bits, *block;
    size_t levels;
};
constexpr WeightNames kOwnWeights = {"K", "N", "bits", "block_size", 1};

// Packs such weights, for activations of a static scale or (0) of their own, or maps them from the packed file of this thread (pack.h, pack_named).
Status* create_weights(Table api, const KernelInfo* info, const WeightNames& names, Weights& weights, float static_scale = 0);

// The rows of a node's first input, and the memory of its output.
struct InputRows {
    const float* values;
    float* out;
    int64_t rows;
};
// `inputs` values to a row of the first input, `outputs` to one of the output. Without rows there is no memory.
Status* read_rows(Table api, KernelContext* context, int64_t inputs, int64_t outputs, InputRows& out);

// A product that runs: tiles are multiplied by any thread.
struct Product {
    const Weights& weights;
    RoundedRows rows;
    float* out;
};
Status* round_all(const Product& product, const float* values, KernelContext* context);
Status* multiply_all(const Product& product, KernelContext* context);

inline Type product_input(const Op*, size_t index) { return index % 2 ? kUint8 : kFloat; }

}  // namespace edge::ort
