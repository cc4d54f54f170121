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
};

// A product that runs: its chunks are multiplied by any thread.
struct Product {
    const Weights& weights;
    RoundedRows rows;
    const float* values;
    float* out;
    int64_t outputs;  // of a row of `out`
    bool failed = false;  // a chunk had no memory
};
using MultiplyChunk = void (*)(void* product, size_t chunk);

// Packs the node's weights and scales; `kernel` gets a Weights.
Status* create_weights(Table api, const KernelInfo* info, void** kernel);
void destroy_weights(void* kernel);
// Rounds the rows of the first input and runs all chunks; the output's rows are so long.
Status* multiply_input(const Weights& weights, KernelContext* context, int64_t outputs, int64_t chunks, MultiplyChunk multiply);

inline Type product_input(const Op*, size_t index) { return index == 1 ? kUint8 : kFloat; }
inline size_t product_inputs(const Op*) { return 3; }

}  // namespace edge::ort
